"""What a run with a kill in it comes to, read from its event journal alone.

Nothing is taken from the processes: every figure can be had again later with ``unlost events`` and ``unlost replay``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..replay.events import Event
    from ..replay.state import State


@dataclass(slots=True)
class Owned:
    """What the journal says was owned when the process died."""

    offset: int
    trainer_version: int
    checkpoint_version: int
    trained: int
    claimed: int
    complete: int
    unfinished: int
    siblings_sealed: int
    siblings_running: int
    siblings_idle: int
    tokens_sealed: int
    sealed: set[tuple[int, int]]
    promise_holds: bool


def owned(state: State) -> Owned:
    """Count who owns what in a folded state; ``sealed`` are the (group, sibling) that must never be generated again."""
    from ..replay.state import COMMITTED, COMPLETE, DISPATCHED, RESERVED, SEALED, UNFINISHED

    prompts = state.summary()["prompts"]
    versions = [c.trainer_version for c in state.checkpoints if c.committed and c.kind == "trainer"]
    alive = [g for g in state.groups.values() if g.status in (RESERVED, UNFINISHED)]
    states = Counter(sibling.status for group in alive for sibling in group.siblings)
    sealed = {(g.id, i) for g in state.groups.values() for i, s in enumerate(g.siblings) if s.status == SEALED}
    receipts = [s.receipt for g in alive for s in g.siblings if s.status == SEALED and s.receipt is not None]
    receipts += [
        s.receipt
        for g in state.groups.values()
        if g.status in (COMPLETE, COMMITTED)
        for s in g.siblings
        if s.receipt is not None
    ]
    return Owned(
        offset=state.offset,
        trainer_version=state.trainer_version,
        checkpoint_version=max(versions, default=0),
        trained=len(prompts["trained"]) + prompts["trained_retired"],
        claimed=len(prompts["claimed"]),
        complete=len(prompts["complete"]),
        unfinished=len(prompts["unfinished"]),
        siblings_sealed=states[SEALED],
        siblings_running=states[DISPATCHED],
        siblings_idle=sum(states.values()) - states[SEALED] - states[DISPATCHED],
        tokens_sealed=sum(receipt.tokens for receipt in receipts),
        sealed=sealed,
        promise_holds=bool(prompts["holds"]),
    )


@dataclass(slots=True)
class Figures:
    """The whole run. ``rewards``: (step, mean reward) of the steps that stand, rolled-back ones left out.

    ``hidden``: tokens that the attempts cut off by the kill had made and no journal holds, at most; None: no bound.
    """

    rewards: list[tuple[int, float]] = field(default_factory=list)
    trained_twice: list[int] = field(default_factory=list)
    sealed_again: list[tuple[int, int]] = field(default_factory=list)
    rolled_back: tuple[int, int] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    restore_seconds: float = 0.0
    interrupted: int = 0
    hidden: int | None = 0
    prefixes: int = 0
    incarnations: int = 0
    ended: str = ""


def figures(events: Iterable[tuple[int, Event]], death: Owned) -> Figures:
    """Go through a run's events once. ``death``: what was owned at the kill, whose offset parts before from after."""
    from ..replay import events as ev
    from ..replay.bounds import unheard

    found = Figures()
    settings: list[dict[str, Any]] = []
    prefixes: dict[tuple[int, int, int], int] = {}
    cut_off: list[int] = []
    claimed: list[int] = []
    steps: dict[int, tuple[list[int], float]] = {}
    for offset, event in events:
        after = offset >= death.offset
        if isinstance(event, ev.RunStarted):
            found.incarnations = event.incarnation
            settings.append(event.settings)
        elif isinstance(event, ev.RunEnded):
            found.ended = event.reason
        elif isinstance(event, ev.StepClaimed):
            claimed.extend(event.groups)
        elif isinstance(event, ev.StepApplied):
            steps[event.step] = (claimed, event.reward_mean)
            claimed = []
        elif isinstance(event, ev.TrainerRolledBack):
            claimed = []
            steps = {step: kept for step, kept in steps.items() if step < event.to_version}
            if after and event.from_version != event.to_version:
                found.rolled_back = (event.from_version, event.to_version)
        elif isinstance(event, ev.RestoreCompleted) and after:
            found.counters, found.restore_seconds = event.counters, event.seconds
        elif isinstance(event, ev.AttemptAbandoned) and after and event.reason == ev.ABANDON_RESTART:
            found.interrupted += 1
            cut_off.append(max(event.tokens, prefixes.get((event.group, event.sibling, event.attempt), 0)))
        elif isinstance(event, ev.AttemptDispatched):
            if event.prefix:
                prefixes[event.group, event.sibling, event.attempt] = event.prefix
            if after:
                found.prefixes += event.prefix > 0
                if (event.group, event.sibling) in death.sealed:
                    found.sealed_again.append((event.group, event.sibling))
    bound = unheard(settings)
    hidden = [bound.at_most(held) for held in cut_off]
    found.hidden = None if None in hidden else sum(h for h in hidden if h is not None)
    counts = Counter(group for groups, _ in steps.values() for group in groups)
    found.trained_twice = sorted(group for group, times in counts.items() if times > 1)
    found.rewards = [(step, reward) for step, (_, reward) in sorted(steps.items())]
    return found


def read_figures(run: Path, death: Owned) -> Figures:
    """The same from a run's folder."""
    from ..replay.fold import open_events

    reader = open_events(run)
    return figures(reader.events(reader.first_offset), death)


def problems(death: Owned, final: dict[str, Any], found: Figures) -> list[str]:
    """What would make the demo a failure; empty if all is as promised. ``final``: the summary of the last state."""
    wrong = []
    if not death.promise_holds:
        wrong.append(f"at offset {death.offset} a prompt was lost or owned twice")
    if not final["prompts"]["holds"]:
        wrong.append("at the end a prompt was lost or owned twice")
    if found.trained_twice:
        wrong.append(f"groups trained twice: {found.trained_twice}")
    if found.sealed_again:
        wrong.append(f"finished siblings generated again: {found.sealed_again}")
    if not found.counters:
        wrong.append("no completed restore is in the journal")
    if found.ended != "finished":
        wrong.append(f"the run did not finish: {found.ended or 'no end in the journal'}")
    return wrong
