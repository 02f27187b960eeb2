"""Readers that last, beside writers whose storage fails, who die and prune: any lives, call by call, from seeds.

A healthy journal is never called damaged, what is durable is never missing, and a follower gets each event once.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable

import pytest

from tests.journal.kinds import Note
from tests.journal.lasting import numbers, open_reader, open_writer
from tests.journal.matrix import DIRECTORY
from tests.journal.refusals import nothing_else_is_refused
from tests.sim_storage import Fault, SimStorage
from unlost.journal import JournalMissing, verify


class Lives:
    """Writers one after another in a thread of their own, which goes on by one storage call when it is told to."""

    def __init__(self, seed: int, *, lives: int, prune_upto: Callable[[], int]) -> None:
        self.rng = random.Random(seed)
        self.storage = SimStorage()
        self.readers = SimStorage()  # another process, which outlives the writers
        self.readers.directories = self.storage.directories
        self.readers.hook = self._before_the_readers
        self.written: list[Note] = []
        self.durable = self.floor = 0
        self.finished = False
        self.failing = False
        self._lives = lives
        self._prune_upto = prune_upto
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while DIRECTORY not in self.storage.directories:
            self.step(1)

    def step(self, calls: int) -> None:
        """The writer's next calls; called by the reader's thread."""
        for _ in range(calls):
            if not self.finished:
                self._go.release()
                assert self._done.acquire(timeout=20)

    def _before_the_readers(self, *_: str) -> None:
        if self.rng.random() < 0.1:
            self.step(self.rng.choice([1, 2, 5, 20]))

    def _hook(self, op: str, path: str) -> None:
        self._done.release()
        self._go.acquire()
        if self.failing and path.endswith(".zst") and op in ("write", "sync", "truncate", "create", "remove"):
            chance = self.rng.random()
            if op == "write" and chance < 0.1:
                self.storage.faults.append(Fault("write", short=self.rng.randint(1, 300), name=".zst"))
            elif chance < 0.25:
                raise OSError(errno.EIO, f"simulated {op}", path)

    def _run(self) -> None:
        self._go.acquire()
        try:
            for life in range(self._lives):
                self._live(life)
        finally:
            self.failing, self.finished = False, True
            self._done.release()

    def _live(self, life: int) -> None:
        rng = self.rng
        self.storage.hook = self._hook
        size = rng.choice([700, 1 << 20])
        writer = open_writer(self.storage, frame_events_max=rng.choice([1, 3]), segment_bytes_max=size)
        del self.written[writer.next_offset :]
        self.durable = writer.next_offset
        for _ in range(rng.randint(5, 20)):
            self.failing = rng.random() < 0.7
            for _ in range(rng.randint(1, 5)):
                self.written.append(Note(writer.append(Note(writer.next_offset, f"life {life}")), f"life {life}"))
            writer.pump()
            self.failing = False
            self.durable = writer.durable_upto
            if rng.random() < 0.2:
                writer.rotate()
            if rng.random() < 0.2 and (upto := min(self._prune_upto(), self.durable)) > 1:
                self.floor = max(self.floor, upto)  # from now on what is below may be gone
                writer.prune(upto)
        if life < self._lives - 1 and rng.random() < 0.8:
            writer.abandon()
            if rng.random() < 0.5:
                self.storage.kill_process()
            else:
                self.storage.power_cut(rng, rng.choice(["drop", "tear", "keep"]))
        else:
            writer.close()
            self.durable = writer.durable_upto


def follow_lives(seed: int) -> None:
    got: list[int] = []
    lives = Lives(seed, lives=3, prune_upto=lambda: len(got))
    reader = open_reader(lives.readers)
    for offset, event in reader.follow(
        0, stop=lambda: lives.finished, sleep=lambda _: lives.step(lives.rng.randint(1, 20))
    ):
        assert (offset, event.number) == (len(got), len(got))  # type: ignore[union-attr]
        got.append(offset)
    assert verify(DIRECTORY, storage=lives.readers).state == "clean"
    assert len(got) >= lives.durable == len(lives.written)


@nothing_else_is_refused
def test_a_follower_of_failing_and_dying_writers_gets_each_event_once() -> None:
    """Whatever fails, is cut back, begun anew, lost or pruned behind it: no alarm, no gap, nothing twice, no stall."""
    for seed in range(40):
        follow_lives(seed)


@pytest.mark.slow
@nothing_else_is_refused
def test_a_follower_of_many_failing_and_dying_writers_gets_each_event_once() -> None:
    """The same for many seeds."""
    for seed in range(1000, 1200):
        follow_lives(seed)


def ask_lives(seed: int) -> None:
    """One reader that is asked anything at any time: whatever was durable when it was asked is there, as written."""
    lives = Lives(seed, lives=3, prune_upto=lambda: lives.durable - lives.rng.randint(0, 30))
    reader = open_reader(lives.readers)
    rng = random.Random(seed)

    def ask() -> None:
        durable = lives.durable
        if durable == 0 or rng.random() < 0.2:
            assert reader.end_offset >= durable
        elif rng.random() < 0.5:
            offset = rng.randrange(durable)
            try:
                assert reader.get(offset) == lives.written[offset]
            except JournalMissing:
                assert offset < lives.floor
        else:
            reader.refresh()

    while not lives.finished:
        lives.step(rng.randint(0, 20))
        if rng.random() < 0.7:
            ask()
            continue
        durable, start = lives.durable, rng.randint(lives.floor, lives.durable)
        reader.refresh()
        due = start
        try:
            for offset, event in reader.events(start):
                assert offset == due or (start == 0 == due <= lives.floor)
                due = offset + 1
                if offset < durable:
                    assert event == lives.written[offset]
                if rng.random() < 0.1:
                    ask()
            assert due >= durable
        except JournalMissing:
            assert due < lives.floor
    reader.refresh()
    assert numbers(reader.events(reader.first_offset))[-1:] == [len(lives.written) - 1]


@nothing_else_is_refused
def test_a_lasting_reader_is_asked_anything_while_writers_fail_and_die() -> None:
    """Look-ups, iterations and looks anew in any order, also inside one another: what was durable is given as it is."""
    for seed in range(40):
        ask_lives(seed)


@pytest.mark.slow
@nothing_else_is_refused
def test_a_lasting_reader_is_asked_more_while_writers_fail_and_die() -> None:
    """The same for many seeds."""
    for seed in range(1000, 1200):
        ask_lives(seed)
