"""Kill the real trainer at named moments, each proven from what is durable afterwards, never from a sleep.

The harness starts ``unlost train`` as a user would, watches the journal from outside, and sends SIGKILL to the whole
process tree when the journal shows the moment. What was written in between may have moved on: so the moment counts
only if the dead run's files show it. If not, the run is resumed and the harness tries again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from unlost.journal import JournalReader
from unlost.journal.errors import JournalMissing
from unlost.replay import events as ev
from unlost.replay.fold import fold_run
from unlost.replay.payloads import PayloadStore
from unlost.replay.plan import attempts_to_look_for
from unlost.replay.state import State

POLL_S = 0.002
RUN_LIMIT_S = 240.0


class Watch:
    """Follows the event journal of a run that another process writes."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.next = 0
        self.reader: JournalReader[Any] | None = None
        self.incarnation = 0
        self.open_attempts: set[tuple[int, int, int]] = set()
        self.sealed: dict[int, int] = {}
        self.generations = 0
        self.committed: set[int] = set()
        self.claim_open = False
        self.checkpoint_open = False
        self.restoring = False
        self.sealed_here = 0

    def poll(self) -> None:
        """Take in what is new."""
        try:
            if self.reader is None:
                self.reader = JournalReader(self.run / "events", ev.EVENT_TYPES)
            else:
                self.reader.refresh()
            for offset, event in self.reader.events(start=self.next):
                self.next = offset + 1
                self._note(event)
        except (JournalMissing, FileNotFoundError):
            self.reader = None

    def _note(self, e: Any) -> None:
        match e:
            case ev.RunStarted():
                self.incarnation, self.restoring, self.sealed_here = e.incarnation, False, 0
                self.checkpoint_open = self.claim_open = False
            case ev.BatchReserved():
                self.generations = e.generations
            case ev.AttemptDispatched():
                self.open_attempts.add((e.group, e.sibling, e.attempt))
            case ev.AttemptSealed():
                self.open_attempts.discard((e.group, e.sibling, e.attempt))
                self.sealed[e.group] = self.sealed.get(e.group, 0) + 1
                self.sealed_here += 1
            case ev.AttemptAbandoned() | ev.AttemptFailed():
                self.open_attempts.discard((e.group, e.sibling, e.attempt))
            case ev.GroupCommitted():
                self.committed.add(e.group)
            case ev.StepClaimed():
                self.claim_open = True
            case ev.StepApplied():
                self.claim_open = False
            case ev.CheckpointStarted():
                self.checkpoint_open = True
            case ev.CheckpointCommitted() | ev.CheckpointFailed():
                self.checkpoint_open = False
            case ev.RestoreStarted():
                self.restoring = True
            case ev.RestoreCompleted():
                self.restoring = False

    @property
    def complete_uncommitted(self) -> bool:
        """Some group has all its siblings sealed and its rows on the way."""
        return any(n == self.generations and g not in self.committed for g, n in self.sealed.items())


@dataclass(frozen=True)
class Moment:
    """``due``: the journal, seen live, says now. ``proven``: the dead run's files say that it was."""

    name: str
    due: Callable[[Watch], bool]
    proven: Callable[[Path, State], bool]


def _generating(run: Path, state: State) -> bool:
    """Attempts were open, and a payload journal holds tokens of one that was not finished."""
    wanted = {k: j for k, j in attempts_to_look_for(state).items() if j}
    tails = PayloadStore(run / "payloads").sealed_tails(wanted)
    return state.open_attempts > 0 and any(t.prefix_tokens and t.sealed is None for t in tails.attempts.values())


def _checkpointing(run: Path, state: State) -> bool:
    """A start without an end, and its temporary folder."""
    left = list((run / "checkpoints").glob("tmp_*"))
    return bool(state.started) and bool(left)


MOMENTS = (
    Moment("generation", lambda w: len(w.open_attempts) > 2 and w.sealed_here > 2, _generating),
    Moment("data plane put", lambda w: w.sealed_here > 0 and w.complete_uncommitted, lambda r, s: bool(s.complete)),
    Moment("checkpoint", lambda w: w.checkpoint_open, _checkpointing),
    Moment("between claim and apply", lambda w: w.claim_open, lambda r, s: s.open_step >= 0),
    Moment("restore", lambda w: w.restoring, lambda r, s: s.restoring is not None),
)


@dataclass
class Life:
    """One incarnation as seen from outside."""

    process: subprocess.Popen[bytes]
    watch: Watch
    began: float = field(default_factory=time.monotonic)


class Driver:
    """Runs ``unlost train CONFIG`` again and again."""

    def __init__(self, config: Path, run: Path, overrides: tuple[str, ...] = ()) -> None:
        self.config = config
        self.run = run
        self.overrides = overrides
        self.watch = Watch(run)
        self.kills: list[str] = []
        self.missed = 0

    def start(self) -> subprocess.Popen[bytes]:
        """The command in a session of its own, output to a file beside the run."""
        command = [sys.executable, "-m", "unlost.cli", "train", str(self.config)]
        for override in self.overrides:
            command += ["-o", override]
        with (self.run.parent / "train.out").open("ab") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def kill_at(self, moment: Moment, tries: int = 12) -> State:
        """Start (or resume) and kill at ``moment`` until the files prove it. Returns the state at death."""
        for _ in range(tries):
            process = self.start()
            with reaped(process):
                if not self._until(process, moment.due):
                    raise AssertionError(f"the run ended before the moment {moment.name!r}; see {self.output()}")
                kill_tree(process)
            state = fold_run(self.run)
            self.watch.poll()
            if moment.proven(self.run, state):
                self.kills.append(moment.name)
                return state
            self.missed += 1
        raise AssertionError(f"moment {moment.name!r} was not caught in {tries} tries")

    def finish(self) -> int:
        """Resume and run to the end; the exit code."""
        process = self.start()
        with reaped(process):
            return process.wait(RUN_LIMIT_S)

    def output(self) -> str:
        """The tail of what the command printed."""
        return (self.run.parent / "train.out").read_text(errors="replace")[-3000:]

    def _until(self, process: subprocess.Popen[bytes], due: Callable[[Watch], bool]) -> bool:
        incarnation = self.watch.incarnation
        limit = time.monotonic() + RUN_LIMIT_S
        while time.monotonic() < limit:
            self.watch.poll()
            if self.watch.incarnation > incarnation and due(self.watch):
                return True
            if process.poll() is not None:
                return False
            time.sleep(POLL_S)
        raise AssertionError(f"nothing in {RUN_LIMIT_S} s; see {self.output()}")


def tree_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and all that descend from it."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the whole tree: stopped first, so that nobody in it sees another die and reacts."""
    tree = tree_of(process)
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for victim in tree:
            try:
                victim.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
    process.wait(30)
    psutil.wait_procs(tree, timeout=30)


class reaped:  # noqa: N801 - reads as a statement
    """Leaves no process behind, whatever happens in the block."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            kill_tree(self.process)


def trained_prompts(run: Path) -> dict[int, int]:
    """Group -> how often it is trained in the history that counts: steps undone by a rollback are taken out."""
    steps: dict[int, tuple[int, ...]] = {}
    open_groups: list[int] = []
    reader: JournalReader[Any] = JournalReader(run / "events", ev.EVENT_TYPES)
    for _, e in reader.events(start=reader.first_offset):
        match e:
            case ev.StepClaimed():
                open_groups += e.groups
            case ev.StepApplied():
                steps[e.step], open_groups = tuple(open_groups), []
            case ev.TrainerRolledBack():
                steps = {s: g for s, g in steps.items() if s < e.to_version}
                open_groups = []
    counts: dict[int, int] = {}
    for groups in steps.values():
        for g in groups:
            counts[g] = counts.get(g, 0) + 1
    return counts


def sealed_twice(run: Path) -> list[tuple[int, int]]:
    """Siblings with two durable seals whose first was not given up in between: each would break P2."""
    held: set[tuple[int, int]] = set()
    twice: list[tuple[int, int]] = []
    reader: JournalReader[Any] = JournalReader(run / "events", ev.EVENT_TYPES)
    for _, e in reader.events(start=reader.first_offset):
        if isinstance(e, ev.AttemptSealed):
            if (e.group, e.sibling) in held:
                twice.append((e.group, e.sibling))
            held.add((e.group, e.sibling))
        elif isinstance(e, ev.AttemptDispatched) and (e.group, e.sibling) in held:
            twice.append((e.group, e.sibling))
    return twice
