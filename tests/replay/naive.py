# ruff: noqa: N802 - handlers are named after their events
"""An independent answer to the canned questions: one plain pass over the events, no SQL, nothing shared with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from unlost.replay import events as ev

STALE = (ev.ABANDON_STALE, ev.DISCARD_STALE_IN_FLIGHT)


@dataclass
class Try:
    group: int
    sibling: int
    attempt: int
    life: int
    worker: int
    prefix: int
    began: float
    offset: int
    how: str = "open"
    reason: str = ""
    end: float = 0.0
    end_max: float | None = None
    ended_at: int = -1
    killed: bool = False
    tokens: int = 0
    durable: int = 0
    spans: tuple[tuple[int, int, int], ...] = ()
    reward: float = 0.0
    next: Try | None = None


@dataclass
class Grp:
    id: int
    prompt: ev.PromptRef
    size: int
    reserved_at: int
    state: str = "reserved"
    reason: str = ""
    gone_at: int = -1
    gone: float = 0.0
    sealed: dict[int, Try] = field(default_factory=dict)
    committed: bool = False
    trained_step: int = -1
    applied: int = 0
    first: float | None = None
    complete: float | None = None
    reserved: float = 0.0
    admitted: float | None = None


class Naive:
    """Feed all events; then read the attributes."""

    def __init__(self, events: list[ev.Event]) -> None:
        self.tries: dict[tuple[int, int, int], Try] = {}
        self.last: dict[tuple[int, int], Try] = {}
        self.groups: dict[int, Grp] = {}
        self.batches: dict[int, list[int]] = {}
        self.life = 0
        self.lives: list[tuple[int, float]] = []
        self.deaths: dict[int, tuple[float, float]] = {}
        self.claims: list[int] = []
        self.steps: list[dict[str, Any]] = []
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.skipped = 0
        self.restores: list[dict[str, Any]] = []
        self.counted: dict[int, int] = {}
        self.branch = 0
        self.caps: list[int] = []
        self.pauses = 0.0
        self.t = 0.0
        self.ended = False
        for offset, event in enumerate(events):
            handler = getattr(self, f"on_{type(event).__name__}", None)
            now = event.t / 1e6
            if handler is not None:
                handler(offset, now, event)
            self.t = now
        for t in self.tries.values():
            if t.how == "open":
                t.end = self.t

    def on_RunStarted(self, offset, now, e):
        if self.life and not self.ended:
            self.deaths[self.life] = (self.t, now)
        self.life, self.ended = e.incarnation, False
        self.lives.append((offset, now))
        for t in self.tries.values():
            if t.how == "open":
                t.killed, t.end, t.end_max = True, max(self.t, t.began), now

    def on_RunEnded(self, offset, now, e):
        self.ended = True
        for worker, tokens in e.generated:
            self.counted[worker] = max(self.counted.get(worker, 0), tokens)

    def on_BatchReserved(self, offset, now, e):
        self.batches[e.admission_id] = list(range(e.first_group, e.first_group + len(e.prompts)))
        for group, prompt in enumerate(e.prompts, e.first_group):
            self.groups[group] = Grp(group, prompt, e.generations, offset, reserved=now)

    def on_BatchAdmitted(self, offset, now, e):
        for group in self.batches[e.admission_id]:
            self.groups[group].state, self.groups[group].admitted = "unfinished", now

    def on_AttemptDispatched(self, offset, now, e):
        t = Try(e.group, e.sibling, e.attempt, self.life, e.worker, e.prefix, now, offset)
        before = self.last.get((e.group, e.sibling))
        if before is not None:
            before.next = t
        self.last[e.group, e.sibling] = self.tries[e.group, e.sibling, e.attempt] = t
        if self.groups[e.group].first is None:
            self.groups[e.group].first = now
        if self.restores and self.restores[-1]["dispatch"] is None:
            self.restores[-1]["dispatch"] = now

    def _end(self, offset, now, e, how):
        t = self.tries[e.group, e.sibling, e.attempt]
        t.how, t.ended_at = how, offset
        if not t.killed:
            t.end = t.end_max = now
        return t

    def on_AttemptSealed(self, offset, now, e):
        t = self._end(offset, now, e, "sealed")
        t.tokens, t.spans, t.reward = e.receipt.tokens, e.receipt.weight_spans, e.receipt.reward
        group = self.groups[e.group]
        group.sealed[e.sibling] = t
        if len(group.sealed) == group.size:
            group.complete = now
            group.state = "complete"

    def on_AttemptFailed(self, offset, now, e):
        t = self._end(offset, now, e, "failed")
        t.tokens, t.reason = e.tokens, e.kind

    def on_AttemptAbandoned(self, offset, now, e):
        t = self._end(offset, now, e, "abandoned")
        t.tokens, t.durable, t.reason = e.tokens, e.durable, e.reason

    def on_GroupDiscarded(self, offset, now, e):
        self._gone(offset, now, e, "discarded")

    def on_GroupEvicted(self, offset, now, e):
        self._gone(offset, now, e, "evicted")

    def _gone(self, offset, now, e, state):
        group = self.groups[e.group]
        group.state, group.reason, group.gone_at, group.gone = state, e.reason, offset, now

    def on_GroupCommitted(self, offset, now, e):
        self.groups[e.group].state = "committed"

    def on_StepClaimed(self, offset, now, e):
        self.claims += e.groups
        for group in e.groups:
            self.groups[group].state = "claimed"
        for restore in self.restores:
            if restore["completed"] is not None and restore["claim"] is None:
                restore["claim"] = offset

    def on_StepApplied(self, offset, now, e):
        step = {"step": e.step, "branch": self.branch, "groups": self.claims, "undone": False, "seconds": e.seconds}
        step["ages"] = self._ages(e.step, self.claims)
        self.steps.append(step)
        for group in self.claims:
            self.groups[group].state, self.groups[group].trained_step = "trained", e.step
            self.groups[group].applied += 1
        self.claims = []
        for worker, tokens in e.generated:
            self.counted[worker] = max(self.counted.get(worker, 0), tokens)

    def _ages(self, step, groups):
        """(tokens, age) of every span that the step trains on."""
        found = []
        for group in groups:
            for t in self.groups[group].sealed.values():
                ends = [first for first, _, _ in t.spans[1:]] + [t.tokens]
                for (first, branch, version), end in zip(t.spans, ends, strict=True):
                    cap = min([self.caps[b] for b in range(branch, len(self.caps))], default=version)
                    found.append((end - first, step - min(version, cap)))
        return found

    def on_WeightsSynced(self, offset, now, e):
        self.pauses += e.seconds

    def on_CheckpointStarted(self, offset, now, e):
        self.checkpoints[e.checkpoint] = {"kind": e.kind, "cut": now, "how": "unfinished", "end": None, "at": None}

    def on_CheckpointCommitted(self, offset, now, e):
        self.checkpoints[e.checkpoint] |= {"how": "committed", "end": now, "at": offset}

    def on_CheckpointFailed(self, offset, now, e):
        self.checkpoints[e.checkpoint] |= {"how": "failed", "end": now}

    def on_CheckpointSkipped(self, offset, now, e):
        self.skipped += 1

    def on_RestoreStarted(self, offset, now, e):
        self.restores.append(
            {
                "started": now,
                "completed": None,
                "claim": None,
                "dispatch": None,
                "first": self.lives[-1][0],
                "life": self.life,
            }
        )

    def on_RestoreCompleted(self, offset, now, e):
        self.restores[-1] |= {"completed": offset, "counters": e.counters}

    def on_TrainerRolledBack(self, offset, now, e):
        for step in self.steps:
            if step["step"] >= e.to_version and not step["undone"]:
                step["undone"] = True
        for group in e.groups:
            self.groups[group].state, self.groups[group].trained_step = "committed", -1
        self.claims = []
        if e.branch != self.branch:
            self.branch = e.branch
            self.caps.append(e.to_version)

    def on_WorkerStopped(self, offset, now, e):
        if e.generated >= 0:
            self.counted[e.worker] = max(self.counted.get(e.worker, 0), e.generated)

    # --- answers ------------------------------------------------------------------------------------------------------

    def held(self, t: Try) -> int:
        return max(t.tokens, t.prefix, t.next.prefix if t.next else 0)

    def kept(self, t: Try) -> int:
        if t.how == "sealed":
            return self.held(t)
        if t.next is not None:
            return t.next.prefix
        if t.how == "open":
            return self.held(t)
        return t.durable if t.how == "abandoned" else 0

    def invested(self) -> dict[int, float]:
        """Seconds behind each attempt's tokens: its own, and those taken over with the prefix."""
        carried: dict[int, float] = {}
        found: dict[int, float] = {}
        for t in sorted(self.tries.values(), key=lambda t: t.attempt):
            total = carried.get(id(t), 0.0) + t.end - t.began
            found[id(t)] = total
            if t.next is not None and self.held(t):
                carried[id(t.next)] = total * self.kept(t) / self.held(t)
        return found

    def losses(self) -> tuple[Counter, Counter, Counter]:
        """Losses, seconds and tokens by class."""
        count, seconds, tokens = Counter(), Counter(), Counter()
        invested = self.invested()

        def lose(kind, s, n):
            count[kind] += 1
            seconds[kind] += s
            tokens[kind] += n

        for t in self.tries.values():
            group = self.groups[t.group]
            held, kept = self.held(t), self.kept(t)
            share = (held - kept) / held if held else 1.0
            if t.how in ("failed", "abandoned"):
                kind = {"failed": "failed"}.get(t.how) or {"restart": "in_flight", "stale": "stale_aborted"}.get(
                    t.reason, t.reason
                )
                if t.reason == ev.ABANDON_GROUP_DISCARDED:
                    kind = self.gone_class(group)
                lose(kind, invested[id(t)] * share, held - kept)
            if group.gone_at >= 0 and t.next is None:
                if t.how in ("sealed", "open"):
                    lose(self.gone_class(group), invested[id(t)], kept)
                elif kept:
                    lose(self.gone_class(group), invested[id(t)] * (1 - share), kept)
        for step in self.steps:
            if step["undone"]:
                lose("rolled_back_training", step["seconds"], 0)
        return count, seconds, tokens

    def gone_class(self, group: Grp) -> str:
        if group.reason in STALE:
            for r in self.restores:
                after = r["completed"] is not None and r["completed"] < group.gone_at and group.reserved_at < r["first"]
                if after and (r["claim"] is None or group.gone_at < r["claim"]):
                    return "stale_at_restore"
            return "stale_evicted" if group.state == "evicted" else "stale_aborted"
        return group.reason

    def by_sibling(self) -> dict[tuple[int, int], list[Try]]:
        found = defaultdict(list)
        for t in sorted(self.tries.values(), key=lambda t: t.attempt):
            found[t.group, t.sibling].append(t)
        return found
