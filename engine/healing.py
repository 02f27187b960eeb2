"""A data plane that comes back: when a process of it dies, it is restarted and gets its rows again from the payloads.

Wraps the controller's ``DataPlane``. Workers and trainer ranks reach the service through their own clients; when one of
these reports the loss, the caller awaits ``heal`` and asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from ..replay import events as ev
from ..replay.payload_records import PayloadDamaged
from ..replay.payloads import PayloadStore
from ..replay.state import CLAIMED, SEALED, UNFINISHED
from .data_plane import DataPlaneLost, RowDamaged
from .ledger import Ledger
from .protocols import DataPlane, Row
from .rows import row_of

log = logging.getLogger(__name__)

T = TypeVar("T")

HEALS_MAX = 5
PUTS_AT_ONCE = 8


class RestartableDataPlane(DataPlane, Protocol):
    """A data plane whose service can be started anew, empty."""

    async def restart(self) -> None:
        """Drop what is left of the service and start an empty one."""
        ...


class HealingDataPlane:
    """Implements ``DataPlane``. ``payloads`` None: a loss can't be mended here and is raised (``payloads: none``)."""

    def __init__(self, plane: RestartableDataPlane, ledger: Ledger, payloads: PayloadStore | None) -> None:
        self.plane = plane
        self.ledger = ledger
        self.payloads = payloads
        self.generation = 0
        self._healing = asyncio.Lock()

    async def start(self) -> None:
        await self.plane.start()

    async def stop(self) -> None:
        await self.plane.stop()

    async def put(self, row: Row) -> None:
        await self.with_healing(lambda: self.plane.put(row))

    async def get(self, keys: Sequence[str]) -> list[Row]:
        return await self.with_healing(lambda: self.plane.get(keys))

    async def inventory(self) -> dict[str, int]:
        return await self.with_healing(self.plane.inventory)

    async def clear(self, keys: Sequence[str]) -> None:
        await self.with_healing(lambda: self.plane.clear(keys))

    async def save(self, directory: str) -> dict[str, str]:
        """A snapshot that a loss interrupts is not repeated into the same folder: it fails, as a retryable error."""
        async with self._healing:  # rows are on their way back: a snapshot of now would miss them
            before = self.generation
        try:
            return await self.plane.save(directory)
        except DataPlaneLost as error:
            if self.payloads is None:
                raise
            await self.heal(before)
            raise OSError(f"the data plane was lost while its snapshot was written: {error}") from error

    async def load(self, directory: str, digests: Mapping[str, str]) -> None:
        """A snapshot goes into an empty service, so a loss meanwhile costs nothing: another one is started for it."""
        for left in range(HEALS_MAX, -1, -1):
            try:
                await self.plane.load(directory, digests)
                return
            except DataPlaneLost as error:
                if not left:
                    raise
                log.error("lost while a snapshot was loaded into it: %s", error)
                await self.plane.restart()

    async def with_healing(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await ``call()``; after a loss or damaged rows mend and ask again, a few times at most.

        ``call`` must be safe to repeat. For calls of others (a worker's put, a train step) that touch the data plane.
        """
        for left in range(HEALS_MAX, -1, -1):
            async with self._healing:  # rows are on their way back: who looks now would miss them
                pass
            before = self.generation
            try:
                return await call()
            except DataPlaneLost as error:
                if not left or self.payloads is None:
                    raise
                log.error("%s", error)
                await self.heal(before)
            except RowDamaged as error:
                if not left or self.payloads is None:
                    raise
                log.error("%s", error)
                await self._put_back(set(error.keys))
        raise AssertionError("unreachable")

    async def heal(self, seen: int) -> None:
        """Restart the service and put back every row that the fold owns; once, however many callers saw the loss."""
        async with self._healing:
            if self.generation != seen:
                return
            began = self.ledger.clock.now_us()
            rows = await self._start_again()
            self.generation += 1
            now = self.ledger.clock.now_us()
            self.ledger.record(ev.DataPlaneRestarted(now, rows, (now - began) / 1e6))
            log.error("the data plane was restarted; %d rows put back from payloads", rows)

    async def _start_again(self) -> int:
        """Restart and put the rows back, again if it is lost meanwhile. Returns the rows put back."""
        for left in range(HEALS_MAX, -1, -1):
            await self.plane.restart()
            try:
                return await self._put_back(None)
            except DataPlaneLost as error:
                if not left:
                    raise
                log.error("lost again while its rows were being put back: %s", error)
        raise AssertionError("unreachable")

    async def _put_back(self, wanted: set[str] | None) -> int:
        """Rows of sealed siblings, from their payloads; one that is lost too is given up, and its group redone."""
        assert self.payloads is not None
        state = self.ledger.state
        owned = [
            (group.key(index), sibling.receipt)
            for group in state.groups.values()
            if UNFINISHED <= group.status <= CLAIMED
            for index, sibling in enumerate(group.siblings)
            if sibling.status == SEALED and sibling.receipt is not None
        ]
        limit = asyncio.Semaphore(PUTS_AT_ONCE)

        async def put(key: ev.AttemptKey, receipt: ev.Receipt) -> int:
            if wanted is not None and key.row_key() not in wanted:
                return 0
            async with limit:
                assert self.payloads is not None
                try:
                    payload = await self.ledger.blocking(self.payloads.load, receipt, key)
                except PayloadDamaged as error:
                    log.error("group %d sibling %d is lost: %s", key.group, key.sibling, error)
                    self.ledger.lose(key, ev.ABANDON_PAYLOAD_LOST)
                    return 0
                await self.plane.put(row_of(payload))
                return 1

        return sum(await asyncio.gather(*(put(key, receipt) for key, receipt in owned)))
