"""Ways to write an event down, ours and others', behind one small interface.

Every one of them gets the same records. What each has done when a call returns, and what a power cut may take, is its
``durable`` text: they do not promise the same, so the table says what they promise.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import logging.handlers
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from unlost.journal import JournalOptions, JournalWriter
from unlost.replay.events import EVENT_TYPES

GROUP_S = 0.02
"""Ours gathers for 20 ms by default; the queue and its thread do the same."""


class Sink(Protocol):
    """An open writer. ``sync`` returns once all is as durable as this writer makes it."""

    append: Callable[[Any], object]

    def sync(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Candidate:
    """``structs``: takes msgspec Structs, else dicts. ``package``: left out if that is not installed.

    ``async_``: the call returns before the record is in the file.
    """

    name: str
    durable: str
    make: Callable[[Path], Sink]
    structs: bool = False
    package: str | None = None

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


class _Nothing:
    def __init__(self, _: Path) -> None:
        self.append = lambda _record: None

    def sync(self) -> None: ...

    def close(self) -> None: ...


class _Unlost:
    def __init__(self, folder: Path) -> None:
        options = JournalOptions(backlog_max_bytes=512 << 20)
        self.writer: JournalWriter[Any] = JournalWriter.open(
            folder / "j", EVENT_TYPES, journal_id="bench", options=options
        )
        self.append = self.writer.append

    def sync(self) -> None:
        self.writer.sync()

    def close(self) -> None:
        self.writer.close()


class _QueueThread:
    """SimpleQueue, one thread that writes JSON lines, flushes and fdatasyncs every 20 ms."""

    def __init__(self, folder: Path) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.append = self._queue.put
        self._file = (folder / "events.jsonl").open("w", encoding="utf-8")
        self._synced = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        write, dumps = self._file.write, json.dumps
        while True:
            record = self._queue.get()
            end = time.monotonic() + GROUP_S
            waiter: threading.Event | None = None
            while True:
                if record is None:
                    break
                if isinstance(record, threading.Event):
                    waiter = record
                    break
                write(dumps(record) + "\n")
                left = end - time.monotonic()
                if left <= 0:
                    break
                try:
                    record = self._queue.get(timeout=left)
                except queue.Empty:
                    break
            self._file.flush()
            os.fdatasync(self._file.fileno())
            if waiter is not None:
                waiter.set()
            if record is None:
                return

    def sync(self) -> None:
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._file.close()


class _JsonDirect:
    def __init__(self, folder: Path) -> None:
        self._file = file = (folder / "events.jsonl").open("w", encoding="utf-8")
        write, flush, dumps = file.write, file.flush, json.dumps

        def append(record: dict[str, Any]) -> None:
            write(dumps(record) + "\n")
            flush()

        self.append = append

    def sync(self) -> None:
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _Logging:
    """The standard library's way off the calling thread: QueueHandler, QueueListener, FileHandler."""

    def __init__(self, folder: Path) -> None:
        self._target = logging.FileHandler(folder / "events.log")
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._handler = logging.handlers.QueueHandler(self._queue)  # type: ignore[arg-type]
        self._listener = logging.handlers.QueueListener(self._queue, self._target)  # type: ignore[arg-type]
        self._listener.start()
        logger = logging.getLogger(f"bench-{uuid.uuid4().hex}")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self._handler)
        dumps, info = json.dumps, logger.info

        def append(record: dict[str, Any]) -> None:
            info(dumps(record))

        self.append = append

    def sync(self) -> None:
        while not self._queue.empty():
            time.sleep(0.001)

    def close(self) -> None:
        self._listener.stop()
        self._target.close()


class _Sqlite:
    """One INSERT and COMMIT a record, prepared once by the module's statement cache."""

    def __init__(self, folder: Path, synchronous: str) -> None:
        self._db = db = sqlite3.connect(folder / "events.db", isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={synchronous}")
        db.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, body TEXT)")
        execute, dumps = db.execute, json.dumps

        def append(record: dict[str, Any]) -> None:
            execute("INSERT INTO events (body) VALUES (?)", (dumps(record),))

        self.append = append

    def sync(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def close(self) -> None:
        self._db.close()


@functools.cache
def _aggregate() -> type[Any]:
    """Made once: the package refuses a second class of the same name."""
    from eventsourcing.domain import Aggregate, event

    class Run(Aggregate):
        @event("Recorded")
        def record(self, body: dict[str, Any]) -> None:
            self.last = body

    return Run


class _EventSourcing:
    """The package's own way: an aggregate that triggers an event, saved by an application on SQLite."""

    def __init__(self, folder: Path) -> None:
        from eventsourcing.application import Application

        environment = {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(folder / "events.db")}
        self._application: Any = Application(env=environment)
        run, save = _aggregate()(), self._application.save

        def append(record: dict[str, Any]) -> None:
            run.record(record)
            save(run)

        self.append = append

    def sync(self) -> None: ...

    def close(self) -> None:
        self._application.close()


class _RocksDB:
    def __init__(self, folder: Path, *, sync: bool) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        self._db = db = Rdict(str(folder / "db"), options)
        write = WriteOptions()
        write.sync = sync
        encode, put = msgspec.msgpack.Encoder().encode, db.put
        self._next = 0

        def append(record: Any) -> None:
            self._next = key = self._next + 1
            put(key.to_bytes(8, "big"), encode(record), write_opt=write)

        self.append = append

    def sync(self) -> None:
        self._db.flush_wal(sync=True)

    def close(self) -> None:
        self._db.close()


class _PersistQueue:
    def __init__(self, folder: Path) -> None:
        from persistqueue import FIFOSQLiteQueue

        self._queue = FIFOSQLiteQueue(str(folder / "queue"), multithreading=True, auto_commit=True)
        self.append = self._queue.put

    def sync(self) -> None: ...

    def close(self) -> None:
        self._queue.close()


NOTHING = Candidate("nothing (the timer)", "-", _Nothing, structs=True)
UNLOST = Candidate("unlost journal", "within ~25 ms, in the background", _Unlost, structs=True)
QUEUE_THREAD = Candidate("queue + JSON-lines thread, fdatasync", "within ~25 ms, in the background", _QueueThread)

CANDIDATES = (
    NOTHING,
    UNLOST,
    QUEUE_THREAD,
    Candidate("JSON line written directly", "survives the process, not a power cut", _JsonDirect),
    Candidate("logging QueueHandler", "not even the process's death", _Logging),
    Candidate("SQLite WAL, NORMAL", "survives the process, not a power cut", lambda f: _Sqlite(f, "NORMAL")),
    Candidate("SQLite WAL, FULL", "when the call returns", lambda f: _Sqlite(f, "FULL")),
    Candidate("eventsourcing (SQLite)", "as its SQLite: WAL, FULL by default", _EventSourcing, package="eventsourcing"),
    Candidate(
        "RocksDB (rocksdict)", "survives the process, not a power cut", lambda f: _RocksDB(f, sync=False),
        structs=True, package="rocksdict",
    ),
    Candidate(
        "RocksDB (rocksdict), sync", "when the call returns", lambda f: _RocksDB(f, sync=True),
        structs=True, package="rocksdict",
    ),
    Candidate("persist-queue (SQLite)", "as its SQLite settings", _PersistQueue, package="persistqueue"),
)  # fmt: skip
