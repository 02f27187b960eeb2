"""The live trace: it ends as the export of the same journal, whatever happened to the run or to the file."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.sim_storage import SimCrash
from tests.simulation.on_disk import to_disk
from tests.simulation.world import EVENTS, Hooks, Incarnation, World, sim_config
from tests.synthetic_run import Shape, SyntheticRun, write_journal
from unlost.engine import actor, live_trace
from unlost.engine.config import Config, build_config
from unlost.engine.live_trace import SET_ASIDE, TRACE_FILE, LiveTrace
from unlost.engine.progress import Outcome, Progress
from unlost.engine.runfolder import OpenRun
from unlost.journal import JournalReader
from unlost.journal.prune import prune
from unlost.replay import events as ev
from unlost.replay.export import trace_of
from unlost.replay.fold import open_events


def exported(run: Path) -> bytes:
    return b"".join(trace_of(run))


# --- beside a simulated run -------------------------------------------------------------------------------------------


class Traced(Hooks):
    """A live trace in the process of each life, a round at every progress; it dies with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace: LiveTrace | None = None
        self.rounds = 0

    def opened(self, life: Incarnation) -> None:
        world, writer = life.world, life.writer
        assert writer is not None

        def reader() -> JournalReader[Any]:
            return JournalReader(EVENTS, ev.EVENT_TYPES, storage=world.storage)

        self.trace = LiveTrace(str(self.path), reader, lambda: writer.durable_upto)

    def progress(self, life: Incarnation, progress: Progress) -> None:
        super().progress(life, progress)
        assert self.trace is not None
        assert self.trace.catch_up()
        self.rounds += 1


def die_before_a_sync(life: Incarnation, syncs: int) -> None:
    """Die with events written and not yet synced, and that at the moment at which the trace has just had a round."""
    storage, hooks, left = life.world.storage, life.world.hooks, [syncs]

    def hook(op: str, path: str) -> None:
        if op == "sync" and EVENTS in path:
            left[0] -= 1
            if left[0] == 0:
                assert isinstance(hooks, Traced)
                assert hooks.trace is not None
                assert hooks.trace.catch_up()
                life.die()
                raise SimCrash("planned")

    storage.hook = hook


@pytest.mark.parametrize("power", ["drop", "tear", "keep"])
def test_a_run_that_crashes_and_resumes(power: str, tmp_path: Path) -> None:
    """Never ahead of what a power cut leaves of the journal; in the end the trace is the export."""
    trace = tmp_path / TRACE_FILE
    world = World(sim_config(grpo__max_steps=10, rollout_checkpointing__interval_s=0.7), hooks=Traced(trace))
    chance = random.Random(7)
    for number, syncs in enumerate((45, 60, 4, 55)):
        assert world.live(arrange=lambda life, left=syncs: die_before_a_sync(life, left)).killed
        world.storage.power_cut(chance, power)
        left = exported(to_disk(world, tmp_path / f"crash{number}"))
        assert left.startswith(trace.read_bytes())
        with trace.open("ab") as file:  # a write that the crash cut short
            file.write(left[file.tell() : file.tell() + 37 * number])
    life = world.live()
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    hooks = world.hooks
    assert isinstance(hooks, Traced)
    assert hooks.trace is not None
    assert hooks.trace.catch_up()
    assert hooks.rounds > 20
    assert trace.read_bytes() == exported(to_disk(world, tmp_path / "end"))


# --- over a finished journal ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_journal(SyntheticRun(Shape(seed=3, events=2_500, crashes=2)), tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def whole(run: Path) -> bytes:
    return exported(run)


def tracing(run: Path, path: Path, upto: int | None = None) -> LiveTrace:
    end = open_events(run).end_offset if upto is None else upto
    return LiveTrace(str(path), lambda: open_events(run), lambda: end)


@pytest.mark.parametrize("block", [live_trace.BLOCK_BYTES, 61], ids=["a usual block", "a small block"])
def test_it_goes_on_after_any_byte(
    block: int, run: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ends anywhere, in rubbish or not, becomes the whole trace; what is sound stays as it is."""
    monkeypatch.setattr(live_trace, "BLOCK_BYTES", block)
    places, write = [], os.pwrite

    def pwrite(file: int, data: bytes, place: int) -> int:
        places.append(place)
        return write(file, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    path = tmp_path / TRACE_FILE
    chance = random.Random(block)
    some = [0, 1, len(whole) - 1, len(whole), *(chance.randrange(len(whole)) for _ in range(14))]
    for number, cut in enumerate(some):
        rest = (b"", b"\0" * 5000, b'{"t":1', b"[]\n\n{}\n")[number % 4]
        path.write_bytes(whole[:cut] + rest)
        inode = path.stat().st_ino
        trace = tracing(run, path)
        places.clear()
        assert trace.catch_up()
        trace._let_go()
        assert path.read_bytes() == whole, (cut, rest)
        assert path.stat().st_ino == inode
        assert min(places, default=cut) == whole.rfind(b"\n", 0, cut) + 1


def test_incarnations_without_a_trace_are_caught_up(run: Path, whole: bytes, tmp_path: Path) -> None:
    """Off for a while, then on again: nothing is missing, and nothing was read twice."""
    path = tmp_path / TRACE_FILE
    early = tracing(run, path, upto=400)
    assert early.catch_up()
    assert path.read_bytes() == b"".join(line for line in whole.splitlines(True) if _offset(line) < 400)
    assert tracing(run, path).catch_up()
    assert path.read_bytes() == whole


def test_a_holder_that_is_not_dead_does_no_harm(run: Path, whole: bytes, tmp_path: Path) -> None:
    """What it still writes of the events that both know lies where its successor has written the same."""
    path, upto = tmp_path / TRACE_FILE, [400]
    old = LiveTrace(str(path), lambda: open_events(run), lambda: upto[0])
    assert old.catch_up()
    assert tracing(run, path).catch_up()
    upto[0] = 900
    assert old.catch_up()
    assert path.read_bytes() == whole


def _offset(line: bytes) -> int:
    return int(line.rpartition(b'"offset":')[2].rstrip(b"}\n"))


def test_another_runs_trace_is_set_aside(run: Path, whole: bytes, tmp_path: Path, caplog: Any) -> None:
    """Also one that is longer than the journal; it is kept, and said."""
    other = write_journal(SyntheticRun(Shape(seed=4, events=3_000, run_id="other")), tmp_path / "other")
    path = tmp_path / TRACE_FILE
    strange = exported(other)
    for foreign in (strange, strange[: len(strange) // 3]):
        path.write_bytes(foreign)
        with caplog.at_level(logging.WARNING):
            assert tracing(run, path).catch_up()
        assert "does not continue in this journal" in caplog.text
        assert path.read_bytes() == whole
        assert (tmp_path / (TRACE_FILE + SET_ASIDE)).read_bytes() == foreign
        caplog.clear()


def test_a_pruned_journal_keeps_what_the_trace_has(tmp_path: Path, caplog: Any) -> None:
    """Lines of pruned events stay; a gap of pruned events that were never written is said."""
    run = write_journal(SyntheticRun(Shape(seed=3, events=2_500, crashes=2)), tmp_path / "run")
    before = exported(run)
    image = open_events(run).last_image()
    assert image is not None
    complete, gap, none = (tmp_path / name for name in ("complete", "gap", "none"))
    assert tracing(run, complete, upto=image).catch_up()
    assert tracing(run, gap, upto=image // 2).catch_up()
    early = gap.read_bytes()
    prune(run / "events", image, dry_run=False)
    with caplog.at_level(logging.WARNING):
        assert tracing(run, complete).catch_up()
        assert caplog.text == ""
        assert tracing(run, gap).catch_up()
    assert f"events {image // 2} to {image - 1} were pruned" in caplog.text
    assert tracing(run, none).catch_up()
    assert complete.read_bytes() == before
    assert none.read_bytes() == exported(run)
    assert gap.read_bytes() == early + exported(run)


def test_a_failing_disk_is_told_once_and_overcome(run: Path, whole: bytes, tmp_path: Path, monkeypatch, caplog) -> None:
    """Full, then short writes, then well: the trace is whole, with one warning."""
    path, write, left = tmp_path / TRACE_FILE, os.pwrite, [3_000]

    def pwrite(file: int, data: bytes, place: int) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[: min(left[0], 1_000)], place)
        left[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    trace = tracing(run, path)
    with caplog.at_level(logging.INFO):
        for room in (3_000, 10, 0, 5_000):
            left[0] = room
            assert not trace.catch_up()
            assert whole.startswith(path.read_bytes())
        left[0] = 1 << 30
        assert trace.catch_up()
    assert [r.levelname for r in caplog.records if r.name == "unlost.engine.live_trace"] == ["WARNING", "INFO"]
    assert "No space left" in caplog.text
    assert path.read_bytes() == whole


# --- in the controller's process --------------------------------------------------------------------------------------


class Controller:
    """Stands in for the real one: records that the run began, waits, ends it."""

    opened: OpenRun

    def __init__(self, config: Config, opened: OpenRun, identity: Any, *_: Any) -> None:
        self.config, self.opened, self.identity = config, opened, identity

    async def run(self, restore: str) -> Outcome:
        who, writer = self.identity, self.opened.writer
        for event in (
            ev.RunStarted(0, who.run_id, who.incarnation, 1, "h", 1, who.fingerprints, who.settings, who.versions),
            ev.RunEnded(5, restore, ""),
        ):
            writer.append(event)
        writer.close()
        threads.update(t.name for t in threading.enumerate())
        return Outcome(reason="finished", exit_code=0, detail="", run_dir=self.config.run_dir)


threads: set[str] = set()


def host(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Outcome:
    tree = {"model": {"path": "model"}, "data": {"train": "p.jsonl"}, "reward": {"function": "m:f"}}
    config = build_config(tree | {"run": {"dir": str(folder)}}, overrides, folder=folder)
    threads.clear()
    monkeypatch.setattr(actor, "SingleController", Controller)
    monkeypatch.setattr(actor, "log_to", lambda _: None)
    monkeypatch.setattr(actor.ControllerHost, "_parts", lambda _, opened: opened)
    return asyncio.run(actor.ControllerHost(config, {"dataset": "d", "model": "m"}).run("latest"))


def test_switched_on_it_is_complete_when_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two incarnations; the last event is in it."""
    for _ in range(2):
        assert host(tmp_path, monkeypatch, "rollout_checkpointing.trace=true").exit_code == 0
        assert "live trace" in threads
        assert (tmp_path / TRACE_FILE).read_bytes() == exported(tmp_path)
    assert exported(tmp_path).count(b'"run_ended"') == 2


def test_switched_off_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither file nor thread."""
    assert host(tmp_path, monkeypatch).exit_code == 0
    assert "live trace" not in threads
    assert not (tmp_path / TRACE_FILE).exists()


def test_a_run_does_not_mind_a_trace_that_cant_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of that name is in the way: the run ends well, with one warning."""
    (tmp_path / "events").mkdir()
    assert host(tmp_path, monkeypatch).exit_code == 0
    (tmp_path / TRACE_FILE).mkdir()
    assert host(tmp_path, monkeypatch, "rollout_checkpointing.trace=true").exit_code == 0
    assert [r.message for r in caplog.records if "the run goes on without: IsADirectoryError" in r.message]


def test_the_settings_that_a_post_mortem_needs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the fixed settings; and they may change at a restart."""
    for chunk in (16, 32):
        assert host(tmp_path, monkeypatch, f"journal.progress_interval_tokens={chunk}").exit_code == 0
    told = [e.settings for _, e in open_events(tmp_path).events() if isinstance(e, ev.RunStarted)]
    assert [settings["journal.progress_interval_tokens"] for settings in told] == [16, 32]
