"""Network slots: router namespaces prepared ahead, one per sandbox, made anew after use.

Making one anew is what "returned clean" means here: no connection, counter or rule of a former
tenant can survive its namespace, and the cost (some 40 ms of tools) is paid off the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from agentenv.concurrency import Tasks, undo_on_failure
from agentenv.engine.contract import Attachment
from agentenv.errors import InfraError
from agentenv.host import firewall, netns
from agentenv.host.process import ProcessFailed, run
from agentenv.sandbox import network
from agentenv.sandbox.network import Plan, Policy

log = logging.getLogger(__name__)

TOOL_DEADLINE = 30.0  # seconds
OPEN = Policy()  # the rules that a slot is prepared with
_SYSCTLS = {
    "/proc/sys/net/ipv4/ip_forward": "1",
    "/proc/sys/net/ipv4/conf/all/rp_filter": "1",
    "/proc/sys/net/ipv6/conf/all/disable_ipv6": "1",
}


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """``folder`` holds the namespaces; ``first_uid`` is slot 0's; ``ahead`` are kept ready."""

    tag: str
    folder: Path
    inner: str
    uplink: str
    first_uid: int
    allow_private: tuple[str, ...] = ()
    ahead: int = 2


class SlotPool:
    """Hands out slots; ``start`` first, ``close`` last. Slot numbers are reused, lowest first."""

    def __init__(self, config: SlotConfig) -> None:
        self._config = config
        self._uplink = ipaddress.IPv4Network(config.uplink)
        self._host: tuple[str, ...] = ()
        self._used: set[int] = set()
        self._ready: list[int] = []
        self._making: set[int] = set()
        self._tasks = Tasks()

    def plan(self, index: int) -> Plan:
        config = self._config
        return Plan(config.tag, index, ipaddress.IPv4Network(config.inner), self._uplink)

    def netns(self, index: int) -> Path:
        return self._config.folder / str(index)

    def uid(self, index: int) -> int:
        return self._config.first_uid + index

    def attachment(self, index: int) -> Attachment:
        plan = self.plan(index)
        return Attachment(
            netns=self.netns(index),
            tap=network.TAP,
            mac=network.GUEST_MAC,
            address=plan.guest_cidr,
            gateway=plan.gateway,
            dns=(plan.gateway,),
            host_mac=network.TAP_MAC,
        )

    async def start(self, in_use: set[int]) -> None:
        """Host rules, then what an earlier server left: slots in use are kept, others destroyed.

        Raises InfraError, MissingTool.
        """
        config = self._config
        self._config.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        self._host = await _own_addresses(self._uplink)
        await firewall.load(network.host_rules(config.tag, self._uplink, config.allow_private))
        prefix = network.interface_prefix(config.tag)
        await firewall.allow_forward(f"{prefix}+", network.host_table(config.tag))
        for index in self._left_behind() - in_use:
            await self._destroy(index)
        self._used = set(in_use)
        self._refill()

    async def acquire(self, policy: Policy = OPEN) -> int:
        """A clean slot's number. Raises InfraError (``no_slots``) when the range is exhausted."""
        index = self._ready.pop(0) if self._ready else None
        if index is None:
            index = self._free()
            self._used.add(index)
            try:
                await self._make(index)
            except BaseException:
                self._used.discard(index)
                raise
        self._used.add(index)
        self._refill()
        if policy != OPEN:
            try:
                await self.load_rules(index, policy)
            except BaseException:
                await asyncio.shield(self.release(index))
                raise
        return index

    async def release(self, index: int) -> None:
        """Destroy the slot; a slot that is not in use is success."""
        if index in self._used:
            await self._destroy(index)
            self._used.discard(index)
            self._refill()

    async def close(self, *, everything: bool) -> None:
        """Destroy the slots nobody uses; with ``everything`` (none in use) the host rules too."""
        await self._tasks.close()
        for index in self._left_behind() - self._used:
            await self._destroy(index)
        self._ready.clear()
        if everything and not self._used:
            await firewall.disallow_forward(network.host_table(self._config.tag))
            await firewall.drop_table(network.host_table(self._config.tag))

    def _free(self) -> int:
        taken = self._used | self._making | set(self._ready)
        for index in range(1, network.slots_in(self._uplink)):
            if index not in taken:
                return index
        raise InfraError(
            "no network slot is free",
            why=f"{self._config.uplink} holds {network.slots_in(self._uplink) - 1}",
            fix="give a larger uplink_network",
            code="no_slots",
        )

    def _refill(self) -> None:
        with contextlib.suppress(InfraError):
            while len(self._ready) + len(self._making) < self._config.ahead:
                index = self._free()
                self._making.add(index)
                self._tasks.start(self._make_ahead(index), f"slot {index}")

    async def _make_ahead(self, index: int) -> None:
        try:
            await self._make(index)
            self._ready.append(index)
        finally:
            self._making.discard(index)

    async def _make(self, index: int) -> None:
        plan, path = self.plan(index), self.netns(index)
        async with undo_on_failure() as undo:
            undo.push(f"slot {index}", lambda: self._destroy(index))
            await self._destroy(index)
            await asyncio.to_thread(netns.create, path)
            await asyncio.to_thread(netns.inside, path, _set_sysctls)
            veth = f"type veth peer name {network.UPLINK} netns {path}"
            await self._ip(None, f"link add {plan.host_interface} {veth}")
            await self._ip(path, network.links(plan))
            await self._ip(
                None,
                f"addr add {plan.host_side}/31 dev {plan.host_interface}\n"
                f"link set {plan.host_interface} up",
            )
            await self.load_rules(index, OPEN)

    async def load_rules(self, index: int, policy: Policy) -> None:
        """Replace the slot's rules by those of ``policy``, atomically. Raises InfraError."""
        rules = network.slot_rules(
            self.plan(index),
            policy,
            allow_private=self._config.allow_private,
            host=self._host,
        )
        await firewall.load(rules, self.netns(index))

    async def _destroy(self, index: int) -> None:
        """Remove link and namespace, whatever there is of them."""
        interface = self.plan(index).host_interface
        if interface in _interfaces():
            with contextlib.suppress(ProcessFailed):  # gone with its namespace meanwhile
                await self._ip(None, f"link del {interface}")
        await asyncio.to_thread(netns.delete, self.netns(index))

    def _left_behind(self) -> set[int]:
        folder, prefix = self._config.folder, network.interface_prefix(self._config.tag)
        found = {int(p.name) for p in folder.glob("*") if p.name.isdigit()}
        for name in _interfaces():
            if name.startswith(prefix):
                found.add(int(name.removeprefix(prefix), 16))
        return found

    async def _ip(self, path: Path | None, batch: str) -> None:
        words = (*firewall.entered(path), "ip", "-batch", "-")
        await run(words, stdin=batch.encode() + b"\n", timeout=TOOL_DEADLINE)


async def _own_addresses(uplink: ipaddress.IPv4Network) -> tuple[str, ...]:
    """The machine's addresses, but for loopback and our own uplinks."""
    done = await run(("ip", "-4", "-json", "addr"), timeout=TOOL_DEADLINE)
    found = [entry["local"] for link in json.loads(done.stdout) for entry in link["addr_info"]]
    addresses = {ipaddress.IPv4Address(text) for text in found}
    return tuple(sorted(str(a) for a in addresses if not a.is_loopback and a not in uplink))


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def _set_sysctls() -> None:
    for path, value in _SYSCTLS.items():
        with contextlib.suppress(FileNotFoundError):  # no IPv6 in this kernel
            Path(path).write_text(value)
