"""The data plane on TransferQueue (TQ): rows by key, put singly, read back verified.

Promises: a row is stored under the key that names its attempt, in the partition of the incarnation that dispatched it,
so that no older or younger controller can mistake it; what ``get`` returns has the checksum that was put; every wait
has a deadline, and a service that died is told apart from one that is slow.

Two classes share the row operations. ``TransferQueueDataPlane`` owns the service: it starts, saves, loads, restarts and
stops it, in the controller's process. ``AttachedDataPlane`` is a client in another process of the same Ray job
(workers, trainer ranks); it finds the service by name, and finds it again after a restart.

A row is two 1-D tensors (``input_ids``: int32, prompt and generated tokens; ``logprobs``: float32, generated tokens)
and a tag with everything else, so that ``inventory`` needs no payload. Rows go singly on purpose: TQ pickles a row
together with its whole put batch, which makes a snapshot of batched rows several times the data.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ..journal.errors import UnlostError
from . import data_plane_snapshot as snapshot
from .deadline import DeadlineExceeded, call_in_daemon_thread
from .protocols import Row, SnapshotMismatch
from .rows import PARTITION_PREFIX, checksum_of, decode_row, encode_row, partition_of

log = logging.getLogger(__name__)

T = TypeVar("T")

CONTROLLER_NAME: Final = "TransferQueueController"
CONTROLLER_NAMESPACE: Final = "transfer_queue"
UNIT_NAME: Final = "TransferQueueStorageUnit#{}"
FIELDS: Final = ("input_ids", "logprobs")
ROWS_PER_GET_MAX: Final = 512
PROBE_AFTER_S: Final = 5.0

ENVIRONMENT: Final[Mapping[str, str]] = {
    # TQ pins torch to this many threads around each call; more than there are cores warns at every put.
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    # TQ retries a request that was not answered in time. A put that arrives during a snapshot waits for all of it, so
    # its own limit must not strike first; ours do, and look whether the service is alive.
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "7200",
}
"""TransferQueue reads these when it is imported; every process of a run has them (engine/cluster.py)."""


class DataPlaneError(UnlostError):
    """The data plane can't do what was asked."""


class DataPlaneLost(DataPlaneError):
    """A process of the service is gone, and its rows with it: ``restart``, then put the rows back from payloads."""


class RowDamaged(DataPlaneError):
    """Rows whose content is not what was put. ``keys`` names them; put them back from their payloads."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__(f"rows {', '.join(keys)} do not have the checksum they were stored with; put them back")


class _RowClient:
    """Row operations over a TQ client. All calls from one event loop."""

    def __init__(self, *, op_timeout_s: float, unit_namespace: str | None) -> None:
        self._client: Any = None
        self._controller_id = ""
        self._units = 0
        self._op_timeout_s = op_timeout_s
        self._unit_namespace = unit_namespace
        self._gone: asyncio.Event = asyncio.Event()

    async def put(self, row: Row) -> None:
        """Store one row under its key; a second put of the same row is harmless."""
        fields, tag = encode_row(row)
        key = row.key.row_key()

        async def put(client: Any) -> None:
            from tensordict import TensorDict

            meta = await client.async_kv_retrieve_meta(keys=[key], partition_id=partition_of(key), create=True)
            meta.update_custom_meta([tag])
            batch = TensorDict({name: tensor.unsqueeze(0) for name, tensor in fields.items()}, batch_size=[1])
            # TQ stores the data, then the tag: a key with a tag has its data.
            await client.async_put(batch, meta)

        await self._call(f"put {key}", put)

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Rows in the order of the keys. KeyError names the missing ones, RowDamaged those with a wrong checksum."""
        by_partition: dict[str, list[str]] = {}
        for key in dict.fromkeys(keys):
            by_partition.setdefault(partition_of(key), []).append(key)
        found: dict[str, Row] = {}
        for partition, wanted in by_partition.items():
            for start in range(0, len(wanted), ROWS_PER_GET_MAX):
                part = wanted[start : start + ROWS_PER_GET_MAX]
                get = functools.partial(_get, partition=partition, keys=part)
                found.update(await self._call(f"get {len(part)} rows", get))
        missing = [key for key in keys if key not in found]
        if missing:
            raise KeyError(f"rows not in the data plane: {', '.join(missing)}")
        rows = [found[key] for key in keys]
        damaged = [row.key.row_key() for row in rows if checksum_of(row) != row.checksum]
        if damaged:
            raise RowDamaged(damaged)
        return rows

    async def inventory(self) -> dict[str, int]:
        """Row key -> payload checksum of every row that is complete, from the tags alone."""
        listing = await self._call("list rows", lambda client: client.async_kv_list(None))
        return {
            str(key): int(tag["checksum"])
            for partition, keys in listing.items()
            if partition.startswith(PARTITION_PREFIX)
            for key, tag in keys.items()
            if "checksum" in tag  # a put that is under way has no tag yet
        }

    async def clear(self, keys: Sequence[str]) -> None:
        """Remove rows; unknown keys are ignored."""
        by_partition: dict[str, list[str]] = {}
        for key in keys:
            by_partition.setdefault(partition_of(key), []).append(key)
        for partition, wanted in by_partition.items():
            await self._call(f"clear {len(wanted)} rows", functools.partial(_clear, partition=partition, keys=wanted))

    async def check(self) -> None:
        """Raise DataPlaneLost if a process of the service is gone, or if the service is not the one that we know."""
        controller = await self._ask(CONTROLLER_NAME, CONTROLLER_NAMESPACE)
        if controller.id != self._controller_id:
            raise DataPlaneLost(f"{CONTROLLER_NAME} was started anew: its rows are gone; put them back from payloads")
        for unit in range(self._units):
            await self._ask(UNIT_NAME.format(unit), self._unit_namespace)

    async def _ask(self, name: str, namespace: str | None) -> Any:
        """The address record of a TQ actor, from itself."""
        import ray

        def ask() -> Any:
            return ray.get(ray.get_actor(name, namespace=namespace).get_zmq_server_info.remote(), timeout=PROBE_AFTER_S)

        try:
            return await call_in_daemon_thread(ask, name=f"ask {name}", timeout_s=2 * PROBE_AFTER_S, cause=str)
        except ray.exceptions.GetTimeoutError as error:
            raise DataPlaneError(f"{name} did not answer within {PROBE_AFTER_S:g} s") from error
        except (ValueError, ray.exceptions.RayError) as error:
            raise DataPlaneLost(f"{name} is gone ({error}): its rows are lost; put them back from payloads") from error

    async def _call(self, what: str, make: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Await a request with a deadline; while it waits, look now and then whether the service is alive."""
        if self._client is None:
            raise DataPlaneError(f"{what}: the data plane is not started")
        limit = time.monotonic() + (timeout_s or self._op_timeout_s)
        gone = asyncio.ensure_future(self._gone.wait())
        task = asyncio.ensure_future(make(self._client))
        try:
            while True:
                wait = min(PROBE_AFTER_S, max(0.0, limit - time.monotonic()))
                await asyncio.wait({task, gone}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
                if gone.done():
                    raise DataPlaneLost(f"{what}: the data plane was stopped or restarted meanwhile")
                if time.monotonic() >= limit:
                    raise DeadlineExceeded(
                        f"{what}: no answer from TransferQueue in {timeout_s or self._op_timeout_s:g} s, although its "
                        f"processes are alive. A snapshot may be in progress on slow storage; see data_plane.*"
                    )
                try:
                    await self.check()
                except DataPlaneLost:
                    raise
                except DataPlaneError as slow:
                    log.debug("%s: %s", what, slow)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _get(client: Any, partition: str, keys: list[str]) -> dict[str, Row]:
    """Those of ``keys`` that are there."""
    import transfer_queue as tq

    meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
    if meta.size == 0:
        return {}
    tags = meta.custom_meta
    try:
        if not set(FIELDS) <= set(meta.field_names) or any("row" not in tag for tag in tags):
            raise tq.StorageKeyNotFoundError("a row is only announced yet")
        data = await client.async_get_data(meta.select_fields(list(FIELDS)))
    except tq.StorageKeyNotFoundError:
        # One row of the batch has no data (a put under way, or a row that went while a snapshot was taken), and TQ
        # does not say which: ask singly.
        if len(keys) == 1:
            return {}
        found: dict[str, Row] = {}
        for key in keys:
            found.update(await _get(client, partition, [key]))
        return found
    columns = [data[name].unbind() for name in FIELDS]
    rows = [decode_row(tag, ids, logprobs) for tag, ids, logprobs in zip(tags, *columns, strict=True)]
    return {row.key.row_key(): row for row in rows}


async def _clear(client: Any, partition: str, keys: list[str]) -> None:
    meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
    if meta.size > 0:
        await client.async_clear_samples(meta)


class AttachedDataPlane(_RowClient):
    """A client of a service that the controller owns. After a restart of the service it attaches itself anew."""

    def __init__(self, *, op_timeout_s: float = 600.0, start_timeout_s: float = 60.0) -> None:
        super().__init__(op_timeout_s=op_timeout_s, unit_namespace=None)
        self._start_timeout_s = start_timeout_s
        self._attaching = asyncio.Lock()

    async def start(self) -> None:
        """Attach to the running service. Raises DeadlineExceeded if there is none within ``start_timeout_s``."""
        self._client, self._controller_id, self._units = await call_in_daemon_thread(
            self._attach,
            name="attach to TransferQueue",
            timeout_s=self._start_timeout_s,
            cause=lambda: f"No actor {CONTROLLER_NAME} in this Ray cluster: the controller starts it first.",
        )

    def _attach(self) -> tuple[Any, str, int]:
        _set_environment()
        import ray
        import transfer_queue as tq

        limit = time.monotonic() + self._start_timeout_s
        while True:
            try:
                config = ray.get(ray.get_actor(CONTROLLER_NAME, namespace=CONTROLLER_NAMESPACE).get_config.remote())
            except (ValueError, ray.exceptions.RayActorError):
                config = None
            if config is not None:
                break
            if time.monotonic() > limit:
                raise DataPlaneError(f"no {CONTROLLER_NAME} in this Ray cluster")
            time.sleep(0.1)
        backend = config.backend.storage_backend
        client = tq.TransferQueueClient(f"unlost-{os.getpid()}-{uuid.uuid4().hex[:8]}", config.controller.zmq_info)
        client.initialize_storage_manager(manager_type=backend, config=config.backend[backend])
        return client, config.controller.zmq_info.id, int(config.backend[backend].num_data_storage_units)

    async def _call(self, what: str, make: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        client, known = self._client, self._controller_id
        try:
            return await super()._call(what, make, timeout_s)
        except DataPlaneLost as lost:
            async with self._attaching:
                if self._client is client:  # nobody else has done it meanwhile
                    await self._attach_again(lost)
            if self._controller_id == known:
                raise  # it has not been restarted yet; that is the owner's business
        return await super()._call(what, make, timeout_s)

    async def _attach_again(self, lost: DataPlaneLost) -> None:
        """Find the service that took the place of a lost one. Raises ``lost`` if there is none."""
        if await self._named_controller() is None:
            raise lost
        log.warning("%s; attaching again", lost)
        await self.stop()
        await self.start()

    @staticmethod
    async def _named_controller() -> Any:
        import ray

        def look() -> Any:
            try:
                return ray.get_actor(CONTROLLER_NAME, namespace=CONTROLLER_NAMESPACE)
            except ValueError:
                return None

        return await call_in_daemon_thread(look, name="look for TransferQueue", timeout_s=2 * PROBE_AFTER_S, cause=str)

    async def stop(self) -> None:
        """Close the client; the service goes on."""
        client, self._client = self._client, None
        if client is not None:
            await call_in_daemon_thread(client.close, name="close TransferQueue client", timeout_s=30, cause=str)


class TransferQueueDataPlane(_RowClient):
    """The service and its owner's client. Needs Ray (``engine/cluster.py``) with ``1 + storage_units`` free CPUs."""

    def __init__(
        self,
        *,
        storage_units: int = 1,
        op_timeout_s: float = 600.0,
        start_timeout_s: float = 120.0,
        save_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(op_timeout_s=op_timeout_s, unit_namespace=None)
        self.storage_units = storage_units
        self._start_timeout_s = start_timeout_s
        self._save_timeout_s = save_timeout_s
        self._saving = asyncio.Lock()

    async def start(self) -> None:
        """Start an empty service. Raises DataPlaneError or DeadlineExceeded, both with the cause."""
        import ray

        needed = 1 + self.storage_units
        there = ray.cluster_resources().get("CPU", 0.0)
        if there < needed:
            raise DataPlaneError(
                f"TransferQueue needs {needed} Ray CPUs (its controller and data_plane.storage_units = "
                f"{self.storage_units}), the cluster has {there:g}: raise ray.num_cpus"
            )

        def cause() -> str:
            total, free = (resources().get("CPU", 0) for resources in (ray.cluster_resources, ray.available_resources))
            return (
                f"TransferQueue needs {needed} free Ray CPUs; of the cluster's {total:g}, {free:g} are free. Raise "
                "ray.num_cpus, or free some."
            )

        self._client, self._controller_id = await call_in_daemon_thread(
            self._start, name="start TransferQueue", timeout_s=self._start_timeout_s, cause=cause
        )
        self._units = self.storage_units
        self._gone.clear()

    def _start(self) -> tuple[Any, str]:
        _set_environment()
        import transfer_queue as tq
        from omegaconf import OmegaConf

        self._wait_for_predecessor()
        config = tq.init(
            OmegaConf.create(
                {
                    "backend": {
                        "storage_backend": "SimpleStorage",
                        "SimpleStorage": {"num_data_storage_units": self.storage_units},
                    }
                }
            )
        )
        assert config is not None  # only without an argument
        return tq.get_client(), config.controller.zmq_info.id

    def _wait_for_predecessor(self) -> None:
        """TQ would silently share the service of another run; one that is just dying is waited for."""
        import ray

        limit = time.monotonic() + self._start_timeout_s / 2
        while True:
            try:
                ray.get_actor(CONTROLLER_NAME, namespace=CONTROLLER_NAMESPACE)
            except ValueError:
                return
            if time.monotonic() > limit:
                raise DataPlaneError(
                    "another run uses TransferQueue in this Ray cluster, and there can be one only: stop it, or give "
                    "this run a cluster of its own (leave ray.address out)"
                )
            time.sleep(0.2)

    async def save(self, directory: str) -> dict[str, str]:
        """Native snapshot into a new directory, fsynced. Relative path -> SHA-256, taken while writing.

        Rows put meanwhile may or may not be in it, and the puts wait for most of it. A row cleared meanwhile can leave
        an entry without a row, so clears must wait (protocol rule 22). Raises OSError, DataPlaneError or
        DeadlineExceeded; then no directory is left behind.
        """
        async with self._saving:
            save = functools.partial(snapshot.save, directory=_absolute(directory))
            return await self._call(f"save to {directory}", save, self._save_timeout_s)

    async def load(self, directory: str, digests: Mapping[str, str]) -> None:
        """Load a snapshot into the freshly started, empty service.

        Every file is compared with its digest before any of them is unpickled. Raises SnapshotDamaged, SnapshotMismatch
        (other number of storage units: put the rows back from payloads), OSError, DataPlaneError.
        """
        directory = _absolute(directory)
        await asyncio.to_thread(snapshot.verify, directory, digests)
        units = await asyncio.to_thread(snapshot.storage_units, directory)
        if units != self.storage_units:
            raise SnapshotMismatch(
                f"{directory} was taken with {units} storage units, this run has data_plane.storage_units = "
                f"{self.storage_units}"
            )
        if await self.inventory():
            raise DataPlaneError("a snapshot can only be loaded into an empty data plane: restart it first")
        load = functools.partial(snapshot.load, directory=directory)
        await self._call(f"load {directory}", load, self._save_timeout_s)

    async def restart(self) -> None:
        """Drop what is left of the service and start an empty one; waiting calls raise DataPlaneLost."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """End the service's processes; calls that wait raise DataPlaneLost. Harmless if nothing runs."""
        self._gone.set()
        if self._client is None:
            return
        self._client = None
        tq = importlib.import_module("transfer_queue")
        await call_in_daemon_thread(tq.close, name="stop TransferQueue", timeout_s=60, cause=lambda: "It hangs.")


def _absolute(directory: str) -> str:
    """TQ's processes have working directories of their own."""
    return os.path.abspath(directory)


def _set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
