"""`aenv config`: the effective configuration, explained."""

from __future__ import annotations

from agentenv import config
from agentenv.cli.server import Home


def command(home: Home = None) -> None:
    """Print the effective configuration as a config.toml with units and reasons.

    Example: aenv config > /var/lib/agentenv/config.toml
    """
    print(config.render(config.load({"home": home})), end="")
