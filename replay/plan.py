"""What a restart does, as a pure function of the folded state and of what the payload journals hold.

``plan_restore`` changes nothing; the restore carries the plan out, ``unlost plan`` prints it. Carrying it out twice,
or half and then again, ends in the same state: what is done already is no longer in the next plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from . import events as ev
from .payloads import AttemptTail
from .state import COMMITTED, COMPLETE, DISPATCHED, RESERVED, SEALED, UNFINISHED, Checkpoint, Group, State
from .transitions import returned_groups

COUNTERS = (
    "groups_complete_restored",
    "groups_unfinished_found",
    "siblings_reused",
    "siblings_rerun",
    "groups_rolled_back",
    "groups_dropped_stale",
    "prefix_tokens_reused",
    "rows_put_back",
    "rows_cleared",
    "attempts_adopted",
    "attempts_lost",
    "tokens_lost_known",
)
"""All emitted together, zeros too. ``attempts_lost``: sealed ones whose payload is gone. ``tokens_lost_known``: durable
tokens that are not reused (``prefix: regenerate``, or a lost payload)."""


@dataclass(slots=True)
class SiblingAction:
    """``action``: reuse, adopt, resume (from ``prefix`` tokens), run, regenerate (its payload is lost)."""

    sibling: int
    action: str
    prefix: int = 0
    reason: str = ""


@dataclass(slots=True)
class GroupAction:
    """``action``: restore (complete), relaunch (unfinished), admit (reserved, never admitted), keep (spare)."""

    group: int
    action: str
    target_step: int
    siblings: list[SiblingAction] = field(default_factory=list)


@dataclass(slots=True)
class RestorePlan:
    """``checkpoint`` None: from step 0. ``adopt``/``abandon``/``lost`` are events to write, in this order."""

    checkpoint: Checkpoint | None
    from_version: int
    to_version: int
    rolled_back: list[int]
    adopt: list[tuple[ev.AttemptKey, ev.Receipt]]
    abandon: list[tuple[ev.AttemptKey, str, int]]
    lost: list[tuple[ev.AttemptKey, str]]
    prefixes: dict[tuple[int, int], AttemptTail]
    groups: list[GroupAction]
    counters: dict[str, int]


def attempts_to_look_for(state: State) -> dict[ev.AttemptKey, str]:
    """Attempt -> payload journal, for every sibling that is not sealed and was ever tried (protocol rules 8 to 10).

    Besides the latest attempt the one that it had its prefix from: a crash may come before the prefix is durable again.
    """
    found: dict[ev.AttemptKey, str] = {}
    for group in state.groups.values():
        if group.status != UNFINISHED:
            continue
        for index, sibling in enumerate(group.siblings):
            if sibling.status != SEALED and sibling.attempt >= 0 and sibling.resumable:
                found |= holders(state, group, index)
    return found


def holders(state: State, group: Group, index: int) -> dict[ev.AttemptKey, str]:
    """The sibling's latest attempt and the one that it had its prefix from -> payload journal ("": not known)."""
    sibling, source = group.siblings[index], group.source_key(index)
    found = {group.key(index): _journal(state, sibling.worker)}
    if source is not None:
        found[source] = _journal(state, sibling.source_worker)
    return found


def _journal(state: State, worker: int) -> str:
    known = state.workers.get(worker)
    return known.journal if known is not None else ""


def longest_tail(tails: Mapping[ev.AttemptKey, AttemptTail], group: Group, index: int) -> AttemptTail | None:
    """The sibling's longest durable prefix: its latest attempt's, or the one that this had its own from."""
    tail = tails.get(group.key(index))
    source = group.source_key(index)
    older = tails.get(source) if source is not None else None
    if older is None or (tail is not None and tail.prefix_tokens >= older.prefix_tokens):
        return tail
    return older


def candidates(state: State) -> list[Checkpoint]:
    """Trainer checkpoints of this history that a restore may use, newest first (protocol rules 13, 15).

    Those whose commit was not written down are among them: a manifest that verifies says that they were published.
    """
    known = [c for c in state.checkpoints if c.kind == ev.CHECKPOINT_TRAINER]
    known += [c for c in state.started.values() if c.kind == ev.CHECKPOINT_TRAINER]
    usable = [c for c in known if state.floor <= c.trainer_version <= state.trainer_version]
    return sorted(usable, key=lambda c: (c.trainer_version, c.id), reverse=True)


def plan_restore(
    state: State,
    tails: Mapping[ev.AttemptKey, AttemptTail],
    checkpoint: Checkpoint | None,
    *,
    lost: Collection[ev.AttemptKey] = (),
    resume_prefixes: bool = True,
    granularity: str = "sibling",
) -> RestorePlan:
    """Decide for every group. ``lost``: sealed siblings whose row can't be had any more.

    Counters follow from the plan (protocol rule 23): a group that adoption completes counts as complete, an adopted
    sibling as reused, so that reused + rerun = sum of the unfinished groups' sizes.
    """
    to_version = checkpoint.trainer_version if checkpoint is not None else 0
    plan = RestorePlan(
        checkpoint, state.trainer_version, to_version, returned_groups(state, to_version), [], [], [], {}, [], {}
    )
    counters = dict.fromkeys(COUNTERS, 0)
    counters["groups_rolled_back"] = len(plan.rolled_back)
    returning = set(plan.rolled_back)
    killers = {worker.id for worker in state.workers.values() if worker.lost}
    for group in sorted(state.groups.values(), key=lambda g: (g.slot, g.id)):
        if group.status in (UNFINISHED, COMPLETE, COMMITTED) or group.id in returning:
            actions = _plan_group(group, tails, lost, resume_prefixes, granularity)
            _carry_into(plan, group, actions, tails, counters, killers)
        elif group.status == RESERVED:
            siblings = [SiblingAction(i, "run") for i in range(len(group.siblings))]
            plan.groups.append(GroupAction(group.id, "admit", -1, siblings))
            counters["groups_unfinished_found"] += 1
            counters["siblings_rerun"] += len(siblings)
        elif group.id in state.spares or group.id in state.requeued:
            plan.groups.append(GroupAction(group.id, "keep", -1))
    plan.counters = counters
    return plan


def owned_counts(state: State) -> dict[str, int]:
    """What protocol rule 23 counts, of the state that a restore ends with.

    A data plane that is lost meanwhile, together with payloads, takes siblings away that the plan reuses.
    """
    groups = list(state.groups.values())
    unfinished = [g for g in groups if g.status in (RESERVED, UNFINISHED)]
    sealed = sum(s.status == SEALED for g in unfinished for s in g.siblings)
    return {
        "groups_complete_restored": sum(g.status in (COMPLETE, COMMITTED) for g in groups),
        "groups_unfinished_found": len(unfinished),
        "siblings_reused": sealed,
        "siblings_rerun": sum(len(g.siblings) for g in unfinished) - sealed,
    }


def _plan_group(
    group: Group,
    tails: Mapping[ev.AttemptKey, AttemptTail],
    lost: Collection[ev.AttemptKey],
    resume_prefixes: bool,
    granularity: str,
) -> list[SiblingAction]:
    actions: list[SiblingAction] = []
    for index, sibling in enumerate(group.siblings):
        key = group.key(index)
        tail = tails.get(key)
        if sibling.status == SEALED:
            gone = key in lost
            actions.append(
                SiblingAction(index, "regenerate" if gone else "reuse", 0, ev.ABANDON_PAYLOAD_LOST if gone else "")
            )
        elif sibling.status == DISPATCHED and tail is not None and tail.sealed is not None:
            actions.append(SiblingAction(index, "adopt"))
        elif (best := longest_tail(tails, group, index)) is not None and best.prefix_tokens and resume_prefixes:
            actions.append(SiblingAction(index, "resume", best.prefix_tokens))
        else:
            actions.append(SiblingAction(index, "run"))
    if granularity == "prompt_group" and any(a.action not in ("reuse", "adopt") for a in actions):
        for action in actions:
            if action.action == "reuse":
                action.action, action.reason = "regenerate", ev.ABANDON_GRANULARITY
            elif action.action != "regenerate":
                action.action, action.prefix = "run", 0
    return actions


def _carry_into(
    plan: RestorePlan,
    group: Group,
    actions: list[SiblingAction],
    tails: Mapping[ev.AttemptKey, AttemptTail],
    counters: dict[str, int],
    killers: Collection[int],
) -> None:
    """``killers``: workers that died by themselves; what ran on them counts as lost with them, also after a crash."""
    kept = 0
    for action in actions:
        sibling = group.siblings[action.sibling]
        key = group.key(action.sibling)
        tail = tails.get(key)
        best = longest_tail(tails, group, action.sibling)
        durable = best.prefix_tokens if best is not None else 0
        if action.action == "adopt":
            assert tail is not None
            assert tail.sealed is not None
            plan.adopt.append((key, tail.sealed))
            counters["attempts_adopted"] += 1
        elif action.action == "regenerate":
            plan.lost.append((key, action.reason))
            counters["attempts_lost"] += 1
            counters["tokens_lost_known"] += sibling.receipt.tokens if sibling.receipt is not None else 0
        elif sibling.status == DISPATCHED:
            reason = ev.ABANDON_WORKER_LOST if sibling.worker in killers else ev.ABANDON_RESTART
            plan.abandon.append((key, reason, durable))
        if action.action == "resume":
            assert best is not None
            plan.prefixes[group.id, action.sibling] = best
            counters["prefix_tokens_reused"] += durable
        elif action.action == "run":
            counters["tokens_lost_known"] += durable
        kept += action.action in ("reuse", "adopt")
    complete = kept == len(actions)
    plan.groups.append(GroupAction(group.id, "restore" if complete else "relaunch", group.target_step, actions))
    if complete:
        counters["groups_complete_restored"] += 1
    else:
        counters["groups_unfinished_found"] += 1
        counters["siblings_reused"] += kept
        counters["siblings_rerun"] += len(actions) - kept


__all__ = [
    "COUNTERS",
    "GroupAction",
    "RestorePlan",
    "SiblingAction",
    "attempts_to_look_for",
    "candidates",
    "holders",
    "longest_tail",
    "owned_counts",
    "plan_restore",
]
