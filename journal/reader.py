"""Reads a journal, also beside its running writer: never locks, never writes.

A reader looks at the WATERMARK before it looks at the segments, so that whatever the watermark covers must be there.
A torn tail ends the iteration quietly (``tail`` tells); bad bytes below the watermark raise JournalDamaged.
"""

from __future__ import annotations

import itertools
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from .errors import JournalDamaged, JournalMissing
from .format import COMPAT_IMAGE, FrameHeader, segment_name, segment_offset
from .frames import EventTypes, FrameOpener, PayloadError
from .judge import Judged, judge_rest, judge_segment, raise_if_damaged
from .scan import FrameWalk, Position, TornTail
from .storage import RealStorage, Storage, StorageFile
from .survey import SegmentFile, Survey, open_walk, survey, survey_again

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class FrameView:
    """A frame as stored: ``payload`` is the decompressed msgpack array of ``count`` events."""

    first_offset: int
    count: int
    incarnation: int
    wall_ns: int
    image: bool
    payload: bytes
    segment: str
    byte: int


class SegmentInfo(NamedTuple):
    """A segment of the journal. ``named_bytes`` is None for the last one."""

    name: str
    first_offset: int
    incarnation: int
    size: int
    named_bytes: int | None
    starts_with_image: bool
    wall_ns: int


class TailInfo(NamedTuple):
    """Bytes at the end that were never durable; they belong to no event."""

    segment: str
    byte: int
    length_bytes: int
    reason: str


class JournalReader(Generic[E]):
    """Iterates, follows and looks up events. One thread per reader."""

    def __init__(self, directory: str | os.PathLike[str], types: Any, storage: Storage | None = None) -> None:
        """Raises JournalMissing, JournalDamaged (a segment is missing), JournalUnsupported, OSError."""
        self.directory = os.fspath(directory)
        self._storage = storage or RealStorage()
        self._types = types if isinstance(types, EventTypes) else EventTypes(types)
        self._opener = FrameOpener()
        self._touched: set[str] = set()
        self._index: dict[int, tuple[list[int], list[int]]] = {}
        self._cached: tuple[int, list[Any]] = (-1, [])
        self._hint: tuple[int, Position | None] = (-1, None)
        self.tail: TailInfo | None = None
        self._survey: Survey = survey(self._storage, self.directory)
        self._looked()

    # ------------------------------------------------------------------ what is there

    def refresh(self) -> None:
        """Look at the directory again: new segments, a higher watermark, a higher floor."""
        self._survey = survey_again(self._storage, self.directory, self._survey)
        self._looked()

    def _looked(self) -> None:
        self._starts = [s.first_offset for s in self._survey.chain]
        if not self._survey.chain:
            self._end_of_journal(judge_rest(self._storage, self._survey, self._survey.floor))

    @property
    def journal_id(self) -> str | None:
        """Which journal this is; None while it holds no segment."""
        return self._survey.journal_id

    @property
    def first_offset(self) -> int:
        """The floor: the oldest event that is kept."""
        return self._survey.floor

    @property
    def end_offset(self) -> int:
        """Offset after the newest readable event, as of now; headers only."""
        self.refresh()
        end = self._survey.chain[-1].first_offset if self._survey.chain else self._survey.floor
        for _, walk, header in self._headers(len(self._survey.chain) - 1):
            if header.next_offset <= self._survey.watermark or walk.payload(header) is not None:
                end = header.next_offset
        return end

    @property
    def watermark(self) -> int:
        """Every event below was known durable at the last ``refresh``."""
        return self._survey.watermark

    @property
    def notes(self) -> list[str]:
        """Oddities that are not errors: ignored files, a missing WATERMARK."""
        return list(self._survey.notes)

    def segments(self) -> list[SegmentInfo]:
        """The journal's segments in order, without strays."""
        return [
            SegmentInfo(
                s.name, s.first_offset, s.preamble.incarnation, s.size, s.named_bytes, s.preamble.starts_with_image,
                s.preamble.wall_ns,
            )
            for s in self._survey.chain
            if s.preamble is not None
        ]  # fmt: skip

    def last_image(self, before: int | None = None) -> int | None:
        """Offset of the newest image event, at or before ``before``; found from the preambles alone."""
        index = self._survey.newest_image(before)
        return None if index is None else self._survey.chain[index].first_offset

    # ------------------------------------------------------------------ iterating

    def events(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, E]]:
        """(offset, event) from ``start`` up to ``stop`` (not included) or the end; what precedes is hopped over.

        Raises JournalMissing below the floor, JournalDamaged where durable bytes are bad, JournalUnsupported,
        OSError (never taken for damage).
        """
        for view in self.frames(start, stop):
            events = self._decode(view)
            first = view.first_offset
            low = max(start - first, 0)
            high = view.count if stop is None else min(view.count, stop - first)
            for index in range(low, high):
                yield first + index, events[index]

    def frames(self, start: int = 0, stop: int | None = None) -> Iterator[FrameView]:
        """Whole frames that hold events of ``start`` ≤ offset < ``stop``, decompressed and checked."""
        if start < self._survey.floor and start != 0:
            raise JournalMissing(
                f"{self.directory}: event {start} is below the floor {self._survey.floor}: it was pruned"
            )
        first_segment = max(bisect_right(self._starts, start) - 1, 0)
        for index in range(first_segment, len(self._survey.chain)):
            if stop is not None and self._survey.chain[index].first_offset >= stop:
                return
            for segment, walk, header in self._headers(index, start):
                if stop is not None and header.first_offset >= stop:
                    return
                if header.next_offset > start:
                    view = self._view(segment, walk, header)
                    if view is not None:  # else the walk ends here, and is judged
                        yield view

    def offset_at(self, wall_ns: int) -> int:
        """First offset of the newest frame written at or before this wall-clock time (the floor if none was).

        Where to begin reading for a time; from headers only. Clocks may jump, so treat it as a hint.
        """
        chain = self._survey.chain
        index = len(chain) - 1
        while index > 0 and (p := chain[index].preamble) is not None and p.wall_ns > wall_ns:
            index -= 1
        best = self._survey.floor if index <= 0 else chain[index].first_offset
        if index >= 0:
            for _, _, header in self._headers(index):
                if header.wall_ns > wall_ns:
                    break
                best = header.first_offset
        return best

    def _headers(self, index: int, start: int = 0) -> Iterator[tuple[SegmentFile, FrameWalk, FrameHeader]]:
        """Frame headers of one segment, from a place that an earlier walk reached if that is not after ``start``.

        At bad bytes it ends (torn tail of the last segment) or raises JournalDamaged.
        """
        if index < 0:
            return
        segment = self._survey.chain[index]
        file, walk = self._open_walk(segment)
        self._touched.add(segment.path)
        hint_segment, hint = self._hint
        if hint is not None and hint_segment == segment.first_offset and hint.offset <= start:
            walk.resume(hint)
        try:
            while walk.bad is None:
                before = walk.position
                header = walk.step()
                if header is None:
                    break
                if before.offset <= start or self._hint[0] != segment.first_offset:
                    self._hint = (segment.first_offset, before)
                yield segment, walk, header
            self._end_of_segment(index, walk)
        finally:
            file.close()

    def _end_of_segment(self, index: int, walk: FrameWalk) -> None:
        """Judge where the walk stopped: return if the segment ends well or torn, raise JournalDamaged if not."""
        segment = self._survey.chain[index]
        verdict = judge_segment(self._storage, self._survey, index, walk)
        raise_if_damaged(self._survey, segment, verdict)
        if index == len(self._survey.chain) - 1:
            rest = judge_rest(self._storage, self._survey, verdict.end.offset)
            self._end_of_journal(itertools.chain([(segment, verdict)], rest))

    def _end_of_journal(self, judged: Iterable[Judged]) -> None:
        """Raise JournalDamaged for the first that is damaged; the first torn one is the tail."""
        tail = None
        for segment, verdict in judged:
            raise_if_damaged(self._survey, segment, verdict)
            if tail is None and isinstance(verdict, TornTail):
                tail = TailInfo(segment.name, verdict.end.byte, verdict.length, verdict.reason)
        self.tail = tail

    def _view(self, segment: SegmentFile, walk: FrameWalk, header: FrameHeader) -> FrameView | None:
        """Payload of the frame just stepped over; None (and the walk ended) when its checksum fails."""
        byte = walk.position.byte - header.total_bytes
        stored = walk.payload(header)
        if stored is None:
            return None
        try:
            payload = self._opener.open(stored, header.raw_bytes)
        except PayloadError as error:
            raise JournalDamaged(self.directory, segment.name, byte, header.first_offset, str(error)) from error
        return FrameView(
            header.first_offset, header.events, header.incarnation, header.wall_ns,
            bool(header.compat & COMPAT_IMAGE), payload, segment.name, byte,
        )  # fmt: skip

    def _decode(self, view: FrameView) -> list[Any]:
        try:
            events = self._types.decode_frame(view.payload)
        except msgspec.MsgspecError as error:
            raise JournalDamaged(
                self.directory, view.segment, view.byte, view.first_offset,
                f"the frame is intact but does not hold events of the registered types: {error}",
            ) from error  # fmt: skip
        if len(events) != view.count:
            raise JournalDamaged(
                self.directory, view.segment, view.byte, view.first_offset,
                f"the frame holds {len(events)} events, its header says {view.count}",
            )  # fmt: skip
        return events

    # ------------------------------------------------------------------ random access

    def get(self, offset: int) -> E:
        """One event by offset. Raises JournalMissing below the floor or beyond the end, JournalDamaged, OSError."""
        event: E = self._lookup(offset)
        return event

    def get_many(self, offsets: Iterable[int]) -> dict[int, E]:
        """Events by offset; each frame is decoded once."""
        return {offset: self._lookup(offset) for offset in sorted(set(offsets))}

    def _lookup(self, offset: int) -> Any:
        first, events = self._cached
        if not first <= offset < first + len(events):
            self._load(offset)
            first, events = self._cached
        return events[offset - first]

    def _load(self, offset: int) -> None:
        try:
            view = self._frame_of(offset)
        except JournalMissing:  # the newest segment that this reader knew may be pruned by now
            view = None
        if view is None:  # perhaps written since this reader looked
            self.refresh()
            self._index.clear()
            view = self._frame_of(offset)
        if view is None:
            raise JournalMissing(
                f"{self.directory}: no event {offset}: the journal holds {self.first_offset} to {self.end_offset - 1}"
            )
        self._cached = (view.first_offset, self._decode(view))

    def _frame_of(self, offset: int) -> FrameView | None:
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or offset < self._survey.floor:
            return None
        segment = self._survey.chain[index]
        if segment.first_offset not in self._index:
            places = [(h.first_offset, w.position.byte - h.total_bytes) for _, w, h in self._headers(index)]
            self._index[segment.first_offset] = ([p[0] for p in places], [p[1] for p in places])
        offsets, bytes_ = self._index[segment.first_offset]
        at = bisect_right(offsets, offset) - 1
        if at < 0:
            return None
        file, walk = self._open_walk(segment)
        try:
            header = walk.jump(bytes_[at], offsets[at])
            if header is None or offset >= header.next_offset:
                return None
            view = self._view(segment, walk, header)
            if view is None:
                self._end_of_segment(index, walk)
            return view
        finally:
            file.close()

    def _open_walk(self, segment: SegmentFile) -> tuple[StorageFile, FrameWalk]:
        try:
            return open_walk(self._storage, segment, self.directory)
        except FileNotFoundError as error:
            raise JournalMissing(f"{segment.path}: gone since this reader looked; it may have been pruned") from error

    # ------------------------------------------------------------------ live

    def follow(
        self,
        start: int,
        poll_s: float = 0.05,
        stop: Callable[[], bool] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[tuple[int, E]]:
        """Events from ``start`` on for ever, waiting for new ones; ends when ``stop()`` is true and nothing is left.

        It shows what is in the files, which may be a flush ahead of what is durable.
        """
        at = start
        seen: tuple[int, int] | None = None
        while True:
            stopping = stop is not None and stop()
            before, looked = at, self._signature()
            if looked != seen:
                self.refresh()
                for offset, event in self.events(at):
                    yield offset, event
                    at = offset + 1
                seen = looked
            if at == before:
                if stopping:
                    return
                sleep(poll_s)

    def _signature(self) -> tuple[int, int]:
        """Changes whenever there may be something new: newest segment file and its size."""
        starts = [o for name in self._storage.list_names(self.directory) if (o := segment_offset(name)) is not None]
        if not starts:
            return (-1, 0)
        newest = max(starts)
        try:
            file = self._storage.open(os.path.join(self.directory, segment_name(newest)))
        except FileNotFoundError:
            return (newest, -1)
        try:
            return (newest, file.size())
        finally:
            file.close()

    def sync_read(self) -> None:
        """Sync every segment read so far, and the directory.

        Afterwards what was read can't vanish in a power cut (protocol rule 2). Raises OSError.
        """
        for path in sorted(self._touched):
            file = self._storage.open(path)
            try:
                file.sync()
            finally:
                file.close()
        self._storage.sync_directory(self.directory)
