"""Users of a guest by its own files: who owns what is copied, and one more user. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from agentenv.errors import UserError

FIRST_UID = 1000
LAST_UID = 60_000


@dataclass(frozen=True, slots=True)
class Accounts:
    """The texts of /etc/passwd, /etc/group and /etc/shadow; an image may lack each."""

    passwd: str = ""
    group: str = ""
    shadow: str = ""

    def owner(self, spec: str) -> tuple[int, int]:
        """Uid and gid of ``name``, ``uid``, or either with ``:group``, by Docker's rules.

        Raises UserError in the agent's words if there is no such user or group.
        """
        who, _, group = spec.partition(":")
        found = self._user(who)
        if found is None:
            raise UserError(f"invalid username: '{who}'", code="unauthenticated")
        uid, gid = found
        if group:
            given = self._group(group)
            if given is None:
                raise UserError(f"invalid group: '{group}'", code="unauthenticated")
            gid = given
        return uid, gid

    def has(self, name: str) -> bool:
        return any(row[0] == name for row in _rows(self.passwd))

    def _user(self, who: str) -> tuple[int, int] | None:
        for name, _, uid, gid, *_ in (row for row in _rows(self.passwd) if len(row) >= 4):
            if name == who and uid.isdigit() and gid.isdigit():
                return int(uid), int(gid)
        if who in ("", "root"):
            return 0, 0
        return (int(who), int(who)) if who.isdigit() else None

    def _group(self, which: str) -> int | None:
        for name, _, gid, *_ in (row for row in _rows(self.group) if len(row) >= 3):
            if name == which and gid.isdigit():
                return int(gid)
        if which == "root":
            return 0
        return int(which) if which.isdigit() else None

    def with_user(self, name: str, shell: str) -> Accounts:
        """One user more, without a password, in a group of its own name; home ``/home/NAME``."""
        uid = _free(self.passwd)
        gid, group = self._group(name), self.group
        if gid is None or name.isdigit():
            gid = uid if self._free_group(uid) else _free(self.group)
            group = _added(self.group, f"{name}:x:{gid}:")
        entry = f"{name}:x:{uid}:{gid}::/home/{name}:{shell}"
        shadow = _added(self.shadow, f"{name}:!:19000:0:99999:7:::") if self.shadow else ""
        return replace(self, passwd=_added(self.passwd, entry), group=group, shadow=shadow)

    def _free_group(self, gid: int) -> bool:
        return all(row[2:3] != [str(gid)] for row in _rows(self.group))


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.split(":")


def _free(text: str) -> int:
    taken = {row[2] for row in _rows(text) if len(row) > 2}
    return next(number for number in range(FIRST_UID, LAST_UID) if str(number) not in taken)


def _added(text: str, line: str) -> str:
    return (text if not text or text.endswith("\n") else text + "\n") + line + "\n"
