"""Bodies of requests, and answers as E2B names their fields (E2B.md §1.1)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentenv.cluster.contract import NewSandbox
from agentenv.errors import UserError
from agentenv.sandbox.record import ENVD_VERSION, SandboxInfo
from agentenv.store.records import BuildRow, ImageRow, TemplateRow

MAX_TIMEOUT = 30 * 24 * 3600  # seconds
MAX_VARIABLE = 128 << 10  # bytes: Linux's MAX_ARG_STRLEN
MAX_METADATA = 64 << 10


def _text(value: str) -> bytes:
    """Bytes of a text that others can take. Raises ValueError for a NUL or half a character."""
    if "\0" in value:
        raise ValueError("it holds a NUL")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair") from error


class CreateBody(BaseModel):
    """NewSandbox and NewSandboxV2; ``cpuCount``, ``memoryMB``, ``diskSizeMB`` are our additions."""

    model_config = ConfigDict(extra="allow")

    templateID: str = Field(min_length=1, max_length=512)
    timeout: int | None = Field(None, ge=1, le=MAX_TIMEOUT, strict=True)
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = None
    cpuCount: int | None = Field(None, ge=1, le=64, strict=True)
    memoryMB: int | None = Field(None, ge=64, le=1 << 20, strict=True)
    diskSizeMB: int | None = Field(None, ge=64, le=4 << 20, strict=True)

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

    def request(self, *, secure: bool) -> NewSandbox:
        """Raises UserError for a field that this version cannot honour."""
        if asked := sorted(k for k, v in (self.model_extra or {}).items() if v and k in LATER):
            raise UserError(
                f"{asked[0]} is not supported by this version",
                fix="create the sandbox without it",
                code="not_supported",
            )
        return NewSandbox(
            template=self.templateID,
            timeout=self.timeout,
            metadata=self.metadata or {},
            env=self.envVars or {},
            secure=secure,
            allow_internet=self.allow_internet_access is not False,
            vcpus=self.cpuCount,
            memory_mib=self.memoryMB,
            disk_mib=self.diskSizeMB,
        )


# Fields of E2B's that need what later issues bring; ignoring them would be a lie.
LATER = ("autoPause", "autoResume", "network", "mcp", "iam", "volumeMounts")


class TimeoutBody(BaseModel):
    timeout: int = Field(ge=0, le=MAX_TIMEOUT)


class RefreshBody(BaseModel):
    duration: int | None = Field(None, ge=0, le=3600)


class ConnectBody(BaseModel):
    timeout: int | None = Field(None, ge=0, le=MAX_TIMEOUT)


def created(info: SandboxInfo, node: str, domain: str | None) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "templateID": info.template_id,
        "sandboxID": info.id,
        "clientID": node,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": info.access_token,
        "trafficAccessToken": None,
        "domain": domain,
    }
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
        "state": str(info.state),
        "envdVersion": ENVD_VERSION,
        "metadata": info.metadata,
    }
    return answer | ({"alias": info.alias} if info.alias else {})


def detailed(info: SandboxInfo, node: str, domain: str | None) -> dict[str, Any]:
    return listed(info, node) | {
        "envdAccessToken": info.access_token,
        "domain": domain,
        "allowInternetAccess": info.allow_internet,
        "lifecycle": {"autoResume": False, "onTimeout": "kill"},
    }


def template(row: TemplateRow, build: BuildRow | None) -> dict[str, Any]:
    return {
        "templateID": row.id,
        "buildID": build.id if build else "",
        "names": list(row.names),
        "aliases": [name.rpartition("/")[2] for name in row.names],
        "tags": row.tags,
        "public": row.public,
        "imageID": build.image_id if build else None,
        "createdAt": row.created.isoformat(),
    }


def image(row: ImageRow) -> dict[str, Any]:
    return {
        "imageID": row.id,
        "reference": row.reference,
        "digest": row.digest,
        "createdAt": row.created.isoformat(),
        "layers": list(row.layers),
        **row.doc,
    }
