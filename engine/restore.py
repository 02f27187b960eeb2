"""Restore: from a folded journal to a run that goes on. Every step can be killed and repeated.

Order (protocol rules 2, 8 to 10, 13, 15, 16, 18, 23): RestoreStarted → newest usable checkpoint loaded, else the next
older, else step 0 → data plane snapshot loaded → payload tails read and synced → rows compared with what the fold owns,
missing ones put back from payloads → the plan's events → strays cleared → cursor checked → RestoreCompleted durable.
Nothing is dispatched, claimed or removed before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..journal.errors import EXIT_USAGE, UnlostError
from ..replay import events as ev
from ..replay.payload_records import PayloadDamaged
from ..replay.payloads import AttemptTail, PayloadStore, Tails
from ..replay.plan import COUNTERS, RestorePlan, attempts_to_look_for, candidates, owned_counts, plan_restore
from ..replay.state import COMMITTED, COMPLETE, SEALED, UNFINISHED, Checkpoint, Group, State
from ..replay.transitions import returned_groups
from .checkpoints import DATA_PLANE_FOLDER, TRAINER_FOLDER, Folders, Manifest, name_of, read_manifest
from .ledger import Ledger
from .protocols import CheckpointDamaged, Clock, DataPlane, SnapshotMismatch, Trainer, WeightsRef
from .rows import row_of
from .samplers import Sampler

log = logging.getLogger(__name__)

PUTS_AT_ONCE = 8
_T = TypeVar("_T")


class RestoreRefused(UnlostError):
    """The run can't be restored as asked; nothing was changed."""

    exit_code = EXIT_USAGE


@dataclass(slots=True)
class Restored:
    """What the controller needs afterwards: prefixes to go on from, weights to generate with."""

    prefixes: dict[tuple[int, int], AttemptTail]
    weights: WeightsRef
    counters: dict[str, int]
    timings: dict[str, float] = field(default_factory=dict)

    def told(self) -> str:
        """The counters in one line of words."""
        found = [f"{value} {name.replace('_', ' ')}" for name, value in self.counters.items() if value]
        return "restored: " + (", ".join(found) or "nothing was in flight")


def check_restore(state: State, mode: str) -> None:
    """Raise RestoreRefused if ``mode`` (latest, none, or a trainer version) names a checkpoint that does not exist."""
    known = {str(c.trainer_version) for c in candidates(state)}
    if mode not in ("latest", "none", *known) and not (mode == "0" and state.floor == 0):
        have = ", ".join(sorted(known, key=int)) or "none"
        raise RestoreRefused(
            f"--restore {mode}: no checkpoint of that step in this history; there are: {have} (`unlost checkpoints`)"
        )


class Restorer:
    """One restore. ``payloads`` None: ``payloads: none``, what no snapshot holds is regenerated and counted."""

    def __init__(
        self,
        ledger: Ledger,
        sampler: Sampler,
        trainer: Trainer,
        data_plane: DataPlane,
        payloads: PayloadStore | None,
        folders: Folders,
        root: str,
        clock: Clock,
        *,
        resume_prefixes: bool,
        granularity: str,
        filtered: Callable[[Group], bool] | None = None,
        on_phase: Callable[[str], None],
    ) -> None:
        self.ledger = ledger
        self.state = ledger.state
        self.sampler = sampler
        self.trainer = trainer
        self.data_plane = data_plane
        self.payloads = payloads
        self.folders = folders
        self.root = root
        self.clock = clock
        self.resume_prefixes = resume_prefixes
        self.granularity = granularity
        self.filtered = filtered  # complete groups of which the rollout pump is to decide
        self.on_phase = on_phase
        self.timings: dict[str, float] = {}
        self._rows_put_back = 0

    async def run(self, mode: str, start_workers: Callable[[WeightsRef], Awaitable[None]]) -> Restored:
        """``mode``: latest, a trainer version, or none. Raises RestoreRefused."""
        began = self.clock.now_us()
        checkpoint = await self._timed("trainer_load_seconds", self._load_trainer(mode))
        branch = self.state.branch + (self._version(checkpoint) < self.state.trainer_version)
        weights = await self.trainer.publish_weights(branch)
        workers = asyncio.ensure_future(start_workers(weights))
        try:
            await self._timed("data_plane_load_seconds", self._load_rows(checkpoint))
            tails = await self._timed("payload_tails_seconds", self._tails())
            plan = await self._timed("rows_seconds", self._reconcile(checkpoint, tails))
            cleared = await self._carry_out(plan, branch)
            self._check_cursor()
            await workers
        except BaseException:
            workers.cancel()
            raise
        counters = dict(plan.counters, rows_put_back=self._rows_put_back, rows_cleared=cleared)
        counters |= owned_counts(self.state)
        counters["groups_dropped_stale"] = len(self.sampler.evictable(self.state)) + len(
            self.sampler.stale_in_flight(self.state)
        )
        assert set(counters) == set(COUNTERS)
        seconds = (self.clock.now_us() - began) / 1e6
        now = self.clock.now_us
        self.ledger.record(ev.WeightsSynced(now(), weights.branch, weights.version, 0.0))
        offset = self.ledger.record(ev.RestoreCompleted(now(), counters, seconds, self.timings))
        await self.ledger.durable(offset)
        return Restored(plan.prefixes, weights, counters, self.timings)

    @staticmethod
    def _version(checkpoint: Checkpoint | None) -> int:
        return checkpoint.trainer_version if checkpoint is not None else 0

    async def _timed(self, name: str, work: Awaitable[_T]) -> _T:
        began = self.clock.now_us()
        self.on_phase(name.removesuffix("_seconds").replace("_", " "))
        result = await work
        self.timings[name] = self.timings.get(name, 0.0) + (self.clock.now_us() - began) / 1e6
        return result

    # --- trainer -----------------------------------------------------------------------------------------------------

    async def _load_trainer(self, mode: str) -> Checkpoint | None:
        """Load the newest checkpoint that verifies; only proven damage moves on to an older one."""
        for checkpoint in self._wanted(mode):
            self._started(checkpoint)
            try:
                manifest = await read_manifest(self.folders, self.root, self.state, checkpoint)
                folder = f"{self.root}/{name_of(checkpoint)}/{TRAINER_FOLDER}"
                version = await self.trainer.load(folder, manifest.digests(TRAINER_FOLDER))
                if version != checkpoint.trainer_version:
                    raise CheckpointDamaged(f"{folder}: holds version {version}, its manifest says otherwise")
            except CheckpointDamaged as error:
                level = logging.ERROR if checkpoint.committed else logging.INFO  # a killed save leaves no manifest
                log.log(level, "checkpoint %s not used: %s", name_of(checkpoint), error)
                if mode not in ("latest", "none"):
                    raise RestoreRefused(f"checkpoint {name_of(checkpoint)} can't be used: {error}") from error
                continue
            return checkpoint
        if self.state.floor > 0:
            raise RestoreRefused(
                f"no usable checkpoint at or above version {self.state.floor}; groups trained before it are retired, "
                f"so starting from step 0 would lose them. `unlost checkpoints RUN` shows what is wrong with each"
            )
        self._started(None)
        return None

    def _wanted(self, mode: str) -> list[Checkpoint]:
        check_restore(self.state, mode)
        known = candidates(self.state)
        if mode == "latest":
            return known
        return [c for c in known if str(c.trainer_version) == mode]

    def _started(self, checkpoint: Checkpoint | None) -> None:
        version = self._version(checkpoint)
        name = name_of(checkpoint) if checkpoint is not None else ""
        number = checkpoint.id if checkpoint is not None else -1
        state = self.state
        self.ledger.record(
            ev.RestoreStarted(self.clock.now_us(), number, state.trainer_version, version, name, state.t)
        )

    # --- rows ---------------------------------------------------------------------------------------------------------

    async def _load_rows(self, checkpoint: Checkpoint | None) -> None:
        """The newest data plane snapshot that verifies, rollout snapshots included; none is fine under ``full``."""
        snapshots = [c for c in self.state.checkpoints if c.kind == ev.CHECKPOINT_ROLLOUT]
        if checkpoint is not None:
            snapshots.append(checkpoint)
        for snapshot in sorted(snapshots, key=lambda c: c.cut, reverse=True):
            try:
                manifest = await read_manifest(self.folders, self.root, self.state, snapshot)
                if not manifest.has_data_plane:
                    continue
                await self._load_snapshot(snapshot, manifest)
            except (CheckpointDamaged, SnapshotMismatch) as error:
                log.warning("data plane snapshot %s not used: %s", name_of(snapshot), error)
                await self.data_plane.stop()
                await self.data_plane.start()
                continue
            return

    async def _load_snapshot(self, snapshot: Checkpoint, manifest: Manifest) -> None:
        folder = f"{self.root}/{name_of(snapshot)}/{DATA_PLANE_FOLDER}"
        await self.data_plane.load(folder, manifest.digests(DATA_PLANE_FOLDER))

    async def _tails(self) -> Tails:
        """What payload journals hold of unsealed siblings, synced before it is used (rules 2, 9, 10)."""
        if self.payloads is None:
            return Tails(attempts={}, losses=(), records_read=0)
        wanted = attempts_to_look_for(self.state)
        tails: Tails = await self.ledger.blocking(self.payloads.sealed_tails, wanted)
        return tails

    async def _reconcile(self, checkpoint: Checkpoint | None, tails: Tails) -> RestorePlan:
        """Make sure of every row that the fold owns, putting back what is missing; then the plan follows."""
        state = self.state
        inventory = await self.data_plane.inventory()
        returning = set(returned_groups(state, self._version(checkpoint)))
        owned: dict[ev.AttemptKey, ev.Receipt] = {}
        for group in state.groups.values():
            if group.status not in (UNFINISHED, COMPLETE, COMMITTED) and group.id not in returning:
                continue
            for index, sibling in enumerate(group.siblings):
                key = group.key(index)
                if sibling.status == SEALED and sibling.receipt is not None:
                    owned[key] = sibling.receipt
                elif key in tails.attempts and (adopted := tails.attempts[key].sealed) is not None:
                    owned[key] = adopted
        lost: set[ev.AttemptKey] = set()
        missing = [(k, r) for k, r in owned.items() if inventory.get(k.row_key()) != r.checksum]
        limit = asyncio.Semaphore(PUTS_AT_ONCE)

        async def put_back(key: ev.AttemptKey, receipt: ev.Receipt) -> None:
            async with limit:
                if await self._put_back(key, receipt):
                    self._rows_put_back += 1
                else:
                    lost.add(key)

        await asyncio.gather(*(put_back(key, receipt) for key, receipt in missing))
        return plan_restore(
            state,
            tails.attempts,
            checkpoint,
            lost=lost,
            resume_prefixes=self.resume_prefixes,
            granularity=self.granularity,
        )

    async def _put_back(self, key: ev.AttemptKey, receipt: ev.Receipt) -> bool:
        if self.payloads is None:
            return False
        try:
            payload = await self.ledger.blocking(self.payloads.load, receipt, key)
        except PayloadDamaged as error:
            log.error("group %d sibling %d has to be generated again: %s", key.group, key.sibling, error)
            return False
        await self.data_plane.put(row_of(payload))
        return True

    # --- events -------------------------------------------------------------------------------------------------------

    async def _carry_out(self, plan: RestorePlan, branch: int) -> int:
        """Write the plan's events, then clear the rows that nobody owns. Returns how many were cleared."""
        state, record, now = self.state, self.ledger.record, self.clock.now_us
        self._adopt_checkpoint(plan.checkpoint)
        if plan.rolled_back or plan.to_version < plan.from_version or state.open_step >= 0:
            record(ev.TrainerRolledBack(now(), plan.from_version, plan.to_version, branch, tuple(plan.rolled_back)))
        room = self.ledger.writer.drain  # a large run's restore writes much at once
        for key in list(state.zombies):
            self.ledger.abandon(key, ev.ABANDON_RESTART)
            await room()
        for key, receipt in plan.adopt:
            self.ledger.seal(key, receipt, adopted=True)
            await room()
        for key, reason, durable in plan.abandon:
            self.ledger.abandon(key, reason, durable, durable)
            await room()
        for key, reason in plan.lost:
            self.ledger.lose(key, reason)
            await room()
        for group_id in list(state.complete):
            if self.filtered is None or not self.filtered(state.groups[group_id]):
                self.ledger.commit_group(group_id)
                await room()
        if state.uncleared:
            record(ev.RowsCleared(now(), tuple(state.uncleared)))
        owned = {key for group in state.groups.values() for key in group.sealed_row_keys() if group.trained_step < 0}
        inventory = await self.data_plane.inventory()
        await self._put_back_lost(inventory)
        strays = [key for key in inventory if key not in owned]
        if strays:
            await self.ledger.before_destructive(state.offset - 1)
            await self.data_plane.clear(strays)
        return len(strays)

    async def _put_back_lost(self, inventory: Mapping[str, int]) -> None:
        """Rows that went while others were put back: the data plane was lost, and mended from what the fold owned then.

        That was without the groups that had yet to return and the siblings that had yet to be adopted. From the plan's
        events on the fold owns them all, and a loss is mended whole.
        """
        for group in list(self.state.groups.values()):
            for index, sibling in enumerate(group.siblings):
                key, receipt = group.key(index), sibling.receipt
                if group.trained_step >= 0 or sibling.status != SEALED or receipt is None:
                    continue
                if key.row_key() in inventory or await self._put_back(key, receipt):
                    continue
                self.ledger.lose(key, ev.ABANDON_PAYLOAD_LOST)

    def _adopt_checkpoint(self, checkpoint: Checkpoint | None) -> None:
        """A checkpoint that was published, but whose commit was never written down, is written down now."""
        if checkpoint is None or checkpoint.id not in self.state.started:
            return
        name = name_of(checkpoint)
        self.ledger.record(
            ev.CheckpointCommitted(
                self.clock.now_us(),
                checkpoint.id,
                checkpoint.kind,
                checkpoint.trainer_version,
                checkpoint.cut,
                name,
                "",
                0,
                0.0,
                self.state.floor,
            )
        )

    def _check_cursor(self) -> None:
        """No stamp may lie ahead of the sampler's cursor."""
        ahead = [step for step in self.state.stamped if step > self.state.dispatch_index]
        if ahead:
            raise RestoreRefused(
                f"groups are stamped for step {max(ahead)}, the dispatch index is {self.state.dispatch_index}: the "
                f"journal is inconsistent"
            )
