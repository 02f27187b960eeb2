"""A model-based test: whatever happens to the storage, the journal holds what was acknowledged, or says where not."""

from __future__ import annotations

import errno
import random
from copy import copy
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.journal.kinds import KINDS, Blob, Event, Image, Note
from tests.sim_storage import SimStorage
from unlost.journal import (
    JournalDamaged,
    JournalFailed,
    JournalOptions,
    JournalReader,
    JournalTimeout,
    JournalWriter,
    repair,
    verify,
)

DIRECTORY = "/j"


class JournalMachine(RuleBasedStateMachine):
    """``history``: every event of the present history by offset. ``acknowledged``: below it nothing may vanish.

    ``exact``: whether WATERMARK is whole (no power cut since the last opening, no failed write of it), so that any
    damage must show.
    """

    @initialize(small=st.booleans(), degrade=st.booleans())
    def begin(self, small: bool, degrade: bool) -> None:
        self.storage = SimStorage()
        self.lasting: JournalReader[Event] | None = None
        self.options = JournalOptions(
            segment_bytes_max=600 if small else 1 << 20,
            frame_events_max=3 if small else 1000,
            on_failure="degrade" if degrade else "stop",
            scan_on_open="all" if small else "from_image",
        )
        self.history: list[Event] = []
        self.acknowledged = 0
        self.floor = 0
        self.exact = True
        self.made = 0
        self.writer: JournalWriter[Event] | None = None
        self.incarnation = 0
        self.open()

    def open(self) -> None:
        self.writer = JournalWriter.open(
            DIRECTORY, KINDS, journal_id="run", storage=self.storage, threaded=False, options=self.options
        )
        end = self.writer.next_offset
        assert self.acknowledged <= end <= len(self.history)
        del self.history[end:]
        self.acknowledged = end
        self.exact = True
        assert self.writer.incarnation >= max(self.incarnation, 1)
        self.incarnation = self.writer.incarnation

    def note_durable(self) -> None:
        if self.writer is not None:
            assert self.writer.durable_upto >= self.acknowledged
            self.acknowledged = self.writer.durable_upto
            assert (self.writer.metrics().backlog_bytes > 0) == (self.acknowledged < len(self.history))

    # ------------------------------------------------------------------ ordinary life

    @precondition(lambda self: self.writer is not None)
    @rule(count=st.integers(1, 8), size=st.integers(0, 300), later=st.booleans())
    def append(self, count: int, size: int, later: bool) -> None:
        for _ in range(count):
            self.made += 1
            event = Note(self.made) if size < 150 else Blob(self.made, random.Random(self.made).randbytes(size))
            try:
                if later:
                    offset = self.writer.append_later(partial(copy, event), size + 20)
                else:
                    offset = self.writer.append(event)
            except JournalFailed:
                return
            assert offset == len(self.history)
            self.history.append(event)

    @precondition(lambda self: self.writer is not None)
    @rule()
    def pump(self) -> None:
        self.writer.pump()
        self.note_durable()

    @precondition(lambda self: self.writer is not None)
    @rule(watermark=st.booleans())
    def sync(self, watermark: bool) -> None:
        try:
            upto = self.writer.sync()
            assert upto == len(self.history)
            if watermark:
                self.writer.sync_watermark()
        except (JournalFailed, JournalTimeout):
            pass
        self.note_durable()

    @precondition(lambda self: self.writer is not None)
    @rule(image=st.booleans())
    def rotate(self, image: bool) -> None:
        try:
            if not image:
                self.writer.rotate()
                return
            self.made += 1
            event = Image(self.made, {"n": self.made})
            assert self.writer.rotate(event) == len(self.history)
            self.history.append(event)
        except JournalFailed:
            pass

    @precondition(lambda self: self.writer is not None)
    @rule(back=st.integers(0, 30))
    def prune(self, back: int) -> None:
        try:
            report = self.writer.prune(max(0, self.acknowledged - back))
        except (JournalFailed, OSError):
            self.storage.faults.clear()
            self.floor = JournalReader(DIRECTORY, KINDS, storage=self.storage).first_offset
            return
        assert self.floor <= report.floor <= max(self.acknowledged - back, self.floor, 0)
        self.floor = report.floor

    @precondition(lambda self: self.writer is not None)
    @rule()
    def close(self) -> None:
        try:
            self.writer.close()
            self.acknowledged = len(self.history)
        except (JournalFailed, JournalTimeout):
            self.acknowledged = max(self.acknowledged, self.writer.durable_upto)
        self.exact = self.exact and not self.writer.metrics().watermark_behind
        self.writer = None
        self.storage.faults.clear()

    # ------------------------------------------------------------------ bad days

    @rule(
        op=st.sampled_from(["create", "write", "sync", "sync_directory", "truncate", "remove", "rename"]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        times=st.integers(1, 3),
        skip=st.integers(0, 2),
    )
    def fail(self, op: str, code: int, times: int, skip: int) -> None:
        if self.writer is not None:
            self.storage.fail(op, code, times=times, skip=skip)

    @rule(mode=st.sampled_from(["kill", "drop", "tear", "tear", "keep"]), seed=st.integers(0, 2**16))
    def crash(self, mode: str, seed: int) -> None:
        if self.writer is not None:
            self.note_durable()
            self.exact = self.exact and not self.writer.metrics().watermark_behind
        self.writer = None
        if mode == "kill":
            self.storage.kill_process()
        else:
            self.exact = False
            self.storage.power_cut(random.Random(seed), mode)

    @precondition(lambda self: self.writer is None)
    @rule()
    def reopen(self) -> None:
        self.open()

    @precondition(lambda self: self.writer is None and self.exact)
    @rule(which=st.integers(0, 2**16), where=st.integers(0, 2**16), bit=st.integers(0, 7))
    def corrupt(self, which: int, where: int, bit: int) -> None:
        """One flipped bit: every acknowledged event, or a refusal; then repair keeps exactly what it said."""
        files = {n: d for n, d in self.storage.snapshot(DIRECTORY).items() if n != "LOCK" and d}
        if not files:
            return
        name = sorted(files)[which % len(files)]
        data = bytearray(files[name])
        data[where % len(data)] ^= 1 << bit
        path = f"{DIRECTORY}/{name}"
        self.storage.put(path, bytes(data))
        ok = verify(DIRECTORY, self.storage).ok
        try:
            found = list(JournalReader(DIRECTORY, KINDS, storage=self.storage).events())
        except JournalDamaged:
            assert not ok
            self.storage.put(path, files[name])
            return
        assert ok
        assert [event for _, event in found] == self.history[self.floor : self.floor + len(found)]
        assert self.floor + len(found) >= self.acknowledged
        self.storage.put(path, files[name])

    @precondition(lambda self: self.writer is None and self.exact)
    @rule(which=st.integers(0, 2**16), where=st.integers(0, 2**16))
    def corrupt_and_repair(self, which: int, where: int) -> None:
        files = {n: d for n, d in self.storage.snapshot(DIRECTORY).items() if n.endswith(".zst") and len(d) > 200}
        if not files:
            return
        name = sorted(files)[which % len(files)]
        if int(name[:20]) < self.floor:
            return
        data = bytearray(files[name])
        data[196 + where % (len(data) - 196)] ^= 0x10
        self.storage.put(f"{DIRECTORY}/{name}", bytes(data))
        plan = repair(DIRECTORY, storage=self.storage)
        if plan.reason == "nothing to repair":
            self.open()
            return
        done = repair(DIRECTORY, storage=self.storage, apply=True)
        assert done.keep_until == plan.keep_until
        self.acknowledged = min(self.acknowledged, plan.keep_until)
        if plan.keep_until < len(self.history):
            del self.history[plan.keep_until :]
        self.lasting = None
        self.incarnation = 0  # segments of the newest incarnations may be gone with their numbers
        self.open()
        assert self.writer.next_offset == plan.keep_until

    # ------------------------------------------------------------------ always

    @invariant()
    def what_is_read_is_the_history(self) -> None:
        if not hasattr(self, "storage"):
            return
        faults, self.storage.faults = self.storage.faults, []
        try:
            reader = JournalReader(DIRECTORY, KINDS, storage=self.storage)
            found = list(reader.events())
            self.one_that_lasts_sees_the_same(reader, found)
        finally:
            self.storage.faults = faults
        start = reader.first_offset
        assert self.floor <= start or self.writer is None or start <= self.floor
        assert [offset for offset, _ in found] == list(range(start, start + len(found)))
        assert [event for _, event in found] == self.history[start : start + len(found)]
        assert start + len(found) >= self.acknowledged
        image = reader.last_image()
        assert image is None or isinstance(reader.get(image), Image)

    def one_that_lasts_sees_the_same(self, fresh: JournalReader[Event], found: list[tuple[int, Event]]) -> None:
        """A reader that was opened long ago and looks again, which does not read all preambles anew."""
        if self.lasting is None:
            self.lasting = JournalReader(DIRECTORY, KINDS, storage=self.storage)
        self.lasting.refresh()
        assert self.lasting.segments() == fresh.segments()
        assert (self.lasting.first_offset, self.lasting.notes) == (fresh.first_offset, fresh.notes)
        assert list(self.lasting.events()) == found


def some(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestJournal = JournalMachine.TestCase
TestJournal.settings = some(60, 30)


@pytest.mark.slow
def test_many_more_steps() -> None:
    """The same machine, longer and wider."""
    run_state_machine_as_test(JournalMachine, settings=some(300, 40))
