"""One Ray cluster for all tests of this folder that need real processes; it starts with the first of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

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
    plane = TransferQueueDataPlane(storage_units=2, start_timeout_s=180)
    await plane.start()
    yield plane
    await plane.stop()
