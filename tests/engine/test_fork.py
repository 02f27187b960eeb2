"""Forks of runs that went on: what the old run did after the cut can be in the payloads that the new one adopts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import SimPlan
from tests.simulation.on_disk import from_disk, to_disk
from tests.simulation.world import World, sim_config
from unlost.engine.fork import fork_run
from unlost.replay import events as ev
from unlost.replay.events import AttemptKey
from unlost.replay.fold import fold_run


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def slow_starters(key: AttemptKey, seed: int) -> SimPlan:
    """Every third group gives its first token when the trainer has gone on by some steps."""
    return SimPlan(tokens=6, seconds_per_token=0.9 if key.group % 3 == 2 else 0.02, tokens_per_delta=6)


@pytest.mark.parametrize("sampler", ["in_order", "weight_fifo", "ready_first"])
def test_weights_of_the_old_run_and_of_the_fork_never_share_a_name(sampler: str, tmp_path: Path) -> None:
    """Adopted tokens were made by the old run's later weights; the fork trains others of the same version number.

    Nor is a group ahead of the fork's trainer because of them (protocol rule 18).
    """
    keys = {"async_rl__sampler__max_lookahead_versions": 3, "async_rl__sampler__max_staleness_versions": 3}
    keys |= {"checkpointing__save_period": 1, "checkpointing__keep_latest_k": 9}
    config = sim_config(grpo__max_steps=12, async_rl__sampler__name=sampler, **keys)
    old = World(config, script=slow_starters)
    assert old.live(kill_at_s=13.2).killed
    run = to_disk(old, tmp_path / "run")
    later = 0
    for checkpoint in fold_run(run).checkpoints[:3]:
        version = checkpoint.trainer_version
        forked = fork_run(run, version, tmp_path / f"fork-{version}")
        world = from_disk(tmp_path / f"fork-{version}", config, forked.run_id)
        world.script, world.now_us = slow_starters, old.now_us
        life = world.live(limit_s=600)
        assert life.outcome is not None
        assert life.outcome.exit_code == 0, life.outcome
        events = [event for _, event in world.events()]
        sealed = [e for e in events if isinstance(e, ev.AttemptSealed)]
        adopted = {span[1:] for e in sealed if e.adopted for span in e.receipt.weight_spans}
        here = {(e.branch, e.version) for e in events if isinstance(e, ev.WeightsSynced)}
        assert not adopted & here
        later += sum(made_by > version for _, made_by in adopted)
    assert later, "nothing that was adopted came from later weights"
