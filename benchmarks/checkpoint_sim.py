"""What a running checkpoint adds to seal → applied, by the controller's own work: the data plane only takes time."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from unlost.engine.protocols import Row
from unlost.replay import events as ev

from .live_run import SEALS_PER_S, Interference, LiveRun, interfere
from .result import Cell, Result, Table, Target, median, percentile

SIBLINGS = 8
SAVE_S = 1.0


class SleepingPlane:
    """Knows its rows' keys and nothing else; a snapshot takes ``SAVE_S`` and costs nothing."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    async def start(self) -> None: ...

    async def put(self, row: Row) -> None:
        self.rows[row.key.row_key()] = row.checksum

    async def get(self, keys: Sequence[str]) -> list[Row]:
        raise NotImplementedError

    async def inventory(self) -> dict[str, int]:
        return dict(self.rows)

    async def clear(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.rows.pop(key, None)

    async def save(self, directory: str) -> dict[str, str]:
        assert directory
        await asyncio.sleep(SAVE_S)
        return {}

    async def load(self, directory: str, digests: Mapping[str, str]) -> None: ...

    async def stop(self) -> None: ...


async def measure(groups: int, repeats: int, idle_s: float) -> Interference:
    """Interference with ``groups`` in the buffer."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    plane = SleepingPlane()
    run = LiveRun(folder, plane, SIBLINGS)
    journal = run.worker()

    async def make(part: list[int]) -> list[ev.Receipt]:
        keys = [key for group in part for key in run.ledger.running(group)]
        plane.rows.update((key.row_key(), key.group) for key in keys)
        return [
            ev.Receipt(0.5, 400, 0, 0, journal, key.group, key.group, ((0, 0, 0),), False, 120, key.group)
            for key in keys
        ]

    try:
        await run.fill(groups, make)
        found = await interfere(run, repeats, idle_s)
        run.close()
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rows_of(groups: int, found: Interference) -> list[list[Cell]]:
    """One line a way."""
    ways = (("no checkpoint", found.idle), ("beside a checkpoint", found.beside), ("stop the world", found.stopped))
    return [
        [groups, way, len(values), *(percentile(values, share) * 1e3 for share in (0.5, 0.99, 0.999)),
         values[-1] * 1e3 if values else None]
        for way, values in ways
    ]  # fmt: skip


COLUMNS = ["groups in the buffer", "", "seals", "p50 ms", "p99 ms", "p99.9 ms", "max ms"]


def run(quick: bool) -> Result:
    """Three sizes."""
    sizes, repeats, idle_s = ((100, 1000), 1, 0.5) if quick else ((100, 1_000, 10_000), 4, 2.0)
    rows: list[list[Cell]] = []
    added = []
    seconds: list[list[Cell]] = []
    for groups in sizes:
        began = time.perf_counter()
        found = asyncio.run(measure(groups, repeats, idle_s))
        rows += rows_of(groups, found)
        added.append((percentile(found.beside, 0.5) - percentile(found.idle, 0.5)) * 1e3)
        seconds.append([groups, groups * SIBLINGS, median(found.checkpoint_s), time.perf_counter() - began])
    return Result(
        name="checkpoint_sim",
        title="Seals beside a checkpoint: the controller's own part",
        order=90,
        method=(
            f"{SEALS_PER_S} receipts a second arrive from a thread, as Ray's replies do; each is timed from arrival "
            "to the moment when the ledger has applied its seal. Groups of 8 lie in the buffer; a trainer checkpoint "
            f"(32 MiB of trainer state written for real, a data plane snapshot that only takes {SAVE_S:g} s) is taken "
            "beside them, and then the stop-the-world way, in which nothing is applied until it is published. "
            f"{repeats} repeats in turn. After each checkpoint the whole state goes into the journal as an image: that "
            "is the longest single stop of the loop, and it grows with what is alive (`max`)."
        ),
        tables=[
            Table("Milliseconds from a receipt's arrival to its seal applied.", COLUMNS, rows),
            Table("", ["groups", "rows", "checkpoint, s", "whole measurement, s"], seconds),
        ],
        targets=[
            Target(
                "seal → applied, added by a checkpoint (simulated data plane), median",
                "≤ 1 ms",
                ", ".join(f"{a:.2f} ms at {g:,}" for a, g in zip(added, sizes, strict=True)),
                max(added) <= 1,
            )
        ],
        limits="The data plane's own load on the machine is left out here; the next section has it.",
    )
