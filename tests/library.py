"""A home's images and layers without a server, in a folder of the test's."""

from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agentenv.config import Config
from agentenv.node.library import Library, open_library


@asynccontextmanager
async def opened(home: Path, **configured):
    async with open_library(replace(Config(), home=home, **configured)) as library:
        yield library


async def stored(library: Library) -> set[str]:
    """Every key in the store."""
    return {entry.key for entry in await library.layers.objects.list("")}


async def nothing_stored(library: Library, home: Path) -> bool:
    """True if neither an object nor a draft is there."""
    return not await stored(library) and not list((home / "drafts").glob("*"))


async def flat(library: Library, image, path: Path) -> Path:
    """The flat image as one file."""
    await library.layers.unpack(image.parts, path)
    return path
