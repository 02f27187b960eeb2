"""The real TransferQueue for the slow tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.engine.conftest import ray_cluster, running_plane
from unlost.engine.cluster import Cluster
from unlost.engine.data_plane import TransferQueueDataPlane

__all__ = ["ray_cluster", "real_plane"]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def real_plane(ray_cluster: Cluster) -> AsyncIterator[TransferQueueDataPlane]:
    """One storage unit: every case starts the service anew, and each of its processes takes seconds to import."""
    async with running_plane(storage_units=1) as plane:
        yield plane
