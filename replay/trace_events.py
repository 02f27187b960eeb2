"""A rollout trace as events, so that the same tables and questions serve traces and journals.

Rows of different runs match by prompt and generation index alone: attempts are numbered again here, and a group is a
prompt until it is sealed. An abandonment that names an attempt which had ended already is told twice and counts once.
One without ``prompt_id`` is matched by what it has; if several attempts fit and it can't matter which, they are all
taken, else none is, and the notes say so. What a trace does not know (tokens, say) is -1 in the events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from . import events as ev
from .columns import FRAMES, TRACE_LINES, EventColumns, TableFiles, table_columns
from .rules import GIVES_UP_SEALED
from .trace import ABANDONED, DISPATCHED, FAILED, GROUP_SEALED, RESTORE, SEALED, SNAPSHOT, Line, TraceFile

_LINES_AT_ONCE: Final = 4_000
UNKNOWN: Final = -1


class _Try:
    """An attempt as the trace tells of it. ``said``: its number in the trace."""

    __slots__ = ("attempt", "group", "open", "run", "said", "sealed", "sibling")

    def __init__(self, group: int, sibling: int, attempt: int, run: str, said: int) -> None:
        self.group = group
        self.sibling = sibling
        self.attempt = attempt
        self.run = run
        self.said = said
        self.open = True
        self.sealed = False


class TraceEvents:
    """Feeds on lines in order and makes events. ``notes`` afterwards."""

    def __init__(self, path: str) -> None:
        self.notes: list[str] = []
        self._path = path
        self._run = ""
        self._runs: dict[str, int] = {}
        self._t = 0
        self._groups: dict[str, int] = {}
        self._latest: dict[str, int] = {}  # also of groups that are sealed
        self._next_group = 0
        self._epochs: Counter[str] = Counter()
        self._tries: dict[tuple[int, int], list[_Try]] = {}
        self._sealed: dict[int, int] = {}
        self._checkpoints = 0
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._versions = (0, 0)
        self._count: Counter[str] = Counter()
        self.last_t: dict[int, int] = {}

    def feed(self, fields: dict[str, Any]) -> tuple[bool, list[ev.Event]]:
        """Whether the line was understood, and its events."""
        out: list[ev.Event] = []
        run = str(fields.get("run", ""))
        t = self._time(fields, run)
        if run != self._run or not self._runs:
            out += self._match_waiting()
            out += self._new_run(run, t, fields)
        self.last_t[self._runs[run]] = t
        name = str(fields.get("event", ""))
        if name != ABANDONED or "prompt_id" in fields:
            out += self._match_waiting()
        make = getattr(self, f"_on_{name}", None)
        if make is None:
            return False, out
        try:
            made = make(t, fields)
        except (KeyError, TypeError, ValueError):
            self._count["lacking"] += 1
            return False, out
        return True, out + list(made)

    def close(self) -> list[ev.Event]:
        """Events that waited for the end of the file; then ``notes`` is whole."""
        out = self._match_waiting()
        for what, text in _NOTES.items():
            if self._count[what]:
                self.notes.append(f"{self._path}: {self._count[what]} {text}")
        return out

    def _time(self, fields: dict[str, Any], run: str) -> int:
        value = fields.get("t")
        if not isinstance(value, int | float):
            self._count["timeless"] += 1
            return self._t
        t = round(value * 1e6)
        if run == self._run and t < self._t:
            self._count["backwards"] += 1
            return self._t
        self._t = t
        return t

    def _new_run(self, run: str, t: int, fields: dict[str, Any]) -> list[ev.Event]:
        self._run = run
        if run in self._runs:
            self._count["mixed"] += 1
            return []
        self._runs[run] = len(self._runs) + 1
        host = str(fields.get("host", ""))
        return [ev.RunStarted(t, run, self._runs[run], t, host, 0, {}, {}, {})]

    # --- groups and attempts -----------------------------------------------------------------------------------------

    def _on_attempt_dispatched(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        sibling = int(f["generation_index"])
        prompt = str(f["prompt_id"]) if "prompt_id" in f else self._prompt_of_next(sibling, f.get("attempt"))
        if prompt is None:
            self._count["promptless"] += 1
            return
        if prompt not in self._groups:
            yield from self._new_group(t, prompt)
        group = self._groups[prompt]
        tries = self._tries.setdefault((group, sibling), [])
        tried = _Try(group, sibling, len(tries), self._run, int(f.get("attempt", len(tries))))
        tries.append(tried)
        branch, version = f.get("branch", self._versions[0]), f.get("version", self._versions[1])
        yield ev.AttemptDispatched(
            t, group, sibling, tried.attempt, int(f.get("worker", UNKNOWN)), int(branch), int(version),
            int(f.get("prefix", 0)), int(f.get("prefix_from", UNKNOWN)),
        )  # fmt: skip

    def _prompt_of_next(self, sibling: int, said: Any) -> str | None:
        """Whose next attempt a dispatch without ``prompt_id`` is, if that is clear."""
        fitting = [
            prompt
            for prompt, group in self._groups.items()
            if (tries := self._tries.get((group, sibling)))
            and not tries[-1].open
            and (said is None or tries[-1].said + 1 == said)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _on_group_reserved(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        if str(f["prompt_id"]) not in self._groups:
            yield from self._new_group(t, str(f["prompt_id"]), int(f.get("generations", UNKNOWN)))

    def _new_group(self, t: int, prompt: str, generations: int = UNKNOWN) -> Iterator[ev.Event]:
        group = self._groups[prompt] = self._latest[prompt] = self._next_group
        self._next_group += 1
        index = int(prompt) if prompt.isdigit() else group
        reference = ev.PromptRef(prompt, self._epochs[prompt], index, 0)
        self._epochs[prompt] += 1
        yield ev.BatchReserved(t, group, group, (reference,), generations, 0, 0)
        yield ev.BatchAdmitted(t, group, UNKNOWN, group, self._versions[1])

    def _find(self, f: dict[str, Any]) -> _Try | None:
        """The attempt that a line with prompt and sibling names: its number in this run, else the last one."""
        group = self._latest.get(str(f["prompt_id"]))
        tries = self._tries.get((group, int(f["generation_index"])), []) if group is not None else []
        said = f.get("attempt")
        matching = [t for t in tries if said is None or t.said == said]
        return matching[-1] if matching else None

    def _end(self, f: dict[str, Any]) -> _Try | None:
        tried = self._find(f)
        if tried is None:
            self._count["unmatched"] += 1
            return None
        if not tried.open:
            self._count["twice"] += 1
            return None
        tried.open = False
        return tried

    def _on_attempt_sealed(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        tried = self._end(f)
        if tried is None:
            return
        tried.sealed = True
        tokens = int(f.get("tokens", UNKNOWN))
        spans = tuple((int(a), int(b), int(c)) for a, b, c in f.get("weight_spans", ()))
        versions = [version for _, _, version in spans] or [self._versions[1]]
        receipt = ev.Receipt(float(f.get("reward", 0.0)), tokens, min(versions), max(versions), "", 0, 0, spans)
        self._sealed[tried.group] = self._sealed.get(tried.group, 0) + 1
        adopted = bool(f.get("adopted", False))
        yield ev.AttemptSealed(t, tried.group, tried.sibling, tried.attempt, receipt, adopted)

    def _on_attempt_failed(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        tried = self._end(f)
        if tried is not None:
            kind = str(f.get("kind", ev.FAIL_INFRASTRUCTURE))
            yield ev.AttemptFailed(
                t,
                tried.group,
                tried.sibling,
                tried.attempt,
                kind,
                str(f.get("cause", "")),
                int(f.get("tokens", UNKNOWN)),
            )

    def _on_attempt_abandoned(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        if "prompt_id" not in f:
            self._waiting.append((t, f))
            return
        if f.get("reason") in GIVES_UP_SEALED:
            tried = self._find(f)
            if tried is not None and not tried.open and tried.sealed:
                tried.sealed = False
                self._groups[str(f["prompt_id"])] = tried.group  # unfinished again
                self._sealed[tried.group] -= 1
                yield self._abandoned(t, tried, f)
                return
        tried = self._end(f)
        if tried is not None:
            yield self._abandoned(t, tried, f)

    @staticmethod
    def _abandoned(t: int, tried: _Try, f: dict[str, Any]) -> ev.Event:
        return ev.AttemptAbandoned(
            t, tried.group, tried.sibling, tried.attempt, str(f.get("reason", "")), int(f.get("tokens", UNKNOWN)),
            int(f.get("durable", 0 if f.get("tokens") is None else UNKNOWN)),
        )  # fmt: skip

    def _match_waiting(self) -> list[ev.Event]:
        """Abandonments without a prompt: taken together, by sibling, attempt and reason."""
        out: list[ev.Event] = []
        waiting, self._waiting = self._waiting, []
        kinds: dict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]] = {}
        for t, f in waiting:
            kinds.setdefault((f.get("generation_index"), f.get("attempt"), f.get("reason")), []).append((t, f))
        for (sibling, said, reason), lines in kinds.items():
            fitting = [
                tries[-1]
                for (_, index), tries in self._tries.items()
                if (sibling is None or index == sibling)
                and tries[-1].open
                and (said is None or tries[-1].said == said)
                and ((tries[-1].run != self._run) == (reason == ev.ABANDON_RESTART))
            ]
            if len(fitting) > len(lines):
                self._count["ambiguous"] += len(lines)
                continue
            self._count["unmatched"] += len(lines) - len(fitting)
            for tried, (t, f) in zip(fitting, lines, strict=False):
                tried.open = False
                out.append(self._abandoned(t, tried, f))
        return out

    def _on_group_sealed(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        prompt = str(f["prompt_id"])
        group = self._groups.pop(prompt, None)  # dispatched again, it is another group
        if group is None:
            self._count["unmatched"] += 1
            return
        yield ev.GroupCommitted(t, group, self._sealed.get(group, 0), UNKNOWN, UNKNOWN, UNKNOWN)

    def _on_group_discarded(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        prompt = str(f["prompt_id"])
        self._groups.pop(prompt, None)
        yield ev.GroupDiscarded(t, self._latest[prompt], str(f.get("reason", "")))

    def _on_group_evicted(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        prompt = str(f["prompt_id"])
        self._groups.pop(prompt, None)
        yield ev.GroupEvicted(t, self._latest[prompt], str(f.get("reason", "")))

    # --- trainer, checkpoints, restores ------------------------------------------------------------------------------

    def _on_snapshot_published(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        number, version = self._checkpoints, int(f.get("step", UNKNOWN))
        self._checkpoints += 1
        cut = f.get("cut_time")
        cut_t = round(cut * 1e6) if isinstance(cut, int | float) else t
        kind = str(f.get("kind", ev.CHECKPOINT_ROLLOUT))
        yield ev.CheckpointStarted(cut_t, number, kind, version)
        seconds = float(f.get("seconds", (t - cut_t) / 1e6))
        yield ev.CheckpointCommitted(t, number, kind, version, UNKNOWN, str(f.get("path", "")), "", 0, seconds, 0)

    def _on_restore_started(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        versions = (int(f.get("from_step", UNKNOWN)), int(f.get("to_step", UNKNOWN)))
        yield ev.RestoreStarted(t, UNKNOWN, *versions, str(f.get("path", "")), 0)

    def _on_restore_completed(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        yield ev.RestoreCompleted(t, dict(f.get("counters", {})), float(f.get("seconds", 0.0)))

    def _on_trainer_rolled_back(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        self._versions = (self._versions[0] + 1, int(f["to_step"]))
        yield ev.TrainerRolledBack(t, int(f["from_step"]), int(f["to_step"]), self._versions[0], ())

    def _on_step_claimed(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        groups = [self._latest[prompt] for prompt in map(str, f.get("prompt_ids", ())) if prompt in self._latest]
        yield ev.StepClaimed(t, int(f["step"]), tuple(groups))

    def _on_step_applied(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        step = int(f["step"])
        version = int(f.get("version", step + 1))
        yield ev.StepApplied(t, step, version, 0.0, 0.0, int(f.get("tokens", 0)), float(f.get("seconds", 0.0)))

    def _on_weights_synced(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        self._versions = (int(f.get("branch", 0)), int(f["version"]))
        yield ev.WeightsSynced(t, *self._versions, float(f.get("seconds", 0.0)))

    def _on_run_started(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:  # noqa: ARG002
        yield from ()  # the first line of a run says as much

    def _on_run_ended(self, t: int, f: dict[str, Any]) -> Iterator[ev.Event]:
        yield ev.RunEnded(t, str(f.get("reason", "")))


_NOTES: Final = {
    "lacking": "line(s) lack a field that their event needs; they are in trace_lines only",
    "timeless": "line(s) have no time; they got that of the line before",
    "backwards": "line(s) went back in time within a run; they got the time of the line before",
    "promptless": "attempt_dispatched line(s) without prompt_id fit none or several; they are in trace_lines only",
    "mixed": "time(s) a run goes on after another one began: lines were sorted by run",
    "unmatched": "line(s) end an attempt or group whose start is not in the trace; they are in trace_lines only",
    "twice": "line(s) end an attempt that had ended before; each attempt is counted once",
    "ambiguous": "attempt_abandoned line(s) without prompt_id fit more attempts than there are lines; none was taken",
}


def load_trace(path: str, folder: Path, part: str) -> list[str]:
    """Turn a trace into Parquet files of the event tables and of ``trace_lines``. Returns notes."""
    file = TraceFile(path)
    files = TableFiles(folder, part, table_columns())
    columns = EventColumns(files)
    made = TraceEvents(path)
    encode = msgspec.msgpack.encode
    decode = msgspec.msgpack.decode
    offset = 0
    held: list[tuple[Any, ...]] = []
    for line in _in_order(file):
        understood, events = made.feed(line.fields)
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
        files.add(FRAMES, [[0], [0], [incarnation], [t * 1000], [t], [t], [0], ["trace"]])
    columns.flush()
    files.close()
    return file.notes + made.notes


def _in_order(file: TraceFile) -> Iterable[Line]:
    """Lines by run, runs by their first line's time; a file whose runs follow one another is never held in memory."""
    first: dict[str, float] = {}
    order: list[str] = []
    for line in file:
        run = str(line.fields.get("run", ""))
        if not order or order[-1] != run:
            order.append(run)
            t = line.fields.get("t")
            first.setdefault(run, t if isinstance(t, int | float) else 0.0)
    if len(order) == len(first) and [first[run] for run in order] == sorted(first.values()):
        return file
    file.notes.append(f"{file.path}: the lines of {len(first)} runs are mixed or out of order; they were sorted by run")
    return sorted(file, key=lambda line: (first[str(line.fields.get("run", ""))], str(line.fields.get("run", ""))))


def _row(line: Line, understood: bool) -> tuple[Any, ...]:
    f = line.fields
    t = f.get("t")
    sibling, attempt = f.get("generation_index"), f.get("attempt")
    return (
        line.number,
        float(t) if isinstance(t, int | float) else 0.0,
        str(f.get("run", "")),
        str(f.get("event", "")),
        str(f.get("prompt_id", "")),
        sibling if isinstance(sibling, int) else UNKNOWN,
        attempt if isinstance(attempt, int) else UNKNOWN,
        int(understood),
        line.text,
    )


__all__ = ["DISPATCHED", "FAILED", "GROUP_SEALED", "RESTORE", "SEALED", "SNAPSHOT", "TraceEvents", "load_trace"]
