"""One flush after another: gather, compress, write, sync, count; and the rules for failures in a row.

Driven by the writer's thread, or by ``pump`` under a virtual clock: the same code, and no thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from .clock import Clock
from .errors import JournalFailed
from .frames import Batch, FrameSealer, SealedFrame, Unbuildable
from .lock import DirectoryLock
from .options import JournalMetrics, JournalOptions
from .sink import SegmentSink

logger = logging.getLogger(__name__)

_RECENT_SYNCS = 32


class Flusher:
    """Owns the frames that are sealed but not durable, the sink and the figures."""

    def __init__(
        self,
        sink: SegmentSink,
        options: JournalOptions,
        clock: Clock,
        lock: DirectoryLock,
        take: Callable[[], list[Batch]],
    ) -> None:
        self._sink = sink
        self._options = options
        self._clock = clock
        self._dir_lock = lock
        self._take = take
        self._sealer = FrameSealer(
            level=options.compression_level, events_max=options.frame_events_max, bytes_max=options.frame_bytes_max
        )
        self._frames: deque[SealedFrame] = deque()
        self._unbuildable: JournalFailed | None = None
        self._one_at_a_time = threading.Lock()
        self._last_flush = self._last_heartbeat = clock.monotonic()
        self._commit_started: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT_SYNCS)
        self._sync_smooth_s = 0.0
        self._taken_since: float | None = None
        self._failures = 0
        self._failures_in_a_row = 0
        self._raw_bytes = 0
        self.syncs = 0
        self.durable_upto = sink.durable_upto
        self.durable_cost = 0
        self.last_error: str | None = None
        self.degraded = False
        self.failed = False
        self.worked = False
        self.urgent = False
        self.stop_requested = False
        self.abandoned = False

    # ------------------------------------------------------------------ pace

    @property
    def interval_s(self) -> float:
        """Effective flush interval: the configured one, or on slow storage the smoothed sync time.

        So the device is idle about half of the time, and frames grow instead of their number.
        """
        base = self._options.flush_interval_ms
        slow = min(self._sync_smooth_s * 1e3, self._options.flush_interval_ms_max)
        return max(base, slow) / 1e3

    def delay_s(self) -> float:
        """How long to sleep before the next cycle is due."""
        if self.stop_requested or (self.urgent and not self._failures_in_a_row):
            return 0.0
        wait = self.interval_s
        if self._failures_in_a_row:
            backoff = self._options.failure_backoff_ms * 2.0 ** (self._failures_in_a_row - 1)
            wait = max(wait, min(backoff, self._options.failure_backoff_ms_max) / 1e3)
        return max(0.0, self._last_flush + wait - self._clock.monotonic())

    def holds_off(self) -> bool:
        """Whether the time after a failure is not over yet."""
        return self._failures_in_a_row > 0 and self.delay_s() > 0

    # ------------------------------------------------------------------ one cycle

    def cycle(self) -> JournalFailed | None:
        """Flush what is queued. Returns the failure that ends the journal, if it does."""
        with self._one_at_a_time:
            if self.abandoned or self.failed:
                return None
            self.urgent = False
            self._last_flush = self._clock.monotonic()
            try:
                self._heartbeat()
                self._gather()
                self.worked = bool(self._frames)
                if self._frames:
                    if self._failures_in_a_row:  # it may have been long: somebody may have taken over since
                        self._dir_lock.check()
                    self._commit()
                self._sink.advance_watermark()
                if self._unbuildable is not None:
                    raise self._unbuildable
            except JournalFailed as error:
                self.failed = True
                self.last_error = str(error)
                return error
            except OSError as error:
                return self._on_failure(error)
            self._on_success()
            return None

    def _gather(self) -> None:
        if self._unbuildable is not None:
            return
        batches = self._take()
        if batches and self._taken_since is None:
            self._taken_since = batches[0].queued_since
        for batch in batches:
            try:
                self._sealer.seal(batch, self._frames)
            except Unbuildable as error:
                self._unbuildable = JournalFailed(
                    f"{self._sink.directory}: {error}. What came before it is durable. Mend what builds it and start "
                    f"again."
                )
                self._unbuildable.__cause__ = error.__cause__
                return

    def _commit(self) -> None:
        self._commit_started = self._clock.monotonic()
        try:
            self._sink.commit(self._frames, self._on_group)
        finally:
            self._commit_started = None

    def _on_group(self, group: list[SealedFrame]) -> None:
        now = self._clock.monotonic()
        if self._commit_started is not None:
            took = now - self._commit_started
            self._recent.append(took)
            self._sync_smooth_s += (took - self._sync_smooth_s) / (4 if took > self._sync_smooth_s else 16)
            self._commit_started = now
        self.syncs += 1
        self._raw_bytes += sum(frame.raw_bytes for frame in group)
        self.durable_cost += sum(frame.cost_bytes for frame in group)
        self._taken_since = self._frames[0].queued_since if self._frames else None
        self.durable_upto = self._sink.durable_upto

    def _heartbeat(self) -> None:
        now = self._clock.monotonic()
        if now - self._last_heartbeat >= self._options.heartbeat_s:
            self._last_heartbeat = now
            try:
                self._dir_lock.heartbeat()
            except OSError as error:
                logger.warning("heartbeat: %s", error)

    def _on_success(self) -> None:
        if self._failures_in_a_row:
            logger.warning("the journal's storage works again after %d failures", self._failures_in_a_row)
        self._failures_in_a_row = 0
        self.degraded = False

    def _on_failure(self, error: OSError) -> JournalFailed | None:
        self._failures += 1
        self._failures_in_a_row += 1
        self.last_error = f"{type(error).__name__}: {error}"
        limit = self._options.max_write_failures
        logger.warning("journal write failed (%d in a row, limit %d): %s", self._failures_in_a_row, limit, error)
        if self._failures_in_a_row < limit:
            return None
        if self._options.on_failure == "degrade":
            if not self.degraded:
                self.degraded = True
                logger.error(
                    "the journal is DEGRADED: nothing since event %d is durable, events are kept in memory until the "
                    "storage works again or %d bytes are reached: %s",
                    self.durable_upto, self._options.backlog_max_bytes, error,
                )  # fmt: skip
            return None
        self.failed = True
        failure = JournalFailed(
            f"the journal's storage failed {limit} times in a row; durable up to event {self.durable_upto}. Last "
            f"failure: {self.last_error}. Mend the storage and start again."
        )
        failure.__cause__ = error
        return failure

    # ------------------------------------------------------------------ the rest

    def sync_watermark(self) -> None:
        """Raises OSError."""
        with self._one_at_a_time:
            self._sink.sync_watermark()

    def close(self) -> None:
        """Close the files. Waits for a cycle in progress."""
        with self._one_at_a_time:
            self._sink.close(abandon=self.abandoned)
            self.abandoned = True

    def after_fork_in_child(self) -> None:
        """Close the child's copies of the descriptors; nothing is written."""
        self._one_at_a_time = threading.Lock()
        self.abandoned = True
        self._sink.close(abandon=True)

    def metrics(self, *, next_offset: int, appended_cost: int, queued_since: float | None) -> JournalMetrics:
        """Figures as of now. The lag counts from when the oldest undurable event may have been queued."""
        now = self._clock.monotonic()
        starts = [t for t in (self._taken_since, queued_since) if t is not None]
        undurable = next_offset > self.durable_upto
        lag = max(0.0, now - min(starts)) if starts and undurable else 0.0
        started = self._commit_started
        worst = max(max(self._recent, default=0.0), now - started if started is not None else 0.0)
        return JournalMetrics(
            next_offset=next_offset,
            durable_upto=self.durable_upto,
            durable_lag_seconds=lag,
            backlog_bytes=appended_cost - self.durable_cost,
            backlog_events=next_offset - self.durable_upto,
            flush_interval_ms_effective=self.interval_s * 1e3,
            loss_window_seconds=max(lag, self.interval_s + 2 * worst),
            syncs=self.syncs,
            sync_seconds_last=self._recent[-1] if self._recent else 0.0,
            sync_seconds_max_recent=worst,
            write_failures=self._failures,
            write_failures_in_a_row=self._failures_in_a_row,
            watermark_failures=self._sink.watermark_failures,
            watermark_behind=self._sink.watermark_behind,
            frames=self._sink.frames,
            segments=self._sink.segments,
            bytes_raw=self._raw_bytes,
            bytes_written=self._sink.bytes_written,
            degraded=self.degraded,
            failed=self.failed,
        )
