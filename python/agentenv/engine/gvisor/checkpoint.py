"""A gVisor sandbox saved and brought back: by runsc, as one file.

runsc writes three files: the kernel's state, the contents of pages, and where they belong. A
snapshot's memory file is that of the pages with the other two behind it, each at a whole page:
runsc reads of it what it knows of. So it is whole by itself, and the record of a snapshot small.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import shutil
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.engine.contract import MachineSpec, Saved, SavedPages, SavePlan, Suspended
from agentenv.engine.gvisor.bundle import RunFiles, apart, hidden_sysctls, runsc
from agentenv.errors import InfraError, fault, faults
from agentenv.host.process import ProcessFailed, run

DEADLINE = 300.0  # seconds; 50 MB take 60 ms
PAGE = 4096
STATE, PAGES, PLACES = "checkpoint.img", "pages.img", "pages_meta.img"
_RUN = struct.Struct("<3I")  # as `agentenv._core` packs runs: first page, pages, whether zeroes


@dataclass(frozen=True, slots=True)
class Kept:
    """What a snapshot's record says of the memory file: the control key of the agent in it, where
    (offset, bytes) the small files lie."""

    key: str
    state: tuple[int, int]
    places: tuple[int, int]

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Kept:
        """Raises InfraError (``snapshot_damaged``)."""
        try:
            doc = json.loads(data)
            state, places = doc["state"], doc["places"]
            return cls(str(doc["key"]), (state[0], state[1]), (places[0], places[1]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InfraError(
                "the saved sandbox cannot be read", why=repr(error), code="snapshot_damaged"
            ) from error


async def save(program: Path, spec: MachineSpec, plan: SavePlan, key: str) -> Saved:
    """See ``Machine.save``; the sandbox never stops for longer than runsc takes."""
    if plan.memory is None or plan.disk is not None:
        raise InfraError("a gVisor sandbox is saved as a whole", code="not_supported")
    folder = spec.disk.with_name("saving")
    begun = time.monotonic()
    await asyncio.to_thread(_emptied, folder)
    try:
        words = ("checkpoint", "--leave-running", "--compression=none", "--direct")
        argv = runsc(program, RunFiles(spec.run_dir), *words, f"--image-path={folder}")
        try:
            await run((*argv, spec.sandbox_id), timeout=DEADLINE)
        except (ProcessFailed, TimeoutError) as error:
            raise _unsaved(error) from error
        saved = time.monotonic()
        kept, pages = await asyncio.to_thread(_join, folder, plan.memory, key)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    phases = {
        "checkpoint": round(saved - begun, 6),
        "join": round(time.monotonic() - saved, 6),
        "stopped": round(saved - begun, 6),
    }

    async def write() -> SavedPages:
        return SavedPages(_RUN.pack(0, pages, 0), pages * PAGE)

    return Saved(kept.pack(), write, phases)


def _unsaved(error: Exception) -> InfraError:
    what = "the sandbox could not be saved"
    if os.strerror(errno.ENOSPC).lower() in str(error).lower():
        return fault(what, OSError(errno.ENOSPC, str(error)))
    return InfraError(what, why=str(error), code="save_failed")


def _emptied(folder: Path) -> None:
    with faults("the sandbox could not be saved"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)


def _join(folder: Path, memory: Path, key: str) -> tuple[Kept, int]:
    """The three files as one at ``memory``; its pages."""
    with faults("the saved sandbox could not be kept"):
        places: list[tuple[int, int]] = []
        with (folder / PAGES).open("rb+") as joined:
            end = joined.seek(0, os.SEEK_END)
            for name in (STATE, PLACES):
                data = (folder / name).read_bytes()
                at = joined.seek(_whole(end))
                joined.write(data)
                places.append((at, len(data)))
                end = at + len(data)
            joined.truncate(_whole(end))
        mode = memory.stat().st_mode
        shutil.move(folder / PAGES, memory)
        memory.chmod(mode & 0o7777)
    return Kept(key, *places), _whole(end) // PAGE


def _whole(size: int) -> int:
    return -(-size // PAGE) * PAGE


def lay_out(files: RunFiles, saved: Suspended) -> Kept:
    """What runsc restores from, in the run folder. Blocking. Raises InfraError."""
    kept = Kept.unpack(saved.state)
    (memory,) = saved.memory
    with faults("the saved sandbox could not be laid out"):
        shutil.rmtree(files.image, ignore_errors=True)
        files.image.mkdir(mode=0o700)
        (files.image / PAGES).symlink_to(memory)
        with memory.open("rb") as file:
            for name, (at, size) in ((STATE, kept.state), (PLACES, kept.places)):
                file.seek(at)
                (files.image / name).write_bytes(file.read(size))
    return kept


async def restore(program: Path, spec: MachineSpec) -> None:
    """Have a created sandbox go on from what is laid out. Raises InfraError."""
    files = RunFiles(spec.run_dir)
    words = ("restore", "--detach", f"--bundle={spec.run_dir}", f"--image-path={files.image}")
    argv = runsc(program, files, *words, spec.sandbox_id)
    try:
        script = f"{hidden_sysctls()}exec {shlex.join(argv)}\n"
        await run(apart(script), timeout=DEADLINE)
    except (ProcessFailed, TimeoutError) as error:
        raise InfraError(
            "the saved sandbox did not start", why=str(error), code="restore_failed"
        ) from error
    finally:
        await asyncio.to_thread(shutil.rmtree, files.image, ignore_errors=True)
