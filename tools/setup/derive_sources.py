"""Derive apt source entries for another suite from the machine's own entries.

``make setup`` needs packages of a neighbouring suite (backports, the next
release). No archive host is written down here: the machine already says where
its archive is and how it is trusted, so an entry for the other suite is the
machine's own entry with the suite exchanged. Standard library only: this runs
before there is a virtual environment.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# One-line option names that deb822 spells differently only by case and dash; the rest follow.
_OPTION_NAMES = {
    "arch": "Architectures",
    "lang": "Languages",
    "signed-by": "Signed-By",
    "check-valid-until": "Check-Valid-Until",
    "valid-until-max": "Valid-Until-Max",
    "inrelease-path": "InRelease-Path",
}
OWN = "agentenv.sources"
_LISTS = {"architectures", "languages"}
_CORE = {"types", "uris", "suites", "components", "enabled", "x-repolib-name"}


@dataclass(frozen=True)
class Entry:
    """One source: where, which suites, which components, and how it is trusted."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict[str, str])


def parse_one_line(text: str) -> list[Entry]:
    """Entries of a one-line-style file (``deb [options] uri suite component...``)."""
    entries: list[Entry] = []
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip()
        match = re.match(r"deb\s+(?:\[([^]]*)\]\s*)?(\S+)\s+(\S+)\s*(.*)$", line)
        if match is None:
            continue
        bracket, uri, suite, components = match.groups()
        options = dict(_one_line_options(bracket or ""))
        entries.append(Entry((uri,), (suite,), tuple(components.split()), options))
    return entries


def _one_line_options(bracket: str) -> Iterator[tuple[str, str]]:
    for word in bracket.split():
        name, _, value = word.partition("=")
        name = name.rstrip("+-").lower()
        deb822 = _OPTION_NAMES.get(name, "-".join(part.title() for part in name.split("-")))
        yield deb822, value.replace(",", " ") if deb822.lower() in _LISTS else value


def parse_deb822(text: str) -> list[Entry]:
    """Enabled ``deb`` entries of a deb822-style file; a multi-line key is kept as it stands."""
    entries: list[Entry] = []
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields = _fields(stanza)
        by_name = {name.lower(): value for name, value in fields.items()}
        if "deb" not in by_name.get("types", "").split():
            continue
        if by_name.get("enabled", "yes").strip().lower() in {"no", "false", "0", "off"}:
            continue
        entries.append(
            Entry(
                uris=tuple(by_name.get("uris", "").split()),
                suites=tuple(by_name.get("suites", "").split()),
                components=tuple(by_name.get("components", "").split()),
                options={k: v for k, v in fields.items() if k.lower() not in _CORE},
            )
        )
    return entries


def _fields(stanza: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line[0] in " \t" and name:
            fields[name] += "\n" + line
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip()
            fields[name] = value.strip()
    return fields


def read_machine(etc: Path) -> list[Entry]:
    """All enabled binary entries of an apt configuration folder (normally ``/etc/apt``).

    Not those of ``agentenv.sources``, which an earlier set-up derived from the rest.
    """
    parts = etc / "sources.list.d"
    files = [etc / "sources.list", *(sorted(parts.iterdir()) if parts.is_dir() else [])]
    entries: list[Entry] = []
    for file in files:
        if file.name == OWN:
            continue
        if file.suffix == ".list" and file.is_file():
            entries += parse_one_line(file.read_text())
        elif file.suffix == ".sources" and file.is_file():
            entries += parse_deb822(file.read_text())
    return [entry for entry in entries if not entry.uris[0].startswith("cdrom:")]


def has_suite(entries: Iterable[Entry], suite: str) -> bool:
    """Whether the machine already offers ``suite`` with its main component."""
    return any(suite in entry.suites and "main" in entry.components for entry in entries)


def derive(entries: Iterable[Entry], base: str, wanted: Iterable[str]) -> str:
    """A deb822 text offering the suites ``wanted`` from wherever ``base`` comes.

    Raises ``LookupError`` if no entry offers ``base``.
    """
    source = _source_of(list(entries), base)
    lines = [
        "Types: deb",
        f"URIs: {' '.join(source.uris)}",
        f"Suites: {' '.join(wanted)}",
        f"Components: {' '.join(c for c in source.components if c in {'main', 'universe'})}",
        # A key embedded in the entry starts on the line after its name: no space to trail.
        *(
            f"{name}: {value}".rstrip() if not value.startswith("\n") else f"{name}:{value}"
            for name, value in source.options.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _source_of(entries: list[Entry], base: str) -> Entry:
    offering = [e for e in entries if base in e.suites and "main" in e.components]
    if not offering:
        raise LookupError(f"no apt source of this machine offers the suite {base!r} with main")
    # Ubuntu may list universe apart; erofs-utils and friends live there.
    extra = {
        c for e in entries if base in e.suites and e.uris == offering[0].uris for c in e.components
    }
    first = offering[0]
    components = tuple(c for c in ("main", "universe") if c in extra)
    return Entry(first.uris, first.suites, components, first.options)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--etc", type=Path, default=Path("/etc/apt"))
    parser.add_argument("--base", required=True, help="codename this machine runs")
    parser.add_argument(
        "--missing-only", action="store_true", help="leave out suites the machine already offers"
    )
    parser.add_argument("suites", nargs="+")
    args = parser.parse_args(argv)
    entries = read_machine(args.etc)
    wanted = [s for s in args.suites if not (args.missing_only and has_suite(entries, s))]
    if not wanted:
        return 0
    try:
        sys.stdout.write(derive(entries, args.base, wanted))
    except LookupError as error:
        print(f"derive_sources: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
