"""A rollout trace as events, so that the same tables and questions serve traces and journals.

An abandonment that names an attempt which had ended already is told twice and counts once. A line that lacks what its
event needs changes nothing; it stays in ``trace_lines``, and the notes say so. What a trace does not know (tokens, say)
is -1 in the events.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from . import events as ev
from .columns import FRAMES, TRACE_LINES, EventColumns, TableFiles, table_columns
from .rules import GIVES_UP_SEALED
from .trace import ABANDONED
from .trace_matching import UNKNOWN, Loose, Matching, Try, Where, prompt_index
from .trace_reading import COUNT_MAX, Fields, Lacking, Line, TraceFile
from .trace_runs import RUN_STARTED, Opening, Runs

_LINES_AT_ONCE: Final = 4_000
_EXAMPLES: Final = 5
Made = list[ev.Event]


class TraceEvents:
    """Feeds on lines in order and makes events. ``notes`` afterwards. ``contiguous``: of each run, in one piece."""

    def __init__(self, path: str, *, contiguous: bool = True) -> None:
        self.notes: list[str] = []
        self._path = path
        self._count: Counter[str] = Counter()
        self._runs = Runs(self._count, contiguous=contiguous)
        self._match = Matching(self._count)
        self._lacking: list[str] = []
        self._started: set[int] = set()
        self._waiting: list[Loose] = []
        self._branch = 0
        self._versions = (0, 0)

    @property
    def last_t(self) -> dict[int, int]:
        """The time of each opening's last line, understood or not; µs."""
        return self._runs.last_t

    def feed(self, line: Line, run: str) -> tuple[bool, Made]:
        """Whether the line of that run was understood, and its events."""
        f = Fields(line.fields)
        name = line.fields.get("event")
        name = name if isinstance(name, str) else ""
        out: Made = []
        if self._runs.is_new(run):
            out += self._match_waiting()
            out += self._runs.begin(run, f, started=name == RUN_STARTED)
        if _is_ours(name, line.fields):
            self._runs.is_ours()
        t = self._runs.time(f)
        if name != ABANDONED or "prompt_id" in f:  # such ones in a row are taken together
            out += self._match_waiting()
        make = _HANDLERS.get(name)
        if make is None and self._runs.own and not line.fields.keys() <= _NAME_ALONE:
            make = _OWN_HANDLERS.get(name)
        if make is None:
            return False, out
        try:
            return True, out + make(self, t, f)
        except Lacking as error:
            self._count["lacking"] += 1
            if len(self._lacking) < _EXAMPLES:
                self._lacking.append(f"line {line.number}: {name}: {error}")
            return False, out

    def close(self) -> Made:
        """Events that waited for the end of the file; then ``notes`` is whole."""
        out = self._match_waiting()
        for what, text in _NOTES.items():
            if self._count[what]:
                self.notes.append(f"{self._path}: {self._count[what]} {text}")
        if self._lacking:
            more = "; …" if self._count["lacking"] > len(self._lacking) else ""
            self.notes[-1] += f": {'; '.join(self._lacking)}{more}"
        return out

    def _run_started(self, t: int, f: Fields) -> Made:  # noqa: ARG002
        Opening(f)  # the first line of a run says as much
        return []

    def _run_ended(self, t: int, f: Fields) -> Made:
        generated = f.tuples("generated", 2, COUNT_MAX)
        return [ev.RunEnded(t, f.text("reason"), f.text("detail"), tuple((a, b) for a, b in generated))]

    # --- groups ------------------------------------------------------------------------------------------------------

    def _group(self, told: int) -> int:
        """Our number of a journal's group."""
        return self._match.number("group", self._runs.journal, told)

    def _where(self, f: Fields) -> Where:
        if self._runs.own:
            return Where(self._group(f.integer("group_id", least=0)), f.prompt() or "")
        prompt = f.prompt()
        if prompt is None:
            raise Lacking("no prompt_id")
        return Where(None, prompt)

    def _group_reserved(self, t: int, f: Fields) -> Made:
        where, generations = self._where(f), f.integer("generations", UNKNOWN)
        if where.group is None:
            known = self._match.unsealed(where.prompt) is not None
            return [] if known else self._match.begin(t, where, generations, self._versions[1])[1]
        group = where.group
        told = f.integer("admission_id", least=0) if "admission_id" in f else None
        index = prompt_index(where.prompt, group)
        prompt = ev.PromptRef(f.text("sample_id", where.prompt), f.integer("epoch", 0), index, 0, f.text("task"))
        kind = f.text("kind", ev.KIND_ORDINARY)
        if self._match.knows(group):
            self._count["again"] += 1
            return []
        if told is None:  # an early release, which told nothing of admissions
            return self._match.begin(t, where, generations, self._versions[1])[1]
        self._match.add(group)
        admission = self._match.number("admission", self._runs.journal, told)
        return [ev.BatchReserved(t, admission, group, (prompt,), generations, prompt.epoch, 0, kind)]

    def _batch_reserved(self, t: int, f: Fields) -> Made:
        admission = self._match.number("admission", self._runs.journal, f.integer("admission_id", least=0))
        pool = tuple(map(self._group, f.integers("pool_group_ids")))
        kind, generations = f.text("kind", ev.KIND_POOL), f.integer("generations", UNKNOWN)
        return [ev.BatchReserved(t, admission, UNKNOWN, (), generations, 0, 0, kind, pool)]

    def _batch_admitted(self, t: int, f: Fields) -> Made:
        told, version = f.integer("admission_id", least=0), f.integer("version", UNKNOWN)
        target, index = f.integer("target_step", UNKNOWN), f.integer("dispatch_index", UNKNOWN)
        return [ev.BatchAdmitted(t, self._match.number("admission", self._runs.journal, told), target, index, version)]

    def _prompt_replaced(self, t: int, f: Fields) -> Made:
        where, reason, version = self._where(f), f.text("reason"), f.integer("version", UNKNOWN)
        target, spare = f.integer("target_step", UNKNOWN), f.integer("spare", least=0)
        spare_target, borrowed = f.integer("spare_target", UNKNOWN), f.integer("borrowed", UNKNOWN)
        borrowed_from = f.integer("borrowed_from", UNKNOWN)
        group = self._match.group_of(where)
        if group is None:
            return []
        borrowed = self._group(borrowed) if borrowed >= 0 else UNKNOWN
        spare = self._group(spare)
        return [ev.PromptReplaced(t, group, reason, target, spare, spare_target, version, borrowed, borrowed_from)]

    def _step_shortened(self, t: int, f: Fields) -> Made:
        where, reason = self._where(f), f.text("reason")
        step, count = f.integer("step"), f.integer("count", 1)
        group = self._match.group_of(where)
        return [] if group is None else [ev.StepShortened(t, group, reason, step, count)]

    def _group_sealed(self, t: int, f: Fields) -> Made:
        where = self._where(f)
        if where.group is not None:  # the journal tells when it was committed
            return []
        sealed = self._match.seal(where.prompt)
        return [] if sealed is None else [ev.GroupCommitted(t, *sealed, UNKNOWN, UNKNOWN, UNKNOWN)]

    def _group_committed(self, t: int, f: Fields) -> Made:
        where, rows, tokens = self._where(f), f.integer("rows", UNKNOWN), f.integer("tokens", UNKNOWN)
        versions = f.integer("version_min", UNKNOWN), f.integer("version_max", UNKNOWN)
        group = self._match.group_of(where)
        return [] if group is None else [ev.GroupCommitted(t, group, rows, tokens, *versions)]

    def _gone(self, f: Fields) -> tuple[int | None, str, int]:
        """The group that a line gives up, the reason, and the group that its prompt lives on as."""
        where, reason, again = self._where(f), f.text("reason"), f.integer("requeued_as", UNKNOWN)
        group = self._match.group_of(where)
        if where.group is None:
            self._match.give_up(where.prompt)
            return group, reason, UNKNOWN
        if group is not None and again >= 0:
            again = self._group(again)
            self._match.add(again)
        return group, reason, again

    def _group_discarded(self, t: int, f: Fields) -> Made:
        detail = f.text("detail")
        group, reason, again = self._gone(f)
        return [] if group is None else [ev.GroupDiscarded(t, group, reason, detail, again)]

    def _group_evicted(self, t: int, f: Fields) -> Made:
        group, reason, again = self._gone(f)
        return [] if group is None else [ev.GroupEvicted(t, group, reason, again)]

    # --- attempts ----------------------------------------------------------------------------------------------------

    def _named(self, f: Fields) -> tuple[Where, int, int | None]:
        """Group, sibling and attempt. Runs that unlost wrote name all three."""
        where, sibling = self._where(f), f.integer("generation_index", least=0)
        if where.group is None and "attempt" not in f:
            return where, sibling, None
        return where, sibling, f.integer("attempt", least=0)

    def _attempt_dispatched(self, t: int, f: Fields) -> Made:
        own = self._runs.own
        sibling = f.integer("generation_index", least=0)
        said = f.integer("attempt", least=0) if own or "attempt" in f else None
        branch, version = f.integer("branch", self._versions[0]), f.integer("version", self._versions[1])
        worker, prefix, source = f.integer("worker", UNKNOWN), f.integer("prefix", 0), f.integer("prefix_from", UNKNOWN)
        if own or "prompt_id" in f:
            where = self._where(f)
        else:
            prompt = self._match.prompt_of_next(sibling, said)
            if prompt is None:
                return []
            where = Where(None, prompt)
        group = self._match.unsealed(where.prompt) if where.group is None else where.group
        made: Made = []
        if group is None or not self._match.knows(group):
            group, made = self._match.begin(t, where, version=self._versions[1])
        tried = self._match.dispatch(group, sibling, said, self._runs.run, own=own)
        if tried is None:
            return []
        return [*made, ev.AttemptDispatched(t, group, sibling, tried.attempt, worker, branch, version, prefix, source)]

    def _attempt_sealed(self, t: int, f: Fields) -> Made:
        named, tokens = self._named(f), f.integer("tokens", UNKNOWN)
        spans = tuple((a, b, c) for a, b, c in f.tuples("weight_spans", 3))
        versions = [version for _, _, version in spans] or [self._versions[1]]
        reward = f.number("reward", math.nan if f.null("reward") else 0.0)
        more = f.flag("truncated"), f.integer("prompt_tokens", 0)
        receipt = ev.Receipt(reward, tokens, min(versions), max(versions), "", 0, 0, spans, *more)
        adopted = f.flag("adopted")
        tried = self._match.end(*named, sealed=True)
        return [] if tried is None else [ev.AttemptSealed(t, *_key(tried), receipt, adopted)]

    def _attempt_failed(self, t: int, f: Fields) -> Made:
        named, kind, cause = self._named(f), f.text("kind", ev.FAIL_INFRASTRUCTURE), f.text("cause")
        tokens = f.integer("tokens", UNKNOWN)
        tried = self._match.end(*named)
        return [] if tried is None else [ev.AttemptFailed(t, *_key(tried), kind, cause, tokens)]

    def _attempt_abandoned(self, t: int, f: Fields) -> Made:
        reason, tokens = f.text("reason"), f.integer("tokens", UNKNOWN)
        durable = f.integer("durable", UNKNOWN if "tokens" in f else 0)
        if not self._runs.own and f.prompt() is None:
            sibling = f.integer("generation_index", least=0) if "generation_index" in f else None
            said = f.integer("attempt", least=0) if "attempt" in f else None
            self._waiting.append(Loose(t, sibling, said, reason, tokens, durable))
            return []
        named = self._named(f)
        tried = self._match.unseal(*named) if reason in GIVES_UP_SEALED else None
        tried = tried or self._match.end(*named)
        return [] if tried is None else [ev.AttemptAbandoned(t, *_key(tried), reason, tokens, durable)]

    def _match_waiting(self) -> Made:
        """Abandonments without a prompt, as soon as another line follows."""
        if not self._waiting:
            return []
        matched = self._match.match_loose(self._waiting, self._runs.run)
        self._waiting = []
        return [ev.AttemptAbandoned(w.t, *_key(tried), w.reason, w.tokens, w.durable) for tried, w in matched]

    # --- trainer, checkpoints, restores, workers ---------------------------------------------------------------------

    def _step_claimed(self, t: int, f: Fields) -> Made:
        step, told, prompts = f.integer("step"), f.integers("group_ids"), f.texts("prompt_ids")
        if self._runs.own:
            groups = [self._group(group) for group in told]
        else:
            groups = [group for prompt in prompts if (group := self._match.latest(prompt)) is not None]
        return [ev.StepClaimed(t, step, tuple(groups))]

    def _step_applied(self, t: int, f: Fields) -> Made:
        step = f.integer("step")
        version, tokens = f.integer("version", step + 1), f.integer("tokens", 0)
        loss = f.number("loss", math.nan if f.null("loss") else 0.0)
        reward = f.number("reward_mean", math.nan if f.null("reward_mean") else 0.0)
        generated = tuple((a, b) for a, b in f.tuples("generated", 2, COUNT_MAX))
        seconds, metrics = f.number("seconds", 0.0), f.numbers("metrics")
        return [ev.StepApplied(t, step, version, loss, reward, tokens, seconds, generated, metrics)]

    def _weights_synced(self, t: int, f: Fields) -> Made:
        versions, seconds = (f.integer("branch", 0), f.integer("version")), f.number("seconds", 0.0)
        self._versions = versions
        self._branch = max(self._branch, versions[0])
        return [ev.WeightsSynced(t, *versions, seconds)]

    def _trainer_rolled_back(self, t: int, f: Fields) -> Made:
        steps, groups = (f.integer("from_step"), f.integer("to_step")), f.integers("group_ids")
        branch = f.integer("branch", self._branch + 1, least=0)
        self._branch = max(self._branch, branch)
        self._versions = (branch, steps[1])
        own = self._runs.own
        return [ev.TrainerRolledBack(t, *steps, branch, tuple(map(self._group, groups)) if own else ())]

    def _checkpoint(self, f: Fields) -> int | None:
        """Our number of a journal's checkpoint; None if the line tells none."""
        told = f.integer("checkpoint", least=0) if "checkpoint" in f else None
        own = self._runs.own
        return self._match.number("checkpoint", self._runs.journal, told) if told is not None and own else None

    def _checkpoint_started(self, t: int, f: Fields) -> Made:
        kind, step = f.text("kind", ev.CHECKPOINT_ROLLOUT), f.integer("step", UNKNOWN)
        number = self._checkpoint(f)
        if number is None:
            raise Lacking("no checkpoint")
        self._started.add(number)
        return [ev.CheckpointStarted(t, number, kind, step)]

    def _snapshot_published(self, t: int, f: Fields) -> Made:
        version, kind, path = f.integer("step", UNKNOWN), f.text("kind", ev.CHECKPOINT_ROLLOUT), f.text("path")
        cut = f.seconds("cut_time")
        cut = t if cut is None else cut + self._runs.shift
        seconds, floor = f.number("seconds", (t - cut) / 1e6), f.integer("floor", 0)
        size, rows = f.integer("bytes", 0, most=COUNT_MAX), f.integer("rows", 0)
        more = f.integer("rows_missing", 0), f.integer("clears_deferred", 0)
        number = self._checkpoint(f)
        if number is None:
            number = self._match.another("checkpoint")
        begun: Made = [] if number in self._started else [ev.CheckpointStarted(cut, number, kind, version)]
        self._started.discard(number)
        return [
            *begun,
            ev.CheckpointCommitted(t, number, kind, version, UNKNOWN, path, "", size, seconds, floor, rows, *more),
        ]

    def _checkpoint_failed(self, t: int, f: Fields) -> Made:
        kind, reason, retryable = f.text("kind", ev.CHECKPOINT_ROLLOUT), f.text("reason"), f.flag("retryable")
        seconds = f.number("seconds", 0.0)
        number = self._checkpoint(f)
        if number is None:
            raise Lacking("no checkpoint")
        return [ev.CheckpointFailed(t, number, kind, reason, retryable, seconds)]

    def _checkpoint_skipped(self, t: int, f: Fields) -> Made:
        return [ev.CheckpointSkipped(t, f.text("kind", ev.CHECKPOINT_ROLLOUT), f.text("reason"))]

    def _restore_started(self, t: int, f: Fields) -> Made:
        steps, path = (f.integer("from_step", UNKNOWN), f.integer("to_step", UNKNOWN)), f.text("path")
        told = f.integer("checkpoint", UNKNOWN)
        number = self._checkpoint(f) if told >= 0 else None
        return [ev.RestoreStarted(t, UNKNOWN if number is None else number, *steps, path, 0)]

    def _restore_completed(self, t: int, f: Fields) -> Made:
        return [ev.RestoreCompleted(t, f.counts("counters"), f.number("seconds", 0.0), f.numbers("timings"))]

    def _worker_started(self, t: int, f: Fields) -> Made:
        return [ev.WorkerStarted(t, f.integer("worker", least=0), f.text("journal"), f.text("host"))]

    def _worker_stopped(self, t: int, f: Fields) -> Made:
        generated = f.integer("generated", UNKNOWN, most=COUNT_MAX)
        return [ev.WorkerStopped(t, f.integer("worker", least=0), f.text("reason"), generated)]


def _is_ours(name: str, fields: dict[str, Any]) -> bool:
    """Whether only unlost writes such a line: an event's offset, and with it what nobody else has, or a group's number.

    Some of others' lines may have an ``offset`` of another kind.
    """
    told = (
        isinstance(fields.get("group_id"), int) or name in _OWN_HANDLERS or (name == RUN_STARTED and "clock" in fields)
    )
    return told and isinstance(fields.get("offset"), int)


def _key(tried: Try) -> tuple[int, int, int]:
    return tried.group, tried.sibling, tried.attempt


_OWN_NAMES: Final = (
    "batch_reserved", "batch_admitted", "group_committed", "prompt_replaced", "step_shortened", "checkpoint_started",
    "checkpoint_failed", "checkpoint_skipped", "worker_started", "worker_stopped",
)  # fmt: skip
_NAMES: Final = (
    RUN_STARTED, "run_ended", "group_reserved", "group_sealed", "group_discarded", "group_evicted",
    "attempt_dispatched", "attempt_sealed", "attempt_failed", ABANDONED, "step_claimed", "step_applied",
    "weights_synced", "trainer_rolled_back", "snapshot_published", "restore_started", "restore_completed",
)  # fmt: skip
_NAME_ALONE: Final = {"t", "run", "event", "offset"}
"""All that an early release told of some events."""
_HANDLERS: Final = {name: getattr(TraceEvents, f"_{name}") for name in _NAMES}
_OWN_HANDLERS: Final = {name: getattr(TraceEvents, f"_{name}") for name in _OWN_NAMES}
"""Of lines that only unlost writes so."""

_NOTES: Final = {
    "timeless": "line(s) have no time; they got that of the line before",
    "backwards": "line(s) went back in time within a run; they got the time of the line before",
    "stepped": "run(s) begin before the end of the run before them in the file: their times were moved on to its end",
    "promptless": "attempt_dispatched line(s) without prompt_id fit none or several; they are in trace_lines only",
    "mixed": "time(s) a run goes on after another one began: lines were sorted by run",
    "unmatched": "line(s) end an attempt or group whose start is not in the trace; they are in trace_lines only",
    "twice": "line(s) end an attempt that had ended before; each attempt is counted once",
    "again": "line(s) tell again of a group or attempt that has begun; each is counted once",
    "ambiguous": "attempt_abandoned line(s) without prompt_id fit more attempts than there are lines; none was taken",
    "lacking": "line(s) lack what their event needs; they are in trace_lines only",
}


def load_trace(path: str, folder: Path, part: str) -> list[str]:
    """Turn a trace into Parquet files of the event tables and of ``trace_lines``. Returns notes."""
    file = TraceFile(path)
    files = TableFiles(folder, part, table_columns())
    columns = EventColumns(files)
    first = _first_times(file)
    made = TraceEvents(path, contiguous=first is None)
    lines: Iterable[tuple[str, Line]] = _with_runs(file)
    notes: list[str] = []
    if first is not None:
        notes = [f"{path}: the lines of {len(first)} runs are mixed; they were sorted by run"]
        lines = sorted(lines, key=lambda line: (first.get(line[0], math.inf), line[0]))
    encode = msgspec.msgpack.encode
    decode = msgspec.msgpack.decode
    offset = 0
    held: list[tuple[Any, ...]] = []
    for run, line in lines:
        understood, events = made.feed(line, run)
        if events:
            columns.add(offset, [decode(encode(event)) for event in events])
            offset += len(events)
        held.append(_row(line, understood))
        if len(held) == _LINES_AT_ONCE:
            files.add(TRACE_LINES, list(zip(*held, strict=True)))
            held = []
    events = made.close()
    columns.add(offset, [decode(encode(event)) for event in events])
    if held:
        files.add(TRACE_LINES, list(zip(*held, strict=True)))
    for incarnation, t in made.last_t.items():  # the last line counts, whether it was understood or not
        files.add(FRAMES, [[0], [0], [incarnation], [0], [t], [t], [0], ["trace"]])
    columns.flush()
    files.close()
    return file.notes + notes + made.notes


def _with_runs(file: TraceFile) -> Iterator[tuple[str, Line]]:
    """Lines with their runs; one that names none is of the run before it."""
    run = ""
    for line in file:
        told = line.fields.get("run")
        if isinstance(told, str | int) and not isinstance(told, bool):
            run = str(told)
        yield run, line


def _first_times(file: TraceFile) -> dict[str, float] | None:
    """The times of the runs' first lines; None if the runs follow one another, so that they need not be sorted."""
    first: dict[str, float] = {}
    last, contiguous = "", True
    for run, line in _with_runs(file):
        if run not in first:
            t = Fields(line.fields).seconds("t")
            first[run] = 0 if t is None else t
        elif run != last:
            contiguous = False
        last = run
    return None if contiguous else first


def _row(line: Line, understood: bool) -> tuple[Any, ...]:
    f = line.fields
    t = f.get("t")
    return (
        line.number,
        float(t) if isinstance(t, int | float) else 0.0,
        str(f.get("run", "")),
        str(f.get("event", "")),
        str(f.get("prompt_id", "")),
        _whole(f.get("generation_index")),
        _whole(f.get("attempt")),
        int(understood),
        line.text,
    )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) <= COUNT_MAX else UNKNOWN


__all__ = ["TraceEvents", "load_trace"]
