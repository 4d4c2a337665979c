"""Samples of what a sandbox uses, and their form in a ring of fixed size. Pure.

A ring file is ``RING`` slots of ``SLOT.size`` bytes; a sample lies in the slot of its interval,
so a new lap overwrites the oldest. A slot of zeroes is empty.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass

INTERVAL = 10  # seconds between samples
RING = 360  # samples kept: one hour
# time, cpu share, cpus, memory used, total, cache, disk used, total
SLOT = struct.Struct("<ddIxxxxQQQQQ")


@dataclass(frozen=True, slots=True)
class Sample:
    """``time`` is Unix seconds; ``cpu_percent`` is of all its CPUs, 0 to 100; sizes are bytes."""

    time: float
    cpu_percent: float
    cpus: int
    memory_used: int
    memory_total: int
    memory_cache: int
    disk_used: int
    disk_total: int


def place(sample: Sample) -> int:
    """The offset of its slot in the ring."""
    return int(sample.time // INTERVAL) % RING * SLOT.size


def encode(sample: Sample) -> bytes:
    return SLOT.pack(*astuple(sample))


def decode(ring: bytes) -> Iterator[Sample]:
    """The samples of a ring, in no order; a torn last slot is left out."""
    for found in SLOT.iter_unpack(ring[: len(ring) // SLOT.size * SLOT.size]):
        if found[0]:
            yield Sample(*found)


def cpu_percent(used: float, passed: float, cpus: int) -> float:
    """Share of ``cpus`` that ``used`` seconds of CPU are within ``passed`` seconds."""
    if passed <= 0:
        return 0.0
    # An engine's own threads may add a little to what its CPUs can use.
    return round(min(100.0, max(0.0, used / passed / cpus * 100)), 2)
