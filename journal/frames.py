"""Events to frame payloads and back: one msgpack array of events per frame, compressed as one zstd frame."""

from __future__ import annotations

import types as builtin_types
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, Union, get_args, get_origin
from zlib import crc32

import msgspec
import zstandard

from .errors import JournalError, JournalEventRefused
from .format import RAW_BYTES_MAX
from .options import EVENT_OVERHEAD_BYTES


class EventTypes:
    """The closed union of Structs that a journal holds: what may be appended and how it reads back."""

    def __init__(self, types: Any) -> None:
        """``types``: ``A | B | C``, one class, or a tuple of classes, all tagged msgspec Structs."""
        classes = _classes(types)
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct)):
                raise JournalError(f"{cls!r} is not a msgspec Struct: a journal's events must be")
            if cls.__struct_config__.tag is None:
                raise JournalError(f"{cls.__name__} has no tag: give it tag=<int>, or it can't be told apart")
        self.classes = frozenset(classes)
        union: Any = Union[classes]  # noqa: UP007  built from a tuple at run time
        self.decode_frame = msgspec.msgpack.Decoder(list[union]).decode
        self.decode_one = msgspec.msgpack.Decoder(union).decode
        self.encode = msgspec.msgpack.Encoder().encode

    def encode_checked(self, event: Any) -> bytes:
        """Encode, and raise JournalEventRefused unless the bytes read back as a registered event."""
        encoded = self.encode(event)
        try:
            self.decode_one(encoded)
        except msgspec.MsgspecError as error:
            raise JournalEventRefused(f"{type(event).__name__} would not read back: {error}") from error
        return encoded


def _classes(types: Any) -> tuple[type, ...]:
    if isinstance(types, tuple):
        return types
    if get_origin(types) in (Union, builtin_types.UnionType):
        return get_args(types)
    return (types,)


class Later(NamedTuple):
    """An event that is still to be built and encoded, and what it counts for in the backlog."""

    build: Callable[[], Any]
    encode: Callable[[Any], bytes]
    cost_bytes: int


class Batch(NamedTuple):
    """Events in a row, as they were queued: encoded, or (``unbuilt``: some of them) still to be built."""

    first_offset: int
    events: list[bytes | Later]
    cost_bytes: int
    new_segment: bool
    image: bool
    queued_since: float
    unbuilt: bool = False


class SealedFrame(NamedTuple):
    """A frame ready to be written, whatever segment and place it will get."""

    first_offset: int
    events: int
    raw_bytes: int
    stored: bytes
    payload_crc: int
    new_segment: bool
    image: bool
    cost_bytes: int
    queued_since: float

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.events


class Unbuildable(JournalError):
    """An event of ``append_later`` that can't be built, and why."""

    def __init__(self, offset: int, cause: Exception) -> None:
        super().__init__(f"event {offset} can't be built: {cause!r}")


def _built(later: Later) -> bytes:
    data = later.encode(later.build())
    if len(data) > RAW_BYTES_MAX - ARRAY_HEADER_BYTES_MAX:
        raise JournalEventRefused(f"it takes {len(data)} bytes, a frame holds at most {RAW_BYTES_MAX}")
    return data


class FrameSealer:
    """Compresses batches. It owns its compressor: one shared between threads crashes the process."""

    def __init__(self, *, level: int, events_max: int, bytes_max: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        self._events_max = events_max
        self._bytes_max = bytes_max

    def seal(self, batch: Batch, into: deque[SealedFrame]) -> None:
        """One frame, or several when the batch exceeds a frame's limits; a single larger event gets its own.

        The frames' costs add up to the batch's. The batch's events are let go of as they get into a frame. Raises
        Unbuildable, with everything before that event sealed.
        """
        if batch.unbuilt:
            self._seal_unbuilt(batch, into)
            return
        events: Any = batch.events
        if len(events) <= self._events_max and batch.cost_bytes <= self._bytes_max + EVENT_OVERHEAD_BYTES * len(events):
            into.append(self._seal(batch, events, 0, batch.cost_bytes))
            return
        ends = list(accumulate(map(len, events)))
        start = done = 0
        cost_left = batch.cost_bytes
        while start < len(ends):
            stop = bisect_left(ends, done + self._bytes_max + 1, lo=start)
            stop = max(start + 1, min(stop, start + self._events_max))
            cost = ends[stop - 1] - done + EVENT_OVERHEAD_BYTES * (stop - start)
            if stop == len(ends):
                cost = cost_left
            into.append(self._seal(batch, events[start:stop], start, cost))
            events[start:stop] = [b""] * (stop - start)
            start, done, cost_left = stop, ends[stop - 1], cost_left - cost

    def _seal_unbuilt(self, batch: Batch, into: deque[SealedFrame]) -> None:
        """The same, building one event after the other."""
        events, cost_left = batch.events, batch.cost_bytes
        group: list[bytes] = []
        start = size = cost = 0
        for index, event in enumerate(events):
            events[index] = b""
            try:
                data = event if isinstance(event, bytes) else _built(event)
            except Exception as error:
                if group:
                    into.append(self._seal(batch, group, start, cost))
                raise Unbuildable(batch.first_offset + index, error) from error
            if group and (len(group) == self._events_max or size + len(data) > self._bytes_max):
                into.append(self._seal(batch, group, start, cost))
                cost_left -= cost
                group, start, size, cost = [], index, 0, 0
            group.append(data)
            size += len(data)
            cost += len(data) + EVENT_OVERHEAD_BYTES if isinstance(event, bytes) else event.cost_bytes
        into.append(self._seal(batch, group, start, cost_left))

    def _seal(self, batch: Batch, events: list[bytes], start: int, cost: int) -> SealedFrame:
        raw = array_header(len(events)) + b"".join(events)
        stored = self._compressor.compress(raw)
        first = start == 0
        return SealedFrame(
            batch.first_offset + start,
            len(events),
            len(raw),
            stored,
            crc32(stored),
            batch.new_segment and first,
            batch.image and first,
            cost,
            batch.queued_since,
        )


ARRAY_HEADER_BYTES_MAX = 5


def array_header(count: int) -> bytes:
    """Msgpack's header of an array of ``count`` items."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


class PayloadError(Exception):
    """A stored payload whose CRC holds does not decode: reported by the reader as damage."""


class FrameOpener:
    """Decompresses stored payloads; not for use by two threads at once."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()

    def open(self, stored: bytes, raw_bytes: int) -> bytes:
        """The frame's msgpack array. Its length is checked against the header before anything is allocated."""
        try:
            parameters = zstandard.get_frame_parameters(stored)
            if parameters.content_size != raw_bytes or not parameters.has_checksum:
                raise PayloadError(f"zstd frame of {parameters.content_size} bytes, header says {raw_bytes}")
            raw = self._decompressor.decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise PayloadError(f"zstd: {error}") from error
        if len(raw) != raw_bytes:
            raise PayloadError(f"{len(raw)} bytes after decompression, header says {raw_bytes}")
        return raw


def count_events(raw: bytes) -> int:
    """Number of events in a frame's payload, without knowing their types. Raises PayloadError."""
    try:
        return len(msgspec.msgpack.decode(raw, type=list[msgspec.Raw]))
    except msgspec.MsgspecError as error:
        raise PayloadError(f"msgpack: {error}") from error
