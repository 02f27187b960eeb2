"""Journals read without our reader: frames by the tests' independent reader, events decoded by msgspec alone."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tests.journal.independent_reader import SEGMENT, SLOT, frames, preamble
from tests.sim_storage import SimStorage
from unlost.replay.events import AnyEvent, PayloadRecord

_encode = msgspec.msgpack.Encoder().encode
_event = msgspec.msgpack.Decoder(AnyEvent)
_record = msgspec.msgpack.Decoder(PayloadRecord)


class RawDamage(Exception):
    """The bytes make no journal."""


def _floor(data: bytes) -> int:
    import zlib

    found = [0]
    for part in (data[: SLOT.size], data[4096 : 4096 + SLOT.size]):
        if len(part) == SLOT.size and part[:4] == b"UNLB" and zlib.crc32(part[:-4]) == SLOT.unpack(part)[-1]:
            found.append(SLOT.unpack(part)[6])
    return max(found)


def read_raw(files: dict[str, bytes]) -> tuple[list[Any], int]:
    """(events as plain lists, offset of the first) of a journal's files; what is torn at the end is left out."""
    data = {int(name[:20]): body for name, body in files.items() if re.match(r"^\d{20}\.zst$", name)}
    floor = _floor(files.get("FLOOR", b""))
    heads = {first: p for first, d in data.items() if first >= floor and (p := preamble(d, first))}
    chain = [max(heads, key=lambda f: (heads[f][7], f))] if heads else []
    ends: dict[int, int] = {}
    while chain and chain[0] != floor:
        before = heads[chain[0]][10]
        if before not in heads:
            raise RawDamage(f"segment {before} is missing")
        ends[before] = heads[chain[0]][11]
        chain.insert(0, before)
    events: list[Any] = []
    offset = floor
    for first in chain:
        end = min(ends.get(first, len(data[first])), len(data[first]))
        if offset != first:
            raise RawDamage(f"segment {first} begins after {offset}")
        last = (SEGMENT.size, offset, heads[first][-1])
        for at, following, link, found in frames(data[first], heads[first], end, offset, heads[first][-1]):
            events += found
            last = (at, following, link)
        offset = last[1]
        if first in ends and last[0] != ends[first]:
            raise RawDamage(f"segment {first} ends at byte {last[0]}, its successor says {ends[first]}")
    return events, floor


def read_events(storage: SimStorage, directory: str) -> tuple[list[Any], int]:
    """(event structs, offset of the first) of the event journal."""
    if directory not in storage.directories:
        return [], 0
    events, first = read_raw(storage.snapshot(directory))
    return [_event.decode(_encode(event)) for event in events], first


def read_payloads(storage: SimStorage, directory: str) -> dict[int, Any]:
    """Offset -> record of one payload journal."""
    if directory not in storage.directories:
        return {}
    records, first = read_raw(storage.snapshot(directory))
    return {first + index: _record.decode(_encode(record)) for index, record in enumerate(records)}
