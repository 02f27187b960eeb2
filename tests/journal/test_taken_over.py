"""A writer whose lock did not hold, and who has not noticed yet that a newer incarnation writes its journal."""

from __future__ import annotations

import errno

import pytest

from tests.journal.kinds import Note
from tests.journal.refusals import nothing_else_is_refused
from tests.journal.test_failures import numbers, open_writer
from tests.sim_storage import SimStorage


@nothing_else_is_refused
@pytest.mark.parametrize(
    "failing", [("write",), ("write", "truncate"), ("sync",), ("sync", "truncate"), ("sync_directory",)]
)
@pytest.mark.parametrize("rotated", [False, True], ids=["first segment", "later segment"])
def test_a_zombie_that_tries_again_leaves_the_newer_segment_alone(failing: tuple[str, ...], rotated: bool) -> None:
    """Its first write of a segment failed; meanwhile a newer incarnation has a segment of that name."""
    storage = SimStorage()
    storage.enforce_locks = False
    old = open_writer(storage, take_over=True, heartbeat_s=1e9)
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
