import pytest

from agentenv.errors import UserError
from agentenv.template.dockerfile import parse
from agentenv.template.instructions import FromContext
from agentenv.template.recipe import Base, Kind, Origin, Recipe, Stage, check


def stages(text: str, **options) -> list[str]:
    return [stage.name for stage in parse(text, **options).stages]


def refused(text: str, **options) -> str:
    with pytest.raises(UserError) as caught:
        parse(text, **options)
    assert caught.value.code == "dockerfile"
    return caught.value.message


def test_one_stage_from_an_image():
    found = parse("FROM debian:12\nRUN make\n")
    (stage,) = found.stages
    assert (stage.name, stage.base) == ("0", Base(Origin.NAME, "debian:12"))
    assert found.config == {} and found.warnings == () and found.command == ""


def test_arguments_before_from_choose_the_image():
    text = "ARG V=12\nARG IMAGE=debian:${V}\nFROM ${IMAGE}\n"
    assert parse(text).stages[0].base.name == "debian:12"
    assert parse(text, arguments={"V": "13"}).stages[0].base.name == "debian:13"
    assert "names no image" in refused("ARG X\nFROM $X\n")


TREE = """FROM a AS one
FROM one AS two
FROM b AS aside
FROM c AS Three
COPY --from=two /x /
COPY --from=img:1 /y /
COPY --from=0 /z /
"""


def test_only_what_the_last_stage_stands_on_is_built():
    assert stages(TREE) == ["img:1", "one", "two", "three"]
    assert stages(TREE, target="two") == ["one", "two"]
    assert stages(TREE, target="2") == ["aside"]
    assert "no stage 'four'" in refused(TREE, target="four")
    found = parse(TREE)
    assert found.stages[2].base == Base(Origin.STAGE, "one")
    assert [step.stage for step in found.stages[3].steps] == ["two", "img:1", "one"]
    made = [
        Stage(s.name, s.base, tuple(x for x in s.steps if not isinstance(x, FromContext)))
        for s in found.stages
    ]
    check(Recipe(tuple(made)))


def test_a_stage_from_a_stage_goes_on_with_its_settings():
    found = parse(
        'FROM a AS one\nENV P=src\nARG Q=gone\nSHELL ["/bin/bash", "-c"]\nCMD x\n'
        "FROM one\nCOPY $P /\nRUN y\n"
    )
    copied, run = found.stages[1].steps
    assert copied.sources == ("src",) and run.args == ("/bin/bash", "-c", "y")
    assert found.config == {"cmd": ["/bin/bash", "-c", "x"]}
    assert "$Q is not set" in refused("FROM a AS one\nARG Q=gone\nFROM one\nCOPY $Q /\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM a\nONBUILD RUN x\n", "line 2: ONBUILD is not supported"),
        ("FROM a\nRUN x\nRUN --mount=type=cache,target=/x y\n", "line 3: RUN --mount is not"),
        ("FROM a\nRUN --network=none y\n", "RUN --network=none is not supported"),
        ("FROM a\nRUN --security=insecure y\n", "RUN --security is not supported"),
        ("FROM a\nCOPY --parents x y\n", "COPY --parents is not supported"),
        ("FROM a\nCOPY --exclude=z x y\n", "COPY --exclude is not supported"),
        ("FROM a\nADD --checksum=sha256:0 x y\n", "ADD --checksum is not supported"),
        ("FROM a\nADD --from=b x y\n", "ADD --from is not supported"),
        ("FROM a\nADD http://x/y /\n", "ADD of a URL is not supported"),
        ("FROM a\nADD git@host:x.git /\n", "ADD of a URL is not supported"),
        ("FROM scratch\n", "FROM scratch is not supported"),
        ("FROM --platform=linux/arm64 a\n", "--platform=linux/arm64 is not supported"),
        ("FROM a AS x\nFROM b AS X\n", "there is a stage x already"),
        ("FROM a b c d\n", "FROM takes IMAGE"),
        ("RUN x\nFROM a\n", "line 1: RUN comes before FROM"),
        ("", "has no FROM"),
        ("# only a comment\n", "has no FROM"),
        ("FROM a\nNONSENSE x\n", "line 2: unknown instruction: NONSENSE"),
        ("FROM a\nRUN <<EOF\nx\n", "unterminated heredoc"),
        ("FROM a\nENV A\n", "ENV must have two arguments"),
        ("FROM a\nCOPY x\n", "COPY takes sources"),
        ("FROM a\nCOPY x y z\n", "takes a folder: z/"),
        ("FROM a\nCOPY <<EOF <<EOF\nEOF\nEOF\n", "cannot be the destination"),
        ("FROM a\nCOPY ${X /\n", "line 2: COPY"),
        ("FROM a\nCOPY --from=$X x y\n", "--from with a variable"),
        ("FROM a AS x\nCOPY --from=x /a /b\n", "is the stage itself"),
        ("FROM a\nSHELL /bin/sh\n", "SHELL takes a JSON list"),
        ("FROM a\nHEALTHCHECK MAYBE\n", "HEALTHCHECK takes"),
        ("FROM a\nWORKDIR\n", "WORKDIR takes one argument"),
    ],
)
def test_what_is_not_supported_or_wrong_is_refused_by_name_and_line(text, said):
    assert said in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "# syntax=docker/dockerfile:1\nFROM a\n",
        "FROM --platform=$BUILDPLATFORM a\n",
        "FROM --platform=linux/amd64 a\n",
        "FROM a\nRUN --network=default x\n",
        "FROM a\nCOPY --link x y\n",
        "\ufefffrom a\nrun x\n",
        "FROM a\r\nRUN x \\\r\n  y\r\n",
        "FROM a\nHEALTHCHECK NONE\n",
    ],
)
def test_what_changes_nothing_here_is_taken(text):
    assert parse(text).stages[0].base.name == "a"


def test_arguments_that_nobody_asks_for_are_told_of():
    found = parse("FROM a\nARG USED\n", arguments={"USED": "1", "NOT": "2", "HTTP_PROXY": "p"})
    assert found.warnings == ("build argument NOT is not used",)
    assert [step.args for step in found.stages[0].steps if step.kind is Kind.ARG] == [
        ("HTTP_PROXY", "'p'"),
        ("USED", "'1'"),
    ]


def test_the_image_says_what_it_starts():
    found = parse('FROM a\nENTRYPOINT ["a b"]\nCMD ["c"]\n')
    assert found.command == "'a b' c"
    assert parse("FROM a\nENTRYPOINT x y\n").config == {
        "entrypoint": ["/bin/sh", "-c", "x y"],
        "cmd": [],
    }
