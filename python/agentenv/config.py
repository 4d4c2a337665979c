"""Configuration: read once at the rim, passed on as values.

Order, later wins: built-in defaults, ``HOME/config.toml`` (or ``$AENV_CONFIG``), ``AENV_*``
environment variables, command-line flags. ``aenv config`` prints the result with units and reasons.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from agentenv.errors import UserError

AUTO = "auto"
ENGINES = ("qemu", "gvisor")
ENGINE_WORDS = (AUTO, *ENGINES)
DEFAULT_HOME = Path("/var/lib/agentenv")
# Where a home that is not on its own folder remembers its store, for every verb.
STORE_NOTE = "store-url"
MOST_BYTES = 1 << 60


def _key(default: Any, unit: str, reason: str) -> Any:
    return field(default=default, metadata={"unit": unit, "reason": reason})


@dataclass(frozen=True, slots=True)
class Config:
    """Every key of the configuration file, with its unit and the reason for its default."""

    home: Path = _key(DEFAULT_HOME, "directory", "all durable state of this node lies below it")
    listen: str = _key("127.0.0.1:8000", "HOST:PORT", "loopback: expose it on purpose, with TLS")
    tls_cert: str = _key("", "PEM file", "empty: plain HTTP; may change while it serves")
    tls_key: str = _key("", "PEM file", "of the certificate in tls_cert")
    domain: str = _key("localhost", "DNS name", "sandboxes answer at {port}-{id}.{domain}")
    store: str = _key(
        "", "DIRECTORY or s3://BUCKET[/PREFIX][?endpoint=URL&…]", "empty: HOME/store; the truth"
    )
    cache_size: int = _key(20 << 30, "bytes", "chunks kept on this disk, least used go first")
    cache_free: int = _key(2 << 30, "bytes", "left free on the cache's disk, whatever the size")
    store_patience: float = _key(
        30.0,
        "seconds",
        "a read waits so long for the store, then the sandbox stops until it is back",
    )
    peers: tuple[str, ...] = _key((), "http://HOST:PORT", "nodes asked for chunks before the store")
    peer_listen: str = _key("", "HOST:PORT", "empty: no node is answered; needs peer_token")
    peer_token: str = _key("", "file", "the secret that nodes of one cluster share")
    engine: str = _key(
        AUTO, "auto|qemu|gvisor", "auto: qemu where KVM works, else gvisor, else qemu emulating"
    )
    vcpus: int = _key(0, "CPUs, 0: 1 if emulated, else 2", "emulated CPUs share the host's cores")
    memory_mib: int = _key(512, "MiB", "fits a shell, Python and a test run")
    disk_mib: int = _key(8192, "MiB", "thin: only written blocks take space on the host")
    sandbox_timeout: int = _key(300, "seconds", "what E2B's SDK sends when the user sets nothing")
    boot_deadline: float = _key(
        120.0, "seconds", "a boot takes 1.5-3 s emulated, emulated, longer in a crowd"
    )
    request_wait: float = _key(
        10.0, "seconds", "how long the data plane waits for a restarting API"
    )
    warm_machines: int = _key(
        4, "machines", "at most so many wait to be restored, as demand goes; 34 MB each, 0: none"
    )
    slots_ahead: int = _key(2, "slots", "network slots prepared before they are asked for")
    inner_network: str = _key(
        "10.233.0.0/30", "CIDR", "the same in each sandbox, so snapshots move"
    )
    uplink_network: str = _key("10.234.0.0/16", "CIDR", "one /31 per slot: 32768 sandboxes a node")
    uid_base: int = _key(900_000, "uid", "slot n runs as uid_base + n; must be unused on the host")
    dns: tuple[str, ...] = _key((), "addresses", "empty: the host's /etc/resolv.conf")
    allow_private: tuple[str, ...] = _key(
        (), "CIDRs", "private ranges a sandbox may reach; none by default"
    )
    upload_size: int = _key(4 << 30, "bytes", "the files of one COPY step of a template")
    registry_mirrors: tuple[str, ...] = _key(
        (), "HOST=URL", "tried before the registry they stand for"
    )
    insecure_registries: tuple[str, ...] = _key(
        (), "HOST[:PORT]", "plain HTTP allowed; loopback always is"
    )

    @property
    def runtime_dir(self) -> Path:
        """Sockets, namespaces: short (a unix socket path has 107 bytes), gone after a reboot."""
        return Path("/run/agentenv") / self.tag

    @property
    def tag(self) -> str:
        """8 hex digits that tell this home's host objects from another's."""
        return hashlib.blake2s(str(self.home).encode(), digest_size=4).hexdigest()

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """Certificate and key of the public listener."""
        if not self.tls_cert:
            return None
        return Path(self.tls_cert).absolute(), Path(self.tls_key).absolute()

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def api_key_file(self) -> Path:
        return self.home / "secrets" / "api-key"

    @property
    def store_url(self) -> str:
        return self.store or str(self.home / "store")

    @property
    def api_socket(self) -> Path:
        return self.runtime_dir / "api.sock"


def load(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Config:
    """The effective configuration; flags with value None count as not given.

    Raises UserError (``invalid_config``) naming the key and what it takes.
    """
    home = Path(flags.get("home") or environ.get("AENV_HOME") or DEFAULT_HOME).absolute()
    path = Path(environ.get("AENV_CONFIG") or home / "config.toml")
    known = {item.name for item in fields(Config)}
    values: dict[str, Any] = _from_file(path, known) if path.exists() else {}
    for name in known:
        if (text := environ.get(f"AENV_{name.upper()}")) is not None:
            values[name] = text
    values.update({name: value for name, value in flags.items() if value is not None})
    values["home"] = home
    if not values.get("store") and (home / STORE_NOTE).is_file():
        values["store"] = (home / STORE_NOTE).read_text().strip()
    return _checked(replace(Config(), **{k: _coerce(k, v) for k, v in values.items()}))


def _from_file(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise _invalid(str(path), "cannot be read", str(error)) from error
    if unknown := sorted(values.keys() - known):
        raise _invalid(str(path), f"has unknown keys {', '.join(unknown)}", "see: aenv config")
    return values


def _coerce(name: str, value: Any) -> Any:
    default: object = getattr(Config(), name)
    kind: type[Any] = type(default)
    try:
        if kind is tuple:
            parts: list[Any] = value.split(",") if isinstance(value, str) else value
            return tuple(str(part).strip() for part in parts if str(part).strip())
        return kind(value)
    except (TypeError, ValueError) as error:
        raise _invalid(name, f"is {value!r}", f"it takes a {kind.__name__}") from error


def _checked(config: Config) -> Config:
    if config.engine not in ENGINE_WORDS:
        takes = ", ".join(ENGINE_WORDS)
        raise _invalid("engine", f"is {config.engine!r}", f"it takes one of {takes}")
    host, _, port = config.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise _invalid("listen", f"is {config.listen!r}", "it takes HOST:PORT")
    if bool(config.tls_cert) != bool(config.tls_key):
        missing = "tls_key" if config.tls_cert else "tls_cert"
        raise _invalid(missing, "is not given", "TLS takes tls_cert and tls_key, or neither")
    for name in ("inner_network", "uplink_network"):
        text = cast(str, getattr(config, name))
        try:
            ipaddress.IPv4Network(text)
        except ValueError as error:
            raise _invalid(name, f"is {text!r}", str(error)) from error
    if config.peer_listen and not config.peer_token:
        raise _invalid("peer_token", "is not given", "nodes answer only who has the secret")
    if not config.store_url.startswith(("/", "s3://", "file:///")):
        raise _invalid("store", f"is {config.store!r}", "it takes a directory or s3://BUCKET…")
    if config.peer_token and not Path(config.peer_token).is_file():
        raise _invalid("peer_token", f"is {config.peer_token!r}", "there is no such file")
    if max(config.cache_size, config.cache_free) > MOST_BYTES:
        raise _invalid("cache_size", "is larger than any disk", f"give at most {MOST_BYTES}")
    positive = (
        "memory_mib",
        "disk_mib",
        "sandbox_timeout",
        "boot_deadline",
        "uid_base",
        "cache_size",
        "upload_size",
    )
    for name in positive:
        if cast(float, getattr(config, name)) <= 0:
            raise _invalid(name, "is not positive", "give a number above 0")
    return config


def _invalid(name: str, what: str, why: str) -> UserError:
    return UserError(f"configuration {name} {what}", why=why, code="invalid_config")


def render(config: Config) -> str:
    """The configuration as a TOML document that explains itself."""
    lines: list[str] = []
    for item in fields(config):
        value: Any = getattr(config, item.name)
        lines.append(f"# {item.metadata['unit']}: {item.metadata['reason']}")
        lines.append(f"{item.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in cast("tuple[Any, ...]", value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
