"""Rules of buffer, trainer, checkpoints and restore.

Each pair: a check that changes nothing, an effect that can't fail after it.
"""

from __future__ import annotations

from . import events as ev
from .rules import ROLLOUT_SNAPSHOTS_KEPT, alive, count, need, note_generated, requeue
from .state import CLAIMED, COMMITTED, COMPLETE, TRAINED, Checkpoint, Restoring, State


def check_group_committed(state: State, e: ev.GroupCommitted) -> None:
    alive(state, e, e.group, COMPLETE)


def do_group_committed(state: State, e: ev.GroupCommitted) -> None:
    group = state.groups[e.group]
    state.leave(group)
    group.status = COMMITTED
    group.version_min, group.version_max = e.version_min, e.version_max
    weights = {  # mostly one or two, however many siblings
        (branch, version)
        for sibling in group.siblings
        if sibling.receipt is not None
        for _, branch, version in sibling.receipt.weight_spans
    }
    group.start_weight = min((state.scheduling_version(*weight) for weight in weights), default=group.start_weight)
    state.enter(group)


def check_group_evicted(state: State, e: ev.GroupEvicted) -> None:
    alive(state, e, e.group, COMMITTED)
    need(e.requeued_as in (-1, state.next_group), e, f"requeued as {e.requeued_as}, expected {state.next_group}")


def do_group_evicted(state: State, e: ev.GroupEvicted) -> None:
    group = state.groups.pop(e.group)
    state.leave(group)
    state.evicted += 1
    state.uncleared[e.group] = group.sealed_row_keys()
    requeue(state, e.t, group, e.requeued_as)


def check_step_claimed(state: State, e: ev.StepClaimed) -> None:
    need(e.step == state.trainer_version, e, f"the next step is {state.trainer_version}")
    need(state.open_step in (-1, e.step), e, f"step {state.open_step} is open")
    need(not state.needs_restore, e, "the restore is not completed")
    need(len(set(e.groups)) == len(e.groups) > 0, e, "no groups, or one twice")
    for group_id in e.groups:
        alive(state, e, group_id, COMMITTED)


def do_step_claimed(state: State, e: ev.StepClaimed) -> None:
    state.open_step = e.step
    for group_id in e.groups:
        group = state.groups[group_id]
        state.leave(group)
        group.status = CLAIMED
        state.enter(group)
    state.open_groups.extend(e.groups)


def check_step_applied(state: State, e: ev.StepApplied) -> None:
    need(state.open_step == e.step, e, f"the open step is {state.open_step}")
    need(e.trainer_version == e.step + 1, e, "version must be step + 1")


def do_step_applied(state: State, e: ev.StepApplied) -> None:
    for group_id in state.open_groups:
        group = state.groups[group_id]
        state.leave(group)
        group.status = TRAINED
        group.trained_step = e.step
        state.uncleared[group_id] = group.sealed_row_keys()
    state.applied[e.step] = state.open_groups
    state.open_groups = []
    state.open_step = -1
    state.trainer_version = e.trainer_version
    note_generated(state, e.generated)


def check_weights_synced(state: State, e: ev.WeightsSynced) -> None:
    need((e.branch, e.version) == (state.branch, state.trainer_version), e, "not the trainer's weights")


def do_weights_synced(state: State, e: ev.WeightsSynced) -> None:
    state.synced_branch, state.synced_version = e.branch, e.version


def check_rows_cleared(state: State, e: ev.RowsCleared) -> None:
    for group_id in e.groups:
        need(group_id in state.uncleared, e, f"group {group_id} has no rows to clear")


def do_rows_cleared(state: State, e: ev.RowsCleared) -> None:
    for group_id in e.groups:
        del state.uncleared[group_id]


def check_checkpoint_started(state: State, e: ev.CheckpointStarted) -> None:
    need(e.checkpoint == state.next_checkpoint, e, f"the next id is {state.next_checkpoint}")
    need(e.trainer_version == state.trainer_version, e, f"the trainer is at {state.trainer_version}")
    need(e.kind != ev.CHECKPOINT_TRAINER or state.open_step == -1, e, f"step {state.open_step} is open")


def do_checkpoint_started(state: State, e: ev.CheckpointStarted) -> None:
    state.next_checkpoint += 1
    state.started[e.checkpoint] = Checkpoint(e.checkpoint, e.kind, e.trainer_version, state.offset, state.incarnation)


def check_checkpoint_committed(state: State, e: ev.CheckpointCommitted) -> None:
    started = state.started.get(e.checkpoint)
    need(started is not None, e, f"checkpoint {e.checkpoint} is not in progress")
    assert started is not None
    need((started.cut, started.kind) == (e.cut, e.kind), e, "cut or kind differ from the start's")
    need(state.floor <= e.floor <= e.trainer_version, e, f"floor {e.floor} below {state.floor}, or above the step")


def do_checkpoint_committed(state: State, e: ev.CheckpointCommitted) -> None:
    checkpoint = state.started.pop(e.checkpoint)
    checkpoint.committed, checkpoint.name, checkpoint.digest = True, e.name, e.digest
    state.checkpoints.append(checkpoint)
    state.checkpoints.sort(key=lambda c: c.id)
    if e.kind == ev.CHECKPOINT_ROLLOUT:
        older = [c for c in state.checkpoints if c.kind == ev.CHECKPOINT_ROLLOUT][:-ROLLOUT_SNAPSHOTS_KEPT]
        state.checkpoints = [c for c in state.checkpoints if c not in older]
    if e.floor > state.floor:
        _retire(state, e.floor)


def _retire(state: State, floor: int) -> None:
    """Forget what no restore can return (protocol rules 14, 20)."""
    state.floor = floor
    state.checkpoints = [c for c in state.checkpoints if c.trainer_version >= floor]
    for step in [s for s in state.applied if s < floor]:
        for group_id in state.applied.pop(step):
            del state.groups[group_id]
            state.retired_trained += 1
    for table in (state.shortfall, state.promoted, state.replaced, state.dropped):
        for step in [s for s in table if s < floor]:
            del table[step]


def check_checkpoint_failed(state: State, e: ev.CheckpointFailed) -> None:
    need(e.checkpoint in state.started, e, f"checkpoint {e.checkpoint} is not in progress")


def do_checkpoint_failed(state: State, e: ev.CheckpointFailed) -> None:
    del state.started[e.checkpoint]
    count(state, "checkpoints_failed")


def check_nothing(state: State, e: ev.Event) -> None:
    """Always allowed."""


def do_checkpoint_skipped(state: State, e: ev.CheckpointSkipped) -> None:
    count(state, "checkpoints_skipped")


def check_restore_started(state: State, e: ev.RestoreStarted) -> None:
    need(state.needs_restore, e, "nothing to restore")
    need(state.floor <= e.to_version <= state.trainer_version, e, f"can't go to {e.to_version}")


def do_restore_started(state: State, e: ev.RestoreStarted) -> None:
    state.restoring = Restoring(e.checkpoint, state.trainer_version, e.to_version)


def check_trainer_rolled_back(state: State, e: ev.TrainerRolledBack) -> None:
    need(e.from_version == state.trainer_version, e, f"the trainer is at {state.trainer_version}")
    need(state.floor <= e.to_version <= e.from_version, e, f"can't go back to {e.to_version}, floor {state.floor}")
    new = e.to_version < e.from_version
    need(e.branch == state.branch + new, e, f"branch {e.branch} after {state.branch}")
    need(set(e.groups) == set(returned_groups(state, e.to_version)), e, "not exactly the groups that must return")


def returned_groups(state: State, to_version: int) -> list[int]:
    """Groups that a rollback to ``to_version`` gives back: the open claim's, and those trained since (rule 16)."""
    trained = [g for step, groups in sorted(state.applied.items()) if step >= to_version for g in groups]
    return trained + list(state.open_groups)


def do_trainer_rolled_back(state: State, e: ev.TrainerRolledBack) -> None:
    for group_id in e.groups:
        group = state.groups[group_id]
        state.leave(group)
        group.status = COMMITTED
        group.trained_step = -1
        state.enter(group)
        state.uncleared.pop(group_id, None)
    for step in [s for s in state.applied if s >= e.to_version]:
        del state.applied[step]
    state.open_groups = []
    state.open_step = -1
    state.trainer_version = e.to_version
    if e.branch == state.branch:
        return
    state.started = {}
    state.branch_caps = [min(cap, e.to_version) for cap in state.branch_caps] + [e.to_version]
    state.branch = e.branch
    state.checkpoints = [c for c in state.checkpoints if c.trainer_version <= e.to_version]
    for group in state.groups.values():
        if group.start_weight > e.to_version:
            state.leave(group)
            group.start_weight = e.to_version
            state.enter(group)


def check_restore_completed(state: State, e: ev.RestoreCompleted) -> None:
    need(state.restoring is not None, e, "no restore is open")
    assert state.restoring is not None
    need(state.trainer_version == state.restoring.to_version and state.open_step == -1, e, "the trainer is elsewhere")
    need(state.open_attempts == 0, e, f"{state.open_attempts} attempts of a dead incarnation are open")


def do_restore_completed(state: State, e: ev.RestoreCompleted) -> None:
    state.restoring = None
    state.needs_restore = False
    state.started = {}
    siblings = [s for g in state.groups.values() for s in g.siblings]
    needed = {s.worker for s in siblings} | {s.source_worker for s in siblings}
    state.workers = {w: info for w, info in state.workers.items() if info.alive or w in needed}


def do_state_image(state: State, e: ev.StateImage) -> None:
    """On a state that was folded up to here an image says nothing new; a fold that begins here loads it."""
    if not state.run_id:
        loaded = State.from_image(bytes(e.state), state.offset)
        state.__dict__.update(loaded.__dict__)
