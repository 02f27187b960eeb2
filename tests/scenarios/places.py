"""Places to run a scenario in: all in memory and virtual time, or a folder and TransferQueue."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from tests.fakes import SimDataPlane, VirtualClock
from tests.scenarios.buffers import Place
from tests.sim_storage import SimStorage
from tests.simulation.world import SimFolders
from unlost.engine.folders import RealFolders
from unlost.journal.storage import RealStorage


class WallClock:
    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def in_memory() -> Place:
    """A place whose next life finds an empty data plane, as after a crash of everything."""
    storage, clock = SimStorage(), VirtualClock()
    storage.make_directory("run")

    async def fresh() -> SimDataPlane:
        plane = SimDataPlane(clock, storage=storage, save_seconds=0.05)
        await plane.start()
        return plane

    return Place(storage, SimFolders(storage), "run", clock, await fresh(), fresh)


async def on_disk(root: str, plane: Any) -> Place:
    """The same over a folder and a running TransferQueue, which is restarted empty for each next life."""
    os.makedirs(root, exist_ok=True)

    async def fresh() -> Any:
        await plane.restart()
        return plane

    rows = await plane.inventory()
    if rows:
        await plane.clear(list(rows))
    return Place(RealStorage(), RealFolders(), root, WallClock(), plane, fresh)
