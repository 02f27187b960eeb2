"""A reader and judge written from docs/FORMAT.md alone, before its author had seen the code: it tests the document.

``read`` takes {file name: bytes} and gives [(offset, plain event), …] and a verdict: ("clean",),
("torn", segment, byte), ("damaged", segment, byte, offset) or ("refused",).
"""

import re
from struct import pack, unpack_from
from types import SimpleNamespace
from zlib import crc32

import msgspec
import zstandard

NONE = 2**64 - 1
FRAME = pack("<II4s", 0x184D2A55, 68, b"UNLF"), "<14xH4xIIIQQ8xIIII", "zero _ writer n first upto stored raw crc chain"
SEGMENT = pack("<II4s", 0x184D2A56, 188, b"UNLS"), "<14xH4xIIIQQQ8x128sI", "n _ writer link first before size id chain"


class Verdict(Exception): ...


def damaged(name, byte, offset):
    return Verdict("damaged", name if name == "FLOOR" else f"{name:020d}.zst", byte, offset)


def header(data, at, start, layout, names):
    """The preamble or frame header here, if its begin, its length and its own CRC are as they must be."""
    size = 8 + unpack_from("<I", data, at + 4)[0] if len(data) >= at + 14 else 0
    body, crc = data[at : at + size - 4], data[at + size - 4 : at + size]
    if not 18 <= size <= 4096 or body[:4] + body[8:12] != start[:4] + start[8:] or pack("<I", crc32(body)) != crc:
        return None
    if body[12:14] != b"\1\0" or (body[:12] == start and any(body[20:24])):
        raise Verdict("refused")
    values = unpack_from(layout, data, at) if body[:12] == start else ()
    return SimpleNamespace(**dict(zip(names.split(), values, strict=True))) if values else None


def preamble(data, name):
    if not (p := header(data, 0, *SEGMENT)) or p.first != name or (p.before == NONE) != (p.size == 0):
        return None
    known = 0 < p.n <= 128 and p.id == p.id[: p.n].decode(errors="replace").encode().ljust(128, b"\0")
    return p if known else None


def intact(data, at):
    """The header and payload of the frame here, if it is valid by all that does not depend on what is before it."""
    if not (h := header(data, at, *FRAME)) or h.zero or not h.n or h.upto > h.first:
        return None
    payload = data[at + 76 : at + 76 + h.stored]
    fits = 0 < len(payload) == h.stored <= 65 << 24 and 0 < h.raw <= 1 << 30
    return (h, payload) if fits and crc32(payload) == h.crc else None


def decode(h, payload):
    try:
        stated, zstd = zstandard.get_frame_parameters(payload), zstandard.ZstdDecompressor().decompressobj()
        raw = zstd.decompress(payload)
        events = msgspec.msgpack.decode(raw, type=list)
    except (zstandard.ZstdError, msgspec.MsgspecError):
        return None
    whole = zstd.eof and not zstd.unused_data and stated.has_checksum and stated.content_size == len(raw) == h.raw
    return events if whole and len(events) == h.n else None


def slots(data, magic):
    """(incarnation, CRC of the journal id, offset) of the valid slots."""
    both = [s for s in (data[:44], data[4096:4140]) if len(s) == 44 and pack("<I", crc32(s[:40])) == s[40:]]
    return [unpack_from("<8xII8xQ", s) for s in both if s[:8] == magic + b"\1\0\0\0"]


def judge(files, events, decode):
    data = {int(name[:20]): files[name] for name in sorted(files) if re.fullmatch(r"[0-9]{20}\.zst", name)}
    every = {first: p for first in data if (p := preamble(data[first], first))}
    floors = slots(files.get("FLOOR", b"")[:44], b"UNLB")
    due = floor = floors[0][2] if floors else 0
    heads = {first: p for first, p in every.items() if first >= floor}
    chain = [max(heads, key=lambda f: (heads[f].writer, f))] if heads else []
    while chain and (first := chain[0]) != floor:
        if (before := heads[first].before) == NONE or before >= first:
            raise damaged(first, 0, floor if before == NONE else first)
        if before not in heads:
            raise damaged(before, 0, max(before, floor))
        if heads[before].writer > heads[first].writer:
            raise damaged(first, 0, first)
        chain.insert(0, before)
    ids = [(crc32(p.id[: p.n]), first, first) for first, p in every.items()]
    for of, name, offset in ids and [*ids, *((of, "FLOOR", floor) for _, of, _ in floors)]:
        if of != ids[0][0]:
            raise damaged(name, 0, offset)
    marks = [s for s in slots(files.get("WATERMARK", b""), b"UNLW") if not ids or s[1] == ids[0][0]]
    stated = [min([offset, *(f for f in chain if heads[f].writer > i)]) for i, _, offset in marks]
    watermark, torn = max([floor, *chain[-1:], *stated]), None
    headless = [first for first in data if first >= floor and first not in heads and first > max(chain, default=-1)]
    for first in chain + headless:
        p, s = heads.get(first), next((heads[f] for f in chain if first in chain and f > first), None)
        held, at, link = data[first][: s and s.size], 196 if p else 0, p and p.chain
        while p and (found := intact(held, at)):
            h, chained = found[0], crc32(held[at : at + 68], crc32(pack("<I", link)))
            if (h.first, h.writer, h.chain) != (due, p.writer, chained):
                break
            if (plain := decode(*found)) is None:
                raise damaged(first, at, due)
            events += zip(range(due, due + h.n), plain, strict=True)
            at, due, link = at + 76 + h.stored, due + h.n, h.chain
        bad, reach = at < len(held) or at in {0, 196}, min([watermark, *headless]) if p else watermark
        later = (intact(held, m.start() + at) for m in re.finditer(re.escape(FRAME[0][:4]), held[at:]) if bad)
        proofs = (f and (f[0].upto > due or (not marks and f[0].first >= due)) for f in later)
        if (at, due, link) != (s.size, s.first, s.link) if s else due < reach or any(proofs):
            raise damaged(first, at, due)
        torn = torn or (("torn", f"{first:020d}.zst", at) if bad else None)
    if due < watermark:  # no segment is left
        raise damaged(floor, 0, floor)
    return torn or ("clean",)


def read(files, decode=decode):
    events = []
    try:
        return events, judge(files, events, decode)
    except Verdict as verdict:
        return events, verdict.args
