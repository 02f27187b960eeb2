"""TransferQueue's native snapshot with digests taken while writing.

TQ's processes write their pickles themselves, to a path that they are told, without checksum or fsync. They are given
the path of a FIFO: this process reads what they write, computes SHA-256 on the way, writes it to the real file and
syncs it. So the digest is of the bytes that TQ meant to write, whatever the file system does with them later, and
nothing is read from shared storage again. The directory that results is the same as ``transfer_queue.save_checkpoint``
makes, and its own ``load_checkpoint`` reads it.

Where a TQ process runs on another machine, a FIFO can't reach it. Then it writes the file itself, and the digest is
taken from a reading right afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, Final

from ..journal.errors import UnlostError
from .protocols import CheckpointDamaged

CONTROLLER_FILE: Final = "controller_state.pkl"
METADATA_FILE: Final = "metadata.json"
UNITS_DIRECTORY: Final = "simple_storage"
UNITS_FILE: Final = f"{UNITS_DIRECTORY}/storage_unit_info.json"
CHUNK_BYTES: Final = 1 << 20


class SnapshotDamaged(CheckpointDamaged):
    """A file of a snapshot is missing or is not what was written."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}. Nothing of it was loaded; an older checkpoint, or payloads, must serve.")


class _Tee(threading.Thread):
    """Copies a FIFO into a file, hashing on the way."""

    def __init__(self, fifo: str, target: str) -> None:
        super().__init__(name=f"snapshot {os.path.basename(target)}", daemon=True)
        self._fifo = fifo
        self._target = target
        self.digest = ""
        self.size = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.digest, self.size = self._copy()
        except Exception as error:  # noqa: BLE001  # raised again by the saver
            self.error = error

    def _copy(self) -> tuple[str, int]:
        digest = hashlib.sha256()
        size = 0
        failure: OSError | None = None
        source = os.open(self._fifo, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # the limit for unprivileged users; it is only speed
                fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
            with open(self._target, "xb", buffering=0) as target:
                while chunk := os.read(source, CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    if failure is None:
                        try:
                            _write_all(target.fileno(), chunk)
                        except OSError as error:
                            failure = error  # go on reading: a writer with a broken pipe would report another cause
                if failure is not None:
                    raise failure
                os.fsync(target.fileno())
        finally:
            os.close(source)
        return digest.hexdigest(), size

    def release(self) -> None:
        """Let a thread end that still waits for a writer which will not come."""
        if not self.is_alive():
            return
        try:
            os.close(os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                raise


async def save(client: Any, directory: str) -> dict[str, str]:
    """Snapshot the service behind ``client`` into the new ``directory`` (absolute). See TransferQueueDataPlane.save."""
    await asyncio.to_thread(_make_directory, directory)
    try:
        if _same_machine(client):
            digests = await _save_through_fifos(client, directory)
        else:
            digests = await _save_and_read_back(client, directory)
        digests[METADATA_FILE] = await asyncio.to_thread(_finish, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return digests


def _make_directory(directory: str) -> None:
    if os.path.isdir(directory) and not os.listdir(directory):
        os.rmdir(directory)
    os.makedirs(os.path.join(directory, UNITS_DIRECTORY))


def _finish(directory: str) -> str:
    """Write the file that makes TQ see a snapshot, and make the whole durable. Returns that file's digest."""
    digest = _write_json(directory, METADATA_FILE, {"storage_saved": True, "user_metadata": {}})
    for folder in (os.path.join(directory, UNITS_DIRECTORY), directory, os.path.dirname(directory)):
        _sync_directory(folder)
    return digest


async def load(client: Any, directory: str) -> None:
    """Load a verified snapshot: rows first, then the index, as TQ's own loader does."""
    await client.async_load_storage_checkpoint(directory)
    await client.async_load_controller_checkpoint(os.path.join(directory, CONTROLLER_FILE))


def verify(directory: str, digests: Mapping[str, str]) -> None:
    """Compare every file with its SHA-256. Raises SnapshotDamaged; an I/O error is raised as it is."""
    needed = {CONTROLLER_FILE, METADATA_FILE, UNITS_FILE}
    if not needed <= set(digests):
        raise SnapshotDamaged(directory, f"no digest recorded for {', '.join(sorted(needed - set(digests)))}")
    for relative, expected in digests.items():
        path = os.path.join(directory, relative)
        try:
            found = _digest_of(path)
        except FileNotFoundError:
            raise SnapshotDamaged(path, "the file is missing") from None
        if found != expected:
            raise SnapshotDamaged(path, f"SHA-256 is {found}, recorded was {expected}")
    for position, unit in enumerate(_units(directory)):
        name = f"{UNITS_DIRECTORY}/su_{position}_{unit}.pkl"
        if name not in digests:
            raise SnapshotDamaged(os.path.join(directory, name), "no digest recorded for it")


def storage_units(directory: str) -> int:
    """How many storage units the snapshot was taken with."""
    return len(_units(directory))


def _units(directory: str) -> list[str]:
    with open(os.path.join(directory, UNITS_FILE), encoding="utf-8") as file:
        listed = json.load(file)
    return [entry["storage_unit_id"] for entry in sorted(listed, key=lambda entry: entry["position"])]


async def _save_through_fifos(client: Any, directory: str) -> dict[str, str]:
    units = list(client.storage_manager.get_zmq_server_info())
    names = [CONTROLLER_FILE, *(f"{UNITS_DIRECTORY}/su_{at}_{unit}.pkl" for at, unit in enumerate(units))]
    workplace = tempfile.mkdtemp(prefix="unlost-snapshot-")
    tees: dict[str, _Tee] = {}
    try:
        os.mkdir(os.path.join(workplace, UNITS_DIRECTORY))
        for name in names:
            fifo = os.path.join(workplace, name)
            os.mkfifo(fifo, 0o600)
            tees[name] = _Tee(fifo, os.path.join(directory, name))
            tees[name].start()
        # The index first: an index entry that is in the snapshot then has its row in it (clears wait, rule 22).
        await client.async_save_controller_checkpoint(os.path.join(workplace, CONTROLLER_FILE))
        await client.async_save_storage_checkpoint(workplace)
        return await asyncio.to_thread(_collect, tees, workplace, directory)
    finally:
        for tee in tees.values():
            tee.release()
        shutil.rmtree(workplace, ignore_errors=True)


def _collect(tees: Mapping[str, _Tee], workplace: str, directory: str) -> dict[str, str]:
    for name, tee in tees.items():
        # The writer has answered, so its file is closed: a thread that still waits for a writer never met it.
        tee.release()
        tee.join()
        if tee.error is not None:
            raise tee.error
        if tee.size == 0:
            raise UnlostError(f"snapshot file {name} came out empty: its writer does not see this machine's files")
    digests = {name: tee.digest for name, tee in tees.items()}
    with open(os.path.join(workplace, UNITS_FILE), encoding="utf-8") as file:
        digests[UNITS_FILE] = _write_json(directory, UNITS_FILE, json.load(file))
    return digests


async def _save_and_read_back(client: Any, directory: str) -> dict[str, str]:
    await client.async_save_controller_checkpoint(os.path.join(directory, CONTROLLER_FILE))
    await client.async_save_storage_checkpoint(directory)

    def read_back() -> dict[str, str]:
        units = os.listdir(os.path.join(directory, UNITS_DIRECTORY))
        return {
            name: _digest_of(os.path.join(directory, name), sync=True)
            for name in (CONTROLLER_FILE, *(f"{UNITS_DIRECTORY}/{unit}" for unit in sorted(units)))
        }

    return await asyncio.to_thread(read_back)


def _same_machine(client: Any) -> bool:
    import ray

    here = ray.util.get_node_ip_address()
    addresses = {info.ip for info in client.storage_manager.get_zmq_server_info().values()}
    return addresses == {here}


def _digest_of(path: str, *, sync: bool = False) -> str:
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(directory: str, name: str, content: object) -> str:
    data = json.dumps(content).encode()
    with open(os.path.join(directory, name), "xb", buffering=0) as file:
        _write_all(file.fileno(), data)
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
