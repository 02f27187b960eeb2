"""Rules of attempts. Each pair: a check that changes nothing, an effect that can't fail after it."""

from __future__ import annotations

from typing import Any

from . import events as ev
from .rules import GIVES_UP_SEALED, STARTS_AGAIN, IllegalTransition, alive, count, need
from .state import COMMITTED, COMPLETE, DISPATCHED, IDLE, SEALED, UNFINISHED, Group, GroupStatus, Sibling, State


def check_attempt_dispatched(state: State, e: ev.AttemptDispatched) -> None:
    group = state.groups.get(e.group)
    if group is None or group.status != UNFINISHED or not 0 <= e.sibling < len(group.siblings):
        group = alive(state, e, e.group, UNFINISHED)
        need(False, e, f"group {e.group} has no sibling {e.sibling}")
    sibling = group.siblings[e.sibling]
    if sibling.status != IDLE or e.attempt != sibling.attempt + 1 or state.needs_restore:
        need(not state.needs_restore, e, "the restore is not completed")
        need(sibling.status == IDLE, e, f"group {e.group} sibling {e.sibling} is running or sealed")
        need(False, e, f"attempt {e.attempt} after {sibling.attempt}")


def do_attempt_dispatched(state: State, e: ev.AttemptDispatched) -> None:
    group = state.groups[e.group]
    sibling = group.siblings[e.sibling]
    if e.prefix or sibling.source_attempt >= 0:
        _note_source(sibling, e)
    sibling.status = DISPATCHED
    sibling.attempt = e.attempt
    sibling.incarnation = state.incarnation
    sibling.worker = e.worker
    sibling.branch = e.branch
    sibling.version = e.version
    sibling.prefix = e.prefix
    sibling.resumable = True
    sibling.dispatched_t = e.t
    state.open_attempts += 1
    if group.version_min < 0:  # the group's first dispatch: staleness counts from here, not from its admission
        group.version_min = e.version
        state.leave(group)
        group.start_weight = state.scheduling_version(e.branch, e.version)
        state.enter(group)


def _note_source(sibling: Sibling, e: ev.AttemptDispatched) -> None:
    """Remember who holds the prefix: the attempt before this one, or the one that it had its own prefix from."""
    if not e.prefix:
        sibling.source_attempt, sibling.source_incarnation, sibling.source_worker = -1, 0, -1
    elif e.prefix_from == sibling.attempt:
        sibling.source_attempt = sibling.attempt
        sibling.source_incarnation = sibling.incarnation
        sibling.source_worker = sibling.worker


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
    group = state.groups.get(e.group)
    if group is not None and 0 <= e.sibling < len(group.siblings):  # written out: half of all events are seals
        sibling = group.siblings[e.sibling]
        if sibling.status == DISPATCHED and sibling.attempt == e.attempt and e.receipt.tokens >= 0:
            return
    _attempt(state, e, DISPATCHED)
    need(False, e, "a negative token count")


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
    sibling = group.siblings[e.sibling]
    sibling.status = IDLE
    sibling.resumable = False
    state.open_attempts -= 1
    if e.kind == ev.FAIL_DATA:
        group.data_failures += 1
    else:
        group.infra_failures += 1
    count(state, "tokens_thrown_away", e.tokens)


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
    need(group.status in (UNFINISHED, COMPLETE, COMMITTED), e, f"group is {GroupStatus(group.status).name}")


def do_attempt_abandoned(state: State, e: ev.AttemptAbandoned) -> None:
    count(state, f"abandoned_{e.reason}")
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
    sibling.resumable = e.reason not in STARTS_AGAIN
    state.open_attempts -= 1
    if e.reason == ev.ABANDON_WORKER_LOST and sibling.worker != group.lost_worker:
        group.worker_losses += 1
        group.lost_worker = sibling.worker
