"""Journals whose checksums all hold and whose fields do not: what a bug, or a later version, could have written."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from zlib import crc32

PREAMBLE_BYTES, HEADER_BYTES = 196, 76
PREAMBLE_FIELDS = {14: "<H", 16: "<I", 20: "<I", 24: "<I", 28: "<I", 32: "<Q", 40: "<Q", 48: "<Q"}
"""Where the preamble's fields lie, version and lengths apart, and how they are packed."""
FRAME_FIELDS = {14: "<H", 16: "<I", 20: "<I", 24: "<I", 28: "<I", 32: "<Q", 40: "<Q", 56: "<I", 60: "<I"}

Head = tuple[bytes, bytes]
"""A header or preamble without its CRC (a frame's: without its chain, too), and the payload after it."""
Change = Callable[[int, Head], Head]
"""Given the number of a frame (-1: the preamble), what to write instead."""


def frames(data: bytes) -> list[tuple[int, int]]:
    """Where frames begin and end, as their lengths say."""
    at, found = PREAMBLE_BYTES, []
    while len(data) >= at + HEADER_BYTES and data.startswith(struct.pack("<II4s", 0x184D2A55, 68, b"UNLF"), at):
        end = at + HEADER_BYTES + int.from_bytes(data[at + 56 : at + 60], "little")
        found.append((at, end))
        at = end
    return found


def rebuilt(data: bytes, change: Change) -> bytes:
    """The segment as ``change`` makes it, every checksum and the chain right again."""
    body, _ = change(-1, (data[: PREAMBLE_BYTES - 4], b""))
    chain = struct.pack("<I", crc32(body))
    parts = [body, chain]
    for number, (start, end) in enumerate(frames(data)):
        payload = data[start + HEADER_BYTES : end]
        body, payload = change(number, (data[start : start + HEADER_BYTES - 12], payload))
        body += struct.pack("<I", crc32(payload))
        chain = struct.pack("<I", crc32(body, crc32(chain)))
        parts += [body, chain, struct.pack("<I", crc32(body + chain)), payload]
    return b"".join(parts)


def with_field(head: bytes, at: int, layout: str, value: int) -> bytes:
    packed = struct.pack(layout, value % 2 ** (8 * struct.calcsize(layout)))
    return head[:at] + packed + head[at + len(packed) :]


def one_field_changed(data: bytes, rng: random.Random) -> bytes:
    """One field of the preamble or of a frame is another, or a payload is."""
    chosen = rng.randrange(-1, len(frames(data)))
    at, layout = rng.choice(list((PREAMBLE_FIELDS if chosen < 0 else FRAME_FIELDS).items()))
    large = [] if at == 28 else [1 << 30, (1 << 31) + 1]
    value, by = rng.choice([0, 1, 2, 100, 195, 196, 197, None, None, *large]), rng.choice([-1, 1])
    other_payload = rng.choice([b"", b"?", b"\x28\xb5\x2f\xfd"]) if rng.random() < 0.2 else None

    def change(number: int, head: Head) -> Head:
        body, payload = head
        if number != chosen:
            return head
        if chosen >= 0 and other_payload is not None:
            payload = other_payload + payload[len(other_payload) :]
            return with_field(body, 56, "<I", len(payload)), payload
        (now,) = struct.unpack_from(layout, body, at)
        return with_field(body, at, layout, now + by if value is None else value), payload

    return rebuilt(data, change)


def watermark(offset: int, journal_id: str, incarnation: int = 1) -> bytes:
    """A WATERMARK whose one slot states this."""
    slot = struct.pack("<4sHHIIQQq", b"UNLW", 1, 0, incarnation, crc32(journal_id.encode()), 2, offset, 0)
    return (slot + struct.pack("<I", crc32(slot))).ljust(4140, b"\0")


def needs_another_release(data: bytes) -> bool:
    """Whether there is a header of another version or with unknown incompat flags, wherever it lies."""
    heads = re.finditer(rb"[UV]\x2a\x4d\x18....UNL[FS]", data, re.DOTALL)
    return any(data[m.end() : m.end() + 2] != b"\1\0" or any(data[m.end() + 8 : m.end() + 12]) for m in heads)


def of_a_later_version(data: bytes, longer: int, first: int, version: int = 2) -> bytes:
    """From frame ``first`` on (-1: the whole segment) as another version with longer headers would write it."""

    def change(number: int, head: Head) -> Head:
        body, payload = head
        if number < first:
            return head
        total = int.from_bytes(body[4:8], "little") + longer
        return with_field(with_field(body, 4, "<I", total), 12, "<H", version) + b"\5" * longer, payload

    return rebuilt(data, change)
