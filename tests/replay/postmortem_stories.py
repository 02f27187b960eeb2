"""Small runs told by hand, for questions whose answers are computed by hand; the fold checks that each is legal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unlost.journal import JournalWriter
from unlost.replay import events as ev
from unlost.replay.fold import fold_events


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def write(folder: Path, told: Sequence[ev.Event], *, legal: bool = True, clock: Any = None) -> Path:
    if legal:
        fold_events(enumerate(told))
    with JournalWriter.open(folder / "events", ev.EVENT_TYPES, journal_id="told", clock=clock) as writer:
        for event in told:
            writer.append(event)
    return folder


def started(t: float, incarnation: int, **settings: Any) -> ev.RunStarted:
    return ev.RunStarted(us(t), "told", incarnation, us(1000 + t), "host", 1, {}, settings, {})


def reserved(t: float, admission: int, first: int, count: int, siblings: int, *, index: int | None = None) -> ev.Event:
    base = first if index is None else index
    prompts = tuple(ev.PromptRef(f"p{base + i}", 0, base + i, 9, "sums" if i % 2 else "words") for i in range(count))
    return ev.BatchReserved(us(t), admission, first, prompts, siblings, 0, first + count)


def admitted(t: float, admission: int, target: int = -1, version: int = 0) -> ev.Event:
    return ev.BatchAdmitted(us(t), admission, target, admission, version)


def dispatched(t: float, group: int, sibling: int, attempt: int = 0, worker: int = 0, **more: Any) -> ev.Event:
    return ev.AttemptDispatched(
        us(t), group, sibling, attempt, worker, more.get("branch", 0), more.get("version", 0), more.get("prefix", 0)
    )


def sealed(t: float, group: int, sibling: int, attempt: int = 0, tokens: int = 10, **more: Any) -> ev.Event:
    spans = more.get("spans", ((0, 0, 0),))
    versions = [version for _, _, version in spans]
    receipt = ev.Receipt(more.get("reward", 0.5), tokens, min(versions), max(versions), "j", 0, 1, spans)
    return ev.AttemptSealed(us(t), group, sibling, attempt, receipt, more.get("adopted", False))


def abandoned(
    t: float, group: int, sibling: int, reason: str, attempt: int = 0, tokens: int = 0, durable: int = 0
) -> ev.Event:
    return ev.AttemptAbandoned(us(t), group, sibling, attempt, reason, tokens, durable)


def committed(t: float, group: int, rows: int = 2, tokens: int = 20) -> ev.Event:
    return ev.GroupCommitted(us(t), group, rows, tokens, 0, 0)


def counters(complete: int, unfinished: int, reused: int, rerun: int) -> dict[str, int]:
    return {
        "groups_complete_restored": complete,
        "groups_unfinished_found": unfinished,
        "siblings_reused": reused,
        "siblings_rerun": rerun,
    }


def trace_example() -> list[ev.Event]:
    """Prompt 7, siblings 0 and 2: cut at 40, dead at 52, the next process at 60. 28 s before the cut, 12 s after it.

    Sibling 1 was cut short at 30 by new weights and not tried again: it must count once, and not for the restart.
    """
    return [
        started(0, 1),
        ev.WorkerStarted(us(1), 0, "w0"),
        reserved(2, 0, 0, 1, 3, index=7),
        admitted(3, 0),
        dispatched(12, 0, 2),
        dispatched(13, 0, 0),
        dispatched(14, 0, 1),
        sealed(25, 0, 0, tokens=11),
        abandoned(30, 0, 1, ev.ABANDON_WEIGHT_SYNC),
        ev.CheckpointStarted(us(40), 0, ev.CHECKPOINT_ROLLOUT, 0),
        ev.CheckpointCommitted(us(43), 0, ev.CHECKPOINT_ROLLOUT, 0, 9, "rollout_0", "d", 100, 3.0, 0),
        ev.CheckpointSkipped(us(52), ev.CHECKPOINT_ROLLOUT, "no change"),
        started(60, 2),
        ev.RestoreStarted(us(60), -1, 0, 0, "rollout_0", us(52)),
        ev.WorkerStarted(us(60), 1, "w1"),
        abandoned(60, 0, 2, ev.ABANDON_RESTART),
        ev.RestoreCompleted(us(62), counters(0, 1, 1, 2), 2.0),
        dispatched(63, 0, 2, 1, worker=1),
        dispatched(64, 0, 1, 1, worker=1),
        sealed(80, 0, 1, 1, tokens=5),
        sealed(90, 0, 2, 1, tokens=7),
        committed(90, 0, 3, 23),
    ]  # fmt: skip


TRACE_FILE = """\
{"t":12,"run":"a1","event":"attempt_dispatched","prompt_id":"7","generation_index":2,"attempt":0}
{"t":13,"run":"a1","event":"attempt_dispatched","prompt_id":"7","generation_index":0,"attempt":0}
{"t":14,"run":"a1","event":"attempt_dispatched","prompt_id":"7","generation_index":1,"attempt":0}
{"t":25,"run":"a1","event":"attempt_sealed","prompt_id":"7","generation_index":0}
{"t":30,"run":"a1","event":"attempt_abandoned","prompt_id":"7","generation_index":1,"attempt":0,"reason":"weight_sync"}
{"t":43,"run":"a1","event":"snapshot_published","step":4,"cut_time":40}
{"t":52,"run":"a1","event":"something_new","anything":{"goes":[1,2]}}
{"t":60,"run":"b2","event":"restore_started","path":"x/snapshot_000004"}
{"t":60,"run":"b2","event":"attempt_abandoned","generation_index":2,"attempt":0,"reason":"restart"}
{"t":60,"run":"b2","event":"attempt_abandoned","prompt_id":"7","generation_index":1,"attempt":0,"reason":"restart"}
{"t":63,"run":"b2","event":"attempt_dispatched","generation_index":2,"attempt":1}
{"t":64,"run":"b2","event":"attempt_dispatched","prompt_id":"7","generation_index":1,"attempt":1}
{"t":80,"run":"b2","event":"attempt_sealed","prompt_id":"7","generation_index":1,"attempt":1}
{"t":90,"run":"b2","event":"attempt_sealed","prompt_id":"7","generation_index":2,"attempt":1}
{"t":90,"run":"b2","event":"group_sealed","prompt_id":"7"}
"""


def counters_example() -> list[ev.Event]:
    """7 complete groups, 5 with 14 of 20 siblings sealed, 3 never dispatched: 7, 8, 14 and 18."""
    told: list[ev.Event] = [started(0, 1), ev.WorkerStarted(us(1), 0, "w0"), reserved(2, 0, 0, 15, 4), admitted(3, 0)]
    t = 4.0
    for group in range(12):
        have = 4 if group < 7 else (3, 3, 3, 3, 2)[group - 7]
        for sibling in range(4):
            told.append(dispatched(t, group, sibling))
            t += 0.01
        for sibling in range(have):
            told.append(sealed(t, group, sibling))
            t += 0.01
        if have == 4:
            told.append(committed(t, group, 4, 40))
    told += [started(60, 2), ev.RestoreStarted(us(60), -1, 0, 0), ev.WorkerStarted(us(61), 1, "w1")]
    told += [
        abandoned(61, group, sibling, ev.ABANDON_RESTART)
        for group in range(7, 12)
        for sibling in range((3, 3, 3, 3, 2)[group - 7], 4)
    ]
    counters = {
        "groups_complete_restored": 7,
        "groups_unfinished_found": 8,
        "siblings_reused": 14,
        "siblings_rerun": 18,
    }
    return [*told, ev.RestoreCompleted(us(62), counters, 2.0)]


def everything() -> list[ev.Event]:
    """Three groups of two siblings: one trained, undone and trained again, one evicted, one failed and dropped.

    Kill between 20 (last event) and 30; version 1 undone (14 s of training); prefixes of 64 tokens reused once.
    """
    return [
        started(0, 1, **{"journal.progress_interval_tokens": 32}),
        ev.WorkerStarted(us(0), 0, "w0"),
        ev.WorkerStarted(us(0), 1, "w1"),
        reserved(1, 0, 0, 3, 2),
        admitted(1, 0),
        dispatched(2, 0, 0),
        dispatched(2, 0, 1, worker=1),
        dispatched(3, 1, 0),
        dispatched(3, 1, 1, worker=1),
        sealed(4, 0, 0, tokens=20, reward=1.0),
        sealed(6, 0, 1, tokens=40, reward=0.0),  # t 4 s
        committed(6, 0, 2, 60),
        ev.StepClaimed(us(6), 0, (0,)),
        dispatched(7, 2, 0),
        ev.AttemptFailed(us(9), 2, 0, 0, ev.FAIL_INFRASTRUCTURE, "out of memory", 6),
        dispatched(10, 2, 0, 1),
        ev.StepApplied(us(20), 0, 1, 0.5, 0.5, 60, 14.0, ((0, 130), (1, 100))),
        # killed between 20 and 30: 1.0, 1.1 and 2.0 ran
        started(30, 2, **{"journal.progress_interval_tokens": 32}),
        ev.RestoreStarted(us(30), -1, 1, 0, "", us(20)),
        ev.WorkerStarted(us(31), 2, "w2"),
        ev.TrainerRolledBack(us(31), 1, 0, 1, (0,)),
        sealed(32, 1, 0, tokens=90, adopted=True),
        abandoned(32, 1, 1, ev.ABANDON_RESTART, 0, 64, 64),
        abandoned(32, 2, 0, ev.ABANDON_RESTART, 1),
        ev.WeightsSynced(us(33), 1, 0, 0.5, 1),
        ev.RestoreCompleted(us(34), counters(1, 2, 1, 3), 4.0),
        dispatched(35, 1, 1, 1, worker=2, branch=1, prefix=64),
        dispatched(35, 2, 0, 2, worker=2, branch=1),
        sealed(40, 1, 1, 1, tokens=100, spans=((0, 0, 0), (64, 1, 0))),
        committed(40, 1, 2, 190),
        ev.AttemptFailed(us(41), 2, 0, 2, ev.FAIL_DATA, "bad prompt", 5),
        ev.GroupDiscarded(us(42), 2, ev.DISCARD_DROPPED, "gave up"),
        ev.StepClaimed(us(43), 0, (0,)),
        ev.StepApplied(us(53), 0, 1, 0.4, 0.5, 60, 10.0, ((2, 41),)),
        ev.WeightsSynced(us(54), 1, 1, 0.25, 1),
        ev.GroupEvicted(us(55), 1, ev.ABANDON_STALE),
        ev.WorkerStopped(us(56), 2, "stopped", 41),
        ev.RunEnded(us(56), "finished", "", ((2, 41),)),
    ]  # fmt: skip
