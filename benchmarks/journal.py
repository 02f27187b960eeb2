"""Durable lag and bytes per event at a steady rate, then the reading side of a million events."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from unlost.journal import JournalOptions, JournalReader, JournalWriter, verify
from unlost.replay.events import EVENT_TYPES, Event

from .result import Result, Table, Target, median, percentile, spread
from .stream import REWARDS, engine_events

RATE = 20_000
TICK_S = 0.001
FRAMES_PER_S = 50
"""At one flush every 20 ms."""
RANDOM_READS = 100
SEAL_BYTES = (
    "Most bytes are seals: of about 25 after compression, 4 are the random checksum, up to 7 the reward, and the rest "
    "times, identities, lengths and record offsets."
)


def folder_bytes(folder: Path) -> int:
    """Bytes of all segments."""
    return sum(p.stat().st_size for p in folder.glob("*.zst"))


async def steady(writer: JournalWriter[Event], events: list[Event], rate: int) -> list[float]:
    """Append at ``rate``; every tick's last event is awaited: seconds from its append until it was durable."""
    lags: list[float] = []
    waits: set[asyncio.Task[None]] = set()

    async def wait(offset: int, at: float) -> None:
        await writer.flushed(offset)
        lags.append(perf_counter() - at)

    began, done = perf_counter(), 0
    while done < len(events):
        due = min(len(events), 1 + int((perf_counter() - began) * rate))
        for i in range(done, due):
            offset = writer.append(events[i])
        if due > done:
            task = asyncio.create_task(wait(offset, perf_counter()))
            waits.add(task)
            task.add_done_callback(waits.discard)
        done = due
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*waits)
    return lags


def lag_and_bytes(
    rate: int, seconds: float, repeats: int, reward: str
) -> tuple[list[list[float]], list[float], list[float]]:
    """Per repeat: sorted lags in seconds, bytes per event on disk, share of a core that the process used."""
    events = list(itertools.islice(engine_events(reward=reward), int(rate * seconds)))
    lags, sizes, cpu = [], [], []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
        with JournalWriter.open(folder / "j", EVENT_TYPES, journal_id="bench") as writer:
            began, used = perf_counter(), process_time()
            lags.append(sorted(asyncio.run(steady(writer, events, rate))))
            cpu.append((process_time() - used) / (perf_counter() - began))
        sizes.append(folder_bytes(folder / "j") / len(events))
        shutil.rmtree(folder)
    gc.unfreeze()
    return lags, sizes, cpu


def timed(work: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each repeat."""
    found = []
    for _ in range(repeats):
        began = perf_counter()
        work()
        found.append(perf_counter() - began)
    return found


class Reading:
    """A journal without images, opened, verified and read."""

    def __init__(self, folder: Path, events: int) -> None:
        self.path = folder / "j"
        self.events = events
        options = JournalOptions(
            backlog_max_bytes=512 << 20, segment_bytes_max=4 << 20, frame_events_max=RATE // FRAMES_PER_S
        )
        with JournalWriter.open(self.path, EVENT_TYPES, journal_id="bench", options=options) as writer:
            for count, event in enumerate(itertools.islice(engine_events(), events)):
                writer.append(event)
                if count % 200_000 == 0:
                    writer.sync()
        self.bytes = folder_bytes(self.path)
        self.segments = len(list(self.path.glob("*.zst")))

    def open(self) -> None:
        JournalWriter.open(self.path, EVENT_TYPES, journal_id="bench").close()

    def iterate(self, start: int = 0) -> None:
        for _ in JournalReader(self.path, EVENT_TYPES).events(start):
            pass

    def frames(self) -> None:
        """Frames decompressed and checked, events not decoded."""
        for _ in JournalReader(self.path, EVENT_TYPES).frames(0):
            pass

    def one(self, offset: int) -> None:
        """A fresh reader, one event: hops over everything before."""
        next(JournalReader(self.path, EVENT_TYPES).events(offset))

    def get(self, reader: JournalReader[Event]) -> None:
        """Events at random places, with a reader that has its index."""
        for i in range(RANDOM_READS):
            reader.get(i * 7919 % self.events)

    def rows(self, repeats: int) -> list[tuple[str, list[float], float]]:
        """(what, seconds, events in it)."""
        events = self.events
        reader: JournalReader[Event] = JournalReader(self.path, EVENT_TYPES)
        self.get(reader)
        return [
            ("open for writing, no image: scan all", timed(self.open, repeats), events),
            ("verify", timed(lambda: verify(self.path), repeats), events),
            ("frames, not decoded", timed(self.frames, repeats), events),
            ("iterate, decoded", timed(self.iterate, repeats), events),
            ("fresh reader, event at 90 %", timed(lambda: self.one(events * 9 // 10), repeats), 1),
            ("fresh reader, the last 10 %", timed(lambda: self.iterate(events * 9 // 10), repeats), events / 10),
            (f"{RANDOM_READS} random events, warm index", timed(lambda: self.get(reader), repeats), RANDOM_READS),
        ]


def run(quick: bool) -> Result:
    """Steady rate first, then reading."""
    repeats, seconds, events = (1, 0.5, 30_000) if quick else (5, 3.0, 1_000_000)
    lags, sizes, cpu = lag_and_bytes(RATE, seconds, repeats, "graded")
    other = {reward: lag_and_bytes(RATE, seconds, 1, reward)[1] for reward in REWARDS if reward != "graded"}
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    try:
        reading = Reading(folder, events)
        found = reading.rows(repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    per_event = median(sizes)
    lag = Table(
        f"Steady {RATE:,} events/s of a made-up training, {repeats} x {seconds:g} s, flush interval 20 ms.",
        ["", "median of repeats (lowest to highest)"],
        [
            ["append → durable, p50, ms", spread(percentile(run, 0.5) * 1e3 for run in lags)],
            ["append → durable, p99, ms", spread(percentile(run, 0.99) * 1e3 for run in lags)],
            ["bytes on disk per event, rewards in twentieths", spread(sizes)],
            *([f"bytes on disk per event, rewards: {reward}", spread(found)] for reward, found in other.items()),
            ["CPU, share of one core, loop and flush thread", spread(cpu)],
        ],
    )
    size = f"{events:,} events, {reading.bytes / 1e6:.1f} MB in {reading.segments} segments, {os.cpu_count()} cores."
    speeds = Table(
        size,
        ["", "seconds: median (lowest to highest)", "events/s"],
        [[what, spread(seconds), count / median(seconds)] for what, seconds, count in found],
    )
    return Result(
        name="journal",
        title="The journal: lag, size, reading",
        order=30,
        method=(
            "The events are those of a made-up training (`benchmarks/stream.py`): dispatches, seals with receipts, "
            "commits, steps, checkpoints, with random checksums and long-tailed lengths. Reading is from the page "
            f"cache; the journal read has frames of {RATE // FRAMES_PER_S} events, as at {RATE:,} events/s."
        ),
        tables=[lag, speeds],
        targets=[Target("bytes on disk per event at 20k events/s", "≤ 16", f"{per_event:.1f}", per_event <= 16)],
        findings=[SEAL_BYTES],
        limits=(
            "At lower rates a frame holds fewer events and compresses worse: bytes per event rise, bytes per second "
            "fall. A cold page cache adds what the disk needs."
        ),
    )
