"""One writer per journal: flock where it works, and who holds it, with a heartbeat, in the file always.

On one machine the kernel's lock decides, and it goes when its holder dies. Between machines it may not hold (shared
file systems), so a holder on another machine that never said goodbye is respected until someone who knows that it
is dead says so (``take_over``). A holder that was taken over finds that out at its next heartbeat.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from .clock import Clock
from .errors import JournalFenced, JournalLocked
from .storage import Storage, StorageLock, read_exact, write_all

LOCK_NAME = "LOCK"
_RECORD_BYTES = 512


class Holder(msgspec.Struct, frozen=True):
    """What the LOCK file says about its holder."""

    host: str
    boot: str
    pid: int
    process_start: str
    token: str
    incarnation: int
    since_wall_ns: int
    heartbeat_wall_ns: int
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (incarnation {self.incarnation})"


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return ""


def host_name() -> str:
    """Network name of this machine."""
    return os.uname().nodename


def boot_id() -> str:
    """Names this boot of this kernel, the same in every container on it; empty if unknown."""
    return _first_line("/proc/sys/kernel/random/boot_id")


def process_start(pid: int) -> str:
    """Start time of a process in kernel ticks, so that a recycled pid is not taken for its former owner."""
    stat = _first_line(f"/proc/{pid}/stat")
    return stat.rpartition(")")[2].split()[19] if stat else ""


class DirectoryLock:
    """The held lock of one journal directory."""

    def __init__(self, lock: StorageLock, directory: str, clock: Clock, holder: Holder) -> None:
        self._lock = lock
        self._directory = directory
        self._clock = clock
        self._holder = holder
        self._open = True

    @classmethod
    def acquire(cls, storage: Storage, directory: str, clock: Clock, *, take_over: bool) -> DirectoryLock:
        """Take the lock or raise JournalLocked naming the holder; OSError passes through."""
        path = os.path.join(directory, LOCK_NAME)
        lock = storage.try_lock(path)
        if lock is None:
            holder = _peek(storage, path)
            raise JournalLocked(
                directory,
                str(holder) if holder else "another process",
                "Wait for it or stop it; a lock of a living process on this machine is never taken over.",
            )
        try:
            previous = _read(lock)
            if previous is not None and not previous.released and not take_over:
                _refuse_living(lock, directory, previous, clock)
            now = clock.wall_ns()
            me = Holder(
                host_name(),
                boot_id(),
                os.getpid(),
                process_start(os.getpid()),
                os.urandom(8).hex(),
                previous.incarnation if previous is not None else 0,
                now,
                now,
            )
            held = cls(lock, directory, clock, me)
            held._write()
            return held
        except BaseException:
            lock.release()
            raise

    @property
    def incarnation(self) -> int:
        """The highest that this lock was held by, as far as LOCK tells: ours, once ``heartbeat`` has been told it."""
        return self._holder.incarnation

    @property
    def file_lock(self) -> StorageLock:
        """The lock below, for a forked child that must let go of its copy."""
        return self._lock

    def heartbeat(self, incarnation: int | None = None) -> None:
        """Check that the lock is still ours and write the time. Raises JournalFenced, OSError."""
        self.check()
        me = self._holder
        self._holder = msgspec.structs.replace(
            me,
            heartbeat_wall_ns=self._clock.wall_ns(),
            incarnation=me.incarnation if incarnation is None else incarnation,
        )
        self._write()

    def check(self) -> None:
        """Raise JournalFenced if another writer has taken this journal over; OSError passes through."""
        found = _read(self._lock)
        if found is not None and found.token != self._holder.token:
            raise JournalFenced(
                f"{self._directory}: taken over by {found}. This writer stops; whatever it wrote since is not part of "
                f"the journal."
            )

    def release(self) -> None:
        """Say goodbye in the file if the lock is still ours, and unlock; idempotent."""
        if not self._open:
            return
        self._open = False
        try:
            found = _read(self._lock)
            if found is not None and found.token == self._holder.token:
                self._holder = msgspec.structs.replace(self._holder, released=True)
                self._write()
        except OSError:
            pass  # unlocking matters more than the goodbye
        finally:
            self._lock.release()

    def drop(self) -> None:
        """Unlock without a goodbye, as the death of the process would."""
        if self._open:
            self._open = False
            self._lock.release()

    def _write(self) -> None:
        record = msgspec.json.encode(self._holder).ljust(_RECORD_BYTES - 1) + b"\n"
        write_all(self._lock.file, 0, record)


def _decode(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data.strip(b" \n\0"), type=Holder)
    except msgspec.MsgspecError:
        return None


def _read(lock: StorageLock) -> Holder | None:
    return _decode(read_exact(lock.file, 0, _RECORD_BYTES))


def _peek(storage: Storage, path: str) -> Holder | None:
    file = storage.open(path)
    try:
        return _decode(read_exact(file, 0, _RECORD_BYTES))
    finally:
        file.close()


def _refuse_living(lock: StorageLock, directory: str, previous: Holder, clock: Clock) -> None:
    """Raise JournalLocked unless the previous holder is certainly gone."""
    same_kernel = bool(previous.boot) and previous.boot == boot_id()
    if same_kernel or previous.host == host_name():
        if lock.enforced or not same_kernel:
            return  # the kernel gave us the lock, or the machine was restarted: the holder is dead
        if not previous.process_start or process_start(previous.pid) != previous.process_start:
            return
        raise JournalLocked(directory, str(previous), "This file system has no working lock and the process lives.")
    age_s = max(0.0, (clock.wall_ns() - previous.heartbeat_wall_ns) / 1e9)
    raise JournalLocked(
        directory,
        f"{previous}, last heartbeat {age_s:.0f} s ago",
        "If that process is certainly dead, open with take_over (`--take-over`).",
    )


def describe(storage: Storage, directory: str) -> dict[str, Any] | None:
    """What LOCK says, for tools; None if there is no readable record. Takes no lock."""
    try:
        holder = _peek(storage, os.path.join(directory, LOCK_NAME))
    except FileNotFoundError:
        return None
    return None if holder is None else msgspec.structs.asdict(holder)
