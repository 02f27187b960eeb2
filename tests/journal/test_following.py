"""A reader that lasts, beside writers whose storage fails, who die, prune and are taken over from.

It must never call a healthy journal damaged, never stall, and never give what is not there any more.
"""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.journal.kinds import Event, Note
from tests.journal.lasting import numbers, open_reader, open_writer, write
from tests.journal.matrix import DIRECTORY
from tests.journal.refusals import nothing_else_is_refused
from tests.sim_storage import Fault, SimStorage
from unlost.journal import JournalMissing, JournalReader
from unlost.journal.format import parse_frame_header


class Stop(BaseException):
    """The machine stops inside a call."""


def during(storage: SimStorage, op: str, suffix: str, do: Callable[[], None]) -> None:
    """``do`` inside the next call ``op`` on such a file: what has been written and not synced is visible there."""

    def hook(called: str, path: str) -> None:
        if called == op and path.endswith(suffix):
            storage.hook = None
            do()

    storage.hook = hook


@nothing_else_is_refused
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("how", ["sync fails", "power cut"])
def test_what_was_read_of_a_segment_that_is_begun_anew_is_not_believed(before: int, more: int, how: str) -> None:
    """Events seen in a new segment before it was durable, and then written anew under the same name."""
    storage = SimStorage()
    writer = open_writer(storage, frame_events_max=1)
    write(writer, before)
    writer.rotate()
    reader = open_reader(storage) if before else None
    got: list[int] = []
    name = f"{before:020d}.zst"

    def look() -> None:
        nonlocal reader
        reader = reader or open_reader(storage)
        got.extend(numbers(reader.follow(0, stop=lambda: True, sleep=lambda _: None)))
        assert numbers(reader.events(before + more - 1)) == [before + more - 1]
        raise OSError(errno.EIO, "simulated") if how == "sync fails" else Stop

    during(storage, "sync", name, look)
    for _ in range(more):
        writer.append(Note(writer.next_offset))
    if how == "sync fails":
        writer.pump()
    else:
        with pytest.raises(Stop):
            writer.pump()
        storage.power_cut(random.Random(0), "drop")
        writer = open_writer(storage)
    write(writer, 5)
    assert reader is not None
    end = writer.next_offset
    got.extend(numbers(reader.follow(len(got), stop=lambda: True, sleep=lambda _: None)))
    assert got == numbers(open_reader(storage).events()) == list(range(end))
    for start in range(end):
        assert numbers(reader.events(start)) == list(range(start, end))
        assert reader.get(start) == Note(start)


@nothing_else_is_refused
@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("first", [1, 3])
def test_what_was_read_of_frames_that_are_cut_back_is_not_believed(first: int, refresh: bool) -> None:
    """Whole frames of a write that failed in the middle, and was then written anew in the same file."""
    storage = SimStorage()
    writer = open_writer(storage, frame_events_max=1)
    write(writer, first)
    storage.faults.append(Fault("write", short=94 * 2 + 20, name=".zst"))
    reader = open_reader(storage)

    def look() -> None:
        assert numbers(reader.events()) == list(range(first + 2))
        assert numbers(reader.events(first + 1)) == [first + 1]
        assert reader.get(first + 1) == Note(first + 1)

    during(storage, "truncate", ".zst", look)
    storage.fail("write", errno.EIO, name=".zst")
    for _ in range(4):
        writer.append(Note(writer.next_offset))
    writer.pump()
    write(writer, 3)
    if refresh:
        reader.refresh()
    for start in reversed(range(first + 4)):
        assert numbers(reader.events(start))[: first + 4 - start] == list(range(start, first + 4))
        assert reader.get(start) == Note(start)


@nothing_else_is_refused
@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("how", ["get", "get_many"])
def test_an_event_that_was_replaced_is_not_given_from_memory(refresh: bool, how: str) -> None:
    """It was looked up before it was durable, and lost; another one is there now."""
    storage = SimStorage()
    writer = open_writer(storage)
    write(writer)
    writer.rotate()
    reader = open_reader(storage)

    def look_up() -> Event:
        return reader.get(1) if how == "get" else reader.get_many([1])[1]

    def look() -> None:
        assert look_up() == Note(1)
        raise Stop

    during(storage, "sync", "1.zst", look)
    with pytest.raises(Stop):
        write(writer)
    storage.power_cut(random.Random(0), "drop")
    writer = open_writer(storage)
    write(writer, 3, "another")
    if refresh:
        reader.refresh()
    assert look_up() == Note(1, "another")


@nothing_else_is_refused
@pytest.mark.parametrize("ahead", [1, 3, 15])
@pytest.mark.parametrize("kind", ["zombie", "cut off", "foreign bytes"])
def test_a_follower_goes_on_beside_files_of_higher_names(kind: str, ahead: int) -> None:
    """However far ahead the names are that a zombie wrote, whole or not, in segments that are of no use any more."""
    storage = SimStorage()
    for _ in range(2):
        writer = open_writer(storage)
        write(writer, 5)
        writer.abandon()
        storage.kill_process()
        if writer.next_offset == 5:
            elsewhere = SimStorage.of(DIRECTORY, storage.snapshot(DIRECTORY))
    zombie = open_writer(elsewhere)
    write(zombie, 5 + ahead, "of a zombie")
    zombie.rotate()
    write(zombie, 1, "of a zombie")
    name = f"{10 + ahead:020d}.zst"
    data = elsewhere.content(f"{DIRECTORY}/{name}")
    writer = open_writer(storage, segment_bytes_max=500)
    write(writer)
    storage.put(f"{DIRECTORY}/{name}", {"zombie": data, "cut off": data[:100], "foreign bytes": b"?"}[kind])
    polls = 0

    def sleep(_: float) -> None:
        nonlocal polls
        polls += 1
        assert len(got) == writer.next_offset
        write(writer)

    got: list[int] = []
    for offset, event in open_reader(storage).follow(0, stop=lambda: polls > 20, sleep=sleep):
        assert event == Note(offset)
        got.append(offset)
    assert len(got) > 30


@nothing_else_is_refused
@pytest.mark.parametrize("late", ["zeros", "the end of a frame", "the end of a preamble", "a segment"])
def test_a_follower_sees_what_comes_late(late: str) -> None:
    """Bytes that were not there yet at the look before, in a file of the same name, of the same size or another."""
    storage = SimStorage()
    writer = open_writer(storage)
    write(writer, 2)
    early = storage.snapshot(DIRECTORY)
    if late in ("zeros", "the end of a frame"):
        write(writer)
        name, left = f"{0:020d}.zst", 50
    else:
        writer.rotate()
        write(writer)
        name, left = f"{2:020d}.zst", 200
    whole = storage.snapshot(DIRECTORY)
    if late == "a segment":
        early.pop(name, None)
    else:
        early[name] = whole[name][:-left] + (bytes(left) if late == "zeros" else b"")
    if late != "zeros":
        whole["WATERMARK"] = early["WATERMARK"]  # can't be written
    storage = SimStorage.of(DIRECTORY, early)
    naps = 0

    def sleep(_: float) -> None:
        nonlocal naps
        naps += 1
        assert len(got) == (2 if naps < 4 else 3)
        for changed in whole if naps == 3 else ():
            storage.put(f"{DIRECTORY}/{changed}", whole[changed])

    got: list[int] = []
    for offset, _ in open_reader(storage).follow(0, stop=lambda: naps == 6, sleep=sleep):
        got.append(offset)
    assert got == [0, 1, 2]


@pytest.mark.parametrize("segments", [2, 100])
def test_a_poll_that_finds_nothing_new_opens_no_segment_but_the_newest(segments: int) -> None:
    """A follower that waits costs the same beside a long history, but for the listing."""
    storage = SimStorage()
    writer = open_writer(storage)
    for _ in range(segments):
        write(writer)
        writer.rotate()
    opened: list[int] = []

    def sleep(_: float) -> None:
        opened.append(storage.calls["open"])

    reader = open_reader(storage)
    assert len(numbers(reader.follow(0, stop=lambda: len(opened) == 6, sleep=sleep))) == segments
    assert [after - before for before, after in itertools.pairwise(opened[1:])] == [2] * 4


@nothing_else_is_refused
@pytest.mark.parametrize("tail", ["a frame", "half a frame"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_segment_that_is_the_newest_again_has_no_end_named(tail: str, more: int) -> None:
    """Its successor was never durable and is gone: what the successor left out belongs to the journal, or was cut."""
    storage = SimStorage()
    writer = open_writer(storage)
    write(writer)
    writer.rotate()
    write(writer)
    if tail == "a frame":
        storage.fail("sync", errno.EIO, name="1.zst")
    else:
        storage.faults.append(Fault("write", short=50, name="1.zst"))
        storage.fail("write", errno.EIO, name="1.zst")
    storage.fail("truncate", errno.EIO, times=2, name="1.zst")
    write(writer)  # is in the file after the end that will be named, and never durable there
    storage.faults.clear()
    readers: list[JournalReader[Event]] = []

    def look() -> None:
        readers.append(open_reader(storage))
        assert [s.named_bytes is None for s in readers[0].segments()] == [False, False, True]
        raise OSError(errno.EIO, "simulated")

    during(storage, "sync", "2.zst", look)
    writer.pump()
    storage.kill_process()
    (reader,) = readers
    iterating = reader.events()
    assert next(iterating)[0] == 0
    writer = open_writer(storage)
    assert writer.next_offset == (3 if tail == "a frame" else 2)
    write(writer, more)
    reader.refresh()
    assert reader.segments() == open_reader(storage).segments()
    everything = list(range(writer.next_offset))
    found = numbers(iterating)
    assert found
    assert found == everything[1 : 1 + len(found)]  # to the end that its own look had, or further
    assert numbers(reader.events()) == numbers(open_reader(storage).events()) == everything
    write(writer)
    reader.refresh()
    assert numbers(reader.events()) == [*everything, len(everything)]


@nothing_else_is_refused
@pytest.mark.parametrize("prune", [0, 1, 3, 6])
@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize("how", ["end_offset", "refresh", "get"])
def test_a_reader_looks_anew_in_the_middle_of_its_own_iteration(prune: int, at: int, how: str) -> None:
    """Segments come and go meanwhile: the iteration goes on where it was, or says that its place was pruned."""
    storage = SimStorage()
    writer = open_writer(storage)
    for _ in range(8):
        write(writer)
        writer.rotate()
    reader = open_reader(storage)
    got: list[int] = []
    try:
        for offset, _ in reader.events():
            got.append(offset)
            if offset == at:
                write(writer)
                writer.prune(prune)
                if how == "get":
                    assert reader.get(8) == Note(8)
                else:
                    assert how == "refresh" or reader.end_offset == 9
                    reader.refresh()
    except JournalMissing as error:
        assert at + 1 < prune
        assert f"event {at + 1} is below the floor {prune}" in str(error)
        assert got == list(range(at + 1))
    else:
        assert at + 1 >= prune
        assert got == list(range(8))


@nothing_else_is_refused
@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize("how", ["follow", "events", "get", "end_offset", "offset_at"])
def test_a_segment_that_its_writer_takes_back_is_not_called_pruned(call: int, how: str) -> None:
    """It never held anything durable, and goes between a reader's look and its opening the file."""
    storage = SimStorage()
    writer = open_writer(storage)
    write(writer, 3)
    writer.rotate()
    storage.fail("sync", errno.EIO, name="3.zst")
    storage.fail("truncate", errno.EIO, name="3.zst")
    write(writer)
    left = call

    def hook(op: str, path: str) -> None:
        nonlocal left
        if op == "open" and path.endswith("3.zst"):
            left -= 1
            if left == 0:
                storage.hook = None
                storage.delete(f"{DIRECTORY}/{3:020d}.zst")

    storage.hook = hook
    reader = open_reader(storage)
    if how == "follow":
        found = numbers(reader.follow(0, stop=lambda: True, sleep=lambda _: None))
    elif how == "events":
        found = numbers(reader.events())
    elif how == "get":
        with pytest.raises(JournalMissing, match=r"no event 4: the journal holds 0 to [23]"):
            reader.get(4)
        found = [0, 1, 2]
    elif how == "end_offset":
        found = list(range(reader.end_offset))
    else:
        assert reader.offset_at(2**62) in (2, 3)
        found = [0, 1, 2]
    assert found in ([0, 1, 2], [0, 1, 2, 3])


@nothing_else_is_refused
@pytest.mark.parametrize("how", ["new", "refresh", "follow"])
@pytest.mark.parametrize("call", range(1, 6))
def test_all_that_was_listed_is_pruned_before_it_is_opened(how: str, call: int) -> None:
    """And what is kept was begun after the listing: that is no journal of which everything is missing."""
    storage = SimStorage()
    writer = open_writer(storage)
    write(writer, 2)
    reader = open_reader(storage)
    left = call

    def hook(op: str, path: str) -> None:
        nonlocal left
        if op == "open" and path.endswith("0.zst"):
            left -= 1
            if left == 0:
                storage.hook = None
                writer.rotate()
                write(writer, 2)
                assert writer.prune(2).floor == 2

    storage.hook = hook
    if how == "new":
        reader = open_reader(storage)
    elif how == "refresh":
        reader.refresh()
    found = numbers(reader.events() if how != "follow" else reader.follow(0, stop=lambda: True))
    assert found in ([0, 1], [2, 3], [0, 1, 2, 3])


def test_what_was_pruned_needs_no_sync() -> None:
    """A reader that lasts keeps no list of segments that are gone, and syncs those that are there."""
    storage = SimStorage()
    writer = open_writer(storage)
    reader = open_reader(storage)
    synced: list[int] = []
    for number in range(60):
        write(writer)
        writer.rotate()
        assert numbers(reader.follow(number, stop=lambda: True, sleep=lambda _: None)) == [number]
        if number % 10 == 9:
            writer.prune(number - 3)
            before = storage.calls["sync"]
            reader.sync_read()
            synced.append(storage.calls["sync"] - before)
    assert max(synced) <= 4, synced


def test_what_was_read_and_is_gone_without_being_pruned_is_told() -> None:
    """A segment that its writer took back: nothing makes what was read in it durable."""
    storage = SimStorage()
    writer = open_writer(storage)
    write(writer, 3)
    writer.rotate()
    write(writer)
    reader = open_reader(storage)
    assert numbers(reader.events()) == [0, 1, 2, 3]
    storage.delete(f"{DIRECTORY}/{3:020d}.zst")
    with pytest.raises(JournalMissing, match=r"3\.zst: gone, and not pruned"):
        reader.sync_read()


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("how", ["get", "end_offset", "follow"])
def test_what_a_look_costs_goes_with_what_is_new(how: str, stated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames looked at for the newest event, after a hundred frames and after thousands in one segment; with a
    WATERMARK or without."""
    parsed = 0

    def counted(data: bytes, where: str) -> Any:
        nonlocal parsed
        parsed += 1
        return parse_frame_header(data, where)

    monkeypatch.setattr("unlost.journal.scan.parse_frame_header", counted)
    storage = SimStorage()
    writer = open_writer(storage)
    write(writer, 100)
    reader = open_reader(storage)
    most: list[int] = []
    for _ in range(3):
        write(writer, 800)
        if not stated:
            storage.delete(f"{DIRECTORY}/WATERMARK")
        for again in range(20):
            write(writer, 2)
            before = parsed
            end = writer.next_offset
            if how == "get":
                assert reader.get(end - 1) == Note(end - 1)
            elif how == "end_offset":
                assert reader.end_offset == end
            else:
                assert numbers(reader.follow(end - 1, stop=lambda: True, sleep=lambda _: None)) == [end - 1]
            if again:
                most.append(parsed - before)
    assert max(most) < 120, most
