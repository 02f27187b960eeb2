"""A rollout worker may die at any moment of its life: the run goes on with another, up to a limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fakes import SimWorker
from tests.simulation.world import Hooks, Incarnation, World, sim_config
from unlost.engine.protocols import WeightsRef
from unlost.replay.events import StepApplied, WorkerStarted

pytestmark = pytest.mark.slow  # in sum more than a fast suite should take


class DyingWorkers(Hooks):
    """``dies``: (worker's number, the call it dies in), for every worker made."""

    def __init__(self, dies: Callable[[int], str]) -> None:
        self.dies = dies
        self.made = 0

    def worker(self, life: Incarnation, worker: SimWorker) -> None:
        self.made += 1
        call = self.dies(worker.worker_id)
        if not call:
            return
        original = getattr(worker, call)

        async def dying(weights: WeightsRef) -> object:
            worker.kill()
            return await original(weights)

        setattr(worker, call, dying)


@pytest.mark.parametrize("call", ["start", "update_weights"])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_worker_that_dies_before_it_joins_is_replaced(call: str, first: int) -> None:
    """Three in a row from the given one on, the first workers of the run and the replacements' own replacements."""
    hooks = DyingWorkers(lambda number: call if first <= number < first + 3 else "")
    world = World(sim_config(grpo__max_steps=4), hooks=hooks)
    life = world.live()
    assert life.outcome is not None
    assert (life.outcome.reason, life.outcome.exit_code) == ("finished", 0)
    events = [event for _, event in world.events()]
    assert sum(isinstance(event, StepApplied) for event in events) == 4
    if call == "start" and first < 2:
        assert hooks.made == 5
        joined = {event.worker for event in events if isinstance(event, WorkerStarted)}
        assert not joined & set(range(first, first + 3)), "a worker that never started has no event"


@pytest.mark.parametrize("call", ["start", "update_weights"])
def test_workers_that_never_live_end_the_run_with_the_cause(call: str) -> None:
    """Every one dies: not for ever, and the outcome says what went wrong."""
    hooks = DyingWorkers(lambda number: call)
    world = World(sim_config(grpo__max_steps=4), hooks=hooks)
    life = world.live()
    assert life.outcome is not None
    assert life.outcome.exit_code == 1
    assert "rollout workers lost in a row" in life.outcome.detail
    assert hooks.made <= 16
