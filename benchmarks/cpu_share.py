"""The journal's share of all CPU time that a real training takes, Ray, TransferQueue and torch included.

CPU seconds are counted, not wall-clock time compared: two runs of the same training differ by more than the journal
costs. Flush threads are measured in the run itself; what the callers spend on encoding and queueing is
measured afterwards by writing the run's own records once more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import psutil

from unlost.journal import JournalError, JournalReader, JournalWriter
from unlost.replay import events as ev

from .result import Result, Table, Target

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"
LOOK_S = 0.1
LIMIT_S = 600
_RECORD_BYTES = 4096
"""A record's size, for the bound of the backlog: no figure depends on it."""


@dataclass(frozen=True)
class Size:
    """One training. ``layers`` 0: the example's own model."""

    name: str
    steps: int
    hidden: int = 0
    layers: int = 0
    overrides: tuple[str, ...] = ()


SIZES = (
    Size("the example: 0.1 M parameters, records of 8 tokens", 15),
    Size(
        "14 M parameters, default journal settings (records of 64 tokens), 256 tokens a response",
        4,
        hidden=384,
        layers=6,
        overrides=(
            "journal.progress_interval_tokens=64",
            "generation.max_new_tokens=256",
            "grpo.learning_rate=1e-4",
        ),
    ),
)


@dataclass
class Cpu:
    """CPU seconds of a process tree and of the flush threads in it; what has ended keeps its last reading."""

    processes: dict[tuple[int, float], float] = field(default_factory=dict)
    flush_threads: dict[str, float] = field(default_factory=dict)

    def look(self, root: psutil.Process, announced: Path) -> None:
        """Read every process below ``root``, and every thread that has announced itself."""
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self.processes[process.pid, process.create_time()] = times.user + times.system
        for name in os.listdir(announced):
            pid, _, thread = name.partition(".")
            with contextlib.suppress(OSError):
                on_cpu_ns = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii").split()[0]
                self.flush_threads[name] = int(on_cpu_ns) / 1e9

    def sums(self) -> tuple[float, float]:
        """All processes, all flush threads."""
        return sum(self.processes.values()), sum(self.flush_threads.values())


@dataclass
class Trained:
    """From the first applied step to the end: CPU seconds of all, of the flush threads; wall seconds; steps."""

    cpu_s: float
    flush_s: float
    wall_s: float
    steps: int
    journals: int


def _make_model(folder: Path, size: Size) -> None:
    """The example's model, or a larger one of its kind with its tokenizer."""
    subprocess.run([sys.executable, "make_model.py", "model"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    if size.layers:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig.from_pretrained(folder / "model")
        config.hidden_size, config.intermediate_size = size.hidden, 4 * size.hidden
        config.num_attention_heads = config.num_key_value_heads = size.hidden // 64
        config.head_dim, config.num_hidden_layers, config.initializer_range = 64, size.layers, 0.02
        LlamaForCausalLM(config).save_pretrained(folder / "model")


def _train(folder: Path, steps: int, overrides: tuple[str, ...]) -> Trained:
    environment = os.environ | {
        "UNLOST_BENCH_CPU": str(folder / "cpu"),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent / "cpu_probe"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    command = [
        sys.executable, "-m", "unlost.cli", "train", str(folder / "config.yaml"),
        "-o", f"grpo.max_steps={steps}", "-o", f"run.dir={folder / 'run'}",
        *(part for override in overrides for part in ("-o", override)),
    ]  # fmt: skip
    with (folder / "train.out").open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    root, cpu = psutil.Process(process.pid), Cpu()
    first: tuple[float, float, float, int] | None = None
    began = time.monotonic()
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu.look(root, folder / "cpu")
        if first is None and (applied := _applied(folder / "run" / "events")):
            first = (*cpu.sums(), time.monotonic(), applied)
        if time.monotonic() - began > LIMIT_S:
            process.kill()
        time.sleep(LOOK_S if first else 0.5)
    code = process.wait(30)
    if code or first is None:
        told = (folder / "train.out").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"exit code {code}, first step {'seen' if first else 'not seen'}:\n{told}")
    total, flushing = cpu.sums()
    wall = time.monotonic() - first[2]
    return Trained(total - first[0], flushing - first[1], wall, steps - first[3], len(cpu.flush_threads))


def _applied(events: Path) -> int:
    """Steps applied so far."""
    try:
        reader: JournalReader[Any] = JournalReader(events, ev.EVENT_TYPES)
        return sum(isinstance(event, ev.StepApplied) for _, event in reader.events(reader.first_offset))
    except (JournalError, FileNotFoundError):
        return 0


def _callers(folder: Path) -> tuple[dict[str, float], int]:
    """CPU seconds to build and append the run's records again, on one thread; and their number."""
    spent = {"events": 0.0, "payload records": 0.0}
    again = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    try:
        spent["events"], count = _append_again(folder / "run" / "events", again / "e", ev.EVENT_TYPES)
        for journal in sorted((folder / "run" / "payloads").iterdir()):
            seconds, more = _append_again(journal, again / journal.name, ev.PayloadRecord, later=True)
            spent["payload records"] += seconds
            count += more
    finally:
        shutil.rmtree(again, ignore_errors=True)
    return spent, count


def _append_again(source: Path, target: Path, types: Any, *, later: bool = False) -> tuple[float, int]:
    """``later``: as workers do, who leave building and encoding to the flush thread."""
    reader: JournalReader[Any] = JournalReader(source, types)
    records = [record for _, record in reader.events(reader.first_offset)]
    with JournalWriter.open(target, types, journal_id="bench") as writer:
        began = thread_time()
        for record in records:
            if later:
                writer.append_later(partial(copy, record), _RECORD_BYTES)
            else:
                writer.append(record)
        return thread_time() - began, len(records)


def _measure(size: Size, steps: int) -> tuple[Table, float]:
    """The table of one training, and journaling's share."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    try:
        shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True)
        (folder / "cpu").mkdir()
        _make_model(folder, size)
        trained = _train(folder, steps, size.overrides)
        callers, records = _callers(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    used = trained.cpu_s
    journaling = trained.flush_s + sum(callers.values())
    flushing = f"flush threads of {trained.journals} journals: compress, write, sync"
    rows: list[list[str | float | int | None]] = [
        ["all processes", used, 100.0],
        [flushing, trained.flush_s, 100 * trained.flush_s / used],
    ]
    rows += [[f"callers: {what}", seconds, 100 * seconds / used] for what, seconds in callers.items()]
    rows.append(["journaling together", journaling, 100 * journaling / used])
    title = f"{size.name}; {trained.steps} steps after the first ({trained.wall_s:.0f} s), {records:,} records."
    return Table(title, ["", "CPU seconds", "%"], rows), journaling / used


def run(quick: bool) -> Result:
    """Two trainings; the first step of each is its warm-up."""
    measured = [_measure(size, 3 if quick else size.steps) for size in SIZES[: 1 if quick else None]]
    share = measured[-1][1]
    return Result(
        name="cpu_share",
        title="The journal's share of a training",
        order=110,
        method=(
            "`examples/quickstart`, and the same with a larger model. CPU seconds of all processes of the run, Ray and "
            "TransferQueue included, and of the flush threads (the kernel's part included) are read from outside after "
            "the first step and at the end; those of the callers come from appending the whole run's records once "
            "more; payload records are built, summed and encoded on the flush threads."
        ),
        tables=[table for table, _ in measured],
        targets=[
            Target(
                "journaling's share of CPU time in training (14 M parameters)",
                "≤ 1 %",
                f"{100 * share:.2f} %",
                share <= 0.01,
            )
        ],
        limits=(
            "A flush costs a sync, however little is in it: the tiny example makes 50 a second and does next to "
            "nothing else. Beside a GPU the share of the machine's CPUs is another."
        ),
    )
