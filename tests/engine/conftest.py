"""One Ray cluster for all tests of this folder that need real processes; it starts with the first of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from unlost.engine.cluster import Cluster, ClusterOptions
from unlost.engine.data_plane import TransferQueueDataPlane

CPUS = 12


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Cluster]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Cluster(ClusterOptions(cpus=CPUS, start_timeout_s=180)) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def real_plane(ray_cluster: Cluster) -> AsyncIterator[TransferQueueDataPlane]:
    """A running TransferQueue with two storage units. Tests leave it running, and clear what they put."""
    async with running_plane(storage_units=2) as plane:
        yield plane


@asynccontextmanager
async def running_plane(storage_units: int) -> AsyncIterator[TransferQueueDataPlane]:
    """TransferQueue, started in the Ray cluster that is up, and stopped."""
    plane = TransferQueueDataPlane(storage_units=storage_units, start_timeout_s=180)
    await plane.start()
    yield plane
    await plane.stop()
