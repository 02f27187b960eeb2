"""Every single damage that a small journal can suffer, as (label, files, expectation).

The expectation of a case is where damage must be reported, computed from the file layout by the independent reader's
structs, not by the code under test.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.journal import independent_reader as oracle
from tests.journal.kinds import KINDS, Blob, Event, Image, Note, Odd
from tests.sim_storage import SimStorage
from unlost.journal import JournalOptions, JournalWriter

DIRECTORY = "/j"


@dataclass(frozen=True)
class Base:
    """An undamaged journal: its files, its events, and where each frame lies: name -> [(byte, end, first offset)]."""

    files: dict[str, bytes]
    events: list[Event]
    acknowledged: int
    frames: dict[str, list[tuple[int, int, int]]]

    @property
    def segments(self) -> list[str]:
        return sorted(self.frames)


@dataclass(frozen=True)
class Case:
    """``place``: (segment, byte, offset) that a refusal must name; None when any place is right."""

    label: str
    files: dict[str, bytes]
    place: tuple[str, int, int] | None


def some_events(seed: int, count: int) -> list[Event]:
    rng = random.Random(seed)
    made: list[Event] = []
    for number in range(count):
        made.append(
            [
                Note(number, "n" * rng.randrange(6)),
                Blob(number, rng.randbytes(rng.randrange(12)), [0.5]),
                Image(number, {"a": number}),
                Odd(None, (Note(number),)),
            ][number % 4]
        )
    return made


def build(*, seed: int = 1, journal_id: str = "run/ü", unacknowledged: int = 0) -> Base:
    """Three segments, two incarnations, every kind of event; optionally a tail that was written but never synced."""
    storage = SimStorage()
    events = some_events(seed, 16)
    writer = open_writer(storage, journal_id)
    for index, event in enumerate(events[:11]):
        if index == 6:
            writer.rotate(event)
        else:
            writer.append(event)
        if index in (1, 3, 5, 6, 8, 10):
            writer.sync()
    writer.close()
    writer = open_writer(storage, journal_id)
    for index, event in enumerate(events[11:]):
        writer.append(event)
        if index in (1, 3):
            writer.sync()
    writer.sync()
    acknowledged = len(events)
    if unacknowledged:
        watermark = storage.content(f"{DIRECTORY}/WATERMARK")
        more = some_events(seed + 1, unacknowledged)
        for event in more:
            writer.append(event)
            writer.pump()
        storage.put(f"{DIRECTORY}/WATERMARK", watermark)
        events = events + more
    writer.abandon()
    files = storage.snapshot(DIRECTORY)
    return Base(files, events, acknowledged, {n: layout(d) for n, d in files.items() if n.endswith(".zst")})


def open_writer(storage: SimStorage, journal_id: str = "run/ü") -> JournalWriter[Event]:
    return JournalWriter.open(
        DIRECTORY,
        KINDS,
        journal_id=journal_id,
        storage=storage,
        threaded=False,
        options=JournalOptions(check_events=True),
    )


def layout(data: bytes) -> list[tuple[int, int, int]]:
    """Where the frames lie, by the oracle's structs."""
    found = []
    at = oracle.SEGMENT.size
    while at < len(data):
        header = oracle.FRAME.unpack_from(data, at)
        end = at + oracle.FRAME.size + header[12]
        found.append((at, end, header[9]))
        at = end
    return found


def place_of(base: Base, name: str, byte: int) -> tuple[str, int, int]:
    """What a refusal must say when the first wrong byte of a segment is ``byte``."""
    if byte < oracle.SEGMENT.size:
        return (name, 0, int(name[:20]))
    last = base.frames[name][-1]
    for start, end, offset in base.frames[name]:
        if start <= byte < end:
            return (name, start, offset)
    following = oracle.FRAME.unpack_from(base.files[name], last[0])
    return (name, last[1], last[2] + following[8])


def single_damages(base: Base, *, flips_per_byte: int) -> Iterator[Case]:
    """Truncations, zeroed tails and bit flips at every byte of every segment."""
    for name in base.segments:
        data = base.files[name]
        for byte in range(len(data)):
            yield Case(f"truncate {name}@{byte}", base.files | {name: data[:byte]}, place_of(base, name, byte))
            changed = next((i for i in range(byte, len(data)) if data[i]), None)
            if changed is not None:
                zeroed = data[:byte] + bytes(len(data) - byte)
                yield Case(f"zero {name}@{byte}", base.files | {name: zeroed}, place_of(base, name, changed))
            for bit in range(8) if flips_per_byte == 8 else [byte % 8]:
                flipped = data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :]
                yield Case(f"flip {name}@{byte}.{bit}", base.files | {name: flipped}, place_of(base, name, byte))


def structural_damages(base: Base, foreign: Base) -> Iterator[Case]:
    """Frames and segments deleted, duplicated, inserted, swapped; foreign bytes."""
    for name in base.segments:
        data = base.files[name]
        cuts = [(a, b) for a, b, _ in base.frames[name]]
        for start, end in cuts:
            without = data[:start] + data[end:]
            yield Case(f"delete frame {name}@{start}", base.files | {name: without}, place_of(base, name, start))
            for at, _ in cuts:
                twice = data[:at] + data[start:end] + data[at:]
                if twice[: len(data)] != data:
                    yield Case(f"insert frame {start} at {name}@{at}", base.files | {name: twice}, None)
            yield Case(f"append frame {start} to {name}", base.files | {name: data + data[start:end]}, None)
        for (a, b), (c, d) in itertools.pairwise(cuts):
            swapped = data[:a] + data[c:d] + data[a:b] + data[d:]
            yield Case(f"swap frames {name}@{a}", base.files | {name: swapped}, place_of(base, name, a))
        yield Case(f"delete segment {name}", {n: d for n, d in base.files.items() if n != name}, None)
        yield Case(f"empty segment {name}", base.files | {name: b""}, (name, 0, int(name[:20])))
        yield Case(f"append foreign bytes to {name}", base.files | {name: data + b"\x00garbage" * 5}, None)
        other = foreign.files[name]
        yield Case(f"foreign segment for {name}", base.files | {name: other}, None)
        start, end = cuts[-1]
        a, b, _ = foreign.frames[name][-1]
        yield Case(
            f"foreign last frame in {name}", base.files | {name: data[:start] + other[a:b]}, place_of(base, name, start)
        )
        for offset in (3, 99, int(name[:20]) + 1):
            new = f"{offset:020d}.zst"
            if new not in base.files:
                yield Case(f"copy of {name} as {new}", base.files | {new: data}, None)
                yield Case(f"foreign segment as {new}", base.files | {new: other}, None)
                yield Case(f"garbage as {new}", base.files | {new: b"garbage" * 30}, None)
