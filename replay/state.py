"""The state that a journal folds to. Only ``transitions`` writes it; its size follows what is alive, not history.

Every group id below ``next_group`` is either in ``groups`` or gone for good (trained and retired, discarded, evicted);
so the finished past needs no list at all, only three counts. Fields under "derived" are indexes over ``groups``: they
are rebuilt from it, never encoded.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from .events import AttemptKey, PromptRef, Receipt, row_key


class GroupStatus(IntEnum):
    """Who owns a group. Values are stored in images: never renumber."""

    POOL = 0
    RESERVED = 1
    UNFINISHED = 2
    COMPLETE = 3
    COMMITTED = 4
    CLAIMED = 5
    TRAINED = 6


class SiblingStatus(IntEnum):
    """Of a sibling's latest attempt; IDLE also before the first."""

    IDLE = 0
    DISPATCHED = 1
    SEALED = 2


# Plain ints for the hot path: an enum member's comparison costs five times an int's.
POOL, RESERVED, UNFINISHED, COMPLETE, COMMITTED, CLAIMED, TRAINED = (int(s) for s in GroupStatus)
IDLE, DISPATCHED, SEALED = (int(s) for s in SiblingStatus)


class Sibling(msgspec.Struct, array_like=True, gc=False):
    """Latest attempt of one sibling. ``attempt`` -1: never tried. Kept when abandoned (protocol rule 10).

    ``resumable``: the next attempt goes on from this one's durable tokens; not after a failure, nor where new weights
    are the reason to start again. ``source_...``: the earlier attempt whose records hold the prefix that this one was
    started with; they are asked for as long as this one's own journal may lack it.
    """

    status: int = IDLE
    attempt: int = -1
    incarnation: int = 0
    worker: int = -1
    branch: int = 0
    version: int = 0
    prefix: int = 0
    dispatched_t: int = 0
    receipt: Receipt | None = None
    resumable: bool = True
    source_attempt: int = -1
    source_incarnation: int = 0
    source_worker: int = -1


class Group(msgspec.Struct, array_like=True):
    """One prompt's siblings. ``start_weight``: the version that scheduling counts from (protocol rule 18).

    ``worker_losses`` counts workers, not the attempts that ran on them; ``lost_worker`` is the latest of them.
    """

    id: int
    prompt: PromptRef
    status: int
    admission_id: int
    siblings: list[Sibling]
    reserved_t: int
    target_step: int = -1
    start_weight: int = -1
    slot: int = -1
    sealed: int = 0
    infra_failures: int = 0
    data_failures: int = 0
    worker_losses: int = 0
    replacements: int = 0
    trained_step: int = -1
    version_min: int = -1
    version_max: int = -1
    lost_worker: int = -1

    def key(self, sibling: int) -> AttemptKey:
        """Identity of the sibling's latest attempt."""
        s = self.siblings[sibling]
        return AttemptKey(s.incarnation, self.id, sibling, s.attempt)

    def source_key(self, sibling: int) -> AttemptKey | None:
        """Identity of the attempt that the latest one had its prefix from."""
        s = self.siblings[sibling]
        if s.source_attempt < 0:
            return None
        return AttemptKey(s.source_incarnation, self.id, sibling, s.source_attempt)

    def sealed_row_keys(self) -> list[str]:
        """Row keys of the sealed siblings, in sibling order."""
        group = self.id
        return [row_key(s.incarnation, group, i, s.attempt) for i, s in enumerate(self.siblings) if s.status == SEALED]


class Batch(msgspec.Struct, array_like=True):
    """Reserved together, not yet admitted."""

    admission_id: int
    groups: list[int]


class Checkpoint(msgspec.Struct, array_like=True):
    """A checkpoint of this history; ``committed`` False while only its start is known."""

    id: int
    kind: str
    trainer_version: int
    cut: int
    incarnation: int
    committed: bool = False
    name: str = ""
    digest: str = ""


class Worker(msgspec.Struct, array_like=True):
    """A rollout worker. ``generated``: its own cumulative count when last written down. ``lost``: it died by itself."""

    id: int
    journal: str
    incarnation: int
    alive: bool = True
    generated: int = 0
    lost: bool = False


class Restoring(msgspec.Struct, array_like=True):
    """An open restore."""

    checkpoint: int
    from_version: int
    to_version: int


class Image(msgspec.Struct, array_like=True):
    """What a StateImage carries: every field of State that is not derived."""

    run_id: str
    incarnation: int
    t: int
    branch: int
    trainer_version: int
    synced_branch: int
    synced_version: int
    epoch: int
    position: int
    dispatch_index: int
    next_admission: int
    next_group: int
    next_slot: int
    next_worker: int
    next_checkpoint: int
    groups: list[Group]
    reserved: list[Batch]
    spares: list[int]
    requeued: list[int]
    open_step: int
    open_groups: list[int]
    applied: dict[int, list[int]]
    shortfall: dict[int, int]
    promoted: dict[int, int]
    replaced: dict[int, int]
    dropped: dict[int, int]
    uncleared: dict[int, list[str]]
    floor: int
    checkpoints: list[Checkpoint]
    started: dict[int, Checkpoint]
    needs_restore: bool
    restoring: Restoring | None
    ended: str
    workers: dict[int, Worker]
    branch_caps: list[int]
    zombies: list[AttemptKey]
    retired_trained: int
    discarded: int
    evicted: int
    counters: dict[str, int]
    generations: int
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    anchor_t: int
    anchor_wall_us: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Image)


class State:
    """Everything that a restart must know. Read it freely; write it only through ``transitions.apply``."""

    def __init__(self) -> None:
        self.offset = 0  # of the next event
        self.t = 0
        self.run_id = ""
        self.incarnation = 0
        self.branch = 0
        self.trainer_version = 0
        self.synced_branch = -1
        self.synced_version = -1
        self.epoch = 0
        self.position = 0
        self.dispatch_index = -1
        self.next_admission = 0
        self.next_group = 0
        self.next_slot = 0
        self.next_worker = 0
        self.next_checkpoint = 0
        self.groups: dict[int, Group] = {}
        self.reserved: dict[int, Batch] = {}
        self.spares: dict[int, None] = {}
        self.requeued: dict[int, None] = {}
        self.open_step = -1
        self.open_groups: list[int] = []
        self.applied: dict[int, list[int]] = {}
        self.shortfall: dict[int, int] = {}
        self.promoted: dict[int, int] = {}
        self.replaced: dict[int, int] = {}
        self.dropped: dict[int, int] = {}
        self.uncleared: dict[int, list[str]] = {}
        self.floor = 0
        self.checkpoints: list[Checkpoint] = []
        self.started: dict[int, Checkpoint] = {}
        self.needs_restore = False
        self.restoring: Restoring | None = None
        self.ended = ""
        self.workers: dict[int, Worker] = {}
        self.branch_caps: list[int] = []
        self.zombies: dict[AttemptKey, None] = {}
        self.retired_trained = 0
        self.discarded = 0
        self.evicted = 0
        self.counters: dict[str, int] = {}
        self.generations = 0
        self.fingerprints: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.anchor_t = 0
        self.anchor_wall_us = 0
        self._derive()

    # --- derived indexes -------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        """Rebuild the indexes from ``groups``."""
        self.unfinished: dict[int, None] = {}
        self.complete: dict[int, None] = {}
        self.committed: dict[int, None] = {}
        self.committed_by_target: dict[int, dict[int, None]] = {}
        self.committed_by_weight: dict[int, dict[int, None]] = {}
        self.pending_by_weight: dict[int, int] = {}
        self.stamped: dict[int, int] = {}
        self.open_attempts = 0
        for group in sorted(self.groups.values(), key=lambda g: (g.slot, g.id)):
            self.enter(group)
            self.open_attempts += sum(s.status == DISPATCHED for s in group.siblings)

    def enter(self, group: Group) -> None:
        """Index a group under its present status."""
        status = group.status
        if UNFINISHED <= status <= CLAIMED and group.target_step >= 0:
            self.stamped[group.target_step] = self.stamped.get(group.target_step, 0) + 1
        if status in (UNFINISHED, COMPLETE):
            (self.unfinished if status == UNFINISHED else self.complete)[group.id] = None
            self.pending_by_weight[group.start_weight] = self.pending_by_weight.get(group.start_weight, 0) + 1
        elif status == COMMITTED:
            self.committed[group.id] = None
            self.committed_by_target.setdefault(group.target_step, {})[group.id] = None
            self.committed_by_weight.setdefault(group.start_weight, {})[group.id] = None

    def leave(self, group: Group) -> None:
        """Undo ``enter``; call before status, target or weight change."""
        status = group.status
        if UNFINISHED <= status <= CLAIMED and group.target_step >= 0:
            _decrement(self.stamped, group.target_step)
        if status in (UNFINISHED, COMPLETE):
            del (self.unfinished if status == UNFINISHED else self.complete)[group.id]
            _decrement(self.pending_by_weight, group.start_weight)
        elif status == COMMITTED:
            del self.committed[group.id]
            _remove(self.committed_by_target, group.target_step, group.id)
            _remove(self.committed_by_weight, group.start_weight, group.id)

    # --- reading ---------------------------------------------------------------------------------------------------

    def scheduling_version(self, branch: int, version: int) -> int:
        """What a weight counts as for staleness after rollbacks (protocol rule 18)."""
        return min(version, self.branch_caps[branch]) if branch < len(self.branch_caps) else version

    def trained_groups(self) -> list[int]:
        """Trained, still in memory because a restore could return them."""
        return [g for groups in self.applied.values() for g in groups]

    def summary(self) -> dict[str, Any]:
        """See ``summary.summarize``."""
        from .summary import summarize

        return summarize(self)

    def image(self) -> bytes:
        """The state as bytes; O(alive). About 0.5 µs a group."""
        fields = {name: getattr(self, name) for name in Image.__struct_fields__}
        for name in ("groups", "reserved"):
            fields[name] = list(fields[name].values())
        for name in ("spares", "requeued", "zombies"):
            fields[name] = list(fields[name])
        return _encoder.encode(Image(**fields))

    @classmethod
    def from_image(cls, data: bytes, offset: int) -> State:
        """The state again; ``offset`` is that of the next event."""
        image = _decoder.decode(data)
        state = cls()
        for name in Image.__struct_fields__:
            setattr(state, name, getattr(image, name))
        state.groups = {g.id: g for g in image.groups}
        state.reserved = {b.admission_id: b for b in image.reserved}
        for name in ("spares", "requeued", "zombies"):
            setattr(state, name, dict.fromkeys(getattr(image, name)))
        state.offset = offset
        state._derive()
        return state


def _decrement(counts: dict[int, int], key: int) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]


def _remove(index: dict[int, dict[int, None]], key: int, group: int) -> None:
    bucket = index[key]
    del bucket[group]
    if not bucket:
        del index[key]
