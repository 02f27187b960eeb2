"""The real TransferQueue for the slow tests of this folder: the engine tests' fixtures."""

from tests.engine.conftest import ray_cluster, real_plane

__all__ = ["ray_cluster", "real_plane"]
