"""Snapshots written through FIFOs, without TransferQueue: a client that writes where it is told stands in for it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from unlost.engine import data_plane_snapshot as snapshot
from unlost.engine.data_plane_snapshot import SnapshotDamaged


class Writer:
    """Writes as TransferQueue's processes do: opens the path, writes, closes, answers."""

    def __init__(self, sizes: list[int], *, fail: str = "", elsewhere: bool = False) -> None:
        draw = random.Random(1)
        self.units = [f"UNIT_{number}" for number in range(len(sizes))]
        self.contents = {unit: draw.randbytes(size) for unit, size in zip(self.units, sizes, strict=True)}
        self.index = draw.randbytes(1000)
        self.fail = fail
        self.elsewhere = elsewhere
        infos = {unit: SimpleNamespace(ip="10.9.9.9" if elsewhere else "here") for unit in self.units}
        self.storage_manager = SimpleNamespace(get_zmq_server_info=lambda: infos)

    async def async_save_controller_checkpoint(self, path: str) -> None:
        await asyncio.to_thread(self.write, path, self.index)

    async def async_save_storage_checkpoint(self, directory: str) -> None:
        folder = Path(directory) / "simple_storage"
        folder.mkdir(exist_ok=True)
        if self.fail == "before":
            raise RuntimeError("a unit does not answer")
        for position, unit in enumerate(self.units):
            if self.fail == "unit 1 writes nowhere" and position == 1:
                continue
            await asyncio.to_thread(self.write, str(folder / f"su_{position}_{unit}.pkl"), self.contents[unit])
        listed = [{"position": position, "storage_unit_id": unit} for position, unit in enumerate(self.units)]
        (folder / "storage_unit_info.json").write_text(json.dumps(listed))

    @staticmethod
    def write(path: str, data: bytes) -> None:
        with open(path, "wb") as file:
            file.writelines(data[start : start + 70_000] for start in range(0, len(data), 70_000))


@pytest.fixture(autouse=True)
def workplaces(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the FIFOs are made; the service is taken to be on this machine."""
    folder = tmp_path_factory.mktemp("workplaces")
    monkeypatch.setattr(snapshot.tempfile, "tempdir", str(folder))

    def same_machine(client: Writer) -> bool:
        return {info.ip for info in client.storage_manager.get_zmq_server_info().values()} == {"here"}

    monkeypatch.setattr(snapshot, "_same_machine", same_machine)
    return folder


def tee_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("snapshot ")]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["through FIFOs", "read back"])
async def test_files_and_digests_are_what_was_written(elsewhere: bool, tmp_path: Path, workplaces: Path) -> None:
    """Every byte arrives, from none to several pipe buffers; digests verify; no temporary file or thread stays."""
    writer = Writer([5_000_000, 1, 70_000], elsewhere=elsewhere)
    directory = tmp_path / "snapshot"
    digests = await snapshot.save(writer, str(directory))
    for position, unit in enumerate(writer.units):
        assert (directory / f"simple_storage/su_{position}_{unit}.pkl").read_bytes() == writer.contents[unit]
    assert (directory / "controller_state.pkl").read_bytes() == writer.index
    found = {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files(directory)}
    assert digests == found
    snapshot.verify(str(directory), digests)
    assert snapshot.storage_units(str(directory)) == 3
    assert tee_threads() == []
    assert (os.listdir(tmp_path), os.listdir(workplaces)) == (["snapshot"], [])


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("fail", "message"), [("before", "does not answer"), ("unit 1 writes nowhere", "came out empty")]
)
async def test_a_save_that_fails_leaves_nothing(fail: str, message: str, tmp_path: Path, workplaces: Path) -> None:
    """A unit that does not answer, or that answers without writing, fails the save; threads and files go."""
    with pytest.raises(Exception, match=message):
        await snapshot.save(Writer([1000, 1000], fail=fail), str(tmp_path / "snapshot"))
    assert os.listdir(tmp_path) + os.listdir(workplaces) == []
    for thread in tee_threads():
        thread.join(5)
    assert tee_threads() == []


async def test_a_full_disk_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers get rid of all they have, and the save fails with the disk's error."""

    original = snapshot._write_all

    def full(descriptor: int, data: bytes) -> None:
        if len(data) > 10_000:  # what is small still fits
            raise OSError(28, "No space left on device")
        original(descriptor, data)

    monkeypatch.setattr(snapshot, "_write_all", full)
    with pytest.raises(OSError, match="No space left"):
        await snapshot.save(Writer([3_000_000]), str(tmp_path / "snapshot"))
    assert os.listdir(tmp_path) == []


async def test_everything_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, both folders and the parent are synced before the save returns."""
    synced: set[str] = set()
    original = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    directory = tmp_path / "snapshot"
    digests = await snapshot.save(Writer([10]), str(directory))
    expected = {directory / name for name in digests} | {tmp_path, directory, directory / "simple_storage"}
    assert {str(path) for path in expected} <= synced


async def test_an_existing_snapshot_is_not_overwritten(tmp_path: Path) -> None:
    """A directory that holds something is an error, and stays as it is; an empty one is taken."""
    directory = tmp_path / "snapshot"
    directory.mkdir()
    await snapshot.save(Writer([10]), str(directory))
    before = {path: path.read_bytes() for path in files(directory)}
    with pytest.raises(FileExistsError):
        await snapshot.save(Writer([20]), str(directory))
    assert {path: path.read_bytes() for path in files(directory)} == before


async def test_only_what_was_digested_is_accepted(tmp_path: Path) -> None:
    """A changed, cut or missing file, a missing digest, or a unit without one: SnapshotDamaged names the file."""
    directory = tmp_path / "snapshot"
    digests = await snapshot.save(Writer([100, 100]), str(directory))
    for name in digests:
        content = (directory / name).read_bytes()
        for changed in (content[:-1], bytes([content[0] ^ 1]) + content[1:], content + b"\0"):
            (directory / name).write_bytes(changed)
            with pytest.raises(SnapshotDamaged, match=Path(name).name):
                snapshot.verify(str(directory), digests)
        (directory / name).unlink()
        with pytest.raises(SnapshotDamaged, match="missing"):
            snapshot.verify(str(directory), digests)
        (directory / name).write_bytes(content)
        with pytest.raises(SnapshotDamaged, match=f"no digest recorded for|{name}"):
            snapshot.verify(str(directory), {other: digest for other, digest in digests.items() if other != name})
    snapshot.verify(str(directory), digests)


async def test_a_failing_disk_is_not_damage(tmp_path: Path) -> None:
    """What can't be read just now is an OSError: an older checkpoint must not be taken because of it."""
    directory = tmp_path / "snapshot"
    digests = await snapshot.save(Writer([100]), str(directory))
    (directory / "metadata.json").unlink()
    (directory / "metadata.json").mkdir()  # reading it fails with EISDIR
    with pytest.raises(IsADirectoryError):
        snapshot.verify(str(directory), digests)
