"""Settings of a journal writer and the figures that it shows."""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import JournalError
from .format import RAW_BYTES_MAX

EVENT_OVERHEAD_BYTES = 64
"""What one queued event costs beside its bytes (object header, list slot): counted, so that the bound is of memory."""


class JournalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a writer flushes, bounds its memory and fails. Units are in the names.

    ``flush_interval_ms``: longest time that an event is gathered before its frame is written; on slow storage the
    effective interval follows the measured sync time up to ``flush_interval_ms_max``.
    ``backlog_high_bytes``: above it ``drain()`` waits. ``backlog_max_bytes``: at it ``append`` raises JournalOverrun.
    ``max_write_failures``: failures in a row before ``on_failure`` applies: ``stop`` ends the journal, ``degrade``
    keeps events in memory and goes on trying until the hard bound.
    ``scan_on_open``: ``from_image`` checks what a restore reads (back to the newest image), ``all`` every segment.
    ``check_events``: decode each event right after encoding it, so that a value of a wrong type fails at the call.
    """

    flush_interval_ms: float = 20.0
    flush_interval_ms_max: float = 1000.0
    segment_bytes_max: int = 64 << 20
    frame_events_max: int = 16384
    frame_bytes_max: int = 1 << 20
    compression_level: int = 1
    backlog_high_bytes: int = 16 << 20
    backlog_max_bytes: int = 256 << 20
    max_write_failures: int = 3
    failure_backoff_ms: float = 100.0
    failure_backoff_ms_max: float = 5000.0
    on_failure: Literal["stop", "degrade"] = "stop"
    heartbeat_s: float = 5.0
    scan_on_open: Literal["from_image", "all"] = "from_image"
    check_events: bool = False

    def __post_init__(self) -> None:
        positive = (
            "flush_interval_ms",
            "segment_bytes_max",
            "frame_events_max",
            "frame_bytes_max",
            "backlog_high_bytes",
            "max_write_failures",
            "heartbeat_s",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise JournalError(f"journal.{name} is {getattr(self, name)}: give a value above 0")
        if not self.backlog_high_bytes <= self.backlog_max_bytes <= RAW_BYTES_MAX // 2:
            raise JournalError(
                f"journal.backlog_high_bytes ≤ journal.backlog_max_bytes ≤ {RAW_BYTES_MAX // 2} must hold; got "
                f"{self.backlog_high_bytes} and {self.backlog_max_bytes}"
            )
        if self.frame_bytes_max > RAW_BYTES_MAX // 2:
            raise JournalError(f"journal.frame_bytes_max is {self.frame_bytes_max}: at most {RAW_BYTES_MAX // 2}")


class JournalMetrics(msgspec.Struct, frozen=True):
    """A snapshot of a writer. ``loss_window_seconds`` bounds the age of what a power cut now would lose."""

    next_offset: int
    durable_upto: int
    durable_lag_seconds: float
    backlog_bytes: int
    backlog_events: int
    flush_interval_ms_effective: float
    loss_window_seconds: float
    syncs: int
    sync_seconds_last: float
    sync_seconds_max_recent: float
    write_failures: int
    write_failures_in_a_row: int
    watermark_failures: int
    watermark_behind: bool
    frames: int
    segments: int
    bytes_raw: int
    bytes_written: int
    degraded: bool
    failed: bool
