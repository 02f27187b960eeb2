"""The journal on the real file system: threads, forks, two openers, live readers, and what users see."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.journal import independent_reader as oracle
from tests.journal.kinds import KINDS, Blob, Event, Image, Note
from tests.journal.refusals import nothing_else_is_refused
from tests.sim_storage import Fault, SimStorage
from unlost.journal import (
    JournalError,
    JournalEventRefused,
    JournalForked,
    JournalLocked,
    JournalMissing,
    JournalOptions,
    JournalReader,
    JournalUnsupported,
    JournalWriter,
    prune,
    verify,
)

GOLDEN = Path(__file__).parent / "golden"


def open_writer(directory: Path, **options) -> JournalWriter[Event]:
    return JournalWriter.open(directory, KINDS, journal_id="run", options=JournalOptions(**options))


def numbers(directory: Path) -> list[int]:
    return [event.number for _, event in JournalReader(directory, KINDS).events()]


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for at most four seconds: less than the heartbeat, at which an idle thread wakes by itself."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < 4
        time.sleep(0.005)


def test_a_journal_of_one_event_type_reads_back(tmp_path: Path) -> None:
    """One class instead of a union is enough, and close, reopen and append go on densely."""
    for opening in range(3):
        with JournalWriter.open(tmp_path, Note, journal_id="x") as writer:
            assert writer.incarnation == opening + 1
            assert writer.append(Note(opening)) == opening
    assert [e.number for _, e in JournalReader(tmp_path, Note).events()] == [0, 1, 2]


def test_flushed_waiters_and_drain() -> None:
    """A thousand waiters are told when their event is durable, not before; drain returns below the high mark."""

    async def scenario() -> None:
        storage = SimStorage()
        options = JournalOptions(backlog_high_bytes=20_000)
        writer = JournalWriter.open("/j", KINDS, journal_id="run", storage=storage, options=options)
        gate = threading.Event()
        storage.sleep = lambda _: gate.wait(60) and None
        storage.faults.append(Fault("sync", delay_s=1, times=10_000, name=".zst"))
        offsets = [writer.append(Note(n)) for n in range(1000)]
        assert writer.above_high_mark

        async def wait(offset: int) -> bool:
            await writer.flushed(offset)
            return writer.durable_upto > offset

        waiting = [asyncio.create_task(wait(o)) for o in offsets]
        draining = asyncio.create_task(writer.drain())
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in (*waiting, draining))
        waiting[5].cancel()
        gate.set()
        await draining
        assert not writer.above_high_mark
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(d is True for d in done) == 999
        with pytest.raises(JournalError, match="not appended yet"):
            await writer.flushed(5000)
        writer.close()

    asyncio.run(scenario())


def test_waiters_of_several_loops_and_threads(tmp_path: Path) -> None:
    """Threads append together, each with its own event loop: offsets are dense and every event comes back once."""
    with open_writer(tmp_path) as writer:
        got: list[int] = []

        async def work(name: int) -> None:
            for n in range(200):
                offset = writer.append(Note(name * 1000 + n))
                got.append(offset)
                if n % 50 == 49:
                    await writer.flushed(offset)

        threads = [threading.Thread(target=lambda i=i: asyncio.run(work(i))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(got) == list(range(800))
    assert sorted(numbers(tmp_path)) == sorted(t * 1000 + n for t in range(4) for n in range(200))


def test_an_idle_writer_wakes_for_the_next_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause the flush thread sleeps; the next event is durable within a flush interval or so all the same."""
    monkeypatch.setattr("unlost.journal.writer._IDLE_AFTER_S", 0.05)
    with open_writer(tmp_path, flush_interval_ms=5) as writer:
        wait_until(lambda: writer._idle)
        writer.append(Note(0))
        wait_until(lambda: writer.durable_upto == 1)


@nothing_else_is_refused
def test_rotation_by_size_and_image(tmp_path: Path) -> None:
    """Segments rotate at their size; the newest image is found from preambles; events before it are hopped over."""
    with open_writer(tmp_path, segment_bytes_max=4000, compression_level=1) as writer:
        for n in range(40):
            writer.append(Blob(n, os.urandom(300)))
            writer.sync()
        image = writer.rotate(Image(40, {"live": 1}))
        writer.append(Note(41))
    reader = JournalReader(tmp_path, KINDS)
    assert len(reader.segments()) > 4
    assert reader.last_image() == image == 40
    assert reader.last_image(before=39) is None
    assert [e.number for _, e in reader.events(image)] == [40, 41]
    assert [o for o, _ in reader.events(17, 20)] == [17, 18, 19]
    assert [reader.get(n).number for n in (39, 0, 41, 20)] == [39, 0, 41, 20]
    assert {o: e.number for o, e in reader.get_many([41, 5, 5]).items()} == {5: 5, 41: 41}
    with pytest.raises(JournalMissing, match="no event 99"):
        reader.get(99)
    with open_writer(tmp_path) as again:
        assert again.recovery.image_offset == 40
        assert again.recovery.segments_scanned == 1


def test_frames_and_times(tmp_path: Path) -> None:
    """Raw frames carry dense offsets and their msgpack; ``offset_at`` finds where a moment begins."""
    with open_writer(tmp_path) as writer:
        for n in range(5):
            writer.append(Note(n))
            writer.sync()
    reader = JournalReader(tmp_path, KINDS)
    frames = list(reader.frames(2))
    assert [(f.first_offset, f.count) for f in frames] == [(2, 1), (3, 1), (4, 1)]
    assert msgspec.msgpack.decode(frames[0].payload) == [[1, 2, ""]]
    assert reader.offset_at(frames[1].wall_ns) == 3
    assert reader.offset_at(0) == 0
    assert reader.offset_at(frames[-1].wall_ns + 10**9) == 4


@nothing_else_is_refused
def test_large_events_and_split_batches(tmp_path: Path) -> None:
    """A batch beyond a frame's limits becomes several frames, an event beyond them a frame of its own."""
    with open_writer(tmp_path, frame_bytes_max=1000, frame_events_max=7) as writer:
        for n in range(30):
            writer.append(Note(n))
        writer.append(Blob(30, bytes(5000)))
        for n in range(31, 40):
            writer.append(Blob(n, os.urandom(400)))
    counts = [f.count for f in JournalReader(tmp_path, KINDS).frames()]
    assert counts == [7, 7, 7, 7, 2, 1, 2, 2, 2, 2, 1]
    assert numbers(tmp_path) == list(range(40))


def test_events_of_other_types_are_refused(tmp_path: Path) -> None:
    """What could not be read back is refused at the call, and uses no offset."""

    class Foreign(msgspec.Struct, array_like=True, tag=99):
        x: int

    with open_writer(tmp_path, check_events=True) as writer:
        with pytest.raises(JournalEventRefused, match="Foreign"):
            writer.append(Foreign(1))  # type: ignore[arg-type]
        with pytest.raises(JournalEventRefused, match="would not read back"):
            writer.append(Note("not a number"))  # type: ignore[arg-type]
        assert writer.append(Note(1)) == 0


def test_a_pruned_journal_and_its_reader(tmp_path: Path) -> None:
    """Below the floor is JournalMissing; a dry run removes nothing; the floor survives reopening."""
    with open_writer(tmp_path) as writer:
        for n in range(6):
            writer.append(Note(n))
            writer.rotate()
            writer.sync()
    assert prune(tmp_path, 3).removed == [f"{n:020d}.zst" for n in range(3)]
    assert numbers(tmp_path) == [0, 1, 2, 3, 4, 5]
    prune(tmp_path, 3, dry_run=False)
    reader = JournalReader(tmp_path, KINDS)
    assert reader.first_offset == 3
    assert [e.number for _, e in reader.events()] == [3, 4, 5]
    with pytest.raises(JournalMissing, match="below the floor"):
        list(reader.events(1))
    with pytest.raises(JournalMissing):
        reader.get(1)
    with pytest.raises(JournalError, match="the journal ends at event 6"):
        prune(tmp_path, 100)
    assert oracle.read(tmp_path)[1:] == (3, "clean")


def test_no_journal_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    """Reading, verifying and pruning a directory that is not there say so and create nothing."""
    for act in (
        lambda: JournalReader(tmp_path / "no", KINDS),
        lambda: verify(tmp_path / "no"),
        lambda: prune(tmp_path / "no", 1),
    ):
        with pytest.raises(JournalMissing, match="no journal here"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_following_a_live_journal(tmp_path: Path) -> None:
    """A reader beside the writer sees every event once, in order, through rotations, without touching the lock."""
    writer = open_writer(tmp_path, segment_bytes_max=2000, flush_interval_ms=2)
    finished = threading.Event()
    seen: list[int] = []

    def follow() -> None:
        reader = JournalReader(tmp_path, KINDS)
        seen.extend(event.number for _, event in reader.follow(0, poll_s=0.002, stop=finished.is_set))

    thread = threading.Thread(target=follow)
    thread.start()
    for n in range(2000):
        writer.append(Note(n, "x" * (n % 50)))
        if n % 500 == 499:
            writer.rotate()
        if n % 100 == 0:
            time.sleep(0.003)
    writer.close()
    finished.set()
    thread.join(20)
    assert seen == list(range(2000))
    assert len(JournalReader(tmp_path, KINDS).segments()) > 2


def test_short_reads_change_nothing(tmp_path: Path) -> None:
    """With every read cut to one byte the reader returns the same."""
    storage = SimStorage()
    with JournalWriter.open("/j", KINDS, journal_id="r", storage=storage, threaded=False) as writer:
        for n in range(5):
            writer.append(Note(n))
            writer.pump()
    storage.read_limit = 1
    assert [e.number for _, e in JournalReader("/j", KINDS, storage=storage).events()] == [0, 1, 2, 3, 4]
    assert verify("/j", storage).state == "clean"


def test_a_forked_child_can_neither_append_nor_hold_the_lock(tmp_path: Path) -> None:
    """In a forked child append raises; when the parent closes, another opener gets the lock though the child lives."""
    writer = open_writer(tmp_path)
    writer.append(Note(0))
    ready, go = os.pipe()
    answer_read, answer_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            writer.append(Note(1))
            os.write(answer_write, b"appended")
        except JournalForked:
            os.write(answer_write, b"forked")
        finally:
            os.read(ready, 1)
            os._exit(0)
    try:
        assert os.read(answer_read, 20) == b"forked"
        writer.append(Note(1))
        writer.close()
        with open_writer(tmp_path) as second:
            assert second.append(Note(2)) == 2
    finally:
        os.write(go, b"x")
        os.waitpid(pid, 0)
    assert numbers(tmp_path) == [0, 1, 2]


def test_the_second_opener_is_told_who_holds_it(tmp_path: Path) -> None:
    """A living holder on this machine is named and never taken over; reading goes on beside it."""
    script = (
        "import sys; from unlost.journal import JournalWriter; from tests.journal.kinds import KINDS, Note\n"
        "w = JournalWriter.open(sys.argv[1], KINDS, journal_id='run'); w.append(Note(0)); w.sync()\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, os.fspath(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for take_over in (False, True):
            with pytest.raises(JournalLocked, match=f"process {child.pid} on "):
                JournalWriter.open(tmp_path, KINDS, journal_id="run", take_over=take_over)
        assert numbers(tmp_path) == [0]
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        with open_writer(tmp_path) as writer:
            assert writer.next_offset == 1
            assert writer.incarnation == 2
    finally:
        child.kill()
        child.communicate()


def test_what_is_queued_at_exit_is_written(tmp_path: Path) -> None:
    """A program that forgets ``close`` loses nothing at a normal exit."""
    script = (
        "import sys; from unlost.journal import JournalWriter; from tests.journal.kinds import KINDS, Note\n"
        "w = JournalWriter.open(sys.argv[1], KINDS, journal_id='run')\n"
        "for n in range(10): w.append(Note(n))\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, cwd=Path(__file__).parents[2], timeout=60)
    assert numbers(tmp_path) == list(range(10))


def test_the_standard_tool_decodes_a_segment(tmp_path: Path) -> None:
    """``zstd -dc`` prints a segment's events as msgpack arrays."""
    with open_writer(tmp_path) as writer:
        for n in range(3):
            writer.append(Note(n))
            writer.sync()
    try:
        plain = subprocess.run(
            ["zstd", "-dc", tmp_path / f"{0:020d}.zst"], capture_output=True, check=True, timeout=60
        ).stdout
    except FileNotFoundError:
        pytest.skip("zstd is not installed")
    assert plain == b"".join(msgspec.msgpack.encode([Note(n)]) for n in range(3))


def test_golden_segment_of_version_1() -> None:
    """A journal written by the first format-1 writer reads the same for ever, by both readers."""
    want = msgspec.json.decode((GOLDEN / "v1" / "events.json").read_bytes())
    events = [msgspec.to_builtins(e) for _, e in JournalReader(GOLDEN / "v1", KINDS).events()]
    assert msgspec.json.decode(msgspec.json.encode(events)) == want
    assert verify(GOLDEN / "v1").state == "clean"
    plain = [msgspec.msgpack.decode(msgspec.msgpack.encode(e)) for _, e in JournalReader(GOLDEN / "v1", KINDS).events()]
    assert oracle.read(GOLDEN / "v1") == (plain, 0, "clean")


@pytest.mark.parametrize(("byte", "value"), [(12, 2), (20, 1)])
def test_other_versions_and_features_are_refused_by_name(tmp_path: Path, byte: int, value: int) -> None:
    """An intact preamble of another version, or with an unknown incompatible feature, is refused, never misread."""
    import zlib

    with open_writer(tmp_path) as writer:
        writer.append(Note(0))
    path = tmp_path / f"{0:020d}.zst"
    data = bytearray(path.read_bytes())
    data[byte] = value
    data[192:196] = zlib.crc32(data[:192]).to_bytes(4, "little")
    path.write_bytes(data)
    for act in (
        lambda: JournalReader(tmp_path, KINDS),
        lambda: verify(tmp_path),
        lambda: open_writer(tmp_path),
    ):
        with pytest.raises(JournalUnsupported, match=r"format 2|features 0x1"):
            act()


def _hammer(directory: str) -> None:
    writers = [JournalWriter.open(f"{directory}/{n}", KINDS, journal_id=str(n)) for n in range(4)]
    data = os.urandom(1 << 14)

    def work(writer: JournalWriter[Event]) -> None:
        for n in range(300):
            writer.append(Blob(n, data))
            writer.pump()

    threads = [threading.Thread(target=work, args=(w,)) for w in writers for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()


@pytest.mark.slow
def test_compressors_under_many_threads(tmp_path: Path) -> None:
    """Eight threads pump four journals beside their flush threads: no crash of the process, nothing lost."""
    process = multiprocessing.get_context("spawn").Process(target=_hammer, args=(os.fspath(tmp_path),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    for n in range(4):
        assert verify(tmp_path / str(n)).events == 600


@pytest.mark.slow
def test_readers_beside_a_busy_writer_never_cry_damage(tmp_path: Path) -> None:
    """Fresh readers beside a writer that rotates and prunes all the time: no false damage, nothing durable missing."""
    writer = open_writer(tmp_path, segment_bytes_max=600, flush_interval_ms=0.5)
    stop = threading.Event()
    problems: list[BaseException] = []
    looks = [0]

    def read() -> None:
        while not stop.is_set():
            durable = writer.durable_upto
            try:
                reader = JournalReader(tmp_path, KINDS)
                found = [(offset, event.number) for offset, event in reader.events()]
                assert all(offset == number for offset, number in found)
                assert not found or found[-1][0] + 1 >= durable
                assert [o for o, _ in found] == list(range(found[0][0], found[-1][0] + 1)) if found else True
                looks[0] += 1
            except JournalMissing:
                continue  # pruned between two looks: said by name
            except BaseException as error:
                problems.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    number = 0
    while time.monotonic() - begin < 6 and not problems:
        writer.append(Note(number, "x" * (number % 40)))
        number += 1
        if number % 20 == 0:
            time.sleep(0.001)
        if number % 500 == 0:
            writer.prune(writer.durable_upto - 400)
    stop.set()
    for thread in threads:
        thread.join(30)
    writer.close()
    assert problems == []
    assert looks[0] > 5
