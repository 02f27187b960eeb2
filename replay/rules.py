"""What the rules of all transitions share."""

from __future__ import annotations

from typing import Final

from ..journal.errors import UnlostError
from . import events as ev
from .state import POOL, Group, GroupStatus, Sibling, State

ROLLOUT_SNAPSHOTS_KEPT: Final = 2
GIVES_UP_SEALED: Final = (ev.ABANDON_PAYLOAD_LOST, ev.ABANDON_GRANULARITY)
"""Reasons for which a sealed sibling has to be generated again."""
STARTS_AGAIN: Final = (ev.ABANDON_WEIGHT_SYNC, ev.ABANDON_STALE, ev.ABANDON_GROUP_DISCARDED)
"""Reasons after which what the attempt had generated is not wanted any more."""


class IllegalTransition(UnlostError):
    """The event is not allowed in this state. In a fold: the journal was written by another program or a defect."""


def need(ok: bool, event: ev.Event, why: str) -> None:
    if not ok:
        raise IllegalTransition(f"{type(event).__name__} refused: {why}")


def alive(state: State, event: ev.Event, group_id: int, *statuses: int) -> Group:
    group = state.groups.get(group_id)
    if group is None:
        raise IllegalTransition(f"{type(event).__name__} refused: group {group_id} is not alive")
    if group.status not in statuses:
        allowed = " or ".join(GroupStatus(s).name for s in statuses)
        raise IllegalTransition(
            f"{type(event).__name__} refused: group {group_id} is {GroupStatus(group.status).name}, not {allowed}"
        )
    return group


def count(state: State, name: str, by: int = 1) -> None:
    state.counters[name] = state.counters.get(name, 0) + by


def note_generated(state: State, generated: tuple[tuple[int, int], ...]) -> None:
    """Keep the workers' own cumulative counts of generated tokens."""
    for worker_id, tokens in generated:
        worker = state.workers.get(worker_id)
        if worker is not None:
            worker.generated = max(worker.generated, tokens)


def requeue(state: State, t: int, group: Group, new_id: int) -> None:
    """The prompt of a group that is gone lives on, unserved, under a new id; its failure budgets go with it."""
    if new_id >= 0:
        state.next_group += 1
        siblings = [Sibling() for _ in group.siblings]
        again = Group(new_id, group.prompt, POOL, group.admission_id, siblings, t)
        again.infra_failures, again.data_failures = group.infra_failures, group.data_failures
        again.worker_losses = group.worker_losses
        state.groups[new_id] = again
        state.requeued[new_id] = None
        count(state, "requeued")
