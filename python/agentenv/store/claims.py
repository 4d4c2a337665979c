"""Claims: what a home needs of a store that it may share with others.

    claim/HOME/KIND-NAME   JSON: {"keys": [...]}, the objects that must stay

The claims of all homes together are the roots of the collection. A claim is written after what it
names, and goes before its reason is forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from agentenv.errors import InfraError
from agentenv.store.objects import Objects

CLAIMS = "claim/"
MAX_CLAIM = 64 << 20
_CLAIM = TypeAdapter(dict[str, list[str]])


class Claims:
    """Those of the home with this id."""

    def __init__(self, objects: Objects, home: str) -> None:
        self._objects, self._home = objects, home

    async def put(self, name: str, keys: Sequence[str], kind: str = "image") -> None:
        data = json.dumps({"keys": list(keys)}).encode()
        await self._objects.put(self._key(name, kind), data)

    async def drop(self, name: str, kind: str = "image") -> None:
        await self._objects.delete([self._key(name, kind)])

    async def own(self, kind: str) -> list[str]:
        """Names of this home's claims of a kind."""
        prefix = f"{CLAIMS}{self._home}/"
        found = [entry.key.removeprefix(prefix) for entry in await self._objects.list(prefix)]
        return [name.removeprefix(f"{kind}-") for name in found if name.startswith(f"{kind}-")]

    def _key(self, name: str, kind: str) -> str:
        return f"{CLAIMS}{self._home}/{kind}-{name}"


async def read_claims(objects: Objects) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Every claim (HOME/KIND-NAME) with its keys, and why others cannot be read."""
    found: dict[str, list[str]] = {}
    faults: dict[str, str] = {}
    for entry in await objects.list(CLAIMS):
        data = await objects.get(entry.key, MAX_CLAIM)
        if data is None:
            continue  # just dropped
        try:
            found[entry.key.removeprefix(CLAIMS)] = _CLAIM.validate_json(data)["keys"]
        except (ValidationError, KeyError) as error:
            faults[entry.key] = str(error).splitlines()[0]
    return found, faults


async def all_claims(objects: Objects) -> dict[str, list[str]]:
    """Every claim with its keys. Raises InfraError (``store_damaged``) for one that cannot be read:
    what it needs must not be taken for garbage."""
    found, faults = await read_claims(objects)
    for key, why in faults.items():
        raise InfraError(
            f"the claim {key} cannot be read",
            why=why,
            fix="restore it, or delete it if its home is gone",
            code="store_damaged",
        )
    return found
