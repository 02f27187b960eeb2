"""The live rollout trace: ``RUN/rollout_trace.jsonl``, kept up with the journal by a thread of its own (docs/trace.md).

It reads what is durable back from the segments, so appending costs nothing more, whether a trace is written or not,
and no line is ever ahead of the journal. What is in the file is all that it goes on from: the last line names its
event, the journal knows the rest. So the way back after a crash, after a failed write, and after incarnations without
a trace is the same, and the file always grows towards what ``unlost export --trace`` writes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from ..journal.reader import JournalReader
from ..replay.events import Event
from ..replay.trace import TraceProjection, line_bytes, projection_at

log = logging.getLogger(__name__)

TRACE_FILE: Final = "rollout_trace.jsonl"
SET_ASIDE: Final = ".old"
EVERY_S: Final = 0.5
RETRY_S_MAX: Final = 30.0
CLOSE_S: Final = 10.0
EVENTS_AT_ONCE: Final = 1_000
BREATH_S: Final = 0.005
BLOCK_BYTES: Final = 1 << 16


class LiveTrace:
    """Writes one run's trace. ``start`` and ``close`` from the run's process; ``catch_up`` by whoever is in charge.

    ``open_reader``: a reader of the event journal, which exists. ``durable_upto``: offset before which it is durable.
    """

    def __init__(
        self, path: str, open_reader: Callable[[], JournalReader[Event]], durable_upto: Callable[[], int]
    ) -> None:
        self.path = path
        self.failures = 0
        self._open_reader = open_reader
        self._durable_upto = durable_upto
        self._reader: JournalReader[Event] | None = None
        self._projection = TraceProjection()
        self._file = -1
        self._size = 0
        self._next = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Keep up in the background. A daemon: a disk that hangs must not hold the process."""
        self._thread = threading.Thread(target=self._run, name="live trace", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Catch up a last time and stop; to be called when the journal is closed. Blocks for ``timeout_s`` at most."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning(
                    "%s: not complete in %.0f s; `unlost export --trace` writes all of it", self.path, timeout_s
                )

    def _run(self) -> None:
        wait = EVERY_S
        while not self._stop.wait(wait):
            wait = EVERY_S if self.catch_up() else min(2 * wait, RETRY_S_MAX)
        self.catch_up()
        self._let_go()

    # --- one round ---------------------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        """Write what has become durable. False if that failed: the run does not mind, the first time is logged.

        After a failure the next round finds its place anew.
        """
        try:
            if self._reader is None:
                self._open()
            self._write_on()
        except Exception as error:  # noqa: BLE001 - like all telemetry, it must not stop the run whatever fails here
            self._let_go()
            self.failures += 1
            if self.failures == 1:
                log.warning(
                    "%s: can't be written, the run goes on without: %s. Tried again every %.0f s at most; what is "
                    "missing follows then, and `unlost export --trace` writes all of it at any time",
                    self.path,
                    f"{type(error).__name__}: {error}",
                    RETRY_S_MAX,
                )
            return False
        if self.failures:
            log.info("%s: written again, nothing is missing", self.path)
            self.failures = 0
        return True

    def _let_go(self) -> None:
        self._reader = None
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                os.close(file)
            except OSError:  # its data are lost, which the next opening finds out
                log.debug("%s: closing failed", self.path, exc_info=True)

    def _write_on(self) -> None:
        assert self._reader is not None
        upto = self._durable_upto()
        if self._next >= upto:
            return
        self._reader.refresh()
        lines: list[bytes] = []
        for offset, event in self._reader.events(self._next, upto):
            lines += map(line_bytes, self._projection.feed(offset, event))
            if (offset + 1) % EVENTS_AT_ONCE == 0:
                self._put(lines, offset + 1)
                lines = []
                time.sleep(BREATH_S)  # the controller shares this interpreter
        self._put(lines, upto)

    def _put(self, lines: list[bytes], upto: int) -> None:
        """Append. Always at the place where the last whole line ended, whatever an attempt before has left there."""
        data = b"".join(lines)
        while data:
            written = os.pwrite(self._file, data, self._size)
            self._size += written
            data = data[written:]
        self._next = upto

    # --- finding the place -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Go on where the file ends: after its last event that is whole. What does not belong there is cut off."""
        reader = self._open_reader()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        offset, begin, length = self._last_event(os.fstat(self._file).st_size)
        first = reader.first_offset
        keep, upto, rest, projection = begin + length, offset + 1, b"", None
        if offset >= first:
            found = os.pread(self._file, length, begin)
            if offset < self._durable_upto():
                projection = projection_at(reader, offset)
                lines = b"".join(map(line_bytes, projection.feed(offset, reader.get(offset))))
                rest = lines[length:]
                if not lines.startswith(found):
                    projection = None
            if projection is None:
                self._set_aside()
                keep = 0
        elif 0 <= offset < first - 1:
            log.warning("%s: events %d to %d were pruned before they got here", self.path, offset + 1, first - 1)
        if projection is None:
            projection, upto, rest = projection_at(reader, first), first, b""
        os.ftruncate(self._file, keep)
        self._size, self._projection, self._reader = keep, projection, reader
        self._put([rest], upto)

    def _set_aside(self) -> None:
        """Begin a new file; what is no trace of this journal is kept beside it."""
        log.warning("%s: does not continue in this journal; kept as %s", self.path, self.path + SET_ASIDE)
        os.close(self._file)
        self._file = -1
        os.replace(self.path, self.path + SET_ASIDE)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def _last_event(self, end: int) -> tuple[int, int, int]:
        """Offset of the last event with a whole line, where its first line begins, and bytes; -1, 0, 0 if none has."""
        last, begin, finish = -1, 0, 0
        for start, line in self._lines_from_the_end(end):
            offset = _offset_of(line)
            if last < 0 and offset >= 0:
                last, finish = offset, start + len(line)
            if last >= 0 and offset != last:
                break
            if last >= 0:
                begin = start
        return last, begin, finish - begin

    def _lines_from_the_end(self, end: int) -> Iterator[tuple[int, bytes]]:
        """(place, line with its newline), newest first; what follows the last newline is no line."""
        rest = b""
        whole = False
        while end > 0:
            size = min(BLOCK_BYTES, end)
            end -= size
            rest = os.pread(self._file, size, end) + rest
            cut = rest.rfind(b"\n") + 1
            if not whole:
                rest, whole = rest[:cut], cut > 0
            while (cut := rest.rfind(b"\n", 0, -1) + 1) > 0:
                yield end + cut, rest[cut:]
                rest = rest[:cut]
        if rest:
            yield 0, rest


class _Place(msgspec.Struct):
    offset: int
    run: str
    event: str


_decode: Callable[[Any], _Place] = msgspec.json.Decoder(_Place).decode


def _offset_of(line: bytes) -> int:
    """The event that a line tells of; -1 if it is no line of ours."""
    try:
        return _decode(line).offset
    except (msgspec.DecodeError, UnicodeDecodeError):
        return -1
