"""A writer whose lock did not hold, and who has not noticed yet that a newer incarnation writes its journal."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Sequence

import pytest

from tests.journal.kinds import Note
from tests.journal.refusals import nothing_else_is_refused
from tests.journal.test_failures import DIRECTORY, numbers, open_writer
from tests.sim_storage import SimStorage
from unlost.journal import JournalFailed, JournalFenced, verify


@nothing_else_is_refused
@pytest.mark.parametrize(
    "failing", [("write",), ("write", "truncate"), ("sync",), ("sync", "truncate"), ("sync_directory",)]
)
@pytest.mark.parametrize("rotated", [False, True], ids=["first segment", "later segment"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_zombie_that_tries_again_leaves_the_newer_segment_alone(
    failing: tuple[str, ...], rotated: bool, stale: bool
) -> None:
    """Its first write of a segment failed; meanwhile a newer incarnation has a segment of that name.

    ``stale``: what it sees of LOCK is of before, as a shared file system may show it.
    """
    storage = SimStorage()
    storage.enforce_locks = False
    old = open_writer(storage, take_over=True, heartbeat_s=1e9)
    if stale:
        old._dir_lock.check = old._flusher._sink._still_owner = lambda: None
    kept = 0
    if rotated:
        old.append(Note(0))
        old.sync()
        old.rotate()
        kept = 1
    for op in failing:
        storage.fail(op, errno.EIO, name="" if op == "sync_directory" else ".zst", times=1 if op != "truncate" else 2)
    old.append(Note(100))
    old.pump()
    storage.faults.clear()
    new = open_writer(storage, take_over=True)
    begin = new.next_offset
    assert begin in (kept, kept + 1)  # what was written and not synced may have been found
    new.append(Note(begin))
    new.sync()
    old.append(Note(101))
    for _ in range(3):
        old.pump()
    new.append(Note(begin + 1))
    new.rotate()
    new.append(Note(begin + 2))
    new.sync()
    expected = [*range(kept), *([100] if begin > kept else []), *range(begin, begin + 3)]
    assert numbers(storage) == expected
    new.close()
    assert open_writer(storage, take_over=True).next_offset == begin + 3


@pytest.mark.parametrize(
    ("end", "gone"),
    [*itertools.product(["close", "abandon", "kill"], ["", "LOCK", "WATERMARK"]), ("drop", ""), ("drop", "LOCK")],
)
def test_every_opening_has_a_number_of_its_own(end: str, gone: str) -> None:
    """Also one that wrote no event, however it ended, and whichever of the two small files is lost (LOCK is not synced,
    so a power cut loses it, too)."""
    storage = SimStorage()
    for number in range(1, 4):
        writer = open_writer(storage)
        assert (writer.incarnation, writer.recovery.incarnation_before) == (number, number - 1)
        if end in ("close", "abandon"):
            getattr(writer, end)()
        elif end == "kill":
            storage.kill_process()
        else:
            storage.power_cut(random.Random(number), end)
        if gone in storage.list_names(DIRECTORY):
            storage.delete(f"{DIRECTORY}/{gone}")


@nothing_else_is_refused
@pytest.mark.parametrize("seeds", [range(150), [1186, 2554]], ids=["any", "found"])
def test_of_several_that_write_the_newest_is_the_journal(seeds: Sequence[int]) -> None:
    """Openings, appends and rotations of up to three living writers in any order, no heartbeat between them.

    The newest is never fenced, what it made durable is read, and nobody sees damage.
    """
    for seed in seeds:
        rng, storage = random.Random(seed), SimStorage()
        storage.enforce_locks = False
        options = {"take_over": True, "heartbeat_s": 1e9, "segment_bytes_max": rng.choice([400, 1 << 20])}
        writers = [open_writer(storage, **options)]
        for number in range(rng.randint(5, 40)):
            chance = rng.random()
            if chance < 0.15:
                writers.append(open_writer(storage, **options))
            else:
                writer = rng.choice([writers[-1], writers[-1], *writers[-3:]])
                try:
                    if chance < 0.25:
                        writer.rotate()
                    writer.append(Note(number))
                    writer.pump()
                except JournalFenced:
                    assert writer is not writers[-1], seed
        assert not writers[-1].metrics().failed, seed
        assert len({writer.incarnation for writer in writers}) == len(writers)
        assert len(numbers(storage)) >= writers[-1].durable_upto, seed
        assert verify(DIRECTORY, storage).state == "clean", seed
        assert open_writer(storage, **options).next_offset >= writers[-1].durable_upto, seed


@pytest.mark.parametrize("op", ["write", "sync"])
@pytest.mark.parametrize("heartbeat_s", [1e-9, 1e9])
def test_whose_storage_failed_looks_at_the_lock_before_it_writes_again(heartbeat_s: float, op: str) -> None:
    """Degraded for long, and taken over meanwhile: what it kept in memory is not written, nor said to be durable."""
    storage = SimStorage()
    storage.enforce_locks = False
    old = open_writer(storage, take_over=True, heartbeat_s=heartbeat_s, max_write_failures=1, on_failure="degrade")
    old.append(Note(0))
    old.sync()
    old.append(Note(100))
    storage.fail(op, errno.EIO, name=".zst")
    old.pump()
    assert old.metrics().degraded
    new = open_writer(storage, take_over=True)
    begin = new.next_offset
    new.append(Note(begin))
    new.sync()
    with pytest.raises(JournalFenced, match="taken over"):
        old.sync()
    assert old.durable_upto == 1
    assert numbers(storage)[-1] == begin


def test_a_lock_that_cannot_be_looked_at_is_one_more_failure() -> None:
    """Of the storage: tried again, and the run ends after so many of them."""
    storage = SimStorage()
    writer = open_writer(storage, max_write_failures=3)
    writer.append(Note(0))
    storage.fail("sync", errno.EIO, name=".zst")
    writer.pump()
    storage.fail("read", errno.EIO, name="LOCK", times=2)
    writer.pump()
    assert (writer.metrics().write_failures_in_a_row, writer.durable_upto) == (2, 0)
    writer.pump()
    with pytest.raises(JournalFailed, match="3 times in a row"):
        writer.append(Note(1))
    assert list(itertools.islice(numbers(storage), 1)) == []


@nothing_else_is_refused
def test_a_zombie_that_runs_ahead_counts_for_nothing() -> None:
    """A zombie's later segments and its WATERMARK beyond the newer incarnation's end are neither read nor damage.

    Its own look at LOCK is stale, as a shared file system may show it.
    """
    storage = SimStorage()
    storage.enforce_locks = False
    old = open_writer(storage, take_over=True, heartbeat_s=1e9)
    old._flusher._sink._still_owner = lambda: None
    old.append(Note(0))
    old.sync()
    new = open_writer(storage, take_over=True)
    new.append(Note(1))
    new.sync()
    for _ in range(5):
        old.append(Note(100))
        old.rotate()
        old.pump()
    assert old.durable_upto == 6
    assert numbers(storage) == [0, 1]
    report = verify(DIRECTORY, storage)
    assert (report.state, report.end_offset, report.watermark) == ("clean", 2, 1)
    assert sum(s.state == "ignored" for s in report.segments) == 4
    new.abandon()
    third = open_writer(storage, take_over=True)
    assert (third.next_offset, third.incarnation) == (2, 3)
