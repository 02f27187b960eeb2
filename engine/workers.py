"""The rollout workers as one pool: who is alive, who gets the next attempt, weights for all, replacing the dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..journal.errors import UnlostError
from ..replay import events as ev
from .ledger import Ledger
from .protocols import RolloutWorker, WeightsRef, WorkerFactory, WorkerLost, WorkerStats

log = logging.getLogger(__name__)


class WorkersGone(UnlostError):
    """No rollout worker is left, and replacing them failed."""


def payload_journal_name(incarnation: int, worker: int) -> str:
    """Folder of a worker's payload journal: one worker, one opening (protocol rule 6)."""
    return f"i{incarnation:05d}-w{worker:05d}"


@dataclass(slots=True, eq=False)
class Member:
    """A live worker and what runs on it."""

    handle: RolloutWorker
    weights: tuple[int, int]
    running: set[ev.AttemptKey] = field(default_factory=set)
    load: int = 0
    generated: int = 0
    alive: bool = True

    @property
    def worker_id(self) -> int:
        """Never reused in a run."""
        return self.handle.worker_id


class WorkerPool:
    """``replacements_max``: lost workers in a row, without a seal between, before the run stops."""

    def __init__(self, factory: WorkerFactory, ledger: Ledger, count: int, replacements_max: int = 8) -> None:
        self._factory = factory
        self._ledger = ledger
        self._count = count
        self._replacements_max = replacements_max
        self._losses_in_a_row = 0
        self.members: list[Member] = []
        self._weights: WeightsRef | None = None
        self._reasons: dict[ev.AttemptKey, str] = {}
        self._arrived = asyncio.Event()
        self._replacing: set[asyncio.Task[None]] = set()
        self._failed: Exception | None = None
        self._stopping = False
        self._next_id = ledger.state.next_worker
        self._sync_lock = asyncio.Lock()

    async def start(self, weights: WeightsRef) -> None:
        """Start all workers side by side with these weights. Raises the first failure."""
        self._weights = weights
        handles = await asyncio.gather(*(self._make(weights) for _ in range(self._count)))
        for handle in handles:
            self._join(handle, weights)

    async def _make(self, weights: WeightsRef) -> RolloutWorker:
        """A started worker; one that dies while it starts is lost like any other, and another is made."""
        while True:
            worker_id, self._next_id = self._next_id, self._next_id + 1
            name = payload_journal_name(self._ledger.state.incarnation, worker_id)
            handle = await self._factory(worker_id, name)
            try:
                await handle.start(weights)
            except WorkerLost as error:
                log.error("rollout worker %d is lost while it starts (%s); starting another", worker_id, error)
                self._count_loss()
            else:
                return handle

    def _count_loss(self) -> None:
        self._losses_in_a_row += 1
        if self._losses_in_a_row > self._replacements_max:
            raise WorkersGone(f"{self._losses_in_a_row} rollout workers lost in a row, none sealed anything in between")

    def _join(self, handle: RolloutWorker, weights: WeightsRef) -> None:
        ledger = self._ledger
        ledger.record(ev.WorkerStarted(ledger.clock.now_us(), handle.worker_id, handle.journal_name))
        self.members.append(Member(handle, (weights.branch, weights.version)))
        self._arrived.set()

    # --- choosing ----------------------------------------------------------------------------------------------------

    async def acquire(self) -> Member:
        """The least loaded worker; waits while there is none. Give it back with ``release``."""
        while not self.members:
            self._arrived.clear()
            await self._arrived.wait()
        member = min(self.members, key=lambda m: m.load)
        member.load += 1
        return member

    def release(self, member: Member) -> None:
        """Undo ``acquire``."""
        member.load -= 1

    def note_sealed(self) -> None:
        """A seal shows that workers can live: the count of losses in a row starts again."""
        self._losses_in_a_row = 0

    def weights_of(self, member: Member) -> tuple[int, int]:
        """(branch, version) that it was last given."""
        return member.weights

    # --- weights and aborts ------------------------------------------------------------------------------------------

    async def sync(self, weights: WeightsRef) -> float:
        """Give every worker these weights. Returns the longest pause, seconds; a worker lost meanwhile is replaced."""
        async with self._sync_lock:
            self._weights = weights
            members = list(self.members)
            pauses = await asyncio.gather(*(self._update(member, weights) for member in members))
            return max(pauses, default=0.0)

    async def _update(self, member: Member, weights: WeightsRef) -> float:
        try:
            pause = await member.handle.update_weights(weights)
        except WorkerLost:
            await self.lost(member)
            return 0.0
        member.weights = (weights.branch, weights.version)
        return pause

    async def abort(self, keys: Sequence[ev.AttemptKey], reason: str) -> None:
        """End attempts wherever they run; ``abort_reason`` then says why."""
        for key in keys:
            self._reasons[key] = reason
        for member in list(self.members):
            try:
                await member.handle.abort(keys)
            except WorkerLost:
                await self.lost(member)

    def abort_reason(self, key: ev.AttemptKey) -> str:
        """Why we ended this attempt."""
        return self._reasons.pop(key, ev.ABANDON_STOPPED)

    # --- losing and replacing ----------------------------------------------------------------------------------------

    async def lost(self, member: Member) -> None:
        """Note that a worker is gone and start another in its place. Idempotent; does not wait for the new one."""
        if not member.alive:
            return
        member.alive = False
        self.members.remove(member)
        ledger = self._ledger
        ledger.record(ev.WorkerStopped(ledger.clock.now_us(), member.worker_id, ev.ABANDON_WORKER_LOST))
        log.error("rollout worker %d is lost; starting another", member.worker_id)
        self._count_loss()
        if not self._stopping:
            task = asyncio.create_task(self._replace(), name="replace worker")
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self) -> None:
        assert self._weights is not None
        try:
            while True:
                handle = await self._make(self._weights)
                async with self._sync_lock:  # new weights may have come while it started
                    try:
                        await handle.update_weights(self._weights)
                    except WorkerLost as error:
                        log.error("rollout worker %d is lost (%s); starting another", handle.worker_id, error)
                        self._count_loss()
                        continue
                    self._join(handle, self._weights)
                    return
        except Exception as error:  # noqa: BLE001 - told to who looks after the pool: nobody awaits this task
            self._failed = error

    def raise_failed(self) -> None:
        """Raise if a replacement could not be started."""
        if self._failed is not None:
            raise WorkersGone(f"a lost rollout worker could not be replaced: {self._failed}") from self._failed

    # --- figures and end ---------------------------------------------------------------------------------------------

    async def stats(self) -> list[WorkerStats]:
        """Of every live worker; one that is lost meanwhile is left out."""
        members = list(self.members)
        results = await asyncio.gather(*(m.handle.stats() for m in members), return_exceptions=True)
        good = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, WorkerStats):
                member.generated = max(member.generated, result.generated_tokens)
                good.append(result)
            elif isinstance(result, WorkerLost):
                await self.lost(member)
            else:
                raise result
        return good

    def generated(self) -> tuple[tuple[int, int], ...]:
        """(worker, cumulative tokens) as last heard."""
        return tuple((m.worker_id, m.generated) for m in self.members)

    async def stop(self) -> None:
        """Flush and stop all; what can't be reached is left to the process tree."""
        self._stopping = True
        for task in list(self._replacing):
            task.cancel()
        members = list(self.members)
        results = await asyncio.gather(*(m.handle.stop() for m in members), return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, WorkerStats):
                member.generated = max(member.generated, result.generated_tokens)
            else:
                log.warning("worker %d did not stop orderly: %s", member.worker_id, result)
