"""asyncio waiters for durability and for room in the backlog, woken from the flush thread.

However many wait, the flush thread schedules one callback per event loop and flush.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # asyncio takes 50 ms to load; whoever waits in a loop has it already, and tools do not need it
    import asyncio


def fresh(failure: BaseException) -> BaseException:
    """A copy to raise: one instance raised in many places would gather all their tracebacks."""
    copy = type(failure)(*failure.args)
    copy.__cause__ = failure.__cause__
    return copy


class _LoopWaiters:
    """The waiters of one loop: a heap by offset, and those waiting for room."""

    __slots__ = ("durable", "room", "scheduled", "sequence")

    def __init__(self) -> None:
        self.durable: list[tuple[int, int, asyncio.Future[None]]] = []
        self.room: list[asyncio.Future[None]] = []
        self.scheduled = False
        self.sequence = 0


class Waiters:
    """``state`` tells (durable_upto, has room, failure) when a woken loop looks."""

    def __init__(self, state: Callable[[], tuple[int, bool, BaseException | None]]) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, _LoopWaiters] = {}

    async def durable(self, offset: int) -> None:
        """Return once ``offset`` is durable; raise the journal's failure."""
        future, mine = self._enter()
        with self._lock:
            mine.sequence += 1
            heapq.heappush(mine.durable, (offset, mine.sequence, future))
        self._settle(future.get_loop())  # it may have become durable since the caller looked
        await future

    async def room(self) -> None:
        """Return once the backlog is below its high mark; raise the journal's failure."""
        future, mine = self._enter()
        with self._lock:
            mine.room.append(future)
        self._settle(future.get_loop())
        await future

    def _enter(self) -> tuple[asyncio.Future[None], _LoopWaiters]:
        from asyncio import get_running_loop

        loop = get_running_loop()
        with self._lock:
            return loop.create_future(), self._loops.setdefault(loop, _LoopWaiters())

    def notify(self) -> None:
        """From any thread: let every loop that has waiters look again, once."""
        with self._lock:
            loops = [loop for loop, mine in self._loops.items() if not mine.scheduled]
            for loop in loops:
                self._loops[loop].scheduled = True
        for loop in loops:
            try:
                loop.call_soon_threadsafe(self._settle, loop)
            except RuntimeError:  # the loop was closed with waiters in it: nobody is left to be told
                with self._lock:
                    self._loops.pop(loop, None)

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the loop's own thread: resolve what can be."""
        ready: list[asyncio.Future[None]] = []
        with self._lock:
            mine = self._loops.get(loop)
            if mine is None:
                return
            mine.scheduled = False
            durable_upto, has_room, failure = self._state()
            while mine.durable and (failure is not None or mine.durable[0][0] < durable_upto):
                offset, _, future = heapq.heappop(mine.durable)
                if offset < durable_upto:
                    ready.append(future)
                elif failure is not None and not future.done():
                    future.set_exception(fresh(failure))
            if has_room or failure is not None:
                for future in mine.room:
                    if failure is not None and not has_room and not future.done():
                        future.set_exception(fresh(failure))
                    else:
                        ready.append(future)
                mine.room.clear()
            if not mine.durable and not mine.room:
                del self._loops[loop]
        for future in ready:
            if not future.done():
                future.set_result(None)
