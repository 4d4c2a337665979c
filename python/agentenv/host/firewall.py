"""nftables, on the host and in namespaces; and a place for our accepts beside Docker's drops."""

from __future__ import annotations

import shutil
from pathlib import Path

from agentenv.host.process import run

DEADLINE = 30.0  # seconds for one tool


def entered(netns: Path | None) -> tuple[str, ...]:
    """The words that put a tool into a namespace; none for our own."""
    return ("nsenter", f"--net={netns}") if netns else ()


async def load(rules: str, netns: Path | None = None) -> None:
    """Load a ruleset in one transaction: all of it holds afterwards, or nothing changed.

    Raises ProcessFailed with nft's message, MissingTool.
    """
    await run((*entered(netns), "nft", "-f", "-"), stdin=rules.encode(), timeout=DEADLINE)


async def drop_table(name: str) -> None:
    """Remove an ``inet`` table; not there is success."""
    await load(f"table inet {name}\ndelete table inet {name}\n")


async def forward_is_dropped() -> bool:
    """Whether iptables' own FORWARD chain drops by default, as Docker sets it."""
    return "-P FORWARD DROP" in await _iptables("-S", "FORWARD")


async def allow_forward(interfaces: str, mark: str) -> None:
    """Let traffic from and its replies to ``interfaces`` (``name+``) pass iptables' FORWARD.

    An accept in a table of our own cannot undo a drop in another one, so the rules lie in
    DOCKER-USER where there is one, else at the head of FORWARD, marked with ``mark``.
    """
    await disallow_forward(mark)
    if not await forward_is_dropped():
        return
    user = await _iptables("-S", "DOCKER-USER")
    chain = "DOCKER-USER" if user else "FORWARD"
    comment = ("-m", "comment", "--comment", mark)
    back = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED")
    for match in (("-i", interfaces), ("-o", interfaces, *back)):
        await run(
            ("iptables", "-w", "-I", chain, *match, *comment, "-j", "ACCEPT"), timeout=DEADLINE
        )


async def disallow_forward(mark: str) -> None:
    """Remove the rules that carry ``mark``."""
    for line in (await _iptables("-S")).splitlines():
        if line.startswith("-A") and mark in line.replace('"', "").split():
            words = line.replace('"', "").split()
            await run(("iptables", "-w", "-D", *words[1:]), timeout=DEADLINE, check=False)


async def _iptables(*words: str) -> str:
    """Output of iptables, empty where there is none or the chain is missing."""
    if shutil.which("iptables") is None:
        return ""
    done = await run(("iptables", "-w", *words), timeout=DEADLINE, check=False)
    return done.stdout.decode() if done.status == 0 else ""
