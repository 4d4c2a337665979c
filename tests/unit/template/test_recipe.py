from dataclasses import replace

import pytest

from agentenv.errors import UserError
from agentenv.model import Guest, Resources
from agentenv.template.recipe import (
    Base,
    Kind,
    Origin,
    Recipe,
    Stage,
    Step,
    base_key,
    check,
    final_key,
    step_keys,
)

IMAGE = Base(Origin.IMAGE, "debian")
RUN = Step(Kind.RUN, ("make",))
COPY = Step(Kind.COPY, (".", "/x", "", ""), files="f" * 64)
SIZE = Resources(1, 512, 8192)


def recipe(*steps: Step) -> Recipe:
    return Recipe((Stage("", IMAGE, steps),))


def test_what_is_well_formed_passes():
    check(recipe(RUN, COPY, Step(Kind.ENV, ("A", "1", "B", "2")), Step(Kind.USER, ("x", "true"))))
    stages = (
        Stage("build", IMAGE, (RUN,)),
        Stage("", Base(Origin.STAGE, "build"), (replace(COPY, files=None, stage="build"),)),
    )
    check(Recipe(stages))


@pytest.mark.parametrize(
    "step",
    [
        Step(Kind.RUN, ()),
        Step(Kind.RUN, ("a", "b", "c")),
        Step(Kind.ENV, ("A",)),
        Step(Kind.ENV, ("A", "1", "B")),
        Step(Kind.WORKDIR, ()),
        Step(Kind.RUN, ("a\0b",)),
        replace(COPY, args=(".",)),
        replace(COPY, files=None),
        replace(COPY, stage="build"),
        replace(COPY, files=None, stage="nothing"),
    ],
)
def test_a_malformed_step_is_named(step):
    with pytest.raises(UserError) as caught:
        check(recipe(RUN, step))
    assert caught.value.code == "invalid_step" and "step 2" in caught.value.message


@pytest.mark.parametrize(
    "stages",
    [
        (Stage("a", IMAGE, ()), Stage("a", IMAGE, ())),
        (Stage("a", Base(Origin.STAGE, "later"), ()), Stage("later", IMAGE, ())),
    ],
)
def test_stages_stand_on_earlier_ones(stages):
    with pytest.raises(UserError):
        check(Recipe(stages))


def test_equal_beginnings_have_equal_keys_and_differ_from_there_on():
    first = base_key("img", Guest(), SIZE, "qemu", provision=True)
    one = step_keys(first, [RUN, COPY, RUN], {})
    other = step_keys(first, [RUN, replace(COPY, files="e" * 64), RUN], {})
    assert one[0] == other[0] and one[1] != other[1] and one[2] != other[2]
    assert len(set(one)) == 3


def test_keys_change_with_all_that_matters_and_nothing_else():
    first = base_key("img", Guest(), SIZE, "qemu", provision=True)
    assert first != base_key("other", Guest(), SIZE, "qemu", provision=True)
    assert first != base_key("img", Guest({"A": "1"}), SIZE, "qemu", provision=True)
    assert first != base_key("img", Guest(), replace(SIZE, memory_mib=1024), "qemu", provision=True)
    assert first != base_key("img", Guest(), SIZE, "qemu", provision=False)
    assert first != base_key("img", Guest(), SIZE, "gvisor", provision=True)

    def key(step: Step, stages=None) -> str:
        return step_keys(first, [step], stages or {})[0]

    assert key(RUN) == key(replace(RUN, force=True, line=7))
    assert key(RUN) != key(replace(RUN, kind=Kind.EXEC))
    assert key(RUN) != key(replace(RUN, args=("make", "root")))
    assert key(COPY) != key(replace(COPY, keep_owner=True))
    copied = replace(COPY, files=None, stage="s")
    assert key(copied, {"s": "1"}) != key(copied, {"s": "2"})
    assert final_key(first, "a", "") != final_key(first, "", "a")


def test_a_proxy_is_no_reason_to_do_steps_again():
    def keys(*args: str) -> list[str]:
        return step_keys("k", [Step(Kind.ARG, args), RUN], {})

    assert keys("HTTP_PROXY", "a") == keys("HTTP_PROXY", "b")
    assert keys("VERSION", "a") != keys("VERSION", "b")


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (Step(Kind.RUN, ("make\ninstall", "root")), "RUN make …"),
        (Step(Kind.EXEC, ("/bin/sh", "-c", "make"), text="RUN make"), "RUN make"),
        (Step(Kind.EXEC, ("make", "all")), "EXEC make all"),
        (COPY, "COPY . /x"),
        (Step(Kind.FILE, ("EOF", "secret", "/x", "", "", "")), "FILE EOF"),
    ],
)
def test_steps_are_shown_in_a_line(step, shown):
    assert step.shown() == shown
    assert len(replace(step, args=("x" * 500,), text="").shown()) == 120
