"""Whole ledger transitions: check, build, encode, enqueue, apply; at 100, 1,000 and 10,000 live groups."""

from __future__ import annotations

import gc
import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time

from unlost.engine.ledger import Ledger
from unlost.journal import JournalOptions, JournalWriter
from unlost.replay import events as ev
from unlost.replay.state import State

from .result import Cell, Result, Table, Target, median
from .ten_million import MonotonicClock

LIVE = (100, 1_000, 10_000)
SIBLINGS = 8
BATCH = 8
WEIGHTS = (0, 0)


class Bench:
    """A ledger over a real journal that is filled to ``live`` groups, command by command."""

    def __init__(self, folder: Path, live: int) -> None:
        options = JournalOptions(backlog_max_bytes=512 << 20)
        self.writer = JournalWriter.open(folder, ev.EVENT_TYPES, journal_id="bench", options=options)
        self.state = State()
        self.ledger = Ledger(self.state, self.writer, MonotonicClock())
        self.live = live
        self.costs: dict[str, tuple[float, float]] = {}
        self.ledger.record(ev.RunStarted(0, "r", 1, 0, "h", 1, {}, {}, {}))
        for worker in range(8):
            self.ledger.record(ev.WorkerStarted(0, worker, f"i00001-w{worker:05d}"))

    def time(self, command: str, work: Callable[[], int]) -> None:
        """``work`` returns how often it did it. Keeps thread CPU and wall time, µs each."""
        self.writer.sync()
        gc.collect()
        gc.freeze()
        wall, cpu = perf_counter(), thread_time()
        count = work()
        own, took = thread_time() - cpu, perf_counter() - wall
        gc.unfreeze()
        self.costs[command] = (own / count * 1e6, took / count * 1e6)

    def run(self) -> None:
        """From reservation to training, all groups through each command in turn."""
        self.time("reserve a batch of 8", self.reserve)
        self.time("admit a batch of 8", self.admit)
        self.time("dispatch", self.dispatch)
        self.time("fail", self.fail)
        self.time("abandon", self.abandon)
        self._again()
        self.time("seal", self.seal)
        self.time("commit a group", self.commit)
        self.train()
        self.time("state image (encode)", self.image)
        self.time("image and rotate", self.rotate)

    def reserve(self) -> int:
        for first in range(0, self.live, BATCH):
            refs = tuple(ev.PromptRef(f"p{i}", 0, i, 1 << 60 | i) for i in range(first, min(first + BATCH, self.live)))
            self.ledger.reserve(refs, SIBLINGS, (0, first + len(refs)))
        return -(-self.live // BATCH)

    def admit(self) -> int:
        admissions = list(self.state.reserved)
        for admission in admissions:
            self.ledger.record(ev.BatchAdmitted(self.ledger.clock.now_us(), admission, -1, admission, 0))
        return len(admissions)

    def dispatch(self) -> int:
        dispatch = self.ledger.dispatch
        for group in range(self.live):
            for sibling in range(SIBLINGS):
                dispatch(group, sibling, sibling, WEIGHTS)
        return self.live * SIBLINGS

    def fail(self) -> int:
        for group in range(self.live):
            self.ledger.fail(ev.AttemptKey(1, group, 0, 0), ev.FAIL_INFRASTRUCTURE, "it did not answer", 5)
        return self.live

    def abandon(self) -> int:
        for group in range(self.live):
            self.ledger.abandon(ev.AttemptKey(1, group, 1, 0), ev.ABANDON_WORKER_LOST, 64, 64)
        return self.live

    def _again(self) -> None:
        for group in range(self.live):
            self.ledger.dispatch(group, 0, 0, WEIGHTS)
            self.ledger.dispatch(group, 1, 0, WEIGHTS)

    def seal(self) -> int:
        """The receipt's construction is the worker's and is not counted: it arrives made."""
        work = [
            (
                ev.AttemptKey(1, group, sibling, int(sibling < 2)),
                ev.Receipt(0.5, 400, 0, 0, "i00001-w00001", group, 1 << 31 | group, ((0, 0, 0),), False, 120, group),
            )
            for group in range(self.live)
            for sibling in range(SIBLINGS)
        ]
        seal = self.ledger.seal
        wall, cpu = perf_counter(), thread_time()
        for key, receipt in work:
            seal(key, receipt)
        own, took = thread_time() - cpu, perf_counter() - wall
        self.costs["seal"] = (own / len(work) * 1e6, took / len(work) * 1e6)
        return len(work)

    def commit(self) -> int:
        for group in range(self.live):
            self.ledger.commit_group(group)
        return self.live

    def train(self) -> None:
        """Step after step until the buffer is empty; claims and applications timed apart."""
        record, now = self.ledger.record, self.ledger.clock.now_us
        spent = {"claim 8 groups": [0.0, 0.0], "apply a step of 8 groups": [0.0, 0.0]}
        steps = self.live // BATCH
        for step in range(steps):
            groups = tuple(itertools.islice(self.state.committed, BATCH))
            for command, event in (
                ("claim 8 groups", ev.StepClaimed(now(), step, groups)),
                ("apply a step of 8 groups", ev.StepApplied(now(), step, step + 1)),
            ):
                wall, cpu = perf_counter(), thread_time()
                record(event)
                spent[command][0] += thread_time() - cpu
                spent[command][1] += perf_counter() - wall
        for command, (own, took) in spent.items():
            self.costs[command] = (own / steps * 1e6, took / steps * 1e6)

    def image(self) -> int:
        self.bytes = len(self.state.image())
        return 1

    def rotate(self) -> int:
        self.ledger.image()
        return 1


def measure(live: int) -> Bench:
    """One pass over all commands in a fresh journal."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    bench = Bench(folder / "j", live)
    bench.run()
    bench.writer.close()
    shutil.rmtree(folder)
    return bench


def run(quick: bool) -> Result:
    """Sizes interleaved over the repeats; small ones more often, so that each figure rests on like counts."""
    sizes = (100, 1_000) if quick else LIVE
    repeats = 1 if quick else 3
    found: dict[int, list[Bench]] = {live: [] for live in sizes}
    for _ in range(repeats):
        for live in sizes:
            found[live] += [measure(live) for _ in range(1 if live > 100 else 5)]
    commands = list(found[sizes[0]][0].costs)
    cpu = {(c, live): median(b.costs[c][0] for b in found[live]) for c in commands for live in sizes}
    wall = {(c, live): median(b.costs[c][1] for b in found[live]) for c in commands for live in sizes}
    rows: list[list[Cell]] = [
        [command, *(cpu[command, live] for live in sizes), *(wall[command, live] for live in sizes)]
        for command in commands
    ]
    per_attempt = [cpu[c, live] for c in ("dispatch", "seal", "fail", "abandon") for live in sizes]
    worst = max(cpu["dispatch", sizes[-1]], cpu["seal", sizes[-1]])
    flat = max(cpu[c, sizes[-1]] / cpu[c, sizes[0]] for c in ("dispatch", "seal"))
    images = ", ".join(f"{found[n][0].bytes:,} bytes at {n:,} groups" for n in sizes)
    return Result(
        name="ledger",
        title="Ledger transitions",
        order=70,
        method=(
            "All groups go through each command, flat out, over a real journal whose flush thread works beside; "
            f"{SIBLINGS} siblings a group. CPU time of the calling thread, and wall time, per command in µs; "
            f"medians of {repeats} repeats. A batch command reserves, admits, claims or applies {BATCH} groups. The "
            "image holds every live group with its receipts."
        ),
        tables=[
            Table(
                "Live groups in the ledger across, µs.",
                ["command", *(f"CPU, {n:,}" for n in sizes), *(f"wall, {n:,}" for n in sizes)],
                rows,
            )
        ],
        findings=[f"Image: {images}. Attempts' transitions: {min(per_attempt):.1f} to {max(per_attempt):.1f} µs CPU."],
        targets=[
            Target(
                f"whole transition at {sizes[-1]:,} live groups (dispatch, seal)", "≤ 3 µs", f"{worst:.2f} µs CPU",
                worst <= 3,
            ),
            Target(f"flat from 100 to {sizes[-1]:,} groups", "≤ 1.5x", f"{flat:.2f}x", flat <= 1.5),
        ],
        limits="In a controller other work runs between two transitions, and caches are colder.",
    )  # fmt: skip
