"""Judges what a survey has found: each segment where its frames end, and what lies after the last of them.

The one place that reader, ``verify``, opening and pruning ask, so that none passes over what another refuses. Where
they differ is only in what they read on the way. Beside a running writer, what was bad at a first look is looked at
again before it is called damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .errors import JournalDamaged
from .format import FrameHeader
from .frames import FrameOpener, PayloadError, count_events
from .scan import Bad, Clean, Damaged, FrameWalk, Position, Verdict, Window, judge, judge_walk
from .storage import Storage
from .survey import FileSource, SegmentFile, Survey, look_at, open_walk

Judged = tuple[SegmentFile, Verdict]


def check_chain(
    storage: Storage, found: Survey, *, from_index: int = 0, opener: FrameOpener | None = None
) -> Iterator[Judged]:
    """Walk and judge the chain's segments from ``from_index`` on, then what lies after them.

    Every payload's checksum is checked; with ``opener`` it must also decode. Raises JournalUnsupported, OSError.
    """
    end = found.floor
    for index in range(from_index, len(found.chain)):
        segment = found.chain[index]
        file, walk = open_walk(storage, segment, found.directory)
        try:
            verdict = _walk_to_end(walk, opener) or judge_segment(storage, found, index, walk)
        finally:
            file.close()
        yield segment, verdict
        end = verdict.end.offset
    yield from judge_rest(storage, found, end)


def judge_segment(storage: Storage, found: Survey, index: int, walk: FrameWalk) -> Verdict:
    """The verdict on segment ``index`` of the chain, over which ``walk`` has gone as far as it could."""
    successor = found.chain[index + 1].preamble if index + 1 < len(found.chain) else None
    verdict = judge_walk(walk, found.watermark_of_last, successor=successor, strict=found.strict)
    unsure = successor is None and isinstance(verdict, Damaged) and verdict.end.offset >= found.watermark
    if unsure and _another_by_now(storage, found, found.chain[index], verdict.end):
        return Clean(verdict.end)
    return verdict


def judge_rest(storage: Storage, found: Survey, end: int) -> Iterator[Judged]:
    """The verdicts on what lies after the chain, where event ``end`` is due.

    Files whose preamble can't be read: a first write that never finished, or damage. Where no segment is left, although
    something was durable, the file that is missing.
    """
    for segment in found.headless:
        try:
            verdict = _judge_headless(storage, found, segment, end)
        except FileNotFoundError:  # an opening writer has just cut it
            continue
        unsure = isinstance(verdict, Damaged) and end >= found.watermark
        if not (unsure and _another_by_now(storage, found, segment, verdict.end)):
            yield segment, verdict
    if not found.chain and not found.headless and found.watermark > found.floor:
        missing = SegmentFile(found.floor, os.path.join(found.directory, ""), 0, None, "missing")
        yield missing, Damaged(Position(0, found.floor, 0, 0), f"missing; durable up to event {found.watermark}")


def raise_if_damaged(found: Survey, segment: SegmentFile, verdict: Verdict) -> None:
    """Raise JournalDamaged with segment, byte and event if that is the verdict."""
    if isinstance(verdict, Damaged):
        at = verdict.end
        raise JournalDamaged(found.directory, segment.name, at.byte, at.offset, verdict.reason)


def _walk_to_end(walk: FrameWalk, opener: FrameOpener | None) -> Damaged | None:
    """Go as far as the frames are valid; Damaged at the first that does not decode."""
    while True:
        before = walk.position
        if (header := walk.step()) is None or (stored := walk.payload(header)) is None:
            return None
        if opener is not None and (problem := _undecodable(opener, header, stored)) is not None:
            return Damaged(before, problem)


def _undecodable(opener: FrameOpener, header: FrameHeader, stored: bytes) -> str | None:
    try:
        count = count_events(opener.open(stored, header.raw_bytes))
    except PayloadError as error:
        return str(error)
    return None if count == header.events else f"the frame holds {count} events, its header says {header.events}"


def _judge_headless(storage: Storage, found: Survey, segment: SegmentFile, end: int) -> Verdict:
    file = storage.open(segment.path)
    try:
        bad = Bad(Position(0, end, 0, 0), segment.problem or "no preamble")
        return judge(Window(FileSource(file)), bad, found.watermark, strict=found.strict, where=segment.path)
    finally:
        file.close()


def _another_by_now(storage: Storage, found: Survey, segment: SegmentFile, at: Position) -> bool:
    """Whether the bad bytes in a file after which nothing is known durable are not what is there now.

    Beside a running writer, a file seen before its first write may be whole by now, one without a durable frame may
    have been begun anew, and bytes that were never durable may have been cut and written anew, those before the bad
    ones included: so all is walked once more. Then this look simply ends before them.
    """
    try:
        if look_at(storage, segment.path, segment.first_offset).preamble != segment.preamble:
            return True
        if segment.preamble is None:
            return False
        file, again = open_walk(storage, segment, found.directory)
    except FileNotFoundError:  # an opening writer has just cut it
        return True
    try:
        while again.position.offset < at.offset and again.step() is not None:
            pass
        if again.position[:3] != at[:3]:
            return True
        header = again.step()
        return header is not None and again.payload(header) is not None
    finally:
        file.close()
