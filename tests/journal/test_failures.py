"""The failure rules of docs/DURABILITY.md on the simulated storage: each call fails in turn, nothing durable goes."""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
import threading
import time

import pytest

from tests.journal.forged import of_a_later_version
from tests.journal.kinds import KINDS, Event, Note
from tests.journal.refusals import nothing_else_is_refused
from tests.sim_storage import Fault, SimCrash, SimStorage
from unlost.journal import (
    JournalClosed,
    JournalDamaged,
    JournalFailed,
    JournalFenced,
    JournalLocked,
    JournalMismatch,
    JournalOptions,
    JournalOverrun,
    JournalReader,
    JournalTimeout,
    JournalWriter,
    RecoveryReport,
    prune,
    repair,
    verify,
)

DIRECTORY = "/j"


def open_writer(storage: SimStorage, **options) -> JournalWriter[Event]:
    threaded = options.pop("threaded", False)
    take_over = options.pop("take_over", False)
    return JournalWriter.open(
        DIRECTORY,
        KINDS,
        journal_id="run",
        storage=storage,
        threaded=threaded,
        take_over=take_over,
        options=JournalOptions(**options),
    )


def numbers(storage: SimStorage) -> list[int]:
    return [event.number for _, event in JournalReader(DIRECTORY, KINDS, storage=storage).events()]


@pytest.mark.parametrize("op", ["create", "write", "sync", "sync_directory"])
@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("then", ["kill", "drop", "tear", "keep"])
def test_one_failed_call_loses_nothing(op: str, when: str, then: str) -> None:
    """A single EIO in any call of a flush: the next flush makes everything durable, whatever crash follows."""
    storage = SimStorage()
    writer = open_writer(storage)
    if when == "later":
        for number in range(3):
            writer.append(Note(number))
            writer.sync()
    start = writer.next_offset
    writer.append(Note(start))
    writer.append(Note(start + 1))
    writer.rotate()
    writer.append(Note(start + 2))
    storage.fail(op, errno.EIO, name=".zst" if op != "sync_directory" else "", skip=0)
    writer.pump()
    assert writer.metrics().write_failures == 1
    assert writer.durable_upto < start + 3
    writer.pump()
    assert writer.durable_upto == start + 3
    crash(storage, then)
    assert numbers(storage) == list(range(start + 3))
    assert verify(DIRECTORY, storage).state == "clean"
    with open_writer(storage) as again:
        assert again.append(Note(start + 3)) == start + 3
    assert numbers(storage) == list(range(start + 4))


def crash(storage: SimStorage, then: str, seed: int = 1) -> None:
    if then == "kill":
        storage.kill_process()
    else:
        storage.power_cut(random.Random(seed), then)


@pytest.mark.parametrize("seed", range(20))
def test_a_failed_sync_is_never_synced_again(seed: int) -> None:
    """After a failed fdatasync the frames go to a new segment that names the durable end of the one left behind."""
    storage = SimStorage()
    writer = open_writer(storage)
    writer.append(Note(0))
    writer.sync()
    writer.append(Note(1))
    storage.fail("sync", errno.EIO, name=".zst")
    storage.fail("truncate", errno.EIO, name=".zst")
    writer.pump()
    writer.append(Note(2))
    writer.sync()
    assert len([n for n in storage.list_names(DIRECTORY) if n.endswith(".zst")]) == 2
    storage.power_cut(random.Random(seed), "tear")
    assert numbers(storage) == [0, 1, 2]


def test_a_short_write_goes_on() -> None:
    """A write that takes only some bytes is continued, not repeated."""
    storage = SimStorage()
    writer = open_writer(storage)
    storage.faults.append(Fault("write", short=5, times=3, name=".zst"))
    writer.append(Note(0, "x" * 100))
    assert writer.sync() == 1
    writer.close()
    assert numbers(storage) == [0]


@pytest.mark.parametrize("cut_back", [True, False])
def test_a_partly_written_frame_is_cut_back_or_left(cut_back: bool) -> None:
    """ENOSPC after half a frame: the half is cut off, or the segment is left where it was durable."""
    storage = SimStorage()
    writer = open_writer(storage)
    writer.append(Note(0))
    writer.sync()
    storage.faults.append(Fault("write", short=10, name=".zst"))
    storage.fail("write", errno.ENOSPC, name=".zst")
    if not cut_back:
        storage.fail("truncate", errno.EIO, name=".zst")
    writer.append(Note(1))
    writer.pump()
    writer.append(Note(2))
    writer.sync()
    segments = [n for n in storage.list_names(DIRECTORY) if n.endswith(".zst")]
    assert len(segments) == (1 if cut_back else 2)
    storage.kill_process()
    assert numbers(storage) == [0, 1, 2]


def test_stop_after_failures_in_a_row() -> None:
    """With ``stop``, the third failure in a row ends the journal: waiters and appends get the cause."""

    async def scenario() -> None:
        storage = SimStorage()
        writer = open_writer(storage, max_write_failures=3)
        offset = writer.append(Note(0))
        waiting = asyncio.create_task(writer.flushed(offset))
        await asyncio.sleep(0)
        storage.fail("sync", errno.EIO, times=3, name=".zst")
        for _ in range(2):
            writer.pump()
            await asyncio.sleep(0)
            assert not waiting.done()
        writer.pump()
        with pytest.raises(JournalFailed, match="3 times in a row") as caught:
            await waiting
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(JournalFailed):
            writer.append(Note(1))
        with pytest.raises(JournalFailed):
            await writer.flushed(offset)
        assert writer.metrics().failed
        with pytest.raises(JournalFailed):
            writer.close()
        writer.close()
        storage.kill_process()
        assert numbers(storage) == []

    asyncio.run(scenario())


def test_failures_with_success_between_do_not_add_up() -> None:
    """Only failures in a row count."""
    storage = SimStorage()
    writer = open_writer(storage, max_write_failures=2)
    for number in range(5):
        writer.append(Note(number))
        storage.fail("write", errno.EIO, name=".zst")
        writer.pump()
        writer.pump()
    assert writer.metrics().write_failures == 5
    assert writer.durable_upto == 5
    writer.close()


def test_degrade_keeps_events_until_the_bound(caplog) -> None:
    """With ``degrade`` events stay in memory, loudly; the bound refuses; when the storage is back, all is durable."""
    storage = SimStorage()
    writer = open_writer(
        storage, max_write_failures=1, on_failure="degrade", backlog_high_bytes=200, backlog_max_bytes=1000
    )
    storage.fail("sync", errno.EIO, times=4, name=".zst")
    writer.append(Note(0))
    writer.pump()
    assert writer.metrics().degraded
    assert "DEGRADED" in caplog.text
    for _ in range(1000):
        try:
            writer.append(Note(writer.next_offset))
        except JournalOverrun as error:
            refusal = str(error)
            break
    assert "Input/output error" in refusal
    queued = writer.next_offset
    assert writer.above_high_mark
    for _ in range(4):
        writer.pump()
    assert not writer.metrics().degraded
    assert writer.durable_upto == queued
    assert writer.append(Note(queued)) == queued
    writer.close()
    assert numbers(storage) == list(range(queued + 1))


def test_sync_without_a_thread_gives_up_in_time() -> None:
    """``sync`` in a degraded, unthreaded journal does not loop for ever."""
    storage = SimStorage()
    writer = open_writer(storage, max_write_failures=2, on_failure="degrade")
    storage.fail("write", errno.ENOSPC, times=50, name=".zst")
    writer.append(Note(0))
    with pytest.raises(JournalTimeout, match="No space left"):
        writer.sync()
    writer.abandon()


def test_a_broken_watermark_is_no_failure(caplog) -> None:
    """WATERMARK that can't be written costs precision only; one that can't be synced is replaced durably."""
    storage = SimStorage()
    writer = open_writer(storage)
    storage.fail("write", errno.EIO, name="WATERMARK")
    writer.append(Note(0))
    assert writer.sync() == 1
    assert writer.metrics().watermark_failures == 1
    storage.fail("sync", errno.EIO, name="WATERMARK")
    writer.append(Note(1))
    writer.sync_watermark()
    storage.power_cut(random.Random(1), "drop")
    reader = JournalReader(DIRECTORY, KINDS, storage=storage)
    assert reader.watermark == 2
    assert [offset for offset, _ in reader.events()] == [0, 1]


def test_a_synced_watermark_turns_loss_into_damage() -> None:
    """After ``sync_watermark`` a power cut plus a damaged last frame is refused; without it, it is cut silently."""
    results = []
    for synced in (False, True):
        storage = SimStorage()
        writer = open_writer(storage)
        writer.append(Note(0))
        writer.sync()
        writer.append(Note(1))
        writer.sync()
        if synced:
            writer.sync_watermark()
        storage.power_cut(random.Random(1), "drop")
        name = next(n for n in storage.list_names(DIRECTORY) if n.endswith(".zst"))
        data = storage.content(f"{DIRECTORY}/{name}")
        storage.put(f"{DIRECTORY}/{name}", data[:-1])
        try:
            results.append(numbers(storage))
        except JournalDamaged:
            results.append("refused")
    assert results == [[0], "refused"]


def torn_storage() -> SimStorage:
    storage = SimStorage()
    writer = open_writer(storage)
    for number in range(4):
        writer.append(Note(number))
        writer.sync()
    writer.rotate()
    writer.append(Note(4))
    writer.sync()
    writer.abandon()
    storage.kill_process()
    name = f"{DIRECTORY}/{4:020d}.zst"
    storage.put(name, storage.content(name) + b"torn" * 40)
    storage.put(f"{DIRECTORY}/{5:020d}.zst", b"headless")
    return storage


@pytest.mark.parametrize("then", ["kill", "drop", "tear", "keep"])
@nothing_else_is_refused
def test_a_second_crash_at_each_step_of_recovery(then: str) -> None:
    """Opening killed at each of its storage calls in turn; the next opening finds every acknowledged event."""
    number = 0
    while True:
        number += 1
        storage = torn_storage()
        storage.crash_at_call(number)
        try:
            writer = open_writer(storage)
        except SimCrash:
            crash(storage, then, seed=number)
            writer = open_writer(storage)
            assert writer.append(Note(5)) == 5, number
            writer.sync()
            storage.power_cut(random.Random(number), "drop")
            assert numbers(storage) == [0, 1, 2, 3, 4, 5], number
        else:
            break
    assert number > 25, "recovery has more steps than that"
    assert [piece.removed_file for piece in writer.recovery.torn] == [True, False]
    assert all(storage.content(piece.copied_to) in (b"torn" * 40, b"headless") for piece in writer.recovery.torn)


@pytest.mark.parametrize("op", ["read", "open", "list", "size"])
@nothing_else_is_refused
def test_a_read_error_is_neither_damage_nor_a_tail(op: str) -> None:
    """EIO while opening or reading is raised as it is, at each call in turn, and nothing is changed."""
    skip = 0
    while True:
        storage = torn_storage()
        before = storage.snapshot(DIRECTORY)
        storage.fail(op, errno.EIO, skip=skip)
        try:
            list(JournalReader(DIRECTORY, KINDS, storage=storage).events())
        except OSError as error:
            assert error.errno == errno.EIO
            assert storage.snapshot(DIRECTORY) == before
        else:
            break
        skip += 1
    assert skip >= 1


@nothing_else_is_refused
def test_opening_syncs_what_it_read() -> None:
    """Protocol rule 2: events seen only in the page cache are durable once the next opening returns."""
    name = f"{DIRECTORY}/{0:020d}.zst"
    other = SimStorage()
    twin = open_writer(other)
    for number in range(2):
        twin.append(Note(number))
        twin.sync()
    whole = other.content(name)
    fresh = SimStorage()
    first = open_writer(fresh)
    first.append(Note(0))
    first.sync()
    first.abandon()
    file = fresh.open(name, writable=True)
    file.truncate(0)
    file.write_at(0, whole)
    fresh.kill_process()
    again = open_writer(fresh)  # finds the write of a dead process that never reached its sync
    assert again.next_offset == 2
    fresh.power_cut(random.Random(1), "drop")
    assert numbers(fresh) == [0, 1]


def test_a_zombie_is_fenced_and_not_read() -> None:
    """Where the lock does not hold, what an older incarnation still writes is never part of the newer journal."""
    storage = SimStorage()
    storage.enforce_locks = False
    old = open_writer(storage, take_over=True)
    old.append(Note(0))
    old.sync()
    new = open_writer(storage, take_over=True)
    assert new.incarnation == 2
    new.append(Note(1))
    new.sync()
    old.append(Note(100))
    old.append(Note(101))
    old.pump()
    old.rotate()
    old.append(Note(102))
    old.pump()
    for number in range(2, 6):
        new.append(Note(number))
        new.rotate()
        new.sync()
    assert numbers(storage) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(JournalFenced, match="taken over by process"):
        old.check_ownership()
    with pytest.raises(JournalFenced):
        old.append(Note(103))
    new.close()
    third = open_writer(storage, take_over=True)
    assert third.next_offset == 6
    assert third.incarnation == 3


def test_a_zombie_does_not_get_as_far_as_destroying() -> None:
    """What is called before rows, files or checkpoints go finds the newer incarnation, though nothing is pending."""
    storage = SimStorage()
    storage.enforce_locks = False
    old = open_writer(storage, take_over=True)
    old.append(Note(0))
    old.sync_watermark()
    new = open_writer(storage, take_over=True)
    with pytest.raises(JournalFenced, match="taken over by process"):
        old.sync_watermark()
    new.close()


def test_a_zombie_finds_out_at_its_heartbeat() -> None:
    """The old writer stops by itself within a heartbeat after a take-over."""
    storage = SimStorage()
    storage.enforce_locks = False
    old = open_writer(storage, take_over=True, heartbeat_s=1e-6)
    open_writer(storage, take_over=True).abandon()
    old.append(Note(0))
    old.pump()
    with pytest.raises(JournalFenced):
        old.append(Note(1))


def test_the_holder_on_another_machine_is_respected(monkeypatch) -> None:
    """A lock file of another, silent machine is refused by name until take_over; a clean goodbye is no obstacle."""
    import unlost.journal.lock as lock_module

    storage = SimStorage()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lock_module, "boot_id", lambda: "another boot")
        elsewhere.setattr(lock_module, "host_name", lambda: "node-7")
        writer = open_writer(storage)
        writer.append(Note(0))
        writer.sync()
    storage.kill_process()
    with pytest.raises(JournalLocked, match=r"on node-7.*take_over"):
        open_writer(storage)
    second = open_writer(storage, take_over=True)
    assert second.incarnation == 2
    second.close()
    open_writer(storage).close()


def test_another_journals_id_is_refused() -> None:
    """The message names both ids."""
    storage = SimStorage()
    with open_writer(storage) as writer:
        writer.append(Note(0))
    with pytest.raises(JournalMismatch, match="'run', not 'other'"):
        JournalWriter.open(DIRECTORY, KINDS, journal_id="other", storage=storage, threaded=False)


@nothing_else_is_refused
def test_prune_crash_at_each_step() -> None:
    """Pruning killed at each call: the journal always reads from its floor, and the next prune finishes."""
    number = 0
    while True:
        number += 1
        storage = SimStorage()
        writer = open_writer(storage)
        for index in range(6):
            writer.append(Note(index))
            writer.rotate()
            writer.sync()
        writer.close()
        storage.crash_at_call(number)
        try:
            prune(DIRECTORY, 4, storage=storage, dry_run=False)
        except SimCrash:
            storage.power_cut(random.Random(number), "tear")
            reader = JournalReader(DIRECTORY, KINDS, storage=storage)
            assert reader.first_offset in (0, 4)
            assert numbers(storage) == list(range(reader.first_offset, 6)), number
            prune(DIRECTORY, 4, storage=storage, dry_run=False)
            assert numbers(storage) == [4, 5]
        else:
            break
    storage.hook = None
    assert number > 10
    with open_writer(storage) as again:
        assert again.next_offset == 6
        assert again.recovery.floor == 4


def test_prune_beside_the_writer_keeps_its_place() -> None:
    """A writer's own prune keeps the segment of its newest durable event, so the incarnation is never forgotten."""
    storage = SimStorage()
    writer = open_writer(storage)
    for index in range(4):
        writer.append(Note(index))
        writer.rotate()
        writer.sync()
    report = writer.prune(1000)
    assert report.floor == 3
    writer.append(Note(4))
    writer.close()
    assert numbers(storage) == [3, 4]
    with open_writer(storage) as again:
        assert again.incarnation == 2


def test_repair_gives_up_only_what_it_said() -> None:
    """Repair says the loss, copies every byte aside, cuts at the last good event; then the journal opens again."""
    storage = SimStorage()
    writer = open_writer(storage)
    for index in range(8):
        writer.append(Note(index))
        if index % 3 == 2:
            writer.rotate()
        writer.sync()
    writer.close()
    name = f"{DIRECTORY}/{3:020d}.zst"
    data = bytearray(storage.content(name))
    data[-3] ^= 1
    storage.put(name, bytes(data))
    before = storage.snapshot(DIRECTORY)
    plan = repair(DIRECTORY, storage=storage)
    assert (plan.keep_until, plan.events_lost, plan.applied) == (5, 3, False)
    assert {n: d for n, d in storage.snapshot(DIRECTORY).items() if n != "LOCK"} == {
        n: d for n, d in before.items() if n != "LOCK"
    }
    done = repair(DIRECTORY, storage=storage, apply=True)
    assert done.applied
    saved = {path: storage.content(path) for path in done.copied}
    assert before[f"{6:020d}.zst"] in saved.values()
    assert numbers(storage) == [0, 1, 2, 3, 4]
    with open_writer(storage) as again:
        assert again.append(Note(5)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.2, 1.0])
def test_slow_syncs_are_shown_not_felt(delay_s: float) -> None:
    """With syncs of fractions of a second appends stay fast, the interval adapts and the shown loss window is true."""
    storage = SimStorage()
    writer = open_writer(storage, threaded=True, flush_interval_ms=5)
    storage.faults.append(Fault("sync", delay_s=delay_s, times=1000, name=".zst"))
    took: list[float] = []
    begin = time.monotonic()
    oldest: dict[int, float] = {}
    while time.monotonic() - begin < 4 * delay_s:
        started = time.perf_counter()
        offset = writer.append(Note(0))
        took.append(time.perf_counter() - started)
        oldest[offset] = time.monotonic()
        time.sleep(0.001)
        now = time.monotonic()
        metrics = writer.metrics()
        if metrics.durable_upto <= offset:
            age = now - oldest[metrics.durable_upto]
            assert metrics.durable_lag_seconds >= age
            assert metrics.loss_window_seconds >= age
    assert sorted(took)[len(took) * 99 // 100] < delay_s / 10
    assert writer.metrics().flush_interval_ms_effective > 5
    storage.faults.clear()
    writer.close()


def test_the_thread_survives_and_reports_a_bug(monkeypatch) -> None:
    """An unexpected error in the flush thread fails the journal with its cause instead of hanging its waiters."""
    storage = SimStorage()
    writer = open_writer(storage, threaded=True)
    monkeypatch.setattr(writer._flusher, "_gather", lambda: 1 / 0)
    writer.append(Note(0))
    with pytest.raises(JournalFailed, match="ZeroDivisionError"):
        writer.sync(5)
    with pytest.raises(JournalFailed):
        writer.close()
    assert not any(t.name.startswith("journal-flush") and t is writer._thread for t in threading.enumerate())


def test_closed_means_closed() -> None:
    """After close appends raise JournalClosed and the report of the next opening is clean."""
    storage = SimStorage()
    writer = open_writer(storage)
    writer.append(Note(0))
    writer.close()
    with pytest.raises(JournalClosed):
        writer.append(Note(1))
    with pytest.raises(JournalClosed):
        writer.rotate()
    report: RecoveryReport = open_writer(storage).recovery
    assert (report.next_offset, report.torn, report.watermark_source) == (1, [], "WATERMARK")


@pytest.mark.parametrize("op", ["sync", "sync_directory"])
def test_the_watermark_is_never_ahead_of_the_disk(op: str) -> None:
    """When the sync of an event fails, WATERMARK does not cover it: after the power cut it is no damage."""
    storage = SimStorage()
    writer = open_writer(storage)
    if op == "sync":
        writer.append(Note(0))
        writer.sync()
    start = writer.next_offset
    writer.append(Note(start))
    storage.fail(op, errno.EIO, name=".zst" if op == "sync" else "")
    writer.pump()
    storage.kill_process()
    reader = JournalReader(DIRECTORY, KINDS, storage=storage)
    assert reader.watermark == start
    assert [offset for offset, _ in reader.events()] == list(range(start))


@pytest.mark.parametrize("longer", [0, 8, 3900])
def test_what_a_later_version_left_in_the_way_is_not_put_aside(longer: int) -> None:
    """A segment of a newer release under the name that a writer needs: it stops by name, and touches nothing."""
    storage = SimStorage()
    writer = open_writer(storage)
    writer.append(Note(0))
    writer.sync()
    name = f"{DIRECTORY}/{0:020d}.zst"
    in_the_way = of_a_later_version(storage.content(name), longer, -1)
    writer.rotate()
    writer.append(Note(1))
    storage.put(f"{DIRECTORY}/{1:020d}.zst", in_the_way)
    with pytest.raises(JournalFenced, match="in the way of incarnation 1"):
        writer.sync()
    assert storage.content(f"{DIRECTORY}/{1:020d}.zst") == in_the_way
    assert not any("zombie" in name for name in storage.list_names(DIRECTORY))


def test_those_who_wait_for_durability_do_not_shorten_the_time_after_a_failure() -> None:
    """However many call ``sync``: a short outage is waited out, not met so often that it ends the journal."""
    storage = SimStorage()
    writer = open_writer(storage, threaded=True, failure_backoff_ms=150, failure_backoff_ms_max=150)
    tries: list[float] = []
    storage.hook = lambda op, path: tries.append(time.monotonic()) if op == "sync" and path.endswith(".zst") else None
    storage.fail("sync", errno.EIO, name=".zst", times=2)
    writer.append(Note(0))
    waiting = [threading.Thread(target=writer.sync, args=(10,)) for _ in range(4)]
    for thread in waiting:
        thread.start()
        time.sleep(0.02)
    for thread in waiting:
        thread.join(10)
    assert writer.durable_upto == 1
    assert len(tries) == 3
    assert min(after - before for before, after in itertools.pairwise(tries)) > 0.14
    writer.close()


class ManualClock:
    """Time that moves only when a simulated call takes some."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("sync_s", [0.2, 10.0, 60.0])
def test_the_shown_loss_window_is_true_on_slow_storage(sync_s: float) -> None:
    """With syncs of up to a minute, no event is ever older than the window shown, and memory stays bounded."""
    storage, clock = SimStorage(), ManualClock()
    options = JournalOptions(backlog_high_bytes=20_000, backlog_max_bytes=50_000)
    writer = JournalWriter.open(
        DIRECTORY, KINDS, journal_id="run", storage=storage, threaded=False, options=options, clock=clock
    )
    appended: list[float] = []
    refused = 0

    def look() -> None:
        metrics = writer.metrics()
        if metrics.durable_upto < len(appended):
            age = clock.now - appended[metrics.durable_upto]
            assert metrics.durable_lag_seconds >= age - 1e-6
            assert metrics.loss_window_seconds >= age - 1e-6
        assert metrics.backlog_bytes <= 50_000

    def slow(seconds: float) -> None:
        nonlocal refused
        for _ in range(100):
            clock.sleep(seconds / 100)
            try:
                assert writer.append(Note(len(appended))) == len(appended)
                appended.append(clock.now)
            except JournalOverrun:
                refused += 1
            look()

    storage.sleep = slow
    storage.faults.append(Fault("sync", delay_s=sync_s, times=10_000, name=".zst"))
    writer.append(Note(0))
    appended.append(clock.now)
    for _ in range(20):
        clock.sleep(writer._flusher.delay_s())
        look()
        writer.pump()
        look()
    assert writer.metrics().loss_window_seconds >= 2 * sync_s
    assert writer.metrics().flush_interval_ms_effective == pytest.approx(min(1000, max(20, sync_s * 1000)), rel=0.3)
    assert refused == 0
    storage.faults.clear()
    writer.close()
    assert numbers(storage) == list(range(len(appended)))


def test_close_does_not_wait_for_a_hanging_disk(caplog) -> None:
    """With a time-out, close comes back though a sync hangs; the lock stays until the sync has answered."""
    storage = SimStorage()
    writer = open_writer(storage, threaded=True, flush_interval_ms=1)
    answer = threading.Event()
    storage.sleep = lambda seconds: answer.wait(20) and None
    storage.faults.append(Fault("sync", delay_s=1, name=".zst"))
    writer.append(Note(0))
    started = time.monotonic()
    with pytest.raises(JournalTimeout):
        writer.close(0.1)
    assert time.monotonic() - started < 5
    assert "the lock is kept" in caplog.text
    with pytest.raises(JournalLocked):
        open_writer(storage)
    answer.set()
    assert writer._thread is not None
    writer._thread.join(10)
    with open_writer(storage) as again:
        assert again.next_offset == 1


@nothing_else_is_refused
def test_a_dead_process_may_have_seen_its_sync_fail() -> None:
    """Bytes that a failed fdatasync left clean in the page cache are written again before they are believed."""
    storage = SimStorage()
    writer = open_writer(storage)
    writer.append(Note(0))
    writer.sync()
    storage.fail("sync", errno.EIO, name=".zst")
    storage.fail("truncate", errno.EIO, name=".zst")
    writer.append(Note(1))
    writer.pump()
    storage.kill_process()
    again = open_writer(storage)
    assert again.next_offset == 2
    again.append(Note(2))
    again.sync()
    storage.power_cut(random.Random(1), "drop")
    assert numbers(storage) == [0, 1, 2]
