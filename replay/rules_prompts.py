"""Rules of the run itself, the loader, admission and the pool.

Each pair: a check that changes nothing, an effect that can't fail after it.
"""

from __future__ import annotations

from . import events as ev
from .rules import alive, count, need, note_generated, requeue
from .state import COMMITTED, COMPLETE, DISPATCHED, POOL, RESERVED, UNFINISHED, Batch, Group, Sibling, State, Worker


def check_run_started(state: State, e: ev.RunStarted) -> None:
    need(e.incarnation > state.incarnation, e, f"incarnation {e.incarnation} after {state.incarnation}")
    need(state.run_id in ("", e.run_id), e, f"run {e.run_id} in the journal of {state.run_id}")


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
    need(not state.ended, e, f"already ended: {state.ended}")


def do_run_ended(state: State, e: ev.RunEnded) -> None:
    state.ended = e.reason
    note_generated(state, e.generated)


def do_data_plane_restarted(state: State, e: ev.DataPlaneRestarted) -> None:
    count(state, "data_plane_restarts")


def check_worker_started(state: State, e: ev.WorkerStarted) -> None:
    need(e.worker not in state.workers, e, f"worker id {e.worker} was used before")


def do_worker_started(state: State, e: ev.WorkerStarted) -> None:
    state.workers[e.worker] = Worker(e.worker, e.journal, state.incarnation)
    state.next_worker = max(state.next_worker, e.worker + 1)


def check_worker_stopped(state: State, e: ev.WorkerStopped) -> None:
    need(e.worker in state.workers, e, f"worker {e.worker} is unknown")


def do_worker_stopped(state: State, e: ev.WorkerStopped) -> None:
    worker = state.workers[e.worker]
    worker.alive = False
    worker.generated = max(worker.generated, e.generated)
    if e.reason == ev.ABANDON_WORKER_LOST:
        worker.lost = True
        count(state, "workers_lost")


def check_batch_reserved(state: State, e: ev.BatchReserved) -> None:
    need(e.admission_id == state.next_admission, e, f"admission {e.admission_id}, expected {state.next_admission}")
    need(e.first_group == state.next_group, e, f"first group {e.first_group}, expected {state.next_group}")
    need(e.generations >= 1, e, "no generations")
    need((e.epoch, e.position) >= (state.epoch, state.position), e, "the loader goes backwards")
    need(bool(e.prompts or e.pool_groups), e, "an empty batch")
    need(e.kind != ev.KIND_SPARE or not e.pool_groups, e, "a spare batch can't take from the pool")
    need(len(set(e.pool_groups)) == len(e.pool_groups), e, "a pool group twice")
    for group_id in e.pool_groups:
        need(group_id in state.spares or group_id in state.requeued, e, f"group {group_id} is not in the pool")


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
    need(e.admission_id in state.reserved, e, f"admission {e.admission_id} is not reserved")
    need(e.dispatch_index >= state.dispatch_index, e, "the dispatch index goes backwards")
    held = state.stamped.get(e.target_step, 0)
    need(held == 0, e, f"target step {e.target_step} already holds {held} group(s): the cursor is behind the buffer")


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
    alive(state, e, e.group, UNFINISHED, COMPLETE)
    need(e.spare in state.spares, e, f"group {e.spare} is not a spare")
    if e.borrowed >= 0:
        lent = alive(state, e, e.borrowed, COMMITTED)
        need(lent.target_step == e.borrowed_from == e.spare_target, e, "the spare must repay the lender's step")
        need(e.borrowed_from > e.target_step, e, "a loan comes from a later step")
    else:
        need(e.spare_target == e.target_step, e, "without a loan the spare serves the step itself")


def do_prompt_replaced(state: State, e: ev.PromptReplaced) -> None:
    given_up = state.groups[e.group]
    replacements = given_up.replacements + 1
    _drop(state, given_up)
    _count_given_up(state, e.reason)
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


def _count_given_up(state: State, reason: str) -> None:
    """Prompts that could not be worked off, as against those that were not wanted (filtered, stale)."""
    if reason in (ev.DISCARD_DROPPED, ev.DISCARD_POISONED):
        count(state, "prompts_given_up")


def check_step_shortened(state: State, e: ev.StepShortened) -> None:
    group = alive(state, e, e.group, UNFINISHED, COMPLETE)
    need(e.count == 1, e, "one event gives up one group")
    need(group.target_step == e.step, e, f"group {e.group} is stamped {group.target_step}, not {e.step}")


def do_step_shortened(state: State, e: ev.StepShortened) -> None:
    _drop(state, state.groups[e.group])
    _count_given_up(state, e.reason)
    state.shortfall[e.step] = state.shortfall.get(e.step, 0) + e.count
    state.dropped[e.step] = state.dropped.get(e.step, 0) + e.count


def _drop(state: State, group: Group) -> None:
    """The group is gone by decision. Its running attempts stay on the books until their tokens are known."""
    state.leave(group)
    for index, sibling in enumerate(group.siblings):
        if sibling.status == DISPATCHED:
            state.zombies[group.key(index)] = None
            state.open_attempts -= 1
    del state.groups[group.id]
    state.discarded += 1
    if group.sealed:
        state.uncleared[group.id] = group.sealed_row_keys()


def check_group_discarded(state: State, e: ev.GroupDiscarded) -> None:
    alive(state, e, e.group, POOL, RESERVED, UNFINISHED, COMPLETE, COMMITTED)
    need(e.requeued_as in (-1, state.next_group), e, f"requeued as {e.requeued_as}, expected {state.next_group}")


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
    requeue(state, e.t, group, e.requeued_as)
    count(state, f"discarded_{e.reason}")
    _count_given_up(state, e.reason)
