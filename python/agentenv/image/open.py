"""From a reference to an opened source, whatever its kind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agentenv.errors import UserError
from agentenv.image import archive, debian, registry, tarball
from agentenv.image.reference import (
    DebianImage,
    ImageReference,
    RegistryImage,
    ShippedImage,
    StoreImage,
)
from agentenv.image.registry import RegistrySettings
from agentenv.image.source import ImageSource
from agentenv.store.drafts import Drafts


@asynccontextmanager
async def opened(
    reference: ImageReference, settings: RegistrySettings, drafts: Drafts
) -> AsyncGenerator[ImageSource]:
    """Open an image; what it needs on disk meanwhile are drafts in ``drafts``.

    An image of the store has no source to open, nor has a shipped one: UserError
    (``invalid_reference``).
    """
    if isinstance(reference, RegistryImage):
        async with registry.opened(reference, settings, drafts) as remote:
            yield remote
    elif isinstance(reference, DebianImage):
        async with debian.opened_suite(reference, drafts) as built:
            yield built
    elif isinstance(reference, StoreImage):
        raise UserError(f"{reference} has no source to read", code="invalid_reference")
    elif isinstance(reference, ShippedImage):
        raise UserError(
            f"{reference} is not here",
            fix=f"aenv template init {reference.name}",
            code="invalid_reference",
        )
    elif reference.kind == "dir":
        await tarball.path_must_exist(reference.path, folder=True)
        async with tarball.opened_folder(reference.path, drafts) as packed:
            yield packed
    elif reference.kind == "tar":
        await tarball.path_must_exist(reference.path, folder=False)
        yield await tarball.open_tar(reference.path)
    else:
        await tarball.path_must_exist(reference.path, folder=reference.kind == "oci")
        async with archive.opened(reference, drafts) as found:
            yield found
