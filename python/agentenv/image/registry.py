"""Images in OCI registries: mirrors first, then the registry itself, by digest once it is known."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

from agentenv.errors import ImageError, InfraError, UserError
from agentenv.image import manifest as m
from agentenv.image.credentials import Credentials
from agentenv.image.reference import DOCKER_HUB, RegistryImage
from agentenv.image.source import OpenBlob, Report, SourceLayer, source_layers
from agentenv.image.transport import TIMEOUT, Endpoint, Missing, Transport
from agentenv.model import ImageConfig
from agentenv.store.drafts import Drafts

T = TypeVar("T")
HUB_ENDPOINT = "https://registry-1.docker.io"


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """``mirrors`` as ``HOST=URL``; ``insecure`` hosts are spoken to in plain HTTP. ``login`` is for
    the registry itself, instead of what Docker's configuration has for it."""

    mirrors: tuple[str, ...] = ()
    insecure: tuple[str, ...] = ()
    login: Credentials | None = field(default=None, repr=False)


def endpoints(host: str, settings: RegistrySettings) -> list[Endpoint]:
    """Where to ask for a registry's images, in order."""
    if is_link_local(host):
        raise UserError(
            f"{host} is no registry",
            why="link-local addresses serve this machine's own metadata",
            code="invalid_reference",
        )
    found: list[Endpoint] = []
    for mirror in settings.mirrors:
        name, _, url = mirror.partition("=")
        if name == host and url:
            parsed = httpx.URL(url)
            found.append(Endpoint(url.rstrip("/"), parsed.netloc.decode()))
    if host == DOCKER_HUB:
        return [*found, Endpoint(HUB_ENDPOINT, host)]
    scheme = "http" if host in settings.insecure or is_loopback(host) else "https"
    return [*found, Endpoint(f"{scheme}://{host}", host)]


def is_link_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(httpx.URL(f"http://{host}").host).is_link_local
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    name = httpx.URL(f"http://{host}").host
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """Implements ``ImageSource``."""

    transports: Sequence[Transport]
    drafts: Drafts
    digest: str
    config: ImageConfig
    layers: tuple[SourceLayer, ...]

    @asynccontextmanager
    async def blob(self, layer: SourceLayer, report: Report) -> AsyncGenerator[OpenBlob]:
        wanted = m.Descriptor(layer.digest, layer.size)
        async with self.drafts.draft() as draft:
            await _first(
                self.transports,
                lambda transport: transport.download(
                    wanted,
                    draft.path,
                    lambda done: report(layer.digest, "fetch", done, layer.size),
                ),
                f"layer {layer.digest}",
            )
            yield lambda: draft.path.open("rb")


@asynccontextmanager
async def opened(
    reference: RegistryImage, settings: RegistrySettings, drafts: Drafts
) -> AsyncGenerator[RemoteImage]:
    """Find the image and read its manifest. Raises ImageError (``image_not_found``,
    ``image_denied``, ``image_platform``, ``digest_mismatch``), InfraError."""
    async with httpx.AsyncClient(timeout=TIMEOUT, follow_redirects=True) as client:
        transports = [
            Transport(client, endpoint, reference.name, _login(endpoint, reference.host, settings))
            for endpoint in endpoints(reference.host, settings)
        ]
        yield await _read(reference, transports, drafts)


def _login(endpoint: Endpoint, host: str, settings: RegistrySettings) -> Credentials | None:
    """A mirror is another host, which must not see it."""
    return settings.login if endpoint.host == host else None


async def _read(
    reference: RegistryImage, transports: Sequence[Transport], drafts: Drafts
) -> RemoteImage:
    architecture = m.host_architecture()
    digest = reference.digest
    data = await _manifest(transports, digest or reference.tag, str(reference))
    for _ in range(m.MAX_NESTED):
        digest = digest or m.digest_of(data)
        m.check_digest(f"the manifest of {reference}", data, digest)
        doc = m.document(data)
        if not m.is_index(doc):
            break
        digest = m.choose(m.choices(doc), architecture).digest
        data = await _manifest(transports, digest, str(reference))
    manifest = m.manifest(m.document(data))
    raw = await _first(
        transports,
        lambda transport: transport.document(f"blobs/{manifest.config.digest}"),
        f"the configuration of {reference}",
    )
    m.check_digest(f"the configuration of {reference}", raw.content, manifest.config.digest)
    config = m.configuration(m.document(raw.content), len(manifest.layers), architecture)
    layers = source_layers(manifest, config)
    assert digest is not None
    return RemoteImage(transports, drafts, digest, config.image, layers)


async def _manifest(transports: Sequence[Transport], tag: str, name: str) -> bytes:
    accept = (*m.MANIFESTS, *m.INDEXES)
    answer = await _first(
        transports, lambda transport: transport.document(f"manifests/{tag}", accept), name
    )
    return answer.content


async def _first(
    transports: Sequence[Transport], ask: Callable[[Transport], Awaitable[T]], what: str
) -> T:
    """The first endpoint's answer; a mirror that lacks it or fails is passed over."""
    failure: Exception = Missing()
    for transport in transports:
        try:
            return await ask(transport)
        except (Missing, InfraError, ImageError) as error:
            if isinstance(error, InfraError) and error.code == "disk_full":
                raise
            failure = error
    if isinstance(failure, Missing):
        raise ImageError(
            f"{what} is not in registry {transports[-1].endpoint.host}",
            code="image_not_found",
            http_status=404,
        )
    raise failure
