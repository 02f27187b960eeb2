"""What one append costs its caller, at a given rate, inside a running asyncio loop."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any

from .result import Cell, Result, Table, Target, median, percentile, sig
from .stream import Records
from .writers import CANDIDATES, NOTHING, UNLOST, Candidate

RATES = (1_000, 20_000, 100_000)
TICK_S = 0.001
COMPANIONS = 50


@dataclass
class Measured:
    """One run: sorted call times in ns, what rate was reached, how late the loop's other tasks were.

    ``warm``: the same call times without the first call after each of the appending task's sleeps.
    """

    spans: list[int]
    warm: list[int]
    rate: float
    late_us: list[float]


@dataclass
class Repeats:
    """The same run several times."""

    runs: list[Measured] = field(default_factory=list)

    def us(self, share: float) -> float:
        """Median over repeats of a percentile, microseconds."""
        return median(percentile(run.spans, share) / 1e3 for run in self.runs)

    def warm_us(self, share: float) -> float:
        """The same without the first call after each sleep."""
        return median(percentile(run.warm or run.spans, share) / 1e3 for run in self.runs)

    def late_ms(self) -> float:
        return median(percentile(run.late_us, 0.99) / 1e3 for run in self.runs)

    def rate(self) -> float:
        return median(run.rate for run in self.runs)

    def slow_share(self) -> float:
        """Share of calls above 100 µs, in parts per million."""
        return median(1e6 * sum(s > 100_000 for s in run.spans) / max(1, len(run.spans)) for run in self.runs)


async def paced(one: Callable[[int], int], rate: int, seconds: float) -> Measured:
    """Call ``one(i)``, which returns its own duration in ns, ``rate`` times a second in ticks of a millisecond."""
    total = int(rate * seconds)
    spans, firsts = array("q", bytes(8 * total)), set()
    late: list[float] = []
    others = [asyncio.create_task(_companion(i, late)) for i in range(COMPANIONS)]
    began = perf_counter()
    done = 0
    while done < total and perf_counter() - began < 1.5 * seconds:
        due = min(total, 1 + int((perf_counter() - began) * rate))
        firsts.add(done)
        due = min(due, done + max(1, rate // 100))  # a writer that can't follow must not get the loop for itself
        while done < due:
            spans[done] = one(done)
            done += 1
        await asyncio.sleep(TICK_S)
    took = perf_counter() - began
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    warm = [span for i, span in enumerate(spans[:done]) if i not in firsts]
    return Measured(sorted(spans[:done]), sorted(warm), done / took, sorted(late))


async def _companion(number: int, late: list[float]) -> None:
    """What else runs in the loop: timers and a little work; it also sees how late it is called."""
    pause = 0.002 + number * 1e-4
    while True:
        due = perf_counter() + pause
        await asyncio.sleep(pause)
        late.append((perf_counter() - due) * 1e6)
        sum(range(50))


def measure(candidate: Candidate, rate: int, seconds: float, records: Records, *, construct: bool) -> Measured:
    """One run in a fresh folder. ``construct``: building the record is part of what is timed."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    build: Callable[[int], Any] = records.struct if candidate.structs else records.mapping
    sink = candidate.make(folder)
    append, clock = sink.append, perf_counter_ns
    if construct:

        def one(i: int) -> int:
            began = clock()
            append(build(i))
            return clock() - began
    else:
        built = [build(i) for i in range(int(rate * seconds))]

        def one(i: int) -> int:
            record = built[i]
            began = clock()
            append(record)
            return clock() - began

    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(paced(one, rate, seconds))
    finally:
        gc.unfreeze()
        sink.sync()
        sink.close()
        shutil.rmtree(folder, ignore_errors=True)


def _row(candidate: Candidate, rate: int, repeats: Repeats) -> list[Cell]:
    reached = repeats.rate()
    followed = "" if reached > 0.95 * rate else f" (reached {sig(reached)})"
    return [
        candidate.name,
        f"{rate:,}{followed}",
        repeats.us(0.5),
        repeats.us(0.99),
        repeats.warm_us(0.99),
        repeats.us(0.999),
        repeats.slow_share(),
        repeats.late_ms(),
        candidate.durable,
    ]


COLUMNS = [
    "writer", "events/s", "p50 µs", "p99 µs", "p99 µs, warm", "p99.9 µs", "over 100 µs, ppm", "loop p99 late, ms",
    "durable",
]  # fmt: skip


def run(quick: bool) -> Result:
    """All candidates at all rates, built records; the journal also with construction; repeats interleaved."""
    repeats, seconds = (1, 0.1) if quick else (5, 0.4)
    records = Records()
    candidates = [c for c in CANDIDATES if c.installed]
    plan = [(c, rate, False) for rate in RATES for c in candidates]
    plan += [(c, rate, True) for rate in RATES for c in (NOTHING, UNLOST)]
    found = {key: Repeats() for key in plan}
    hopeless: set[tuple[str, int]] = set()
    for _ in range(repeats):
        for candidate, rate, construct in plan:
            if (candidate.name, rate) in hopeless:
                continue
            measured = measure(candidate, rate, seconds, records, construct=construct)
            found[candidate, rate, construct].runs.append(measured)
            if measured.rate < 0.1 * rate:  # ten times as much would only take longer
                hopeless |= {(candidate.name, higher) for higher in RATES if higher > rate}
    built = [_row(c, rate, found[c, rate, False]) for rate in RATES for c in candidates if found[c, rate, False].runs]
    constructed = [_row(c, rate, found[c, rate, True]) for rate in RATES for c in (NOTHING, UNLOST)]
    ours = found[UNLOST, 20_000, False]
    missing = [c.name for c in CANDIDATES if not c.installed]
    return Result(
        name="append",
        title="An append, as its caller sees it",
        order=10,
        method=(
            f"An asyncio loop with {COMPANIONS} other tasks appends records in ticks of a millisecond; each call is "
            f"timed alone. Half of the records are dispatches, half seals, with the fields of real ones (Structs for "
            f"those that take them, dicts for the others). {repeats} repeats of {seconds} s, all writers in turn in "
            "each; the middle repeat's percentiles. A writer that can't follow shows the rate that it reached, "
            "and one that does not reach a tenth of a rate is not tried at the next. "
            "`warm`: without the first call after each sleep, which finds the caches as other tasks left them; at "
            "20,000/s that is one call of 20, so the plain p99 is one of these, whoever writes. "
            "`loop p99 late`: how late the other tasks were woken, which is what a blocking writer does to its "
            "neighbours. The journal's flush thread, and the queue's, share the interpreter lock with the caller; "
            "their effect is in these figures (`over 100 µs`: calls in a million)."
        ),
        tables=[
            Table("Record built before; encoding included.", COLUMNS, built),
            Table("Building the record included (its nested receipt too).", COLUMNS, constructed),
        ],
        targets=[
            Target("append of a built event at 20k/s: p50", "≤ 0.6 µs", f"{ours.us(0.5):.2f} µs", ours.us(0.5) <= 0.6),
            Target("append of a built event at 20k/s: p99", "≤ 3 µs", f"{ours.us(0.99):.2f} µs", ours.us(0.99) <= 3.0),
        ],
        limits=(
            "One caller; the alternatives are used as their documentation shows first, and each could be tuned. "
            "Encoding a dict as JSON is part of what JSON writers cost; a faster JSON package would help them."
            + (f" Not installed, so not measured: {', '.join(missing)}." if missing else "")
        ),
    )
