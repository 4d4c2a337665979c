"""The images of shipped templates, assembled on the host: no guest is started for them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from agentenv.errors import InfraError, NotFound
from agentenv.image.debian import opened_suite
from agentenv.image.source import OpenBlob, Report, SourceLayer, quiet
from agentenv.image.tarball import TarImage, opened_folder
from agentenv.layer.catalog import Image, ImageCatalog
from agentenv.model import ImageConfig
from agentenv.store.drafts import Drafts
from agentenv.template.shipped import recipes, wheels
from agentenv.template.shipped.recipes import Shipped


@dataclass(frozen=True, slots=True)
class Assembled:
    """Implements ``ImageSource``: layers of tars made here, over those of a stored image."""

    config: ImageConfig
    below: tuple[SourceLayer, ...]
    tars: tuple[TarImage, ...]

    @property
    def digest(self) -> str:
        ids = [layer.diff_id for layer in self.layers]
        content = json.dumps([ids, asdict(self.config)])
        return "sha256:" + hashlib.sha256(content.encode()).hexdigest()

    @property
    def layers(self) -> tuple[SourceLayer, ...]:
        return (*self.below, *(layer for tar in self.tars for layer in tar.layers))

    def blob(self, layer: SourceLayer, report: Report) -> AbstractAsyncContextManager[OpenBlob]:
        for tar in self.tars:
            if layer in tar.layers:
                return tar.blob(layer, report)
        raise InfraError(
            "the image that this one goes on from was removed meanwhile",
            fix="try again",
            code="image_incomplete",
        )


async def image(catalog: ImageCatalog, shipped: Shipped, report: Report = quiet) -> Image:
    """A template's image: found if it is as its recipe says, else assembled.

    Raises ImageError, InfraError.
    """
    reference = str(recipes.reference(shipped))
    try:
        return await catalog.find(reference)
    except NotFound:
        pass
    drafts = catalog.layers.drafts
    if shipped.on is None:
        return await catalog.add(reference, _opened_root(shipped, drafts), report)
    below = await image(catalog, recipes.find(shipped.on), report)
    return await catalog.add(reference, _opened_interpreter(below, drafts), report)


@asynccontextmanager
async def _opened_root(shipped: Shipped, drafts: Drafts) -> AsyncGenerator[Assembled]:
    assert shipped.packages is not None
    async with opened_suite(shipped.packages, drafts, shipped.hooks) as tar:
        yield Assembled(recipes.CONFIG, (), (tar,))


@asynccontextmanager
async def _opened_interpreter(below: Image, drafts: Drafts) -> AsyncGenerator[Assembled]:
    """Packages and server are layers of their own: the first are large, the second changes."""
    async with AsyncExitStack() as held:
        tars: list[TarImage] = []
        for fill in (_packages, _server):
            folder = Path(held.enter_context(TemporaryDirectory(prefix="aenv-root-")))
            await fill(folder)
            tars.append(await held.enter_async_context(opened_folder(folder, drafts)))
        yield Assembled(recipes.CONFIG, stored(below.diff_ids), tuple(tars))


async def _packages(root: Path) -> None:
    await wheels.install(recipes.LOCK, recipes.PYTHON, root)
    await wheels.compile_all(recipes.SUITE, recipes.PYTHON, root)


async def _server(root: Path) -> None:
    folder = root / wheels.packages_folder(recipes.PYTHON).lstrip("/") / recipes.SERVER_NAME
    folder.mkdir(parents=True)
    for path in recipes.server_files():
        shutil.copyfile(path, folder / path.name)
        (folder / path.name).chmod(0o644)
    await asyncio.to_thread(wheels.settle, root)


def stored(diff_ids: Sequence[str]) -> tuple[SourceLayer, ...]:
    """Layers that the store has; nobody asks for their bytes."""
    return tuple(SourceLayer(diff_id, diff_id, 0) for diff_id in diff_ids)
