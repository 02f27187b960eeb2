"""The one error tree of the project, and the journal's branch of it.

Every message names the file, the place in it and what to do next.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_FAILED = 1
EXIT_USAGE = 2


class UnlostError(Exception):
    """Root of every error that unlost raises on purpose. ``exit_code``: of a command that ends with it."""

    exit_code: ClassVar[int] = EXIT_FAILED


class JournalError(UnlostError):
    """Something about a journal: the file, the request or the storage below it."""


class JournalDamaged(JournalError):
    """Bytes that were durable are missing or wrong. Nothing was changed (docs/FORMAT.md, "Torn or damaged").

    ``segment`` is the file name, ``byte`` the first wrong byte in it, ``offset`` the first event that can't be
    read, ``last_good_offset`` the newest event before it that can (-1 if none).
    """

    def __init__(self, directory: str, segment: str, byte: int, offset: int, reason: str) -> None:
        self.directory = directory
        self.segment = segment
        self.byte = byte
        self.offset = offset
        self.last_good_offset = offset - 1
        self.reason = reason
        super().__init__(
            f"{directory}/{segment}: damaged at byte {byte}: {reason}. Event {offset} cannot be read; the last good "
            f"one is {self.last_good_offset}. Nothing was changed. Restore the file from a copy, or see what "
            f"`unlost repair {directory}` would give up."
        )


class JournalLocked(JournalError):
    """Another writer holds the journal, or held it on another machine and never let go."""

    def __init__(self, directory: str, holder: str, remedy: str) -> None:
        self.directory = directory
        self.holder = holder
        super().__init__(f"{directory}: in use by {holder}. {remedy}")


class JournalFailed(JournalError):
    """The storage failed and the journal stopped (docs/DURABILITY.md). ``__cause__`` is the reason."""


class JournalFenced(JournalFailed):
    """A newer writer has taken this journal over; this one may not write, publish, clear or prune any more."""


class JournalClosed(JournalError):
    """The writer was closed."""


class JournalForked(JournalError):
    """The writer belongs to the parent process; a forked child has no flush thread and must open its own."""


class JournalUnsupported(JournalError):
    """A version or an incompatible feature flag that this release does not know: refused, never misread."""


class JournalMissing(JournalError):
    """There is no journal here, or the offset asked for is below its floor or beyond its end."""

    exit_code = EXIT_USAGE


class JournalOverrun(JournalError):
    """The backlog reached ``backlog_max_bytes``: the storage did not keep up. The event was not appended."""


class JournalTimeout(JournalError, TimeoutError):
    """What was asked for did not become durable in time. It may still become so later."""


class JournalMismatch(JournalError):
    """The directory holds another journal than the one asked for."""


class JournalEventRefused(JournalError, TypeError):
    """The event is not of a registered type, or would not read back; nothing was appended."""
