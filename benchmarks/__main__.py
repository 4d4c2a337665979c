"""Runs the benchmarks named on the command line, or all."""

from __future__ import annotations

import importlib
import sys

from benchmarks.machine import conditions, node

ALL = (
    "convert",
    "blocks_read",
    "blocks_write",
    "blocks_images",
    "cold_start",
    "suspend",
    "suspend_peers",
    "exec_latency",
    "proxy",
    "data_plane",
    "many",
    "engines",
)


def main() -> None:
    names = sys.argv[1:] or ALL
    if unknown := set(names) - set(ALL):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    print(conditions())
    with node() as server:
        for name in names:
            print(f"\n## {name}")
            importlib.import_module(f"benchmarks.{name}").run(server)


if __name__ == "__main__":
    main()
