"""Reads a journal, also beside its running writer: never locks, never writes.

A reader looks at the WATERMARK before it looks at the segments, so that whatever the watermark covers must be there.
A torn tail ends the iteration quietly (``tail`` tells); bad bytes below the watermark raise JournalDamaged.
"""

from __future__ import annotations

import itertools
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from .errors import JournalDamaged, JournalMissing
from .format import COMPAT_IMAGE, FrameHeader, segment_name
from .frames import EventTypes, FrameOpener, PayloadError
from .judge import Judged, judge_rest, judge_segment, raise_if_damaged
from .marks import read_watermark
from .places import ANYWHERE, Places
from .scan import FrameWalk, TornTail
from .storage import RealStorage, Storage
from .survey import SegmentFile, Survey, open_walk, survey, survey_again

E = TypeVar("E")
T = TypeVar("T")


_first_offset = attrgetter("first_offset")


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


_NO_FRAME: tuple[int, list[Any]] = (-1, [])


class JournalReader(Generic[E]):
    """Iterates, follows and looks up events. One thread per reader."""

    def __init__(self, directory: str | os.PathLike[str], types: Any, storage: Storage | None = None) -> None:
        """Raises JournalMissing, JournalDamaged (a segment is missing), JournalUnsupported, OSError."""
        self.directory = os.fspath(directory)
        self._storage = storage or RealStorage()
        self._types = types if isinstance(types, EventTypes) else EventTypes(types)
        self._opener = FrameOpener()
        self._touched: set[int] = set()
        self._places = Places()
        self._cached: tuple[int, list[Any]] = _NO_FRAME
        self._cached_is_durable = False
        self.tail: TailInfo | None = None
        self._survey: Survey = survey(self._storage, self.directory)
        self._looked()

    # ------------------------------------------------------------------ what is there

    def refresh(self) -> None:
        """Look at the directory again: new segments, a higher watermark, a higher floor."""
        self._survey = survey_again(self._storage, self.directory, self._survey)
        self._looked()

    def _looked(self) -> None:
        found = self._survey
        self._cached = _NO_FRAME
        self._places.forget_below(found.floor)
        self._touched = {first for first in self._touched if first >= found.floor}
        if not found.chain:
            self._end_of_journal(found, judge_rest(self._storage, found, found.floor))

    def _looking(self, look: Callable[[Survey], T]) -> T:
        """``look`` at what is there; anew if a file goes meanwhile, pruned or taken back by its writer."""
        while True:
            try:
                return look(self._survey)
            except FileNotFoundError:
                self._look_anew()

    def _look_anew(self) -> None:
        self._survey = survey(self._storage, self.directory)
        self._looked()

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
        return self._looking(self._end_of)

    def _end_of(self, found: Survey) -> int:
        if not found.chain:
            return found.floor
        last = found.chain[-1]
        place = self._places.nearest(last, ANYWHERE)
        end = place.offset if place is not None else last.first_offset
        for _, walk, header in self._headers(found, len(found.chain) - 1, ANYWHERE):
            if header.next_offset <= found.watermark or walk.payload(header) is not None:
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

        From one look at the directory, whatever else this reader is asked meanwhile.

        Raises JournalMissing below the floor, JournalDamaged where durable bytes are bad, JournalUnsupported,
        OSError (never taken for damage).
        """
        due = start
        for view in self.frames(start, stop):
            events = self._decode(view)
            first = view.first_offset
            low = max(due - first, 0)
            high = view.count if stop is None else min(view.count, stop - first)
            due = first + high
            for index in range(low, high):
                yield first + index, events[index]

    def frames(self, start: int = 0, stop: int | None = None) -> Generator[FrameView, None, None]:
        """Whole frames that hold events of ``start`` ≤ offset < ``stop``, decompressed and checked.

        When a file goes meanwhile, pruned or taken back by its writer, the reader looks anew and goes on from there.
        """
        due = start
        while True:
            try:
                for view in self._frames(self._survey, due, stop):
                    yield view
                    due = view.first_offset + view.count
                return
            except FileNotFoundError:
                self._look_anew()

    def _frames(self, found: Survey, start: int, stop: int | None) -> Iterator[FrameView]:
        if start < found.floor and start != 0:
            raise JournalMissing(f"{self.directory}: event {start} is below the floor {found.floor}: it was pruned")
        first_segment = max(bisect_right(found.chain, start, key=_first_offset) - 1, 0)
        for index in range(first_segment, len(found.chain)):
            if stop is not None and found.chain[index].first_offset >= stop:
                return
            for segment, walk, header in self._headers(found, index, start):
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
        return self._looking(lambda found: self._offset_at(found, wall_ns))

    def _offset_at(self, found: Survey, wall_ns: int) -> int:
        chain = found.chain
        index = len(chain) - 1
        while index > 0 and (p := chain[index].preamble) is not None and p.wall_ns > wall_ns:
            index -= 1
        best = found.floor if index <= 0 else chain[index].first_offset
        if index >= 0:
            for _, _, header in self._headers(found, index, 0):
                if header.wall_ns > wall_ns:
                    break
                best = header.first_offset
        return best

    def _headers(self, found: Survey, index: int, start: int) -> Iterator[tuple[SegmentFile, FrameWalk, FrameHeader]]:
        """Frame headers of one segment, from the last place remembered that is not after ``start``.

        At bad bytes it ends (torn tail of the last segment) or raises JournalDamaged. FileNotFoundError: gone since.
        """
        segment = found.chain[index]
        file, walk = open_walk(self._storage, segment, found.directory)
        self._touched.add(segment.first_offset)
        if (place := self._places.nearest(segment, start)) is not None:
            walk.resume(place)
        try:
            while walk.bad is None:
                before = walk.position
                header = walk.step()
                if header is None:
                    break
                self._places.passing(segment, before, header, found.watermark)
                yield segment, walk, header
            self._end_of_segment(found, index, walk)
        finally:
            file.close()

    def _end_of_segment(self, found: Survey, index: int, walk: FrameWalk) -> None:
        """Judge where the walk stopped: return if the segment ends well or torn, raise JournalDamaged if not."""
        segment = found.chain[index]
        verdict = judge_segment(self._storage, found, index, walk)
        raise_if_damaged(found, segment, verdict)
        if index == len(found.chain) - 1:
            rest = judge_rest(self._storage, found, verdict.end.offset)
            self._end_of_journal(found, itertools.chain([(segment, verdict)], rest))

    def _end_of_journal(self, found: Survey, judged: Iterable[Judged]) -> None:
        """Raise JournalDamaged for the first that is damaged; the first torn one is the tail."""
        tail = None
        for segment, verdict in judged:
            raise_if_damaged(found, segment, verdict)
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
        self._forget_undurable()
        event: E = self._lookup(offset)
        return event

    def get_many(self, offsets: Iterable[int]) -> dict[int, E]:
        """Events by offset; each frame is decoded once."""
        self._forget_undurable()
        return {offset: self._lookup(offset) for offset in sorted(set(offsets))}

    def _forget_undurable(self) -> None:
        """Others may be written in the place of events that were not durable when they were looked up."""
        if not self._cached_is_durable:
            self._cached = _NO_FRAME

    def _lookup(self, offset: int) -> Any:
        first, events = self._cached
        if not first <= offset < first + len(events):
            self._load(offset)
            first, events = self._cached
        return events[offset - first]

    def _load(self, offset: int) -> None:
        view = self._frame_of(offset)
        if view is None:  # perhaps written since this reader looked
            self.refresh()
            view = self._frame_of(offset)
        if view is None:
            raise JournalMissing(
                f"{self.directory}: no event {offset}: the journal holds {self.first_offset} to {self.end_offset - 1}"
            )
        self._cached = (view.first_offset, self._decode(view))
        self._cached_is_durable = view.first_offset + view.count <= self._survey.watermark

    def _frame_of(self, offset: int) -> FrameView | None:
        if offset < self._survey.floor:
            return None
        try:
            with closing(self.frames(offset, offset + 1)) as views:
                return next(views, None)
        except JournalMissing:  # pruned just now
            return None

    # ------------------------------------------------------------------ live

    def follow(
        self,
        start: int,
        poll_s: float = 0.05,
        stop: Callable[[], bool] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[tuple[int, E]]:
        """Events from ``start`` on for ever, waiting for new ones; ends when ``stop()`` is true and nothing is left.

        It shows what is in the files, which may be a flush ahead of what is durable. What is given is not taken back:
        where a power cut takes events away, or a take-over leaves them out, those that are written in their place
        under the same offsets are never given. Who must not act on an event that may be lost waits until ``watermark``
        is above it, or calls ``sync_read``. Raises what ``events`` does.
        """
        at = start
        seen: object = None
        while True:
            stopping = stop is not None and stop()
            before, looked = at, self._signature()
            if looked != seen or stopping:
                self.refresh()
                for offset, event in self.events(at):
                    yield offset, event
                    at = offset + 1
                seen = looked
            if at == before:
                if stopping:
                    return
                sleep(poll_s)

    def _signature(self) -> object:
        """Changes whenever there may be something new: a name, the size of a file that may grow, or the WATERMARK.

        Those that may grow are the last one of the journal and, after it, such as had no preamble yet.
        """
        names = frozenset(self._storage.list_names(self.directory))
        growing = [*self._survey.chain[-1:], *self._survey.headless]
        sizes = tuple((file.first_offset, self._size(file.path)) for file in growing)
        return names, sizes, read_watermark(self._storage, self.directory)

    def _size(self, path: str) -> int:
        try:
            file = self._storage.open(path)
        except FileNotFoundError:
            return -1
        try:
            return file.size()
        finally:
            file.close()

    def sync_read(self) -> None:
        """Sync every segment read so far, unless it was pruned, and the directory.

        Afterwards what was read can't vanish in a power cut (protocol rule 2). Raises JournalMissing when a segment
        is gone that was not pruned (its writer took it back: read again), OSError.
        """
        for first_offset in sorted(self._touched):
            self._sync(os.path.join(self.directory, segment_name(first_offset)), first_offset)
        self._storage.sync_directory(self.directory)
        self._touched.difference_update(segment.first_offset for segment in self._survey.chain[:-1])

    def _sync(self, path: str, first_offset: int) -> None:
        try:
            file = self._storage.open(path)
        except FileNotFoundError as error:
            self.refresh()
            if first_offset < self._survey.floor:
                return
            raise JournalMissing(f"{path}: gone, and not pruned: what was read in it may be there no more") from error
        try:
            file.sync()
        finally:
            file.close()
