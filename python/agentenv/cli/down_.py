"""`aenv down`: take everything of a home off this machine, keep its images and records."""

from __future__ import annotations

import asyncio

from agentenv import config
from agentenv.cli.serve_ import home_lock
from agentenv.cli.server import Home


def command(home: Home = None) -> None:
    """End every sandbox of this home and the processes, namespaces and rules that serve them.

    The server must have been stopped. Images and templates stay. Example: aenv down
    """
    effective = config.load({"home": home})
    if not effective.home.exists():
        return
    with home_lock(effective.home):
        asyncio.run(_down(effective))


async def _down(effective: config.Config) -> None:
    from agentenv.node.assembly import open_node

    async with open_node(effective, serve=False) as node:
        for info in node.list():
            await node.kill(info.id)
            print(info.id)
