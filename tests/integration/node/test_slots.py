"""Slots in a private internet: what a guest reaches and what not, and that nothing is left."""

from __future__ import annotations

import ipaddress
import shutil
import socket
from pathlib import Path

import pytest
from tests.integration.node.world import (
    DOCKER,
    GATEWAY,
    HOST,
    LAN,
    METADATA,
    OUTSIDE,
    World,
    open_host_fence,
    open_slot_fence,
    open_socket,
    tool,
    world,
)

from agentenv.errors import InfraError
from agentenv.host import firewall, netns
from agentenv.node.slots import OPEN, SlotConfig, SlotPool
from agentenv.sandbox.network import Policy, host_table

TAG = "7e577e57"
CLOSED = {
    "the host's address outwards": HOST,
    "a bridge of Docker": DOCKER,
    "a neighbour in the LAN": LAN,
    "the metadata service": METADATA,
}


def objects(folder: Path) -> dict[str, object]:
    """What slots leave in the host's namespace and in the file system."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "links": [name for _, name in socket.if_nameindex()],
        "tables": tool("nft", "list", "ruleset"),
        "mounts": [line.split()[4] for line in mounts if str(folder) in line],
        "files": sorted(folder.iterdir()) if folder.exists() else [],
    }


@pytest.fixture
def net():
    with world() as made:
        yield made


def slot_config(net: World, **changes) -> SlotConfig:
    values = {"tag": TAG, "folder": net.folder / "netns", "inner": "10.233.0.0/30",
              "uplink": "10.234.0.0/16", "first_uid": 900_000, "ahead": 1}  # fmt: skip
    return SlotConfig(**{**values, **changes})


@pytest.fixture
async def pool(net: World):
    config = slot_config(net)
    before = objects(config.folder)
    pool = SlotPool(config)
    await pool.start(set())
    taken: list[int] = []
    acquire = pool.acquire

    async def remembered(policy: Policy = OPEN) -> int:
        taken.append(await acquire(policy))
        return taken[-1]

    pool.acquire = remembered
    try:
        yield pool
    finally:
        for index in taken:
            await pool.release(index)
        await pool.close(everything=True)
    assert objects(config.folder) == before


@pytest.fixture(params=["both fences", "slot's fence alone", "host's fence alone"])
def fences(request) -> str:
    return request.param


def drop_one(fences: str, pool: SlotPool, *slots: int) -> None:
    if fences == "slot's fence alone":
        open_host_fence(TAG)
    if fences == "host's fence alone":
        for slot in slots:
            open_slot_fence(pool, slot)


def host_side(pool: SlotPool, index: int) -> str:
    return pool.plan(index).host_side


async def test_the_internet_is_reached_under_the_hosts_address(net: World, pool: SlotPool):
    guest = net.guest(pool, await pool.acquire())
    assert guest.ask(OUTSIDE) == HOST
    assert guest.ask_udp(OUTSIDE) == HOST
    assert guest.ask(GATEWAY)


async def test_closed_places_stay_closed(net: World, pool: SlotPool, fences: str):
    slot, other = await pool.acquire(), await pool.acquire()
    guest = net.guest(pool, slot)
    net.server(pool.netns(other))
    drop_one(fences, pool, slot, other)
    places = {
        **CLOSED,
        "the host's end of the uplink": host_side(pool, slot),
        "another slot": pool.plan(other).slot_side,
        "the host's end of another's uplink": host_side(pool, other),
    }
    reached = [what for what, where in places.items() if guest.reaches(where)]
    reached += [f"{what} (UDP)" for what, where in places.items() if guest.reaches_udp(where)]
    assert reached == []
    assert guest.ask(OUTSIDE)  # so that it is the fence and not a cut wire


async def test_without_any_fence_the_closed_places_answer(net: World, pool: SlotPool):
    """The control of the test above: its negatives mean something."""
    slot, other = await pool.acquire(), await pool.acquire()
    guest = net.guest(pool, slot)
    net.server(pool.netns(other))
    open_host_fence(TAG)
    for each in (slot, other):
        open_slot_fence(pool, each)
    places = [*CLOSED.values(), host_side(pool, slot), pool.plan(other).slot_side]
    assert [where for where in places if not guest.reaches(where)] == []


async def test_the_resolver_is_reached_and_nothing_else_of_the_router(net: World, pool: SlotPool):
    slot = await pool.acquire()
    guest, plan = net.guest(pool, slot), pool.plan(slot)
    net.server(pool.netns(slot), 53)
    net.server(pool.netns(slot))
    assert guest.ask(plan.gateway, 53)
    assert guest.ask_udp(plan.gateway, 53)
    assert not guest.reaches(plan.gateway)
    assert not guest.reaches(plan.slot_side)
    assert not guest.reaches(plan.slot_side, 53)


async def test_the_host_reaches_the_guest_only_from_inside_the_slot(net: World, pool: SlotPool):
    slot = await pool.acquire()
    guest, plan = net.guest(pool, slot), pool.plan(slot)
    net.server(guest.netns)
    with open_socket(pool.netns(slot), socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect((plan.guest, 8080))
        assert connection.recv(100).decode() == plan.gateway
    with open_socket(net.outside, socket.SOCK_STREAM) as connection:
        connection.settimeout(0.3)
        with pytest.raises(OSError):
            connection.connect((plan.slot_side, 8080))


async def test_foreign_source_addresses_go_nowhere(net: World, pool: SlotPool, fences: str):
    """Datagrams under another's address, counted where they would arrive."""
    slot = await pool.acquire()
    guest = net.guest(pool, slot)
    drop_one(fences, pool, slot)
    for address in ("198.51.100.77", "10.234.0.9"):
        guest.ip("addr", "add", f"{address}/32", "dev", "lo")
    with open_socket(net.outside, socket.SOCK_DGRAM) as arriving:
        arriving.bind((OUTSIDE, 5000))
        arriving.settimeout(5)
        for source, text in (("198.51.100.77", b"x"), ("10.234.0.9", b"y"), ("0.0.0.0", b"honest")):
            with open_socket(guest.netns, socket.SOCK_DGRAM) as asking:
                asking.bind((source, 0))
                asking.sendto(text, (OUTSIDE, 5000))
        seen = arriving.recv(100)
    if fences != "host's fence alone":  # there the slot's own translation hides the source
        assert seen == b"honest"


async def test_without_internet_only_the_resolver_answers(net: World, pool: SlotPool):
    slot = await pool.acquire(Policy(internet=False))
    guest = net.guest(pool, slot)
    net.server(pool.netns(slot), 53)
    assert not guest.reaches(OUTSIDE)
    assert not guest.reaches_udp(OUTSIDE)
    assert guest.ask(pool.plan(slot).gateway, 53)


async def test_a_slot_is_made_anew_after_use(net: World, pool: SlotPool):
    slot = await pool.acquire(Policy(internet=False))
    inode = pool.netns(slot).stat().st_ino
    await pool.release(slot)
    await pool.release(slot)  # already so is success
    for _ in range(10):  # its number comes round again, when it is made
        if await pool.acquire() == slot:
            break
    assert pool.netns(slot).stat().st_ino != inode
    assert net.guest(pool, slot).ask(OUTSIDE)


async def test_what_a_dead_server_left_is_kept_if_used_and_removed_if_not(net: World):
    config = slot_config(net)
    dead = SlotPool(config)
    await dead.start(set())
    kept, lost = await dead.acquire(), await dead.acquire()
    inode = dead.netns(kept).stat().st_ino
    await dead._tasks.close()
    pool = SlotPool(slot_config(net, ahead=0))
    await pool.start({kept})
    assert pool.netns(kept).stat().st_ino == inode and not pool.netns(lost).exists()
    assert net.guest(pool, kept).ask(OUTSIDE)
    await pool.release(kept)
    await pool.close(everything=True)
    assert not list(config.folder.iterdir())


async def test_an_exhausted_range_is_told(net: World):
    pool = SlotPool(slot_config(net, uplink="10.234.0.0/30", ahead=0))
    await pool.start(set())
    slot = await pool.acquire()
    with pytest.raises(InfraError) as caught:
        await pool.acquire()
    assert caught.value.code == "no_slots"
    await pool.release(slot)
    await pool.close(everything=True)


async def test_a_slot_that_cannot_be_made_leaves_nothing(net: World):
    config = slot_config(net, ahead=0)
    pool = SlotPool(config)
    await pool.start(set())
    name = pool.plan(1).host_interface
    tool("ip", "link", "add", "blocker", "type", "bridge")
    tool("ip", "link", "property", "add", "dev", "blocker", "altname", name)
    with pytest.raises(InfraError):
        await pool.acquire()
    assert not list(config.folder.iterdir())
    tool("ip", "link", "del", "blocker")
    await pool.close(everything=True)


@pytest.mark.parametrize("chain", ["FORWARD", "DOCKER-USER"])
async def test_a_host_where_docker_drops_forwarded_packets(net: World, chain: str):
    assert shutil.which("iptables"), "run: make setup"
    tool("iptables", "-P", "FORWARD", "DROP")
    if chain == "DOCKER-USER":
        tool("iptables", "-N", chain)
        tool("iptables", "-A", "FORWARD", "-j", chain)
    before = tool("iptables", "-S")
    pool = SlotPool(slot_config(net))
    await pool.start(set())
    slot = await pool.acquire()
    assert net.guest(pool, slot).ask(OUTSIDE) == HOST
    assert f"-A {chain}" in tool("iptables", "-S")
    await pool.release(slot)
    await pool.close(everything=True)
    assert tool("iptables", "-S") == before


async def test_rules_are_loaded_whole_or_not_at_all(net: World):
    await firewall.load("table inet t {\n chain a {\n }\n}\n")
    with pytest.raises(InfraError):
        await firewall.load(
            "delete table inet t\ntable inet broken {\n chain a {\n nonsense\n }\n}\n"
        )
    assert "table inet t" in tool("nft", "list", "tables")
    await firewall.drop_table("t")
    await firewall.drop_table("t")


def test_a_namespace_is_made_entered_and_removed(tmp_path):
    path = tmp_path / "ns"
    here = Path("/proc/thread-self/ns/net").stat().st_ino
    netns.create(path)
    inside = netns.inside(path, lambda: Path("/proc/thread-self/ns/net").stat().st_ino)
    assert inside == path.stat().st_ino != here
    assert Path("/proc/thread-self/ns/net").stat().st_ino == here
    with pytest.raises(ZeroDivisionError):
        netns.inside(path, lambda: 1 // 0)
    netns.delete(path)
    netns.delete(path)
    assert not path.exists() and not ipaddress.ip_address("10.233.0.1").is_global
    assert host_table("x") == "agentenv_x"


async def test_a_policy_holds_at_once_and_for_what_is_open(net: World, pool: SlotPool):
    slot = await pool.acquire()
    guest = net.guest(pool, slot)
    assert guest.ask(OUTSIDE)
    await pool.load_rules(slot, Policy(deny_out=("0.0.0.0/0",)))
    assert not guest.reaches(OUTSIDE) and not guest.reaches_udp(OUTSIDE)
    await pool.load_rules(slot, Policy(deny_out=("0.0.0.0/0",), allow_out=(f"{OUTSIDE}/32",)))
    assert guest.ask(OUTSIDE)
    await pool.load_rules(slot, Policy(internet=False, allow_out=(f"{OUTSIDE}/32",)))
    assert guest.ask(OUTSIDE)


async def test_a_policy_opens_nothing_that_the_node_closes(net: World, pool: SlotPool):
    slot = await pool.acquire(Policy(allow_out=("0.0.0.0/0",)))
    guest = net.guest(pool, slot)
    assert [what for what, where in CLOSED.items() if guest.reaches(where)] == []
    assert guest.ask(OUTSIDE)
