"""Values that cross folders: ids, image configuration, resources. No behaviour beyond checks."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
SANDBOX_ID = re.compile(r"^[a-z0-9]{20}$")


def new_id(prefix: str = "") -> str:
    """20 characters ``[a-z0-9]`` that begin with ``prefix`` (a sandbox's is its node of birth)."""
    return prefix + "".join(secrets.choice(ID_ALPHABET) for _ in range(20 - len(prefix)))


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The part of an OCI image configuration that a sandbox honours.

    ``env`` holds ``NAME=value`` strings in the image's order; ``user`` is as
    written in the image (name, uid, or either with ``:group``), empty if unset.
    """

    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict[str, str])
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    architecture: str = "amd64"


@dataclass(frozen=True, slots=True)
class Resources:
    """Size of a sandbox. ``disk_mib`` is the size of the thin writable disk."""

    vcpus: int
    memory_mib: int = 512
    disk_mib: int = 8192


@dataclass(frozen=True, slots=True)
class Guest:
    """What the agent is told at its start: identity, environment, user, folders to make."""

    env: dict[str, str] = field(default_factory=dict[str, str])
    user: str | None = None
    workdir: str | None = None
    volumes: tuple[str, ...] = ()
