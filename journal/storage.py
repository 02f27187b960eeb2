"""What the journal asks of a file system, as a protocol, and the real one.

The protocol is small on purpose: a simulated storage that loses, tears and reorders what was not synced implements
the same calls, and the contract tests run on both.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Protocol

_NO_FLOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


class StorageFile(Protocol):
    """An open file. ``read_at`` and ``write_at`` may do less than asked, as pread and pwrite may."""

    @property
    def path(self) -> str: ...

    def read_at(self, offset: int, size: int) -> bytes: ...

    def write_at(self, offset: int, data: bytes | memoryview) -> int: ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class StorageLock(Protocol):
    """An exclusive lock on a file. ``enforced`` is False where the file system has no working lock."""

    @property
    def file(self) -> StorageFile: ...

    @property
    def enforced(self) -> bool: ...

    def release(self) -> None: ...


class Storage(Protocol):
    """Paths are strings. Every call raises OSError; what is durable when is in each docstring of RealStorage."""

    def make_directory(self, path: str) -> None: ...

    def list_names(self, path: str) -> list[str]: ...

    def create(self, path: str) -> StorageFile: ...

    def open(self, path: str, *, writable: bool = False) -> StorageFile: ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def try_lock(self, path: str) -> StorageLock | None: ...


class _Naming:
    """An OSError of a call that knows only a descriptor gets the file's name."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = self.path


class RealFile:
    """A file descriptor; ``sync`` is fdatasync. An OSError of any call names the file."""

    __slots__ = ("_fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._fd

    def read_at(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes from ``offset``; empty at the end of the file."""
        with _Naming(self.path):
            return os.pread(self._fd, size, offset)

    def write_at(self, offset: int, data: bytes | memoryview) -> int:
        """Number of bytes written, at least 1 unless ``data`` is empty."""
        with _Naming(self.path):
            return os.pwrite(self._fd, data, offset)

    def truncate(self, size: int) -> None:
        """Cut or extend (with zeros) to ``size`` bytes; durable after the next ``sync``."""
        with _Naming(self.path):
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Return once data and size are on the device (fdatasync). After an error the file must not be trusted."""
        with _Naming(self.path):
            os.fdatasync(self._fd)

    def size(self) -> int:
        """Length in bytes."""
        with _Naming(self.path):
            return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _Naming(self.path):
                os.close(fd)


class RealLock:
    """flock on an open file; let go when every descriptor of it is closed."""

    __slots__ = ("enforced", "file")

    def __init__(self, file: RealFile, enforced: bool) -> None:
        self.file = file
        self.enforced = enforced

    def release(self) -> None:
        """Unlock and close; idempotent."""
        self.file.close()


class RealStorage:
    """The file system of this machine."""

    def make_directory(self, path: str) -> None:
        """Create ``path`` and its parents; each new entry is durable on return."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_directory(parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            return
        self.sync_directory(parent)

    def list_names(self, path: str) -> list[str]:
        """Names in a directory, in no order."""
        return os.listdir(path)

    def create(self, path: str) -> RealFile:
        """A new file; FileExistsError if there is one. Its name is durable after ``sync_directory``."""
        return RealFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), path)

    def open(self, path: str, *, writable: bool = False) -> RealFile:
        """An existing file."""
        return RealFile(os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC), path)

    def rename(self, source: str, target: str) -> None:
        """Atomic, replacing ``target``; durable after ``sync_directory``."""
        os.rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file; durable after ``sync_directory``."""
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        """Return once the directory's entries are on the device."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _Naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)

    def try_lock(self, path: str) -> RealLock | None:
        """Lock the file (made if absent) without waiting; None if another open file holds the lock."""
        file = RealFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), path)
        try:
            with _Naming(path):
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return RealLock(file, enforced=False)
            file.close()
            raise
        return RealLock(file, enforced=True)


def read_exact(file: StorageFile, offset: int, size: int) -> bytes:
    """Exactly ``size`` bytes, or fewer only at the end of the file, however short the single reads are."""
    first = file.read_at(offset, size)
    if len(first) == size or not first:
        return first
    parts = [first]
    got = len(first)
    while got < size:
        part = file.read_at(offset + got, size - got)
        if not part:
            break
        parts.append(part)
        got += len(part)
    return b"".join(parts)


def write_all(file: StorageFile, offset: int, data: bytes | memoryview) -> None:
    """Write everything, going on after short writes; an OSError leaves the file in an unknown state from ``offset``."""
    view = memoryview(data)
    while view:
        written = file.write_at(offset, view)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress", file.path)
        offset += written
        view = view[written:]
