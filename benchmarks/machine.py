"""What the figures were taken on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import time
from pathlib import Path

from .result import Machine

PACKAGES = (
    "unlost",
    "msgspec",
    "zstandard",
    "numpy",
    "torch",
    "ray",
    "TransferQueue",
    "eventsourcing",
    "rocksdict",
    "persist-queue",
    "duckdb",
)
GC = "Python's default garbage collector, on; what set-up allocated is frozen before the clock starts"


def describe(folder: Path) -> Machine:
    """Looks for a second at how busy the machine is. ``folder``: where the benchmarks write."""
    return Machine(
        cpu=_cpu(),
        cpus=os.cpu_count() or 0,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        filesystem=_filesystem(folder),
        busy=round(busy_share(1.0), 3),
        load=round(os.getloadavg()[0], 2),
        gc=GC,
        versions=_versions(),
    )


def busy_share(seconds: float) -> float:
    """Share of all CPUs' time that was not idle over the next ``seconds``, in which this process sleeps."""
    before = _cpu_times()
    time.sleep(seconds)
    after = _cpu_times()
    total = sum(after) - sum(before)
    idle = after[3] + after[4] - before[3] - before[4]
    return 1.0 - idle / total if total else 0.0


def _cpu_times() -> list[int]:
    with open("/proc/stat", encoding="ascii") as file:
        return [int(field) for field in file.readline().split()[1:9]]


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(folder: Path) -> str:
    """Type of the file system that ``folder`` lies on."""
    best, kind = "", "?"
    target = str(folder.resolve())
    with open("/proc/mounts", encoding="utf-8") as file:
        for line in file:
            _, mount, found, *_ = line.split()
            inside = target == mount or target.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, found
    return kind


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
