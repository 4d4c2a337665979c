"""Images built from Debian packages with mmdebstrap: a start where no registry is reached."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv.errors import ImageError
from agentenv.host.process import ProcessFailed, run
from agentenv.image.reference import DebianImage
from agentenv.image.tarball import TarImage, open_tar
from agentenv.store.drafts import Drafts

# Newer file times become this one, so that the same packages give the same bytes; not 1970,
# because zip files hold no time before 1980.
EPOCH = 1_735_689_600  # 2025-01-01
DEADLINE = 1800.0  # seconds; a slow mirror and many packages
# Caches, logs and lists differ from run to run and are of no use to a sandbox that may
# fetch its own; documentation of packages is most of their files.
_TRIM = (
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    "--customize-hook=rm -rf \"$1\"/var/lib/apt/lists/* \"$1\"/var/cache/* \"$1\"/var/log/*.log",
    "--customize-hook=: > \"$1/etc/machine-id\"; rm -f \"$1/etc/hostname\"",
)  # fmt: skip


@asynccontextmanager
async def opened_suite(
    reference: DebianImage, drafts: Drafts, hooks: Sequence[str] = ()
) -> AsyncGenerator[TarImage]:
    """Build the suite; the same packages give the same image. Raises ImageError, MissingTool.

    ``hooks`` are shell commands, run on the root in ``"$1"`` when all packages are configured.
    """
    async with drafts.draft() as draft:
        options = ["--variant=minbase", "--format=tar", *map("--customize-hook={}".format, hooks)]
        await _make(reference, [*options, *_TRIM], draft.path)
        yield await open_tar(draft.path)


async def inside(reference: DebianImage, hooks: Sequence[str]) -> None:
    """Run ``hooks`` on a root that holds the packages unpacked, not configured, and is not kept.

    Raises ImageError, MissingTool.
    """
    options = ["--variant=extract", "--format=null", *map("--extract-hook={}".format, hooks)]
    await _make(reference, options, None)


async def _make(reference: DebianImage, options: Sequence[str], target: Path | None) -> None:
    """One run of mmdebstrap. Raises ImageError, MissingTool."""
    argv = ["mmdebstrap", "--quiet", *options]
    if reference.packages:
        argv.append(f"--include={','.join(reference.packages)}")
    argv += [reference.suite, str(target or "-")]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C"}
    try:
        await run(argv, timeout=DEADLINE, env=env)
    except ProcessFailed as error:
        raise ImageError(
            f"{reference} could not be built",
            why=error.why,
            fix="check the names of suite and packages, and that apt reaches its mirror",
            code="build_failed",
        ) from error
