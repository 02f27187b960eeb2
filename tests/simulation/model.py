"""What a run must have been, told from its events and from the world outside: the simulation's oracle.

It shares no code with ``apply``: it keeps its own books, in its own shape, and never forgets a prompt. Each ``on_...``
method states what may happen then; ``Broken`` names the promise or protocol rule that did not hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from unlost.replay import events as ev

IDLE, OPEN, SEALED = "idle", "open", "sealed"
LIVE = ("spare", "requeued", "reserved", "unfinished", "buffer", "claimed")
REGENERATED_ON_PURPOSE = ("payload_lost", "prompt_group")

HANDLERS = {t.__name__: "on" + re.sub("([A-Z])", r"_\1", t.__name__).lower() for t in ev.EVENT_TYPES}


class Broken(AssertionError):
    """A promise did not hold."""


def need(ok: bool, rule: str, why: str) -> None:
    if not ok:
        raise Broken(f"{rule}: {why}")


@dataclass
class Sibling:
    status: str = IDLE
    attempt: int = -1
    incarnation: int = 0
    worker: int = -1
    ended_by: str = ""
    ended_in: int = 0  # incarnation whose journal says so
    chain: list[tuple[int, int, int]] = field(default_factory=list)  # attempts that went on from each other
    receipt: ev.Receipt | None = None

    def row(self, group: int, index: int) -> str:
        return f"i{self.incarnation}.g{group}.s{index}.a{self.attempt}"


@dataclass
class Group:
    id: int
    prompt: ev.PromptRef
    fate: str
    admission: int
    siblings: list[Sibling]
    target: int = -1
    slot: int = -1
    replacements: int = 0
    trained_in: int = -1

    @property
    def complete(self) -> bool:
        return all(s.status == SEALED for s in self.siblings)

    def rows(self) -> set[str]:
        return {s.row(self.id, i) for i, s in enumerate(self.siblings) if s.status == SEALED}


@dataclass
class Tail:
    """What an attempt's payload journal holds after a crash: tokens from 0, and whether it is sealed there.

    ``tokens_before``, ``sealed_before``: the same before the restore read it, if an undead worker wrote meanwhile.
    """

    tokens: int
    sealed: bool
    tokens_before: int = -1
    sealed_before: bool = True
    lost_worker: bool = False  # its worker died while the run went on


@dataclass
class Settings:
    """The part of the configuration that promises depend on."""

    prompts_per_step: int
    generations: int
    rows: int
    full: bool = True
    resume: bool = True
    granularity: str = "sibling"
    replace: bool = False
    replacements_max: int = 0
    stamped: bool = True
    keep: int = 2
    saves: bool = True  # checkpoints are taken


@dataclass
class Model:
    settings: Settings
    groups: dict[int, Group] = field(default_factory=dict)
    offset: int = 0
    incarnation: int = 0
    restoring: bool = False
    version: int = 0
    branch: int = 0
    floor: int = 0
    admissions: dict[int, list[int]] = field(default_factory=dict)  # reserved, not admitted
    admitted: int = 0
    next_admission: int = 0
    position: tuple[int, int] = (0, 0)
    claimed: list[int] = field(default_factory=list)
    claim_step: int = -1
    applied: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # step -> (incarnation, groups)
    shortfall: dict[int, int] = field(default_factory=dict)
    zombies: set[tuple[int, int, int]] = field(default_factory=set)
    checkpoints: dict[int, tuple[str, int, int, bool, int]] = field(default_factory=dict)
    workers: dict[int, str] = field(default_factory=dict)
    tails: dict[tuple[int, int], Tail] = field(default_factory=dict)
    lost_journals: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    last_counters: dict[str, int] = field(default_factory=dict)
    adopted: int = 0
    sees_disks: bool = False  # ``tails`` is kept up to date
    openings: dict[int, Settings] = field(default_factory=dict)  # those with settings of their own
    restoring_to: int = -1
    returned: int = 0  # groups that this opening's restore brought back
    t: int = 0

    # --- reading ---------------------------------------------------------------------------------------------------

    def of(self, *fates: str) -> set[int]:
        return {g.id for g in self.groups.values() if g.fate in fates}

    def owned_rows(self) -> set[str]:
        """Rows that the data plane must hold at the end of a restore."""
        return {row for g in self.groups.values() if g.fate in LIVE for row in g.rows()}

    def wanted_attempts(self) -> dict[tuple[int, int], Sibling]:
        """Siblings whose latest attempt's tokens must be used again after a crash (rules 8 to 10)."""
        return {
            (g.id, i): s
            for g in self.groups.values()
            if g.fate == "unfinished"
            for i, s in enumerate(g.siblings)
            if s.status == OPEN or (s.status == IDLE and s.ended_by in ("restart", "worker_lost", "stopped"))
        }

    def sets(self) -> dict[str, Any]:
        """The sets of P1, as ``summary.prompt_sets`` gives them."""
        retired = {g for g in self.of("trained") if self.groups[g].trained_in < self.floor}
        return {
            "trained_retired": len(retired),
            "trained": sorted(self.of("trained") - retired),
            "claimed": sorted(self.of("claimed")),
            "complete": sorted(
                g for g in self.of("buffer", "unfinished") if self.groups[g].fate == "buffer" or self.groups[g].complete
            ),
            "unfinished": sorted(
                self.of("reserved") | {g for g in self.of("unfinished") if not self.groups[g].complete}
            ),
            "spare": sorted(self.of("spare", "requeued")),
            "discarded": len(self.of("discarded")),
            "evicted": len(self.of("evicted")),
            "handed_out": len(self.groups),
            "holds": True,
        }

    # --- feeding ---------------------------------------------------------------------------------------------------

    def feed(self, offset: int, event: Any) -> None:
        need(offset == self.offset, "offsets", f"{offset} after {self.offset - 1}")
        need(event.t >= self.t, "clock", f"{type(event).__name__} at {event.t} after {self.t}")
        name = type(event).__name__
        handler = getattr(self, HANDLERS[name], None)
        try:
            if handler is not None:
                handler(event)
        except Broken as error:
            raise Broken(f"{error} (offset {offset}, {event})") from None
        self.t = event.t
        self.offset += 1
        self.counts[name] = self.counts.get(name, 0) + 1

    def _group(self, group: int, *fates: str) -> Group:
        need(group in self.groups, "P1", f"group {group} is unknown")
        found = self.groups[group]
        need(found.fate in fates, "P1", f"group {group} is {found.fate}, not {' or '.join(fates)}")
        return found

    def on_run_started(self, e: ev.RunStarted) -> None:
        need(e.incarnation > self.incarnation, "rule 1", f"incarnation {e.incarnation} after {self.incarnation}")
        self.restoring = self.incarnation > 0
        self.incarnation = e.incarnation
        self.settings = self.openings.get(e.incarnation, self.settings)
        self.restoring_to, self.returned = -1, 0

    def on_worker_started(self, e: ev.WorkerStarted) -> None:
        need(e.worker not in self.workers, "rule 6", f"worker {e.worker} twice")
        need(e.journal not in self.workers.values(), "rule 6", f"journal {e.journal} twice")
        self.workers[e.worker] = e.journal

    def on_batch_reserved(self, e: ev.BatchReserved) -> None:
        need(e.admission_id == self.next_admission, "P1", f"admission {e.admission_id}, not {self.next_admission}")
        need(e.first_group == len(self.groups), "P1", f"first group {e.first_group}, not {len(self.groups)}")
        self.next_admission += 1
        epoch, position = self.position
        members = list(e.pool_groups)
        for group in e.pool_groups:
            self._group(group, "spare", "requeued").fate = "reserved"
        for number, prompt in enumerate(e.prompts):
            need(
                (prompt.epoch, prompt.index) == (epoch, position), "rule 4", f"{prompt} where {epoch}/{position} is due"
            )
            position += 1
            if position == self.settings.rows:
                epoch, position = epoch + 1, 0
            group = e.first_group + number
            siblings = [Sibling() for _ in range(e.generations)]
            fate = "spare" if e.kind == "spare" else "reserved"
            self.groups[group] = Group(group, prompt, fate, e.admission_id, siblings)
            members.append(group)
        need((e.epoch, e.position) == (epoch, position), "rule 4", f"next fetch {e.epoch}/{e.position}")
        self.position = (epoch, position)
        if e.kind != "spare":
            self.admissions[e.admission_id] = members

    def on_batch_admitted(self, e: ev.BatchAdmitted) -> None:
        need(e.admission_id in self.admissions, "P1", f"admission {e.admission_id} admitted twice or never reserved")
        if e.target_step >= 0:
            need(e.target_step not in self.applied, "stale cursor", f"step {e.target_step} is trained already")
            held = [g.id for g in self.groups.values() if g.target == e.target_step and g.fate in LIVE]
            need(not held, "stale cursor", f"step {e.target_step} already holds {held}")
        for group in self.admissions.pop(e.admission_id):
            self._admit(self._group(group, "reserved"), e.target_step)

    def _admit(self, group: Group, target: int) -> None:
        group.fate = "unfinished"
        group.target = target
        group.slot = self.admitted
        self.admitted += 1

    def _drop(self, group: Group, fate: str) -> None:
        for index, sibling in enumerate(group.siblings):
            if sibling.status == OPEN:
                self.zombies.add((group.id, index, sibling.attempt))
        group.fate = fate

    def on_prompt_replaced(self, e: ev.PromptReplaced) -> None:
        given_up = self._group(e.group, "unfinished")
        need(given_up.target == e.target_step >= self.version, "PEER 5", "a prompt of a step that is over is replaced")
        need(given_up.replacements < self.settings.replacements_max, "PEER 5", "too many replacements for one place")
        spare = self._group(e.spare, "spare")
        self._drop(given_up, "discarded")
        later = [g for g in self.groups.values() if g.fate == "buffer" and g.target > e.target_step]
        if later:
            furthest = max(g.target for g in later)
            first = min((g for g in later if g.target == furthest), key=lambda g: g.slot)
            need((e.borrowed, e.borrowed_from) == (first.id, furthest), "rule 19", f"should borrow {first.id}")
            first.target = e.target_step
            need(e.spare_target == furthest, "rule 19", "the spare repays another step")
        else:
            need(e.borrowed == -1 and e.spare_target == e.target_step, "rule 19", "nothing there to borrow")
        self._admit(spare, e.spare_target)
        spare.replacements = given_up.replacements + 1

    def on_step_shortened(self, e: ev.StepShortened) -> None:
        group = self._group(e.group, "unfinished")
        need(group.target == e.step >= self.version, "PEER 5", "another step is shortened")
        if self.settings.replace and group.replacements < self.settings.replacements_max:
            need(not self.of("spare"), "rule 19", "a step is shortened although a spare is in hand")
        self._drop(group, "discarded")
        self.shortfall[e.step] = self.shortfall.get(e.step, 0) + e.count

    def on_group_discarded(self, e: ev.GroupDiscarded) -> None:
        group = self._group(e.group, "spare", "requeued", "reserved", "unfinished", "buffer")
        need(not self.restoring, "staleness at restore", "the restore itself drops nothing")
        if group.target >= 0:
            need(e.reason == "stale_in_flight", "shrink", "a stamped step would wait for ever for this group")
        self._drop(group, "discarded")
        self._requeue(group, e.requeued_as)

    def _requeue(self, group: Group, again: int) -> None:
        if again < 0:
            return
        need(again == len(self.groups), "P1", f"requeued as {again}, expected {len(self.groups)}")
        siblings = [Sibling() for _ in group.siblings]
        self.groups[again] = Group(again, group.prompt, "requeued", group.admission, siblings)

    def on_group_evicted(self, e: ev.GroupEvicted) -> None:
        need(not self.restoring, "staleness at restore", "the restore itself drops nothing")
        group = self._group(e.group, "buffer")
        self._drop(group, "evicted")
        self._requeue(group, e.requeued_as)

    # --- attempts --------------------------------------------------------------------------------------------------

    def _sibling(self, e: Any, status: str) -> Sibling:
        group = self._group(e.group, "unfinished", "buffer")
        sibling = group.siblings[e.sibling]
        need(sibling.status == status and sibling.attempt == e.attempt, "attempts", f"it is {sibling}")
        return sibling

    def on_attempt_dispatched(self, e: ev.AttemptDispatched) -> None:
        need(not self.restoring, "RestoreCompleted first", "a dispatch before the restore is completed")
        group = self._group(e.group, "unfinished")
        sibling = group.siblings[e.sibling]
        need(sibling.status != SEALED, "P2", f"group {e.group} sibling {e.sibling} is sealed and generated again")
        need(sibling.status == IDLE and e.attempt == sibling.attempt + 1, "attempts", f"it is {sibling}")
        need(e.worker in self.workers, "attempts", f"worker {e.worker} did not start")
        tail = self.tails.pop((e.group, e.sibling), None)
        again = (
            self.settings.resume and self.settings.granularity == "sibling"
        )  # what was given up may be used after all
        unwanted = self.sees_disks and tail is None and e.prefix > 0
        unwanted &= not (again and sibling.ended_by in REGENERATED_ON_PURPOSE)
        need(not unwanted, "P2", "goes on from tokens of an attempt that was to start again")
        if tail is not None and self.settings.full:
            reuse = self.settings.resume and (self.settings.granularity == "sibling" or tail.lost_worker)
            known = tail.sealed and tail.sealed_before and sibling.ended_in == self.incarnation
            whole = known and sibling.ended_by in ("restart", "worker_lost") and reuse
            need(not whole, "P2", f"group {e.group} sibling {e.sibling} was sealed on disk")
            known = e.prefix == tail.tokens or 0 <= tail.tokens_before <= e.prefix < tail.tokens
            need(known if reuse else e.prefix == 0, "P2", f"prefix {e.prefix}, on disk are {tail.tokens} tokens")
        sibling.status, sibling.attempt, sibling.worker = OPEN, e.attempt, e.worker
        sibling.incarnation, sibling.ended_by = self.incarnation, ""
        before = sibling.chain if e.prefix else []
        sibling.chain = [*before, (self.incarnation, e.attempt, e.worker)]

    def on_attempt_sealed(self, e: ev.AttemptSealed) -> None:
        sibling = self._sibling(e, OPEN)
        if e.adopted:
            self.adopted += 1
            tail = self.tails.pop((e.group, e.sibling), None)
            if tail is not None:
                need(tail.sealed, "rule 8", "adopted what its payload journal does not hold sealed")
        elif self.settings.full:
            need(e.receipt.journal == self.workers[sibling.worker], "rule 6", f"payload in {e.receipt.journal}")
        sibling.status, sibling.receipt = SEALED, e.receipt

    def on_attempt_failed(self, e: ev.AttemptFailed) -> None:
        sibling = self._sibling(e, OPEN)
        sibling.status, sibling.ended_by = IDLE, "failed"

    def on_attempt_abandoned(self, e: ev.AttemptAbandoned) -> None:
        attempt = (e.group, e.sibling, e.attempt)
        if self.groups[e.group].fate not in LIVE:
            need(attempt in self.zombies, "accounting", f"{attempt} is accounted for twice")
            self.zombies.discard(attempt)
            return
        if e.reason in REGENERATED_ON_PURPOSE:
            sibling = self._sibling(e, SEALED)
            if e.reason == "payload_lost":
                lost = not self.settings.full or (sibling.receipt and sibling.receipt.journal in self.lost_journals)
                need(bool(lost), "P2", f"payload of {attempt} given up though nothing happened to its disk")
            else:
                need(self.settings.granularity == "prompt_group" and self.restoring, "P2", "sealed siblings stay")
            self.groups[e.group].fate = "unfinished"
            sibling.receipt = None
        else:
            sibling = self._sibling(e, OPEN)
            need(e.reason != "restart" or self.restoring, "accounting", "restart without a restart")
        sibling.status, sibling.ended_by, sibling.ended_in = IDLE, e.reason, self.incarnation

    # --- buffer, trainer -------------------------------------------------------------------------------------------

    def on_group_committed(self, e: ev.GroupCommitted) -> None:
        group = self._group(e.group, "unfinished")
        need(group.complete and e.rows == len(group.siblings), "rows in TQ", "committed with siblings missing")
        group.fate = "buffer"

    def on_step_claimed(self, e: ev.StepClaimed) -> None:
        need(not self.restoring, "RestoreCompleted first", "a claim before the restore is completed")
        need(e.step == self.version and self.claim_step in (-1, e.step), "rule 16", f"open step is {self.claim_step}")
        for group in e.groups:
            found = self._group(group, "buffer")
            need(found.target in (-1, e.step), "stamps", f"group {group} is for step {found.target}")
            found.fate = "claimed"
        self.claimed += e.groups
        self.claim_step = e.step
        most = self.settings.prompts_per_step - self.shortfall.get(e.step, 0)
        need(len(self.claimed) <= most, "rule 20", f"{len(self.claimed)} groups claimed, the step takes {most}")

    def on_step_applied(self, e: ev.StepApplied) -> None:
        need(e.step == self.claim_step == self.version, "rule 17", f"open is {self.claim_step}")
        due = self.settings.prompts_per_step - self.shortfall.get(e.step, 0)
        need(len(self.claimed) == due, "rule 19", f"{len(self.claimed)} groups trained, {due} are due")
        for group in self.claimed:
            found = self._group(group, "claimed")
            found.fate, found.trained_in = "trained", e.step
        self.applied[e.step] = (self.incarnation, tuple(self.claimed))
        self.claimed, self.claim_step = [], -1
        self.version += 1

    def on_weights_synced(self, e: ev.WeightsSynced) -> None:
        need((e.branch, e.version) == (self.branch, self.version), "weights", "not the trainer's")

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def on_checkpoint_started(self, e: ev.CheckpointStarted) -> None:
        need(e.kind != "trainer" or self.claim_step == -1, "rule 11", "a trainer checkpoint inside a step")
        need(self.settings.saves, "settings", "a checkpoint though they are switched off")
        self.checkpoints[e.checkpoint] = (e.kind, e.trainer_version, self.offset, False, self.incarnation)

    def on_checkpoint_committed(self, e: ev.CheckpointCommitted) -> None:
        need(e.checkpoint in self.checkpoints, "rule 13", "a checkpoint that this history did not start")
        kind, version, cut, _, incarnation = self.checkpoints[e.checkpoint]
        need((e.kind, e.trainer_version, e.cut) == (kind, version, cut), "rule 11", f"started at {cut} of {version}")
        self.checkpoints[e.checkpoint] = (kind, version, cut, True, incarnation)
        need(e.floor >= self.floor, "rule 14", f"floor {e.floor} after {self.floor}")
        left = {v for k, v, _, done, _ in self.checkpoints.values() if k == "trainer" and done and v >= e.floor}
        raised = e.floor > self.floor
        need(not raised or len(left) >= self.settings.keep, "rule 14", f"floor {e.floor}, only {left} from there on")
        self.floor = e.floor

    def on_checkpoint_failed(self, e: ev.CheckpointFailed) -> None:
        need(e.checkpoint in self.checkpoints, "rule 13", "a checkpoint that was not started")
        del self.checkpoints[e.checkpoint]

    # --- restore ---------------------------------------------------------------------------------------------------

    def on_restore_started(self, e: ev.RestoreStarted) -> None:
        need(self.restoring, "restore", "nothing to restore")
        need(self.floor <= e.to_version <= self.version, "rule 15", f"to {e.to_version}, floor {self.floor}")
        self.restoring_to = e.to_version
        if e.checkpoint >= 0:
            need(e.checkpoint in self.checkpoints, "rule 13", f"checkpoint {e.checkpoint} is not of this history")
            need(self.checkpoints[e.checkpoint][:2] == ("trainer", e.to_version), "rule 13", "another step's")

    def on_trainer_rolled_back(self, e: ev.TrainerRolledBack) -> None:
        claim_only = e.to_version == self.version  # an orderly stop lets go of a claim, no step is taken back
        need(self.restoring or claim_only, "rule 13", "rolled back without a restore")
        need(self.floor <= e.to_version <= self.version, "rule 15", f"to {e.to_version}")
        back = set(self.claimed) | {g for s, (_, gs) in self.applied.items() if s >= e.to_version for g in gs}
        need(set(e.groups) == back, "P5", f"{sorted(back ^ set(e.groups))} come back or stay by mistake")
        need(e.branch == self.branch + (e.to_version < self.version), "branch", f"{e.branch} after {self.branch}")
        self.returned = len(back)
        for group in back:
            self.groups[group].fate, self.groups[group].trained_in = "buffer", -1
        self.applied = {s: v for s, v in self.applied.items() if s < e.to_version}
        self.claimed, self.claim_step = [], -1
        self.version, self.branch = e.to_version, e.branch
        newer = [c for c, (_, version, *_) in self.checkpoints.items() if version > e.to_version]
        for checkpoint in newer:
            del self.checkpoints[checkpoint]

    def on_restore_completed(self, e: ev.RestoreCompleted) -> None:
        need(self.restoring, "restore", "nothing to restore")
        need(self.claim_step == -1, "rule 16", f"step {self.claim_step} is still claimed")
        need(self.version == self.restoring_to, "rule 13", f"at {self.version}, loaded is {self.restoring_to}")
        siblings = [s for g in self.groups.values() if g.fate in LIVE for s in g.siblings]
        need(not self.zombies and all(s.status != OPEN for s in siblings), "accounting", "an attempt is still open")
        for (group, index), tail in self.tails.items():
            sibling = self.groups[group].siblings[index]
            this_time = (
                sibling.ended_by == "restart" and sibling.ended_in == self.incarnation
            )  # not sealed since, by an undead
            if tail.sealed and tail.sealed_before and this_time:
                whole = self.settings.granularity == "prompt_group"
                need(whole, "P2", f"group {group} sibling {index} is sealed on disk and was not adopted")
        self._counters(e.counters)
        self.restoring = False
        done = {c for c, (*_, committed, _) in self.checkpoints.items() if not committed}
        for checkpoint in done:
            del self.checkpoints[checkpoint]

    def _counters(self, counters: dict[str, int]) -> None:
        """Rule 23, recounted from the books."""
        complete = [g for g in self.groups.values() if g.fate in ("unfinished", "buffer") and g.complete]
        unfinished = [g for g in self.groups.values() if g.fate == "reserved"]
        unfinished += [g for g in self.groups.values() if g.fate == "unfinished" and not g.complete]
        sealed = sum(s.status == SEALED for g in unfinished for s in g.siblings)
        expected = {
            "groups_complete_restored": len(complete),
            "groups_unfinished_found": len(unfinished),
            "siblings_reused": sealed,
            "siblings_rerun": sum(len(g.siblings) for g in unfinished) - sealed,
            "groups_rolled_back": self.returned,
        }
        found = {name: counters[name] for name in expected}
        need(found == expected, "rule 23", f"{found}, counted {expected}")
        self.last_counters = counters
