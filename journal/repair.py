"""Gives up what can't be read, after copying every byte that it touches aside. Says first what would be lost."""

from __future__ import annotations

import os

import msgspec

from .clock import Clock, SystemClock
from .errors import JournalDamaged, JournalError
from .format import segment_name, segment_offset
from .lock import DirectoryLock
from .marks import WATERMARK_NAME, WatermarkFile
from .recovery import copy_aside
from .storage import RealStorage, Storage
from .survey import survey
from .verify import VerifyReport, verify


class RepairReport(msgspec.Struct, frozen=True):
    """``events_lost``: durable events given up, those from ``keep_until`` on (None: unknown, the end is unreadable).

    ``applied`` False: nothing was changed, this is what would be done. ``copied``: where the old bytes are.
    """

    directory: str
    state_before: str
    keep_until: int
    events_lost: int | None
    cut: list[str]
    removed: list[str]
    copied: list[str]
    applied: bool
    reason: str


def repair(
    directory: str | os.PathLike[str],
    *,
    storage: Storage | None = None,
    apply: bool = False,
    take_over: bool = False,
    clock: Clock | None = None,
) -> RepairReport:
    """Cut a journal back to its last good event. With ``apply=False`` only say what that would mean.

    A clean journal and a torn tail need no repair (opening cuts a torn tail). Raises JournalLocked, JournalError when
    there is nothing that could be kept by cutting (the first segment is missing: take it from a copy), OSError.
    """
    path = os.fspath(directory)
    storage = storage or RealStorage()
    clock = clock or SystemClock()
    report = verify(path, storage)
    if report.ok:
        return RepairReport(path, report.state, report.end_offset, 0, [], [], [], False, "nothing to repair")
    lock = DirectoryLock.acquire(storage, path, clock, take_over=take_over)
    try:
        report = verify(path, storage)
        if report.ok:
            return RepairReport(path, report.state, report.end_offset, 0, [], [], [], False, "nothing to repair")
        plan = _plan(storage, path, report)
        return _apply(storage, path, plan, clock) if apply else plan
    finally:
        lock.release()


def _plan(storage: Storage, path: str, report: VerifyReport) -> RepairReport:
    bad = next(s for s in report.segments if s.state == "damaged")
    starts = sorted(o for n in storage.list_names(path) if (o := segment_offset(n)) is not None)
    first = min((s.first_offset for s in report.segments if s.state != "ignored"), default=bad.first_offset)
    keep = report.end_offset
    cut, removed = [], []
    for start in starts:
        name = segment_name(start)
        if start >= keep:
            removed.append(name)
        elif name == bad.segment and bad.byte is not None:
            cut.append(f"{name}@{bad.byte}")
    if not removed and not cut and all(start >= keep for start in starts):
        raise JournalError(
            f"{path}: {bad.segment} is {bad.reason}; nothing is left that cutting could keep. Restore it from a copy."
        )
    known_end = max([report.watermark, keep, *starts])
    lost = known_end - keep if first <= keep else None
    return RepairReport(path, report.state, keep, lost, cut, removed, [], False, bad.reason)


def _apply(storage: Storage, path: str, plan: RepairReport, clock: Clock) -> RepairReport:
    """Newest first, so that a crash in between leaves a journal that the same repair can finish."""
    copied = []
    for name in reversed(plan.removed):
        full = os.path.join(path, name)
        copied.append(copy_aside(storage, path, full, 0))
    if WATERMARK_NAME in storage.list_names(path):
        copied.append(copy_aside(storage, path, os.path.join(path, WATERMARK_NAME), 0))
    for item in plan.cut:
        name, byte = item.split("@")
        copied.append(copy_aside(storage, path, os.path.join(path, name), int(byte)))
    if WATERMARK_NAME in storage.list_names(path):
        storage.remove(os.path.join(path, WATERMARK_NAME))
    for name in reversed(plan.removed):
        storage.remove(os.path.join(path, name))
    storage.sync_directory(path)
    for item in plan.cut:
        name, byte = item.split("@")
        file = storage.open(os.path.join(path, name), writable=True)
        try:
            file.truncate(int(byte))
            file.sync()
        finally:
            file.close()
    storage.sync_directory(path)
    _state_watermark(storage, path, plan.keep_until, clock)
    return msgspec.structs.replace(plan, copied=copied, applied=True)


def _state_watermark(storage: Storage, path: str, keep_until: int, clock: Clock) -> None:
    try:
        found = survey(storage, path)
    except JournalDamaged:
        return  # more than one thing is wrong: the next repair goes on from here
    if found.journal_id is None:
        return
    mark = WatermarkFile(storage, path, found.journal_id, found.incarnation)
    try:
        mark.write(keep_until, clock.wall_ns())
        mark.sync()
    finally:
        mark.close()
    storage.sync_directory(path)
