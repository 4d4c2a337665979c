"""What a build stands on: a node's workshop, and the inside of the sandbox it works in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from agentenv.model import Guest, Resources
from agentenv.sandbox.record import SandboxInfo


class Workshop(Protocol):
    """Sandboxes that only a build sees. All raise the errors of ``agentenv.errors``."""

    async def begin(
        self,
        image_id: str | None,
        snapshot_id: str | None,
        resources: Resources,
        guest: Guest,
        engine: str,
    ) -> SandboxInfo:
        """One that runs, restored from the snapshot or else booted from the image.

        A snapshot of another size is booted from its disk; one of another engine is a UserError.
        """
        ...

    def capture(self, sandbox_id: str) -> AbstractAsyncContextManager[str]:
        """A snapshot, by its id; the sandbox goes on. It stays if somebody needs it when the block
        ends: a build, or a kept step."""
        ...

    async def end(self, sandbox_id: str) -> None:
        """One that has ended already is success."""
        ...

    async def usable(self, snapshot_id: str, engine: str) -> bool:
        """Whether it is there and the engine can restore it."""
        ...

    def tidy(self) -> None:
        """Have snapshots that nobody needs any more removed, soon."""
        ...

    async def sweep(self) -> None:
        """End what an earlier server began for builds."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """``stream`` is ``stdout`` or ``stderr``."""

    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Exit:
    """``code`` as a shell has it; ``status`` says it in words: ``exit status 1``."""

    code: int
    status: str
    out_of_memory: bool = False


class Site(Protocol):
    """The inside of one sandbox. UserError is the guest's refusal, in its own words."""

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, user: str
    ) -> AsyncGenerator[Output | Exit]:
        """Start a program and follow it; leaving the generator does not end the program."""
        ...

    async def read(self, path: str) -> bytes | None:
        """A small file, None if it is not there."""
        ...

    async def kind(self, path: str) -> str | None:
        """``file``, ``directory``, of a link its target's; None if it is not there."""
        ...

    async def names(self, folder: str) -> Sequence[str]:
        """What is directly in a folder."""
        ...

    async def make_folder(self, path: str, user: str) -> None:
        """With what is missing above; one that is there is left as it is."""
        ...

    def pack(self, path: str) -> AsyncGenerator[bytes]:
        """A file or tree as a tar, entries below the path's last name."""
        ...

    async def unpack(self, folder: str, archive: AsyncIterable[bytes]) -> None:
        """A tar into a folder, with its owners and modes."""
        ...


Sites = Callable[[SandboxInfo], AbstractAsyncContextManager[Site]]
