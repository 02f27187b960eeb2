"""The rollout trace: one JSON line per event, in the format of NeMo-RL's single controller; here it is written.

A projection of our own events (``TraceProjection``), usable live as well as over a finished journal: it says all that
the SQL tables are made of. ``t`` is Unix time in seconds; ``run`` is new for every incarnation; ``offset`` is that of
the event in the journal (docs/trace.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from . import events as ev
from .columns import snake
from .fold import fold_reader
from .state import DISPATCHED as RUNNING
from .state import TRAINED, State

if TYPE_CHECKING:
    from ..journal.reader import JournalReader

DISPATCHED: Final = "attempt_dispatched"
SEALED: Final = "attempt_sealed"
FAILED: Final = "attempt_failed"
ABANDONED: Final = "attempt_abandoned"
GROUP_SEALED: Final = "group_sealed"
SNAPSHOT: Final = "snapshot_published"
RESTORE: Final = "restore_started"


class _Told:
    """What later lines of a group need. ``running``: (sibling, attempt) that have not ended; ``gone``: given up."""

    __slots__ = ("gone", "prompt", "running", "sealed", "siblings")

    def __init__(self, prompt: str, siblings: int) -> None:
        self.prompt = prompt
        self.siblings = siblings
        self.sealed: set[int] = set()
        self.running: set[tuple[int, int]] = set()
        self.gone = False


_UNKNOWN: Final = _Told("", -1)


class TraceProjection:
    """Turns a run's events, fed in order, into trace lines. Remembers what is alive, never history.

    What it remembers follows from the folded state (``begin_at``), so that it may begin anywhere and says the same.
    """

    def __init__(self) -> None:
        self._run = ""
        self._anchor_us = 0
        self._groups: dict[int, _Told] = {}
        self._claimed: list[int] = []
        self._trained: dict[int, list[int]] = {}
        self._cuts: dict[int, float] = {}

    def feed(self, offset: int, event: ev.Event) -> list[dict[str, Any]]:
        """The lines of one event: none, one, or more (a batch's groups; a group's last seal)."""
        make = getattr(self, f"_on_{type(event).__name__}", None)
        if type(event) is ev.RunStarted:
            self._run = f"{event.run_id}-{event.incarnation}"
            self._anchor_us = event.wall_us - event.t
        # An event without lines of its own is a sign of life all the same: it bounds the moment of a death.
        lines: Iterable[dict[str, Any]] = make(event) if make is not None else ({"event": snake(type(event).__name__)},)
        head = {"t": self._unix(event.t), "run": self._run}
        return [head | line | {"offset": offset} for line in lines]

    def begin_at(self, state: State, time_of: Callable[[int], int | None] = lambda _: None) -> None:
        """Start in the middle of a run, from the state that all events before were folded to.

        ``time_of``: the time (µs of the run) of the event at an offset, None if it is gone. The prompts of given-up
        groups whose attempts still run (``state.zombies``) are in no state: their last lines will lack ``prompt_id``.
        """
        self._run = f"{state.run_id}-{state.incarnation}"
        self._anchor_us = state.anchor_wall_us - state.anchor_t
        for group in state.groups.values():
            told = self._groups[group.id] = _Told(str(group.prompt.index), len(group.siblings))
            if group.status != TRAINED:
                told.sealed = {i for i, s in enumerate(group.siblings) if s.receipt is not None}
            told.running = {(i, s.attempt) for i, s in enumerate(group.siblings) if s.status == RUNNING}
        self._claimed = list(state.open_groups)
        self._trained = {step: list(groups) for step, groups in state.applied.items()}
        for checkpoint in state.started.values():
            t = time_of(checkpoint.cut)
            if t is not None:
                self._cuts[checkpoint.id] = self._unix(t)

    def _unix(self, t: int) -> float:
        return round((self._anchor_us + t) / 1e6, 6)

    def _attempt(self, event: Any, name: str, **more: Any) -> dict[str, Any]:
        return {
            "event": name,
            "prompt_id": self._groups.get(event.group, _UNKNOWN).prompt,
            "generation_index": event.sibling,
            "attempt": event.attempt,
            "group_id": event.group,
        } | more

    def _group(self, event: Any, name: str, **more: Any) -> dict[str, Any]:
        prompt = self._groups.get(event.group, _UNKNOWN).prompt
        return {"event": name, "prompt_id": prompt, "group_id": event.group} | more

    def _ended(self, event: ev.AttemptSealed | ev.AttemptFailed | ev.AttemptAbandoned) -> None:
        told = self._groups.get(event.group)
        if told is not None:
            told.running.discard((event.sibling, event.attempt))
            if told.gone and not told.running:
                del self._groups[event.group]

    def _give_up(self, group: int) -> None:
        """Forget a group as soon as none of its attempts runs."""
        told = self._groups.get(group)
        if told is not None:
            told.gone = True
            if not told.running:
                del self._groups[group]

    def _on_RunStarted(self, event: ev.RunStarted) -> Iterator[dict[str, Any]]:  # noqa: N802 - named after the event
        yield {
            "event": "run_started",
            "incarnation": event.incarnation,
            "host": event.host,
            "pid": event.pid,
            "clock": event.t / 1e6,
            "settings": event.settings,
        }

    def _on_RunEnded(self, event: ev.RunEnded) -> Iterator[dict[str, Any]]:  # noqa: N802
        generated = [list(count) for count in event.generated]
        yield {"event": "run_ended", "reason": event.reason, "detail": event.detail, "generated": generated}

    def _on_BatchReserved(self, event: ev.BatchReserved) -> Iterator[dict[str, Any]]:  # noqa: N802
        for group, prompt in enumerate(event.prompts, event.first_group):
            self._groups[group] = _Told(str(prompt.index), event.generations)
            yield {
                "event": "group_reserved",
                "prompt_id": str(prompt.index),
                "group_id": group,
                "epoch": prompt.epoch,
                "generations": event.generations,
                "admission_id": event.admission_id,
                "kind": event.kind,
                "sample_id": prompt.sample_id,
                "task": prompt.task,
            }
        if event.pool_groups or not event.prompts:
            pool = list(event.pool_groups)
            yield {
                "event": "batch_reserved",
                "admission_id": event.admission_id,
                "generations": event.generations,
                "kind": event.kind,
                "pool_group_ids": pool,
            }

    def _on_BatchAdmitted(self, event: ev.BatchAdmitted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {
            "event": "batch_admitted",
            "admission_id": event.admission_id,
            "target_step": event.target_step,
            "dispatch_index": event.dispatch_index,
            "version": event.trainer_version,
        }

    def _on_AttemptDispatched(self, event: ev.AttemptDispatched) -> Iterator[dict[str, Any]]:  # noqa: N802
        if event.group in self._groups:
            self._groups[event.group].running.add((event.sibling, event.attempt))
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
            event,
            SEALED,
            tokens=receipt.tokens,
            prompt_tokens=receipt.prompt_tokens,
            truncated=receipt.truncated,
            reward=receipt.reward,
            weight_spans=spans,
            adopted=event.adopted,
        )
        told = self._groups.get(event.group)
        if told is not None:
            told.sealed.add(event.sibling)
            if len(told.sealed) == told.siblings:
                yield {"event": GROUP_SEALED, "prompt_id": told.prompt, "group_id": event.group}
            self._ended(event)

    def _on_AttemptFailed(self, event: ev.AttemptFailed) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._attempt(event, FAILED, kind=event.kind, cause=event.cause, tokens=event.tokens)
        self._ended(event)

    def _on_AttemptAbandoned(self, event: ev.AttemptAbandoned) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._attempt(event, ABANDONED, reason=event.reason, tokens=event.tokens, durable=event.durable)
        if event.group in self._groups:
            self._groups[event.group].sealed.discard(event.sibling)
        self._ended(event)

    def _on_PromptReplaced(self, event: ev.PromptReplaced) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._group(
            event,
            "prompt_replaced",
            reason=event.reason,
            target_step=event.target_step,
            spare=event.spare,
            spare_target=event.spare_target,
            version=event.trainer_version,
            borrowed=event.borrowed,
            borrowed_from=event.borrowed_from,
        )
        self._give_up(event.group)

    def _on_StepShortened(self, event: ev.StepShortened) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._group(event, "step_shortened", reason=event.reason, step=event.step, count=event.count)
        self._give_up(event.group)

    def _on_GroupDiscarded(self, event: ev.GroupDiscarded) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield from self._gone(event, "group_discarded", detail=event.detail)

    def _on_GroupEvicted(self, event: ev.GroupEvicted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield from self._gone(event, "group_evicted")

    def _gone(self, event: ev.GroupDiscarded | ev.GroupEvicted, name: str, **more: Any) -> Iterator[dict[str, Any]]:
        told = self._groups.get(event.group, _UNKNOWN)
        if event.requeued_as >= 0:
            self._groups[event.requeued_as] = _Told(told.prompt, told.siblings)
        yield self._group(event, name, reason=event.reason, requeued_as=event.requeued_as, **more)
        self._give_up(event.group)

    def _on_GroupCommitted(self, event: ev.GroupCommitted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._group(
            event,
            "group_committed",
            rows=event.rows,
            tokens=event.tokens,
            version_min=event.version_min,
            version_max=event.version_max,
        )

    def _on_StepClaimed(self, event: ev.StepClaimed) -> Iterator[dict[str, Any]]:  # noqa: N802
        self._claimed.extend(event.groups)
        prompts = [self._groups.get(group, _UNKNOWN).prompt for group in event.groups]
        yield {"event": "step_claimed", "step": event.step, "group_ids": list(event.groups), "prompt_ids": prompts}

    def _on_StepApplied(self, event: ev.StepApplied) -> Iterator[dict[str, Any]]:  # noqa: N802
        for group in self._claimed:
            if group in self._groups:
                self._groups[group].sealed = set()
        self._trained[event.step], self._claimed = self._claimed, []
        yield {
            "event": "step_applied",
            "step": event.step,
            "version": event.trainer_version,
            "tokens": event.tokens,
            "seconds": event.seconds,
            "loss": event.loss,
            "reward_mean": event.reward_mean,
            "generated": [list(count) for count in event.generated],
            "metrics": event.metrics,
        }

    def _on_WeightsSynced(self, event: ev.WeightsSynced) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "weights_synced", "branch": event.branch, "version": event.version, "seconds": event.seconds}

    def _on_CheckpointStarted(self, event: ev.CheckpointStarted) -> Iterator[dict[str, Any]]:  # noqa: N802
        self._cuts[event.checkpoint] = self._unix(event.t)
        yield self._checkpoint(event, "checkpoint_started", step=event.trainer_version)

    def _on_CheckpointFailed(self, event: ev.CheckpointFailed) -> Iterator[dict[str, Any]]:  # noqa: N802
        self._cuts.pop(event.checkpoint, None)
        more = {"reason": event.reason, "retryable": event.retryable, "seconds": event.seconds}
        yield self._checkpoint(event, "checkpoint_failed", **more)

    def _on_CheckpointSkipped(self, event: ev.CheckpointSkipped) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "checkpoint_skipped", "kind": event.kind, "reason": event.reason}

    def _checkpoint(self, event: Any, name: str, **more: Any) -> dict[str, Any]:
        return {"event": name, "checkpoint": event.checkpoint, "kind": event.kind} | more

    def _on_CheckpointCommitted(self, event: ev.CheckpointCommitted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield self._checkpoint(
            event,
            SNAPSHOT,
            step=event.trainer_version,
            cut_time=self._cuts.pop(event.checkpoint, None),
            path=event.name,
            seconds=event.seconds,
            floor=event.floor,
            bytes=event.bytes,
            rows=event.rows,
            rows_missing=event.rows_missing,
            clears_deferred=event.clears_deferred,
        )
        for step in [s for s in self._trained if s < event.floor]:  # no restore can return these groups
            for group in self._trained.pop(step):
                self._groups.pop(group, None)

    def _on_RestoreStarted(self, event: ev.RestoreStarted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {
            "event": RESTORE,
            "path": event.name,
            "checkpoint": event.checkpoint,
            "from_step": event.from_version,
            "to_step": event.to_version,
        }

    def _on_TrainerRolledBack(self, event: ev.TrainerRolledBack) -> Iterator[dict[str, Any]]:  # noqa: N802
        for group in event.groups:  # they come back complete
            told = self._groups.get(group)
            if told is not None:
                told.sealed = set(range(told.siblings))
        self._trained = {step: groups for step, groups in self._trained.items() if step < event.to_version}
        self._claimed = []
        self._cuts = {}
        yield {
            "event": "trainer_rolled_back",
            "from_step": event.from_version,
            "to_step": event.to_version,
            "branch": event.branch,
            "group_ids": list(event.groups),
        }

    def _on_RestoreCompleted(self, event: ev.RestoreCompleted) -> Iterator[dict[str, Any]]:  # noqa: N802
        self._cuts = {}
        yield {
            "event": "restore_completed",
            "seconds": event.seconds,
            "counters": event.counters,
            "timings": event.timings,
        }

    def _on_WorkerStarted(self, event: ev.WorkerStarted) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "worker_started", "worker": event.worker, "journal": event.journal, "host": event.host}

    def _on_WorkerStopped(self, event: ev.WorkerStopped) -> Iterator[dict[str, Any]]:  # noqa: N802
        yield {"event": "worker_stopped", "worker": event.worker, "reason": event.reason, "generated": event.generated}


def projection_at(reader: JournalReader[ev.Event], offset: int) -> TraceProjection:
    """A projection that has been fed everything before ``offset``: as far as the journal still has it.

    It begins at the newest image before which no given-up group had attempts running, so that none lacks its prompt.
    Raises what reading and folding raise.
    """
    projection = TraceProjection()
    start = image = reader.last_image(before=offset)
    while image is not None:
        state = fold_reader(reader, image)
        if not state.zombies or image <= reader.first_offset:
            projection.begin_at(state, lambda at: reader.get(at).t if at >= reader.first_offset else None)
            break
        start = image = reader.last_image(before=image - 1)
    for at, event in reader.events(reader.first_offset if start is None else start, offset):
        projection.feed(at, event)
    return projection


_encode_line = msgspec.json.Encoder().encode


def line_bytes(line: dict[str, Any]) -> bytes:
    """A line as it is written, newline included."""
    return _encode_line(line) + b"\n"
