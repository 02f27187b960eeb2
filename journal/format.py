"""The bytes of a segment: preamble and frame header, packed and parsed. docs/FORMAT.md is the norm.

A segment is a multi-frame ``.zst`` file. It opens with a *preamble* (a zstd skippable frame) and goes on with
*frames*: a fixed header (a skippable frame too) followed by one ordinary zstd frame. All integers are
little-endian, every CRC is CRC-32 as in zlib.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple
from zlib import crc32

from .errors import JournalUnsupported

VERSION = 1
FRAME_SKIP_MAGIC = 0x184D2A55
SEGMENT_SKIP_MAGIC = 0x184D2A56
FRAME_MAGIC = b"UNLF"
SEGMENT_MAGIC = b"UNLS"

COMPAT_IMAGE = 1
"""Frame and preamble: the (first) event is an image, a fold may begin there. A reader may ignore it."""
COMPAT_KNOWN = COMPAT_IMAGE
INCOMPAT_KNOWN = 0

NO_PREDECESSOR = 2**64 - 1
JOURNAL_ID_BYTES_MAX = 128
RAW_BYTES_MAX = 1 << 30
STORED_BYTES_MAX = (1 << 30) + (1 << 24)
EVENTS_MAX = 2**32 - 1
HEADER_BYTES_LIMIT = 4096
"""No version's header or preamble is larger: bounds what a reader takes on trust before it has seen a CRC.

Whoever parses one must have read as much as this (less only where the bytes end), or a longer one of a later version
looks like bytes that end too early, and is cut instead of refused.
"""

_FRAME_BODY = struct.Struct("<II4sHHIIIIQQqIII")
_FRAME_TAIL = struct.Struct("<II")
_SEGMENT_BODY = struct.Struct(f"<II4sHHIIIIQQQq{JOURNAL_ID_BYTES_MAX}s")
_CRC = struct.Struct("<I")
_START = struct.Struct("<II4sH")

FRAME_HEADER_BYTES = _FRAME_BODY.size + _FRAME_TAIL.size
PREAMBLE_BYTES = _SEGMENT_BODY.size + _CRC.size
FRAME_START = struct.pack("<I", FRAME_SKIP_MAGIC)
"""The first 4 bytes of every version's frame: what a search for a later frame looks for."""

_NAME = re.compile(r"([0-9]{20})\.zst")


class FrameHeader(NamedTuple):
    """A parsed frame header; ``end`` of a frame is its byte + FRAME_HEADER_BYTES + stored_bytes."""

    compat: int
    incompat: int
    incarnation: int
    events: int
    first_offset: int
    durable_upto: int
    wall_ns: int
    stored_bytes: int
    raw_bytes: int
    payload_crc: int
    chain: int

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.events

    @property
    def total_bytes(self) -> int:
        return FRAME_HEADER_BYTES + self.stored_bytes


class Preamble(NamedTuple):
    """A parsed segment preamble. ``chain_seed`` (its own CRC) starts the chain of the segment's frames."""

    journal_id: str
    compat: int
    incompat: int
    incarnation: int
    first_offset: int
    pred_first_offset: int
    pred_bytes: int
    pred_chain: int
    wall_ns: int
    chain_seed: int

    @property
    def has_predecessor(self) -> bool:
        return self.pred_first_offset != NO_PREDECESSOR

    @property
    def starts_with_image(self) -> bool:
        return bool(self.compat & COMPAT_IMAGE)


def segment_name(first_offset: int) -> str:
    """File name of the segment whose first event has this offset."""
    return f"{first_offset:020d}.zst"


def segment_offset(name: str) -> int | None:
    """First offset that a file name states, or None if it is no segment's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def next_chain(previous: int, header_start: bytes | memoryview) -> int:
    """Chain value of a frame: CRC of the previous chain value and the header up to the chain field."""
    return crc32(header_start, crc32(_CRC.pack(previous)))


def pack_frame_header(
    *,
    compat: int,
    incarnation: int,
    count: int,
    first_offset: int,
    durable_upto: int,
    wall_ns: int,
    stored_bytes: int,
    raw_bytes: int,
    payload_crc: int,
    previous_chain: int,
) -> tuple[bytes, int]:
    """Header bytes and the chain value that they hold."""
    assert 0 < count <= EVENTS_MAX
    assert 0 < stored_bytes <= STORED_BYTES_MAX
    assert 0 < raw_bytes <= RAW_BYTES_MAX
    assert durable_upto <= first_offset, "a frame cannot be durable before it is written"
    body = _FRAME_BODY.pack(
        FRAME_SKIP_MAGIC,
        FRAME_HEADER_BYTES - 8,
        FRAME_MAGIC,
        VERSION,
        0,
        compat,
        0,
        incarnation,
        count,
        first_offset,
        durable_upto,
        wall_ns,
        stored_bytes,
        raw_bytes,
        payload_crc,
    )
    chain = next_chain(previous_chain, body)
    with_chain = body + _CRC.pack(chain)
    return with_chain + _CRC.pack(crc32(with_chain)), chain


def parse_frame_header(data: bytes | memoryview, where: str) -> FrameHeader | str:
    """The header at the start of ``data``, or why there is none. The chain is not checked here.

    ``data``: HEADER_BYTES_LIMIT bytes, fewer only where the segment ends. Raises JournalUnsupported for an intact
    header of another version or with unknown incompatible flags.
    """
    problem = _check_start(data, FRAME_SKIP_MAGIC, FRAME_MAGIC, where)
    if problem is not None:
        return problem
    if len(data) < FRAME_HEADER_BYTES or _START.unpack_from(data)[1] != FRAME_HEADER_BYTES - 8:
        return "frame header of a wrong length"
    fields = _FRAME_BODY.unpack_from(data)
    chain, _ = _FRAME_TAIL.unpack_from(data, _FRAME_BODY.size)
    header = FrameHeader._make((*fields[5:], chain))
    if header.incompat & ~INCOMPAT_KNOWN:
        raise JournalUnsupported(
            f"{where}: needs features 0x{header.incompat:x} that this release does not know. Use a newer unlost."
        )
    if fields[4] != 0:
        return "reserved field is not zero"
    if header.events == 0 or not 0 < header.stored_bytes <= STORED_BYTES_MAX:
        return "impossible count or length in the frame header"
    if not 0 < header.raw_bytes <= RAW_BYTES_MAX or header.durable_upto > header.first_offset:
        return "impossible length or watermark in the frame header"
    return header


def pack_preamble(
    *,
    journal_id: str,
    compat: int,
    incarnation: int,
    first_offset: int,
    pred_first_offset: int,
    pred_bytes: int,
    pred_chain: int,
    wall_ns: int,
) -> tuple[bytes, int]:
    """Preamble bytes and the chain seed that they end with."""
    name = journal_id.encode()
    assert 0 < len(name) <= JOURNAL_ID_BYTES_MAX
    body = _SEGMENT_BODY.pack(
        SEGMENT_SKIP_MAGIC,
        PREAMBLE_BYTES - 8,
        SEGMENT_MAGIC,
        VERSION,
        len(name),
        compat,
        0,
        incarnation,
        pred_chain,
        first_offset,
        pred_first_offset,
        pred_bytes,
        wall_ns,
        name,
    )
    seed = crc32(body)
    return body + _CRC.pack(seed), seed


def parse_preamble(data: bytes | memoryview, where: str) -> Preamble | str:
    """The preamble at the start of ``data``, or why there is none.

    ``data``: HEADER_BYTES_LIMIT bytes, fewer only where the file ends. Raises JournalUnsupported for an intact preamble
    of another version or with unknown incompatible flags.
    """
    problem = _check_start(data, SEGMENT_SKIP_MAGIC, SEGMENT_MAGIC, where)
    if problem is not None:
        return problem
    if len(data) < PREAMBLE_BYTES or _START.unpack_from(data)[1] != PREAMBLE_BYTES - 8:
        return "segment preamble of a wrong length"
    fields = _SEGMENT_BODY.unpack_from(data)
    id_bytes, compat, incompat, incarnation, pred_chain, first, pred_first, pred_bytes, wall, name = fields[4:]
    if incompat & ~INCOMPAT_KNOWN:
        raise JournalUnsupported(
            f"{where}: needs features 0x{incompat:x} that this release does not know. Use a newer unlost."
        )
    if not 0 < id_bytes <= JOURNAL_ID_BYTES_MAX or any(name[id_bytes:]):
        return "impossible journal id in the segment preamble"
    try:
        journal_id = name[:id_bytes].decode()
    except UnicodeDecodeError:
        return "journal id in the segment preamble is not UTF-8"
    if (pred_first == NO_PREDECESSOR) != (pred_bytes == 0):
        return "impossible predecessor in the segment preamble"
    seed = _CRC.unpack_from(data, _SEGMENT_BODY.size)[0]
    return Preamble(journal_id, compat, incompat, incarnation, first, pred_first, pred_bytes, pred_chain, wall, seed)


def _check_start(data: bytes | memoryview, skip_magic: int, magic: bytes, where: str) -> str | None:
    """What every version shares: skippable magic, length, our magic, version, and a CRC in the last 4 bytes."""
    if len(data) < _START.size:
        return "bytes end inside a header" if len(data) else "no bytes"
    found_skip, length, found_magic, version = _START.unpack_from(data)
    if found_skip != skip_magic or found_magic != magic:
        return "not a header of this format"
    total = length + 8
    if not _START.size + 4 <= total <= HEADER_BYTES_LIMIT:
        return "impossible header length"
    if len(data) < total:
        return "bytes end inside a header"
    if crc32(data[: total - 4]) != _CRC.unpack_from(data, total - 4)[0]:
        return "header checksum does not match"
    if version != VERSION:
        raise JournalUnsupported(
            f"{where}: written in journal format {version}; this release reads format {VERSION}. Use the unlost "
            f"release that wrote it."
        )
    return None
