"""Check the shape of the tree: what linters do not see and readers rely on.

Each module with logic has its tests at the mirrored place, files stay short, names say something,
folders say what they take and give, and nothing tracked names this machine or its registries.
Prints one line per fault; ends with 1 if there is any. Warnings do not count.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGE = PurePosixPath("python/agentenv")
WARN_LINES, FAIL_LINES = 400, 450
FORBIDDEN_STEMS = {"utils", "util", "common", "helpers", "helper", "manager", "service", "misc"}
# Where a module's tests may lie by mirroring its path. unit/ is for pure ones; what is nothing
# without a kernel, a mount or a server is tested there.
MIRRORS = ("tests/unit", "tests/contract", "tests/integration")

# Modules tested elsewhere: module -> (test file, reason). An entry that is no longer needed, or
# whose file is gone, is a fault too.
HOMES: dict[str, tuple[str, str]] = {
    "cli/follow_build.py": (
        "tests/compat/test_e2b_code_interpreter.py",
        "run as the command it is",
    ),
    "cli/template_init.py": (
        "tests/compat/test_e2b_code_interpreter.py",
        "run as the command it is",
    ),
    "template/shipped/interpreter/contexts.py": (
        "tests/integration/template/shipped/interpreter/test_app.py",
        "asked through the server, with real kernels",
    ),
    "template/shipped/interpreter/kernel.py": (
        "tests/integration/template/shipped/interpreter/test_app.py",
        "asked through the server, with real kernels",
    ),
    "template/shipped/interpreter/launch.py": (
        "tests/integration/template/shipped/interpreter/test_app.py",
        "asked through the server, with real kernels",
    ),
    "api/errors.py": ("tests/unit/api/test_app.py", "asked through the application"),
    "api/sandboxes.py": ("tests/unit/api/test_app.py", "asked through the application"),
    "cli/exec_.py": ("tests/integration/node/test_sandboxes.py", "run as the command it is"),
    "cli/shell_.py": ("tests/integration/cli/test_shell.py", "in a terminal of its own"),
    "cli/run_.py": ("tests/integration/node/test_sandboxes.py", "run as the command it is"),
    "cli/start_.py": ("tests/integration/node/test_sandboxes.py", "run as the command it is"),
    "cli/kill_.py": ("tests/integration/node/test_sandboxes.py", "run as the command it is"),
    "cli/inspect_.py": ("tests/integration/node/test_sandboxes.py", "run as the command it is"),
    "cli/logs_.py": ("tests/integration/node/test_sandboxes.py", "run as the command it is"),
    "cli/pause_.py": ("tests/integration/cli/test_suspend.py", "run as the command it is"),
    "cli/resume_.py": ("tests/integration/cli/test_suspend.py", "run as the command it is"),
    "cli/snapshot_.py": ("tests/integration/cli/test_suspend.py", "run as the command it is"),
    "cli/snapshots_.py": ("tests/integration/cli/test_suspend.py", "run as the command it is"),
    "api/lineage.py": (
        "tests/integration/suspend/test_rollback.py",
        "needs a machine: tested through the whole",
    ),
    "node/rollback.py": (
        "tests/integration/suspend/test_rollback.py",
        "needs a machine: tested through the whole",
    ),
    "sandbox/adopt.py": ("tests/faults/node/test_crashes.py", "its promises are about crashes"),
    "cli/rollback_.py": (
        "tests/integration/suspend/test_rollback.py",
        "run as the command it is",
    ),
    "cli/fork_.py": ("tests/integration/cli/test_suspend.py", "run as the command it is"),
    "cli/server.py": ("tests/integration/node/test_sandboxes.py", "run as the command it is"),
    "cli/config_.py": ("tests/integration/cli/test_cli.py", "run as the command it is"),
    "cli/doctor_.py": ("tests/integration/cli/test_cli.py", "run as the command it is"),
    "cli/image_.py": ("tests/integration/cli/test_cli.py", "run as the command it is"),
    "cli/site.py": ("tests/integration/template/test_templates.py", "builds go through it"),
    "cli/template_.py": (
        "tests/integration/template/test_templates.py",
        "run as the command it is",
    ),
    "cli/dockerfile_build.py": (
        "tests/integration/template/test_templates.py",
        "run as the command it is",
    ),
    "node/workshop.py": ("tests/integration/template/test_templates.py", "builds go through it"),
    "sdk/templates.py": ("tests/integration/template/test_templates.py", "the CLI speaks by it"),
    "cli/output.py": ("tests/integration/cli/test_cli.py", "run as the command it is"),
    "cli/serve_.py": ("tests/integration/node/test_assembly.py", "run as the command it is"),
    "cli/down_.py": ("tests/integration/node/test_assembly.py", "run as the command it is"),
    "cluster/local.py": (
        "tests/integration/node/test_sandboxes.py",
        "needs a machine: tested through the whole",
    ),
    "node/ground.py": (
        "tests/integration/node/test_sandboxes.py",
        "needs a machine: tested through the whole",
    ),
    "node/node.py": (
        "tests/integration/node/test_sandboxes.py",
        "needs a machine: tested through the whole",
    ),
    "node/wakes.py": (
        "tests/integration/edge/test_waking.py",
        "asked through the data plane it talks to",
    ),
    "sandbox/launch.py": (
        "tests/integration/node/test_sandboxes.py",
        "needs a machine: tested through the whole",
    ),
    "sdk/process.py": (
        "tests/integration/node/test_sandboxes.py",
        "needs a machine: tested through the whole",
    ),
    "sdk/commands.py": (
        "tests/integration/agent/test_sdk.py",
        "needs a guest's agent, which runs there as a plain program",
    ),
    "sdk/files.py": (
        "tests/integration/agent/test_sdk.py",
        "needs a guest's agent, which runs there as a plain program",
    ),
    "sdk/ports.py": (
        "tests/integration/agent/test_sdk.py",
        "needs a guest's agent, which runs there as a plain program",
    ),
    "sdk/sync.py": (
        "tests/integration/agent/test_sdk.py",
        "needs a guest's agent, which runs there as a plain program",
    ),
    "cli/metrics_.py": (
        "tests/integration/cli/test_running.py",
        "needs a machine: tested through the whole",
    ),
    "engine/gvisor/engine.py": (
        "tests/integration/gvisor/test_sandboxes.py",
        "needs a sandbox: tested through the whole",
    ),
    "engine/gvisor/machine.py": (
        "tests/integration/gvisor/test_sandboxes.py",
        "needs a sandbox: tested through the whole",
    ),
    "engine/gvisor/roots.py": (
        "tests/integration/gvisor/test_sandboxes.py",
        "needs a sandbox: tested through the whole",
    ),
    "engine/gvisor/upper.py": (
        "tests/integration/gvisor/test_sandboxes.py",
        "needs a sandbox: tested through the whole",
    ),
    "engine/process.py": (
        "tests/faults/node/test_crashes.py",
        "its promises are about crashes",
    ),
    "engine/qemu/disk.py": (
        "tests/integration/node/test_sandboxes.py",
        "needs a machine: tested through the whole",
    ),
    "sandbox/sandbox.py": ("tests/faults/node/test_crashes.py", "its promises are about crashes"),
    "engine/qemu/engine.py": (
        "tests/faults/node/test_crashes.py",
        "its promises are about crashes",
    ),
    "engine/qemu/machine.py": (
        "tests/faults/node/test_crashes.py",
        "its promises are about crashes",
    ),
    "host/firewall.py": (
        "tests/integration/node/test_slots.py",
        "their user's tests run on a private internet",
    ),
    "host/netns.py": (
        "tests/integration/node/test_slots.py",
        "their user's tests run on a private internet",
    ),
    "image/debian.py": ("tests/integration/image/test_tarball.py", "asked through the catalog"),
    "image/open.py": ("tests/integration/image/test_tarball.py", "asked through the catalog"),
    "image/source.py": ("tests/integration/image/test_archive.py", "asked through its users"),
    "image/transport.py": (
        "tests/integration/image/test_registry.py",
        "asked through the registry it talks to",
    ),
    "layer/convert.py": ("tests/integration/layer/test_catalog.py", "asked through the catalog"),
    "layer/verify.py": ("tests/integration/layer/test_catalog.py", "asked through the catalog"),
    "layer/tarstream.py": ("tests/unit/layer/test_unpack.py", "asked through its one user"),
    "cli/store_.py": ("tests/integration/cli/test_store.py", "run as the command it is"),
    "layer/layers.py": (
        "tests/contract/store/test_collection.py",
        "its promises are about a store that others write and collect",
    ),
    "node/block_server.py": (
        "tests/faults/node/test_storage.py",
        "its promises are about death and return",
    ),
    "node/library.py": (
        "tests/integration/cli/test_store.py",
        "homes and their stores, by command",
    ),
    "node/roots.py": ("tests/faults/node/test_storage.py", "asked through a node on S3"),
    "store/chunks.py": ("tests/contract/records/test_chunks.py", "on each database"),
    "store/claims.py": ("tests/contract/store/test_collection.py", "asked through the collection"),
    "store/lease.py": ("tests/contract/store/test_collection.py", "asked through the collection"),
    "store/statistics.py": ("tests/integration/cli/test_store.py", "asked by the command"),
    "api/template_schemas.py": ("tests/unit/api/test_templates.py", "asked through the routes"),
    "cluster/templates.py": ("tests/unit/api/test_templates.py", "asked through the routes"),
    "store/steps.py": ("tests/contract/records/test_steps.py", "on each store of records"),
    "template/bases.py": ("tests/unit/template/test_builds.py", "asked through builds"),
    "template/build.py": ("tests/unit/template/test_builds.py", "asked through builds"),
    "template/work.py": ("tests/unit/template/test_builds.py", "asked through builds"),
    "template/named.py": ("tests/contract/records/test_named.py", "on each store of records"),
    "model.py": ("tests/unit/sandbox/test_record.py", "values without behaviour"),
    "host/supervisor.py": (
        "tests/integration/host/test_supervised.py",
        "a program of its own: tested through its client",
    ),
    "store/sql.py": (
        "tests/contract/records/test_records.py",
        "the contract suite of records runs on it",
    ),
}


@dataclass(frozen=True)
class Tree:
    """The tracked files (paths relative to ``root``) and how to read one."""

    root: Path
    files: tuple[str, ...]

    def text(self, file: str) -> str | None:
        """The file's text, or None if it is no text or is gone from the work tree."""
        try:
            return (self.root / file).read_text()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            return None

    def modules(self) -> Iterator[tuple[PurePosixPath, str]]:
        """Modules of the package by their path below it, with their text."""
        for file in self.files:
            path = PurePosixPath(file)
            if path.suffix != ".py" or not path.is_relative_to(PACKAGE):
                continue
            if (text := self.text(file)) is not None:
                yield path.relative_to(PACKAGE), text


def has_logic(source: str) -> bool:
    """Whether a module does anything: some function with more than a docstring or an ellipsis."""
    return any(
        not all(_is_inert(statement) for statement in node.body)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _is_inert(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def mirror_faults(tree: Tree, homes: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Modules with logic and without tests; entries of the table that say nothing true."""
    tracked, seen = set(tree.files), set[str]()
    for module, text in tree.modules():
        if module.name == "__main__.py" or not has_logic(text):
            continue
        seen.add(str(module))
        # A folder's own __init__ is tested under the folder's name.
        stem = module.parent.name if module.name == "__init__.py" else module.stem
        mirrored = [f"{root}/{module.parent}/test_{stem}.py" for root in MIRRORS]
        if any(str(PurePosixPath(place)) in tracked for place in mirrored):
            if str(module) in homes:
                yield f"{PACKAGE}/{module}: has mirrored tests, remove it from HOMES"
        elif str(module) not in homes:
            yield f"{PACKAGE}/{module}: no tests at {mirrored[0]} (nor mirrored elsewhere)"
    for module, (home, _) in homes.items():
        if module not in seen:
            yield f"HOMES names {module}, which is gone or has no logic"
        elif home not in tracked:
            yield f"HOMES sends {module} to {home}, which does not exist"


def size_faults(tree: Tree) -> Iterator[str]:
    """Python and Rust files that a reader would rather find as two."""
    for file, lines in _lengths(tree):
        if lines > FAIL_LINES:
            yield f"{file}: {lines} lines, {FAIL_LINES} at most"


def size_warnings(tree: Tree) -> Iterator[str]:
    for file, lines in _lengths(tree):
        if WARN_LINES < lines <= FAIL_LINES:
            yield f"{file}: {lines} lines, aim below {WARN_LINES}"


def _lengths(tree: Tree) -> Iterator[tuple[str, int]]:
    for file in tree.files:
        if file.endswith((".py", ".rs")) and (text := tree.text(file)) is not None:
            yield file, text.count("\n")


def name_faults(tree: Tree) -> Iterator[str]:
    """Files whose name says nothing of what is in them."""
    for file in tree.files:
        path = PurePosixPath(file)
        if path.suffix in {".py", ".rs", ".sh"} and path.stem.lower() in FORBIDDEN_STEMS:
            yield f"{file}: the name says nothing; name it after what it does"


def docstring_faults(tree: Tree) -> Iterator[str]:
    """Folders of the package that do not begin by saying what they take."""
    for module, text in tree.modules():
        if module.name != "__init__.py" or module.parent == PurePosixPath():
            continue
        docstring = ast.get_docstring(ast.parse(text)) or ""
        if not re.match(r"(?i)takes\b", docstring):
            yield f'{PACKAGE}/{module}: its docstring starts "takes X from ..., gives Y to ..."'


def machine_faults(tree: Tree, needles: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines that name a registry host or a path of the machine the check runs on."""
    wanted = [(re.compile(rf"(?<![\w.-]){re.escape(text)}"), kind) for text, kind in needles]
    for file in tree.files:
        text = tree.text(file)
        for number, line in enumerate((text or "").splitlines(), 1):
            for pattern, kind in wanted:
                if pattern.search(line):
                    yield f"{file}:{number}: names {kind} of this machine"


def registry_hosts(root: Path = Path("/"), home: Path | None = None) -> set[str]:
    """Hosts of the package registries that this machine is configured for; never written down."""
    home = home or Path.home()
    etc = root / "etc"
    files = [
        etc / "apt/sources.list",
        *(etc / "apt/sources.list.d").glob("*"),
        etc / "pip.conf",
        etc / "xdg/pip/pip.conf",
        home / ".config/pip/pip.conf",
        home / ".pip/pip.conf",
        home / ".npmrc",
        home / ".cargo/config.toml",
    ]
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    text += "\n".join(os.environ.get(name, "") for name in ("PIP_INDEX_URL", "UV_INDEX_URL"))
    return {host.lower() for host in re.findall(r"https?://(?:[^@/\s]*@)?([\w.-]+\.[\w.-]+)", text)}


def machine_paths(root: Path, home: Path) -> set[str]:
    """Folders that exist only here: the one that holds this checkout, the user's own home."""
    top = root.parts[1] if len(root.parts) > 1 else ""
    # A checkout in a folder that every machine has says nothing by its first component.
    everywhere = {"root", "tmp", "opt", "srv", "usr", "var", "mnt", "run", "src", "home", "Users"}
    paths = {f"{root}/" if top in everywhere else f"/{top}/"}
    if home != Path("/root"):  # also root's home in every guest
        paths.add(f"{home}/")
    return paths - {"//"}


def tracked(root: Path) -> Tree:
    """What git tracks in the checkout at ``root``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    )
    return Tree(root, tuple(name for name in listed.stdout.split("\0") if name))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    root: Path = parser.parse_args(argv).root.resolve()
    tree = tracked(root)
    needles = [(host, "a registry host") for host in sorted(registry_hosts())]
    needles += [(path, "a path") for path in sorted(machine_paths(root, Path.home()))]
    checks: list[Callable[[Tree], Iterator[str]]] = [
        lambda tree: mirror_faults(tree, HOMES),
        size_faults,
        name_faults,
        docstring_faults,
    ]
    faults = [fault for check in checks for fault in check(tree)]
    faults += machine_faults(tree, needles)
    for warning in size_warnings(tree):
        print(f"warning: {warning}")
    for fault in faults:
        print(fault)
    print(f"tree: {len(tree.files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
