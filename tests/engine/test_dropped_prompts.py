"""Prompts that can't be worked off or are not wanted: budgets, back-off, shrinking, spares, poison, filters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.fakes import SimPlan, sim_reward
from tests.simulation.world import World, sim_config
from unlost.engine.protocols import AttemptError, Prompt
from unlost.replay import events as ev
from unlost.replay.events import AttemptKey


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def world(bad: Sequence[int] = (), *, infra: bool = False, deadly: bool = False, tries: int = 99, **keys: Any) -> World:
    """A world in which the groups ``bad`` fail their first ``tries`` attempts: by their reward, in the generator, or
    with their worker."""

    def script(key: AttemptKey, seed: int) -> SimPlan:
        plan = SimPlan(tokens=4 + 3 * (key.group % 5), seconds_per_token=0.02, tokens_per_delta=2)
        if key.group in bad and key.attempt < tries and (infra or deadly):
            plan = SimPlan(8, 0.02, 2, fail_after=4 if infra else -1, die_after=4 if deadly else -1)
        return plan

    def reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
        if prompt.ref.index in bad and not infra and not deadly:
            raise AttemptError(ev.FAIL_DATA, "no answer in this row")
        return sim_reward(prompt, token_ids)

    return World(sim_config(**{"grpo__max_steps": 4, **keys}), script=script, reward=reward)


def events(place: World, kind: type[Any]) -> list[Any]:
    return [e for _, e in place.events() if isinstance(e, kind)]


def finish(place: World) -> None:
    life = place.live(limit_s=300)
    assert life.outcome is not None
    assert (life.outcome.exit_code, life.outcome.detail) == (0, life.outcome.detail)


def trained_by_step(place: World) -> dict[int, int]:
    return {step: len(groups) for step, groups in place.fold().applied.items()}


def test_a_prompt_whose_data_fails_twice_shrinks_its_step() -> None:
    """The data budget of two; siblings that fail together give it up once; the step trains one group less."""
    place = world([4], checkpointing__enabled=False)
    finish(place)
    (shortened,) = events(place, ev.StepShortened)
    assert (shortened.group, shortened.step, shortened.reason) == (4, 1, "dropped")
    assert len([e for e in events(place, ev.AttemptFailed) if e.kind == "data"]) <= 3
    assert trained_by_step(place) == {0: 3, 1: 2, 2: 3, 3: 3}


def test_infrastructure_failures_back_off_and_double() -> None:
    """Waits of 1, 2, 4 and again 4 seconds (the limit) before the next tries; five failures give the prompt up."""
    keys = {"grpo__num_generations_per_prompt": 1, "rollout_failure__max_backoff_s": 4.0}
    place = world([1], infra=True, **keys)
    finish(place)
    failed = [e.t for e in events(place, ev.AttemptFailed) if e.group == 1]
    tried = [e.t for e in events(place, ev.AttemptDispatched) if e.group == 1]
    waits = [round((again - before) / 1e6, 2) for before, again in zip(failed, tried[1:], strict=False)]
    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert len(failed) == 5
    assert events(place, ev.StepShortened)[0].group == 1


def test_the_two_budgets_are_independent() -> None:
    """Four failures of the infrastructure and none of the data: the prompt is trained."""
    place = world([1], infra=True, tries=2)
    finish(place)
    assert not events(place, ev.StepShortened)
    assert len(events(place, ev.AttemptFailed)) == 4


def test_a_step_below_its_floor_ends_the_run_and_says_so() -> None:
    """0.9 of three prompts is all three: nothing is given up, the run stops, resumable with another setting."""
    place = world([1], rollout_failure__min_step_batch_fraction=0.9)
    life = place.live(limit_s=300)
    assert life.outcome is not None
    assert "step below floor: step 0 has lost 1 of 3 groups, 2 left, floor 3" in life.outcome.detail
    assert life.outcome.exit_code == 1
    assert not events(place, ev.StepShortened)
    place.config = sim_config(grpo__max_steps=4, rollout_failure__min_step_batch_fraction=0.5)
    finish(place)
    assert place.fold().trainer_version == 4


def test_more_prompts_given_up_than_allowed_end_the_run() -> None:
    """``max_skipped_prompts`` counts over the whole run; the message names it and the last prompt."""
    place = world([1, 4], rollout_failure__max_skipped_prompts=1)
    life = place.live(limit_s=300)
    assert life.outcome is not None
    assert "2 prompt(s) given up, rollout_failure.max_skipped_prompts is 1; the last: p4" in life.outcome.detail
    again = place.live(limit_s=300)
    assert again.outcome is not None
    assert again.outcome.exit_code == 0, "what was given up stays given up; nothing new is"


def test_a_spare_takes_the_place_of_a_dropped_prompt() -> None:
    """Replace: every step keeps its size; who gave way, who was lent and who repays is one event."""
    place = world([7], rollout_failure__on_dropped_prompt="replace", checkpointing__enabled=False)
    finish(place)
    (replaced,) = events(place, ev.PromptReplaced)
    assert (replaced.group, replaced.target_step, replaced.spare) == (7, 1, 3), "groups 3 to 5 are the pool"
    if replaced.borrowed >= 0:
        assert replaced.spare_target == replaced.borrowed_from > 1
    assert trained_by_step(place) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert not events(place, ev.StepShortened)


def test_a_place_is_refilled_only_so_often() -> None:
    """``max_replacement_attempts``: the spare of a spare is not asked for; then the step shrinks."""
    keys = {"rollout_failure__on_dropped_prompt": "replace", "rollout_failure__max_replacement_attempts": 2}
    place = world([7, 3, 4, 5], **keys)
    finish(place)
    assert [(e.group, e.spare) for e in events(place, ev.PromptReplaced)] == [(7, 3), (3, 4)]
    assert [e.group for e in events(place, ev.StepShortened)] == [4]


def test_a_prompt_that_kills_its_workers_is_poisoned() -> None:
    """Each loss is a try; beyond the budget the prompt goes, and the run goes on with new workers."""
    place = world([1], deadly=True, rollout_failure__max_infra_attempts_per_prompt=4)
    finish(place)
    (shortened,) = events(place, ev.StepShortened)
    assert (shortened.group, shortened.reason) == (1, "poisoned")
    killed = {e.worker for e in events(place, ev.WorkerStopped) if e.reason == "worker_lost"}
    assert len(killed) >= 5
    assert len(events(place, ev.GroupCommitted)) >= 11, "those that ran beside it are not blamed"


def test_losses_count_across_restarts() -> None:
    """The process is killed after each lost worker, before or after it wrote the attempt's end down: still poisoned."""
    place = world([1], deadly=True, rollout_failure__max_infra_attempts_per_prompt=2, workers__count=1)
    for _ in range(12):
        seen = sum(isinstance(e, ev.WorkerStopped) for _, e in place.events()) if place.incarnations else 0

        def die_after_the_loss(life: Any, seen: int = seen) -> None:
            def look() -> None:
                state = life.state
                if state is not None and state.counters.get("workers_lost", 0) > seen:
                    life.loop.call_later(0.03, life.die)
                else:
                    life.loop.call_later(0.01, look)

            life.loop.call_later(0.01, look)

        life = place.live(arrange=die_after_the_loss, limit_s=300)
        if not life.killed:
            break
    assert life.outcome is not None
    assert life.outcome.exit_code == 0
    (shortened,) = events(place, ev.StepShortened)
    assert shortened.reason == "poisoned"
    losses = [e for e in events(place, ev.AttemptAbandoned) if e.group == 1 and e.reason == "worker_lost"]
    assert len(losses) >= 3


@pytest.mark.parametrize("sampler", ["in_order", "weight_fifo", "windowed", "ready_first"])
def test_filtered_groups_never_leave_a_step_waiting(sampler: str) -> None:
    """Groups whose rewards are the same: stamped steps keep what the floor needs, others are made up for."""
    keys = {"async_rl__sampler__name": sampler, "async_rl__group_filter": "zero_variance"}
    place = world([], **keys, rollout_failure__max_skipped_prompts=0, rollout_failure__min_step_batch_fraction=0.5)
    place.reward = lambda prompt, ids: 1.0 if prompt.ref.index % 3 else sim_reward(prompt, ids)
    finish(place)
    filtered = [e for k in (ev.StepShortened, ev.GroupDiscarded) for e in events(place, k) if e.reason == "filtered"]
    assert filtered
    assert place.fold().counters.get("prompts_given_up", 0) == 0


@pytest.mark.parametrize("sampler", ["weight_fifo", "windowed", "ready_first"])
def test_what_carries_no_stamp_is_made_up_for(sampler: str) -> None:
    """Prompts given up under a sampler without stamps: another batch is admitted, and every step is whole."""
    place = world([1, 4, 7], async_rl__sampler__name=sampler, checkpointing__enabled=False)
    finish(place)
    assert {e.group for e in events(place, ev.GroupDiscarded) if e.reason == "dropped"} >= {1, 4}
    assert set(trained_by_step(place).values()) == {3}
