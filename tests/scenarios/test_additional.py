"""Borrowing and repayment, shrinking, cursors, groups between seal and commit, rows that nobody owns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from tests.fakes import run_virtual
from tests.scenarios.buffers import Life, Place, rebuild, sampler_of
from tests.scenarios.checks import ADDITIONAL, names_of, next_life
from tests.scenarios.places import in_memory
from tests.simulation.world import SimPrompts, sim_config
from unlost.engine.dropped import RunFailed, step_target
from unlost.engine.healing import HealingDataPlane
from unlost.engine.restore import RestoreRefused
from unlost.engine.rollout import RolloutPump
from unlost.engine.workers import WorkerPool
from unlost.replay import events as ev
from unlost.replay.state import COMMITTED, POOL, UNFINISHED
from unlost.replay.transitions import IllegalTransition


def pump_of(life: Life, lag: int, **keys: Any) -> RolloutPump:
    """The real pump over this life's ledger; what it would run in the background is not run."""

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        work.close()
        return asyncio.get_running_loop().create_task(asyncio.sleep(0))

    async def no_worker(worker: int, journal: str) -> Any:
        raise AssertionError

    config = sim_config(**keys)
    return RolloutPump(
        config,
        life.ledger,
        sampler_of("in_order", lag),
        SimPrompts(1000),
        WorkerPool(no_worker, life.ledger, 1),
        HealingDataPlane(life.place.plane, life.ledger, None),
        None,
        life.place.clock,
        spawn,
    )


async def borrow_and_repay(place: Place) -> None:
    case = ADDITIONAL["x1_borrow_and_repay_round_trip"]
    expect, version = case["expect"], case["trainer_version"]
    life, ids = await rebuild(place, case, version)
    first_spare = life.state.next_group
    life.reserve(case["reserve"], case["rollouts_per_group"], ev.KIND_SPARE)
    spares = dict(zip(case["reserve"], range(first_spare, first_spare + len(case["reserve"])), strict=True))
    pump = pump_of(
        life,
        case["lag"],
        grpo__num_prompts_per_step=case["groups_per_step"],
        rollout_failure__on_dropped_prompt="replace",
    )
    action = case["actions_before_checkpoint"][0]
    pump._give_up(life.state.groups[ids[action["group"]]], ev.DISCARD_DROPPED, "its data")
    taken = spares[action["expect"]["spare_taken"]]
    spare = life.state.groups[taken]
    assert (spare.status, spare.target_step) == (UNFINISHED, action["expect"]["lender_step"])
    borrowed = life.state.groups[ids[action["expect"]["borrowed_group"]]]
    assert borrowed.target_step == case["groups"][4]["target_step"]
    for index in range(case["rollouts_per_group"]):
        life.dispatch(taken, index, version)
    assert life.state.dispatch_index == case["state_at_checkpoint"]["dispatch_index"]
    await life.save()

    life = await next_life(place, life)
    sampler = sampler_of("in_order", case["lag"])
    restored = await life.restore(sampler)
    state = life.state
    prompts = {int(g.prompt.sample_id[1:]) for g in state.groups.values() if g.trained_step < 0}
    assert sorted(prompts) == expect["prompts_back"]
    assert not prompts & set(expect["not_back"])
    assert {n: state.groups[ids[n]].target_step for n in expect["stamps"]} == expect["stamps"]
    assert [g for g in state.spares if state.groups[g].status == POOL] == [spares[p] for p in (11, 12, 13, 14)]
    assert restored.counters["groups_unfinished_found"] == 1
    assert sampler.evictable(state) == expect["evicted_at_5"]
    assert names_of(ids, sampler.select(state, 5, 5)) == expect["select_at_5"]
    counters = {"promoted_prompt_groups": state.promoted, "replaced_prompt_groups": state.replaced}
    counters["dropped_prompt_groups"] = state.dropped
    assert {name: {str(k): v for k, v in table.items()} for name, table in counters.items()} == expect["counters"]
    life.train(sampler.select(state, 5, 5))
    await life.finish(taken, state.trainer_version)
    assert len(sampler.select(state, 5, 5)) == expect["select_at_6_after_repay"]
    assert state.trainer_version == expect["next_admission_needs_trainer_version"]
    assert sampler.stamp(state)[0] == expect["next_admitted_target_step"]
    life.die()


def test_a_borrowed_group_and_its_repayment_come_back() -> None:
    """14 of 14 prompts, the loan's stamps, the pool in order, and the lender's step whole again."""

    async def main() -> None:
        await borrow_and_repay(await in_memory())

    run_virtual(main)


def test_without_a_spare_the_step_shrinks_to_its_floor_and_no_further() -> None:
    """One group less is trained; one more would put the step below the floor, which ends the run and says so."""
    case = ADDITIONAL["x3_no_spare_shrinks"]
    then = case["then"][0]["expect"]

    async def main() -> None:
        life = Life(await in_memory())
        await life.warm_up(case["trainer_version"], 1)
        life.admit(life.reserve(range(10), 1), 5, 5)
        first = life.state.next_group - 10
        keys = {"grpo__num_prompts_per_step": 10, "rollout_failure__min_step_batch_fraction": 0.9}
        keys |= {"rollout_failure__on_dropped_prompt": "replace", "async_rl__max_buffered_rollouts": 20}
        pump = pump_of(life, case["lag"], **keys)
        pump._give_up(life.state.groups[first], ev.DISCARD_DROPPED, "its data")
        assert step_target(life.state, pump.config, 5) == case["expect"]["step5_target_groups"]
        with pytest.raises(RunFailed) as failed:
            pump._give_up(life.state.groups[first + 1], ev.DISCARD_DROPPED, "its data")
        told = (
            f"{then['error']}: step 5 has lost {then['lost']} of 10 groups, {then['left']} left, floor {then['floor']}"
        )
        assert told in str(failed.value)
        assert first + 1 in life.state.groups, "nothing was given up below the floor"
        life.die()

    run_virtual(main)


async def _with_cursor(place: Place, case: dict[str, Any], index: int) -> tuple[Life, dict[str, int]]:
    life = Life(place)
    await life.warm_up(case["trainer_version"], 2)
    ids = {}
    for step in (5, 6):
        groups = [g for g in case["groups"] if g["target_step"] == step]
        first = life.state.next_group
        life.admit(life.reserve([g["prompt"] for g in groups], 2), step, min(step, index))
        for number, group in enumerate(groups):
            ids[group["id"]] = first + number
            await life.finish(first + number, group["start_weight"])
    return life, ids


def test_a_stale_cursor_is_an_error_at_restore_and_at_admission() -> None:
    """Named with the step and what it holds; no prompt is dropped in silence."""
    case = ADDITIONAL["x4_stale_cursor_must_raise"]

    async def main() -> None:
        place = await in_memory()
        life, _ = await _with_cursor(place, case, case["restored_dispatch_index"])
        sampler = sampler_of("in_order", case["lag"])
        admission = life.reserve(range(30, 33), 2)
        before = life.writer.next_offset
        target, index = sampler.stamp(life.state)
        with pytest.raises(IllegalTransition, match=r"target step 5 already holds 3 group\(s\)"):
            life.admit(admission, target, index)
        assert case["expect"]["error"].startswith(f"target step {target} already holds 3")
        assert (life.writer.next_offset, len(life.state.reserved[admission].groups)) == (before, 3)
        await life.save()
        life = await next_life(place, life)
        with pytest.raises(RestoreRefused, match="stamped for step 6, the dispatch index is 4"):
            await life.restore(sampler)
        life.die()

    run_virtual(main)


def test_the_exact_cursor_is_restored() -> None:
    """The next batch gets step 7, and waits for version 6."""
    case = ADDITIONAL["x5_exact_cursor_restores"]
    same = ADDITIONAL[case["same_as"]]

    async def main() -> None:
        place = await in_memory()
        life, _ = await _with_cursor(place, same, case["restored_dispatch_index"])
        await life.save()
        life = await next_life(place, life)
        sampler = sampler_of("in_order", same["lag"])
        await life.restore(sampler)
        assert life.state.dispatch_index == case["restored_dispatch_index"]
        assert not sampler.gate_open(life.state)
        life.train(sampler.select(life.state, 3, 3))
        assert life.state.trainer_version == case["expect"]["waits_until_trainer_version"]
        assert sampler.gate_open(life.state)
        assert sampler.stamp(life.state)[0] == case["expect"]["next_admitted_target_step"]
        life.die()

    run_virtual(main)


async def sealed_and_stray(place: Place) -> None:
    sealed, stray = ADDITIONAL["x10_all_sealed_not_finalized"], ADDITIONAL["x11_unreferenced_staging_rows"]
    siblings = len(sealed["groups"][0]["sealed"])
    life = Life(place)
    await life.warm_up(1, siblings)
    life.admit(life.reserve([0], siblings), 1, 1)
    group = life.state.next_group - 1
    for index in range(siblings):
        await life.seal(life.dispatch(group, index, 1), 1)
    assert group in life.state.complete
    owned = life.state.groups[group].sealed_row_keys()
    assert len(owned) > len(stray["owned"])
    rows = await place.plane.get(owned)
    await place.plane.put(msgspec.structs.replace(rows[0], key=ev.AttemptKey(1, 77, 0, 0)))
    await life.save()
    life = await next_life(place, life)
    restored = await life.restore(sampler_of("in_order", 1))
    assert life.state.groups[group].status == COMMITTED
    assert restored.counters["siblings_rerun"] == 0
    assert restored.counters["groups_complete_restored"] == 1
    assert [s.attempt for s in life.state.groups[group].siblings] == [0] * siblings, "no sibling is generated again"
    assert sorted(await place.plane.inventory()) == sorted(owned)
    assert restored.counters["rows_cleared"] >= 1
    life.die()


def test_a_sealed_group_is_committed_without_generation_and_stray_rows_go() -> None:
    """What lay between the last seal and its commit reaches the buffer; a row that nobody owns is cleared."""

    async def main() -> None:
        await sealed_and_stray(await in_memory())

    run_virtual(main)


async def worked_example(place: Place) -> None:
    life = Life(place)
    await life.warm_up(1, 4)
    for batch in range(15):
        life.admit(life.reserve([batch], 4), -1, 0)
    first = life.state.next_group - 15
    for group in range(first, first + 7):
        await life.finish(group, 1)
    sealed = iter((3, 3, 3, 3, 2))
    for group in range(first + 7, first + 12):
        done = next(sealed)
        for index in range(4):
            key = life.dispatch(group, index, 1)
            if index < done:
                await life.seal(key, 1)
    await life.save()
    life = await next_life(place, life)
    counters = (await life.restore(sampler_of("ready_first", 1))).counters
    assert counters["groups_complete_restored"] == 7
    assert counters["groups_unfinished_found"] == 8
    assert counters["siblings_reused"] == 14
    assert counters["siblings_rerun"] == 18
    assert counters["siblings_reused"] + counters["siblings_rerun"] == 8 * 4
    assert len(life.state.unfinished) == 8, "all are relaunched, nothing is discarded"
    assert life.state.discarded == 0
    life.die()


def test_the_worked_example_of_the_counters() -> None:
    """7 groups complete; 8 unfinished, of whose siblings 14 are reused and 18 run again."""

    async def main() -> None:
        await worked_example(await in_memory())

    run_virtual(main)
