"""Which engine a node takes, and what it says of those it does not."""

import pytest

from agentenv.engine.contract import Capabilities
from agentenv.engine.engines import Engines, choose
from agentenv.errors import Conflict, InfraError, MissingTool, UserError

KVM = Capabilities("qemu", "10", "kvm", 2, ("KVM: a guest booted",))
TCG = Capabilities("qemu", "10", "tcg", 1, ("KVM: there is no /dev/kvm",))
GVISOR = Capabilities("gvisor", "2024", "systrap", 2)


class Made:
    """Of an engine only what the choice asks for."""

    def __init__(self, able):
        self.able, self.left = able, False
        self.swept = self.forgotten = self.kept = None

    async def capabilities(self):
        if isinstance(self.able, Exception):
            raise self.able
        return self.able

    async def sweep(self, keep):
        self.swept = keep

    async def forget(self, machine):
        self.forgotten = machine

    async def forget_all_but(self, keep):
        self.kept = keep

    async def leave(self):
        self.left = True


BROKEN = InfraError("gVisor runs nothing here", why="EPERM")


@pytest.mark.parametrize(
    ("able", "engine", "said"),
    [
        ({"qemu": KVM, "gvisor": GVISOR}, "qemu", "KVM works"),
        ({"qemu": TCG, "gvisor": GVISOR}, "gvisor", "no /dev/kvm"),
        ({"gvisor": GVISOR}, "gvisor", "is missing"),
        ({"qemu": TCG}, "qemu", "emulated"),
    ],
)
def test_the_fastest_that_works_is_taken_and_said_why(able, engine, said):
    missing = {name: "is missing" for name in ("qemu", "gvisor") if name not in able}
    choice = choose(able, missing, "auto")
    assert choice.engine == engine and said in choice.reason


def test_what_the_configuration_names_is_taken():
    assert choose({"qemu": TCG, "gvisor": GVISOR}, {}, "qemu").engine == "qemu"


def test_none_at_all_says_what_each_lacks():
    with pytest.raises(InfraError) as caught:
        choose({}, {"qemu": "no qemu", "gvisor": "no runsc"}, "auto")
    assert caught.value.code == "no_engine"
    assert "no qemu" in caught.value.why and "no runsc" in caught.value.why


async def test_one_that_fails_is_left_out_and_refused_by_name():
    engines = Engines({"qemu": Made(TCG), "gvisor": Made(BROKEN)}, {}, "auto")
    await engines.prepare()
    assert engines.usable == ("qemu",) and engines.choice.engine == "qemu"
    assert list(await engines.capabilities()) == ["qemu"]
    assert engines.missing == {"gvisor": BROKEN.message}
    with pytest.raises(Conflict) as caught:
        engines.asked("gvisor")
    assert caught.value.code == "engine_unavailable" and BROKEN.message in caught.value.why


@pytest.mark.parametrize("how", ["broken", "absent"])
async def test_one_that_the_configuration_names_must_work(how):
    absent = MissingTool("runsc")
    if how == "broken":
        engines = Engines({"qemu": Made(TCG), "gvisor": Made(BROKEN)}, {}, "gvisor")
    else:
        engines = Engines({"qemu": Made(TCG)}, {"gvisor": absent}, "gvisor")
    with pytest.raises(InfraError) as caught:
        await engines.prepare()
    assert caught.value is (BROKEN if how == "broken" else absent)


async def test_who_asks_gets_it_and_who_does_not_the_nodes_own():
    engines = Engines({"qemu": Made(TCG), "gvisor": Made(GVISOR)}, {}, "auto")
    await engines.prepare()
    assert [engines.asked(each) for each in (None, "auto", "qemu")] == ["gvisor", "gvisor", "qemu"]
    with pytest.raises(UserError) as caught:
        engines.asked("docker")
    assert caught.value.http_status == 400 and "qemu, gvisor" in caught.value.fix


async def test_all_are_swept_and_left_the_unusable_too():
    made = {"qemu": Made(TCG), "gvisor": Made(BROKEN)}
    engines = Engines(made, {}, "auto")
    await engines.prepare()
    await engines.sweep({"sbx"})
    await engines.forget("old")
    await engines.forget_all_but({"sbx"})
    await engines.leave()
    for each in made.values():
        assert each.swept == each.kept == {"sbx"} and each.forgotten == "old" and each.left
