"""Events that the flush thread builds: the same journal as of events built at once, and a loud end if one can't be."""

from __future__ import annotations

import errno
import random
import re
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.journal.kinds import KINDS, Blob, Event, Image, Note
from tests.sim_storage import SimStorage
from unlost.journal import (
    JournalClosed,
    JournalError,
    JournalEventRefused,
    JournalFailed,
    JournalOptions,
    JournalOverrun,
    JournalReader,
    JournalWriter,
)

DIRECTORY = "/j"


def open_writer(storage: SimStorage, *, threaded: bool = False, **options) -> JournalWriter[Event]:
    made = JournalOptions(**options)
    return JournalWriter.open(DIRECTORY, KINDS, journal_id="run", storage=storage, threaded=threaded, options=made)


def content(storage: SimStorage) -> list[tuple[int, Event]]:
    return list(JournalReader(DIRECTORY, KINDS, storage=storage).events())


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 700), st.booleans(), st.sampled_from(["", "pump", "rotate", "image"])), max_size=40
    ),
    frame_bytes=st.sampled_from([300, 2000, 1 << 20]),
    frame_events=st.sampled_from([1, 3, 16384]),
    spare=st.integers(0, 200),
)
def test_built_later_or_at_once_is_the_same_journal(
    steps: list[tuple[int, bool, str]], frame_bytes: int, frame_events: int, spare: int
) -> None:
    """Every mixture of both, over frame limits and rotations: same offsets and events; the backlog ends at 0."""
    storage = SimStorage()
    writer = open_writer(storage, frame_bytes_max=frame_bytes, frame_events_max=frame_events)
    expected: list[Event] = []
    for number, (size, later, then) in enumerate(steps):
        event: Event = Blob(number, random.Random(number).randbytes(size)) if size > 100 else Note(number)
        given_offset = writer.append_later(lambda e=event: e, size + spare) if later else writer.append(event)
        assert given_offset == len(expected)
        expected.append(event)
        if then == "pump":
            writer.pump()
            assert writer.durable_upto == len(expected)
        elif then == "rotate":
            writer.rotate()
        elif then == "image":
            assert writer.rotate(Image(number, {})) == len(expected)
            expected.append(Image(number, {}))
    writer.pump()
    assert writer.metrics().backlog_bytes == 0
    writer.close()
    assert content(storage) == list(enumerate(expected))


def test_it_is_built_once_on_the_flush_thread_before_flushed_returns() -> None:
    """Also when the storage refuses in between: what was built is kept, not built again."""
    storage = SimStorage()
    writer = open_writer(storage, threaded=True, failure_backoff_ms=1.0)
    storage.fail("sync", errno.EIO, times=2)
    threads: list[threading.Thread] = []

    def build() -> Event:
        threads.append(threading.current_thread())
        return Note(0)

    writer.append_later(build, 10)
    assert writer.sync(10) == 1
    assert threads == [writer._thread]
    assert not storage.faults
    writer.close()


def raises() -> Event:
    raise ValueError("no such tokens")


@pytest.mark.parametrize(
    ("build", "why"),
    [(raises, "no such tokens"), (lambda: "text", "str is not one of"), (lambda: Note("x"), "would not read back")],
)
@pytest.mark.parametrize("threaded", [True, False])
def test_what_cannot_be_built_ends_the_journal(build: Callable[[], Event], why: str, threaded: bool) -> None:
    """Loudly, with the cause and the offsets; what was durable stays, nothing after it is written."""
    storage = SimStorage()
    writer = open_writer(storage, threaded=threaded, check_events=True)
    writer.append(Note(0))
    writer.sync(10)
    writer.append_later(build, 10)
    writer.append_later(lambda: Note(2), 10)
    with pytest.raises(JournalError) as caught:
        writer.sync(5)
    assert isinstance(caught.value, JournalFailed)
    assert re.search(rf"one of events 1 to [12] can't be built: .*{why}", str(caught.value))
    with pytest.raises(JournalFailed):
        writer.append_later(lambda: Note(3), 10)
    with pytest.raises(JournalFailed):
        writer.close()
    assert content(storage) == [(0, Note(0))]
    again = open_writer(storage)
    assert again.append(Note(1)) == 1
    again.close()


def test_the_bound_of_the_backlog_counts_what_is_not_built() -> None:
    """``bytes_max`` counts until the event is durable; at the bound nothing is queued and no offset used."""
    storage = SimStorage()
    writer = open_writer(storage, backlog_high_bytes=1000, backlog_max_bytes=1000)
    writer.append_later(lambda: Note(0), 900)
    assert writer.metrics().backlog_bytes == 964
    with pytest.raises(JournalOverrun):
        writer.append_later(lambda: Note(1), 10)
    assert writer.next_offset == 1
    writer.pump()
    assert writer.append_later(lambda: Note(1), 900) == 1
    writer.close()
    with pytest.raises(JournalClosed):
        writer.append_later(lambda: Note(2), 10)
    assert content(storage) == [(0, Note(0)), (1, Note(1))]


def test_it_wakes_an_idle_flush_thread() -> None:
    """After a quiet second the thread sleeps until something comes, also something still to be built."""
    storage = SimStorage()
    writer = open_writer(storage, threaded=True, heartbeat_s=3600)
    with writer._lock:
        writer._idle = True
        writer._limit = -1
    writer.append_later(lambda: Note(0), 10)
    assert writer.sync(10) == 1
    writer.close()


def test_refused_at_once_is_refused_as_before() -> None:
    """``append`` still says at the call what is no event of this journal."""
    writer = open_writer(SimStorage())
    with pytest.raises(JournalEventRefused):
        writer.append("text")  # type: ignore[arg-type]
    writer.close()
