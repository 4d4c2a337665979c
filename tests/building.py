"""A workshop without machines: guests are dictionaries of files, commands are a few words.

For what builds decide; what happens in a guest is tested in real ones.
"""

from __future__ import annotations

import asyncio
import copy
import io
import tarfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from agentenv.errors import InfraError, UserError
from agentenv.model import ImageConfig, Resources, new_id
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State
from agentenv.store.records import ImageRow, SnapshotRow
from agentenv.store.sql import SqlRecords
from agentenv.template.bases import Bases
from agentenv.template.build import Size
from agentenv.template.builds import Builds
from agentenv.template.ground import Exit, Output
from agentenv.template.uploads import Uploads

SIZE = Resources(1, 512, 8192)
NOW = datetime(2026, 1, 2, tzinfo=UTC)


@dataclass
class Machine:
    """``files``: a path's content, None for a folder; ``running``: what was started and goes on."""

    files: dict[str, bytes | None] = field(default_factory=lambda: {"/": None, "/bin/bash": b""})
    running: list[str] = field(default_factory=list)


class Yard:
    """Implements ``Workshop``; ``history`` has what was asked of it, in order."""

    def __init__(self, records):
        self.records = records
        self.machines: dict[str, Machine] = {}
        self.snapshots: dict[str, Machine] = {}
        self.history: list[str] = []
        self.refused: set[str] = set()
        self.blocked = asyncio.Event()
        self.failure: Exception | None = None

    async def begin(self, image_id, snapshot_id, resources, guest, engine):
        self.history.append(f"begin {'snapshot' if snapshot_id else image_id}")
        name = new_id("sbx")
        made = copy.deepcopy(self.snapshots[snapshot_id]) if snapshot_id else Machine()
        self.machines[name] = made
        return SandboxInfo(
            name, State.RUNNING, "", "", image_id or "", None, None, NOW, NOW, resources, guest, engine
        )  # fmt: skip

    @asynccontextmanager
    async def capture(self, sandbox_id):
        if self.failure:
            raise self.failure
        self.history.append("capture")
        name = new_id("snap")
        self.snapshots[name] = copy.deepcopy(self.machines[sandbox_id])
        await self.records.put_snapshot(SnapshotRow(name, None, sandbox_id, "img", NOW, {}))
        yield name

    async def end(self, sandbox_id):
        self.history.append("end")
        self.machines.pop(sandbox_id, None)

    async def usable(self, snapshot_id, engine):
        return snapshot_id in self.snapshots and snapshot_id not in self.refused

    def tidy(self):
        pass

    async def sweep(self):
        self.machines.clear()

    @asynccontextmanager
    async def site(self, info):
        yield Inside(self, self.machines[info.id])


class Inside:
    """Implements ``Site``. Commands: ``echo``, ``fail N``, ``die``, ``block``, ``serve``, ``ready``
    (once something serves), ``touch PATH``, ``user`` (prints who runs it)."""

    def __init__(self, yard: Yard, machine: Machine):
        self.yard, self.machine = yard, machine

    async def run(self, argv, *, env, cwd, user):
        word, _, rest = argv[-1].partition(" ")
        if user == "root123":
            raise UserError(f"invalid username: '{user}'", code="unauthenticated")
        self.yard.history.append(f"run {argv[-1]}")
        if word == "echo":
            text = rest
            for name, value in env.items():
                text = text.replace(f"${name}", value)
            yield Output("stdout", f"{text}\n".encode())
        elif word == "fail":
            yield Output("stderr", b"it went wrong")
            yield Exit(int(rest), f"exit status {rest}")
            return
        elif word == "die":
            raise InfraError("the node fell over", code="broken")
        elif word == "block":
            self.yard.blocked.set()
            await asyncio.Event().wait()
        elif word == "serve":
            self.machine.running.append(rest)
            yield Output("stdout", b"serving\n")
            await asyncio.Event().wait()
        elif word == "ready" and not self.machine.running:
            yield Exit(1, "exit status 1")
            return
        elif word == "touch":
            self.machine.files[rest] = b""
        elif word == "user":
            yield Output("stdout", f"{user} in {cwd}\n".encode())
        yield Exit(0, "exit status 0")

    async def read(self, path):
        return self.machine.files.get(path)

    async def kind(self, path):
        if path not in self.machine.files:
            below = any(name.startswith(path.rstrip("/") + "/") for name in self.machine.files)
            return "directory" if below else None
        return "directory" if self.machine.files[path] is None else "file"

    async def names(self, folder):
        start = folder.rstrip("/") + "/"
        found = [name[len(start) :] for name in self.machine.files if name.startswith(start)]
        return sorted({name.split("/")[0] for name in found if name})

    async def make_folder(self, path, user):
        self.yard.history.append(f"folder {path} {user}")
        self.machine.files[path] = None

    async def pack(self, path):
        parent = path.rpartition("/")[0] + "/"
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, content in self.machine.files.items():
                if name == path or name.startswith(path + "/"):
                    info = tarfile.TarInfo(name.removeprefix(parent))
                    info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
                    info.size = len(content or b"")
                    tar.addfile(info, io.BytesIO(content or b""))
        yield out.getvalue()

    async def unpack(self, folder, archive):
        data = io.BytesIO(b"".join([piece async for piece in archive]))
        with tarfile.open(fileobj=data) as tar:
            for info in tar:
                content = tar.extractfile(info).read() if info.isreg() else None
                self.machine.files[folder + info.name] = content


class Shelf:
    """The images that can be pulled: any, with the configuration ``config``."""

    def __init__(self, records):
        self.records = records
        self.config = ImageConfig(env=("PATH=/bin",), user="app", working_dir="/app")
        self.logins = []

    async def pull_remote(self, text, login=None):
        self.logins.append(login)
        await self.records.put_image(ImageRow("img", text, "d", NOW, {}))
        return await self.find("img")

    async def find(self, key):
        return type("Image", (), {"id": key, "config": self.config})()


@dataclass
class Building:
    """Everything about builds but the machines."""

    records: SqlRecords
    yard: Yard
    shelf: Shelf
    builds: Builds

    async def build(self, plan, name="made", **asked):
        """From the request to its end: the row."""
        template, row = await self.builds.request(name, (), asked)
        await self.builds.begin(template.id, row.id, plan)
        return await self.ended(row)

    async def ended(self, row):
        while (found := await self.records.build(row.id)).status in ("waiting", "building"):
            await asyncio.sleep(0.01)
        return found

    async def log(self, row):
        progress = await self.builds.progress(row.template_id, row.id, limit=1000)
        return [entry.message for entry in progress.entries]


@asynccontextmanager
async def building(folder):
    records = await SqlRecords.open_sqlite(folder / "state.db")
    yard, shelf = Yard(records), Shelf(records)

    async def sizes(asked):
        changes = {k: v for k, v in asked.items() if k not in ("free_mib", "engine")}
        return Size(replace(SIZE, **changes), asked.get("engine") or "qemu")

    builds = Builds(
        records,
        yard,
        yard.site,
        Bases(records, shelf, sizes),
        Uploads(folder / "uploads", 1 << 20),
        folder / "builds",
    )
    await builds.start()
    try:
        yield Building(records, yard, shelf, builds)
    finally:
        await builds.close()
        await records.close()
