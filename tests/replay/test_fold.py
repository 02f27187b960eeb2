"""The fold: P1 at every offset, images that continue exactly, refusals that change nothing."""

from __future__ import annotations

import msgspec
import pytest

from tests.replay.walk import Walk
from unlost.replay import events as ev
from unlost.replay.fold import FoldError, fold_events
from unlost.replay.state import POOL, State
from unlost.replay.summary import prompt_sets
from unlost.replay.transitions import TRANSITIONS, IllegalTransition, apply


def walked(seed: int, steps: int = 400) -> Walk:
    walk = Walk(seed)
    for i in range(steps):
        walk.step()
        if i % 97 == 96:
            walk.crash_and_restore()
    return walk


@pytest.mark.parametrize("seed", range(12))
def test_every_prompt_is_in_exactly_one_set_after_every_event(seed: int) -> None:
    """P1 at every offset, against books kept from the events alone."""
    walk = Walk(seed)
    for i in range(400):
        walk.step()
        if i % 97 == 96:
            walk.crash_and_restore()
        sets = prompt_sets(walk.state)
        assert sets["holds"]
        for name in ("claimed", "complete", "unfinished", "spare"):
            assert sets[name] == sorted(g for g, fate in walk.fates.items() if fate == name), name
        for name in ("discarded", "evicted"):
            assert sets[name] == sum(fate == name for fate in walk.fates.values())
        pool = sorted(g.id for g in walk.state.groups.values() if g.status == POOL)
        assert sorted([*walk.state.spares, *walk.state.requeued]) == pool, "nobody would take them out again"
        trained = {g for g, fate in walk.fates.items() if fate == "trained"}
        assert set(sets["trained"]) <= trained
        assert len(trained) == len(sets["trained"]) + sets["trained_retired"]


def test_the_walk_reaches_every_kind_of_event() -> None:
    """The property above says something only if each event kind occurs and is refused somewhere."""
    seen: set[type] = set()
    refused = 0
    for seed in range(12):
        walk = walked(seed)
        seen |= {type(e) for e in walk.events}
        refused += walk.refused
    rare = {
        ev.DataPlaneRestarted,
        ev.StateImage,
        ev.RunEnded,
        ev.WeightsSynced,
        ev.CheckpointFailed,
        ev.CheckpointSkipped,
        ev.WorkerStopped,
    }
    assert set(TRANSITIONS) - rare <= seen
    assert refused > 500


@pytest.mark.parametrize("seed", range(4))
def test_an_image_taken_at_any_offset_goes_on_to_the_same_state(seed: int) -> None:
    """Folding from an image equals folding from the beginning, bit for bit."""
    walk = walked(seed)
    whole = fold_events(enumerate(walk.events))
    assert whole.image() == walk.state.image()
    state = State()
    for offset, event in enumerate(walk.events):
        if offset % 23 == 0:
            again = State.from_image(state.image(), offset)
            rest = fold_events(list(enumerate(walk.events))[offset:], again)
            assert rest.image() == whole.image()
        apply(state, offset, event)


def test_a_journaled_image_begins_a_fold_and_says_nothing_new_in_the_middle() -> None:
    """StateImage is both: a place to begin, and no change when what precedes it was folded."""
    walk = Walk(3)
    for _ in range(200):
        walk.step()
    at = len(walk.events)
    assert walk.try_event(ev.StateImage(walk.t, msgspec.Raw(walk.state.image())))
    for _ in range(200):
        walk.step()
    from_image = fold_events(list(enumerate(walk.events))[at:])
    through = fold_events(enumerate(walk.events))
    assert from_image.image() == through.image() == walk.state.image()
    assert from_image.offset == len(walk.events)


def test_derived_indexes_equal_a_rebuild_after_every_event() -> None:
    """The buckets that samplers read are exactly what the groups say."""
    names = ("unfinished", "complete", "committed", "committed_by_target", "committed_by_weight")
    counts = ("pending_by_weight", "stamped", "open_attempts")
    walk = Walk(5)
    for i in range(500):
        walk.step()
        if i % 120 == 119:
            walk.crash_and_restore()
        fresh = State.from_image(walk.state.image(), walk.state.offset)
        for name in names:
            mine, theirs = getattr(walk.state, name), getattr(fresh, name)
            assert {k: set(v) if isinstance(v, dict) else v for k, v in mine.items()} == {
                k: set(v) if isinstance(v, dict) else v for k, v in theirs.items()
            }, name
        for name in counts:
            assert getattr(walk.state, name) == getattr(fresh, name), name


def test_a_fold_names_the_offset_of_an_event_that_is_not_allowed() -> None:
    """A journal that makes no sense is refused at the place, not folded to something."""
    walk = walked(1, 50)
    events = list(enumerate(walk.events))
    bad = ev.StepApplied(0, 99, 100)
    with pytest.raises(FoldError, match=f"offset {len(events)}: StepApplied refused"):
        fold_events([*events, (len(events), bad)])


def test_dispatch_waits_for_the_end_of_the_restore() -> None:
    """No dispatch and no claim before RestoreCompleted."""
    walk = walked(2, 90)
    state = walk.state
    apply(state, state.offset, ev.RunStarted(0, "run", state.incarnation + 1, 0, "h", 1, {}, {}, {}))
    group = next(g for g in state.groups.values() if g.status == 2)
    sibling = next(i for i, s in enumerate(group.siblings) if s.status == 0)
    with pytest.raises(IllegalTransition, match="restore is not completed"):
        apply(
            state,
            state.offset,
            ev.AttemptDispatched(0, group.id, sibling, group.siblings[sibling].attempt + 1, 0, 0, 0),
        )


def test_a_stamped_batch_meets_no_groups_of_its_step() -> None:
    """A stale cursor is an error that names both, never a silent drop."""
    walk = Walk(0)
    walk.random.seed(0)
    s = walk.state
    refs = tuple(ev.PromptRef(str(i), 0, i, 1) for i in range(3))
    for admission in range(2):
        first = admission * 3
        assert walk.try_event(ev.BatchReserved(0, admission, first, refs, 2, 0, first + 3))
    assert walk.try_event(ev.BatchAdmitted(0, 0, 5, 5, 5))
    with pytest.raises(
        IllegalTransition, match=r"target step 5 already holds 3 group\(s\): the cursor is behind the buffer"
    ):
        apply(s, s.offset, ev.BatchAdmitted(0, 1, 5, 6, 5))


def test_a_rollback_lowers_scheduling_weights_and_keeps_the_origin() -> None:
    """Protocol rule 18: what newer weights generated is scheduled as if by the version gone back to."""
    walk = Walk(0)
    s = walk.state
    refs = (ev.PromptRef("0", 0, 0, 1),)
    apply_all = [
        ev.BatchReserved(0, 0, 0, refs, 1, 0, 1),
        ev.BatchAdmitted(0, 0, -1, 0, 0),
        ev.AttemptDispatched(0, 0, 0, 0, 10, 0, 0),
        ev.AttemptSealed(0, 0, 0, 0, ev.Receipt(1.0, 4, 0, 0, "w", 0, 1, ((0, 0, 0),))),
        ev.GroupCommitted(0, 0, 1, 4, 0, 0),
        ev.StepClaimed(0, 0, (0,)),
        ev.StepApplied(0, 0, 1),
        ev.BatchReserved(0, 1, 1, refs, 1, 0, 2),
        ev.BatchAdmitted(0, 1, -1, 1, 1),
        ev.AttemptDispatched(0, 1, 0, 0, 10, 0, 1),
        ev.AttemptSealed(0, 1, 0, 0, ev.Receipt(1.0, 4, 1, 1, "w", 0, 1, ((0, 0, 1),))),
        ev.RunStarted(0, "run", 2, 0, "h", 1, {}, {}, {}),
        ev.RestoreStarted(0, -1, 1, 0),
        ev.TrainerRolledBack(0, 1, 0, 1, (0,)),
        ev.GroupCommitted(0, 1, 1, 4, 1, 1),
        ev.RestoreCompleted(0, {}, 0.0),
    ]
    for event in apply_all:
        apply(s, s.offset, event)
    assert {g: s.groups[g].start_weight for g in s.groups} == {0: 0, 1: 0}
    assert s.groups[1].version_max == 1
    sibling = s.groups[1].siblings[0]
    assert (sibling.branch, sibling.version) == (0, 1)
    assert sibling.receipt is not None
    assert sibling.receipt.version_max == 1
    assert (s.branch, s.trainer_version) == (1, 0)
