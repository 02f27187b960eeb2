"""A storage on a bad day: fdatasync takes 0.2, 10 or 60 seconds. Does the caller wait, is memory bounded, is the shown
loss window true?
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
import threading
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any

from unlost.journal import JournalMetrics, JournalOptions, JournalOverrun, JournalWriter, RealStorage, StorageFile
from unlost.journal.storage import RealFile
from unlost.replay.events import EVENT_TYPES

from . import child
from .result import Cell, Result, Table, Target, percentile
from .stream import Records

RATE = 20_000
TICK_S = 0.001
LOOK_EVERY_S = 0.02


class SlowFile:
    """A real file whose ``sync`` takes longer."""

    def __init__(self, file: RealFile, storage: SlowStorage) -> None:
        self._file = file
        self._storage = storage
        self.read_at, self.write_at, self.truncate = file.read_at, file.write_at, file.truncate
        self.size, self.close = file.size, file.close

    def sync(self) -> None:
        self._storage.awake.wait(self._storage.delay_s)
        self._file.sync()


class SlowStorage(RealStorage):
    """The real storage; every sync of a file takes ``delay_s`` more."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.awake = threading.Event()

    def create(self, path: str) -> StorageFile:  # type: ignore[override]
        return SlowFile(super().create(path), self)

    def open(self, path: str, *, writable: bool = False) -> StorageFile:  # type: ignore[override]
        return SlowFile(super().open(path, writable=writable), self)


def resident_mb() -> float:
    """Resident memory of this process now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


@dataclass
class Watch:
    """Compares what ``metrics`` says with the appends' own times."""

    appended: deque[tuple[int, float]] = field(default_factory=deque)
    looks: int = 0
    understated: int = 0
    worst_age_s: float = 0.0
    shown_then_s: float = 0.0
    worst_shown_s: float = 0.0
    backlog_mb: float = 0.0
    effective_ms: float = 0.0

    def look(self, writer: JournalWriter[Any]) -> None:
        """The oldest undurable event's age against the loss window shown at the same moment."""
        durable = writer.durable_upto
        now = perf_counter()
        metrics: JournalMetrics = writer.metrics()
        while self.appended and self.appended[0][0] < durable:
            self.appended.popleft()
        if metrics.durable_upto != durable or not self.appended:
            return
        age = now - self.appended[0][1]
        self.looks += 1
        self.understated += age > metrics.loss_window_seconds
        if age > self.worst_age_s:
            self.worst_age_s, self.shown_then_s = age, metrics.loss_window_seconds
        self.worst_shown_s = max(self.worst_shown_s, metrics.loss_window_seconds)
        self.backlog_mb = max(self.backlog_mb, metrics.backlog_bytes / 1e6)
        self.effective_ms = max(self.effective_ms, metrics.flush_interval_ms_effective)


async def _watch(writer: JournalWriter[Any], watch: Watch) -> None:
    while True:
        watch.look(writer)
        await asyncio.sleep(LOOK_EVERY_S)


async def _append(writer: JournalWriter[Any], watch: Watch, seconds: float, spans: array[int]) -> float:
    """At ``RATE`` for ``seconds``; peak of resident memory in MB. The watch remembers each tick's first event."""
    records = Records()
    watching = asyncio.create_task(_watch(writer, watch))
    began, done, peak, seen = perf_counter(), 0, 0.0, 0.0
    clock = perf_counter_ns
    while (elapsed := perf_counter() - began) < seconds:
        due = min(int(elapsed * RATE), done + RATE // 100)
        first = True
        while done < due:
            record = records.struct(done)
            at = clock()
            offset = writer.append(record)
            spans.append(clock() - at)
            if first:
                watch.appended.append((offset, at / 1e9))
                first = False
            done += 1
        if elapsed - seen > 0.2:
            peak, seen = max(peak, resident_mb()), elapsed
        await asyncio.sleep(TICK_S)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return peak


COLUMNS = [
    "sync, s", "run, s", "syncs done", "append p50 µs", "p99 µs", "p99.9 µs", "memory growth, MB", "backlog, MB",
    "flush interval, ms", "oldest undurable event, s", "loss window shown then, s", "shown too small",
]  # fmt: skip


def case(delay_s: float, seconds: float) -> dict[str, Any]:
    """Run at one delay; the journal is then let go of as a crash would, so as not to wait for a last sync."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    storage = SlowStorage()
    writer = JournalWriter.open(folder / "j", EVENT_TYPES, journal_id="bench", storage=storage)
    gc.collect()
    before = resident_mb()
    storage.delay_s = delay_s
    watch, spans = Watch(), array("q")
    try:
        peak = asyncio.run(_append(writer, watch, seconds, spans))
        syncs = writer.metrics().syncs
    finally:
        storage.awake.set()
        writer.abandon()
        shutil.rmtree(folder, ignore_errors=True)
    ordered = sorted(spans)
    row: list[Cell] = [
        delay_s, seconds, syncs, *(percentile(ordered, s) / 1e3 for s in (0.5, 0.99, 0.999)), peak - before,
        watch.backlog_mb, watch.effective_ms, watch.worst_age_s, watch.shown_then_s,
        f"{watch.understated} of {watch.looks:,}",
    ]  # fmt: skip
    return {"row": row, "p99_us": percentile(ordered, 0.99) / 1e3, "understated": watch.understated}


def bounded(limit_mb: int) -> list[list[Cell]]:
    """Flat out on a storage that answers after 3 s: where the caller is told to stop, and where it is refused."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    storage = SlowStorage()
    options = JournalOptions(backlog_high_bytes=limit_mb << 18, backlog_max_bytes=limit_mb << 20)
    writer = JournalWriter.open(folder / "j", EVENT_TYPES, journal_id="bench", storage=storage, options=options)
    records = Records()
    gc.collect()
    before = resident_mb()
    storage.delay_s = 3.0
    high = refused = 0
    try:
        for i in range(10_000_000):
            if not high and writer.above_high_mark:
                high = i
            writer.append(records.struct(i))
            refused = i + 1
    except JournalOverrun as error:
        message = type(error).__name__
    peak = resident_mb()
    storage.awake.set()
    writer.abandon()
    shutil.rmtree(folder, ignore_errors=True)
    return [
        [f"`above_high_mark` (pumps stop dispatching), bound / 4 = {limit_mb // 4} MiB, after events", high],
        [f"{message} (the run stops), bound {limit_mb} MiB, after events", refused],
        ["memory growth at that point, MB", peak - before],
    ]


def run(quick: bool) -> Result:
    """Three delays, then the bound."""
    plan = ((0.2, 1.0), (1.0, 2.0)) if quick else ((0.0, 6.0), (0.2, 8.0), (10.0, 25.0), (60.0, 65.0))
    # In processes of their own: memory that one case has let go of would hide what the next one takes.
    cases = [child.run("benchmarks.slow_sync:case", delay, seconds).value for delay, seconds in plan]
    limited: list[list[Cell]] = child.run("benchmarks.slow_sync:bounded", 4 if quick else 64).value
    calm, slow = cases[0]["p99_us"], cases[-1]["p99_us"]
    understated = sum(c["understated"] for c in cases)
    return Result(
        name="slow_sync",
        title="A storage whose syncs are slow",
        order=50,
        method=(
            f"{RATE:,} events/s on an asyncio loop while every fdatasync takes the given time more (a wrapper around "
            "the real storage). Every 20 ms the loss window that `metrics()` shows is compared with the age of the "
            "oldest event that is not durable, known from the appends' own times. The flush interval adapts to the "
            "syncs, up to `flush_interval_ms_max` (1 s)."
        ),
        tables=[
            Table("", COLUMNS, [c["row"] for c in cases]),
            Table("Flat out, syncs of 3 s: memory is bounded.", ["", "figure"], limited),
        ],
        targets=[
            Target(
                f"caller's p99 with syncs of {plan[-1][0]:g} s", "that of a fast disk",
                f"{slow:.2f} µs, beside {calm:.2f}", slow <= 3 * calm,
            ),
            Target("loss window shown below the true one", "never", f"{understated} times", understated == 0),
        ],
        limits=(
            "A sync that takes long because the disk is full of other writes also slows the writes themselves; here "
            "they stay fast. At 20,000 events/s the backlog of a minute is far more than a training makes."
        ),
    )  # fmt: skip
