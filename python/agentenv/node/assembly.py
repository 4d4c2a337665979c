"""Puts a node together from its configuration, and takes it apart again."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agentenv.config import ENGINES, Config
from agentenv.engine.contract import Engine
from agentenv.engine.engines import Engines
from agentenv.engine.gvisor import probe as gvisor
from agentenv.engine.gvisor.engine import Files as GvisorFiles
from agentenv.engine.gvisor.engine import GvisorEngine
from agentenv.engine.process import version_of
from agentenv.engine.qemu import disk, initrd, probe
from agentenv.engine.qemu.engine import Files, QemuEngine
from agentenv.errors import AgentEnvError, Conflict, InfraError, UserError
from agentenv.host import netns
from agentenv.host.cgroup import Cgroups
from agentenv.host.process import Launcher
from agentenv.host.supervised import SupervisedLauncher
from agentenv.host.tools import Tools
from agentenv.layer.blockd import BlockServerOptions
from agentenv.node import doctor
from agentenv.node.block_server import BlockServer
from agentenv.node.data_plane import RESOLV_FILES, DataPlane, DataPlaneConfig, upstreams
from agentenv.node.ground import Folders, NodeGround
from agentenv.node.library import FOLDER_MODE, open_library
from agentenv.node.node import Node
from agentenv.node.roots import Roots
from agentenv.node.slots import SlotConfig, SlotPool
from agentenv.snapshot.repository import Snapshots

log = logging.getLogger(__name__)


def engine_files(config: Config, tools: Tools) -> Files:
    """Raises MissingTool."""
    return Files(
        qemu=tools.find("qemu-system-x86_64"),
        kernel=tools.kernel(),
        agent=tools.binary("agentenv-agent"),
        map=tools.binary("libagentenv_map.so"),
        work=config.home / "engine",
    )


def make_engines(config: Config, tools: Tools, launcher: Launcher, cgroups: Cgroups) -> Engines:
    """All that this machine has the programs for."""
    made: dict[str, Engine] = {}
    missing: dict[str, AgentEnvError] = {}
    for name in ENGINES:
        try:
            made[name] = _make_engine(name, config, tools, launcher, cgroups)
        except AgentEnvError as error:
            missing[name] = error
    return Engines(made, missing, config.engine)


def _make_engine(
    name: str, config: Config, tools: Tools, launcher: Launcher, cgroups: Cgroups
) -> Engine:
    """Raises MissingTool, UserError (``path_closed``)."""
    if name == "gvisor":
        files = GvisorFiles(
            runsc=tools.find("runsc"),
            agent=tools.binary("agentenv-agent"),
            sudo=tools.binary("agentenv-sudo"),
            roots=config.runtime_dir / "roots",
        )
        return GvisorEngine(files, launcher, cgroups)
    files = engine_files(config, tools)
    for path in (config.home, files.qemu, files.kernel.image, files.map):
        must_be_passable(path)
    return QemuEngine(files, launcher, cgroups, netns.open_tap)


def must_be_passable(path: Path) -> None:
    """Engines run as users of their own, who must reach what they read.

    Raises UserError (``path_closed``) naming the folder that shuts them out.
    """
    for folder in path.resolve().parents:
        if not folder.stat().st_mode & 0o001:
            raise UserError(
                f"{path} cannot be used",
                why=f"sandboxes' engines run unprivileged and cannot pass {folder}",
                fix=f"chmod o+x {folder}, or use another place",
                code="path_closed",
            )


@asynccontextmanager
async def open_node(config: Config, *, serve: bool = True) -> AsyncGenerator[Node]:
    """A started node; sandboxes outlive it. One that leaves none takes everything else away.

    Without ``serve`` nobody is let in: for taking a home off the machine. Raises MissingTool,
    InfraError.
    """
    tools = Tools.from_environ()
    folders = Folders(
        config.home / "sandboxes", config.home / "engine", config.runtime_dir / "sandboxes"
    )
    launcher = SupervisedLauncher(config.runtime_dir / "supervisor.sock")
    cgroups = Cgroups(f"agentenv/{config.tag}")
    engines = make_engines(config, tools, launcher, cgroups)
    data_plane = DataPlane(
        DataPlaneConfig(
            tools.binary("agentenv-edge"),
            config.runtime_dir,
            config.listen,
            config.api_socket,
            config.request_wait,
            config.tls,
        ),
        launcher,
    )
    slots = SlotPool(
        SlotConfig(
            config.tag,
            config.runtime_dir / "netns",
            config.inner_network,
            config.uplink_network,
            config.uid_base,
            config.allow_private,
            config.slots_ahead if serve else 0,
        )
    )
    block_server = BlockServer(
        BlockServerOptions(
            binary=tools.binary("agentenv-blockd"),
            store=config.store_url,
            cache=config.home / "cache",
            size=config.cache_size,
            free=config.cache_free,
            state=config.runtime_dir / "stacks",
            control=config.runtime_dir / "blockd.sock",
            patience=config.store_patience,
            peers=config.peers,
            peer_listen=config.peer_listen,
            peer_token=Path(config.peer_token).absolute() if config.peer_token else None,
        ),
        config.runtime_dir / "blocks",
        launcher,
    )
    async with AsyncExitStack() as held:
        library = await held.enter_async_context(open_library(config))
        for folder in (config.runtime_dir, folders.sandboxes, folders.disks, folders.run):
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        records, catalog = library.records, library.catalog
        roots = Roots(
            catalog,
            library.layers,
            library.claims,
            block_server.client,
            notes=folders.disks,
            store=config.store_url,
        )
        snapshots = Snapshots(
            config.home / "snapshots",
            records,
            library.layers,
            library.claims,
            block_server.client,
            catalog,
            disk.written_spans,
        )
        ground = NodeGround(
            engines=engines,
            records=records,
            catalog=catalog,
            slots=slots,
            data_plane=data_plane,
            roots=roots,
            block_server=block_server,
            snapshots=snapshots,
            folders=folders,
            name_servers=await asyncio.to_thread(_name_servers, config),
            warm_machines=config.warm_machines if serve else 0,
        )
        node = Node(config, records, catalog, ground, block_server)
        # A start that fails before it has looked must not take away what sandboxes run on.
        occupied = any(row.slot is not None for row in await records.sandboxes())
        try:
            await launcher.ensure()
            # What is only taken off the machine needs nobody to read for it.
            storage_is_new = serve and await block_server.start()
            if serve:
                await data_plane.start()
                await engines.prepare()
            await node.start(storage_lost=storage_is_new, serve=serve)
            occupied = False
            if serve:
                data_plane.watch_wakes(lambda sandbox_id: node.resume(sandbox_id, None))
            yield node
        finally:
            await data_plane.stop_wakes()
            empty = await node.close() and not occupied
            await ground.close()
            await block_server.close(everything=empty)
            await data_plane.close(everything=empty)
            await slots.close(everything=empty)
            if empty:
                await engines.leave()
                await _leave(config, launcher, cgroups)


async def _leave(config: Config, launcher: SupervisedLauncher, cgroups: Cgroups) -> None:
    """Nothing runs any more: take away what served the sandboxes."""
    cgroups.remove_parent()
    try:
        await launcher.quit()
    except (Conflict, InfraError) as error:
        log.warning("the supervisor stays: %s", error.message)
        return
    await asyncio.to_thread(_remove_runtime, config.runtime_dir)


def _remove_runtime(folder: Path) -> None:
    """Remove the runtime folder's known content; anything else keeps it."""
    for name in ("api.sock", "supervisor.sock", "supervisor.sock.log", "supervisor.sock.lock"):
        (folder / name).unlink(missing_ok=True)
    parts = ("netns", "sandboxes", "roots", "blocks", "supervisor.sock.d")
    for below in (*(folder / part for part in parts), folder):
        try:
            below.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s stays: %s", below, error)
            return
    try:
        folder.parent.rmdir()
    except OSError:
        return  # other homes' servers run


def _name_servers(config: Config) -> tuple[str, ...]:
    files = {name: Path(name).read_text() for name in RESOLV_FILES if Path(name).exists()}
    return upstreams(config.dns, files)


async def examine_host(config: Config) -> list[doctor.Finding]:
    """For `aenv doctor`: every host fact that matters."""
    tools = Tools.from_environ()

    async def probe_kvm() -> tuple[bool, str]:
        work = config.home / "engine" if config.home.exists() else Path(temporary)
        files = replace(engine_files(config, tools), work=work)
        files.work.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        built = await asyncio.to_thread(
            initrd.ensure, files.work, files.agent, files.kernel.modules
        )
        verdict = await probe.kvm(
            files.work,
            files.qemu,
            await version_of(files.qemu),
            lambda: built,
            files.kernel.image,
        )
        return verdict.works, verdict.reason

    async def try_gvisor() -> None:
        await gvisor.must_run(tools.find("runsc"))

    # A look at a machine must not begin a home there.
    with tempfile.TemporaryDirectory(prefix="aenv-doctor-") as temporary:
        return await doctor.examine(config, tools, probe_kvm, try_gvisor)
