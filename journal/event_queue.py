"""The caller's side of the writer: encode, number, queue. No I/O, no waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .clock import Clock
from .errors import JournalError, JournalEventRefused, JournalOverrun
from .flusher import Flusher
from .format import RAW_BYTES_MAX
from .frames import Batch, EventTypes, Later
from .options import EVENT_OVERHEAD_BYTES, JournalOptions
from .waiters import fresh

E = TypeVar("E")


class EventQueue(Generic[E]):
    """Events between ``append`` and the flusher. A base of the writer, so that ``append`` is one call.

    ``_limit`` is the cost up to which ``append`` may go on without looking further; -1 sends it to ``_admit``, which
    knows why: an idle flush thread to wake, or a reason to refuse.
    """

    # `append` runs a few hundred thousand times a second: slots are found faster than the entries of a large dict.
    __slots__ = (
        "__weakref__", "_appended_cost", "_classes", "_clock", "_encode", "_first", "_flusher", "_idle", "_limit",
        "_lock", "_pending", "_pending_cost", "_pending_since", "_refusal", "_rotate_next", "_sealed", "_unbuilt",
        "_wake", "directory", "options",
    )  # fmt: skip
    _flusher: Flusher

    def __init__(
        self, directory: str, types: EventTypes, options: JournalOptions, clock: Clock, next_offset: int
    ) -> None:
        self.directory = directory
        self.options = options
        self._classes = types.classes
        self._encode = types.encode_checked if options.check_events else types.encode
        self._clock = clock
        self._lock = threading.Lock()
        self._first = next_offset
        self._pending: list[bytes | Later] = []
        self._unbuilt = False
        self._pending_since = clock.monotonic()
        self._pending_cost = 0
        self._sealed: list[Batch] = []
        self._rotate_next = False
        self._appended_cost = 0
        self._limit = options.backlog_max_bytes
        self._refusal: JournalError | None = None
        self._idle = False
        self._wake = threading.Event()

    @property
    def next_offset(self) -> int:
        """Offset that the next event will get."""
        with self._lock:
            return self._first + len(self._pending)

    def append(self, event: E) -> int:
        """Encode and queue one event; its offset. No I/O; about half a microsecond.

        Raises JournalEventRefused, JournalClosed, JournalFailed, JournalForked, or JournalOverrun at the hard bound
        of the backlog; in each case nothing was queued and no offset used.
        """
        if type(event) not in self._classes:
            raise JournalEventRefused(f"{type(event).__name__} is not one of this journal's event types")
        data = self._encode(event)
        with self._lock:
            total = self._appended_cost + len(data) + EVENT_OVERHEAD_BYTES
            if total > self._limit:
                self._admit(total)
            self._appended_cost = total
            pending = self._pending
            offset = self._first + len(pending)
            pending.append(data)  # the one step that makes it an event: an interrupt may come between any two
        return offset

    def append_later(self, build: Callable[[], E], bytes_max: int) -> int:
        """Queue one event that is still to be built and encoded, by the flush thread; its offset. No I/O.

        For large events, whose making would hold up the caller. ``build`` is called once, on the flush thread (in
        ``pump``, if there is none), and what it makes is there when ``flushed`` returns; it may use nothing that
        changes meanwhile. ``bytes_max``: what it holds until then and what its encoding takes, at most, for the bound
        of the backlog. If it raises, or makes something that is no event of this journal, the journal fails, with
        everything before that event durable: its offset is given already.
        Raises as ``append`` does, but for JournalEventRefused; JournalError for a ``bytes_max`` that is no size.
        """
        if not 0 <= bytes_max <= RAW_BYTES_MAX:
            raise JournalError(f"bytes_max is {bytes_max}: give the size of the event, at most {RAW_BYTES_MAX} bytes")
        later = Later(build, self._encoded, bytes_max + EVENT_OVERHEAD_BYTES)
        with self._lock:
            total = self._appended_cost + later.cost_bytes
            if total > self._limit:
                self._admit(total)
            self._appended_cost = total
            self._unbuilt = True
            pending = self._pending
            offset = self._first + len(pending)
            pending.append(later)
        return offset

    def _encoded(self, event: E) -> bytes:
        if type(event) not in self._classes:
            raise JournalEventRefused(f"{type(event).__name__} is not one of this journal's event types")
        return self._encode(event)

    def _admit(self, total: int) -> None:
        """The slow path of ``append``, under the lock: wake an idle flush thread, or refuse."""
        if self._refusal is not None:
            raise fresh(self._refusal)
        if self._idle:
            self._idle = False
            self._pending_since = self._clock.monotonic()
            self._limit = self._flusher.durable_cost + self.options.backlog_max_bytes
            self._wake.set()
        if total > self._limit:
            raise JournalOverrun(
                f"{self.directory}: {self._appended_cost - self._flusher.durable_cost} bytes wait for the storage; "
                f"{total - self._appended_cost} more would be above {self.options.backlog_max_bytes} "
                f"(journal.backlog_max_bytes). The last failure was: {self._flusher.last_error or 'none'}"
            )

    def rotate(self, image: E | None = None) -> int | None:
        """Begin a new segment with the next event; with ``image``, that is its first event, and flagged.

        A fold may begin at an image. Returns the image's offset. No I/O on the caller.
        """
        if image is None:
            with self._lock:
                self._refuse_if_ended()
                self._seal_pending()
                self._rotate_next = True
            return None
        if type(image) not in self._classes:
            raise JournalEventRefused(f"{type(image).__name__} is not one of this journal's event types")
        data = self._encode(image)
        cost = len(data) + EVENT_OVERHEAD_BYTES
        with self._lock:
            if self._appended_cost + cost > self._limit:
                self._admit(self._appended_cost + cost)
            self._seal_pending()
            batch = Batch(self._first, [data], cost, True, True, self._clock.monotonic())
            self._appended_cost += cost
            self._pending_cost = self._appended_cost
            self._rotate_next = False
            self._queue(batch)
        return batch.first_offset

    def _seal_pending(self) -> None:
        """Under the lock: make a batch of what is pending."""
        now = self._clock.monotonic()
        if self._pending:
            cost = self._appended_cost - self._pending_cost
            batch = Batch(
                self._first, self._pending, cost, self._rotate_next, False, self._pending_since, self._unbuilt
            )
            self._unbuilt = False
            self._rotate_next = False
            self._queue(batch)
        self._pending_since = now
        self._pending_cost = self._appended_cost

    def _queue(self, batch: Batch) -> None:
        """Under the lock, in an order in which an interrupt leaves offsets that the sink refuses, never wrong ones."""
        self._sealed.append(batch)
        self._pending = []
        self._first = batch.first_offset + len(batch.events)

    def _take(self) -> list[Batch]:
        """For the flusher: everything queued so far."""
        with self._lock:
            self._seal_pending()
            taken, self._sealed = self._sealed, []
            return taken

    def _refuse_if_ended(self) -> None:
        if self._refusal is not None:
            raise fresh(self._refusal)
