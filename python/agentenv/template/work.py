"""Does in a guest what steps ask. Whatever fails is a UserError, GuestError or InfraError."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import tarfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from fnmatch import fnmatchcase
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO

from agentenv.errors import GuestError, UserError
from agentenv.template import fold, placing
from agentenv.template.accounts import Accounts
from agentenv.template.ground import Exit, Site
from agentenv.template.journal import Lines
from agentenv.template.streams import changed, written

ACCOUNT_FILES = ("passwd", "group", "shadow")
SUDOERS = "{name} ALL=(ALL:ALL) NOPASSWD: ALL\n"
Report = Callable[[str, str], None]
"""Told a stream (``stdout``, ``stderr``) and a line of it."""


class CommandFailed(UserError):
    """A command of the recipe did not end well; E2B's SDKs look for these words."""

    code = "build_command_failed"
    http_status = 422

    def __init__(self, command: str, why: str, exit_code: int | None = None) -> None:
        super().__init__(f"failed to run command '{command}': command failed: {why}")
        self.exit_code = exit_code


class Work:
    """In one guest. ``uploaded`` finds the files of a hash, ``stage`` the guest of a stage."""

    def __init__(
        self,
        site: Site,
        uploaded: Callable[[str], Path | None],
        stage: Callable[[str], Awaitable[Site]],
    ) -> None:
        self._site, self._uploaded, self._stage = site, uploaded, stage

    async def do(self, action: fold.Action, report: Report) -> None:
        match action:
            case fold.Run():
                await self._run(action, report)
            case fold.Copy():
                await self._copy(action)
            case fold.Write():
                await self._write(action)
            case fold.MakeFolder():
                await self._make_folder(action)
            case fold.AddUser():
                await self.add_user(action.name)

    async def _run(self, action: fold.Run, report: Report) -> None:
        status = await follow(self._site, action, report)
        if status.out_of_memory:
            raise CommandFailed(
                action.command, f"{status.status}: the sandbox ran out of memory", status.code
            )
        if status.code != 0:
            raise CommandFailed(action.command, status.status, status.code)

    async def _make_folder(self, action: fold.MakeFolder) -> None:
        if await self._site.kind(action.path) is None:
            await self._site.make_folder(action.path, action.owner)

    # Users

    async def add_user(self, name: str, *, sudo: bool = False) -> None:
        """With a home, if there is none of that name."""
        before = await self._accounts()
        if before.has(name):
            return
        shell = "/bin/bash" if await self._site.kind("/bin/bash") else "/bin/sh"
        after = before.with_user(name, shell)
        await self._put_accounts(after, before)
        uid, gid = after.owner(name)
        home = f"/home/{name}"
        if await self._site.kind("/etc/skel") == "directory":
            content = self._site.pack("/etc/skel")
            moved = placing.Placing("skel", "skel", home, False, False)
            work = partial(placing.move, placing=moved, owner=(uid, gid), mode=None)
            await self._unpack(changed(content, work))
        entries = [_folder(home, uid, gid)]
        await self._unpack(written(partial(_write_entries, entries)))
        if sudo:
            rule = _file("/etc/sudoers.d/" + name, SUDOERS.format(name=name).encode(), 0o440)
            await self._unpack(written(partial(_write_entries, [rule])))

    async def _accounts(self) -> Accounts:
        found = {name: await self._site.read(f"/etc/{name}") for name in ACCOUNT_FILES}
        return Accounts(**{k: (v or b"").decode(errors="replace") for k, v in found.items()})

    async def _put_accounts(self, after: Accounts, before: Accounts) -> None:
        files: list[tuple[tarfile.TarInfo, bytes]] = []
        shadow_group = after.owner("root:shadow")[1] if "\nshadow:" in after.group else 0
        for name in ACCOUNT_FILES:
            text: str = getattr(after, name)
            if text == getattr(before, name):
                continue
            is_shadow = name == "shadow"
            info, data = _file(f"/etc/{name}", text.encode(), 0o640 if is_shadow else 0o644)
            info.gid = shadow_group if is_shadow else 0
            files.append((info, data))
        await self._unpack(written(partial(_write_entries, files)))

    # Files

    async def _copy(self, action: fold.Copy) -> None:
        owner = (await self._accounts()).owner(action.owner) if action.owner else None
        if action.stage is not None:
            await self._copy_from(action, action.stage, owner)
            return
        assert action.files is not None
        path = self._uploaded(action.files)
        if path is None:
            raise UserError(
                f"the files of COPY {action.source} were not uploaded",
                fix="upload them first",
                code="files_missing",
            )
        source = action.source.lstrip("/")
        files: list[str] = []
        if placing.is_pattern(source):
            files = await asyncio.to_thread(_names, path)
        await self._put(_open(path), source, action, owner, files)

    async def _copy_from(
        self, action: fold.Copy, stage: str, owner: tuple[int, int] | None
    ) -> None:
        origin = await self._stage(stage)
        sources = await _matching(origin, action.source)
        if not sources:
            raise UserError(
                f"COPY --from={stage} {action.source}: there is no such file", code="no_such_file"
            )
        for source in sources:
            name = posixpath.basename(source)
            one = source == action.source
            dest = action.dest if one or len(sources) == 1 else action.dest.rstrip("/") + "/"
            moved = fold.Copy(name, dest, action.owner, action.mode, None, stage)
            await self._put(lambda s=source: origin.pack(s), name, moved, owner, [])

    async def _put(
        self,
        content: Callable[[], AsyncGenerator[bytes]],
        source: str,
        action: fold.Copy,
        owner: tuple[int, int] | None,
        files: list[str],
    ) -> None:
        exists = await self._site.kind(action.dest.rstrip("/") or "/") == "directory"
        plan = placing.plan(source, action.dest, exists=exists, files=files)
        work = partial(placing.move, placing=plan, owner=owner, mode=action.mode)
        await self._unpack(changed(content(), work))

    async def _write(self, action: fold.Write) -> None:
        uid, gid = (await self._accounts()).owner(action.owner)
        dest = action.dest.rstrip("/") or "/"
        if action.dest.endswith("/") or await self._site.kind(dest) == "directory":
            dest = posixpath.join(dest, action.name)
        info, data = _file(dest, action.content.encode(), action.mode or 0o644)
        info.uid, info.gid = uid, gid
        await self._unpack(written(partial(_write_entries, [(info, data)])))

    async def _unpack(self, archive: AsyncGenerator[bytes]) -> None:
        async with contextlib.aclosing(archive):
            await self._site.unpack("/", archive)


async def follow(site: Site, action: fold.Run, report: Report) -> Exit:
    """Run a command to its end. Raises CommandFailed if it cannot be started, GuestError."""
    lines = Lines()
    end: Exit | None = None
    try:
        events = site.run(action.argv, env=action.env, cwd=action.cwd, user=action.user)
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Exit):
                    end = event
                    continue
                for line in lines.feed(event.stream, event.data):
                    report(event.stream, line)
    except UserError as error:
        raise CommandFailed(action.command, f"{error.code}: {error.message}") from error
    finally:
        for stream, line in lines.end():
            report(stream, line)
    if end is None:
        raise GuestError("the command's stream ended without its end", code="guest_protocol")
    return end


async def _matching(site: Site, pattern: str) -> list[str]:
    """Paths in a guest that a pattern means, in order."""
    if not placing.is_pattern(pattern):
        return [pattern.rstrip("/") or "/"] if await site.kind(pattern.rstrip("/") or "/") else []
    found = ["/"]
    for part in [part for part in pattern.split("/") if part]:
        if placing.is_pattern(part):
            inner = [
                posixpath.join(folder, name)
                for folder in found
                if await site.kind(folder) == "directory"
                for name in sorted(await site.names(folder))
                if fnmatchcase(name, part)
            ]
        else:
            inner = [posixpath.join(folder, part) for folder in found]
        found = [path for path in inner if await site.kind(path) is not None]
    return found


def _names(path: Path) -> list[str]:
    with path.open("rb") as archive:
        return placing.file_names(archive)


def _open(path: Path) -> Callable[[], AsyncGenerator[bytes]]:
    async def pieces() -> AsyncGenerator[bytes]:
        with await asyncio.to_thread(path.open, "rb") as file:
            while piece := await asyncio.to_thread(file.read, 256 << 10):
                yield piece

    return pieces


def _folder(path: str, uid: int, gid: int) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(path.lstrip("/"))
    info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, 0o755, uid, gid
    return info, b""


def _file(path: str, content: bytes, mode: int) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(path.lstrip("/"))
    info.size, info.mode, info.mtime = len(content), mode, int(time.time())
    return info, content


def _write_entries(entries: list[tuple[tarfile.TarInfo, bytes]], out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for info, content in entries:
            tar.addfile(info, BytesIO(content))
