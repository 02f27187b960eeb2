"""The ledger: every change of the run goes through here. It owns state and journal together.

A command checks that the transition is legal, builds one event, encodes and enqueues it, and applies it, with no
``await`` between and nothing left that can fail. So there is no lock, and state is never ahead of what the journal
was told. The event is durable within the flush interval; who must wait for that says ``await flushed(offset)``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from ..replay import events as ev
from ..replay.state import COMMITTED, COMPLETE, DISPATCHED, SEALED, UNFINISHED, State
from ..replay.transitions import TRANSITIONS
from .protocols import Blocking, Clock


class EventWriter(Protocol):
    """The part of ``journal.JournalWriter`` that the ledger uses."""

    @property
    def durable_upto(self) -> int: ...

    @property
    def above_high_mark(self) -> bool: ...

    def append(self, event: Any) -> int: ...

    def rotate(self, image: Any = None) -> int | None: ...

    async def flushed(self, offset: int) -> None: ...

    async def drain(self) -> None: ...

    def sync_watermark(self) -> None: ...


class Ledger:
    """Commands over one run's state. Not thread-safe: one event loop owns it."""

    def __init__(self, state: State, writer: EventWriter, clock: Clock, blocking: Blocking = asyncio.to_thread) -> None:
        self.state = state
        self.writer = writer
        self.clock = clock
        self.blocking = blocking
        self.late = 0
        self.reopened: Callable[[int], None] | None = None  # is told of a group that left the buffer again
        self.changed = asyncio.Event()
        self.stopping = False

    def record(self, event: ev.Event) -> int:
        """Check, journal and apply one event. Returns its offset.

        Raises IllegalTransition (nothing written) or what ``append`` raises (nothing applied).
        """
        state = self.state
        check, effect = TRANSITIONS[type(event)]
        check(state, event)
        offset = self.writer.append(event)
        state.offset = offset
        effect(state, event)
        state.offset = offset + 1
        state.t = event.t
        self.changed.set()
        return offset

    async def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Until ``condition`` holds (True), looked at after every event; False if the run is stopping first.

        One event object serves all waiters: each clears it and waits with no ``await`` between, so none misses a set.
        """
        while not condition():
            if self.stopping:
                return False
            self.changed.clear()
            await self.changed.wait()
        return True

    def stop(self) -> None:
        """Let every waiter go; events can still be recorded."""
        self.stopping = True
        self.changed.set()

    async def durable(self, offset: int) -> None:
        """Wait until the event at ``offset`` is durable."""
        await self.writer.flushed(offset)

    async def before_destructive(self, offset: int) -> None:
        """Durable, and the watermark that says so too: only then may rows, files or checkpoints go."""
        await self.writer.flushed(offset)
        await self.blocking(self.writer.sync_watermark)

    def image(self) -> int | None:
        """Rotate the journal; the new segment starts with the whole state, so a fold may begin there."""
        t = self.clock.now_us()
        image = ev.StateImage(t, msgspec.Raw(self.state.image()))
        offset = self.writer.rotate(image)
        if offset is not None:
            self.state.offset = offset + 1
            self.state.t = t
        return offset

    # --- commands with more to them than building the event ---------------------------------------------------------

    def reserve(
        self,
        prompts: Sequence[ev.PromptRef],
        generations: int,
        next_fetch: tuple[int, int],
        *,
        kind: str = ev.KIND_ORDINARY,
        pool_groups: Sequence[int] = (),
    ) -> tuple[int, int]:
        """Own the next prompts. Returns (admission id, offset); dispatch only once that offset is durable (rule 3)."""
        state = self.state
        admission_id = state.next_admission
        event = ev.BatchReserved(
            self.clock.now_us(),
            admission_id,
            state.next_group,
            tuple(prompts),
            generations,
            *next_fetch,
            kind,
            tuple(pool_groups),
        )
        return admission_id, self.record(event)

    def dispatch(
        self,
        group: int,
        sibling: int,
        worker: int,
        weights: tuple[int, int],
        prefix: int = 0,
        prefix_from: int = -1,
    ) -> ev.AttemptKey:
        """Start the sibling's next attempt; returns its identity. ``prefix_from``: whose tokens it goes on from."""
        attempt = self.state.groups[group].siblings[sibling].attempt + 1
        self.record(
            ev.AttemptDispatched(self.clock.now_us(), group, sibling, attempt, worker, *weights, prefix, prefix_from)
        )
        return ev.AttemptKey(self.state.incarnation, group, sibling, attempt)

    def is_running(self, key: ev.AttemptKey) -> bool:
        """Whether this very attempt is open."""
        group = self.state.groups.get(key.group)
        if group is None:
            return False
        return group.siblings[key.sibling].status == DISPATCHED and group.key(key.sibling) == key

    def seal(self, key: ev.AttemptKey, receipt: ev.Receipt, *, adopted: bool = False) -> bool:
        """Take over a finished sibling. False if it comes too late (its group is gone): the caller clears its row."""
        if not self.is_running(key):
            self.late += 1
            if key in self.state.zombies:
                self._abandon(key, ev.ABANDON_GROUP_DISCARDED, receipt.tokens, receipt.tokens)
            return False
        self.record(ev.AttemptSealed(self.clock.now_us(), key.group, key.sibling, key.attempt, receipt, adopted))
        return True

    def fail(self, key: ev.AttemptKey, kind: str, cause: str, tokens: int = 0) -> bool:
        """Note a failed try. False if it comes too late."""
        if not self.is_running(key):
            self.late += 1
            if key in self.state.zombies:
                self._abandon(key, ev.ABANDON_GROUP_DISCARDED, tokens, 0)
            return False
        cause = cause if len(cause) <= CAUSE_CHARS_MAX else cause[: CAUSE_CHARS_MAX - 1] + "…"
        self.record(ev.AttemptFailed(self.clock.now_us(), key.group, key.sibling, key.attempt, kind, cause, tokens))
        return True

    def abandon(self, key: ev.AttemptKey, reason: str, tokens: int = 0, durable: int = 0) -> bool:
        """End a try that we cut short. False if it is not open any more."""
        if key in self.state.zombies:
            self._abandon(key, ev.ABANDON_GROUP_DISCARDED, tokens, durable)
            return False
        if not self.is_running(key):
            self.late += 1
            return False
        self._abandon(key, reason, tokens, durable)
        return True

    def _abandon(self, key: ev.AttemptKey, reason: str, tokens: int, durable: int) -> None:
        t = self.clock.now_us()
        self.record(ev.AttemptAbandoned(t, key.group, key.sibling, key.attempt, reason, tokens, durable))

    def lose(self, key: ev.AttemptKey, reason: str) -> bool:
        """A sealed sibling has to be generated again (its payload is lost). False if its group moved on."""
        group = self.state.groups.get(key.group)
        if group is None or group.status not in (UNFINISHED, COMPLETE, COMMITTED):
            return False
        sibling = group.siblings[key.sibling]
        if sibling.status != SEALED or sibling.attempt != key.attempt or sibling.receipt is None:
            return False
        committed = group.status == COMMITTED
        self._abandon(key, reason, sibling.receipt.tokens, 0)
        if committed and self.reopened is not None:
            self.reopened(key.group)
        return True

    def commit_group(self, group_id: int) -> bool:
        """Hand a complete group, its rows all in the data plane, to the buffer. False if it is not complete now."""
        group = self.state.groups.get(group_id)
        if group is None or group_id not in self.state.complete:
            return False
        receipts = [s.receipt for s in group.siblings if s.receipt is not None]
        self.record(
            ev.GroupCommitted(
                self.clock.now_us(),
                group_id,
                len(receipts),
                sum(r.tokens for r in receipts),
                min(r.version_min for r in receipts),
                max(r.version_max for r in receipts),
            )
        )
        return True

    def running(self, group_id: int) -> list[ev.AttemptKey]:
        """Open attempts of a group."""
        group = self.state.groups.get(group_id)
        if group is None:
            return []
        return [group.key(i) for i, s in enumerate(group.siblings) if s.status == DISPATCHED]


CAUSE_CHARS_MAX = 500
