"""``python3 -I -m agentenv_interpreter [PORT]``: serves until it is ended."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from .app import application

PORT = 49999  # where E2B's SDKs look for it


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else PORT
    uvicorn.run(
        application(Path.home()),
        # The way in is the sandbox's own address, behind the proxy.
        host="0.0.0.0",  # noqa: S104
        port=port,
        http="h11",
        loop="asyncio",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=5,
    )


if __name__ == "__main__":
    main()
