"""Events that the flush thread builds: the same journal as of events built at once, and a loud end if one can't be."""

from __future__ import annotations

import errno
import itertools
import linecache
import random
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

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
    verify,
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
    assert re.search(rf"event 1 can't be built: .*{why}", str(caught.value))
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


@pytest.mark.parametrize("failing", ["", "write", "sync"])
@pytest.mark.parametrize("frame_events", [1, 3, 16384])
@pytest.mark.parametrize("rotated", [False, True])
def test_what_came_before_what_cannot_be_built_is_durable(failing: str, frame_events: int, rotated: bool) -> None:
    """In the same frame, in a segment before it, and what a failed write had left in memory; waiters are told so."""
    storage = SimStorage()
    writer = open_writer(storage, frame_events_max=frame_events, failure_backoff_ms=0.01)
    for number in range(4):
        writer.append_later(lambda n=number: Note(n), 10)
        writer.append(Note(100 + number))
    if rotated:
        writer.rotate()
        writer.append(Note(7))
    upto = writer.append_later(raises, 10)
    writer.append(Note(9))
    if failing:
        storage.fail(failing, errno.EIO, name=".zst")
        writer.pump()
        assert writer.durable_upto == 0
    with pytest.raises(JournalFailed, match=f"{DIRECTORY}: event {upto} can't be built: .*no such tokens.*durable"):
        writer.sync()
    assert writer.durable_upto == upto
    assert [offset for offset, _ in content(storage)] == list(range(upto))


def test_what_waits_to_be_built_is_let_go_of_one_by_one() -> None:
    """While the last is built, what the others were built from is gone: a full backlog is not held twice."""
    alive: list[int] = []
    held = [Held(bytes(1000)) for _ in range(50)]
    storage = SimStorage()
    writer = open_writer(storage, frame_bytes_max=5000)
    for one in held:
        writer.append_later(partial(build_from, one, alive), 2000)
    del one
    held.clear()
    writer.sync()
    assert len(alive) == 50
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 2
    assert len(content(storage)) == 50


class Held:
    """Something large; ``count`` says how many there are."""

    count = 0

    def __init__(self, data: bytes) -> None:
        self.data = data
        Held.count += 1

    def __del__(self) -> None:
        Held.count -= 1


def build_from(one: Held, alive: list[int]) -> Event:
    alive.append(Held.count)
    return Blob(len(alive), one.data)


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), 1 << 40])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    """At the call: nothing is queued, no offset used, and the bound holds on."""
    storage = SimStorage()
    writer = open_writer(storage)
    with pytest.raises(JournalError, match="bytes_max is"):
        writer.append_later(lambda: Note(0), size)
    assert (writer.next_offset, writer.metrics().backlog_bytes) == (0, 0)


def test_a_size_that_was_too_small_leaves_no_debt() -> None:
    """The figures of the backlog never go below zero, and end at zero."""
    storage = SimStorage()
    writer = open_writer(storage, frame_bytes_max=300)
    for number in range(20):
        writer.append_later(lambda n=number: Blob(n, bytes(5000)), 0)
    seen: list[int] = []
    storage.hook = lambda op, path: seen.append(writer.metrics().backlog_bytes) if op == "write" else None
    writer.sync()
    assert min(seen) > 0
    assert writer.metrics().backlog_bytes == 0


# --- interrupts ------------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What Ctrl-C raises between any two steps of the main thread."""


def interrupted(step: int, call: Callable[[], object]) -> bool:
    """Do ``call``, interrupted before its ``step``-th line in the queue's code; whether it came that far.

    Not at a ``with`` statement itself: between taking the lock and being sure to let go of it Python lets none in.
    """
    left = [step]

    def trace(frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith("event_queue.py"):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.strip().startswith("with "):
            left[0] -= 1
            if left[0] == 0:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("what", ["append", "append_later", "rotate", "rotate to an image"])
def test_an_interrupt_between_any_two_steps_gives_no_offset_twice(what: str) -> None:
    """The journal goes on with every event at its offset, or it ends loudly: what is durable by then is right."""
    ended = 0
    for step in itertools.count(1):
        storage = SimStorage()
        writer = open_writer(storage)
        known = {writer.append(Note(n)): Note(n) for n in range(3)}
        calls: dict[str, Callable[[], object]] = {
            "append": lambda w=writer: w.append(Note(50)),
            "append_later": lambda w=writer: w.append_later(lambda: Note(50), 10),
            "rotate": lambda w=writer: w.rotate(),
            "rotate to an image": lambda w=writer: w.rotate(Image(50, {})),
        }
        if not interrupted(step, calls[what]):
            break
        after = {writer.append(Note(n)): Note(n) for n in range(60, 63)}
        try:
            writer.close()
            assert not known.keys() & after.keys()
            assert writer.durable_upto in (6, 7)
        except JournalFailed:
            ended += 1
        told = dict(content(storage))
        assert verify(DIRECTORY, storage).state == "clean"
        assert list(told) == list(range(writer.durable_upto))
        for offset, event in (after | known).items():
            assert offset >= writer.durable_upto or told[offset] == event
    assert step > 5
    assert ended < step / 2
