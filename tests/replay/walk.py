"""A seeded random walk over legal transitions, for tests of the fold: it knows the rules only through ``apply``'s
refusals and keeps its own books of prompts, with no code shared with the state."""

from __future__ import annotations

import random
from typing import Any

from unlost.replay import events as ev
from unlost.replay.state import State
from unlost.replay.transitions import IllegalTransition, apply


class Walk:
    """Applies random events; ``fates`` maps group -> where its prompt is, by the walk's own reading of the events."""

    def __init__(self, seed: int, generations: int = 2, prompts: int = 3) -> None:
        self.random = random.Random(seed)
        self.state = State()
        self.events: list[ev.Event] = []
        self.fates: dict[int, str] = {}
        self.refused = 0
        self.generations = generations
        self.prompts = prompts
        self.t = 0
        self.start(1)

    def start(self, incarnation: int) -> None:
        self.try_event(ev.RunStarted(self.t, "run", incarnation, 10**15 + self.t, "host", 1, {"dataset": "d"}, {}, {}))
        self.try_event(ev.WorkerStarted(self.t, incarnation * 10, f"i{incarnation}-w{incarnation * 10}"))

    def try_event(self, event: ev.Event) -> bool:
        before = self.state.image()
        try:
            apply(self.state, self.state.offset, event)
        except IllegalTransition:
            assert self.state.image() == before, "a refused event changed the state"
            self.refused += 1
            return False
        self.events.append(event)
        self._book(event)
        self.t += self.random.randrange(1, 50)
        return True

    def _book(self, e: Any) -> None:
        """What the event says of each prompt, read directly."""
        match e:
            case ev.BatchReserved():
                where = "spare" if e.kind == ev.KIND_SPARE else "unfinished"
                for i in range(len(e.prompts)):
                    self.fates[e.first_group + i] = where
                for g in e.pool_groups:
                    self.fates[g] = "unfinished"
            case ev.PromptReplaced():
                self.fates[e.group], self.fates[e.spare] = "discarded", "unfinished"
            case ev.StepShortened() | ev.GroupDiscarded():
                self.fates[e.group] = "discarded"
                if getattr(e, "requeued_as", -1) >= 0:
                    self.fates[e.requeued_as] = "spare"
            case ev.AttemptSealed():
                if all(s.receipt for s in self.state.groups[e.group].siblings):
                    self.fates[e.group] = "complete"
            case ev.AttemptAbandoned():
                if e.reason == ev.ABANDON_PAYLOAD_LOST:
                    self.fates[e.group] = "unfinished"
            case ev.GroupEvicted():
                self.fates[e.group] = "evicted"
                if e.requeued_as >= 0:
                    self.fates[e.requeued_as] = "spare"
            case ev.StepClaimed():
                self.fates |= dict.fromkeys(e.groups, "claimed")
            case ev.StepApplied():
                self.fates |= {g: "trained" for g, f in self.fates.items() if f == "claimed"}
            case ev.TrainerRolledBack():
                self.fates |= dict.fromkeys(e.groups, "complete")

    def step(self) -> None:
        """One random proposal; many are refused, which is part of the test."""
        r, s = self.random, self.state
        pools = [list(p) for p in (s.unfinished, s.unfinished, s.complete, s.committed, s.groups) if p]
        anyone = r.choice(r.choice(pools)) if pools else 0
        whole = next(iter(s.complete), anyone)
        group = s.groups.get(anyone)
        index = r.randrange(self.generations)
        attempt = group.siblings[index].attempt if group else 0
        receipt = ev.Receipt(
            r.random(), 5, s.trainer_version, s.trainer_version, "w", 1, 7, ((0, s.branch, s.trainer_version),)
        )
        refs = tuple(ev.PromptRef(str(s.next_group + i), 0, s.next_group + i, 1) for i in range(self.prompts))
        kind = r.choices((ev.KIND_ORDINARY, ev.KIND_SPARE), (4, 1))[0]
        admission = next(iter(s.reserved), 0)
        target = s.dispatch_index + 1
        ready = list(s.committed)[: self.prompts]
        checkpoint = next(iter(s.started), 0)
        cut = s.started[checkpoint].cut if checkpoint in s.started else 0
        spare = next(iter(s.spares), -1)
        t = self.t
        proposals: list[tuple[int, ev.Event]] = [
            (3, ev.BatchReserved(t, s.next_admission, s.next_group, refs, self.generations, 0, s.position + 3, kind)),
            (3, ev.BatchAdmitted(t, admission, target, target, s.trainer_version)),
            (12, ev.AttemptDispatched(t, anyone, index, attempt + 1, 1, s.branch, s.trainer_version)),
            (12, ev.AttemptSealed(t, anyone, index, attempt, receipt)),
            (1, ev.AttemptFailed(t, anyone, index, attempt, ev.FAIL_DATA, "x")),
            (1, ev.AttemptAbandoned(t, anyone, index, attempt, r.choice((ev.ABANDON_STALE, ev.ABANDON_PAYLOAD_LOST)))),
            (8, ev.GroupCommitted(t, whole, 2, 10, 0, 0)),
            (1, ev.GroupEvicted(t, anyone, "stale", r.choice((-1, s.next_group)))),
            (1, ev.GroupDiscarded(t, anyone, "dropped", "", r.choice((-1, s.next_group)))),
            (1, ev.StepShortened(t, anyone, "dropped", group.target_step if group else 0)),
            (
                1,
                ev.PromptReplaced(
                    t,
                    anyone,
                    "dropped",
                    group.target_step if group else 0,
                    spare,
                    group.target_step if group else 0,
                    s.trainer_version,
                ),
            ),
            (4, ev.StepClaimed(t, s.trainer_version, tuple(ready))),
            (4, ev.StepApplied(t, s.trainer_version, s.trainer_version + 1)),
            (2, ev.RowsCleared(t, tuple(s.uncleared))),
            (2, ev.CheckpointStarted(t, s.next_checkpoint, "trainer", s.trainer_version)),
            (
                2,
                ev.CheckpointCommitted(
                    t,
                    checkpoint,
                    "trainer",
                    s.started[checkpoint].trainer_version if checkpoint in s.started else 0,
                    cut,
                    "n",
                    "d",
                    1,
                    0.1,
                    r.choice((s.floor, max(s.floor, s.trainer_version - 2))),
                ),
            ),
        ]
        weights = [w for w, _ in proposals]
        self.try_event(r.choices([e for _, e in proposals], weights)[0])

    def crash_and_restore(self) -> None:
        """A new incarnation takes over, as the restore does it."""
        from unlost.replay.transitions import returned_groups

        s, t = self.state, self.t
        self.start(s.incarnation + 1)
        versions = [c.trainer_version for c in s.checkpoints if s.floor <= c.trainer_version]
        to = self.random.choice(versions) if versions else (0 if s.floor == 0 else None)
        if to is None:
            to = s.trainer_version
        assert self.try_event(ev.RestoreStarted(t, 0, s.trainer_version, to))
        groups = tuple(returned_groups(s, to))
        branch = s.branch + (to < s.trainer_version)
        if groups or to < s.trainer_version or s.open_step >= 0:
            assert self.try_event(ev.TrainerRolledBack(t, s.trainer_version, to, branch, groups))
        for group in list(s.groups.values()):
            for index, sibling in enumerate(group.siblings):
                if sibling.status == 1:
                    assert self.try_event(ev.AttemptAbandoned(t, group.id, index, sibling.attempt, "restart"))
        for key in list(s.zombies):
            assert self.try_event(ev.AttemptAbandoned(t, key.group, key.sibling, key.attempt, "restart"))
        assert self.try_event(ev.RestoreCompleted(t, {}, 0.1))
