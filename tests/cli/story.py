"""A small run, told in events: two groups trained, two unfinished when the process is killed."""

from pathlib import Path

from unlost.journal import JournalWriter
from unlost.replay import events as ev

SIBLINGS = 2


def _prompts(first: int, count: int) -> tuple[ev.PromptRef, ...]:
    return tuple(ev.PromptRef(f"p{i}", 0, i, 1000 + i, "sums") for i in range(first, first + count))


def _receipt(group: int, sibling: int, version: int) -> ev.Receipt:
    return ev.Receipt(
        reward=0.5 * sibling,
        tokens=10 + group,
        version_min=version,
        version_max=version,
        journal="i00001-w00000",
        offset=10 * group + sibling,
        checksum=77,
        weight_spans=((0, 0, version),),
    )


def _dispatched(t: int, group: int, sibling: int, version: int) -> ev.AttemptDispatched:
    return ev.AttemptDispatched(t, group, sibling, 0, worker=0, branch=0, version=version)


def story() -> list[ev.Event]:
    """Offsets are the positions in the list."""
    told: list[ev.Event] = [
        ev.RunStarted(0, "story", 1, 1_700_000_000_000_000, "host", 123, {"dataset": "d"}, {"run.seed": 0}, {}),
        ev.WorkerStarted(1_000, 0, "i00001-w00000"),
        ev.BatchReserved(2_000, 0, 0, _prompts(0, 2), SIBLINGS, 0, 2),
        ev.BatchAdmitted(3_000, 0, 0, 0, 0),
    ]
    told += [_dispatched(4_000, g, s, 0) for g in (0, 1) for s in (0, 1)]
    told += [ev.AttemptSealed(5_000, g, s, 0, _receipt(g, s, 0)) for g in (0, 1) for s in (0, 1)]
    told += [ev.GroupCommitted(6_000, g, SIBLINGS, 2 * (10 + g), 0, 0) for g in (0, 1)]
    told += [
        ev.StepClaimed(7_000, 0, (0, 1)),
        ev.StepApplied(8_000, 0, 1, loss=0.1, reward_mean=0.25, tokens=42, seconds=0.5),
        ev.WeightsSynced(9_000, 0, 1, 0.01, 1),
        ev.BatchReserved(10_000, 1, 2, _prompts(2, 2), SIBLINGS, 0, 4),
        ev.BatchAdmitted(11_000, 1, 1, 1, 1),
        _dispatched(12_000, 2, 0, 1),
        _dispatched(12_100, 2, 1, 1),
        _dispatched(12_200, 3, 0, 1),
        ev.AttemptSealed(13_000, 2, 0, 0, _receipt(2, 0, 1)),
    ]
    return told


def write_run(folder: Path, events: list[ev.Event] | None = None) -> Path:
    """A run folder that holds ``events`` (default: the story), made durable and closed."""
    with JournalWriter.open(folder / "events", ev.EVENT_TYPES, journal_id="story") as writer:
        for event in story() if events is None else events:
            writer.append(event)
    with JournalWriter.open(
        folder / "payloads" / "i00001-w00000", (ev.ProgressRecord, ev.SealedRecord), journal_id="story-w0"
    ) as writer:
        writer.append(ev.ProgressRecord(1, ev.AttemptKey(1, 2, 1, 0), 0, 1, b"\0" * 4, b"\0" * 4, ((0, 0, 1),)))
    return folder
