"""Fold a journal to state, beginning at the newest image at or before the wanted offset.

So the time follows what is live and what is new, not the length of the history.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..journal.errors import JournalMissing, UnlostError
from .events import EVENT_TYPES, Event
from .state import State
from .transitions import TRANSITIONS, IllegalTransition

if TYPE_CHECKING:
    from ..journal.reader import JournalReader
    from ..journal.storage import Storage

EVENTS_FOLDER = "events"


class FoldError(UnlostError):
    """The journal's bytes are sound but its events don't make sense together."""


def fold_events(events: Iterable[tuple[int, Event]], state: State | None = None) -> State:
    """Apply ``(offset, event)`` pairs in order; offsets must be dense from ``state.offset`` on.

    A fresh state may begin at any StateImage. Raises FoldError naming the offset of an event that is not allowed.
    """
    state = State() if state is None else state
    table = TRANSITIONS
    offset = -1
    try:
        for offset, event in events:
            check, effect = table[type(event)]
            check(state, event)
            state.offset = offset
            effect(state, event)
            state.offset = offset + 1
            state.t = event.t
    except IllegalTransition as error:
        raise FoldError(f"offset {offset}: {error}") from error
    return state


def open_events(run_dir: str | Path, storage: Storage | None = None) -> JournalReader[Event]:
    """A reader over a run's event journal. JournalMissing if the folder is not a run."""
    from ..journal.reader import JournalReader

    folder = Path(run_dir) / EVENTS_FOLDER
    if storage is None and not folder.is_dir():
        raise JournalMissing(f"{run_dir}: not a run folder: {EVENTS_FOLDER}/ is missing in it")
    return JournalReader(folder, EVENT_TYPES, storage=storage)


def fold_reader(reader: JournalReader[Event], at: int | None = None) -> State:
    """Fold what ``reader`` sees, up to and including offset ``at`` (all of it by default)."""
    stop = None if at is None else at + 1
    start = reader.last_image(before=at)
    return fold_events(reader.events(start=reader.first_offset if start is None else start, stop=stop))


def fold_run(run_dir: str | Path, at: int | None = None, storage: Storage | None = None) -> State:
    """The state of a run after offset ``at`` (default: after its last readable event)."""
    reader = open_events(run_dir, storage)
    if at is not None and not reader.first_offset <= at < reader.end_offset:
        raise JournalMissing(
            f"{run_dir}: offset {at} is not in the journal; it holds {reader.first_offset}..{reader.end_offset - 1}"
        )
    return fold_reader(reader, at)
