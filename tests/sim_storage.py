"""A storage in memory that loses, tears and reorders what was not synced, and fails any call on demand.

It implements ``unlost.journal.Storage``. What it models:

* A write is *visible* at once (page cache) and *durable* only after ``sync`` of its file. A power cut keeps any
  subset of the 512-byte sectors of pending writes; the file's length may have grown without its data (zeros).
* A new name, a rename and a removal are durable only after ``sync_directory``; until then a power cut may keep or
  drop each. A file whose name was lost is gone, however well it was synced.
* After a failed ``sync`` the kernel has marked the pages clean: the next ``sync`` succeeds and the data is not there.
* A process kill loses nothing of that; it only ends handles and locks.

Deterministic: everything random comes from the ``random.Random`` given to ``power_cut``.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SECTOR_BYTES = 512


class SimCrash(BaseException):
    """The machine stopped inside a call. Not an Exception: nothing may catch it and go on."""


@dataclass
class _Inode:
    visible: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)


@dataclass
class _Directory:
    visible: dict[str, _Inode] = field(default_factory=dict)
    durable: dict[str, _Inode] = field(default_factory=dict)
    pending: list[tuple[str, str, _Inode | None]] = field(default_factory=list)


@dataclass
class Fault:
    """``op``'s next calls (after ``skip`` of them) raise ``error``; ``short`` instead limits a write or read."""

    op: str
    error: OSError | None = None
    times: int = 1
    skip: int = 0
    short: int | None = None
    delay_s: float = 0.0
    name: str = ""


class SimFile:
    def __init__(self, storage: SimStorage, path: str, inode: _Inode, *, writable: bool) -> None:
        self._storage = storage
        self.path = path
        self._inode = inode
        self._writable = writable
        self._generation = storage.generation
        self._open = True

    def _enter(self, op: str) -> Fault | None:
        if not self._open:
            raise OSError(errno.EBADF, "closed", self.path)
        if self._generation != self._storage.generation:
            raise OSError(errno.EBADF, "handle of a process that died", self.path)
        return self._storage.call(op, self.path)

    def read_at(self, offset: int, size: int) -> bytes:
        fault = self._enter("read")
        if fault is not None and fault.short is not None:
            size = min(size, fault.short)
        if self._storage.read_limit is not None:
            size = min(size, self._storage.read_limit)
        with self._storage.mutex:
            return bytes(self._inode.visible[offset : offset + size])

    def write_at(self, offset: int, data: bytes | memoryview) -> int:
        if not self._writable:
            raise OSError(errno.EBADF, "opened for reading", self.path)
        fault = self._enter("write")
        chunk = bytes(data)
        if fault is not None and fault.short is not None:
            chunk = chunk[: fault.short]
        with self._storage.mutex:
            _apply_write(self._inode.visible, offset, chunk)
            self._inode.pending.append(("write", offset, chunk))
        return len(chunk)

    def truncate(self, size: int) -> None:
        if not self._writable:
            raise OSError(errno.EINVAL, "opened for reading", self.path)
        self._enter("truncate")
        with self._storage.mutex:
            _apply_truncate(self._inode.visible, size)
            self._inode.pending.append(("truncate", size, b""))

    def sync(self) -> None:
        try:
            self._enter("sync")
        except OSError:
            self._inode.pending.clear()  # marked clean: lost, though still visible
            raise
        with self._storage.mutex:
            self._inode.durable = _replay(self._inode.durable, self._inode.pending)
            self._inode.pending.clear()
        self._storage.after("sync", self.path)

    def size(self) -> int:
        self._enter("size")
        return len(self._inode.visible)

    def close(self) -> None:
        self._open = False


class SimLock:
    def __init__(self, storage: SimStorage, path: str, file: SimFile, *, enforced: bool) -> None:
        self._storage = storage
        self._path = path
        self.file = file
        self.enforced = enforced

    def release(self) -> None:
        self.file.close()
        if self._storage.locks.get(self._path) is self:
            del self._storage.locks[self._path]


class SimStorage:
    """See the module. ``hook(op, path)`` is called before each call and may raise (an OSError, or SimCrash)."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.directories: dict[str, _Directory] = {}
        self.locks: dict[str, SimLock] = {}
        self.generation = 0
        self.faults: list[Fault] = []
        self.hook: Callable[[str, str], None] | None = None
        self.after_hook: Callable[[str, str], None] | None = None
        self.read_limit: int | None = None
        self.enforce_locks = True
        self.sleep: Callable[[float], None] = time.sleep
        self.calls: dict[str, int] = {}
        self.crashed = False

    # ------------------------------------------------------------------ Storage

    def make_directory(self, path: str) -> None:
        path = os.path.normpath(path)
        if path in self.directories:
            return
        self.call("make_directory", path)
        self.directories[path] = _Directory()

    def list_names(self, path: str) -> list[str]:
        self.call("list", path)
        with self.mutex:
            return list(self._directory(path).visible)

    def create(self, path: str) -> SimFile:
        self.call("create", path)
        with self.mutex:
            directory, name = self._split(path)
            if name in directory.visible:
                raise FileExistsError(errno.EEXIST, "exists", path)
            inode = _Inode()
            directory.visible[name] = inode
            directory.pending.append(("link", name, inode))
            return SimFile(self, path, inode, writable=True)

    def open(self, path: str, *, writable: bool = False) -> SimFile:
        self.call("open", path)
        with self.mutex:
            directory, name = self._split(path)
            if name not in directory.visible:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            return SimFile(self, path, directory.visible[name], writable=writable)

    def rename(self, source: str, target: str) -> None:
        self.call("rename", source)
        with self.mutex:
            directory, old = self._split(source)
            other, new = self._split(target)
            if old not in directory.visible:
                raise FileNotFoundError(errno.ENOENT, "no such file", source)
            assert directory is other, "the journal renames within a directory only"
            inode = directory.visible.pop(old)
            directory.visible[new] = inode
            directory.pending.append((f"rename {old}", new, inode))

    def remove(self, path: str) -> None:
        self.call("remove", path)
        with self.mutex:
            directory, name = self._split(path)
            if name not in directory.visible:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            del directory.visible[name]
            directory.pending.append(("unlink", name, None))

    def sync_directory(self, path: str) -> None:
        self.call("sync_directory", path)
        with self.mutex:
            directory = self._directory(path)
            directory.durable = dict(directory.visible)
            directory.pending.clear()
        self.after("sync_directory", path)

    def try_lock(self, path: str) -> SimLock | None:
        self.call("lock", path)
        path = os.path.normpath(path)
        with self.mutex:
            directory, name = self._split(path)
            if name not in directory.visible:
                inode = _Inode()
                directory.visible[name] = inode
                directory.pending.append(("link", name, inode))
            if self.enforce_locks and path in self.locks:
                return None
            lock = SimLock(
                self, path, SimFile(self, path, directory.visible[name], writable=True), enforced=self.enforce_locks
            )
            self.locks[path] = lock
            return lock

    # ------------------------------------------------------------------ faults

    def call(self, op: str, path: str) -> Fault | None:
        if self.crashed:
            raise SimCrash(f"{op} {path} after the crash")
        self.calls[op] = self.calls.get(op, 0) + 1
        if self.hook is not None:
            self.hook(op, path)
        for fault in self.faults:
            if fault.op != op or fault.name not in path:
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            fault.times -= 1
            if fault.times <= 0:
                self.faults.remove(fault)
            if fault.delay_s:
                self.sleep(fault.delay_s)
            if fault.error is not None:
                raise fault.error
            return fault
        return None

    def after(self, op: str, path: str) -> None:
        if self.after_hook is not None:
            self.after_hook(op, path)

    def fail(self, op: str, code: int, *, times: int = 1, skip: int = 0, name: str = "") -> None:
        """The calls of ``op`` after ``skip`` of them fail ``times`` times with errno ``code``."""
        self.faults.append(Fault(op, OSError(code, os.strerror(code)), times, skip, name=name))

    def crash_at_call(self, number: int) -> None:
        """Raise SimCrash at the ``number``-th call from now (1 = the next), before it has any effect."""
        left = [number]

        def hook(op: str, path: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                self.crashed = True
                raise SimCrash(f"at {op} {path}")

        self.hook = hook

    # ------------------------------------------------------------------ crashes

    def kill_process(self) -> None:
        """SIGKILL: the page cache stays, handles and locks end."""
        self.generation += 1
        self.locks.clear()
        self.faults.clear()
        self.hook = self.after_hook = None
        self.crashed = False

    def power_cut(self, rng: random.Random, mode: str = "tear") -> None:
        """``drop`` loses everything pending, ``keep`` nothing; ``tear`` decides for each sector and each name."""
        self.kill_process()
        inodes: dict[int, _Inode] = {}
        for directory in self.directories.values():
            for inode in (*directory.visible.values(), *directory.durable.values()):
                inodes[id(inode)] = inode
        for inode in inodes.values():
            content = _survivors(inode, rng, mode)
            inode.visible, inode.durable, inode.pending = bytearray(content), content, []
        for directory in self.directories.values():
            names = dict(directory.durable)
            for op, name, target in directory.pending:
                if mode == "drop" or (mode == "tear" and rng.random() < 0.5):
                    continue
                _apply_name(names, op, name, target)
            directory.visible, directory.durable, directory.pending = dict(names), names, []

    # ------------------------------------------------------------------ direct access for tests

    def content(self, path: str) -> bytes:
        directory, name = self._split(path)
        return bytes(directory.visible[name].visible)

    def put(self, path: str, data: bytes) -> None:
        """Put a file there, durable, as damage or a foreign hand would."""
        self.make_directory(os.path.dirname(path))
        directory, name = self._split(path)
        inode = _Inode(bytearray(data), data)
        directory.visible[name] = inode
        directory.durable[name] = inode

    def delete(self, path: str) -> None:
        directory, name = self._split(path)
        directory.visible.pop(name, None)
        directory.durable.pop(name, None)

    def snapshot(self, path: str) -> dict[str, bytes]:
        return {name: bytes(inode.visible) for name, inode in self._directory(path).visible.items()}

    @classmethod
    def of(cls, path: str, files: dict[str, bytes]) -> SimStorage:
        storage = cls()
        storage.make_directory(path)
        for name, data in files.items():
            storage.put(os.path.join(path, name), data)
        return storage

    def _directory(self, path: str) -> _Directory:
        path = os.path.normpath(path)
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return self.directories[path]

    def _split(self, path: str) -> tuple[_Directory, str]:
        return self._directory(os.path.dirname(path)), os.path.basename(path)


def _apply_write(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _apply_truncate(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _replay(durable: bytes, pending: list[tuple[str, int, bytes]]) -> bytes:
    content = bytearray(durable)
    for op, at, data in pending:
        if op == "write":
            _apply_write(content, at, data)
        else:
            _apply_truncate(content, at)
    return bytes(content)


def _apply_name(names: dict[str, _Inode], op: str, name: str, inode: _Inode | None) -> None:
    if op == "link":
        assert inode is not None
        names[name] = inode
    elif op == "unlink":
        names.pop(name, None)
    else:
        assert inode is not None
        names.pop(op.removeprefix("rename "), None)
        names[name] = inode


def _survivors(inode: _Inode, rng: random.Random, mode: str) -> bytes:
    if mode == "drop" or not inode.pending:
        return inode.durable
    if mode == "keep":
        return _replay(inode.durable, inode.pending)
    content = bytearray(inode.durable)
    for op, at, data in inode.pending:
        if op == "truncate":
            if rng.random() < 0.5:
                _apply_truncate(content, at)
            continue
        if rng.random() < 0.5 and len(content) < at + len(data):
            content.extend(bytes(at + len(data) - len(content)))  # the length was journaled, the data was not
        start = at
        while start < at + len(data):
            stop = min((start // SECTOR_BYTES + 1) * SECTOR_BYTES, at + len(data))
            if rng.random() < 0.6:
                _apply_write(content, start, data[start - at : stop - at])
            start = stop
    return bytes(content)
