"""From a locked directory to a sink that continues its journal."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from .clock import Clock
from .errors import JournalMismatch
from .lock import DirectoryLock
from .marks import WatermarkFile
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
    own = report.incarnation_before + 1 if incarnation is None else incarnation
    if own <= report.incarnation_before or own < 1:
        raise JournalMismatch(
            f"{directory}: incarnation {own} was asked for, but {report.incarnation_before} has written here already"
        )
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
    report = msgspec.structs.replace(report, seconds=time.perf_counter() - started)
    return OpenedSink(sink, report, journal_id, own)
