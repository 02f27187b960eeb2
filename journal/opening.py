"""From a locked directory to a sink that continues its journal."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from .clock import Clock
from .errors import JournalMismatch
from .lock import DirectoryLock
from .marks import WatermarkFile, journal_crc, read_watermark
from .options import JournalOptions
from .recovery import RecoveryReport, recover
from .sink import SegmentSink
from .storage import Storage


class OpenedSink(NamedTuple):
    """What a writer needs to begin."""

    sink: SegmentSink
    report: RecoveryReport
    journal_id: str
    incarnation: int


def open_sink(
    storage: Storage,
    directory: str,
    journal_id: str,
    incarnation: int | None,
    options: JournalOptions,
    clock: Clock,
    lock: DirectoryLock,
) -> OpenedSink:
    """Recover, settle the incarnation, state the watermark durably.

    Raises JournalMismatch for another journal or a used incarnation, and what ``recover`` raises.
    """
    started = time.perf_counter()
    recovered = recover(storage, directory, scan_all=options.scan_on_open == "all", journal_id=journal_id)
    report = recovered.report
    before = _highest_incarnation(storage, directory, journal_id, report, lock)
    own = before + 1 if incarnation is None else incarnation
    if own <= before or own < 1:
        raise JournalMismatch(f"{directory}: incarnation {own} was asked for, but {before} was here already")
    lock.heartbeat(own)
    watermark = WatermarkFile(storage, directory, journal_id, own)
    watermark.write(report.next_offset, clock.wall_ns())
    watermark.sync()
    storage.sync_directory(directory)
    sink = SegmentSink(
        storage,
        directory,
        journal_id=journal_id,
        incarnation=own,
        next_offset=report.next_offset,
        link=recovered.link,
        watermark=watermark,
        segment_bytes_max=options.segment_bytes_max,
        clock=clock,
        still_owner=lock.check,
    )
    report = msgspec.structs.replace(report, incarnation_before=before, seconds=time.perf_counter() - started)
    return OpenedSink(sink, report, journal_id, own)


def _highest_incarnation(
    storage: Storage, directory: str, journal_id: str, report: RecoveryReport, lock: DirectoryLock
) -> int:
    """Of every opening so far, also of those that wrote no event: two with one number could not be told apart."""
    slots = read_watermark(storage, directory)
    stated = [slot.incarnation for slot in slots if slot.journal_crc == journal_crc(journal_id)]
    return max([report.incarnation_before, lock.incarnation, *stated])
