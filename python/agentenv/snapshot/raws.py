"""Files of layers that are not stored yet: what machines left when they were saved.

    RAW.memory   pages at their own places, sparse     RAW.runs   which of them count
    RAW.qcow2    a disk that is written no more

They lie in one folder that engines pass but cannot list; their names cannot be guessed.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from agentenv import _core
from agentenv.errors import InfraError, faults
from agentenv.host.files import link_or_copy
from agentenv.model import new_id

FOLDER_MODE = 0o711
FILE_MODE = 0o444
COPY_AT_ONCE = 8 << 20


class Raws:
    """Those of a node, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: Counter[str] = Counter()
        self._users: dict[str, set[str]] = defaultdict(set)
        self._opening: set[str] = set()
        self._pinned: set[tuple[str, str]] = set()

    def prepare(self) -> None:
        self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def memory(self, raw: str) -> Path:
        return self._folder / f"{raw}.memory"

    def runs(self, raw: str) -> Path:
        return self._folder / f"{raw}.runs"

    def disk(self, raw: str) -> Path:
        return self._folder / f"{raw}.qcow2"

    def bytes_of(self, raw: str) -> int:
        """What the memory or the disk takes here; nothing if it was stored meanwhile."""
        with suppress(FileNotFoundError):
            return self.memory(raw).stat().st_blocks * 512
        with suppress(FileNotFoundError):
            return self.disk(raw).stat().st_blocks * 512
        return 0

    @contextmanager
    def making(self, count: int) -> Generator[list[str]]:
        """Names of files in the making: no sweep takes them before the block ends."""
        names = [new_id() for _ in range(count)]
        with self.kept(names):
            yield names

    @contextmanager
    def kept(self, names: Iterable[str]) -> Generator[None]:
        """No sweep takes these files before the block ends."""
        held = list(names)
        self._kept.update(held)
        try:
            yield
        finally:
            self._kept.subtract(held)
            self._kept += Counter()  # those that nobody keeps any more

    def make_memory(self, raw: str, size: int) -> Path:
        """An empty file for a memory of ``size`` bytes."""
        path = self.memory(raw)
        with faults("the memory's file could not be made"):
            path.touch(mode=FILE_MODE)
            os.truncate(path, size)
        return path

    def put_runs(self, raw: str, runs: bytes) -> None:
        with faults("the memory's runs could not be written"):
            self.runs(raw).write_bytes(runs)

    def read_runs(self, raw: str) -> bytes:
        """Blocking. Raises InfraError (``snapshot_damaged``, ``file_failed``)."""
        with faults("a snapshot's file could not be read"):
            runs = self.runs(raw).read_bytes()
        try:
            _core.run_spans(runs)
        except ValueError as error:
            raise InfraError(
                "a snapshot's file is damaged", why=f"{raw}.runs: {error}", code="snapshot_damaged"
            ) from error
        return runs

    async def take_disk(self, path: Path, raw: str) -> None:
        """Keep a machine's disk, which it writes no more, under a second name."""
        with faults("the sandbox's disk could not be kept"):
            path.chmod(FILE_MODE)
            await asyncio.to_thread(link_or_copy, path, self.disk(raw))

    def use(self, raw: str, holder: str) -> None:
        """``holder`` opens it by its name before ``has_open``, and has it until ``release``."""
        self._users[raw].add(holder)
        self._opening.add(holder)

    def release(self, holder: str) -> None:
        self._opening.discard(holder)
        for raw in list(self._users):
            self._drop(raw, holder)

    def has_open(self, holder: str) -> None:
        """It has all open, and needs no names any more: of disks that is all there is to keep, of
        memories that are pinned, too."""
        self._opening.discard(holder)
        for raw in list(self._users):
            if self.disk(raw).exists() or (raw, holder) in self._pinned:
                self._drop(raw, holder)

    def is_pinned(self, raw: str, holder: str) -> None:
        """The memory that ``holder`` maps, or will, is held for it otherwise by now."""
        if holder in self._opening:
            self._pinned.add((raw, holder))
        else:
            self._drop(raw, holder)

    def _drop(self, raw: str, holder: str) -> None:
        self._pinned.discard((raw, holder))
        self._users[raw].discard(holder)
        if not self._users[raw]:
            del self._users[raw]

    def users(self, raw: str) -> set[str]:
        return set(self._users.get(raw, ()))

    def merge(self, sources: list[tuple[Path, bytes]], raw: str, size: int) -> bytes:
        """One file of several laid over one another, lowest first; its runs. Blocking."""
        runs = _core.merge_runs([each for _, each in sources])
        target = self.make_memory(raw, size)
        with faults("memory layers could not be merged"), target.open("rb+") as out:
            for path, own in sources:
                with path.open("rb") as file:
                    for first, count, at in _core.run_spans(own):
                        _copy(file.fileno(), out.fileno(), first, count, at)
        self.put_runs(raw, runs)
        return runs

    async def sweep(self, needed: Callable[[], Set[str]]) -> None:
        """Remove files that no snapshot needs and nobody uses.

        What is needed is asked once the files are listed: those made since are not touched.
        """
        found = await asyncio.to_thread(lambda: list(self._folder.glob("*")))
        kept = needed() | self._kept.keys() | self._users.keys()

        def remove() -> None:
            for path in found:
                if path.stem not in kept:
                    path.unlink(missing_ok=True)

        await asyncio.to_thread(remove)


def _copy(source: int, target: int, first: int, count: int, at: int | None) -> None:
    """Pages of one file over those of another; zeroes are written, over what may be there."""
    begin, end = first * 4096, (first + count) * 4096
    if at is None:
        zeroes = bytes(min(end - begin, COPY_AT_ONCE))
        while begin < end:
            begin += os.pwrite(target, zeroes[: end - begin], begin)
        return
    while begin < end:
        data = os.pread(source, min(end - begin, COPY_AT_ONCE), begin)
        begin += os.pwrite(target, data, begin)
