"""Which checkpoints a restore may use: what it is told of them, and what they say of themselves."""

from __future__ import annotations

import msgspec
import pytest

from unlost.engine.checkpoints import MANIFEST_FORMAT, Manifest, check_manifest, manifest_bytes
from unlost.engine.protocols import CheckpointDamaged
from unlost.replay import events as ev
from unlost.replay.plan import candidates
from unlost.replay.state import Checkpoint, State

OURS = Checkpoint(4, ev.CHECKPOINT_TRAINER, 3, 120, 2)
SAID = Manifest(MANIFEST_FORMAT, "run", 4, ev.CHECKPOINT_TRAINER, 2, 0, 3, 120, False, 0, {})


def state_of_the_run() -> State:
    state = State()
    state.run_id = "run"
    return state


def test_a_checkpoints_own_manifest_is_accepted() -> None:
    """Also while its digest is not in the journal: it was published just before the process died."""
    assert check_manifest("m", manifest_bytes(SAID), state_of_the_run(), OURS) == SAID


@pytest.mark.parametrize(
    "change",
    [{"run_id": "other"}, {"checkpoint": 5}, {"incarnation": 3}, {"trainer_version": 4}, {"cut": 121}, {"format": 99}],
    ids=lambda change: next(iter(change)),
)
def test_another_checkpoints_manifest_is_refused(change: dict[str, object]) -> None:
    """Protocol rule 13: a folder of another run, opening, step or cut may have the right name and whole content."""
    data = manifest_bytes(msgspec.structs.replace(SAID, **change))
    with pytest.raises(CheckpointDamaged, match="belongs to"):
        check_manifest("m", data, state_of_the_run(), OURS)


def test_a_checkpoint_below_the_floor_is_no_candidate() -> None:
    """Protocol rules 13 and 15: what was retired since, and what is ahead of this history, can't be gone back to."""
    state = state_of_the_run()
    state.floor, state.trainer_version = 3, 5
    state.started = {n: Checkpoint(n, ev.CHECKPOINT_TRAINER, n, 10 * n, 1) for n in (2, 3, 5, 6)}
    state.checkpoints = [Checkpoint(4, ev.CHECKPOINT_TRAINER, 4, 45, 1), Checkpoint(7, ev.CHECKPOINT_ROLLOUT, 4, 47, 1)]
    assert [c.trainer_version for c in candidates(state)] == [5, 4, 3]
