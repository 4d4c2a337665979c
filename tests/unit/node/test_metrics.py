"""Samples on disk, and when a guest is asked for them."""

import os
from dataclasses import dataclass, field

from agentenv.errors import GuestError
from agentenv.model import Guest, Resources
from agentenv.node.metrics import MetricsStore, Sampler
from agentenv.sandbox.metrics import Sample
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.sandbox import utcnow
from agentenv.sandbox.state import State

GUEST = {"mem_used": 1, "mem_total": 2, "mem_cache": 3, "disk_used": 4, "disk_total": 5}


def sample(time, cpu=0.0):
    return Sample(time, cpu, 1, 1, 2, 3, 4, 5)


@dataclass
class Asked:
    """A sandbox whose engine is this process, and whose guest counts how often it is asked."""

    pid: int | None = field(default_factory=os.getpid)
    answer: dict | None = field(default_factory=lambda: dict(GUEST))
    times: int = 0

    @property
    def id(self):
        return "a" * 20

    @property
    def info(self):
        now = utcnow()
        return SandboxInfo(self.id, State.RUNNING, "t", "b", "i", now, now, Resources(1), Guest())

    async def stats(self, _timeout):
        self.times += 1
        if self.answer is None:
            raise GuestError("it does not answer")
        return self.answer


async def test_samples_are_kept_in_order_and_by_range(tmp_path):
    store = MetricsStore(tmp_path / "metrics")
    store.start(set())
    for time in (1030.0, 1010.0, 1020.0):
        await store.add("x", sample(time))
    assert [s.time for s in await store.between("x", 0, 9e9)] == [1010, 1020, 1030]
    assert [s.time for s in await store.between("x", 1015, 1020)] == [1020]
    assert list(await store.between("unknown", 0, 9e9)) == []
    await store.add("x", sample(1010.0 + 3600))  # an hour later, in the oldest one's place
    assert [s.time for s in await store.between("x", 0, 9e9)] == [1020, 1030, 4610]


async def test_rings_of_the_forgotten_go(tmp_path):
    store = MetricsStore(tmp_path)
    for name in ("kept", "lost"):
        await store.add(name, sample(1.0))
    store.start({"kept"})
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    store.forget("kept")
    store.forget("kept")  # already so is success
    assert not list(tmp_path.iterdir())


async def test_a_guest_that_sleeps_is_not_woken(tmp_path):
    store, sandbox = MetricsStore(tmp_path), Asked()
    sampler = Sampler(store, lambda: [sandbox])
    await sampler._sample(sandbox, 1000.0, (990.0, 1e9, sample(990.0)))  # no CPU time since
    assert sandbox.times == 0
    assert await store.between(sandbox.id, 0, 9e9) == [sample(1000.0)]
    await sampler._sample(sandbox, 1010.0, (1000.0, -1.0, sample(1000.0)))  # busy
    await sampler._sample(sandbox, 1020.0, (1010.0, 1e9, None))  # never asked before
    assert sandbox.times == 2


async def test_who_does_not_answer_or_is_gone_has_no_sample(tmp_path):
    store = MetricsStore(tmp_path)
    for sandbox in (Asked(answer=None), Asked(pid=None), Asked(pid=2**22 + 1)):
        sampler = Sampler(store, lambda sandbox=sandbox: [sandbox])
        await sampler._sample(sandbox, 1000.0, (990.0, 0.0, None))
    assert list(await store.between("a" * 20, 0, 9e9)) == []
