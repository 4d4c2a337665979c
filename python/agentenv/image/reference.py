"""What a user may call an image by, parsed. Pure.

``[docker://][HOST[:PORT]/]NAME[:TAG][@DIGEST]``, ``oci:DIR[:TAG]``, ``oci-archive:FILE[:TAG]``,
``docker-archive:FILE[:NAME:TAG]``, ``tar:FILE``, ``dir:DIR``, ``debootstrap:SUITE[+PKG,PKG…]``,
``store:ID`` (an image that another node put into the store), ``shipped:NAME@KEY`` (one that is
assembled for a template that comes with AgentENV).
The grammar of registry references is Docker's, the transports are named as skopeo names them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import UserError

DOCKER_HUB = "docker.io"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"^{_COMPONENT}(?:/{_COMPONENT})*$")
_HOST = re.compile(
    r"^(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::\d{1,5})?$"
)
_TAG = re.compile(r"^\w[\w.-]{0,127}$", re.ASCII)
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_SUITE = re.compile(r"^[a-z][a-z0-9.-]*$")
_STORED = re.compile(r"^[0-9a-f]{20}$")
_SHIPPED = re.compile(r"^([a-z0-9][a-z0-9-]*)@([0-9a-f]{20})$")
_PACKAGE = re.compile(r"^[a-z0-9][a-z0-9+.-]+$")


@dataclass(frozen=True, slots=True)
class RegistryImage:
    """``digest`` wins over ``tag`` where both are given."""

    host: str
    name: str
    tag: str
    digest: str | None = None

    def __str__(self) -> str:
        short = self.name.removeprefix("library/") if self.host == DOCKER_HUB else self.name
        prefix = "" if self.host == DOCKER_HUB else f"{self.host}/"
        return f"{prefix}{short}@{self.digest}" if self.digest else f"{prefix}{short}:{self.tag}"


@dataclass(frozen=True, slots=True)
class LocalImage:
    """``kind`` is ``oci``, ``oci-archive``, ``docker-archive``, ``tar`` or ``dir``."""

    kind: str
    path: Path
    tag: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" + (f":{self.tag}" if self.tag else "")


@dataclass(frozen=True, slots=True)
class DebianImage:
    """A Debian (or derivative's) suite with packages beside the minimal ones, in order."""

    suite: str
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"debootstrap:{self.suite}" + (
            f"+{','.join(self.packages)}" if self.packages else ""
        )


@dataclass(frozen=True, slots=True)
class StoreImage:
    """An image in the block store, by its id."""

    id: str

    def __str__(self) -> str:
        return f"store:{self.id}"


@dataclass(frozen=True, slots=True)
class ShippedImage:
    """An image by the template it is assembled for; ``key`` names how (see `template/shipped`)."""

    name: str
    key: str

    def __str__(self) -> str:
        return f"shipped:{self.name}@{self.key}"


ImageReference = RegistryImage | LocalImage | DebianImage | StoreImage | ShippedImage
LOCAL_KINDS = ("oci", "oci-archive", "docker-archive", "tar", "dir")


def parse(text: str) -> ImageReference:
    """Raises UserError (``invalid_reference``), naming the part that cannot be."""
    scheme, _, rest = text.partition(":")
    if scheme == "debootstrap":
        return _debian(text, rest)
    if scheme == "store":
        if not _STORED.match(rest):
            raise _invalid(text, f"{rest!r} is no image id (20 hex digits)")
        return StoreImage(rest)
    if scheme == "shipped":
        if not (found := _SHIPPED.match(rest)):
            raise _invalid(text, f"{rest!r} is no NAME@KEY (20 hex digits)")
        return ShippedImage(*found.groups())
    if scheme in LOCAL_KINDS:
        return _local(text, scheme, rest)
    return _registry(text, text.removeprefix("docker://"))


def is_remote(text: str) -> bool:
    """Whether ``text`` names a registry's or Debian's image, not a path of somebody's machine."""
    return not isinstance(parse(text), LocalImage)


def _debian(text: str, rest: str) -> DebianImage:
    suite, _, packages = rest.partition("+")
    names = tuple(name for name in packages.split(",") if name)
    if not _SUITE.match(suite):
        raise _invalid(text, f"{suite!r} is no suite")
    for name in names:
        if not _PACKAGE.match(name):
            raise _invalid(text, f"{name!r} is no package name")
    return DebianImage(suite, names)


def _local(text: str, kind: str, rest: str) -> LocalImage:
    path, tag = rest, None
    if kind in ("oci", "oci-archive"):
        before, colon, after = rest.rpartition(":")
        if colon and "/" not in after:
            path, tag = before, after
    elif kind == "docker-archive":
        path, _, tag = rest.partition(":")
    if not path:
        raise _invalid(text, "it names no path")
    return LocalImage(kind, Path(path).absolute(), tag or None)


def _registry(text: str, rest: str) -> RegistryImage:
    rest, _, digest = rest.partition("@")
    if digest and not _DIGEST.match(digest):
        raise _invalid(text, f"{digest!r} is no sha256 digest")
    host, slash, name = rest.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, name = DOCKER_HUB, rest
    if host == f"index.{DOCKER_HUB}":
        host = DOCKER_HUB
    name, colon, tag = name.partition(":")
    if host == DOCKER_HUB and "/" not in name:
        name = f"library/{name}"
    if not _HOST.match(host):
        raise _invalid(text, f"{host!r} is no host")
    if not _NAME.match(name) or len(name) > 255:
        raise _invalid(text, f"{name!r} is no repository name (lower case, digits, . _ - /)")
    if colon and not _TAG.match(tag):
        raise _invalid(text, f"{tag!r} is no tag")
    return RegistryImage(host, name, tag or "latest", digest or None)


def _invalid(text: str, why: str) -> UserError:
    return UserError(f"{text!r} is no image reference", why=why, code="invalid_reference")
