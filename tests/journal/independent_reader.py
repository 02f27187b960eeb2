"""A second reader, from docs/FORMAT.md alone, importing nothing of ours: the tests' oracle.

``read(directory)`` returns (events as plain lists, first offset, "clean" or "torn"), or raises ``Damage``.
"""

import pathlib
import re
import struct
import zlib

import msgspec
import zstandard

FRAME, SLOT = struct.Struct("<II4sHHIIIIQQqIIIII"), struct.Struct("<4sHHIIQQqI")
SEGMENT = struct.Struct("<II4sHHIIIIQQQq128sI")


class Damage(Exception):
    pass


def slots(path, magic):
    data = path.read_bytes() if path.exists() else b""
    for part in (data[: SLOT.size], data[4096 : 4096 + SLOT.size]):
        if len(part) == SLOT.size and part[:4] == magic and zlib.crc32(part[:-4]) == SLOT.unpack(part)[-1]:
            yield SLOT.unpack(part)


def preamble(data, first):
    if len(data) < SEGMENT.size or zlib.crc32(data[: SEGMENT.size - 4]) != SEGMENT.unpack_from(data)[-1]:
        return None
    p = SEGMENT.unpack_from(data)
    return p if p[:4] == (0x184D2A56, SEGMENT.size - 8, b"UNLS", 1) and p[6] == 0 and p[9] == first else None


def frames(data, p, end, offset, chain):
    """(end byte, next offset, chain, events) of each valid frame; ends at the first byte that does not start one."""
    at = SEGMENT.size
    while end - at >= FRAME.size:
        h, body = FRAME.unpack_from(data, at), data[at : at + FRAME.size]
        stop = at + FRAME.size + h[12]
        stored = data[at + FRAME.size : stop]
        sums = (zlib.crc32(body[:-4]), zlib.crc32(stored), zlib.crc32(body[:-8], zlib.crc32(struct.pack("<I", chain))))
        if h[:5] != (0x184D2A55, FRAME.size - 8, b"UNLF", 1, 0) or h[6] or stop > end:
            break
        if sums != (h[16], h[14], h[15]) or (h[9], h[7]) != (offset, p[7]):
            break
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=h[13])
        events = msgspec.msgpack.decode(raw)
        if len(events) != h[8] or len(raw) != h[13]:
            raise Damage("content")
        at, offset, chain = stop, offset + h[8], h[15]
        yield at, offset, chain, events


def read(directory):
    files = [p for p in pathlib.Path(directory).iterdir() if re.fullmatch(r"[0-9]{20}\.zst", p.name)]
    data = {int(p.name[:20]): p.read_bytes() for p in files}
    floor = max((s[6] for s in slots(pathlib.Path(directory, "FLOOR"), b"UNLB")), default=0)
    heads = {first: p for first, d in data.items() if first >= floor and (p := preamble(d, first))}
    chain, named = [max(heads, key=lambda f: (heads[f][7], f))] if heads else [], {}
    while chain and chain[0] != floor:
        before = heads[chain[0]][10]
        if before not in heads or heads[before][7] > heads[chain[0]][7]:
            raise Damage("chain")
        named[before] = (heads[chain[0]][11], chain[0], heads[chain[0]][8])
        chain.insert(0, before)
    events, offset, torn = [], floor, any(f > max(chain, default=-1) and f not in heads for f in data)
    for first in chain:
        end = named[first][0] if first in named else len(data[first])
        found = list(frames(data[first], heads[first], min(end, len(data[first])), offset, heads[first][-1]))
        last = found[-1] if found else (SEGMENT.size, offset, heads[first][-1])
        events += [event for frame in found for event in frame[3]]
        offset = last[1]
        if first in named and last[:3] != named[first]:
            raise Damage("segment")
        torn = torn or last[0] != end or end == SEGMENT.size
    marks = slots(pathlib.Path(directory, "WATERMARK"), b"UNLW")
    if offset < max((min([s[6], *(f for f in chain if heads[f][7] > s[3])]) for s in marks), default=0):
        raise Damage("below the watermark")
    return events, floor, "torn" if torn else "clean"
