"""The folded state as plain data for ``unlost replay``, and promise P1 as a check on it."""

from __future__ import annotations

from typing import Any

from .state import (
    CLAIMED,
    COMMITTED,
    COMPLETE,
    POOL,
    RESERVED,
    TRAINED,
    UNFINISHED,
    Group,
    GroupStatus,
    SiblingStatus,
    State,
)


def prompt_sets(state: State) -> dict[str, Any]:
    """The sets of promise P1: every prompt handed out by the loader is in exactly one of them.

    Group ids where groups are still in memory, counts for what is retired. ``handed_out`` counts groups; a requeued
    prompt counts again under its new group id, its old one among the discarded or evicted.
    """
    by_status: dict[int, list[int]] = {int(s): [] for s in GroupStatus}
    for group in state.groups.values():
        by_status[group.status].append(group.id)
    sets = {
        "trained_retired": state.retired_trained,
        "trained": sorted(by_status[TRAINED]),
        "claimed": sorted(by_status[CLAIMED]),
        "complete": sorted(by_status[COMPLETE] + by_status[COMMITTED]),
        "unfinished": sorted(by_status[RESERVED] + by_status[UNFINISHED]),
        "spare": sorted(by_status[POOL]),
        "discarded": state.discarded,
        "evicted": state.evicted,
        "handed_out": state.next_group,
    }
    alive = len(state.groups)
    sets["holds"] = state.next_group == alive + state.retired_trained + state.discarded + state.evicted and (
        sorted(state.trained_groups()) == sets["trained"] and sorted(state.open_groups) == sets["claimed"]
    )
    return sets


def _group(group: Group) -> dict[str, Any]:
    return {
        "group": group.id,
        "prompt": group.prompt.sample_id,
        "epoch": group.prompt.epoch,
        "status": GroupStatus(group.status).name.lower(),
        "target_step": group.target_step if group.target_step >= 0 else None,
        "start_weight": group.start_weight if group.start_weight >= 0 else None,
        "siblings": [
            {
                "sibling": index,
                "status": SiblingStatus(s.status).name.lower(),
                "attempt": s.attempt if s.attempt >= 0 else None,
                "worker": s.worker if s.worker >= 0 else None,
                "incarnation": s.incarnation or None,
                "tokens": s.receipt.tokens if s.receipt else None,
                "reward": s.receipt.reward if s.receipt else None,
            }
            for index, s in enumerate(group.siblings)
        ],
    }


def summarize(state: State) -> dict[str, Any]:
    """JSON-able: where the run stands, who owns what, and whether P1 holds."""
    groups = sorted(state.groups.values(), key=lambda g: g.id)
    return {
        "run_id": state.run_id,
        "offset": state.offset,
        "t_us": state.t,
        "incarnation": state.incarnation,
        "ended": state.ended or None,
        "needs_restore": state.needs_restore,
        "trainer": {
            "step": state.open_step if state.open_step >= 0 else None,
            "version": state.trainer_version,
            "branch": state.branch,
            "synced_version": state.synced_version if state.synced_version >= 0 else None,
        },
        "loader": {"epoch": state.epoch, "position": state.position},
        "dispatch_index": state.dispatch_index,
        "reserved_batches": {b.admission_id: b.groups for b in state.reserved.values()},
        "spares": list(state.spares),
        "requeued": list(state.requeued),
        "groups": {
            status.name.lower(): [_group(g) for g in groups if g.status == status]
            for status in GroupStatus
            if status != GroupStatus.TRAINED
        },
        "applied_steps": {step: sorted(ids) for step, ids in sorted(state.applied.items())},
        "shortfall": state.shortfall,
        "open_attempts": state.open_attempts,
        "checkpoints": [
            {"id": c.id, "kind": c.kind, "version": c.trainer_version, "cut": c.cut, "name": c.name}
            for c in state.checkpoints
        ],
        "floor": state.floor,
        "counters": dict(sorted(state.counters.items())),
        "prompts": prompt_sets(state),
    }
