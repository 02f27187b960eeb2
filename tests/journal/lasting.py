"""What tests of readers that last have in common: event n is number n."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.journal.kinds import KINDS, Event, Note
from tests.journal.matrix import DIRECTORY
from tests.sim_storage import SimStorage
from unlost.journal import JournalOptions, JournalReader, JournalWriter


def open_writer(storage: SimStorage, *, take_over: bool = False, **options: Any) -> JournalWriter[Event]:
    return JournalWriter.open(
        DIRECTORY, KINDS, journal_id="run", storage=storage, threaded=False, take_over=take_over,
        options=JournalOptions(max_write_failures=10**6, **options),
    )  # fmt: skip


def write(writer: JournalWriter[Event], count: int = 1, text: str = "") -> None:
    for _ in range(count):
        writer.append(Note(writer.next_offset, text))
        writer.pump()


def open_reader(storage: SimStorage) -> JournalReader[Event]:
    return JournalReader(DIRECTORY, KINDS, storage=storage)


def numbers(events: Iterator[tuple[int, Event]]) -> list[int]:
    """Event n is number n, whoever wrote it."""
    found = list(events)
    assert all(offset == event.number for offset, event in found)  # type: ignore[union-attr]
    return [offset for offset, _ in found]
