"""`aenv serve`: this machine's server."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentenv import config
from agentenv.cli.server import Home
from agentenv.errors import Conflict, UserError

if TYPE_CHECKING:
    import uvicorn

    from agentenv.node.node import Node
    from agentenv.template.builds import Builds

Listen = Annotated[str | None, typer.Option("--listen", help="HOST:PORT [127.0.0.1:8000]")]
Engine = Annotated[str | None, typer.Option("--engine", help="auto, qemu or gvisor [auto]")]
Store = Annotated[
    str | None, typer.Option("--store", help=r"Directory or s3://BUCKET\[/PREFIX] [HOME/store]")
]
CacheSize = Annotated[int | None, typer.Option("--cache-size", help="Bytes of chunks kept here")]
TlsCert = Annotated[str | None, typer.Option("--tls-cert", help="PEM, with its chain [plain HTTP]")]
TlsKey = Annotated[str | None, typer.Option("--tls-key", help="PEM, the certificate's key")]

GRACE = 10  # seconds for answers under way when the server is told to stop
LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def command(
    home: Home = None,
    listen: Listen = None,
    engine: Engine = None,
    store: Store = None,
    cache_size: CacheSize = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Serve the API and the data plane until SIGTERM or Ctrl-C. Needs root.

    Sandboxes outlive the server: start it again and it finds them. `aenv down` ends everything.

    Example: aenv serve --home /var/lib/agentenv --listen 127.0.0.1:8000
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    flags = {"home": home, "listen": listen, "engine": engine}
    flags |= {"store": store, "cache_size": cache_size}
    effective = config.load({**flags, "tls_cert": tls_cert, "tls_key": tls_key})
    if os.geteuid() != 0:
        raise UserError("aenv serve needs root", why="it makes namespaces, cgroups and tap devices")
    effective.home.mkdir(mode=0o711, parents=True, exist_ok=True)
    with home_lock(effective.home):
        asyncio.run(_serve(effective))


@contextmanager
def home_lock(home: Path) -> Generator[None]:
    """One server per home. Raises Conflict (``home_in_use``)."""
    fd = os.open(home / "server.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Conflict(
            f"the server of {home} is running",
            fix="stop it first, or give another --home",
            code="home_in_use",
        ) from None
    finally:
        os.close(fd)


def sandbox_domain(domain: str, listen: str) -> str | None:
    """What SDKs build host names of sandboxes from; None lets them use their own.

    Names below localhost resolve to loopback everywhere, so they serve where only we listen.
    """
    if domain != "localhost":
        return domain
    host, _, port = listen.rpartition(":")
    return f"localhost:{port}" if host in ("127.0.0.1", "localhost", "[::1]") else None


async def serve_until_told(server: uvicorn.Server) -> None:
    """Serve until SIGTERM or SIGINT; then return, so that what stands around it is taken down.

    uvicorn's own handlers raise the signal again when it has stopped, which would end us there.
    """
    loop = asyncio.get_running_loop()
    server.capture_signals = nullcontext  # pyright: ignore[reportAttributeAccessIssue]
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    await server.serve()


@asynccontextmanager
async def open_builds(node: Node, effective: config.Config, key: str) -> AsyncGenerator[Builds]:
    """What builds templates on a node; builds that run at the end are cancelled."""
    from agentenv.cli.site import sites
    from agentenv.node.workshop import NodeWorkshop
    from agentenv.template.bases import Bases
    from agentenv.template.builds import Builds
    from agentenv.template.uploads import Uploads

    workshop = NodeWorkshop(node)
    home = effective.home
    builds = Builds(
        node.records,
        workshop,
        sites(effective, key),
        Bases(node.records, node.catalog, workshop.sizes),
        Uploads(home / "uploads", effective.upload_size),
        home / "builds",
    )
    await builds.start()
    try:
        yield builds
    finally:
        await builds.close()


async def _serve(effective: config.Config) -> None:
    import uvicorn

    from agentenv.api.app import create_app
    from agentenv.api.auth import load_or_create_key
    from agentenv.cluster.local import LocalCluster
    from agentenv.cluster.templates import LocalTemplates
    from agentenv.node.assembly import open_node

    key = load_or_create_key(effective.api_key_file)
    async with open_node(effective) as node, open_builds(node, effective, key) as builds:
        domain = sandbox_domain(effective.domain, effective.listen)
        templates = LocalTemplates(node.records, builds)
        app = create_app(LocalCluster(node), templates, key=key, node=node.id, domain=domain)
        effective.api_socket.unlink(missing_ok=True)
        settings = uvicorn.Config(
            app,
            uds=str(effective.api_socket),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE,
        )
        choice = node.ground.engines.choice
        chosen = (await node.ground.engines.capabilities())[choice.engine]
        print(
            f"AgentENV on {effective.scheme}://{effective.listen}, home {effective.home}",
            flush=True,
        )
        print(f"engine {chosen.engine} {chosen.version}, {chosen.accelerator}: {choice.reason}")
        print(f"API key in {effective.api_key_file}", flush=True)
        await serve_until_told(uvicorn.Server(settings))
