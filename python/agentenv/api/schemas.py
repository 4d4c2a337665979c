"""Bodies of requests, and answers as E2B names their fields (E2B.md §1.1)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentenv.cluster.contract import SnapshotInfo
from agentenv.errors import UserError
from agentenv.sandbox.logs import Entry
from agentenv.sandbox.metrics import Sample
from agentenv.sandbox.network import Policy, host_mask, ranges
from agentenv.sandbox.record import (
    ENVD_VERSION,
    Idempotency,
    Lifecycle,
    NewSandbox,
    SandboxInfo,
)
from agentenv.sandbox.suspend import How
from agentenv.store.records import ImageRow

MAX_TIMEOUT = 30 * 24 * 3600  # seconds
MAX_VARIABLE = 128 << 10  # bytes: Linux's MAX_ARG_STRLEN
MAX_METADATA = 64 << 10
IDEMPOTENCY_KEY = re.compile(r"[a-z0-9-]{1,255}")


def _text(value: str) -> bytes:
    """Bytes of a text that others can take. Raises ValueError for a NUL or half a character."""
    if "\0" in value:
        raise ValueError("it holds a NUL")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair") from error


class ErrorBody(BaseModel):
    """Every answer of 300 and above (E2B.md §1)."""

    code: int
    message: str
    error_code: str
    details: dict[str, Any] | None = None


class EgressBody(BaseModel):
    """SandboxNetworkUpdateConfig: replaces all that was; what is left out is open again."""

    model_config = ConfigDict(extra="allow")

    allowOut: list[str] | None = None
    denyOut: list[str] | None = None
    allow_internet_access: bool | None = None

    def rules(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Allowed and denied ranges. Raises UserError."""
        refuse(self, ("dnsServers", "egressProxy", "rules", "httpsPorts"), "network.")
        extra = self.model_extra or {}
        if fixed := sorted({"allowPublicTraffic", "maskRequestHost"} & extra.keys()):
            raise UserError(f"{fixed[0]} cannot be changed", why="it is chosen at create")
        return ranges("allowOut", self.allowOut or ()), ranges("denyOut", self.denyOut or ())


class NetworkBody(EgressBody):
    allowPublicTraffic: bool | None = None
    maskRequestHost: str | None = None

    def policy(self, internet: bool) -> Policy:
        """Raises UserError."""
        allow, deny = self.rules()
        return Policy(
            internet=internet,
            allow_out=allow,
            deny_out=deny,
            public=self.allowPublicTraffic is not False,
            mask_host=host_mask(self.maskRequestHost) if self.maskRequestHost else None,
        )


class CreateBody(BaseModel):
    """NewSandbox and NewSandboxV2; sizes and ``engine`` are our additions."""

    model_config = ConfigDict(extra="allow")

    templateID: str = Field(min_length=1, max_length=512)
    timeout: int | None = Field(None, ge=1, le=MAX_TIMEOUT, strict=True)
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = None
    network: NetworkBody | None = None
    autoPause: bool | None = None
    autoPauseMemory: bool | None = None
    autoResume: ResumeFlag | None = None
    cpuCount: int | None = Field(None, ge=1, le=64, strict=True)
    memoryMB: int | None = Field(None, ge=64, le=1 << 20, strict=True)
    diskSizeMB: int | None = Field(None, ge=64, le=4 << 20, strict=True)
    engine: str | None = Field(None, max_length=32)

    @field_validator("envVars")
    @classmethod
    def _variables(cls, given: dict[str, str] | None) -> dict[str, str] | None:
        for name, value in (given or {}).items():
            if not name or "=" in name:
                raise ValueError(f"{name!r} is no name of a variable")
            if len(_text(name)) + len(_text(value)) + 2 > MAX_VARIABLE:
                raise ValueError(f"{name!r} is longer than the {MAX_VARIABLE} bytes Linux takes")
        return given

    @field_validator("metadata")
    @classmethod
    def _notes(cls, given: dict[str, str] | None) -> dict[str, str] | None:
        if sum(len(_text(k)) + len(_text(v)) for k, v in (given or {}).items()) > MAX_METADATA:
            raise ValueError(f"it is longer than {MAX_METADATA} bytes in all")
        return given

    def request(self, *, secure: bool, idempotency_key: str | None) -> NewSandbox:
        """Raises UserError for a field that this version cannot honour."""
        refuse(self, LATER)
        network = self.network or NetworkBody()
        policy = network.policy(self.allow_internet_access is not False)
        if not policy.public and not secure:
            raise UserError(
                "network.allowPublicTraffic=false needs secure=true",
                why="the in-guest API would be open to everybody",
            )
        return NewSandbox(
            template=self.templateID,
            timeout=self.timeout,
            metadata=self.metadata or {},
            env=self.envVars or {},
            secure=secure,
            network=policy,
            lifecycle=self._lifecycle(),
            idempotency=self._idempotency(idempotency_key),
            vcpus=self.cpuCount,
            memory_mib=self.memoryMB,
            disk_mib=self.diskSizeMB,
            engine=self.engine,
        )

    def _lifecycle(self) -> Lifecycle:
        resume = self.autoResume is not None and self.autoResume.enabled
        if self.autoPauseMemory is False and (resume or not self.autoPause):
            raise UserError(
                "autoPauseMemory=false needs autoPause and goes without autoResume",
                why="a sandbox without its memory is booted, which traffic does not wait for",
            )
        return Lifecycle(bool(self.autoPause), self.autoPauseMemory is not False, resume)

    def _idempotency(self, key: str | None) -> Idempotency | None:
        if key is None:
            return None
        if not IDEMPOTENCY_KEY.fullmatch(key):
            raise UserError("Idempotency-Key is 1 to 255 characters of a-z, 0-9 and -")
        text = json.dumps(self.model_dump(exclude_none=True), sort_keys=True)
        return Idempotency(key, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


# Fields of E2B's that need what later issues bring; ignoring them would be a lie.
LATER = ("mcp", "iam", "volumeMounts")


def refuse(body: BaseModel, names: Sequence[str], where: str = "") -> None:
    """Raises UserError if a field is set that this version cannot honour."""
    if asked := sorted(k for k, v in (body.model_extra or {}).items() if v and k in names):
        raise UserError(
            f"{where}{asked[0]} is not supported by this version",
            fix="leave it out",
            code="not_supported",
        )


class TimeoutBody(BaseModel):
    timeout: int = Field(ge=0, le=MAX_TIMEOUT, strict=True)


class RefreshBody(BaseModel):
    duration: int | None = Field(None, ge=0, le=3600)


class ConnectBody(BaseModel):
    timeout: int | None = Field(default=None, ge=0, le=MAX_TIMEOUT)
    memory: bool | None = None


class PauseBody(BaseModel):
    memory: bool | None = None
    requireHealthyGuest: bool | None = None

    def how(self) -> How:
        return How(self.memory is not False, bool(self.requireHealthyGuest))


class SnapshotBody(BaseModel):
    name: str | None = Field(default=None, min_length=1, max_length=256)
    memory: bool | None = None

    def how(self) -> How:
        return How(self.memory is not False)


class RollbackBody(BaseModel):
    snapshotID: str | None = Field(default=None, min_length=1, max_length=512)


class ForkBody(BaseModel):
    timeout: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT, strict=True)
    count: int = Field(default=1, ge=1, le=100, strict=True)


class ResumeFlag(BaseModel):
    enabled: bool = False


def created(info: SandboxInfo, node: str, domain: str | None) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "templateID": info.template_id,
        "sandboxID": info.id,
        "clientID": node,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": info.access_token,
        "trafficAccessToken": info.traffic_token,
        "domain": domain,
    }
    if info.restore:
        answer["restore"] = asdict(info.restore)
    return answer | ({"alias": info.alias} if info.alias else {})


def listed(info: SandboxInfo, node: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "templateID": info.template_id,
        "sandboxID": info.id,
        "clientID": node,
        "startedAt": info.started_at.isoformat(),
        "endAt": info.end_at.isoformat(),
        "cpuCount": info.resources.vcpus,
        "memoryMB": info.resources.memory_mib,
        "diskSizeMB": info.resources.disk_mib,
        "engine": info.engine,
        "state": str(info.state.shown),
        "envdVersion": ENVD_VERSION,
        "metadata": info.metadata,
    }
    return answer | ({"alias": info.alias} if info.alias else {})


def detailed(info: SandboxInfo, node: str, domain: str | None) -> dict[str, Any]:
    return listed(info, node) | {
        "envdAccessToken": info.access_token,
        "domain": domain,
        "trafficAccessToken": info.traffic_token,
        "allowInternetAccess": info.network.internet,
        "network": network(info.network),
        "lifecycle": {
            "autoResume": info.lifecycle.resume,
            "onTimeout": "pause" if info.lifecycle.pause else "kill",
        },
        "pauseMode": "full" if info.lifecycle.memory else "filesystem",
    }


def snapshot(info: SnapshotInfo) -> dict[str, Any]:
    return {
        "snapshotID": info.id,
        "names": list(info.names),
        "templateID": info.template_id,
        "buildID": info.build_id,
        "sandboxID": info.sandbox_id,
        "createdAt": info.created.isoformat(),
    }


def network(policy: Policy) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "allowPublicTraffic": policy.public,
        "allowOut": list(policy.allow_out),
        "denyOut": list(policy.deny_out),
    }
    return answer | ({"maskRequestHost": policy.mask_host} if policy.mask_host else {})


def metric(sample: Sample) -> dict[str, Any]:
    return {
        "timestamp": datetime.fromtimestamp(sample.time, UTC).isoformat(),
        "timestampUnix": int(sample.time),
        "cpuCount": sample.cpus,
        "cpuUsedPct": sample.cpu_percent,
        "memUsed": sample.memory_used,
        "memTotal": sample.memory_total,
        "memCache": sample.memory_cache,
        "diskUsed": sample.disk_used,
        "diskTotal": sample.disk_total,
    }


def log_entry(entry: Entry) -> dict[str, Any]:
    return {
        "timestamp": entry.time.isoformat(),
        "level": entry.level,
        "message": entry.message,
        "fields": entry.fields,
    }


def image(row: ImageRow) -> dict[str, Any]:
    return {
        "imageID": row.id,
        "reference": row.reference,
        "digest": row.digest,
        "createdAt": row.created.isoformat(),
        **{name: value for name, value in row.doc.items() if name != "keys"},
    }
