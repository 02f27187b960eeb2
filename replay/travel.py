"""Time travel: the offset that a moment or a restart means, and the difference between two of them."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..journal.errors import EXIT_USAGE, UnlostError
from .events import RunStarted
from .state import Group, GroupStatus, SiblingStatus, State

if TYPE_CHECKING:
    from ..journal.reader import JournalReader, SegmentInfo
    from .events import Event


class NoSuchMoment(UnlostError):
    """The journal holds no event there; the message says what it holds."""

    exit_code = EXIT_USAGE


def offset_at_time(reader: JournalReader[Event], moment: str) -> int:
    """Offset of the last event at or before ``moment``.

    ``moment``: seconds on the run's clock (``1234.5``), or a date and time (ISO 8601, local unless it says otherwise).
    Raises NoSuchMoment if the run began later or the text is neither.
    """
    first, end = reader.first_offset, reader.end_offset
    if first >= end:
        raise NoSuchMoment(f"{reader.directory}: the journal holds no events")
    try:
        wanted = round(float(moment) * 1e6)
    except (ValueError, OverflowError):  # also "nan" and "inf", which are numbers to Python
        wanted = _run_clock(reader, moment)
    if reader.get(first).t > wanted:
        raise NoSuchMoment(
            f"{reader.directory}: the first event is at {reader.get(first).t / 1e6:.6f} s, after {wanted / 1e6:.6f} s"
        )
    low, high = first, end - 1  # the run's clock never goes back, so halving finds it
    while low < high:
        middle = (low + high + 1) // 2
        if reader.get(middle).t <= wanted:
            low = middle
        else:
            high = middle - 1
    return low


def _run_clock(reader: JournalReader[Event], moment: str) -> int:
    try:
        wall_us = round(dt.datetime.fromisoformat(moment).timestamp() * 1e6)
    except (ValueError, OverflowError) as error:
        raise NoSuchMoment(
            f"{moment}: neither seconds on the run's clock (like 12.5) nor a date and time (like 2026-05-01T12:00:00)"
        ) from error
    anchor: RunStarted | None = None
    for _, event in _starts(reader):
        if anchor is not None and event.wall_us > wall_us:
            break
        anchor = event
    if anchor is None:
        raise NoSuchMoment(f"{reader.directory}: no RunStarted is kept, so no wall-clock time is known; use seconds")
    return wall_us - (anchor.wall_us - anchor.t)


def _starts(reader: JournalReader[Event]) -> list[tuple[int, RunStarted]]:
    """The RunStarted that begin segments: every incarnation's writer begins one."""
    firsts = [(segment.first_offset, reader.get(segment.first_offset)) for segment in _first_of_each(reader)]
    return [(offset, event) for offset, event in firsts if isinstance(event, RunStarted)]


def _first_of_each(reader: JournalReader[Event]) -> list[SegmentInfo]:
    found: list[SegmentInfo] = []
    for segment in reader.segments():
        if not found or found[-1].incarnation != segment.incarnation:
            found.append(segment)
    return found


def offset_before_incarnation(reader: JournalReader[Event], incarnation: int) -> int:
    """Offset of the last event before incarnation ``incarnation`` began. Raises NoSuchMoment."""
    starts = _starts(reader)
    if incarnation not in {event.incarnation for _, event in starts}:  # perhaps put together by other means
        starts = [(o, e) for o, e in reader.events(reader.first_offset) if isinstance(e, RunStarted)]
    for offset, event in starts:
        if event.incarnation == incarnation:
            if offset <= reader.first_offset:
                raise NoSuchMoment(f"{reader.directory}: nothing is kept from before incarnation {incarnation}")
            return offset - 1
    known = ", ".join(str(event.incarnation) for _, event in starts) or "none"
    raise NoSuchMoment(f"{reader.directory}: no incarnation {incarnation}; there are: {known}")


# --- difference -----------------------------------------------------------------------------------------------------


def difference(before: State, after: State) -> dict[str, Any]:
    """What changed from one state to the other, JSON-able; empty parts are left out.

    ``groups.moved`` lists groups whose status changed, ``gone`` those no longer alive with the status they had.
    Counters are differences.
    """
    fields = {
        "incarnation": (before.incarnation, after.incarnation),
        "trainer_version": (before.trainer_version, after.trainer_version),
        "branch": (before.branch, after.branch),
        "open_step": (before.open_step, after.open_step),
        "synced_version": (before.synced_version, after.synced_version),
        "epoch": (before.epoch, after.epoch),
        "position": (before.position, after.position),
        "dispatch_index": (before.dispatch_index, after.dispatch_index),
        "open_attempts": (before.open_attempts, after.open_attempts),
        "floor": (before.floor, after.floor),
        "ended": (before.ended, after.ended),
        "needs_restore": (before.needs_restore, after.needs_restore),
        "retired_trained": (before.retired_trained, after.retired_trained),
        "discarded": (before.discarded, after.discarded),
        "evicted": (before.evicted, after.evicted),
    }
    result: dict[str, Any] = {
        "from": {"offset": before.offset, "t_us": before.t},
        "to": {"offset": after.offset, "t_us": after.t},
        "changed": {name: {"from": a, "to": b} for name, (a, b) in fields.items() if a != b},
        "groups": _groups_difference(before, after),
    }
    counters = Counter(after.counters)
    counters.subtract(before.counters)
    result["counters"] = {name: count for name, count in sorted(counters.items()) if count}
    result["checkpoints"] = {
        "new": [c.id for c in after.checkpoints if c.id not in {b.id for b in before.checkpoints}],
        "gone": [c.id for c in before.checkpoints if c.id not in {b.id for b in after.checkpoints}],
    }
    result["workers"] = {
        "new": sorted(set(after.workers) - set(before.workers)),
        "gone": sorted(set(before.workers) - set(after.workers)),
        "died": sorted(w for w, info in before.workers.items() if info.alive and not _alive(after, w)),
    }
    return result


def _alive(state: State, worker: int) -> bool:
    return worker in state.workers and state.workers[worker].alive


def _status(group: Group) -> str:
    return GroupStatus(group.status).name.lower()


def _groups_difference(before: State, after: State) -> dict[str, Any]:
    """Groups by what happened to them."""
    both = sorted(set(before.groups) & set(after.groups))
    moved = [
        {"group": g, "from": _status(before.groups[g]), "to": _status(after.groups[g])}
        for g in both
        if before.groups[g].status != after.groups[g].status
    ]
    siblings = []
    for g in both:
        for index, (a, b) in enumerate(zip(before.groups[g].siblings, after.groups[g].siblings, strict=True)):
            if (a.status, a.attempt) != (b.status, b.attempt):
                siblings.append(
                    {
                        "group": g,
                        "sibling": index,
                        "from": SiblingStatus(a.status).name.lower(),
                        "to": SiblingStatus(b.status).name.lower(),
                        "attempts": b.attempt - a.attempt,
                    }
                )
    return {
        "new": [
            {"group": g, "status": _status(after.groups[g])} for g in sorted(set(after.groups) - set(before.groups))
        ],
        "gone": [
            {"group": g, "was": _status(before.groups[g])} for g in sorted(set(before.groups) - set(after.groups))
        ],
        "moved": moved,
        "siblings": siblings,
    }
