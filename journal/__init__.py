"""An append-only event journal: never lies, never waits, never grows slow.

Generic over a union of msgspec Structs. ``JournalWriter`` appends and makes durable, ``JournalReader`` reads beside it,
``verify``, ``repair`` and ``prune`` are the tools. The bytes are in docs/FORMAT.md, what can be lost when in
docs/DURABILITY.md.
"""

from .clock import Clock, SystemClock
from .errors import (
    JournalClosed,
    JournalDamaged,
    JournalError,
    JournalEventRefused,
    JournalFailed,
    JournalFenced,
    JournalForked,
    JournalLocked,
    JournalMismatch,
    JournalMissing,
    JournalOverrun,
    JournalTimeout,
    JournalUnsupported,
    UnlostError,
)
from .options import JournalMetrics, JournalOptions
from .prune import PruneReport, prune
from .reader import FrameView, JournalReader, SegmentInfo, TailInfo
from .recovery import RecoveryReport
from .repair import RepairReport, repair
from .storage import RealStorage, Storage, StorageFile, StorageLock
from .verify import SegmentVerdict, VerifyReport, verify
from .writer import JournalWriter

__all__ = [
    "Clock",
    "FrameView",
    "JournalClosed",
    "JournalDamaged",
    "JournalError",
    "JournalEventRefused",
    "JournalFailed",
    "JournalFenced",
    "JournalForked",
    "JournalLocked",
    "JournalMetrics",
    "JournalMismatch",
    "JournalMissing",
    "JournalOptions",
    "JournalOverrun",
    "JournalReader",
    "JournalTimeout",
    "JournalUnsupported",
    "JournalWriter",
    "PruneReport",
    "RealStorage",
    "RecoveryReport",
    "RepairReport",
    "SegmentInfo",
    "SegmentVerdict",
    "Storage",
    "StorageFile",
    "StorageLock",
    "SystemClock",
    "TailInfo",
    "UnlostError",
    "VerifyReport",
    "prune",
    "repair",
    "verify",
]
