"""The rollout trace: one JSON line per event, as written by NeMo-RL's single controller, read and written.

Reading is lenient: unknown events and fields stay queryable, missing ones are missing, a torn last line is told,
several runs may share a file, compressed files and lines out of order are fine. Writing is a projection of our own
events (``TraceProjection``), usable live as well as over a finished journal. ``t`` is Unix time in seconds; ``run`` is
new for every incarnation.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from typing import IO, Any, Final, NamedTuple, cast

import msgspec
import zstandard

from . import events as ev
from .columns import snake
from .state import State

DISPATCHED: Final = "attempt_dispatched"
SEALED: Final = "attempt_sealed"
FAILED: Final = "attempt_failed"
ABANDONED: Final = "attempt_abandoned"
GROUP_SEALED: Final = "group_sealed"
SNAPSHOT: Final = "snapshot_published"
RESTORE: Final = "restore_started"


class Line(NamedTuple):
    """A line as an object. ``number`` counts from 1. ``text`` is the line as it stood."""

    number: int
    fields: dict[str, Any]
    text: str


class TraceFile:
    """Lines of one file, ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``; then ``notes`` says what was left out."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Line]:
        self.notes = []
        bad: list[int] = []
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        last_bad = False
        number = 0
        try:
            with _open(self.path) as stream:
                for number, raw in enumerate(stream, 1):
                    text = raw.strip()
                    if not text:
                        continue
                    try:
                        fields = decode(text)
                    except msgspec.DecodeError:
                        bad.append(number)
                        last_bad = not raw.endswith(b"\n")
                        continue
                    yield Line(number, fields, text.decode("utf-8", "replace"))
        except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            self.notes.append(f"{self.path}: the compressed stream ends or breaks after line {number} ({error})")
        if last_bad:
            self.notes.append(f"{self.path}: the last line, {bad.pop()}, is torn and was left out")
        if bad:
            shown = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
            self.notes.append(f"{self.path}: {len(bad)} line(s) are no JSON objects and were left out: {shown}")
        if number == 0:
            self.notes.append(f"{self.path}: the trace is empty")


def _open(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    file = open(path, "rb")  # noqa: SIM115 - handed to the caller
    if path.endswith(".zst"):
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=True)
        return io.BufferedReader(reader)
    return file


# --- writing --------------------------------------------------------------------------------------------------------


class TraceProjection:
    """Turns a run's events, fed in order, into trace lines. Remembers what is alive, never history."""

    def __init__(self) -> None:
        self._run = ""
        self._anchor_us = 0
        self._prompts: dict[int, tuple[str, int]] = {}
        self._sealed: dict[int, set[int]] = {}
        self._cuts: dict[int, float] = {}

    def feed(self, event: ev.Event) -> list[dict[str, Any]]:
        """The lines of one event: none, one, or two (a group's last seal)."""
        make = getattr(self, f"_on_{type(event).__name__}", None)
        if type(event) is ev.RunStarted:
            self._run = f"{event.run_id}-{event.incarnation}"
            self._anchor_us = event.wall_us - event.t
        # An event without lines of its own is a sign of life all the same: it bounds the moment of a death.
        lines: Iterable[dict[str, Any]] = make(event) if make is not None else ({"event": snake(type(event).__name__)},)
        head = {"t": round((self._anchor_us + event.t) / 1e6, 6), "run": self._run}
        return [head | line for line in lines]

    def begin_at(self, state: State) -> None:
        """Start in the middle of a run, from a folded state (a pruned journal)."""
        self._run = f"{state.run_id}-{state.incarnation}"
        self._anchor_us = state.anchor_wall_us - state.anchor_t
        for group in state.groups.values():
            self._prompts[group.id] = (str(group.prompt.index), len(group.siblings))
            self._sealed[group.id] = {i for i, s in enumerate(group.siblings) if s.receipt is not None}

    def _attempt(self, event: Any, name: str, **more: Any) -> dict[str, Any]:
        prompt, _ = self._prompts.get(event.group, ("", 0))
        return {
            "event": name,
            "prompt_id": prompt,
            "generation_index": event.sibling,
            "attempt": event.attempt,
            "group_id": event.group,
        } | more

    def _on_RunStarted(self, event: ev.RunStarted) -> Iterator[dict[str, Any]]:  # noqa: N802 - named after the event
        yield {"event": "run_started", "incarnation": event.incarnation, "host": event.host}

    def _on_RunEnded(self, event: ev.RunEnded) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "run_ended", "reason": event.reason}

    def _on_BatchReserved(self, event: ev.BatchReserved) -> Iterator[dict[str, Any]]:  # noqa: N802
        for group, prompt in enumerate(event.prompts, event.first_group):
            self._prompts[group] = (str(prompt.index), event.generations)
            yield {
                "event": "group_reserved",
                "prompt_id": str(prompt.index),
                "group_id": group,
                "epoch": prompt.epoch,
                "generations": event.generations,
            }

    def _on_AttemptDispatched(self, event: ev.AttemptDispatched) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._attempt(
            event,
            DISPATCHED,
            worker=event.worker,
            branch=event.branch,
            version=event.version,
            prefix=event.prefix,
            prefix_from=event.prefix_from,
        )

    def _on_AttemptSealed(self, event: ev.AttemptSealed) -> Iterator[dict[str, Any]]:  # noqa: N802
        receipt = event.receipt
        spans = [list(span) for span in receipt.weight_spans]
        yield self._attempt(
            event, SEALED, tokens=receipt.tokens, reward=receipt.reward, weight_spans=spans, adopted=event.adopted
        )
        sealed = self._sealed.setdefault(event.group, set())
        sealed.add(event.sibling)
        prompt, siblings = self._prompts.get(event.group, ("", 0))
        if len(sealed) == siblings:
            yield {"event": GROUP_SEALED, "prompt_id": prompt, "group_id": event.group}

    def _on_AttemptFailed(self, event: ev.AttemptFailed) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._attempt(event, FAILED, kind=event.kind, cause=event.cause, tokens=event.tokens)

    def _on_AttemptAbandoned(self, event: ev.AttemptAbandoned) -> Iterator[dict[str, Any]]:  # noqa: N802
        self._sealed.get(event.group, set()).discard(event.sibling)
        yield self._attempt(event, ABANDONED, reason=event.reason, tokens=event.tokens, durable=event.durable)

    def _on_GroupDiscarded(self, event: ev.GroupDiscarded) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield from self._gone(event, "group_discarded")

    def _on_GroupEvicted(self, event: ev.GroupEvicted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield from self._gone(event, "group_evicted")

    def _gone(self, event: ev.GroupDiscarded | ev.GroupEvicted, name: str) -> Iterator[dict[str, Any]]:
        prompt, siblings = self._prompts.get(event.group, ("", 0))
        if event.requeued_as >= 0:
            self._prompts[event.requeued_as] = (prompt, siblings)
        self._sealed.pop(event.group, None)
        yield {"event": name, "prompt_id": prompt, "group_id": event.group, "reason": event.reason}

    def _on_StepClaimed(self, event: ev.StepClaimed) -> Iterator[dict[str, Any]]:  # noqa: N802
        prompts = [self._prompts.get(group, ("", 0))[0] for group in event.groups]
        yield {"event": "step_claimed", "step": event.step, "group_ids": list(event.groups), "prompt_ids": prompts}

    def _on_StepApplied(self, event: ev.StepApplied) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {
            "event": "step_applied",
            "step": event.step,
            "version": event.trainer_version,
            "tokens": event.tokens,
            "seconds": event.seconds,
        }

    def _on_WeightsSynced(self, event: ev.WeightsSynced) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "weights_synced", "branch": event.branch, "version": event.version, "seconds": event.seconds}

    def _on_RowsCleared(self, event: ev.RowsCleared) -> tuple[()]:  # noqa: N802
        # Rows go when a group can't come back by itself; a rollback that returns one names it again only by id.
        for group in event.groups:
            self._sealed.pop(group, None)
        return ()

    def _on_CheckpointStarted(self, event: ev.CheckpointStarted) -> tuple[()]:  # noqa: N802
        self._cuts[event.checkpoint] = round((self._anchor_us + event.t) / 1e6, 6)
        return ()

    def _on_CheckpointCommitted(self, event: ev.CheckpointCommitted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {
            "event": SNAPSHOT,
            "step": event.trainer_version,
            "cut_time": self._cuts.pop(event.checkpoint, None),
            "kind": event.kind,
            "seconds": event.seconds,
        }

    def _on_RestoreStarted(self, event: ev.RestoreStarted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": RESTORE, "path": event.name, "from_step": event.from_version, "to_step": event.to_version}

    def _on_TrainerRolledBack(self, event: ev.TrainerRolledBack) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "trainer_rolled_back", "from_step": event.from_version, "to_step": event.to_version}

    def _on_RestoreCompleted(self, event: ev.RestoreCompleted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "restore_completed", "seconds": event.seconds, "counters": event.counters}


_encode_line = msgspec.json.Encoder().encode


def line_bytes(line: dict[str, Any]) -> bytes:
    """A line as it is written, newline included."""
    return _encode_line(line) + b"\n"
