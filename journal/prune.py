"""Retention: whole segments from the old end, by offset. The floor is recorded durably before anything goes."""

from __future__ import annotations

import os

import msgspec

from .clock import Clock, SystemClock
from .errors import JournalError, JournalMissing
from .judge import check_chain, raise_if_damaged
from .lock import DirectoryLock
from .marks import write_floor
from .storage import RealStorage, Storage
from .survey import Survey, survey


class PruneReport(msgspec.Struct, frozen=True):
    """``floor`` is the first event that is kept; ``removed`` the segment files that went (or would, in a dry run)."""

    directory: str
    floor_before: int
    floor: int
    removed: list[str]
    bytes_removed: int
    dry_run: bool


def prune(
    directory: str | os.PathLike[str],
    before_offset: int,
    *,
    storage: Storage | None = None,
    dry_run: bool = True,
    clock: Clock | None = None,
) -> PruneReport:
    """Remove whole segments before ``before_offset`` from a journal that nobody writes.

    What a fold or a restore needs is the caller's knowledge. Raises JournalLocked, JournalMissing, JournalDamaged,
    JournalError for an offset beyond the end, OSError.
    """
    path = os.fspath(directory)
    storage = storage or RealStorage()
    clock = clock or SystemClock()
    survey(storage, path)  # a missing directory is an error, not a new LOCK file
    lock = DirectoryLock.acquire(storage, path, clock, take_over=False)
    try:
        found = survey(storage, path)
        if not found.chain or found.journal_id is None:
            raise JournalMissing(f"{path}: no segment here, nothing to prune")
        verdicts = list(check_chain(storage, found, from_index=len(found.chain) - 1))
        for segment, verdict in verdicts:
            raise_if_damaged(found, segment, verdict)
        end = verdicts[0][1].end.offset
        if before_offset > end:
            raise JournalError(f"{path}: can't prune before event {before_offset}: the journal ends at event {end}")
        return prune_locked(
            storage,
            path,
            before_offset,
            journal_id=found.journal_id,
            incarnation=found.incarnation,
            wall_ns=clock.wall_ns(),
            floor_max=end - 1,
            dry_run=dry_run,
        )
    finally:
        lock.release()


def prune_locked(
    storage: Storage,
    directory: str,
    before_offset: int,
    *,
    journal_id: str,
    incarnation: int,
    wall_ns: int,
    floor_max: int,
    dry_run: bool = False,
) -> PruneReport:
    """The work, under the caller's lock.

    ``floor_max``: newest durable event; its segment and later ones stay, so that the incarnation and the chain are
    never forgotten.
    """
    found = survey(storage, directory)
    floor = _new_floor(found, min(before_offset, floor_max))
    doomed = [f for f in (*found.below_floor, *found.chain, *found.strays) if f.first_offset < floor]
    doomed.sort(key=lambda f: f.first_offset)
    report = PruneReport(directory, found.floor, floor, [f.name for f in doomed], sum(f.size for f in doomed), dry_run)
    if dry_run or not doomed:
        return report
    if floor > found.floor:
        write_floor(storage, directory, journal_id=journal_id, incarnation=incarnation, offset=floor, wall_ns=wall_ns)
    for file in doomed:
        storage.remove(file.path)
    storage.sync_directory(directory)
    return report


def _new_floor(found: Survey, limit: int) -> int:
    starts = [s.first_offset for s in found.chain if s.first_offset <= limit]
    return max(starts, default=found.floor)
