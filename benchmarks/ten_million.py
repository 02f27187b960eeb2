"""A journal of ten million events: written through the ledger, verified, read, followed, restarted from.

On the way there, at 10,000, 100,000 and 1,000,000 events, a restart is timed: it must not grow with the history.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from unlost.engine.ledger import Ledger
from unlost.journal import JournalReader, JournalWriter, verify
from unlost.replay.events import EVENT_TYPES, Event
from unlost.replay.fold import fold_reader
from unlost.replay.state import State

from . import child
from .result import Cell, Result, Table, Target
from .stream import engine_events

SYNC_EVERY = 100_000
LIVE_EVENTS = 100_000
LIVE_RATE = 20_000


class MonotonicClock:
    """The ledger's clock."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class Growth:
    """A run that grows from milestone to milestone; closed in between, as after a stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = State()
        self.ledger: Ledger | None = None
        self.events = engine_events(images=self._image)

    def _image(self) -> None:
        assert self.ledger is not None
        self.ledger.image()

    def grow(self, upto: int) -> None:
        """Append until the journal holds at least ``upto`` events."""
        with JournalWriter.open(self.folder, EVENT_TYPES, journal_id="bench") as writer:
            self.ledger = Ledger(self.state, writer, MonotonicClock())
            record = self.ledger.record
            while self.state.offset < upto:
                for event in itertools.islice(self.events, min(SYNC_EVERY, upto - self.state.offset)):
                    record(event)
                writer.sync()


# --- run in processes of their own -------------------------------------------------------------------------------


def create(folder: str, milestones: list[int]) -> list[dict[str, Any]]:
    """Grow to each milestone; a restart is timed at each, in a process of its own."""
    growth = Growth(Path(folder))
    found = []
    for events in milestones:
        began, used = time.perf_counter(), time.process_time()
        growth.grow(events)
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        restarted = [child.run("benchmarks.ten_million:restart", folder) for _ in range(3)]
        best = min(restarted, key=lambda done: done.seconds)
        found.append({
            "events": growth.state.offset, "seconds": seconds, "cpu_s": cpu, "live": len(growth.state.groups),
            "restart_mb": best.peak_mb, **best.value,
        })  # fmt: skip
    return found


def restart(folder: str) -> dict[str, float]:
    """Open for writing and fold, as a resumed run does; in milliseconds."""
    began = time.perf_counter()
    writer = JournalWriter.open(folder, EVENT_TYPES, journal_id="bench")
    opened = time.perf_counter()
    reader: JournalReader[Event] = JournalReader(folder, EVENT_TYPES)
    surveyed = time.perf_counter()
    state = fold_reader(reader)
    folded = time.perf_counter()
    assert state.offset == writer.next_offset
    image = reader.last_image()
    writer.close()
    return {
        "open_ms": (opened - began) * 1e3,
        "survey_ms": (surveyed - opened) * 1e3,
        "fold_ms": (folded - surveyed) * 1e3,
        "folded": state.offset - (image or 0),
        "segments": len(reader.segments()),
    }


def check(folder: str) -> int:
    """Verify everything."""
    report = verify(folder)
    assert report.state == "clean", report
    return report.events


def second_half(folder: str) -> int:
    """Decode every event from the middle on."""
    reader: JournalReader[Event] = JournalReader(folder, EVENT_TYPES)
    start = reader.end_offset // 2
    seen = 0
    for offset, _ in reader.events(start):
        assert offset == start + seen
        seen += 1
    return seen


def first_of_half(folder: str) -> int:
    """One event from the middle."""
    reader: JournalReader[Event] = JournalReader(folder, EVENT_TYPES)
    offset, _ = next(reader.events(reader.end_offset // 2))
    return offset


def follow(folder: str, start: int, stop: int) -> int:
    """Everything from ``start`` on, live, until ``stop`` has been seen."""
    reader: JournalReader[Event] = JournalReader(folder, EVENT_TYPES)
    print("following", flush=True)
    seen = 0
    for offset, _ in reader.follow(start):
        seen += 1
        if offset == stop - 1:
            break
    assert seen == stop - start
    return seen


# ------------------------------------------------------------------------------------------------------------------


def live_follow(folder: Path, back: int) -> tuple[child.Done, float]:
    """A follower begins ``back`` events before the end while more are appended; and how late it saw the last one."""
    with JournalWriter.open(folder, EVENT_TYPES, journal_id="bench") as writer:
        start = writer.next_offset
        follower = child.start("benchmarks.ten_million:follow", str(folder), start - back, start + LIVE_EVENTS)
        assert follower.stdout is not None
        follower.stdout.readline()
        began, done = time.perf_counter(), 0
        events = engine_events(seed=2)
        while done < LIVE_EVENTS:
            due = min(LIVE_EVENTS, int((time.perf_counter() - began) * LIVE_RATE))
            for event in itertools.islice(events, due - done):
                writer.append(event)
            done = due
            time.sleep(0.001)
        ended = time.perf_counter()
        found = child.finish(follower)
        return found, time.perf_counter() - ended


def run(quick: bool) -> Result:
    """Create with milestones, then each reading task in its own process."""
    milestones = [10_000, 30_000] if quick else [10_000, 100_000, 1_000_000, 10_000_000]
    base = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    folder = base / "events"
    try:
        created = child.run("benchmarks.ten_million:create", str(folder), milestones)
        size = sum(p.stat().st_size for p in folder.glob("*.zst"))
        tasks = {
            what: child.run(f"benchmarks.ten_million:{name}", str(folder))
            for what, name in (
                ("verify", "check"),
                ("first event from the middle", "first_of_half"),
                ("iterate the second half, decoded", "second_half"),
            )
        }
        followed, behind = live_follow(folder, milestones[-1] // 10)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return _result(created, size, tasks, followed, behind)


def _result(
    created: child.Done, size: int, tasks: dict[str, child.Done], followed: child.Done, behind: float
) -> Result:
    grown: list[dict[str, Any]] = created.value
    events = grown[-1]["events"]
    seconds = sum(m["seconds"] for m in grown)
    rows: list[list[Cell]] = [
        ["create, through the ledger, with images", events, seconds, events / seconds, created.peak_mb]
    ]
    for what, done in tasks.items():
        count = 1 if what.startswith("first") else done.value
        rows.append([what, count, done.seconds, count / done.seconds, done.peak_mb])
    rows.append([
        f"follow from a tenth before the end, {LIVE_EVENTS:,} more arriving at {LIVE_RATE:,}/s", followed.value,
        followed.seconds, followed.value / followed.seconds, followed.peak_mb,
    ])  # fmt: skip
    peak = max(float(row[4]) for row in rows if isinstance(row[4], float))
    restarts: list[list[Cell]] = [
        [m["events"], m["segments"], m["live"], m["folded"], m["open_ms"], m["survey_ms"], m["fold_ms"],
         m["open_ms"] + m["survey_ms"] + m["fold_ms"], m["restart_mb"]]
        for m in grown
    ]  # fmt: skip
    small, large = float(str(restarts[0][7])), float(str(restarts[-1][7]))
    return Result(
        name="ten_million",
        title="Ten million events, and restarts along the way",
        order=60,
        method=(
            f"A made-up training, written through the real ledger: {events:,} events, {size / 1e6:.0f} MB on disk, a "
            "StateImage and a new segment at each trainer checkpoint (every 10 steps of 32 groups of 8). Each task in "
            "a process of its own, whose peak resident memory is shown (an interpreter with the package imported is "
            "about 40 MB of it)."
        ),
        tables=[
            Table("", ["task", "events", "seconds", "events/s", "peak memory, MB"], rows),
            Table(
                "A restart: open for writing (lock, scan, cut), survey, fold from the newest image; best of three.",
                ["events in the journal", "segments", "live groups", "events folded", "open ms", "survey ms", "fold ms",
                 "together ms", "peak memory, MB"],
                restarts,
            ),
        ],
        findings=[f"The follower had seen the last event, and ended, {behind * 1e3:.0f} ms after it was appended."],
        targets=[
            Target("memory of create, verify, iterate, follow", "≤ 200 MB", f"{peak:.0f} MB", peak <= 200),
            Target("restart time against history", "flat", f"{small:.0f} ms at {grown[0]['events']:,}, {large:.0f} ms "
                   f"at {events:,} events", large <= 2 * small + 20),
        ],
        limits="Read from the page cache. A follower shares two cores with the writer.",
    )  # fmt: skip
