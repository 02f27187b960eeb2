"""Opening a run's folder: who holds it, and what does not belong together."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from unlost.engine import runfolder
from unlost.engine.config import Config, build_config
from unlost.engine.runfolder import RunMismatch, check_free, check_run, open_run
from unlost.journal.errors import JournalLocked
from unlost.replay import events as ev

PRINTS = {"dataset": "d" * 64, "model": "m" * 64}


def config(folder: Path, **overrides: object) -> Config:
    tree = {"model": {"path": "model"}, "data": {"train": "p.jsonl"}, "reward": {"function": "m:f"}}
    tree["run"] = {"dir": str(folder / "run")}
    settings = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return build_config(tree, settings, folder=folder)


def start(folder: Path, **overrides: object) -> None:
    """A run that began and was closed."""
    opened = open_run(config(folder, **overrides), PRINTS)
    who = opened.identity
    opened.writer.append(
        ev.RunStarted(0, who.run_id, who.incarnation, 1, "h", 1, who.fingerprints, who.settings, who.versions)
    )
    opened.writer.close()


def test_a_held_run_names_its_holder(tmp_path: Path) -> None:
    """The error says which process has it, and waiting in vain ends."""
    opened = open_run(config(tmp_path), PRINTS)
    with pytest.raises(JournalLocked, match="in use by process"):
        check_free(config(tmp_path), wait_s=0.3)
    opened.writer.close()
    check_free(config(tmp_path))


def test_a_holder_that_is_about_to_die_is_waited_for(tmp_path: Path) -> None:
    """Who restarts a killed run at once gets it as soon as its old controller is gone."""
    opened = open_run(config(tmp_path), PRINTS)
    closing = threading.Timer(0.5, opened.writer.close)
    closing.start()
    began = time.monotonic()
    check_free(config(tmp_path), wait_s=10.0)
    assert 0.3 < time.monotonic() - began < 10
    closing.join()


def test_incarnations_and_identity_go_on(tmp_path: Path) -> None:
    """The second opening is the same run, one incarnation later, on a clock that does not go back."""
    start(tmp_path)
    opened = open_run(config(tmp_path), PRINTS)
    assert opened.identity.incarnation == 2
    assert opened.identity.run_id == opened.state.run_id
    assert opened.clock.now_us() >= opened.state.t
    opened.writer.close()


@pytest.mark.parametrize(
    ("overrides", "prints", "named"),
    [
        (
            {"grpo__num_prompts_per_step": 16},
            PRINTS,
            r"grpo.num_prompts_per_step: the run has 32, the configuration 16",
        ),
        ({}, {**PRINTS, "dataset": "e" * 64}, r"the dataset is not the one .*eeee.*dddd"),
        ({}, {**PRINTS, "model": "n" * 64}, r"the model is not the one .*nnnn.*mmmm"),
    ],
)
def test_what_differs_is_named_with_both_values(
    tmp_path: Path, overrides: dict[str, object], prints: dict[str, str], named: str
) -> None:
    """Fixed settings, dataset and model must be those of the run; free ones may change."""
    start(tmp_path)
    with pytest.raises(RunMismatch, match=named):
        check_run(config(tmp_path, **overrides), prints)
    assert check_run(config(tmp_path, grpo__learning_rate="1e-3", workers__count=3, grpo__max_steps=7), PRINTS)


@pytest.mark.parametrize("call", ["fsync", "replace", "killed"])
def test_a_first_start_that_ends_at_its_configuration_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A full disk while config.yaml is written, or a kill then, is no reason to refuse the folder ever after."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device") if call != "killed" else KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(*((runfolder.os, "fsync") if call == "fsync" else (Path, "replace")), fail)
        with pytest.raises((OSError, KeyboardInterrupt)):
            runfolder.write_config(_made(tmp_path / "run"), config(tmp_path))
    assert (tmp_path / "run" / "config.yaml.tmp").exists() == (call == "killed")
    start(tmp_path)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.yaml", "events"]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_folder_that_is_no_run_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """Neither someone's files nor checkpoints without their journal are started over."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("…")
    with pytest.raises(RunMismatch, match="not a run folder and not empty"):
        check_run(config(tmp_path), PRINTS)
    (tmp_path / "run" / "thesis.tex").unlink()
    (tmp_path / "run" / "checkpoints" / "step_0000003-i00001-c000000").mkdir(parents=True)
    with pytest.raises(RunMismatch, match="holds checkpoints"):
        check_run(config(tmp_path), PRINTS)
