"""The journal's writer: ``append`` on the caller's side, one flush thread behind it.

What it promises (docs/DURABILITY.md): an event whose ``flushed`` returned survives a power cut; ``append`` does no
I/O and never waits; offsets are dense and never used twice; memory is bounded; after a failure of the storage the
undurable events are written again from memory, or the journal fails loudly.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType
from typing import Any, TypeVar

from .clock import Clock, SystemClock
from .errors import (
    JournalClosed,
    JournalError,
    JournalFailed,
    JournalForked,
    JournalTimeout,
)
from .event_queue import EventQueue
from .flusher import Flusher
from .format import JOURNAL_ID_BYTES_MAX
from .frames import EventTypes
from .lifecycle import LIVE
from .lock import DirectoryLock
from .opening import OpenedSink, open_sink
from .options import JournalMetrics, JournalOptions
from .prune import PruneReport, prune_locked
from .storage import RealStorage, Storage
from .waiters import Waiters, fresh

logger = logging.getLogger(__name__)

E = TypeVar("E")
_IDLE_AFTER_S = 1.0
_JOIN_S = 10.0


class JournalWriter(EventQueue[E]):
    """See the module. Made by ``open``; used from any thread; a context manager that closes."""

    __slots__ = (
        "_closed", "_dir_lock", "_dropped", "_durable_changed", "_pid", "_release_in_thread", "_storage", "_thread",
        "_thread_ended", "_waiters", "incarnation", "journal_id", "recovery",
    )  # fmt: skip

    def __init__(
        self,
        directory: str,
        types: EventTypes,
        options: JournalOptions,
        storage: Storage,
        clock: Clock,
        lock: DirectoryLock,
        opened: OpenedSink,
    ) -> None:
        """Use ``open``."""
        super().__init__(directory, types, options, clock, opened.report.next_offset)
        self.journal_id = opened.journal_id
        self.incarnation = opened.incarnation
        self.recovery = opened.report
        self._storage = storage
        self._dir_lock = lock
        self._closed = False
        self._dropped = self._release_in_thread = self._thread_ended = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._durable_changed = threading.Condition()
        self._waiters = Waiters(self._waiter_state)
        self._flusher = Flusher(opened.sink, options, clock, lock, self._take)

    # ------------------------------------------------------------------ opening

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        types: Any,
        *,
        journal_id: str,
        options: JournalOptions = JournalOptions(),  # noqa: B008  frozen
        storage: Storage | None = None,
        take_over: bool = False,
        threaded: bool = True,
        incarnation: int | None = None,
        clock: Clock | None = None,
    ) -> JournalWriter[Any]:
        """Lock the directory, recover what is in it and be ready to append.

        ``types``: the union of event Structs. ``incarnation``: the highest in the headers + 1 unless given.
        ``threaded=False``: nothing happens in the background; the owner calls ``pump``.
        Raises JournalLocked, JournalDamaged, JournalMismatch, JournalUnsupported, OSError; nothing is changed then,
        except that a torn tail may already have been cut.
        """
        if not 0 < len(journal_id.encode()) <= JOURNAL_ID_BYTES_MAX:
            raise JournalError(f"journal id {journal_id!r}: 1 to {JOURNAL_ID_BYTES_MAX} bytes of UTF-8, please")
        path = os.fspath(directory)
        storage = storage or RealStorage()
        clock = clock or SystemClock()
        event_types = types if isinstance(types, EventTypes) else EventTypes(types)
        storage.make_directory(path)
        lock = DirectoryLock.acquire(storage, path, clock, take_over=take_over)
        try:
            opened = open_sink(storage, path, journal_id, incarnation, options, clock, lock)
            writer = cls(path, event_types, options, storage, clock, lock, opened)
            if threaded:
                name = f"journal-flush {os.path.basename(path)}"
                writer._thread = threading.Thread(target=writer._run, name=name, daemon=True)
                writer._thread.start()
        except BaseException:
            lock.release()
            raise
        LIVE.add(writer)
        return writer

    # ------------------------------------------------------------------ durability

    @property
    def threaded(self) -> bool:
        """Whether a flush thread works for this writer; else its owner calls ``pump``."""
        return self._thread is not None

    @property
    def durable_upto(self) -> int:
        """Every event below this offset survives a power cut."""
        return self._flusher.durable_upto

    @property
    def above_high_mark(self) -> bool:
        """Whether the backlog is at or above ``backlog_high_bytes``: stop dispatching new work."""
        return self._appended_cost - self._flusher.durable_cost >= self.options.backlog_high_bytes

    async def flushed(self, offset: int) -> None:
        """Return once ``offset`` is durable. It does not hurry the flush. Raises JournalFailed, JournalClosed."""
        if offset < self._flusher.durable_upto:
            return
        if offset >= (upto := self.next_offset):
            raise JournalError(f"{self.directory}: event {offset} was not appended yet (next is {upto})")
        await self._waiters.durable(offset)

    async def drain(self) -> None:
        """Return once the backlog is below ``backlog_high_bytes``; at once if it is."""
        if self.above_high_mark:
            await self._waiters.room()

    def sync(self, timeout_s: float | None = None) -> int:
        """Block until everything appended so far is durable, flushing at once; ``durable_upto``.

        Raises JournalFailed, JournalTimeout (also unthreaded, when the storage keeps refusing).
        """
        target = self.next_offset
        if self._thread is None:
            self._sync_by_pumping(target)
        else:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            self._flusher.urgent = True
            self._wake.set()
            with self._durable_changed:
                while self._flusher.durable_upto < target:
                    self._refuse_undurable(target)
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise JournalTimeout(
                            f"{self.directory}: durable up to {self._flusher.durable_upto} of {target} after "
                            f"{timeout_s} s; last failure: {self._flusher.last_error or 'none, the storage is slow'}"
                        )
                    self._durable_changed.wait(min(left, 1.0) if left is not None else 1.0)
                    self._flusher.urgent = True
        return self._flusher.durable_upto

    def _sync_by_pumping(self, target: int) -> None:
        for _ in range(self.options.max_write_failures + 1):
            if self._flusher.durable_upto >= target:
                return
            self._refuse_undurable(target)
            self.pump()
        if self._flusher.durable_upto < target:
            self._refuse_undurable(target)
            raise JournalTimeout(
                f"{self.directory}: durable up to {self._flusher.durable_upto} of {target}; last failure: "
                f"{self._flusher.last_error}"
            )

    def _refuse_undurable(self, target: int) -> None:
        if self._refusal is not None and self._flusher.durable_upto < target and not self._closing_now():
            raise fresh(self._refusal)

    def _closing_now(self) -> bool:
        return isinstance(self._refusal, JournalClosed) and not self._closed

    def sync_watermark(self) -> None:
        """Sync events, then the WATERMARK file. Blocks; raises JournalFailed, JournalTimeout.

        To be called before an effect that destroys something (clearing, pruning), so that its event can't be taken
        for a torn tail after a power cut.
        """
        self.sync()
        self.check_ownership()
        try:
            self._flusher.sync_watermark()
        except OSError as error:
            raise JournalFailed(f"{self.directory}: WATERMARK can't be made durable: {error}") from error

    def check_ownership(self) -> None:
        """Raise JournalFenced if a newer writer has taken this journal over.

        To be called before publishing, clearing or pruning: between machines the lock may not hold.
        """
        self._refuse_if_ended()
        try:
            self._dir_lock.check()
        except JournalFailed as error:
            self._end(error)
            raise

    # ------------------------------------------------------------------ flushing

    def pump(self) -> None:
        """One flush on the calling thread, for ``threaded=False``; harmless otherwise.

        Everything queued becomes durable, or a failure is dealt with as the options say.
        """
        failure = self._flusher.cycle()
        self._after_cycle(failure)

    def _after_cycle(self, failure: JournalFailed | None) -> None:
        if failure is not None and not isinstance(self._refusal, JournalFailed):
            self._end(failure)
        with self._lock:
            if self._refusal is None and not self._idle:
                self._limit = self._flusher.durable_cost + self.options.backlog_max_bytes
        self._waiters.notify()
        with self._durable_changed:
            self._durable_changed.notify_all()

    def _end(self, refusal: JournalError) -> None:
        """From now on every append raises ``refusal``."""
        with self._lock:
            self._refusal = refusal
            self._limit = -1
        self._flusher.failed = self._flusher.failed or isinstance(refusal, JournalFailed)
        self._waiters.notify()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            self._wake.wait(self.options.heartbeat_s if self._idle else self._flusher.delay_s())
            self._wake.clear()
            if self._flusher.holds_off():
                continue  # woken by who wants it durable now: after a failure that is not sooner
            try:
                failure = self._flusher.cycle()
            except BaseException as error:  # a bug must end the journal loudly, not its thread silently
                logger.exception("%s: the flush thread failed", self.directory)
                failure = JournalFailed(f"{self.directory}: the flush thread failed: {error!r}")
                failure.__cause__ = error
            self._after_cycle(failure)
            if self._flusher.failed or self._flusher.stop_requested:
                break
            now = time.monotonic()
            if self._flusher.worked:
                idle_since = now
            elif now - idle_since > _IDLE_AFTER_S:
                self._go_idle()
        with self._lock:
            self._thread_ended = True
        if self._release_in_thread:
            self._release()

    def _go_idle(self) -> None:
        """Nothing came for a second: sleep until ``append`` wakes us, instead of every flush interval."""
        with self._lock:
            if not self._pending and not self._sealed and self._refusal is None:
                self._idle = True
                self._limit = -1

    # ------------------------------------------------------------------ the rest

    def metrics(self) -> JournalMetrics:
        """A snapshot, cheap enough to take often."""
        with self._lock:
            since = [b.queued_since for b in self._sealed[:1]] + ([self._pending_since] if self._pending else [])
            return self._flusher.metrics(
                next_offset=self._first + len(self._pending),
                appended_cost=self._appended_cost,
                queued_since=min(since, default=None),
            )

    def prune(self, before_offset: int) -> PruneReport:
        """Remove whole segments that lie before ``before_offset``; the floor is recorded durably first.

        The open segment always stays. What may be given up is the caller's knowledge: the journal only makes sure
        that a crash in between does not read as damage. Raises JournalFenced, OSError.
        """
        self.check_ownership()
        return prune_locked(
            self._storage,
            self.directory,
            before_offset,
            journal_id=self.journal_id,
            incarnation=self.incarnation,
            wall_ns=self._clock.wall_ns(),
            floor_max=self._flusher.durable_upto - 1,
        )

    def close(self, timeout_s: float | None = None) -> None:
        """Make everything durable, say goodbye in LOCK, unlock. Idempotent.

        Raises JournalFailed or JournalTimeout if something could not be made durable; it is closed all the same.
        """
        if self._closed:
            return
        with self._lock:
            failed = isinstance(self._refusal, JournalFailed)
            if not failed:
                self._refusal = JournalClosed(f"{self.directory}: the journal is closed")
                self._limit = -1
        try:
            if not failed:
                self.sync(timeout_s)
            elif self._flusher.durable_upto < self.next_offset and self._refusal is not None:
                raise fresh(self._refusal)
        finally:
            self._shut(join_s=_JOIN_S if timeout_s is None else min(timeout_s, _JOIN_S))

    def _shut(self, *, drop: bool = False, join_s: float = _JOIN_S) -> None:
        """Stop the thread and let go of files and lock.

        A thread that hangs in the storage does the last part itself when it comes back: the lock must not go while a
        write may still happen.
        """
        self._closed = True
        self._dropped = drop
        LIVE.discard(self)
        thread = self._thread
        self._flusher.stop_requested = True
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(join_s)
            with self._lock:
                self._release_in_thread = not self._thread_ended
            if self._release_in_thread:
                logger.error("%s: the storage hangs; the lock is kept until it answers", self.directory)
                self._waiters.notify()
                return
        self._release()
        self._waiters.notify()

    def _release(self) -> None:
        self._flusher.close()
        if self._dropped:
            self._dir_lock.drop()
        else:
            self._dir_lock.release()

    def abandon(self) -> None:
        """Let go as a crash would: nothing more is written, the lock is dropped without a goodbye."""
        if self._closed:
            return
        self._end(JournalClosed(f"{self.directory}: the journal was abandoned"))
        self._flusher.abandoned = True
        self._shut(drop=True)

    def after_fork_in_child(self) -> None:
        """The child has no flush thread and must not hold the parent's lock: every append here raises."""
        self._lock = threading.Lock()  # the parent's threads may have held the old ones
        self._durable_changed = threading.Condition()
        self._waiters = Waiters(self._waiter_state)
        self._refusal = JournalForked(
            f"{self.directory}: this writer belongs to process {self._pid}; a forked child opens its own journal"
        )
        self._limit = -1
        self._closed = True
        self._flusher.after_fork_in_child()
        self._dir_lock.drop()

    def _waiter_state(self) -> tuple[int, bool, BaseException | None]:
        failure = None if self._closing_now() else self._refusal
        return self._flusher.durable_upto, not self.above_high_mark, failure

    def __enter__(self) -> JournalWriter[E]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except JournalError:
            if error is None:
                raise
            logger.exception("%s: closing after another error", self.directory)
