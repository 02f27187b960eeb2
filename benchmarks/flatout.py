"""Appending as fast as one caller can: its own cost, events made durable a second, CPU of the whole process."""

from __future__ import annotations

import gc
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time, thread_time

from .result import Cell, Result, Table, Target, median, sig
from .stream import Records
from .writers import CANDIDATES, NOTHING, QUEUE_THREAD, UNLOST, Candidate

EVENTS_MAX = 400_000
SECONDS_MAX = 1.0
LOOK_EVERY = 64


@dataclass
class Runs:
    """Per run: wall and CPU on the caller per event, until durable, CPU of all threads per event; microseconds."""

    wall_us: list[float] = field(default_factory=list)
    caller_us: list[float] = field(default_factory=list)
    durable_per_s: list[float] = field(default_factory=list)
    process_us: list[float] = field(default_factory=list)


def measure(candidate: Candidate, records: Records, runs: Runs, events_max: int) -> None:
    """Build and append until ``events_max`` or the time is up, then wait until it is durable."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    build = records.struct if candidate.structs else records.mapping
    sink = candidate.make(folder)
    append = sink.append
    gc.collect()
    gc.freeze()
    done = 0
    began, cpu, caller = perf_counter(), process_time(), thread_time()
    limit = began + SECONDS_MAX
    while done < events_max:
        for i in range(done, done + LOOK_EVERY):
            append(build(i))
        done += LOOK_EVERY
        if perf_counter() > limit:
            break
    wall, own = perf_counter() - began, thread_time() - caller
    sink.sync()
    total, all_cpu = perf_counter() - began, process_time() - cpu
    gc.unfreeze()
    sink.close()
    shutil.rmtree(folder, ignore_errors=True)
    runs.wall_us.append(wall / done * 1e6)
    runs.caller_us.append(own / done * 1e6)
    runs.durable_per_s.append(done / total)
    runs.process_us.append(all_cpu / done * 1e6)


def _row(candidate: Candidate, runs: Runs) -> list[Cell]:
    return [
        candidate.name,
        median(runs.wall_us),
        median(runs.caller_us),
        1e6 / median(runs.wall_us),
        median(runs.durable_per_s),
        median(runs.process_us),
        candidate.durable,
    ]


def run(quick: bool) -> Result:
    """All candidates in turn, several times; construction included."""
    repeats, events = (1, 20_000) if quick else (3, EVENTS_MAX)
    records = Records()
    found = {c: Runs() for c in CANDIDATES if c.installed}
    for _ in range(repeats):
        for candidate, runs in found.items():
            began = perf_counter()
            measure(candidate, records, runs, events)
            if (took := perf_counter() - began) > 15 * SECONDS_MAX:
                print(f"   {candidate.name}: {took:.0f} s, most of it after the last append", flush=True)
    ours, theirs, none = found[UNLOST], found[QUEUE_THREAD], found[NOTHING]
    ratio = median(b / a for a, b in zip(ours.wall_us, theirs.wall_us, strict=True))
    bare = median(a - n for a, n in zip(ours.caller_us, none.caller_us, strict=True))
    durable = median(ours.durable_per_s)
    return Result(
        name="flatout",
        title="Flat out",
        order=20,
        method=(
            f"One caller builds and appends up to {events:,} records without a pause, at most {SECONDS_MAX:g} s; then "
            f"it waits until they are as durable as that writer makes them. {repeats} repeats, all writers in turn in "
            "each; medians. `caller`: wall and CPU time of the appending thread per event, building the record "
            'included (the row "nothing" is building Structs alone). `durable`: events divided by the time until all '
            "were durable, waiting included. `CPU`: all threads of the process."
        ),
        tables=[
            Table(
                "",
                ["writer", "caller wall µs", "caller CPU µs", "appended/s", "durable/s", "CPU µs", "durable"],
                [_row(candidate, runs) for candidate, runs in found.items()],
            )
        ],
        findings=[
            f"Built event to queued event: {sig(bare)} µs of the caller's CPU (the difference to building alone)."
        ],
        targets=[
            Target("against a queue + JSON-lines thread, flat out, construction included", "≥ 3x faster",
                   f"{ratio:.1f}x", ratio >= 3),
            Target("durable throughput, one writer", "≥ 500k events/s", f"{durable:,.0f}/s", durable >= 500_000),
        ],
        limits=(
            "Flat out is not how a controller appends; it shows where the limit is. The JSON-lines thread shares the "
            "interpreter lock with its caller: that is part of what it costs."
        ),
    )  # fmt: skip
