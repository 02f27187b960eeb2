"""A controller's parts with many groups alive: the ledger over a real journal, checkpoints, arriving seals, a restore.

``benchmarks.checkpoint_sim`` and ``benchmarks.checkpoint_tq`` put a data plane beside it.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unlost.engine.checkpoints import Checkpointer
from unlost.engine.folders import RealFolders
from unlost.engine.ledger import Ledger
from unlost.engine.protocols import DataPlane, StepResult, WeightsRef
from unlost.engine.restore import Restorer
from unlost.engine.samplers import make_sampler
from unlost.journal import JournalReader, JournalWriter
from unlost.replay import events as ev
from unlost.replay.fold import fold_reader
from unlost.replay.payloads import PayloadStore
from unlost.replay.state import State

BATCH = 64
SEALS_PER_S = 400
TRAINER_BYTES = 32 << 20


class RunClock:
    """Monotonic microseconds."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FileTrainer:
    """Saves a file of random bytes as the real one saves tensors: written, hashed and synced in a thread."""

    def __init__(self) -> None:
        self._state = random.Random(0).randbytes(TRAINER_BYTES)

    async def start(self) -> None: ...

    async def train(self, step: int, groups: Sequence[Sequence[str]]) -> StepResult:
        raise NotImplementedError

    async def version(self) -> int:
        return 0

    async def publish_weights(self, branch: int) -> WeightsRef:
        return WeightsRef(branch, 0, "weights")

    async def save(self, directory: str) -> dict[str, str]:
        return await asyncio.to_thread(self._save, directory)

    def _save(self, directory: str) -> dict[str, str]:
        digest = hashlib.sha256()
        with open(os.path.join(directory, "state.bin"), "xb", buffering=0) as file:
            for at in range(0, TRAINER_BYTES, 1 << 20):
                chunk = self._state[at : at + (1 << 20)]
                digest.update(chunk)
                file.write(chunk)
            os.fsync(file.fileno())
        return {"state.bin": digest.hexdigest()}

    async def load(self, directory: str, digests: Mapping[str, str]) -> int:
        def check() -> None:
            with open(os.path.join(directory, "state.bin"), "rb") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == digests["state.bin"]

        await asyncio.to_thread(check)
        return 0

    async def stop(self) -> None: ...


Make = Callable[[list[int]], Awaitable[list[ev.Receipt]]]
"""Payloads and rows for these groups; receipts, siblings in order."""


class LiveRun:
    """One incarnation over ``folder``; a second object over the same folder goes on from its journal."""

    def __init__(self, folder: Path, plane: DataPlane, siblings: int) -> None:
        self.folder = folder
        self.plane = plane
        self.siblings = siblings
        self.trainer = FileTrainer()
        self.clock = RunClock()
        began = time.perf_counter()
        self.writer = JournalWriter.open(folder / "events", ev.EVENT_TYPES, journal_id="bench")
        opened = time.perf_counter()
        reader: JournalReader[ev.Event] = JournalReader(folder / "events", ev.EVENT_TYPES)
        self.state = fold_reader(reader) if self.writer.next_offset else State()
        self.open_s, self.fold_s = opened - began, time.perf_counter() - opened
        self.ledger = Ledger(self.state, self.writer, self.clock)
        incarnation = self.state.incarnation + 1
        self.ledger.record(ev.RunStarted(self.clock.now_us(), "bench", incarnation, 0, "h", 1, {}, {}, {}))
        self._tasks: set[asyncio.Task[Any]] = set()
        self.checkpointer = Checkpointer(
            self.ledger, RealFolders(), str(folder / "checkpoints"), self.trainer, plane, self.clock,
            keep_latest_k=2, failures_max=1, save_data_plane=True, payloads_full=True, after_commit=self._nothing,
            spawn=self._spawn,
        )  # fmt: skip

    async def _nothing(self) -> None: ...

    def _spawn(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- filling ------------------------------------------------------------------------------------------------------

    def worker(self) -> str:
        """A worker of this incarnation; its payload journal's name."""
        worker = self.state.next_worker
        journal = f"i{self.state.incarnation:05d}-w{worker:05d}"
        self.ledger.record(ev.WorkerStarted(self.clock.now_us(), worker, journal))
        return journal

    def dispatched(self, count: int) -> list[int]:
        """New groups with every sibling running."""
        state, ledger = self.state, self.ledger
        found: list[int] = []
        while len(found) < count:
            first = state.next_group
            size = min(BATCH, count - len(found))
            refs = tuple(ev.PromptRef(f"p{g}", 0, g, 1 << 62 | g) for g in range(first, first + size))
            admission, _ = ledger.reserve(refs, self.siblings, (0, first + size))
            index = state.dispatch_index + 1
            ledger.record(ev.BatchAdmitted(self.clock.now_us(), admission, -1, index, state.trainer_version))
            found += range(first, first + size)
        for group in found:
            for sibling in range(self.siblings):
                ledger.dispatch(group, sibling, 0, (state.branch, state.trainer_version))
        return found

    async def fill(self, count: int, make: Make) -> None:
        """``count`` groups generated, their rows in the data plane, committed to the buffer."""
        groups = self.dispatched(count)
        for at in range(0, count, BATCH):
            part = groups[at : at + BATCH]
            receipts = iter(await make(part))
            for group in part:
                for key in self.ledger.running(group):
                    self.ledger.seal(key, next(receipts))
                self.ledger.commit_group(group)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> tuple[float, int]:
        """A trainer checkpoint from begin to committed: seconds, bytes."""
        began = time.perf_counter()
        task = await self.checkpointer.begin(ev.CHECKPOINT_TRAINER)
        assert task is not None
        assert await task, "the checkpoint failed"
        return time.perf_counter() - began, folder_bytes(self.folder / "checkpoints")

    async def restore(self) -> dict[str, float]:
        """As a resumed controller does it, workers left out; seconds by phase."""
        began = time.perf_counter()
        restorer = Restorer(
            self.ledger, make_sampler("ready_first"), self.trainer, self.plane,
            PayloadStore(self.folder / "payloads"), RealFolders(), str(self.folder / "checkpoints"), self.clock,
            resume_prefixes=True, granularity="sibling", on_phase=lambda _: None,
        )  # fmt: skip

        async def no_workers(_: WeightsRef) -> None: ...

        restored = await restorer.run("latest", no_workers)
        seconds = time.perf_counter() - began
        counters = restored.counters
        return {
            **restored.timings, "total_seconds": self.open_s + self.fold_s + seconds, "fold_seconds": self.fold_s,
            "put_back": counters["rows_put_back"], "complete": counters["groups_complete_restored"],
        }  # fmt: skip

    def close(self) -> None:
        self.writer.close()


def folder_bytes(folder: Path) -> int:
    """All files below."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


# --- seals that arrive ----------------------------------------------------------------------------------------------


@dataclass
class Arrivals:
    """Receipts that arrive from a thread, as Ray's replies do; seconds from arrival to applied, one each.

    ``blocked``: the stop-the-world way, in which nothing changes the ledger while a checkpoint is taken.
    """

    run: LiveRun
    keys: deque[ev.AttemptKey]
    receipt: ev.Receipt
    latencies: list[float] = field(default_factory=list)
    blocked: bool = False
    _waiting: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._post, args=(loop,), daemon=True)
        self._thread.start()

    def _post(self, loop: asyncio.AbstractEventLoop) -> None:
        began, sent = time.perf_counter(), 0
        while not self._stop.is_set():
            time.sleep(max(0.0, began + sent / SEALS_PER_S - time.perf_counter()))
            loop.call_soon_threadsafe(self._arrive, time.perf_counter())
            sent += 1

    def _arrive(self, at: float) -> None:
        if self.blocked:
            self._waiting.append(at)
        elif self.keys:
            self.run.ledger.seal(self.keys.popleft(), self.receipt)
            self.latencies.append(time.perf_counter() - at)

    def unblock(self) -> None:
        self.blocked = False
        waiting, self._waiting = self._waiting, []
        for at in waiting:
            self._arrive(at)

    def take(self) -> list[float]:
        """Latencies since the last call."""
        found, self.latencies = self.latencies, []
        return found

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.keys.clear()  # one may still be on its way


@dataclass
class Interference:
    """Latencies in seconds: with nothing else, beside a checkpoint, behind a stop-the-world one."""

    idle: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)
    checkpoint_s: list[float] = field(default_factory=list)
    bytes: int = 0


async def interfere(
    run: LiveRun, repeats: int, idle_s: float, around: Callable[[str], None] = lambda _: None
) -> Interference:
    """Idle, beside, stopped, in turn. ``around`` is told the phase that begins."""
    found = Interference()
    seals = int(SEALS_PER_S * 3 * repeats * (idle_s + 20))
    running = run.dispatched(min(4000, seals // run.siblings + 1))
    keys = deque(key for group in running for key in run.ledger.running(group))
    receipt = ev.Receipt(0.5, 400, 0, 0, run.state.workers[0].journal, 0, 1 << 31, ((0, 0, 0),), False, 120, 0)
    arrivals = Arrivals(run, keys, receipt)
    run.writer.sync()
    gc.collect()
    gc.freeze()
    arrivals.start()
    try:
        for _ in range(repeats):
            around("idle")
            arrivals.take()
            await asyncio.sleep(idle_s)
            found.idle += arrivals.take()
            around("beside")
            seconds, found.bytes = await run.checkpoint()
            found.beside += arrivals.take()
            found.checkpoint_s.append(seconds)
            around("idle")
            await asyncio.sleep(0.2)
            arrivals.take()
            around("stopped")
            arrivals.blocked = True
            await run.checkpoint()
            arrivals.unblock()
            found.stopped += arrivals.take()
    finally:
        around("idle")
        arrivals.stop()
        gc.unfreeze()
    for values in (found.idle, found.beside, found.stopped):
        values.sort()
    return found
