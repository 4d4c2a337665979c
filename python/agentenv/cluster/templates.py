"""What the API asks of templates, and the answer of one machine."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from agentenv.errors import Conflict, NotFound
from agentenv.sandbox.logs import Level
from agentenv.store.records import DEFAULT_TAG, BuildRow, Records, TemplateRow
from agentenv.template import names
from agentenv.template.bases import Login
from agentenv.template.builds import Builds, Progress
from agentenv.template.recipe import Recipe


class Templates(Protocol):
    """``key`` is an id, a name or ``name:tag``. NotFound (``template_not_found``) if there is none.

    Builds go on when the caller leaves. See ``template.builds`` for what they raise.
    """

    async def all(self) -> Sequence[tuple[TemplateRow, Sequence[BuildRow]]]:
        """Each with its builds, newest first."""
        ...

    async def get(self, key: str) -> tuple[TemplateRow, Sequence[BuildRow]]: ...

    async def remove(self, key: str) -> None:
        """The build that a tag means; without a tag the whole template."""
        ...

    async def publish(self, key: str, public: bool) -> TemplateRow: ...

    async def tag(self, key: str, tags: Sequence[str]) -> tuple[BuildRow, Sequence[str]]:
        """Let more tags mean the build that ``key`` means."""
        ...

    async def untag(self, key: str, tags: Sequence[str]) -> None: ...

    async def request(
        self, name: str, tags: Sequence[str], resources: Mapping[str, int]
    ) -> tuple[TemplateRow, BuildRow]: ...

    async def has_files(self, name: str) -> bool: ...
    async def put_files(self, name: str, pieces: AsyncIterable[bytes]) -> int: ...

    async def begin(self, key: str, build_id: str, plan: Recipe, login: Login | None) -> None: ...

    async def progress(
        self, key: str, build_id: str, offset: int, limit: int, level: Level | None
    ) -> Progress: ...

    async def cancel(self, key: str, build_id: str) -> None: ...


class LocalTemplates:
    """Implements ``Templates``."""

    def __init__(self, records: Records, builds: Builds) -> None:
        self._records, self._builds = records, builds

    async def all(self) -> Sequence[tuple[TemplateRow, Sequence[BuildRow]]]:
        rows = await self._records.templates()
        return [(row, await self._records.builds(row.id)) for row in rows]

    async def get(self, key: str) -> tuple[TemplateRow, Sequence[BuildRow]]:
        row = await self._find(key)
        return row, await self._records.builds(row.id)

    async def _find(self, key: str) -> TemplateRow:
        row = await self._records.template(key.partition(":")[0].lower())
        if row is None:
            raise NotFound(f"template '{key}' not found", code="template_not_found")
        return row

    async def _build(self, key: str) -> tuple[TemplateRow, BuildRow]:
        row = await self._find(key)
        tag = key.lower().partition(":")[2] or DEFAULT_TAG
        build = await self._records.build(row.tags[tag]) if tag in row.tags else None
        if build is None:
            raise NotFound(f"template '{key}' has no build", code="template_not_found")
        return row, build

    async def remove(self, key: str) -> None:
        if ":" not in key:
            await self._builds.forget(await self._find(key))
            return
        row, build = await self._build(key)
        left = {tag: build_id for tag, build_id in row.tags.items() if build_id != build.id}
        if left:
            await self._records.put_template(replace(row, tags=left))
            await self._builds.tidy(row.id)
        else:
            await self._builds.forget(row)

    async def publish(self, key: str, public: bool) -> TemplateRow:
        row = replace(await self._find(key), public=public)
        await self._records.put_template(row)
        return row

    async def tag(self, key: str, tags: Sequence[str]) -> tuple[BuildRow, Sequence[str]]:
        row, build = await self._build(key)
        wanted = names.check_tags(key.lower().partition(":")[0], tags)
        await self._records.put_template(
            replace(row, tags={**row.tags, **dict.fromkeys(wanted, build.id)})
        )
        await self._builds.tidy(row.id)
        return build, wanted

    async def untag(self, key: str, tags: Sequence[str]) -> None:
        row = await self._find(key)
        gone = names.check_tags(key.lower().partition(":")[0], tags)
        if DEFAULT_TAG in gone:
            raise Conflict(
                f"the tag {DEFAULT_TAG} cannot be removed", code="default_tag", http_status=400
            )
        for tag in gone:
            if tag not in row.tags:
                raise NotFound(f"template '{key}' has no tag {tag}", code="tag_not_found")
        left = {tag: build_id for tag, build_id in row.tags.items() if tag not in gone}
        await self._records.put_template(replace(row, tags=left))
        await self._builds.tidy(row.id)

    async def request(
        self, name: str, tags: Sequence[str], resources: Mapping[str, int]
    ) -> tuple[TemplateRow, BuildRow]:
        return await self._builds.request(name, tags, resources)

    async def has_files(self, name: str) -> bool:
        return self._builds.uploads.find(name) is not None

    async def put_files(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        return await self._builds.uploads.put(name, pieces)

    async def begin(self, key: str, build_id: str, plan: Recipe, login: Login | None) -> None:
        await self._builds.begin((await self._find(key)).id, build_id, plan, login)

    async def progress(
        self, key: str, build_id: str, offset: int, limit: int, level: Level | None
    ) -> Progress:
        row = await self._find(key)
        return await self._builds.progress(row.id, build_id, offset, limit=limit, level=level)

    async def cancel(self, key: str, build_id: str) -> None:
        await self._builds.cancel((await self._find(key)).id, build_id)
