"""What the journal relies on in a storage, checked alike on the real and the simulated one."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable

import pytest

from tests.sim_storage import SimStorage
from unlost.journal import RealStorage, Storage


@pytest.fixture(params=["real", "simulated"])
def place(request, tmp_path) -> tuple[Storage, str]:
    storage = RealStorage() if request.param == "real" else SimStorage()
    directory = os.fspath(tmp_path / "a" / "b")
    storage.make_directory(directory)
    return storage, directory


def test_create_is_exclusive(place) -> None:
    """A second creation of a name fails: two writers can't begin the same segment."""
    storage, directory = place
    storage.create(f"{directory}/x").close()
    with pytest.raises(FileExistsError):
        storage.create(f"{directory}/x")
    assert storage.list_names(directory) == ["x"]


def test_reads_and_writes_are_positional(place) -> None:
    """Writing beyond the end leaves zeros between; reading at the end gives nothing."""
    storage, directory = place
    file = storage.create(f"{directory}/x")
    assert file.write_at(4, b"tail") == 4
    assert file.read_at(0, 100) == b"\0\0\0\0tail"
    assert file.read_at(8, 10) == b""
    assert file.size() == 8
    file.sync()
    file.close()
    file.close()


def test_truncate_cuts_and_extends(place) -> None:
    """A shorter size drops the end, a longer one adds zeros."""
    storage, directory = place
    file = storage.create(f"{directory}/x")
    file.write_at(0, b"0123456789")
    file.truncate(4)
    assert file.read_at(0, 100) == b"0123"
    file.truncate(6)
    assert file.read_at(0, 100) == b"0123\0\0"
    file.close()


def test_rename_replaces(place) -> None:
    """A rename onto an existing name replaces it; the old name is gone."""
    storage, directory = place
    for name, data in (("new", b"2"), ("old", b"1")):
        file = storage.create(f"{directory}/{name}")
        file.write_at(0, data)
        file.close()
    storage.rename(f"{directory}/new", f"{directory}/old")
    storage.sync_directory(directory)
    assert storage.list_names(directory) == ["old"]
    assert storage.open(f"{directory}/old").read_at(0, 9) == b"2"


def test_absent_names_are_told(place) -> None:
    """Opening, removing and renaming what is not there, and listing no directory, raise FileNotFoundError."""
    storage, directory = place
    for act in (
        lambda: storage.open(f"{directory}/none"),
        lambda: storage.remove(f"{directory}/none"),
        lambda: storage.rename(f"{directory}/none", f"{directory}/x"),
        lambda: storage.list_names(f"{directory}/none"),
    ):
        with pytest.raises(FileNotFoundError):
            act()


def test_a_file_opened_for_reading_takes_no_write(place) -> None:
    """A reader can't change a journal by mistake, but it can sync what it has read."""
    storage, directory = place
    storage.create(f"{directory}/x").close()
    file = storage.open(f"{directory}/x")
    with pytest.raises(OSError, match=r"Bad file descriptor|opened for reading"):
        file.write_at(0, b"no")
    file.sync()
    file.close()


def test_the_lock_excludes_and_ends(place) -> None:
    """A lock keeps a second taker out until released, and its file can be written and read."""
    storage, directory = place
    lock = storage.try_lock(f"{directory}/LOCK")
    assert lock is not None
    assert lock.enforced
    assert storage.try_lock(f"{directory}/LOCK") is None
    lock.file.write_at(0, b"me")
    lock.release()
    lock.release()
    again = storage.try_lock(f"{directory}/LOCK")
    assert again is not None
    assert again.file.read_at(0, 2) == b"me"
    again.release()


def test_removed_files_stay_readable_by_their_holders(place) -> None:
    """Pruning beside a reader does not pull the file from under it."""
    storage, directory = place
    file = storage.create(f"{directory}/x")
    file.write_at(0, b"data")
    storage.remove(f"{directory}/x")
    assert file.read_at(0, 4) == b"data"
    assert storage.list_names(directory) == []
    file.close()


def test_a_power_cut_keeps_only_what_was_synced() -> None:
    """The simulation loses unsynced writes and unsynced names, and keeps synced ones."""
    storage = SimStorage()
    storage.make_directory("/d")
    file = storage.create("/d/x")
    file.write_at(0, b"synced")
    file.sync()
    storage.sync_directory("/d")
    file.write_at(6, b" not")
    storage.create("/d/unnamed").sync()
    storage.power_cut(random.Random(1), "drop")
    assert storage.snapshot("/d") == {"x": b"synced"}


def test_a_failed_sync_loses_what_it_should_have_kept() -> None:
    """After a failed fdatasync the next one succeeds and the data is gone all the same, as on Linux."""
    storage = SimStorage()
    storage.make_directory("/d")
    file = storage.create("/d/x")
    storage.sync_directory("/d")
    file.write_at(0, b"lost")
    storage.fail("sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        file.sync()
    file.sync()
    assert file.read_at(0, 4) == b"lost"
    storage.power_cut(random.Random(1), "keep")
    assert storage.snapshot("/d") == {"x": b""}


@pytest.mark.parametrize("call", ["read_at", "write_at", "truncate", "sync", "size"])
def test_an_error_names_the_file(place, call) -> None:
    """Whatever fails, the message says where: these calls know only a descriptor by themselves."""
    storage, directory = place
    file = storage.create(f"{directory}/x")
    arguments = {"read_at": (0, 1), "write_at": (0, b"x"), "truncate": (0,)}.get(call, ())
    if isinstance(storage, RealStorage):
        os.close(file.fileno())
    else:
        file.close()
    with pytest.raises(OSError, match=f"{directory}/x") as caught:
        getattr(file, call)(*arguments)
    assert caught.value.filename == f"{directory}/x"
    with pytest.raises(OSError, match=f"{directory}/none"):
        storage.sync_directory(f"{directory}/none")


def test_an_error_without_a_number_keeps_its_text(tmp_path, monkeypatch) -> None:
    """What a signal's handler raises inside a call is not the file's: only errors of the system get its name."""
    storage = RealStorage()
    file = storage.create(str(tmp_path / "f"))

    def fails(error: OSError) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            raise error

        return call

    monkeypatch.setattr("os.fdatasync", fails(TimeoutError("watchdog")))
    with pytest.raises(TimeoutError, match=r"^watchdog$"):
        file.sync()
    monkeypatch.setattr("os.fdatasync", fails(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match=r"broken: .*/f'"):
        file.sync()
    monkeypatch.setattr("fcntl.flock", fails(OSError(errno.EIO, "no lock")))
    with pytest.raises(OSError, match=r"no lock: .*/LOCK'"):
        storage.try_lock(str(tmp_path / "LOCK"))
