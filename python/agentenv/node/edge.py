"""Client of the data plane's control socket, and the command line that starts it.

`agentenv-edge` owns the public listener and keeps its routes when we restart; after a
restart of either side `EdgeClient.sync` tells it the whole truth.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentenv.errors import InfraError

PROTOCOL = 1
_MAX_LINE = 64 * 1024 * 1024  # bytes of one reply: the statistics of 100,000 sandboxes


@dataclass(frozen=True, slots=True)
class Route:
    """How one sandbox is reached: ``address`` inside the namespace at ``netns``.

    A new ``generation`` (or namespace, or address) cuts what is open on the old one;
    the other fields may change while streams run. With ``public`` false, ports other than
    the agent's ask for ``traffic_token``. ``mask_host`` replaces Host on these ports,
    ``${PORT}`` in it standing for the port. ``access_token`` is the agent's: signed URLs of
    files that name no sandbox are for the one whose token signed them.

    One that is ``asleep`` has no machine (``netns`` and ``address`` may be empty): nobody finds
    it, or if it ``wakes``, requests that may pass are held until it is put awake.
    """

    id: str
    generation: int
    netns: str
    address: str
    public: bool = True
    traffic_token: str | None = field(default=None, repr=False)
    mask_host: str | None = None
    access_token: str | None = field(default=None, repr=False)
    asleep: bool = False
    wakes: bool = False


@dataclass(frozen=True, slots=True)
class Resolver:
    """A slot's name server: on ``listen`` in ``netns``, asking ``upstreams`` from the host.

    Addresses are ``IP:PORT`` (``[IP]:PORT``); upstreams are asked in turn.
    """

    slot: str
    netns: str
    listen: str
    upstreams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    protocol: int
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Unopened:
    """A route (by sandbox id) or resolver (by slot) that ``sync`` could not open."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters since the edge started; ``bytes_in`` goes towards the guest, bodies only.

    ``active`` requests are under way now; ``last_activity`` is Unix seconds, 0 for never.
    """

    requests: int
    active: int
    bytes_in: int
    bytes_out: int
    last_activity: int


@dataclass(frozen=True, slots=True)
class Stats:
    """``sandboxes`` by id; ``connections`` of clients open now; ``dns_queries`` from guests."""

    sandboxes: dict[str, Traffic]
    api: Traffic
    connections: int
    dns_queries: int


def edge_argv(
    binary: Path,
    *,
    listen: Sequence[str],
    api: Path,
    control: Path,
    api_wait: float = 10.0,
    wake_wait: float = 60.0,
    drain: float = 30.0,
    tls: tuple[Path, Path] | None = None,
) -> tuple[str, ...]:
    """The command line of `agentenv-edge`; waits are in seconds, ``api`` is a unix socket.

    ``wake_wait``: how long requests are held for a sandbox that sleeps.
    ``tls``: certificate (with its chain) and key, PEM; then every listener speaks TLS.

    Once it accepts, it prints one line: ``{"listen": ["IP:PORT", ...], "pid": N}``.
    """
    return (
        str(binary),
        *(word for address in listen for word in ("--listen", address)),
        *("--api", f"unix:{api}"),
        *("--control", str(control)),
        *("--api-wait", f"{api_wait:g}"),
        *("--wake-wait", f"{wake_wait:g}"),
        *("--drain", f"{drain:g}"),
        *(("--tls-cert", str(tls[0]), "--tls-key", str(tls[1])) if tls else ()),
    )


class EdgeClient:
    """Asks the edge at ``path``, over one connection that is made again when it breaks.

    Every operation may be repeated without harm, so one that met a broken connection is.
    All raise InfraError: ``edge_down`` if nothing answers within ``timeout`` seconds, else
    with the edge's own code (``netns_unavailable``, ``dns_failed``, ``bad_request``).
    """

    def __init__(self, path: Path, *, timeout: float = 10.0) -> None:
        self._path, self._timeout = path, timeout
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._last = 0

    async def hello(self) -> Hello:
        return Hello(**await self._ask("hello"))

    async def sync(
        self, routes: Iterable[Route], resolvers: Iterable[Resolver]
    ) -> tuple[Unopened, ...]:
        """Make this the whole truth: all else is dropped, what is unchanged is not disturbed."""
        args = {"routes": [asdict(r) for r in routes], "dns": [asdict(r) for r in resolvers]}
        ok = await self._ask("sync", args)
        return (
            *(Unopened(failed["id"], failed["message"]) for failed in ok["failed_routes"]),
            *(Unopened(failed["slot"], failed["message"]) for failed in ok["failed_dns"]),
        )

    async def put(self, route: Route) -> None:
        await self._ask("put", {"route": asdict(route)})

    async def drop(self, sandbox_id: str) -> bool:
        """Forget a route and cut what is open on it; False if there was none."""
        return bool((await self._ask("drop", {"id": sandbox_id}))["dropped"])

    async def wakes(self, after: int = -1, timeout: float = 0.0) -> tuple[int, list[str]]:
        """The sandboxes whose requests are held since version ``after``, and the version now.

        Waits up to ``timeout`` seconds (the edge makes that a minute at most) while there are
        none. After -1 all that are held are new. It holds up other calls of the same client.
        """
        ok = await self._ask("wakes", {"after": after, "timeout": timeout}, wait=timeout)
        return ok["version"], ok["ids"]

    async def wake_failed(self, sandbox_id: str, message: str) -> bool:
        """Answer the requests held for a sandbox: it stays asleep. False if there were none."""
        args = {"id": sandbox_id, "message": message}
        return bool((await self._ask("wake_failed", args))["told"])

    async def dns_up(self, resolver: Resolver) -> None:
        await self._ask("dns_up", asdict(resolver))

    async def dns_down(self, slot: str) -> bool:
        """Stop a resolver, its sockets closed on return; False if there was none."""
        return bool((await self._ask("dns_down", {"slot": slot}))["dropped"])

    async def stats(self) -> Stats:
        ok = await self._ask("stats")
        totals = ok["totals"]
        return Stats(
            sandboxes={name: Traffic(**figures) for name, figures in ok["sandboxes"].items()},
            api=Traffic(**totals["api"]),
            connections=totals["connections"],
            dns_queries=totals["dns_queries"],
        )

    async def drain(self) -> None:
        """Have it close its listeners, finish what is under way within its deadline, and end."""
        await self._ask("drain")

    async def close(self) -> None:
        async with self._turn:
            self._disconnect()

    async def _ask(self, op: str, args: dict[str, Any] | None = None, wait: float = 0.0) -> Any:
        async with self._turn:
            try:
                reply = await self._exchange(op, args or {}, self._timeout + wait)
            except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
                raise InfraError(
                    f"the data plane did not answer to {op}",
                    why=str(error) or type(error).__name__,
                    fix="see its log; it is restarted by: aenv serve",
                    code="edge_down",
                ) from error
        if fault := reply.get("error"):
            raise InfraError(
                f"the data plane refused to {op}", why=fault["message"], code=fault["code"]
            )
        return reply["ok"]

    async def _exchange(self, op: str, args: dict[str, Any], timeout: float) -> dict[str, Any]:
        self._last += 1
        line = json.dumps({"id": self._last, "op": op, "args": args}).encode() + b"\n"
        async with asyncio.timeout(timeout):
            if self._streams is not None:
                try:
                    return await self._round_trip(line)
                except (ConnectionError, EOFError):
                    pass  # the edge was restarted since: once more, on a new connection
            self._streams = await asyncio.open_unix_connection(self._path, limit=_MAX_LINE)
            return await self._round_trip(line)

    async def _round_trip(self, line: bytes) -> dict[str, Any]:
        """One request and its reply; anything but a reply ends the connection."""
        assert self._streams is not None
        reader, writer = self._streams
        try:
            writer.write(line)
            await writer.drain()
            reply = json.loads(await reader.readuntil(b"\n"))
            if reply["id"] != self._last:
                raise ValueError(f"reply {reply['id']} to request {self._last}")
        except BaseException:
            self._disconnect()  # else the next request would read this one's reply
            raise
        return reply

    def _disconnect(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
