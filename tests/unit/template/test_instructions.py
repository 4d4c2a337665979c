import subprocess

import pytest

from agentenv.template.dockerfile import parse
from agentenv.template.fold import State, fold
from agentenv.template.instructions import FromContext, quoted
from agentenv.template.recipe import Kind, Step
from agentenv.template.words import expand


def steps(text: str, **arguments: str) -> tuple[Step | FromContext, ...]:
    return parse("FROM base\n" + text, arguments=arguments).stages[0].steps


def folded(text: str, **arguments: str) -> tuple[State, list]:
    state, actions = State({"PATH": "/bin"}, "root", "/"), []
    for step in steps(text, **arguments):
        state, action = fold(state, step)
        actions.append(action)
    return state, actions


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("RUN make all", ("/bin/sh", "-c", "make all")),
        ('RUN ["make", "a b"]', ("make", "a b")),
        ("RUN a \\\n  # why\n  && b", ("/bin/sh", "-c", "a   && b")),
        ('SHELL ["/bin/bash", "-ec"]\nRUN a', ("/bin/bash", "-ec", "a")),
        ("RUN <<EOF\na\n  b $X\nEOF", ("/bin/sh", "-c", "a\n  b $X\n")),
        ("RUN <<-EOF\n\ta\n\tEOF", ("/bin/sh", "-c", "a\n")),
        (
            'RUN python3 <<EOF\nprint(1)\nEOF',
            ("/bin/sh", "-c", "python3 <<EOF\nprint(1)\nEOF"),
        ),
        (
            "RUN cat <<A > x <<'B' > y\n1\nA\n2\nB",
            ("/bin/sh", "-c", "cat <<A > x <<'B' > y\n1\nA\n2\nB"),
        ),
    ],
)  # fmt: skip
def test_commands_in_each_form(text, argv):
    assert steps(text)[-1].args == argv


def test_a_script_with_its_interpreter_is_run_by_it(tmp_path):
    (step,) = steps("RUN <<EOF\n#!/usr/bin/env python3\nprint('AENV_END', 6 * 7)\nEOF")
    done = subprocess.run(step.args, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("AENV_END 42\n", "", 0)
    (step,) = steps("RUN <<EOF\n#!/bin/sh\nexit 7\nEOF")
    assert subprocess.run(step.args).returncode == 7


def test_copies_from_the_context_and_their_options():
    plain, several, added = steps(
        "ARG D=src\nENV E=$D/x\nCOPY a b\n"
        'COPY --chown=$U:g --chmod=0755 $E "two words" *.py /dest/\nADD x.tar /'
    )[2:]
    assert plain == FromContext(("a",), "b", "", "", False, "\\", "COPY a b", 4)
    assert several.sources == ("src/x", "two words", "*.py")
    assert (several.dest, several.owner, several.mode) == ("/dest/", "$U:g", "0755")
    assert added.unpacks and added.line == 6


def test_a_source_that_only_the_base_knows_cannot_be_found():
    from agentenv.errors import UserError

    for text in ("COPY $NONE /", "ENV A=$PATH\nCOPY $A /", "COPY ${NONE:-x} /"):
        with pytest.raises(UserError, match="is not set in this Dockerfile"):
            steps(text)


def test_heredocs_are_files():
    _, (first, second) = folded('COPY --chmod=600 <<A <<"B" /x/\none $PATH\nA\ntwo $PATH\nB')
    assert (first.name, first.content, first.dest, first.mode) == ("A", "one /bin\n", "/x/", 0o600)
    assert (second.name, second.content) == ("B", "two $PATH\n")


def test_variables_follow_dockers_order():
    state, actions = folded(
        "ARG A=1\nARG B\nARG C=$A\nENV E=$A$B$C A=env\nRUN x\nARG A=later\nRUN y", B="it's $x"
    )
    assert state.env == {"PATH": "/bin", "E": "1it's $x1", "A": "env"}
    first, second = (action for action in actions if action)
    assert first.env["A"] == second.env["A"] == "env"
    assert first.env["B"] == "it's $x" and first.env["C"] == "1"


def test_presets_are_seen_only_where_they_are_asked_for():
    text = "ARG V=1\nFROM base\nRUN a\nARG V\nARG TARGETARCH\nRUN b\n"
    state, actions = State({}, "root", "/"), []
    for step in parse(text).stages[0].steps:
        state, action = fold(state, step)
        actions.append(action)
    before, after = (action.env for action in actions if action)
    assert before == {} and after == {"V": "1", "TARGETARCH": "amd64"}


@pytest.mark.parametrize("value", ["", "a b", "it's", '"$X" \\', "`x`", "new\nline"])
def test_any_value_can_be_quoted(value):
    assert expand(quoted(value), {"X": "no"}, "\\") == value


def test_words_are_unquoted_where_they_are_used():
    state, actions = folded(
        'WORKDIR "/a b"\nWORKDIR c\nUSER "app"\nVOLUME ["/v 1", "/v2"]\nVOLUME /v2 $PATH'
    )
    assert (state.workdir, state.user) == ("/a b/c", "app")
    assert state.volumes == ("/v 1", "/v2", "/bin") and actions[2] is None


def test_the_escape_character_can_be_a_backtick():
    found = parse("# escape=`\nFROM base\nENV A=C:\\x`\n B=`$A\n").stages[0].steps[0]
    state, _ = fold(State({"A": "old"}, "root", "/"), found)
    assert state.env == {"A": "C:\\x", "B": "$A"}


def test_what_is_recorded_of_the_image():
    found = parse(
        'FROM base\nARG P=80\nEXPOSE $P 443/tcp\nEXPOSE 80 $WHO\nLABEL a=$P b="x y"\n'
        "LABEL b=z\nMAINTAINER me you\nSTOPSIGNAL SIGINT\n"
        "HEALTHCHECK --interval=5s --retries=2 CMD curl x\n"
    ).config
    assert found["exposed_ports"] == ["80", "443/tcp", "$WHO"]
    assert found["labels"] == {"a": "80", "b": "z", "maintainer": "me you"}
    assert found["stop_signal"] == "SIGINT"
    assert found["healthcheck"] == {
        "test": ["/bin/sh", "-c", "curl x"], "interval": "5s", "retries": "2",
    }  # fmt: skip


def test_steps_know_how_and_where_they_are_written():
    (step,) = steps("WORKDIR \\\n  /x")
    assert (step.kind, step.line, step.shown()) == (Kind.WORKDIR, 2, "WORKDIR   /x")
