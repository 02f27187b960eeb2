"""What a benchmark hands over, and how numbers are summed up: percentiles of one run, medians over repeats."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

FORMAT = 1

Cell = str | float | int | None


class Table(msgspec.Struct, frozen=True):
    """Rows of cells under column heads; ``None`` shows as a dash."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]


class Target(msgspec.Struct, frozen=True):
    """One target and what was measured; ``met`` None: not measured here."""

    what: str
    target: str
    measured: str
    met: bool | None


class Result(msgspec.Struct, frozen=True):
    """One section of docs/benchmarks.md. ``order`` sorts the sections; ``limits`` says what the figures do not show.

    Texts are Markdown; an empty line begins a paragraph.
    """

    name: str
    title: str
    order: int
    method: str
    tables: list[Table]
    limits: str
    targets: list[Target] = []
    findings: list[str] = []


class Machine(msgspec.Struct, frozen=True):
    """Where and with what. ``busy``: share of all CPUs that others used in the second before the run."""

    cpu: str
    cpus: int
    memory_gib: float
    kernel: str
    filesystem: str
    busy: float
    load: float
    gc: str
    versions: dict[str, str]


class Saved(msgspec.Struct, frozen=True):
    """A file in benchmarks/results/."""

    format: int
    command: str
    date: str
    seconds: float
    machine: Machine
    result: Result


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of an ascending sequence, the value that ``share`` of it does not exceed; 0.0 of an empty one."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Iterable[float]) -> float:
    """0.0 of nothing."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def spread(values: Iterable[float]) -> str:
    """``median (lowest to highest)`` of a few repeats, three significant digits."""
    found = sorted(values)
    if not found:
        return "-"
    return f"{sig(statistics.median(found))} ({sig(found[0])} to {sig(found[-1])})"


def sig(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 - len(str(int(abs(value)))) + 1 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.2g}"
