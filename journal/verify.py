"""Checks a whole journal without knowing its event types, streaming, and says for each segment what it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import msgspec

from .errors import JournalDamaged
from .frames import FrameOpener
from .judge import check_chain
from .scan import Damaged, TornTail, Verdict
from .storage import RealStorage, Storage
from .survey import SegmentFile, Survey, survey

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class SegmentVerdict(msgspec.Struct, frozen=True):
    """One segment: ``state`` and, unless clean, where and why. Byte and offset are those of the first bad frame."""

    segment: str
    state: Literal["clean", "torn", "damaged", "ignored"]
    size: int
    first_offset: int
    next_offset: int
    frames: int
    incarnation: int | None
    byte: int | None = None
    tail_bytes: int = 0
    last_good_offset: int | None = None
    reason: str = ""


class VerifyReport(msgspec.Struct, frozen=True):
    """``state`` is the worst of the segments'; ``end_offset`` the offset after the last readable event."""

    directory: str
    journal_id: str | None
    state: Literal["clean", "torn", "damaged"]
    floor: int
    end_offset: int
    watermark: int
    watermark_source: str
    events: int
    bytes_total: int
    segments: list[SegmentVerdict]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """No durable event is missing or wrong; a torn tail is no damage."""
        return self.state != "damaged"


def verify(
    directory: str | os.PathLike[str], storage: Storage | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Read every frame of every segment: headers, chain, checksums, decompression, event counts.

    Takes no lock and changes nothing. Damage is reported, not raised; JournalMissing, JournalUnsupported and OSError
    are raised.
    """
    path = os.fspath(directory)
    storage = storage or RealStorage()
    while True:
        try:
            found = survey(storage, path)
        except JournalDamaged as error:
            return _broken_chain(path, error)
        try:
            results = _check(storage, found, progress)
        except FileNotFoundError:  # a writer has pruned it, or begun it anew, since we looked
            continue
        return _report(path, found, results)


def _check(storage: Storage, found: Survey, progress: Progress | None) -> list[SegmentVerdict]:
    total = sum(s.size for s in found.chain)
    done = 0
    results: list[SegmentVerdict] = []
    for segment, verdict in check_chain(storage, found, opener=FrameOpener()):
        results.append(_result(segment, verdict))
        done += segment.size
        if progress is not None:
            progress(done, total)
    return results


def _report(path: str, found: Survey, results: list[SegmentVerdict]) -> VerifyReport:
    ignored = [_ignored(segment) for segment in (*found.below_floor, *found.strays)]
    first_bad = next((r for r in results if r.state == "damaged"), None)
    end = first_bad.next_offset if first_bad else max((r.next_offset for r in results), default=found.floor)
    torn = any(r.state == "torn" for r in results)
    return VerifyReport(
        directory=path,
        journal_id=found.journal_id,
        state="damaged" if first_bad else "torn" if torn else "clean",
        floor=found.floor,
        end_offset=end,
        watermark=found.watermark,
        watermark_source=found.watermark_source,
        events=end - found.floor,
        bytes_total=sum(s.size for s in found.chain),
        segments=results + ignored,
        notes=found.notes,
    )


def _result(segment: SegmentFile, verdict: Verdict) -> SegmentVerdict:
    end = verdict.end
    state: Literal["clean", "torn", "damaged"] = "clean"
    if isinstance(verdict, TornTail):
        state = "torn"
    elif isinstance(verdict, Damaged):
        state = "damaged"
    return SegmentVerdict(
        segment=segment.name,
        state=state,
        size=segment.size,
        first_offset=segment.first_offset,
        next_offset=end.offset,
        frames=end.frames,
        incarnation=segment.preamble.incarnation if segment.preamble else None,
        byte=None if state == "clean" else end.byte,
        tail_bytes=verdict.length if isinstance(verdict, TornTail) else 0,
        last_good_offset=None if state == "clean" else end.offset - 1,
        reason=verdict.reason if isinstance(verdict, Damaged | TornTail) else "",
    )


def _ignored(segment: SegmentFile) -> SegmentVerdict:
    return SegmentVerdict(
        segment=segment.name,
        state="ignored",
        size=segment.size,
        first_offset=segment.first_offset,
        next_offset=segment.first_offset,
        frames=0,
        incarnation=segment.preamble.incarnation if segment.preamble else None,
        reason=segment.problem or "not part of the journal: replaced by a newer incarnation, or below the floor",
    )


def _broken_chain(path: str, error: JournalDamaged) -> VerifyReport:
    verdict = SegmentVerdict(
        segment=error.segment, state="damaged", size=0, first_offset=error.offset, next_offset=error.offset, frames=0,
        incarnation=None, byte=error.byte, last_good_offset=error.last_good_offset, reason=error.reason,
    )  # fmt: skip
    return VerifyReport(
        directory=path, journal_id=None, state="damaged", floor=0, end_offset=error.offset, watermark=0,
        watermark_source="none", events=0, bytes_total=0, segments=[verdict], notes=[],
    )  # fmt: skip
