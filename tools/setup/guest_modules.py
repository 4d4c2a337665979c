"""Choose the guest's kernel modules and the order to insert them in.

Takes the wanted module names and the text of ``modules.dep`` and
``modules.builtin``; gives file paths, dependencies first. The guest has no
modprobe: its PID 1 inserts the files one after another.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# Inserted at every boot, so each costs boot time and initramfs size: what the machine cannot come
# up without, and little more. What is built into the kernel (ext4, fuse, virtio_console in Debian's
# cloud kernel) is left out by itself; what a module needs comes before it by its dependencies.
BOOT = (
    "virtio",
    "virtio_ring",
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_console",
    "virtio_balloon",
    "virtio_rng",
    "erofs",
    "ext4",
    "overlay",
)
# Wanted where the kernel has them, and a guest has no modprobe to bring them later: FUSE file
# systems, and tunnels (VPN clients, user-mode network tools), which sandbox users expect; tcp_diag,
# by which the agent ends connections that a snapshot carried over (and `ss` lists them). Not loop
# (makes eight block devices at each boot), not nf_tables (a megabyte with what it needs; the
# firewall is the host's).
EXPECTED = ("fuse", "tun", "tcp_diag")


def normal(name: str) -> str:
    """A module's name as the kernel shows it: no folder, no suffix, underscores."""
    return re.sub(r"\.ko(\.\w+)?$", "", name.rsplit("/", 1)[-1]).replace("-", "_")


def parse_dep(text: str) -> dict[str, tuple[str, list[str]]]:
    """``modules.dep`` as name -> (its path, paths of what it needs)."""
    table: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        path, _, needs = line.partition(":")
        if path.strip():
            table[normal(path.strip())] = (path.strip(), needs.split())
    return table


@dataclass(frozen=True)
class Kernel:
    """What a modules folder says: ``dep`` by name, names built in, soft predecessors, aliases."""

    dep: dict[str, tuple[str, list[str]]]
    builtin: frozenset[str] = frozenset()
    soft: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    aliases: dict[str, str] = field(default_factory=dict[str, str])


def order(wanted: Iterable[str], kernel: Kernel) -> tuple[list[str], list[str]]:
    """Paths in insertion order, and the names that exist neither as module nor built in."""
    chosen: list[str] = []
    missing: list[str] = []
    for name in map(normal, wanted):
        if name in kernel.dep:
            _visit(name, kernel, chosen, ())
        elif name not in kernel.builtin:
            missing.append(name)
    return chosen, missing


def _visit(name: str, kernel: Kernel, chosen: list[str], above: tuple[str, ...]) -> None:
    path, needs = kernel.dep[name]
    if path in chosen or name in above:
        return
    # A soft predecessor (a checksum behind libcrc32c) is needed though no symbol says so; it is
    # named by alias, and one that is built in or absent is no module to insert.
    soft = [kernel.aliases.get(normal(n), normal(n)) for n in kernel.soft.get(name, [])]
    hard = [normal(needed) for needed in reversed(needs)]
    for before in [n for n in soft if n in kernel.dep and n not in kernel.builtin] + hard:
        _visit(before, kernel, chosen, (*above, name))
    chosen.append(path)


def soft_dependencies(text: str) -> dict[str, list[str]]:
    """``modules.softdep``'s "pre" lists: what must come first though no symbol says so."""
    table: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"softdep\s+(\S+)\s+(.*)$", line)
        if match is None:
            continue
        pre = re.search(r"pre:\s*((?:(?!post:)\S+\s*)*)", match.group(2))
        if pre is not None:
            table.setdefault(normal(match.group(1)), []).extend(pre.group(1).split())
    return table


def parse_aliases(alias: str, builtin_modinfo: str = "") -> dict[str, str]:
    """Plain aliases (``crc32c``) to the module that has it; built-in and generic ones win.

    ``builtin_modinfo`` is ``modules.builtin.modinfo``: NUL-separated ``module.key=value``.
    """
    table: dict[str, str] = {}
    for line in alias.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "alias" and not set("*:") & set(words[1]):
            name, module = normal(words[1]), normal(words[2])
            if name not in table or module.endswith("_generic"):
                table[name] = module
    for item in builtin_modinfo.split("\0"):
        key, _, value = item.partition("=")
        if key.endswith(".alias") and value:
            table[normal(value)] = normal(key.removesuffix(".alias"))
    return table


def read_kernel(folder: Path) -> Kernel:
    """The tables of ``.../lib/modules/VERSION`` after depmod."""

    def text(name: str) -> str:
        file = folder / name
        return file.read_text(errors="replace") if file.exists() else ""

    return Kernel(
        dep=parse_dep((folder / "modules.dep").read_text()),
        builtin=frozenset(normal(line) for line in text("modules.builtin").splitlines() if line),
        soft=soft_dependencies(text("modules.softdep")),
        aliases=parse_aliases(text("modules.alias"), text("modules.builtin.modinfo")),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help=".../lib/modules/VERSION after depmod")
    args = parser.parse_args(argv)
    chosen, missing = order([*BOOT, *EXPECTED], read_kernel(args.folder))
    if needed := [name for name in missing if name in BOOT]:
        print(f"guest_modules: the kernel lacks {' '.join(needed)}", file=sys.stderr)
        return 1
    print("\n".join(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
