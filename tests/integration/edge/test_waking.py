"""The server's side of waking: who is woken, once, and what becomes of failures and restarts."""

import asyncio

import httpx
import pytest
from tests.integration.edge.rig import ID, PORT
from tests.integration.edge.test_wakes import BY_HOST, edge, going_on
from tests.server import built, free_port

from agentenv.errors import InfraError
from agentenv.host.supervised import SupervisedLauncher
from agentenv.node.data_plane import NAME, DataPlane, DataPlaneConfig
from agentenv.node.edge import EdgeClient
from agentenv.node.wakes import Wakes

__all__ = ["edge"]  # a fixture

pytestmark = pytest.mark.usefixtures("guest")
OTHER = "z" * 20
BY_HOST_OTHER = {"Host": f"{PORT}-{OTHER}.example.org"}


class Sleepers:
    """What is called for each sandbox to be woken: ``act`` does it."""

    def __init__(self, act):
        self.act = act
        self.asked: list[str] = []
        self.begun = asyncio.Event()

    async def __call__(self, sandbox_id: str) -> None:
        self.asked.append(sandbox_id)
        self.begun.set()
        await self.act(sandbox_id)


@pytest.fixture
async def wakes(edge):
    """As a server has it; ended with its connections."""
    made = Wakes(EdgeClient(edge.folder / "control.sock"), edge.control)
    yield made
    await made.close()


def opener(edge, slot):
    async def act(sandbox_id):
        await edge.control.put(slot.route(id=sandbox_id))

    return act


async def test_it_is_woken_once_for_all_requests(edge, http, slot, wakes):
    async def act(sandbox_id):
        await edge.under_way(20)
        await edge.control.put(slot.route())

    wake = Sleepers(act)
    wakes.watch(wake)
    replies = await asyncio.gather(*(http.get("/seen", headers=BY_HOST) for _ in range(20)))
    assert {reply.status_code for reply in replies} == {200}
    assert wake.asked == [ID]


async def test_one_that_takes_long_holds_up_no_other(edge, http, slot, wakes):
    await edge.control.put(slot.asleep(id=OTHER))
    go_on = asyncio.Event()

    async def act(sandbox_id):
        if sandbox_id == ID:
            await go_on.wait()
        await edge.control.put(slot.route(id=sandbox_id))

    wake = Sleepers(act)
    wakes.watch(wake)
    async with going_on(http.get("/seen", headers=BY_HOST)) as slow:
        await wake.begun.wait()
        assert (await http.get("/seen", headers=BY_HOST_OTHER)).status_code == 200
        assert not slow.done()
        go_on.set()
        assert (await slow).status_code == 200


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InfraError("the node is full", why="no memory"), "the node is full: no memory"),
        (ValueError("a bug"), "an internal error"),
    ],
)
async def test_a_failure_is_the_answer_and_not_the_end(edge, http, slot, wakes, error, message):
    async def fail(sandbox_id):
        raise error

    wake = Sleepers(fail)
    wakes.watch(wake)
    reply = await http.get("/seen", headers=BY_HOST)
    assert reply.status_code == 502
    assert reply.json()["message"].endswith(f"could not be resumed: {message}")
    wake.act = opener(edge, slot)
    assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
    assert wake.asked == [ID, ID]


async def test_one_that_sleeps_again_before_its_waking_ended_is_woken_again(
    edge, http, slot, wakes
):
    async def act(sandbox_id):
        await edge.control.put(slot.route())
        if len(wake.asked) == 1:
            assert (await first).status_code == 200
            await edge.control.put(slot.asleep())
            second.set_result(asyncio.ensure_future(http.get("/seen", headers=BY_HOST)))
            await edge.under_way(1)
            async with asyncio.timeout(20):
                while not wakes._again[ID]:
                    await asyncio.sleep(0.01)

    second = asyncio.get_running_loop().create_future()
    wake = Sleepers(act)
    first = asyncio.ensure_future(http.get("/seen", headers=BY_HOST))
    wakes.watch(wake)
    request = await asyncio.wait_for(second, 20)
    assert (await request).status_code == 200
    assert wake.asked == [ID, ID]


async def test_a_request_outlives_the_server_that_was_to_wake_it(edge, http, slot, wakes):
    async def for_ever(sandbox_id):
        await asyncio.Event().wait()

    first = Sleepers(for_ever)
    wakes.watch(first)
    async with going_on(http.post("/echo", headers=BY_HOST, content=b"kept")) as request:
        await asyncio.wait_for(first.begun.wait(), 20)
        await wakes.close()
        await edge.control.close()
        await edge.control.sync([slot.asleep()], [])  # the next server begins
        assert not request.done()
        following = Wakes(EdgeClient(edge.folder / "control.sock"), edge.control)
        following.watch(Sleepers(opener(edge, slot)))
        reply = await request
        await following.close()
    assert (reply.status_code, reply.content) == (200, b"kept")


@pytest.fixture
async def launcher(folder):
    path = folder / "supervisor.sock"
    launcher = SupervisedLauncher(path)
    await launcher.ensure()
    yield launcher
    await launcher.quit()
    while path.exists():
        await asyncio.sleep(0.01)


async def test_a_data_plane_that_was_killed_knows_who_sleeps(folder, slot, launcher):
    listen = f"127.0.0.1:{free_port()}"
    config = DataPlaneConfig(built("agentenv-edge"), folder, listen, folder / "api.sock", 1.0)
    plane = DataPlane(config, launcher)
    wake = Sleepers(lambda sandbox_id: plane.put(slot.route(), None))
    try:
        await plane.start()
        plane.watch_wakes(wake)
        await plane.put(slot.route(), None)
        await plane.asleep(slot.asleep())
        killed = await launcher.status(NAME)
        await launcher.signal(NAME, 9)
        async with asyncio.timeout(30):
            while not await _knows(plane, killed.pid):
                await asyncio.sleep(0.02)
        async with httpx.AsyncClient(base_url=f"http://{listen}", timeout=30) as http:
            assert (await http.get("/seen", headers=BY_HOST)).status_code == 200
            assert wake.asked == [ID]
            await plane.stop_wakes()
            await plane.asleep(slot.asleep(wakes=False))
            assert (await http.get("/seen", headers=BY_HOST)).status_code == 502
    finally:
        await plane.close(everything=True)


async def _knows(plane: DataPlane, killed: int) -> bool:
    try:
        return (await plane.client.hello()).pid != killed and bool(
            (await plane.client.stats()).sandboxes
        )
    except InfraError:
        return False
