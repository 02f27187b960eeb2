"""Restores that meet damage, other machines and their own end half-way."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import SimPlan
from tests.simulation.world import PAYLOADS, Incarnation, World, sim_config
from unlost.replay import events as ev
from unlost.replay.events import AttemptKey
from unlost.replay.fold import fold_reader
from unlost.replay.plan import COUNTERS


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def killed_world(at_s: float = 7.2, **keys: Any) -> World:
    """A run of eight steps, killed after about six; checkpoints at every step."""
    defaults = {"grpo__max_steps": 8, "checkpointing__save_period": 1}
    place = World(sim_config(**(defaults | keys)))
    assert place.live(kill_at_s=at_s).killed
    return place


def folders(place: World) -> list[str]:
    root = place.config.checkpoint_dir
    return sorted(d for d in place.storage.directories if re.fullmatch(re.escape(root) + "/step_[^/]*", d))


def of(place: World, kind: type[Any]) -> list[Any]:
    return [e for _, e in place.events() if isinstance(e, kind)]


def go_on(place: World, **options: Any) -> Incarnation:
    return place.live(limit_s=600, **options)


def test_a_restore_without_a_usable_checkpoint_above_the_floor_is_refused() -> None:
    """Rule 15: all kept checkpoints damaged, earlier groups retired: loud, and nothing was changed by it."""
    place = killed_world()
    assert place.fold().floor > 0
    for folder in folders(place):
        place.storage.delete(f"{folder}/manifest.json")
    before = place.fold().summary()["prompts"]
    life = go_on(place)
    assert life.outcome is not None
    assert life.outcome.exit_code == 1
    assert "no usable checkpoint at or above version" in life.outcome.detail
    assert place.fold().summary()["prompts"] == before


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before() -> None:
    """One flipped bit in the trainer's file: the next older one is loaded, the groups trained since come back."""
    place = killed_world()
    *_, older, newest = folders(place)
    file = f"{newest}/trainer/trainer.json"
    body = bytearray(place.storage.content(file))
    body[5] ^= 1
    place.storage.put(file, bytes(body))
    life = go_on(place)
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    started = [f"{place.config.checkpoint_dir}/{e.name}" for e in of(place, ev.RestoreStarted)]
    assert started[-2:] == [newest, older]
    (rolled,) = of(place, ev.TrainerRolledBack)
    assert rolled.to_version < rolled.from_version
    assert len(rolled.groups) >= 3


def test_a_read_error_is_not_taken_for_damage() -> None:
    """A transient error ends the restore as what it is; the same checkpoint is used by the next."""
    place = killed_world()
    newest = folders(place)[-1]

    def fail(life: Incarnation) -> None:
        place.storage.fail("read", errno.EIO, name=newest)

    life = go_on(place, arrange=fail)
    assert life.outcome is not None
    assert life.outcome.exit_code == 1
    assert "OSError" in life.outcome.detail
    again = go_on(place)
    assert again.outcome is not None
    assert again.outcome.exit_code == 0
    used = [f"{place.config.checkpoint_dir}/{e.name}" for e in of(place, ev.RestoreStarted)]
    assert used[-1] == newest
    assert min(used) == newest, "nothing older was tried"


@pytest.mark.parametrize(("mode", "version"), [("latest", None), ("5", 5)])
def test_restore_to_a_step(mode: str, version: int | None) -> None:
    """The newest one, or the one of the step that was asked for."""
    place = killed_world()
    have = [int(f.split("step_")[1][:7]) for f in folders(place)]
    wanted = have[-1] if version is None else have[0]
    life = go_on(place, restore=mode if version is None else str(wanted))
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    assert of(place, ev.RestoreStarted)[-1].to_version == wanted


def test_restore_to_a_step_that_is_not_there_names_those_that_are() -> None:
    """Nothing is loaded instead."""
    place = killed_world()
    life = go_on(place, restore="77")
    assert life.outcome is not None
    assert "--restore 77: no checkpoint of that step in this history; there are:" in life.outcome.detail


def test_restore_none_trains_from_step_0_on_journaled_rollouts() -> None:
    """Without anything retired yet: every trained group comes back, and none is generated again."""
    place = killed_world(at_s=4.0, checkpointing__save_period=10)
    before = place.fold()
    assert before.floor == 0
    assert before.trainer_version > 0
    life = go_on(place, restore="none")
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    (rolled,) = of(place, ev.TrainerRolledBack)
    assert rolled.to_version == 0
    assert set(rolled.groups) == {g for groups in before.applied.values() for g in groups} | set(before.open_groups)
    dispatched = [(e.group, e.sibling) for e in of(place, ev.AttemptDispatched) if e.t > rolled.t]
    assert not {g for g, _ in dispatched} & set(rolled.groups)


def test_another_number_of_storage_units_rebuilds_rows_from_payloads() -> None:
    """The snapshot does not fit the data plane: every owned row is put back."""
    place = killed_world(data_plane__storage_units=2)
    place.config = sim_config(grpo__max_steps=8, checkpointing__save_period=1, data_plane__storage_units=1)
    life = go_on(place)
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    counters = of(place, ev.RestoreCompleted)[-1].counters
    assert counters["rows_put_back"] >= 2 * counters["groups_complete_restored"] > 0


def test_without_payloads_what_no_snapshot_holds_is_generated_again_and_counted() -> None:
    """``payloads: none``: sealed siblings after the snapshot are given up one by one, with their cause."""
    place = killed_world(data_plane__payloads="none", async_rl__prefix="regenerate", checkpointing__save_period=3)
    life = go_on(place)
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    lost = [e for e in of(place, ev.AttemptAbandoned) if e.reason == "payload_lost"]
    assert lost
    assert of(place, ev.RestoreCompleted)[-1].counters["attempts_lost"] == len(lost)


def test_a_lost_payload_disk_costs_what_was_on_it_and_nothing_else() -> None:
    """The folder of one worker is gone: its sealed siblings that no snapshot holds are generated again.

    The restore finds them all, not the first step that asks for them.
    """
    place = killed_world(checkpointing__save_data_plane=False)
    journals = sorted(d for d in place.storage.directories if d.startswith(PAYLOADS + "/"))
    held = {
        (g.id, i)
        for g in place.fold().groups.values()
        for i, s in enumerate(g.siblings)
        if s.receipt is not None and f"{PAYLOADS}/{s.receipt.journal}" == journals[0] and g.trained_step < 0
    }
    del place.storage.directories[journals[0]]
    life = go_on(place)
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    told = [e for _, e in place.events()]
    restored = told[: next(i for i, e in enumerate(told) if isinstance(e, ev.RestoreCompleted))]
    gone = [e for e in restored if isinstance(e, ev.AttemptAbandoned) and e.reason == "payload_lost"]
    assert held <= {(e.group, e.sibling) for e in gone}


def test_every_restore_tells_all_counters() -> None:
    """Zeros too."""
    place = killed_world()
    go_on(place)
    assert set(of(place, ev.RestoreCompleted)[-1].counters) == set(COUNTERS)


def test_finished_groups_only_at_group_granularity() -> None:
    """``recovery_granularity: prompt_group``: no sibling of an unfinished group is reused."""

    def script(key: AttemptKey, seed: int) -> SimPlan:
        return SimPlan(tokens=5 if key.sibling == 0 else 60, seconds_per_token=0.05, tokens_per_delta=5)

    place = World(sim_config(async_rl__recovery_granularity="prompt_group"), script=script)
    assert place.live(kill_at_s=2.0).killed
    sealed = {(g.id, 0) for g in place.fold().groups.values() if g.status == 2 and g.siblings[0].status == 2}
    assert sealed
    go_on(place)
    counters = of(place, ev.RestoreCompleted)[-1].counters
    assert counters["siblings_reused"] == 0
    given_up = {(e.group, e.sibling) for e in of(place, ev.AttemptAbandoned) if e.reason == "prompt_group"}
    assert given_up == sealed


def test_a_rollback_schedules_what_newer_weights_made_as_of_then() -> None:
    """Rule 18: after going back to version 0 no group waits for weights of a version that is still to come."""
    keys = {"async_rl__sampler__name": "windowed", "async_rl__sampler__max_staleness_versions": 2}
    place = killed_world(at_s=5.2, checkpointing__save_period=10, **keys)
    assert any(g.start_weight > 0 for g in place.fold().groups.values() if g.status in (3, 4))
    life = go_on(place)
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    (at,) = [offset for offset, e in place.events() if isinstance(e, ev.TrainerRolledBack)]
    state = fold_reader(place.reader(), at)
    waiting = [g for g in state.groups.values() if g.status in (2, 3, 4)]
    assert {g.start_weight for g in waiting} == {0}
    assert max(g.version_max for g in waiting) > 0, "what made them stays recorded"
