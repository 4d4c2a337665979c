"""OCI and Docker manifests, indexes and configurations as values. Pure.

Field names and media types: OCI image-spec 1.1, Docker distribution manifest v2 schema 2.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import dataclass
from typing import Any, cast

from agentenv.errors import ImageError
from agentenv.model import ImageConfig

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MAX_BYTES = 8 << 20  # of a manifest or configuration; registries refuse more than 4 MiB
MAX_LAYERS = 1024
MAX_NESTED = 4  # indexes within indexes
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob by digest, with its size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One manifest of an index: digest, platform, and the name an OCI layout gives it."""

    digest: str
    architecture: str
    os: str
    name: str = ""
    nested: bool = False  # it is an index itself


def host_architecture() -> str:
    """This machine's architecture by OCI's names."""
    machine = platform.machine()
    return _MACHINES.get(machine, machine)


def digest_of(data: bytes) -> str:
    """``sha256:`` and the digest in hex."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_digest(what: str, data: bytes, expected: str) -> None:
    """Raises ImageError (``digest_mismatch``)."""
    if (found := digest_of(data)) != expected:
        raise mismatch(what, expected, found)


def mismatch(what: str, expected: str, found: str) -> ImageError:
    return ImageError(
        f"{what} is damaged", why=f"its digest is {found}, not {expected}", code="digest_mismatch"
    )


def document(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. Raises ImageError (``manifest_invalid``)."""
    if len(data) > MAX_BYTES:
        raise _invalid(f"it has {len(data)} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(str(error)) from error
    if not isinstance(found, dict):
        raise _invalid("it is no JSON object")
    return cast("dict[str, Any]", found)


def is_index(doc: dict[str, Any]) -> bool:
    return doc.get("mediaType") in INDEXES or ("manifests" in doc and "layers" not in doc)


def choices(doc: dict[str, Any]) -> list[Choice]:
    """What an index offers. Raises ImageError."""
    try:
        return [_choice(entry) for entry in doc["manifests"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise _invalid(f"its index lacks {error}") from error


def _choice(entry: dict[str, Any]) -> Choice:
    where: dict[str, Any] = entry.get("platform") or {}
    notes: dict[str, Any] = entry.get("annotations") or {}
    return Choice(
        _digest(entry["digest"]),
        str(where.get("architecture", "")),
        str(where.get("os", "")),
        str(notes.get("org.opencontainers.image.ref.name", "")),
        entry.get("mediaType") in INDEXES,
    )


def choose(offered: list[Choice], architecture: str) -> Choice:
    """The manifest for Linux on this architecture; an unmarked only one is taken as it is.

    Raises ImageError (``image_platform``) naming what there is.
    """
    for choice in offered:
        if choice.os in ("linux", "") and choice.architecture == architecture:
            return choice
    unmarked = [choice for choice in offered if not choice.architecture]
    if len(unmarked) == 1 == len(offered):
        return unmarked[0]
    there = sorted({f"{c.os}/{c.architecture}" for c in offered if c.architecture != "unknown"})
    raise wrong_platform(architecture, ", ".join(there) or "nothing")


def wrong_platform(architecture: str, there: str) -> ImageError:
    return ImageError(
        f"the image is not made for linux/{architecture}",
        why=f"there is {there}",
        code="image_platform",
    )


def manifest(doc: dict[str, Any]) -> Manifest:
    """Raises ImageError (``manifest_invalid``), also for Docker's schema 1, which nobody pushes."""
    if doc.get("schemaVersion") != 2:
        raise _invalid(f"schema version {doc.get('schemaVersion')!r} is not supported")
    try:
        found = Manifest(
            _descriptor(doc["config"]), tuple(_descriptor(layer) for layer in doc["layers"])
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _invalid(f"it lacks {error}") from error
    if len(found.layers) > MAX_LAYERS:
        raise _invalid(f"it has {len(found.layers)} layers")
    return found


def _descriptor(entry: dict[str, Any]) -> Descriptor:
    size = int(entry["size"])
    if size < 0:
        raise ValueError("a size that is not negative")
    return Descriptor(_digest(entry["digest"]), size)


def _digest(text: Any) -> str:
    if not isinstance(text, str) or not _DIGEST.match(text):
        raise _invalid(f"{text!r} is no sha256 digest")
    return text


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the image's configuration says of its processes, and its layers' diff ids."""

    image: ImageConfig
    diff_ids: tuple[str, ...]


def configuration(doc: dict[str, Any], layers: int, architecture: str) -> Configuration:
    """Raises ImageError: ``manifest_invalid``, ``image_platform``."""
    made_for, system = doc.get("architecture", architecture), doc.get("os", "linux")
    if made_for != architecture or system != "linux":
        raise wrong_platform(architecture, f"{system}/{made_for}")
    try:
        diff_ids = tuple(_digest(text) for text in doc["rootfs"]["diff_ids"])
        config: dict[str, Any] = doc.get("config") or {}
        labels: dict[str, Any] = config.get("Labels") or {}
        image = ImageConfig(
            env=_words(config.get("Env")),
            working_dir=str(config.get("WorkingDir") or ""),
            user=str(config.get("User") or ""),
            entrypoint=_words(config.get("Entrypoint")),
            cmd=_words(config.get("Cmd")),
            labels={key: str(value) for key, value in labels.items()},
            exposed_ports=tuple(sorted(config.get("ExposedPorts") or ())),
            volumes=tuple(sorted(config.get("Volumes") or ())),
            architecture=made_for,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _invalid(f"its configuration lacks {error}") from error
    if len(diff_ids) != layers:
        raise _invalid(f"it has {layers} layers and {len(diff_ids)} diff ids")
    return Configuration(image, diff_ids)


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return ("/bin/sh", "-c", value)
    return tuple(str(word) for word in value or ())


def _invalid(why: str) -> ImageError:
    return ImageError("the image's manifest is invalid", why=why, code="manifest_invalid")
