"""What a running checkpoint adds with TransferQueue as the data plane, how long puts wait for it, and restores."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unlost.engine.cluster import Cluster, ClusterOptions
from unlost.engine.data_plane import TransferQueueDataPlane
from unlost.replay import events as ev

from .checkpoint_sim import COLUMNS, rows_of
from .live_run import SEALS_PER_S, Interference, LiveRun, folder_bytes, interfere
from .putter import PROMPT_TOKENS, Putter
from .result import Cell, Result, Table, Target, median, percentile

UNITS = 2


@dataclass(frozen=True)
class Size:
    """Groups in the buffer; ``interference`` False: only checkpoint and restore are measured."""

    groups: int
    siblings: int
    tokens: int
    interference: bool = True
    without_snapshot: bool = False

    @property
    def payload_bytes(self) -> int:
        """Ids and log-probabilities of all rows, prompts included."""
        return self.groups * self.siblings * (8 * self.tokens + 4 * PROMPT_TOKENS)

    def __str__(self) -> str:
        return f"{self.groups:,} x {self.siblings} x {self.tokens:,}"


@dataclass
class Found:
    """Everything of one size."""

    size: Size
    fill_s: float = 0.0
    checkpoint_s: float = 0.0
    snapshot_bytes: int = 0
    restored: dict[str, float] = field(default_factory=dict)
    put_back: dict[str, float] = field(default_factory=dict)
    interference: Interference = field(default_factory=Interference)
    puts: dict[str, list[float]] = field(default_factory=lambda: {"idle": [], "beside": [], "stopped": []})


class Phases:
    """When which phase was; the puts' own times are sorted into them."""

    def __init__(self) -> None:
        self.began: list[tuple[float, str]] = []

    def __call__(self, phase: str) -> None:
        self.began.append((time.time(), phase))

    def sort(self, probes: list[tuple[float, float]], into: dict[str, list[float]]) -> None:
        """By the phase in which a put began."""
        for wall, seconds in probes:
            before = [phase for at, phase in self.began if at <= wall]
            if before:
                into[before[-1]].append(seconds)


async def _remote(reference: Any) -> Any:
    return await reference


async def measure(size: Size, repeats: int, idle_s: float) -> Found:
    """Fill, checkpoint, restore in a second incarnation, interference in it, restore without the snapshot."""
    import ray

    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    (folder / "payloads").mkdir()
    plane = TransferQueueDataPlane(storage_units=UNITS)
    await plane.start()
    found = Found(size)
    actor: Any = None
    try:
        run = LiveRun(folder, plane, size.siblings)
        actor = ray.remote(num_cpus=1)(Putter).remote(str(folder / "payloads"), run.worker(), size.tokens)
        await _remote(actor.attach.remote())

        async def make(part: list[int]) -> list[ev.Receipt]:
            keys = [(k.incarnation, k.group, k.sibling, k.attempt) for g in part for k in run.ledger.running(g)]
            receipts: list[ev.Receipt] = await _remote(actor.make.remote(keys))
            return receipts

        began = time.perf_counter()
        await run.fill(size.groups, make)
        found.fill_s = time.perf_counter() - began
        found.checkpoint_s, _ = await run.checkpoint()
        found.snapshot_bytes = sum(folder_bytes(p) for p in (folder / "checkpoints").glob("*/data_plane"))
        run.close()
        await plane.restart()
        run, found.restored = await _restored(folder, plane, size)
        if size.without_snapshot:
            run.close()
            for snapshot in (folder / "checkpoints").glob("*/data_plane"):
                shutil.rmtree(snapshot)
            run, found.put_back = await _restored(folder, plane, size)
        if size.interference:
            await _remote(actor.reattach.remote())
            await _interference(run, actor, found, repeats, idle_s)
        run.close()
        await _remote(actor.close.remote())
        return found
    finally:
        if actor is not None:
            ray.kill(actor)
        await plane.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _restored(folder: Path, plane: TransferQueueDataPlane, size: Size) -> tuple[LiveRun, dict[str, float]]:
    """A new incarnation over an empty service; without a usable snapshot the restore itself starts that anew."""
    run = LiveRun(folder, plane, size.siblings)
    timings = await run.restore()
    assert timings["complete"] >= size.groups, timings
    return run, timings


async def _interference(run: LiveRun, actor: Any, found: Found, repeats: int, idle_s: float) -> None:
    phases = Phases()
    await _remote(actor.probe.remote(True))
    found.interference = await interfere(run, repeats, idle_s, phases)
    phases.sort(await _remote(actor.probe.remote(False)), found.puts)
    for values in found.puts.values():
        values.sort()


def _put_rows(found: Found) -> list[list[Cell]]:
    names = {"idle": "no checkpoint", "beside": "beside a checkpoint", "stopped": "stop the world"}
    return [
        [str(found.size), names[phase], len(puts), *(percentile(puts, s) * 1e3 for s in (0.5, 0.99)),
         puts[-1] * 1e3 if puts else None]
        for phase, puts in found.puts.items()
    ]  # fmt: skip


def _restore_row(found: Found) -> list[Cell]:
    restored, back = found.restored, found.put_back
    phases = ("fold_seconds", "data_plane_load_seconds", "payload_tails_seconds", "rows_seconds", "total_seconds")
    return [
        str(found.size), found.size.payload_bytes / 1e6, found.checkpoint_s,
        found.snapshot_bytes / found.size.payload_bytes, *(restored[phase] for phase in phases),
        back.get("rows_seconds"), int(back["put_back"]) if back else None,
    ]  # fmt: skip


def run(quick: bool) -> Result:
    """Sizes one after another, in one Ray cluster, each with a service of its own."""
    sizes = [
        Size(100, 8, 1024),
        Size(1_000, 8, 1024, without_snapshot=True),
        Size(3_000, 8, 1024),
        Size(10_000, 1, 32, interference=False),
    ]
    repeats, idle_s = 2, 2.0
    if quick:
        sizes, repeats, idle_s = [Size(20, 4, 256, without_snapshot=True)], 1, 0.5
    logging.getLogger("unlost.engine.restore").setLevel(logging.ERROR)  # a snapshot is removed on purpose
    all_found = []
    with Cluster(ClusterOptions(cpus=2 + UNITS + 2)):
        for size in sizes:
            all_found.append(asyncio.run(measure(size, repeats, idle_s)))
            print(f"   {size}: filled in {all_found[-1].fill_s:.1f} s", flush=True)
    return _result(all_found)


def _result(all_found: list[Found]) -> Result:
    measured = [f for f in all_found if f.size.interference]
    latencies = [row for f in measured for row in rows_of(f.size.groups, f.interference)]
    added = {
        f.size.groups: (percentile(f.interference.beside, 0.5) - percentile(f.interference.idle, 0.5)) * 1e3
        for f in measured
    }
    seconds = ", ".join(f"{median(f.interference.checkpoint_s):.2f} s at {f.size.groups:,}" for f in measured)
    return Result(
        name="checkpoint_tq",
        title="Seals beside a checkpoint, and restores, with TransferQueue",
        order=100,
        method=(
            f"As above, with TransferQueue ({UNITS} storage units) and rows of 1,024 generated tokens put singly by a "
            "process of its own, which goes on putting one every 50 ms and times it. "
            f"{SEALS_PER_S} receipts a second arrive; a seal does not wait for its put. Before that the run is "
            "restored by a new incarnation into an empty service: trainer state checked, snapshot verified and loaded, "
            "payload tails read, every row's checksum compared; and once more with the snapshot removed, so that every "
            "row is put back from its payload."
        ),
        tables=[
            Table("Milliseconds from a receipt's arrival to its seal applied.", COLUMNS, latencies),
            Table(
                "A single put of a row, by another process.",
                ["groups x siblings x tokens", "", "puts", "p50 ms", "p99 ms", "max ms"],
                [row for f in measured for row in _put_rows(f)],
            ),
            Table(
                "Checkpoint and restore, seconds.",
                ["groups x siblings x tokens", "payload MB", "checkpoint", "snapshot bytes per payload byte", "fold",
                 "snapshot load", "payload tails", "rows", "restore in all", "rows without snapshot", "rows put back"],
                [_restore_row(f) for f in all_found],
            ),
        ],
        findings=[
            (
                f"Checkpoints beside the seals took {seconds}. The put stall is TransferQueue's own. The longest stops "
                "of the loop come from comparing rows: TransferQueue's list of all of them is unpacked on the loop."
            )
        ],
        targets=[
            Target(
                "seal → applied, added by a checkpoint (TransferQueue), median", "≤ 1 ms",
                ", ".join(f"{a:.2f} ms at {g:,}" for g, a in added.items()), max(added.values()) <= 1,
            )
        ],
        limits="One machine: storage units, controller and the putting process share two cores and a disk.",
    )  # fmt: skip
