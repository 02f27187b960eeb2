"""The writer's end at the disk: frames in, durable offsets out, and what is done when the disk says no.

Between two calls of ``commit`` every byte of the open segment is durable. That makes each failure simple:

| what failed           | what is known                     | what is done                                             |
|-----------------------|-----------------------------------|----------------------------------------------------------|
| create                | nothing changed                   | the caller tries again                                   |
| write, or short write | bytes after the durable end are ? | cut back to the durable end; if that fails, as fdatasync |
| fdatasync             | the kernel may have dropped pages | never sync that file again: leave it, go on in a new one |
| directory sync        | the new name may be lost          | as fdatasync                                             |

Frames stay with the caller until they are durable, so a new segment is written from memory and names the durable end
of the one left behind (docs/FORMAT.md, "Predecessor").
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .clock import Clock
from .errors import JournalFailed, JournalFenced, JournalUnsupported
from .format import (
    COMPAT_IMAGE,
    NO_PREDECESSOR,
    pack_frame_header,
    pack_preamble,
    segment_name,
    segment_offset,
)
from .frames import SealedFrame
from .marks import WatermarkFile
from .storage import Storage, StorageFile, write_all
from .survey import read_preamble

logger = logging.getLogger(__name__)

GROUP_BYTES_MAX = 8 << 20
"""Most bytes behind one fdatasync: a large backlog becomes durable, and lets go of memory, in steps."""


class Link(NamedTuple):
    """Where a journal (so far) ends: the last segment that holds durable frames, its durable length, its chain."""

    first_offset: int
    bytes: int
    chain: int


class SegmentSink:
    """Writes frames into segments. Not thread-safe: its caller makes sure of one ``commit`` at a time."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        journal_id: str,
        incarnation: int,
        next_offset: int,
        link: Link | None,
        watermark: WatermarkFile,
        segment_bytes_max: int,
        clock: Clock,
        still_owner: Callable[[], None],
    ) -> None:
        self._storage = storage
        self.directory = directory
        self._journal_id = journal_id
        self._incarnation = incarnation
        self._link = link
        self._watermark = watermark
        self._segment_bytes_max = segment_bytes_max
        self._clock = clock
        self._still_owner = still_owner
        self._file: StorageFile | None = None
        self._first_offset = next_offset
        self._bytes = 0
        self._chain = 0
        self._abandoned: str | None = None
        self.durable_upto = next_offset
        self.watermark_behind = False
        self.segments = self.frames = self.bytes_written = self.watermark_failures = 0

    @property
    def link(self) -> Link | None:
        """The durable end, as a successor would name it."""
        return Link(self._first_offset, self._bytes, self._chain) if self._bytes else self._link

    @property
    def segment_first_offset(self) -> int | None:
        """First offset of the open segment with durable frames; None if there is none yet."""
        return self._first_offset if self._bytes else None

    def commit(self, frames: deque[SealedFrame], on_group: Callable[[list[SealedFrame]], None]) -> None:
        """Make frames durable in order, taking each group from the left once it is; ``on_group`` is told then.

        Raises OSError with the remaining frames still in ``frames`` and this sink ready to try again, and
        JournalFenced when a newer incarnation owns the directory, JournalFailed for frames that are not dense.
        """
        while frames:
            group = self._next_group(frames)
            self._check_dense(group)
            self._commit_group(group)
            for _ in group:
                frames.popleft()
            self.durable_upto = group[-1].next_offset
            self.watermark_behind = True
            self.advance_watermark()
            on_group(group)

    def _check_dense(self, group: list[SealedFrame]) -> None:
        """An interrupt in the middle of ``rotate`` may leave a gap or a repetition in the queue."""
        due = self.durable_upto
        for frame in group:
            if frame.first_offset != due:
                raise JournalFailed(
                    f"{self.directory}: event {frame.first_offset} is queued where event {due} is due, after an "
                    f"interrupt. Nothing from there on was durable. Start again."
                )
            due = frame.next_offset

    def _next_group(self, frames: deque[SealedFrame]) -> list[SealedFrame]:
        """Frames from the left that go into one segment behind one sync; rotates before the first if need be."""
        first = frames[0]
        if self._bytes and (first.new_segment or self._bytes + len(first.stored) > self._segment_bytes_max):
            self._leave_segment()
        group = [first]
        size = len(first.stored)
        room = self._segment_bytes_max - self._bytes
        for index in range(1, len(frames)):
            frame = frames[index]
            size += len(frame.stored)
            if frame.new_segment or size > min(room, GROUP_BYTES_MAX):
                break
            group.append(frame)
        return group

    def _commit_group(self, group: list[SealedFrame]) -> None:
        if self._file is None:
            self._file = self._create(group[0].first_offset)
        fresh = self._bytes == 0
        data, chain = self._assemble(group, fresh)
        try:
            write_all(self._file, self._bytes, data)
        except OSError:
            self._cut_back(self._file)
            raise
        try:
            self._file.sync()
            if fresh:
                self._storage.sync_directory(self.directory)
        except OSError:
            self._abandon(self._file)
            raise
        if fresh:
            self.segments += 1
        self._bytes += len(data)
        self._chain = chain
        self.frames += len(group)
        self.bytes_written += len(data)

    def _assemble(self, group: list[SealedFrame], fresh: bool) -> tuple[bytes, int]:
        wall_ns = self._clock.wall_ns()
        parts: list[bytes] = []
        chain = self._chain
        if fresh:
            link = self._link
            preamble, chain = pack_preamble(
                journal_id=self._journal_id,
                compat=COMPAT_IMAGE if group[0].image else 0,
                incarnation=self._incarnation,
                first_offset=group[0].first_offset,
                pred_first_offset=link.first_offset if link else NO_PREDECESSOR,
                pred_bytes=link.bytes if link else 0,
                pred_chain=link.chain if link else 0,
                wall_ns=wall_ns,
            )
            parts.append(preamble)
        for frame in group:
            header, chain = pack_frame_header(
                compat=COMPAT_IMAGE if frame.image else 0,
                incarnation=self._incarnation,
                count=frame.events,
                first_offset=frame.first_offset,
                durable_upto=self.durable_upto,
                wall_ns=wall_ns,
                stored_bytes=len(frame.stored),
                raw_bytes=frame.raw_bytes,
                payload_crc=frame.payload_crc,
                previous_chain=chain,
            )
            parts.append(header)
            parts.append(frame.stored)
        return b"".join(parts), chain

    def _create(self, first_offset: int) -> StorageFile:
        """A new segment file.

        What is there of that name is our own, left behind by a failure, or a zombie's of an older incarnation, or we
        are the zombie: then it is the newer incarnation's, and not touched.
        """
        path = os.path.join(self.directory, segment_name(first_offset))
        self._first_offset = first_offset
        self._still_owner()  # a zombie's new segment could hide what its successor has opened and not yet gone on from
        try:
            file = self._storage.create(path)
        except FileExistsError:
            self._clear_the_way(path)
            file = self._storage.create(path)
        self._abandoned = None
        return file

    def _clear_the_way(self, path: str) -> None:
        found = self._incarnation_of(path)
        if found is not None and found > self._incarnation:
            self._fence(path, found)
        if path == self._abandoned and found in (None, self._incarnation):
            self._refuse_successor()
            self._storage.remove(path)
            return
        if found == self._incarnation:
            self._fence(path, found)
        who = "unreadable" if found is None else f"incarnation-{found}"
        aside = f"{path}.zombie-{who}-{self._clock.wall_ns()}"
        logger.warning("%s was in the way of incarnation %d: moved to %s", path, self._incarnation, aside)
        self._storage.rename(path, aside)

    def _refuse_successor(self) -> None:
        """Raise JournalFenced if a newer incarnation has gone on from what this one left behind."""
        for name in self._storage.list_names(self.directory):
            first = segment_offset(name)
            if first is None or first <= self._first_offset:
                continue
            found = self._incarnation_of(os.path.join(self.directory, name))
            if found is not None and found > self._incarnation:
                self._fence(name, found)

    def _incarnation_of(self, path: str) -> int | None:
        """Of a segment's writer; None if its preamble can't be read. Raises JournalFenced for a later version's."""
        file = self._storage.open(path)
        try:
            preamble = read_preamble(file, path)
        except JournalUnsupported as error:
            raise JournalFenced(f"{error} It is in the way of incarnation {self._incarnation}, which stops") from error
        finally:
            file.close()
        return None if isinstance(preamble, str) else preamble.incarnation

    def _fence(self, path: str, found: int) -> None:
        raise JournalFenced(
            f"{path}: written by incarnation {found}; this writer is incarnation {self._incarnation} and stops"
        )

    def _cut_back(self, file: StorageFile) -> None:
        """After a failed write: remove what it may have left, or leave the segment."""
        try:
            file.truncate(self._bytes)
        except OSError:
            self._abandon(file)

    def _abandon(self, file: StorageFile) -> None:
        """Never touch this file with a sync again. What is durable in it stays; what is not is still in memory."""
        with contextlib.suppress(OSError):
            file.truncate(self._bytes)  # not relied on: bytes beyond what a successor names are not read
        if self._bytes == 0:
            self._abandoned = os.path.join(self.directory, segment_name(self._first_offset))
        self._leave_segment()

    def _leave_segment(self) -> None:
        if self._bytes:
            self._link = self.link
        file, self._file, self._bytes = self._file, None, 0
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.warning("closing a segment of %s: %s", self.directory, error)

    def advance_watermark(self) -> None:
        """State ``durable_upto`` if that is not stated yet.

        The statement is a lower bound: one that could not be written costs precision, not correctness, and is tried
        again with the next flush and at closing.
        """
        if not self.watermark_behind:
            return
        try:
            self._watermark.write(self.durable_upto, self._clock.wall_ns())
            self.watermark_behind = False
        except OSError as error:
            self.watermark_failures += 1
            if self.watermark_failures == 1:
                logger.warning("%s: WATERMARK could not be written: %s", self.directory, error)

    def sync_watermark(self) -> None:
        """Make the statement about ``durable_upto`` survive a power cut. Raises OSError."""
        self.advance_watermark()
        try:
            if self.watermark_behind:
                raise OSError("WATERMARK could not be written")
            self._watermark.sync()
        except OSError:
            logger.warning("%s: WATERMARK could not be synced: replacing it", self.directory)
            self._watermark.replace(self.durable_upto, self._clock.wall_ns())
            self.watermark_behind = False

    def close(self, *, abandon: bool = False) -> None:
        """Close files; everything committed is durable already."""
        if not abandon:
            self.advance_watermark()
        self._leave_segment()
        self._watermark.close()
