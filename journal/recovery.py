"""What opening does before the first append: judge the end, cut a torn tail, sync everything read.

Steps, each of which can be killed and repeated (docs/FORMAT.md, "Opening for writing"):

1. find the chain of segments; check every frame from the newest image (or from the floor) to the end;
2. damage: raise, with nothing changed;
3. torn tail: copy the bytes to ``aside/``, sync the copy, cut (or remove a file without a whole frame), sync;
4. write what lies above the watermark once more, in place, then sync every segment that was read, and the directory:
   what the page cache shows may not be on the device, and if the dead process saw a failed fdatasync, the kernel
   believes those pages clean and a sync alone would do nothing;
5. only now may anything be appended or believed.
"""

from __future__ import annotations

import logging
import os

import msgspec

from .errors import JournalMismatch
from .judge import Judged, check_chain, raise_if_damaged
from .scan import TornTail, Verdict
from .sink import Link
from .storage import Storage, StorageFile, read_exact, write_all
from .survey import SegmentFile, Survey, open_walk, survey

logger = logging.getLogger(__name__)

ASIDE_NAME = "aside"
_COPY_BYTES = 1 << 20


class TornPiece(msgspec.Struct, frozen=True):
    """Bytes that were never durable: ``length_bytes`` from ``byte`` of ``segment``; ``copied_to`` a file."""

    segment: str
    byte: int
    length_bytes: int
    reason: str
    copied_to: str
    removed_file: bool


class RecoveryReport(msgspec.Struct, frozen=True):
    """What opening found and did. ``events_scanned`` counts events whose checksums were verified."""

    journal_id: str | None
    segments: int
    segments_scanned: int
    events_scanned: int
    bytes_scanned: int
    floor: int
    next_offset: int
    image_offset: int | None
    incarnation_before: int
    torn: list[TornPiece]
    watermark: int
    watermark_source: str
    last_wall_ns: int | None
    notes: list[str]
    seconds: float = 0.0


class Recovered(msgspec.Struct, frozen=True):
    """The end of a journal that is ready to be appended to."""

    report: RecoveryReport
    link: Link | None


def recover(storage: Storage, directory: str, *, scan_all: bool, journal_id: str) -> Recovered:
    """Steps 1 to 4. The caller holds the lock. Raises JournalDamaged, JournalUnsupported, OSError."""
    cuts: list[Judged] = []
    while True:
        removed = {segment.name for segment, verdict in cuts if _goes(verdict)}
        found = survey(storage, directory, without=removed)
        if found.journal_id not in (None, journal_id):
            raise JournalMismatch(
                f"{directory}: holds journal {found.journal_id!r}, not {journal_id!r}. Give its own id, or another "
                f"directory."
            )
        image = found.newest_image()
        verdicts = list(check_chain(storage, found, from_index=0 if scan_all or image is None else image))
        for segment, verdict in verdicts:
            raise_if_damaged(found, segment, verdict)
        cuts += [(segment, verdict) for segment, verdict in reversed(verdicts) if isinstance(verdict, TornTail)]
        if not any(segment.preamble is not None and _goes(verdict) for segment, verdict in verdicts):
            break  # else the segment before is the last one now, perhaps after another image: judge again
    torn = [_cut(storage, directory, segment, verdict) for segment, verdict in cuts if isinstance(verdict, TornTail)]
    if found.chain:
        _write_again(storage, found)
    for segment, _ in verdicts:
        if segment.preamble is not None:
            _sync_file(storage, segment.path)
    storage.sync_directory(directory)
    judged = [(s, v) for s, v in verdicts if s.preamble is not None]
    link, next_offset = None, found.floor
    if judged:
        segment, verdict = judged[-1]
        link, next_offset = Link(segment.first_offset, verdict.end.byte, verdict.end.chain), verdict.end.offset
    report = RecoveryReport(
        journal_id=found.journal_id,
        segments=len(found.chain),
        segments_scanned=len(judged),
        events_scanned=sum(v.end.offset - s.first_offset for s, v in judged),
        bytes_scanned=sum(v.end.byte for _, v in judged),
        floor=found.floor,
        next_offset=next_offset,
        image_offset=found.chain[image].first_offset if image is not None else None,
        incarnation_before=found.incarnation,
        torn=torn,
        watermark=found.watermark,
        watermark_source=found.watermark_source,
        last_wall_ns=judged[-1][1].end.wall_ns if judged else None,
        notes=found.notes,
    )
    return Recovered(report, link)


def _write_again(storage: Storage, found: Survey) -> None:
    """Make the pages dirty that hold frames not known durable, so that the sync that follows writes them."""
    segment = found.chain[-1]
    file, walk = open_walk(storage, segment, found.directory)
    try:
        start = 0
        while (header := walk.step()) is not None and header.next_offset <= found.watermark and not found.strict:
            start = walk.position.byte
        end = file.size()
        if start >= end:
            return
        target = storage.open(segment.path, writable=True)
        try:
            for at in range(start, end, _COPY_BYTES):
                write_all(target, at, read_exact(file, at, min(_COPY_BYTES, end - at)))
        finally:
            target.close()
    finally:
        file.close()


def _goes(verdict: Verdict) -> bool:
    """Whether the whole file is a torn tail."""
    return isinstance(verdict, TornTail) and verdict.end.frames == 0


def _cut(storage: Storage, directory: str, segment: SegmentFile, verdict: TornTail) -> TornPiece:
    remove = _goes(verdict)
    start = 0 if remove else verdict.end.byte
    copied_to = copy_aside(storage, directory, segment.path, start) if segment.size > start else ""
    if remove:
        storage.remove(segment.path)
        storage.sync_directory(directory)
    else:
        file = storage.open(segment.path, writable=True)
        try:
            file.truncate(start)
            file.sync()
        finally:
            file.close()
    length = segment.size - start
    logger.warning(
        "%s: torn tail of %d bytes from byte %d (%s): never durable, cut%s",
        segment.path, length, start, verdict.reason, f", copied to {copied_to}" if copied_to else "",
    )  # fmt: skip
    return TornPiece(segment.name, start, length, verdict.reason, copied_to, remove)


def copy_aside(storage: Storage, directory: str, path: str, start: int) -> str:
    """Copy the bytes of a file from ``start`` on into ``aside/``, durably; returns the copy's path.

    A copy that an earlier, killed opening finished is used again; an unfinished one is left and a new name taken.
    """
    folder = os.path.join(directory, ASIDE_NAME)
    storage.make_directory(folder)
    names = set(storage.list_names(folder))
    source = storage.open(path)
    try:
        size = source.size()
        base = f"{os.path.basename(path)}.{start}-{size}"
        for attempt in range(1000):
            name = base if attempt == 0 else f"{base}.{attempt}"
            target = os.path.join(folder, name)
            if name in names:
                if _same(storage, target, source, start, size):
                    _sync_file(storage, target)
                    storage.sync_directory(folder)
                    return target
                continue
            _copy(storage, source, start, size, target)
            storage.sync_directory(folder)
            return target
    finally:
        source.close()
    raise OSError(f"{folder}: too many copies of {base}; move them away")


def _copy(storage: Storage, source: StorageFile, start: int, size: int, target: str) -> None:
    copy = storage.create(target)
    try:
        for at in range(start, size, _COPY_BYTES):
            write_all(copy, at - start, read_exact(source, at, min(_COPY_BYTES, size - at)))
        copy.sync()
    finally:
        copy.close()


def _same(storage: Storage, target: str, source: StorageFile, start: int, size: int) -> bool:
    copy = storage.open(target)
    try:
        if copy.size() != size - start:
            return False
        return all(
            read_exact(copy, at - start, min(_COPY_BYTES, size - at))
            == read_exact(source, at, min(_COPY_BYTES, size - at))
            for at in range(start, size, _COPY_BYTES)
        )
    finally:
        copy.close()


def _sync_file(storage: Storage, path: str) -> None:
    file = storage.open(path)
    try:
        file.sync()
    finally:
        file.close()
