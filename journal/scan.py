"""Walks one segment's frames and judges where they end: clean, torn tail or damaged (docs/FORMAT.md).

Pure: bytes and the watermark in, a verdict out. What was durable and is bad is *damage*; what was never known to be
durable is a *torn tail*. Two proofs of durability count: the watermark given, and the ``durable_upto`` of any intact
later frame in the same bytes. Everyone who judges a journal does so through ``judge``.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol
from zlib import crc32

from .format import (
    FRAME_HEADER_BYTES,
    FRAME_START,
    HEADER_BYTES_LIMIT,
    PREAMBLE_BYTES,
    FrameHeader,
    Preamble,
    next_chain,
    parse_frame_header,
    segment_name,
)

_CHAINED_BYTES = FRAME_HEADER_BYTES - 8
_WINDOW_BYTES = 1 << 20
_FIND_FRAME_START = re.compile(re.escape(FRAME_START)).finditer


class Source(Protocol):
    """Random access to a segment's bytes. ``read`` returns exactly what was asked except at the end."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes: ...


class BytesSource:
    """A segment in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``, fewer at the end."""
        return self._data[offset : offset + size]


class Window:
    """Reads ahead in large pieces, so that hopping from header to header costs few calls."""

    def __init__(self, source: Source, limit: int | None = None) -> None:
        self._source = source
        self.end = source.size if limit is None else min(limit, source.size)
        self._start = 0
        self._data = b""

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``, fewer at the end of the segment."""
        size = min(size, self.end - offset)
        if size <= 0:
            return b""
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            self._data = self._source.read(offset, min(max(size, _WINDOW_BYTES), self.end - offset))
            self._start, at = offset, 0
        return self._data[at : at + size]


class Position(NamedTuple):
    """Where the next frame begins.

    Byte in the segment, offset of its first event, chain so far, frames passed, and when (wall clock, nanoseconds) the
    last of them was written (None if none).
    """

    byte: int
    offset: int
    chain: int
    frames: int
    wall_ns: int | None = None


class Bad(NamedTuple):
    """Why the walk stopped before the end of the bytes."""

    position: Position
    reason: str


class Clean(NamedTuple):
    """Every byte belongs to a valid frame."""

    end: Position


class TornTail(NamedTuple):
    """Valid frames up to ``end``; the ``length`` bytes after it were never known to be durable."""

    end: Position
    length: int
    reason: str


class Damaged(NamedTuple):
    """The frame expected at ``end`` was durable, and is missing or wrong."""

    end: Position
    reason: str


Verdict = Clean | TornTail | Damaged


class FrameWalk:
    """Steps from frame to frame. ``bad`` tells, after ``step`` returned None, whether the bytes ended well."""

    def __init__(self, window: Window, preamble: Preamble, where: str) -> None:
        self.window = window
        self.preamble = preamble
        self.where = where
        self.position = Position(PREAMBLE_BYTES, preamble.first_offset, preamble.chain_seed, 0)
        self._before = self.position
        self.bad: Bad | None = None

    def step(self) -> FrameHeader | None:
        """The header of the next frame, checked with its chain but without its payload.

        None at the end or at bad bytes. Afterwards ``position`` is behind that frame. Raises JournalUnsupported.
        """
        at = self.position
        if at.byte >= self.window.end:
            return None
        data = self.window.read(at.byte, HEADER_BYTES_LIMIT)
        header = parse_frame_header(data, f"{self.where} byte {at.byte}")
        if isinstance(header, str):
            return self._stop(header)
        if header.first_offset != at.offset:
            return self._stop(f"frame of event {header.first_offset} where event {at.offset} belongs")
        if header.incarnation != self.preamble.incarnation:
            return self._stop(f"frame of incarnation {header.incarnation} in a segment of {self.preamble.incarnation}")
        if next_chain(at.chain, data[:_CHAINED_BYTES]) != header.chain:
            return self._stop("chain does not match: a frame before this one is missing or another")
        end = at.byte + header.total_bytes
        if end > self.window.end:
            return self._stop("bytes end inside a frame")
        self._before = at
        self.position = Position(end, header.next_offset, header.chain, at.frames + 1, header.wall_ns)
        return header

    def resume(self, position: Position) -> None:
        """Go on at a frame boundary that an earlier walk over the same segment reached."""
        self.position = self._before = position

    def payload(self, header: FrameHeader) -> bytes | None:
        """Stored payload of the frame just stepped over; None, with the walk set back before it, if its CRC fails."""
        start = self.position.byte - header.stored_bytes
        stored = self.window.read(start, header.stored_bytes)
        if len(stored) == header.stored_bytes and crc32(stored) == header.payload_crc:
            return stored
        self.reject("payload checksum does not match")
        return None

    def reject(self, reason: str) -> None:
        """Stop before the frame just stepped over."""
        self.position = self._before
        self.bad = Bad(self.position, reason)

    def _stop(self, reason: str) -> FrameHeader | None:
        self.bad = Bad(self.position, reason)
        return None


def judge_walk(walk: FrameWalk, watermark: int, *, successor: Preamble | None, strict: bool) -> Verdict:
    """What the place is at which a walk has stopped: the whole rule of docs/FORMAT.md for a segment with a preamble.

    ``successor``: the preamble that names this segment, None for the head. ``watermark``: how far the head must reach.
    ``strict``: without a WATERMARK file, any intact later frame of these or later events proves damage, not only one
    that says so. Raises JournalUnsupported; OSError of the source passes through.
    """
    at, reason = walk.position, walk.bad.reason if walk.bad is not None else None
    if successor is not None:
        name = segment_name(successor.first_offset)
        if reason is None and at.byte < successor.pred_bytes:
            reason = f"ends at byte {at.byte}, its successor {name} says {successor.pred_bytes}"
        elif reason is None and (at.offset, at.chain) != (successor.first_offset, successor.pred_chain):
            reason = f"does not end as its successor {name} says"
        return Clean(at) if reason is None else Damaged(at, reason)
    if reason is None and at.byte == PREAMBLE_BYTES:
        reason = "no frame after the preamble"
    if reason is None and at.offset < watermark:
        reason = "the bytes end here"
    if reason is None:
        return Clean(at)
    return judge(walk.window, Bad(at, reason), watermark, strict=strict, where=walk.where)


def judge(window: Window, bad: Bad, watermark: int, *, strict: bool, where: str) -> TornTail | Damaged:
    """Torn or damaged? For the first bad byte of a segment that nothing follows, or of a file without a preamble."""
    at = bad.position
    if watermark > at.offset:
        return Damaged(at, f"{bad.reason}; durable up to event {watermark}")
    later = find_later_frame(window, at, strict=strict, where=where)
    if later is not None:
        byte, header = later
        return Damaged(
            at, f"{bad.reason}; an intact later frame at byte {byte} says durable up to event {header.durable_upto}"
        )
    return TornTail(at, window.end - at.byte, bad.reason)


def find_later_frame(window: Window, bad: Position, *, strict: bool, where: str) -> tuple[int, FrameHeader] | None:
    """The first intact frame after ``bad`` that proves the bad bytes durable.

    Its ``durable_upto`` lies above them, or (``strict``) its events are not before them. Raises JournalUnsupported for
    one of another version.
    """
    at = bad.byte  # an intact frame out of its place proves as much: the one before it was taken out
    while at < window.end:
        piece = window.read(at, _WINDOW_BYTES)
        for match in _FIND_FRAME_START(piece):
            byte = at + match.start()
            header = parse_frame_header(window.read(byte, HEADER_BYTES_LIMIT), f"{where} byte {byte}")
            if not isinstance(header, str) and (
                header.durable_upto > bad.offset or (strict and header.first_offset >= bad.offset)
            ):
                stored = window.read(byte + FRAME_HEADER_BYTES, header.stored_bytes)
                if len(stored) == header.stored_bytes and crc32(stored) == header.payload_crc:
                    return byte, header
        at += max(len(piece) - len(FRAME_START) + 1, 1)
    return None
