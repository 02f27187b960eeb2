"""A reader beside a writer, one storage call of the one between any two of the other: never a false alarm."""

from __future__ import annotations

import collections
import errno
import random
from collections.abc import Callable

import pytest

from tests.journal.forged import frames, watermark
from tests.journal.kinds import KINDS, Event, Image, Note
from tests.journal.matrix import DIRECTORY
from tests.journal.refusals import nothing_else_is_refused
from tests.sim_storage import Fault, SimStorage
from unlost.journal import JournalDamaged, JournalMissing, JournalOptions, JournalReader, JournalWriter, verify

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

    def open(self, segment_bytes_max: int = 650) -> JournalWriter[Event]:
        self.storage.hook = self.note
        options = JournalOptions(segment_bytes_max=segment_bytes_max, max_write_failures=99, frame_events_max=1)
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
    reader = JournalReader(DIRECTORY, KINDS, storage=reading.storage)
    found = [(offset, event.number) for offset, event in reader.events()]
    assert found == [(n, n) for n in range(len(found))]
    assert len(found) >= durable
    return "read" if reader.tail is None else "torn"


def check(reading: Reading, durable: int) -> str:
    """``verify`` as it is beside the writer: never damaged, nothing durable missing."""
    report = verify(DIRECTORY, storage=reading.storage)
    assert report.ok, [(s.segment, s.byte, s.reason) for s in report.segments if s.state == "damaged"]
    assert report.end_offset >= durable
    return report.state


def interleave(how: Callable[[Reading, int], str], stops: Callable[[], list[int]]) -> collections.Counter[str]:
    """From each state, before each call: on to the states that are ``stops()`` steps later."""
    states = life()
    counts: collections.Counter[str] = collections.Counter()
    for start, (_, durable) in enumerate(states[:-1]):
        calls = how_many(how, states, start)
        for call in range(1, calls + 1):
            for stop in stops():
                counts[how(Reading(states, start, call, start + stop), durable)] += 1
    return counts


def how_many(how: Callable[[Reading, int], str], states: list[State], start: int) -> int:
    """Calls that a look at one state takes."""
    alone = Reading(states, start, 1 << 30, start)
    how(alone, states[start][1])
    return (1 << 30) - alone.left


@pytest.mark.parametrize("how", [look, check])
@pytest.mark.parametrize("window", [1 << 20, 64])
@nothing_else_is_refused
def test_a_step_of_the_writer_between_two_calls_of_a_reader(
    how: Callable[[Reading, int], str], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each state of the directory to one soon after, before every third call; reading far ahead, or hardly."""
    monkeypatch.setattr("unlost.journal.scan._WINDOW_BYTES", window)
    rng = random.Random(window)
    assert interleave(how, lambda: rng.choice([[1], [2], [3], [5], [9], *[[]] * 9]))["torn"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("how", [look, check])
@pytest.mark.parametrize("window", [1 << 20, 64])
def test_every_step_of_the_writer_between_any_two_calls_of_a_reader(
    how: Callable[[Reading, int], str], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same before each call, with several of the states that follow."""
    monkeypatch.setattr("unlost.journal.scan._WINDOW_BYTES", window)
    assert interleave(how, lambda: [1, 2, 3, 5, 8])["torn"] > 500


def test_what_was_damaged_and_is_mended_by_now_is_told_or_read_never_left_out() -> None:
    """Durable events whose bytes were bad at the first look and are good at the second: damage, or the events."""
    whole, durable = life()[-1]
    seen = collections.Counter[str]()
    for name in sorted(name for name in whole if name.endswith(".zst")):
        for at in (9, 200, len(whole[name]) - 1):
            bad = whole[name][:at] + b"?" + whole[name][at + 1 :]
            states = [(whole | {name: bad}, durable), (whole, durable)]
            for call in range(1, 90, 2):
                try:
                    seen[look(Reading(states, 0, call, 1), durable)] += 1
                except JournalDamaged:
                    seen["damaged"] += 1
    assert min(seen["damaged"], seen["read"]) > 50, seen


def test_what_a_second_look_finds_whole_is_no_damage() -> None:
    """Bytes above the watermark that come late, as over a network: this look ends before them, and cries nothing."""
    whole, _ = life()[-1]
    name = max(name for name in whole if len(frames(whole[name])) > 2)
    files = {other: data for other, data in whole.items() if other <= name}
    start, _ = frames(files[name])[1]
    due = int(name[:20]) + 1
    files["WATERMARK"] = watermark(due, "j")
    late = files | {name: files[name][: start + 80] + bytes(9) + files[name][start + 89 :]}
    alone = Reading([(late, due)], 0, 1 << 30, 0)
    with pytest.raises(JournalDamaged, match="intact later frame"):
        look(alone, due)
    calls = (1 << 30) - alone.left
    assert look(Reading([(late, due), (files, due)], 0, calls, 1), due) == "read"


@nothing_else_is_refused
@pytest.mark.parametrize("stated", [True, False])
def test_whole_frames_that_are_cut_and_written_anew_are_no_damage(
    stated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of a write that failed were walked over, and others lie there and after them when the walk goes on; with
    a WATERMARK, and without, when any later frame would prove damage."""
    monkeypatch.setattr("unlost.journal.scan._WINDOW_BYTES", 64)
    rng = random.Random(0)
    it = Life()
    writer = it.open(1 << 20)
    it.append(2)
    before = len(it.states)
    it.storage.faults.append(Fault("write", short=22_000, name=".zst"))
    it.storage.fail("write", errno.EIO, name=".zst")
    for number in range(2, 7):  # longer than what a walk reads at once
        writer.append(Note(number, rng.randbytes(6000).hex()))
    writer.pump()
    cut = len(it.states)
    it.append(3)
    it.note()
    assert max(len(files[f"{0:020d}.zst"]) for files, _ in it.states[before:cut]) > 20_000
    for files, _ in it.states:
        if not stated:
            files.pop("WATERMARK", None)
    for start in range(before, cut):
        for call in range(1, 60):
            for how in (look, check):
                how(Reading(it.states, start, call, len(it.states)), it.states[start][1])


def test_a_tail_that_is_no_more_is_no_longer_told() -> None:
    """``tail`` is what the newest look at the end has found."""
    files, _ = life()[-1]
    name = max(name for name in files if name.endswith(".zst"))
    storage = SimStorage.of(DIRECTORY, files | {name: files[name] + b"torn"})
    reader = JournalReader(DIRECTORY, KINDS, storage=storage)
    assert len(list(reader.events())) > 20
    assert reader.tail is not None
    storage.put(f"{DIRECTORY}/{name}", files[name])
    reader.refresh()
    assert len(list(reader.events())) > 20
    assert reader.tail is None


@pytest.mark.parametrize("seen", [1, 12, 40])
@pytest.mark.parametrize("looked_up", [(), (0,), (0, 11), (11, 0)])
@pytest.mark.parametrize("how", ["get", "get_many"])
def test_segments_that_are_pruned_under_a_reader_hide_nothing_that_is_kept(
    seen: int, looked_up: tuple[int, ...], how: str
) -> None:
    """However old the reader's view, and whatever it has read so far: a removed file is neither an I/O error, nor does
    it make those events missing that came since."""
    life = Life()
    writer = life.open()
    life.append(seen)
    reader = JournalReader(DIRECTORY, KINDS, storage=life.storage)
    for offset in looked_up:
        if offset < seen:
            reader.get(offset)
    life.append(40 - seen)
    report = writer.prune(30)
    assert report.removed

    def look(offset: int) -> Event:
        return reader.get(offset) if how == "get" else reader.get_many([offset])[offset]

    for offset in range(report.floor, 40):
        assert look(offset) == Note(offset)
    with pytest.raises(JournalMissing, match=r"no event 2: the journal holds \d+ to 39"):
        look(2)


def test_a_reader_that_looks_again_opens_only_what_may_be_new() -> None:
    """However many segments there are: the cost of following goes with what is written, not with the history."""
    storage = SimStorage()
    opened = []
    with JournalWriter.open(
        DIRECTORY, KINDS, journal_id="run", storage=storage, threaded=False, options=JournalOptions()
    ) as writer:
        for number in range(200):
            writer.append(Note(number))
            writer.pump()
            writer.rotate()
            if number in (20, 198):
                reader = JournalReader(DIRECTORY, KINDS, storage=storage)
            elif number in (21, 199):
                before = storage.calls["open"]
                reader.refresh()
                opened.append(storage.calls["open"] - before)
                assert [event.number for _, event in reader.events()] == list(range(number + 1))
    assert opened[0] == opened[1] <= 4


@nothing_else_is_refused
@pytest.mark.parametrize("rotations", [1, 3])
def test_a_reader_that_saw_a_zombies_segments_reads_its_successors(rotations: int) -> None:
    """The zombie's segments were on its chain, and the successor has others of the same names."""
    storage = SimStorage()
    storage.enforce_locks = False
    options = JournalOptions(heartbeat_s=1e9)

    def open_writer() -> JournalWriter[Event]:
        return JournalWriter.open(
            DIRECTORY, KINDS, journal_id="run", storage=storage, threaded=False, options=options, take_over=True
        )

    zombie, number = open_writer(), 0
    for _ in range(2):
        zombie.append(Note(number))
        zombie.sync()
        zombie.rotate()
        number += 1
    snapshot = storage.snapshot(DIRECTORY)
    for _ in range(rotations):
        zombie.append(Note(100 + number))
        zombie.sync()
        zombie.rotate()
        number += 1
    reader = JournalReader(DIRECTORY, KINDS, storage=storage)
    assert [event.number for _, event in reader.events()] == [0, 1, *range(102, 102 + rotations)]
    for name in set(storage.snapshot(DIRECTORY)) - set(snapshot):  # between machines, the successor has not seen them
        storage.remove(f"{DIRECTORY}/{name}")
    for name, data in snapshot.items():
        storage.put(f"{DIRECTORY}/{name}", data)
    successor = open_writer()
    for number in range(2, 6):
        successor.append(Note(number))
        successor.sync()
        successor.rotate()
    reader.refresh()
    assert [event.number for _, event in reader.events()] == list(range(6))
    assert reader.segments() == JournalReader(DIRECTORY, KINDS, storage=storage).segments()
