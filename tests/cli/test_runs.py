"""plan, checkpoints, fork, prune and repair on run folders that a simulated, killed run left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulation.on_disk import from_disk, to_disk
from tests.simulation.world import World, sim_config
from unlost.cli.main import run as unlost
from unlost.journal import verify
from unlost.replay import events as ev
from unlost.replay.fold import fold_run


@pytest.fixture(scope="module")
def killed() -> World:
    """Killed at 9.4 s of virtual time: some steps trained beyond the last checkpoint, work in flight."""
    world = World(sim_config(grpo__max_steps=20, checkpointing__save_period=2), seed=3)
    world.live(kill_at_s=9.4)
    return world


@pytest.fixture
def folder(killed: World, tmp_path: Path) -> Path:
    return to_disk(killed, tmp_path / "run")


def files_of(folder: Path) -> dict[str, bytes]:
    """All files but the lock's, which says who held it last."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "LOCK"}


def output_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> object:
    assert unlost(arguments) == code
    return json.loads(capsys.readouterr().out)


def test_a_plan_says_what_the_restart_then_does(
    killed: World, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run's counters are the restore's, rows aside, and nothing in the folder changes."""
    before = files_of(folder)
    planned = output_json(capsys, "plan", str(folder), "--format", "json")
    assert files_of(folder) == before
    world = from_disk(folder, killed.config)
    world.live(kill_at_s=4.0)
    done = next(e for _, e in world.events() if isinstance(e, ev.RestoreCompleted))
    rows = ("rows_put_back", "rows_cleared", "groups_dropped_stale")
    assert {k: v for k, v in planned["counters"].items() if k not in rows} == {
        k: v for k, v in done.counters.items() if k not in rows
    }
    assert planned["counters"]["siblings_rerun"] > 0
    assert planned["to_version"] < planned["from_version"]
    assert planned["notes"] == []


def test_a_plan_of_a_finished_run_says_so(killed: World, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In `train`'s own words, whatever else a restart would do if it were asked to go on."""
    world = from_disk(folder, killed.config)
    world.live()
    to_disk(world, folder)
    assert fold_run(folder).ended == "finished"
    last = fold_run(folder).trainer_version
    note = f"nothing to do: step {last} was the last; raise grpo.max_steps to go on"
    assert output_json(capsys, "plan", str(folder), "--format", "json")["notes"] == [note]
    assert unlost(["plan", str(folder)]) == 0
    assert note in capsys.readouterr().out
    assert output_json(capsys, "plan", str(folder), "--restore", str(last), "--format", "json")["notes"] == []


def test_checkpoints_are_listed_and_damage_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flipped byte in a trainer file is named; the newer or older ones stay usable."""
    listed = output_json(capsys, "checkpoints", str(folder), "--format", "json")
    good = [row for row in listed if row["problem"] is None]
    assert len(good) >= 2
    victim = folder / "checkpoints" / good[0]["name"] / "trainer" / "trainer.json"
    data = bytearray(victim.read_bytes())
    data[5] ^= 1
    victim.write_bytes(data)
    again = output_json(capsys, "checkpoints", str(folder), "--format", "json", code=1)
    assert [row["name"] for row in again if row["problem"]] == [good[0]["name"]]
    assert "trainer/trainer.json is damaged" in next(row["problem"] for row in again if row["problem"])
    planned = output_json(capsys, "plan", str(folder), "--deep", "--format", "json")
    assert planned["checkpoint"] == good[1]["name"]


def test_a_fork_begins_at_the_checkpoint_and_trains_on(
    killed: World, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The new run has a new identity, the state of the cut, and finishes; the old run is untouched."""
    before = files_of(folder)
    old = fold_run(folder)
    step = old.checkpoints[-1].trainer_version
    assert unlost(["fork", str(folder), str(tmp_path / "new"), "--at-step", str(step)]) == 0
    assert files_of(folder) == before
    new = fold_run(tmp_path / "new")
    assert new.run_id != old.run_id
    assert (new.trainer_version, new.floor) == (step, step)
    world = from_disk(tmp_path / "new", killed.config, new.run_id)
    world.now_us = new.t
    life = world.live()
    assert life.outcome is not None
    assert life.outcome.exit_code == 0, life.outcome
    state = world.fold()
    assert state.trainer_version == killed.config.grpo.max_steps
    assert state.summary()["prompts"]["holds"]


def test_a_fork_refuses_what_it_can_not_do(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step without a checkpoint, and a target that is not empty, are one-line errors."""
    assert unlost(["fork", str(folder), str(tmp_path / "new"), "--at-step", "19"]) == 2
    assert "no checkpoint of step 19" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert unlost(["fork", str(folder), str(folder), "--at-step", "2"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_prune_is_a_dry_run_and_refuses_what_a_restart_needs(
    killed: World, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--yes drops what precedes the newest durable image; the state and the restart stay the same."""
    before, state = files_of(folder), fold_run(folder).image()
    assert unlost(["prune", str(folder)]) == 0
    assert "nothing was changed" in capsys.readouterr().out
    assert files_of(folder) == before
    assert unlost(["prune", str(folder), "--before", "100000"]) == 2
    assert "a restart needs everything" in capsys.readouterr().err
    assert unlost(["prune", str(folder), "--yes"]) == 0
    assert len(files_of(folder)) < len(before)
    assert fold_run(folder).image() == state
    assert verify(folder / "events").ok
    life = from_disk(folder, killed.config).live()
    assert life.outcome is not None
    assert life.outcome.exit_code == 0


def test_repair_copies_aside_cuts_and_says_what_is_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped byte in the middle of the event journal: refused as it is, cut on request, old bytes kept."""
    segment = max((folder / "events").glob("*.zst"))
    whole = segment.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    assert unlost(["verify", str(folder)]) == 1
    assert unlost(["replay", str(folder)]) == 1
    capsys.readouterr()
    said = output_json(capsys, "repair", str(folder), "--format", "json", code=1)
    assert said["damaged"] == ["events"]
    assert segment.read_bytes() == bytes(data)
    done = output_json(capsys, "repair", str(folder), "--yes", "--format", "json")
    assert done["repaired"]["events"]["applied"]
    assert bytes(data)[-200:] in b"".join(files_of(folder).values())
    assert unlost(["verify", str(folder)]) == 0
    assert fold_run(folder).summary()["prompts"]["holds"]


def test_repair_leaves_to_prune_what_no_restart_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage before the newest image: cutting would give up all that came after it. Only --cut does that."""
    state = fold_run(folder).image()
    segment = min((folder / "events").glob("*.zst"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    before = files_of(folder)
    for more in ([], ["--yes"]):
        assert unlost(["repair", str(folder), *more]) == 1
        said = capsys.readouterr()
        assert "unlost prune" in said.err
        assert files_of(folder) == before
    assert unlost(["prune", str(folder), "--yes"]) == 0
    assert verify(folder / "events").ok
    assert fold_run(folder).image() == state


def test_repair_cuts_what_prune_could_drop_when_told_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--cut: the steps after the damage are gone, and the old bytes are beside."""
    segment = min((folder / "events").glob("*.zst"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    assert unlost(["repair", str(folder), "--yes", "--cut"]) == 0
    assert "steps trained and checkpoints made from there on are forgotten" in capsys.readouterr().out
    assert verify(folder / "events").ok
