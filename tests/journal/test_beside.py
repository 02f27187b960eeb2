"""A reader beside a writer, one storage call of the one between any two of the other: never a false alarm."""

from __future__ import annotations

import collections
import errno
import random
from collections.abc import Callable, Iterable

import pytest

from tests.journal.kinds import KINDS, Event, Image, Note
from tests.journal.matrix import DIRECTORY
from tests.sim_storage import Fault, SimStorage
from unlost.journal import JournalMissing, JournalOptions, JournalReader, JournalWriter, verify

State = tuple[dict[str, bytes], int]
"""The directory's files, and below which event everything was durable."""


class Life:
    """Two incarnations of a writer, as everything that they made visible, in order. Event n is number n."""

    def __init__(self) -> None:
        self.storage = SimStorage()
        self.states: list[State] = []
        self.durable = 0
        self.writer: JournalWriter[Event] | None = None

    def note(self, *_: str) -> None:
        if DIRECTORY in self.storage.directories:
            if self.writer is not None:
                self.durable = max(self.durable, self.writer.durable_upto)
            files = self.storage.snapshot(DIRECTORY)
            if not self.states or files != self.states[-1][0]:
                self.states.append((files, self.durable))

    def open(self) -> JournalWriter[Event]:
        self.storage.hook = self.note
        options = JournalOptions(segment_bytes_max=650, max_write_failures=99)
        self.writer = JournalWriter.open(
            DIRECTORY, KINDS, journal_id="j", storage=self.storage, threaded=False, options=options
        )
        return self.writer

    def append(self, count: int, pump: bool = True) -> None:
        assert self.writer is not None
        for _ in range(count):
            self.writer.append(Note(self.writer.next_offset))
            if pump:
                self.writer.pump()

    def die(self) -> None:
        """In the middle of a write to the newest segment, with the next one just created."""
        assert self.writer is not None
        end, self.writer = self.writer.next_offset, None
        self.storage.kill_process()
        names = self.storage.directories[DIRECTORY].visible
        names[max(name for name in names if name.endswith(".zst"))].visible += b"torn" * 40
        self.storage.put(f"{DIRECTORY}/{end:020d}.zst", b"begun")
        self.note()

    def short_write(self, *, cut_back: bool = True) -> None:
        """The next write leaves a part behind, and fails; perhaps it can't be taken back either."""
        self.storage.faults.append(Fault("write", short=150, name=".zst"))
        self.storage.fail("write", errno.EIO, name=".zst")
        if not cut_back:
            self.storage.fail("truncate", errno.EIO, times=2, name=".zst")


def life() -> list[State]:
    """Rotations, parts of frames that are cut back or stay, syncs that fail, a torn end that an opening cuts."""
    it = Life()
    it.open()
    it.append(3)
    it.short_write()
    it.append(2)
    it.short_write(cut_back=False)
    it.append(3)
    it.writer.rotate(Image(it.writer.next_offset, {}))
    it.storage.fail("sync", errno.EIO, name=".zst")
    it.append(3)
    it.writer.rotate()
    it.short_write(cut_back=False)
    it.append(4)
    for _ in range(2):
        it.die()
        it.open()
        it.append(3)
        it.writer.sync_watermark()
        it.writer.rotate()
        it.append(2, pump=False)
        it.writer.pump()
    it.writer.close()
    it.note()
    return it.states


class Reading:
    """A storage that goes from one state to a later one just before a reader's call, under the files it has open."""

    def __init__(self, states: list[State], start: int, call: int, stop: int) -> None:
        self.storage = SimStorage.of(DIRECTORY, states[start][0])
        self.left = call
        self.later = states[start + 1 : stop + 1]
        self.storage.hook = self.before_a_call

    def before_a_call(self, *_: str) -> None:
        self.left -= 1
        if self.left == 0:
            for files, _durable in self.later:
                self.become(files)

    def become(self, files: dict[str, bytes]) -> None:
        visible = self.storage.directories[DIRECTORY].visible
        for name in set(visible) - set(files):
            self.storage.delete(f"{DIRECTORY}/{name}")
        for name, data in files.items():
            if name in visible:
                visible[name].visible[:] = data
            else:
                self.storage.put(f"{DIRECTORY}/{name}", data)


def look(reading: Reading, durable: int) -> str:
    """Event n is number n, from 0 on without a gap, and everything durable at the beginning is there."""
    try:
        reader = JournalReader(DIRECTORY, KINDS, storage=reading.storage)
        found = [(offset, event.number) for offset, event in reader.events()]
    except JournalMissing:
        return "gone"  # an opening has removed a torn file: said by name
    assert found == [(n, n) for n in range(len(found))]
    assert len(found) >= durable
    return "read" if reader.tail is None else "torn"


def check(reading: Reading, durable: int) -> str:
    """``verify`` as it is beside the writer: never damaged, nothing durable missing."""
    try:
        report = verify(DIRECTORY, storage=reading.storage)
    except FileNotFoundError:
        return "gone"
    assert report.ok, [(s.segment, s.byte, s.reason) for s in report.segments if s.state == "damaged"]
    assert report.end_offset >= durable
    return report.state


def interleave(how: Callable[[Reading, int], str], cases: Iterable[tuple[int, int, int]]) -> collections.Counter[str]:
    states = life()
    counts: collections.Counter[str] = collections.Counter()
    for start, call, stop in cases:
        start %= len(states)
        stop = min(start + stop, len(states) - 1)
        reading = Reading(states, start, call, stop)
        counts[how(reading, states[start][1])] += 1
        counts["never reached"] += reading.left > 0
    return counts


@pytest.mark.parametrize("how", [look, check])
def test_a_step_of_the_writer_between_two_calls_of_a_reader(how: Callable[[Reading, int], str]) -> None:
    """From a state of the directory to one soon after, at a call of the reader: a sample."""
    rng = random.Random(1)
    cases = [(rng.randrange(1000), rng.randrange(1, 40), rng.choice([1, 2, 3, 5, 9])) for _ in range(1200)]
    counts = interleave(how, cases)
    assert counts["torn"] > 50, counts
    assert counts["never reached"] < 600, counts


@pytest.mark.slow
@pytest.mark.parametrize("how", [look, check])
def test_every_step_of_the_writer_between_any_two_calls_of_a_reader(how: Callable[[Reading, int], str]) -> None:
    """From each state to each that is up to eight steps later, before each call."""
    states = len(life())
    cases = [(start, call, stop) for start in range(states) for call in range(1, 50) for stop in range(1, 9)]
    assert interleave(how, cases)["torn"] > 1000
