"""Client of the block server's control socket, and the command line that starts it.

`agentenv-blockd` shows stacks of layers as files of one mount. Who needs a stack holds it under a
name (a sandbox's id); the server keeps it open, here and across its own restarts, until the holder
lets go.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import ImageError, InfraError
from agentenv.layer.layers import Part

PROTOCOL = 1
MAX_LINE = 64 << 20
# Reads of a disk fail when the store is away too long; those of memory (mapped files, what the host
# mounts) wait for it while somebody holds the stack.
DISK, MEMORY = "disk", "memory"
# Opening reads tables from the store; the rest answers at once.
DEADLINE = 60.0
# One that was killed is started again at once; meanwhile nobody listens, or the answer is lost.
RESTART = 5.0
ASK_AGAIN = 0.02


@dataclass(frozen=True, slots=True)
class Fault:
    """Why reads of a stack wait, or have ``failed``; ``since`` is a Unix time."""

    stack: str
    holders: tuple[str, ...]
    cause: str
    since: int
    failed: bool


@dataclass(frozen=True, slots=True)
class BlockServerOptions:
    """``free`` bytes are left on the cache's file system; ``patience`` seconds a read of a disk
    waits for the store before it fails."""

    binary: Path
    store: str
    cache: Path
    size: int
    free: int
    state: Path
    control: Path
    patience: float = 30.0
    peers: tuple[str, ...] = ()
    peer_listen: str = ""
    peer_token: Path | None = None


def blockd_argv(options: BlockServerOptions, fd: int) -> tuple[str, ...]:
    """``fd`` is the mounted /dev/fuse in the server."""
    argv = [
        str(options.binary),
        "--store", options.store,
        "--cache", str(options.cache),
        "--cache-size", str(options.size),
        "--cache-free", str(options.free),
        "--state", str(options.state),
        "--control", str(options.control),
        "--patience", str(options.patience),
        "--fuse-fd", str(fd),
    ]  # fmt: skip
    for peer in options.peers:
        argv += ["--peer", peer]
    if options.peer_listen:
        argv += ["--peer-listen", options.peer_listen]
    if options.peer_token:
        argv += ["--peer-token-file", str(options.peer_token)]
    return tuple(argv)


class BlockClient:
    """One connection per call: calls that wait hold up no others.

    A call may be asked twice: doing it again changes nothing. Raises InfraError
    (``block_server_down``) if nobody answers for a while, and what the server refuses:
    ImageError (``image_incomplete``) for a layer that is not in the store, else InfraError.
    """

    def __init__(self, control: Path, mount: Path) -> None:
        self._control, self._mount = control, mount

    async def hello(self) -> dict[str, Any]:
        found = await self._call("hello", patience=0)
        if found["protocol"] != PROTOCOL:
            raise InfraError(
                "the block server is of another version",
                why=f"it speaks protocol {found['protocol']}, not {PROTOCOL}",
                fix="end the sandboxes of the old version: aenv down",
                code="block_server_down",
            )
        return found

    async def open(self, parts: Sequence[Part], holder: str, kind: str = DISK) -> Path:
        """The parts side by side as one file, for ``holder`` until ``close``."""
        at, layers = 0, list[tuple[str, int]]()
        for part in parts:
            if part.layer is not None:
                layers.append((part.layer, at))
            at += part.blocks
        return await self.open_stack(at, layers, holder, kind)

    async def open_stack(
        self, blocks: int, layers: Sequence[tuple[str, int]], holder: str, kind: str = DISK
    ) -> Path:
        """Layers (id, first block), lowest first, as one file of ``blocks`` blocks."""
        stack = {"blocks": blocks, "layers": layers, "kind": kind}
        found = await self._call("open", holder=holder, stack=stack)
        return self._mount / found["name"]

    async def close(self, holder: str) -> None:
        await self._call("close", holder=holder)

    async def keep_only(self, holders: Collection[str]) -> None:
        """Whoever else holds a stack does so no more."""
        await self._call("keep_only", holders=sorted(holders))

    async def prefetch(self, stack: Path, chunks: Sequence[tuple[int, int]]) -> None:
        """Have chunks (layer in the stack, number in the layer) fetched; returns at once."""
        await self._call("prefetch", stack=stack.name, chunks=list(chunks))

    async def first_use(self, stack: Path) -> list[tuple[int, int]]:
        """The chunks read since the stack was opened, in order. Ends the recording."""
        found = await self._call("first_use", stack=stack.name)
        return [(layer, chunk) for layer, chunk in found["chunks"]]

    async def faults(self, version: int = -1, timeout: float = 0.0) -> tuple[int, list[Fault]]:
        """What holds stacks up; waits until that is another story than in ``version``."""
        found = await self._call(
            "faults", deadline=timeout, version=max(version, 0), timeout=timeout
        )
        faults = [
            Fault(each["stack"], tuple(each["holders"]), **each["fault"])
            for each in found["faults"]
        ]
        return found["version"], faults

    async def stats(self) -> dict[str, Any]:
        return await self._call("stats")

    async def rescan(self) -> None:
        """Have it see layers that were kept in its cache by others."""
        await self._call("rescan")

    async def _call(
        self, op: str, *, deadline: float = 0.0, patience: float = RESTART, **args: Any
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(DEADLINE + deadline):
                answer = await self._insist({"id": 1, "op": op, "args": args}, patience)
        except (OSError, TimeoutError, ValueError) as error:
            raise InfraError(
                "the block server does not answer",
                why=str(error) or type(error).__name__,
                code="block_server_down",
            ) from error
        if fault := answer.get("error"):
            raise _refused(fault["code"], fault["message"])
        return answer["ok"]

    async def _insist(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        if not self._control.exists():  # nobody was killed there
            patience = 0.0
        end = time.monotonic() + patience
        while True:
            try:
                return await self._ask(request)
            except (ConnectionError, FileNotFoundError):
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(ASK_AGAIN)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(str(self._control), limit=MAX_LINE)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("it closed the connection")
        return json.loads(line)


def _refused(code: str, message: str) -> InfraError | ImageError:
    what = "the block server cannot do this"
    if code == "not_found":
        return ImageError(
            "a part of the image is missing from the store", why=message, fix="pull it again",
            code="image_incomplete",
        )  # fmt: skip
    if code == "unavailable":
        return InfraError("the store does not answer", why=message, code="store_unavailable")
    return InfraError(what, why=message, code=f"block_server_{code}")
