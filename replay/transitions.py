"""``apply(state, event)``: the one function by which the live engine and a replay change state.

Each event kind has a check, which raises IllegalTransition and changes nothing, and an effect, which can't fail after
its check passed. The ledger runs check → encode and enqueue → effect; a fold runs check → effect. So an illegal
transition writes nothing, and live and restored state can't drift.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..journal.errors import UnlostError
from . import events as ev
from .state import (
    CLAIMED,
    COMMITTED,
    COMPLETE,
    DISPATCHED,
    IDLE,
    POOL,
    RESERVED,
    SEALED,
    TRAINED,
    UNFINISHED,
    Batch,
    Checkpoint,
    Group,
    GroupStatus,
    Restoring,
    Sibling,
    State,
    Worker,
)


ROLLOUT_SNAPSHOTS_KEPT: Final = 2
GIVES_UP_SEALED: Final = (ev.ABANDON_PAYLOAD_LOST, ev.ABANDON_GRANULARITY)
"""Reasons for which a sealed sibling has to be generated again."""


class IllegalTransition(UnlostError):
    """The event is not allowed in this state. In a fold: the journal was written by another program or a defect."""


def _need(ok: bool, event: ev.Event, why: str) -> None:
    if not ok:
        raise IllegalTransition(f"{type(event).__name__} refused: {why}")


def _group(state: State, event: ev.Event, group_id: int, *statuses: int) -> Group:
    group = state.groups.get(group_id)
    if group is None:
        raise IllegalTransition(f"{type(event).__name__} refused: group {group_id} is not alive")
    if group.status not in statuses:
        allowed = " or ".join(GroupStatus(s).name for s in statuses)
        raise IllegalTransition(
            f"{type(event).__name__} refused: group {group_id} is {GroupStatus(group.status).name}, not {allowed}"
        )
    return group


def _count(state: State, name: str, by: int = 1) -> None:
    state.counters[name] = state.counters.get(name, 0) + by


# --- the run -------------------------------------------------------------------------------------------------------


def check_run_started(state: State, e: ev.RunStarted) -> None:
    _need(e.incarnation > state.incarnation, e, f"incarnation {e.incarnation} after {state.incarnation}")
    _need(state.run_id in ("", e.run_id), e, f"run {e.run_id} in the journal of {state.run_id}")


def do_run_started(state: State, e: ev.RunStarted) -> None:
    state.needs_restore = state.incarnation > 0
    state.run_id = e.run_id
    state.incarnation = e.incarnation
    state.fingerprints = e.fingerprints
    state.settings = e.settings
    state.anchor_t, state.anchor_wall_us = e.t, e.wall_us
    state.ended = ""
    for worker in state.workers.values():
        worker.alive = False


def check_run_ended(state: State, e: ev.RunEnded) -> None:
    _need(not state.ended, e, f"already ended: {state.ended}")


def do_run_ended(state: State, e: ev.RunEnded) -> None:
    state.ended = e.reason
    _note_generated(state, e.generated)


def _note_generated(state: State, generated: tuple[tuple[int, int], ...]) -> None:
    for worker_id, tokens in generated:
        worker = state.workers.get(worker_id)
        if worker is not None:
            worker.generated = max(worker.generated, tokens)


def check_worker_started(state: State, e: ev.WorkerStarted) -> None:
    _need(e.worker not in state.workers, e, f"worker id {e.worker} was used before")


def do_worker_started(state: State, e: ev.WorkerStarted) -> None:
    state.workers[e.worker] = Worker(e.worker, e.journal, state.incarnation)
    state.next_worker = max(state.next_worker, e.worker + 1)


def check_worker_stopped(state: State, e: ev.WorkerStopped) -> None:
    _need(e.worker in state.workers, e, f"worker {e.worker} is unknown")


def do_worker_stopped(state: State, e: ev.WorkerStopped) -> None:
    worker = state.workers[e.worker]
    worker.alive = False
    worker.generated = max(worker.generated, e.generated)
    if e.reason == ev.ABANDON_WORKER_LOST:
        _count(state, "workers_lost")


# --- loader, admission, pool ---------------------------------------------------------------------------------------


def check_batch_reserved(state: State, e: ev.BatchReserved) -> None:
    _need(e.admission_id == state.next_admission, e, f"admission {e.admission_id}, expected {state.next_admission}")
    _need(e.first_group == state.next_group, e, f"first group {e.first_group}, expected {state.next_group}")
    _need(e.generations >= 1, e, "no generations")
    _need((e.epoch, e.position) >= (state.epoch, state.position), e, "the loader goes backwards")
    _need(bool(e.prompts or e.pool_groups), e, "an empty batch")
    _need(e.kind != ev.KIND_SPARE or not e.pool_groups, e, "a spare batch can't take from the pool")
    _need(len(set(e.pool_groups)) == len(e.pool_groups), e, "a pool group twice")
    for group_id in e.pool_groups:
        _need(group_id in state.spares or group_id in state.requeued, e, f"group {group_id} is not in the pool")


def do_batch_reserved(state: State, e: ev.BatchReserved) -> None:
    state.next_admission += 1
    state.next_group += len(e.prompts)
    state.epoch, state.position = e.epoch, e.position
    state.generations = e.generations
    spare = e.kind == ev.KIND_SPARE
    for group_id in e.pool_groups:
        state.spares.pop(group_id, None)
        state.requeued.pop(group_id, None)
        group = state.groups[group_id]
        group.status = RESERVED
        group.admission_id = e.admission_id
    new = range(e.first_group, e.first_group + len(e.prompts))
    for group_id, prompt in zip(new, e.prompts, strict=True):
        siblings = [Sibling() for _ in range(e.generations)]
        state.groups[group_id] = Group(group_id, prompt, POOL if spare else RESERVED, e.admission_id, siblings, e.t)
        if spare:
            state.spares[group_id] = None
    if not spare:
        state.reserved[e.admission_id] = Batch(e.admission_id, [*e.pool_groups, *new])


def check_batch_admitted(state: State, e: ev.BatchAdmitted) -> None:
    _need(e.admission_id in state.reserved, e, f"admission {e.admission_id} is not reserved")
    _need(e.dispatch_index >= state.dispatch_index, e, "the dispatch index goes backwards")
    held = state.stamped.get(e.target_step, 0)
    _need(held == 0, e, f"target step {e.target_step} already holds {held} group(s): the cursor is behind the buffer")


def do_batch_admitted(state: State, e: ev.BatchAdmitted) -> None:
    state.dispatch_index = e.dispatch_index
    for group_id in state.reserved.pop(e.admission_id).groups:
        _admit(state, state.groups[group_id], e.target_step, e.trainer_version)


def _admit(state: State, group: Group, target_step: int, trainer_version: int) -> None:
    group.status = UNFINISHED
    group.target_step = target_step
    group.start_weight = trainer_version
    group.slot = state.next_slot
    state.next_slot += 1
    state.enter(group)


def check_prompt_replaced(state: State, e: ev.PromptReplaced) -> None:
    _group(state, e, e.group, UNFINISHED, COMPLETE)
    _need(e.spare in state.spares, e, f"group {e.spare} is not a spare")
    if e.borrowed >= 0:
        lent = _group(state, e, e.borrowed, COMMITTED)
        _need(lent.target_step == e.borrowed_from == e.spare_target, e, "the spare must repay the lender's step")
        _need(e.borrowed_from > e.target_step, e, "a loan comes from a later step")
    else:
        _need(e.spare_target == e.target_step, e, "without a loan the spare serves the step itself")


def do_prompt_replaced(state: State, e: ev.PromptReplaced) -> None:
    given_up = state.groups[e.group]
    replacements = given_up.replacements + 1
    _drop(state, given_up)
    _count(state, "prompts_given_up")
    del state.spares[e.spare]
    spare = state.groups[e.spare]
    spare.replacements = replacements
    _admit(state, spare, e.spare_target, e.trainer_version)
    if e.borrowed >= 0:
        lent = state.groups[e.borrowed]
        state.leave(lent)
        lent.target_step = e.target_step
        state.enter(lent)
        state.promoted[e.target_step] = state.promoted.get(e.target_step, 0) + 1
    state.replaced[e.spare_target] = state.replaced.get(e.spare_target, 0) + 1


def check_step_shortened(state: State, e: ev.StepShortened) -> None:
    group = _group(state, e, e.group, UNFINISHED, COMPLETE)
    _need(e.count == 1, e, "one event gives up one group")
    _need(group.target_step == e.step, e, f"group {e.group} is stamped {group.target_step}, not {e.step}")


def do_step_shortened(state: State, e: ev.StepShortened) -> None:
    _drop(state, state.groups[e.group])
    _count(state, "prompts_given_up")
    state.shortfall[e.step] = state.shortfall.get(e.step, 0) + e.count
    state.dropped[e.step] = state.dropped.get(e.step, 0) + e.count


def _drop(state: State, group: Group) -> None:
    """The group is gone by decision. Its running attempts stay on the books until their tokens are known."""
    state.leave(group)
    for index, sibling in enumerate(group.siblings):
        if sibling.status == DISPATCHED:
            state.zombies[group.key(index)] = None
    del state.groups[group.id]
    state.discarded += 1
    if group.sealed:
        state.uncleared[group.id] = group.sealed_row_keys()


def check_group_discarded(state: State, e: ev.GroupDiscarded) -> None:
    _group(state, e, e.group, POOL, RESERVED, UNFINISHED, COMPLETE, COMMITTED)
    _need(e.requeued_as in (-1, state.next_group), e, f"requeued as {e.requeued_as}, expected {state.next_group}")


def do_group_discarded(state: State, e: ev.GroupDiscarded) -> None:
    group = state.groups[e.group]
    if group.status == POOL:
        state.spares.pop(e.group, None)
        state.requeued.pop(e.group, None)
    elif group.status == RESERVED:
        batch = state.reserved[group.admission_id]
        batch.groups.remove(e.group)
        if not batch.groups:
            del state.reserved[group.admission_id]
    _drop(state, group)
    _requeue(state, e.t, group, e.requeued_as)
    _count(state, f"discarded_{e.reason}")
    if e.reason in (ev.DISCARD_DROPPED, ev.DISCARD_POISONED):
        _count(state, "prompts_given_up")


def _requeue(state: State, t: int, group: Group, new_id: int) -> None:
    if new_id >= 0:
        state.next_group += 1
        siblings = [Sibling() for _ in group.siblings]
        again = Group(new_id, group.prompt, POOL, group.admission_id, siblings, t)
        again.infra_failures, again.data_failures = group.infra_failures, group.data_failures
        again.worker_losses = group.worker_losses
        state.groups[new_id] = again
        state.requeued[new_id] = None
        _count(state, "requeued")


# --- attempts ------------------------------------------------------------------------------------------------------


def check_attempt_dispatched(state: State, e: ev.AttemptDispatched) -> None:
    group = state.groups.get(e.group)
    if group is None or group.status != UNFINISHED or not 0 <= e.sibling < len(group.siblings):
        group = _group(state, e, e.group, UNFINISHED)
        _need(False, e, f"group {e.group} has no sibling {e.sibling}")
    sibling = group.siblings[e.sibling]
    if sibling.status != IDLE or e.attempt != sibling.attempt + 1 or state.needs_restore:
        _need(not state.needs_restore, e, "the restore is not completed")
        _need(sibling.status == IDLE, e, f"group {e.group} sibling {e.sibling} is running or sealed")
        _need(False, e, f"attempt {e.attempt} after {sibling.attempt}")


def do_attempt_dispatched(state: State, e: ev.AttemptDispatched) -> None:
    group = state.groups[e.group]
    sibling = group.siblings[e.sibling]
    sibling.status = DISPATCHED
    sibling.attempt = e.attempt
    sibling.incarnation = state.incarnation
    sibling.worker = e.worker
    sibling.branch = e.branch
    sibling.version = e.version
    sibling.prefix = e.prefix
    sibling.dispatched_t = e.t
    state.open_attempts += 1
    if group.version_min < 0:  # the group's first dispatch: staleness counts from here, not from its admission
        group.version_min = e.version
        state.leave(group)
        group.start_weight = state.scheduling_version(e.branch, e.version)
        state.enter(group)


def _attempt(state: State, e: Any, status: int) -> tuple[Group, Sibling]:
    group = state.groups.get(e.group)
    if group is not None and 0 <= e.sibling < len(group.siblings):
        sibling = group.siblings[e.sibling]
        if sibling.status == status and sibling.attempt == e.attempt:
            return group, sibling
    raise IllegalTransition(
        f"{type(e).__name__} refused: group {e.group} sibling {e.sibling} attempt {e.attempt} is not "
        f"{'running' if status == DISPATCHED else 'sealed'}"
    )


def check_attempt_sealed(state: State, e: ev.AttemptSealed) -> None:
    _attempt(state, e, DISPATCHED)
    _need(e.receipt.tokens >= 0, e, "a negative token count")


def do_attempt_sealed(state: State, e: ev.AttemptSealed) -> None:
    group = state.groups[e.group]
    sibling = group.siblings[e.sibling]
    sibling.status = SEALED
    sibling.receipt = e.receipt
    state.open_attempts -= 1
    group.sealed += 1
    if group.sealed == len(group.siblings):
        del state.unfinished[group.id]
        group.status = COMPLETE
        state.complete[group.id] = None


def check_attempt_failed(state: State, e: ev.AttemptFailed) -> None:
    _attempt(state, e, DISPATCHED)


def do_attempt_failed(state: State, e: ev.AttemptFailed) -> None:
    group = state.groups[e.group]
    group.siblings[e.sibling].status = IDLE
    state.open_attempts -= 1
    if e.kind == ev.FAIL_DATA:
        group.data_failures += 1
    else:
        group.infra_failures += 1
    _count(state, "tokens_thrown_away", e.tokens)


def _zombie(state: State, e: ev.AttemptAbandoned) -> ev.AttemptKey | None:
    for key in state.zombies:
        if key.group == e.group and key.sibling == e.sibling and key.attempt == e.attempt:
            return key
    return None


def check_attempt_abandoned(state: State, e: ev.AttemptAbandoned) -> None:
    if e.group not in state.groups and _zombie(state, e) is not None:
        return
    _attempt(state, e, SEALED if e.reason in GIVES_UP_SEALED else DISPATCHED)
    group = state.groups[e.group]
    _need(group.status in (UNFINISHED, COMPLETE, COMMITTED), e, f"group is {GroupStatus(group.status).name}")


def do_attempt_abandoned(state: State, e: ev.AttemptAbandoned) -> None:
    _count(state, f"abandoned_{e.reason}")
    group = state.groups.get(e.group)
    if group is None:
        key = _zombie(state, e)
        if key is not None:
            del state.zombies[key]
        return
    sibling = group.siblings[e.sibling]
    if sibling.status == SEALED:  # its payload is lost: the group is unfinished again
        state.leave(group)
        group.status = UNFINISHED
        group.sealed -= 1
        sibling.receipt = None
        sibling.status = IDLE
        state.enter(group)
        return
    sibling.status = IDLE
    state.open_attempts -= 1
    if e.reason == ev.ABANDON_WORKER_LOST:
        group.worker_losses += 1


# --- buffer and trainer --------------------------------------------------------------------------------------------


def check_group_committed(state: State, e: ev.GroupCommitted) -> None:
    _group(state, e, e.group, COMPLETE)


def do_group_committed(state: State, e: ev.GroupCommitted) -> None:
    group = state.groups[e.group]
    state.leave(group)
    group.status = COMMITTED
    group.version_min, group.version_max = e.version_min, e.version_max
    weights = [
        state.scheduling_version(branch, version)
        for sibling in group.siblings
        if sibling.receipt is not None
        for _, branch, version in sibling.receipt.weight_spans
    ]
    group.start_weight = min(weights, default=group.start_weight)
    state.enter(group)


def check_group_evicted(state: State, e: ev.GroupEvicted) -> None:
    _group(state, e, e.group, COMMITTED)
    _need(e.requeued_as in (-1, state.next_group), e, f"requeued as {e.requeued_as}, expected {state.next_group}")


def do_group_evicted(state: State, e: ev.GroupEvicted) -> None:
    group = state.groups.pop(e.group)
    state.leave(group)
    state.evicted += 1
    state.uncleared[e.group] = group.sealed_row_keys()
    _requeue(state, e.t, group, e.requeued_as)


def check_step_claimed(state: State, e: ev.StepClaimed) -> None:
    _need(e.step == state.trainer_version, e, f"the next step is {state.trainer_version}")
    _need(state.open_step in (-1, e.step), e, f"step {state.open_step} is open")
    _need(not state.needs_restore, e, "the restore is not completed")
    _need(len(set(e.groups)) == len(e.groups) > 0, e, "no groups, or one twice")
    for group_id in e.groups:
        _group(state, e, group_id, COMMITTED)


def do_step_claimed(state: State, e: ev.StepClaimed) -> None:
    state.open_step = e.step
    for group_id in e.groups:
        group = state.groups[group_id]
        state.leave(group)
        group.status = CLAIMED
        state.enter(group)
    state.open_groups.extend(e.groups)


def check_step_applied(state: State, e: ev.StepApplied) -> None:
    _need(state.open_step == e.step, e, f"the open step is {state.open_step}")
    _need(e.trainer_version == e.step + 1, e, "version must be step + 1")


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
    _note_generated(state, e.generated)


def check_weights_synced(state: State, e: ev.WeightsSynced) -> None:
    _need((e.branch, e.version) == (state.branch, state.trainer_version), e, "not the trainer's weights")


def do_weights_synced(state: State, e: ev.WeightsSynced) -> None:
    state.synced_branch, state.synced_version = e.branch, e.version


def check_rows_cleared(state: State, e: ev.RowsCleared) -> None:
    for group_id in e.groups:
        _need(group_id in state.uncleared, e, f"group {group_id} has no rows to clear")


def do_rows_cleared(state: State, e: ev.RowsCleared) -> None:
    for group_id in e.groups:
        del state.uncleared[group_id]


# --- checkpoints and restore ---------------------------------------------------------------------------------------


def check_checkpoint_started(state: State, e: ev.CheckpointStarted) -> None:
    _need(e.checkpoint == state.next_checkpoint, e, f"the next id is {state.next_checkpoint}")
    _need(e.trainer_version == state.trainer_version, e, f"the trainer is at {state.trainer_version}")
    _need(e.kind != ev.CHECKPOINT_TRAINER or state.open_step == -1, e, f"step {state.open_step} is open")


def do_checkpoint_started(state: State, e: ev.CheckpointStarted) -> None:
    state.next_checkpoint += 1
    state.started[e.checkpoint] = Checkpoint(e.checkpoint, e.kind, e.trainer_version, state.offset, state.incarnation)


def check_checkpoint_committed(state: State, e: ev.CheckpointCommitted) -> None:
    started = state.started.get(e.checkpoint)
    _need(started is not None, e, f"checkpoint {e.checkpoint} is not in progress")
    assert started is not None
    _need((started.cut, started.kind) == (e.cut, e.kind), e, "cut or kind differ from the start's")
    _need(state.floor <= e.floor <= e.trainer_version, e, f"floor {e.floor} below {state.floor}, or above the step")


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
    _need(e.checkpoint in state.started, e, f"checkpoint {e.checkpoint} is not in progress")


def do_checkpoint_failed(state: State, e: ev.CheckpointFailed) -> None:
    del state.started[e.checkpoint]
    _count(state, "checkpoints_failed")


def check_nothing(state: State, e: ev.Event) -> None:
    """Always allowed."""


def do_checkpoint_skipped(state: State, e: ev.CheckpointSkipped) -> None:
    _count(state, "checkpoints_skipped")


def check_restore_started(state: State, e: ev.RestoreStarted) -> None:
    _need(state.needs_restore, e, "nothing to restore")
    _need(state.floor <= e.to_version <= state.trainer_version, e, f"can't go to {e.to_version}")


def do_restore_started(state: State, e: ev.RestoreStarted) -> None:
    state.restoring = Restoring(e.checkpoint, state.trainer_version, e.to_version)


def check_trainer_rolled_back(state: State, e: ev.TrainerRolledBack) -> None:
    _need(e.from_version == state.trainer_version, e, f"the trainer is at {state.trainer_version}")
    _need(state.floor <= e.to_version <= e.from_version, e, f"can't go back to {e.to_version}, floor {state.floor}")
    new = e.to_version < e.from_version
    _need(e.branch == state.branch + new, e, f"branch {e.branch} after {state.branch}")
    _need(set(e.groups) == set(returned_groups(state, e.to_version)), e, "not exactly the groups that must return")


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
    state.started = {}
    if e.branch == state.branch:
        return
    state.branch_caps = [min(cap, e.to_version) for cap in state.branch_caps] + [e.to_version]
    state.branch = e.branch
    state.checkpoints = [c for c in state.checkpoints if c.trainer_version <= e.to_version]
    for group in state.groups.values():
        if group.start_weight > e.to_version:
            state.leave(group)
            group.start_weight = e.to_version
            state.enter(group)


def check_restore_completed(state: State, e: ev.RestoreCompleted) -> None:
    _need(state.restoring is not None, e, "no restore is open")
    assert state.restoring is not None
    _need(state.trainer_version == state.restoring.to_version and state.open_step == -1, e, "the trainer is elsewhere")
    _need(state.open_attempts == 0, e, f"{state.open_attempts} attempts of a dead incarnation are open")


def do_restore_completed(state: State, e: ev.RestoreCompleted) -> None:
    state.restoring = None
    state.needs_restore = False
    state.started = {}
    needed = {s.worker for g in state.groups.values() for s in g.siblings}
    state.workers = {w: info for w, info in state.workers.items() if info.alive or w in needed}


def do_state_image(state: State, e: ev.StateImage) -> None:
    """On a state that was folded up to here an image says nothing new; a fold that begins here loads it."""
    if not state.run_id:
        loaded = State.from_image(bytes(e.state), state.offset)
        state.__dict__.update(loaded.__dict__)


_Check = Callable[[State, Any], None]

TRANSITIONS: Final[dict[type[ev.Event], tuple[_Check, _Check]]] = {
    ev.RunStarted: (check_run_started, do_run_started),
    ev.RunEnded: (check_run_ended, do_run_ended),
    ev.BatchReserved: (check_batch_reserved, do_batch_reserved),
    ev.BatchAdmitted: (check_batch_admitted, do_batch_admitted),
    ev.PromptReplaced: (check_prompt_replaced, do_prompt_replaced),
    ev.StepShortened: (check_step_shortened, do_step_shortened),
    ev.GroupDiscarded: (check_group_discarded, do_group_discarded),
    ev.AttemptDispatched: (check_attempt_dispatched, do_attempt_dispatched),
    ev.AttemptSealed: (check_attempt_sealed, do_attempt_sealed),
    ev.AttemptFailed: (check_attempt_failed, do_attempt_failed),
    ev.AttemptAbandoned: (check_attempt_abandoned, do_attempt_abandoned),
    ev.GroupCommitted: (check_group_committed, do_group_committed),
    ev.GroupEvicted: (check_group_evicted, do_group_evicted),
    ev.StepClaimed: (check_step_claimed, do_step_claimed),
    ev.StepApplied: (check_step_applied, do_step_applied),
    ev.WeightsSynced: (check_weights_synced, do_weights_synced),
    ev.RowsCleared: (check_rows_cleared, do_rows_cleared),
    ev.CheckpointStarted: (check_checkpoint_started, do_checkpoint_started),
    ev.CheckpointCommitted: (check_checkpoint_committed, do_checkpoint_committed),
    ev.CheckpointFailed: (check_checkpoint_failed, do_checkpoint_failed),
    ev.CheckpointSkipped: (check_nothing, do_checkpoint_skipped),
    ev.RestoreStarted: (check_restore_started, do_restore_started),
    ev.TrainerRolledBack: (check_trainer_rolled_back, do_trainer_rolled_back),
    ev.RestoreCompleted: (check_restore_completed, do_restore_completed),
    ev.StateImage: (check_nothing, do_state_image),
    ev.WorkerStarted: (check_worker_started, do_worker_started),
    ev.WorkerStopped: (check_worker_stopped, do_worker_stopped),
}


def apply(state: State, offset: int, event: ev.Event) -> None:
    """Check, then change ``state`` by one event at ``offset``; ``state.offset`` is then ``offset + 1``.

    Raises IllegalTransition, and changes nothing, if the event is not allowed here.
    """
    check, effect = TRANSITIONS[type(event)]
    check(state, event)
    state.offset = offset
    effect(state, event)
    state.offset = offset + 1
    state.t = event.t
