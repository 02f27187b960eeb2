"""What a start finds out before it brings up Ray."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.simulation.world import World, sim_config
from unlost.engine import config as config_module
from unlost.engine import fork, launch, models, prompts, restore, rewards, runfolder, samplers
from unlost.engine.launch import run_training
from unlost.journal import errors
from unlost.replay.state import State


@pytest.fixture(scope="module")
def finished() -> State:
    """A run that has trained its four steps, with checkpoints of steps 2 and 4."""
    world = World(sim_config(grpo__max_steps=4, checkpointing__save_period=2))
    life = world.live()
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    return world.fold()


@pytest.fixture
def found(finished: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run.dir`` holds that run; and no cluster can be started."""
    import unlost.engine.cluster

    def no_cluster(config: Any) -> Any:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(unlost.engine.cluster, "Cluster", no_cluster)
    monkeypatch.setattr(launch, "check_run", lambda *_: finished)
    monkeypatch.setattr(launch, "check_free", lambda *_: None)
    monkeypatch.setattr(launch, "JsonlPrompts", lambda *_, **__: type("P", (), {"fingerprint": "d"}))
    monkeypatch.setattr(launch, "model_fingerprint", lambda _: "m")
    monkeypatch.setattr(launch, "load_reward", lambda *_: None)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("most", [4, 3])
def test_a_finished_run_is_said_to_be_finished_at_once(most: int) -> None:
    """Exit code 0, and what to change to go on; no process is started, nothing is written."""
    outcome = run_training(sim_config(grpo__max_steps=most))
    assert (outcome.reason, outcome.exit_code) == ("finished", 0)
    assert "step 4 was the last; raise grpo.max_steps" in outcome.detail


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(("most", "mode"), [(5, "latest"), (4, "2"), (4, "none")])
def test_a_finished_run_that_has_something_to_do_starts(
    most: int, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """More steps, or an older checkpoint to go back to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "log_to", lambda _: None)
    with pytest.raises(AssertionError, match="Ray was started"):
        run_training(sim_config(grpo__max_steps=most), restore=mode)


@pytest.mark.usefixtures("found")
def test_a_checkpoint_that_does_not_exist_is_refused_at_once() -> None:
    """With those that do, before anything is started; a new run has none at all."""
    with pytest.raises(restore.RestoreRefused, match=r"--restore 3: no checkpoint of that step .*there are: 2, 4"):
        run_training(sim_config(grpo__max_steps=5), restore="3")


def test_a_new_run_has_no_checkpoint(found: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--restore 3`` of a folder that holds no run."""
    monkeypatch.setattr(launch, "check_run", lambda *_: None)
    with pytest.raises(restore.RestoreRefused, match="has no run yet"):
        run_training(sim_config(), restore="3")


@pytest.mark.parametrize("module", [config_module, fork, models, prompts, restore, rewards, runfolder, samplers])
def test_what_the_user_can_set_right_is_wrong_usage(module: Any) -> None:
    """Exit code 2: the error that each of these raises about what it was given."""
    own = [
        e
        for _, e in inspect.getmembers(module, inspect.isclass)
        if issubclass(e, errors.UnlostError) and e.__module__ == module.__name__
    ]
    wrong = [e.__name__ for e in own if e.exit_code == errors.EXIT_USAGE]
    others = {"PublishError", "PromptChanged"}
    assert wrong
    assert {e.__name__ for e in own} - set(wrong) <= others
