"""Runs that reach one place each, where one rule of the protocol keeps a promise; the mutants are killed here.

Most are seeds that were found to reach it; some are arranged by hand. A seed that no longer does shows as a mutant
that survives (``make mutants``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes import SimPlan
from tests.simulation.crash import Crash
from tests.simulation.draw import Case, draw
from tests.simulation.limit import cpu_bound
from tests.simulation.run import run_case, run_seed
from unlost.replay.events import AttemptKey

pytestmark = pytest.mark.slow  # in sum more than a fast suite should take


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with cpu_bound():
        yield
    logging.disable(logging.NOTSET)


def plain(*crashes: Crash, **keys: Any) -> Case:
    """A quiet run of in_order with these crashes."""
    case = draw(2, plain=True)
    case.keys = {
        "grpo__num_prompts_per_step": 2,
        "grpo__num_generations_per_prompt": 2,
        "grpo__max_steps": 6,
        "async_rl__sampler__name": "in_order",
        "async_rl__sampler__max_lookahead_versions": 1,
        "async_rl__max_buffered_rollouts": 4,
        "async_rl__min_groups_for_streaming_train": None,
        "checkpointing__save_period": 2,
        "journal__progress_interval_tokens": 4,
    } | keys
    case.rows, case.crashes, case.faults, case.lives = 1000, list(crashes), [], [{"workers__count": 2}]
    case.failing = case.dying = case.bad_rewards = case.flat_rewards = case.folder_s = 0.0
    case.lose_disk, case.lose_plane_s, case.lose_replies, case.worker_start_s = False, (), (), 0.1
    case.plane, case.trainer = {"put_seconds": 0.004, "save_seconds": 0.1}, {"step_seconds": 0.5, "save_seconds": 0.05}
    case.lengths = (25, 0.9)
    return case


def page_cache() -> None:
    """Die between a payload's write and its sync; restore from the page cache; then lose the power."""
    for number in range(2, 30, 3):
        first = Crash("op", "sync payloads", number)
        run_case(plain(first, Crash("durable", "RestoreCompleted", power="drop"), journal__flush_interval_ms=20.0))


def lost_disk_and_a_full_buffer() -> None:
    """Step 0 has to be done again while later groups fill the buffer."""
    for moment in (2.2, 3.2, 4.2):
        keys = {"grpo__num_generations_per_prompt": 1, "async_rl__max_buffered_rollouts": 2}
        keys |= {"async_rl__sampler__max_lookahead_versions": 0, "checkpointing__save_data_plane": False}
        case = plain(Crash(time_s=moment), **keys, checkpointing__save_period=10)
        case.lose_disk = True
        run_case(case)


def spare_in_a_hurry() -> None:
    """A prompt is given up in the instant in which the spares are being reserved."""
    keys = {"rollout_failure__on_dropped_prompt": "replace", "rollout_failure__max_infra_attempts_per_prompt": 1}
    case = plain(Crash(time_s=3.0), **keys, journal__flush_interval_ms=400.0)

    def script(key: AttemptKey, seed: int) -> SimPlan:
        return SimPlan(20, 0.01, 4, fail_after=1 if key.group == 0 else -1)

    case.plan = script  # type: ignore[method-assign]
    run_case(case)


def back_by_hand() -> None:
    """Restored to step 2 on purpose, trained on to 4 again, crashed: the first branch's step 4 is no candidate."""
    again = Crash("durable", "StepApplied", 2)
    case = plain(Crash(time_s=5.5), again, checkpointing__save_period=1, checkpointing__keep_latest_k=9)
    case.restores = ("latest", "2")
    assert run_case(case).events["TrainerRolledBack"] >= 2


def slow_clears() -> None:
    """Rows of a trained step are being cleared when a snapshot is due, and are wanted again after a rollback."""
    for count in range(2, 9):
        keys = {"rollout_checkpointing__interval_s": 0.3, "checkpointing__save_period": 10}
        case = plain(Crash("append", "CheckpointCommitted", count), **keys)
        case.plane = {"put_seconds": 0.004, "save_seconds": 0.1, "get_seconds": 0.25}
        run_case(case)


PLACES: dict[str, Callable[[], object] | tuple[int, ...]] = {
    "rule02_tails_adopted_unsynced": page_cache,
    "rule03_spare_not_durable": spare_in_a_hurry,
    "rule13_abandoned_branch": back_by_hand,
    "rule10_source_of_the_prefix_forgotten": back_by_hand,
    "rule22_clear_under_way": slow_clears,
    "rule21_needed_group_waits": lost_disk_and_a_full_buffer,
    "rule01_run_started_not_durable": (0,),
    "rule03_reservation_not_durable": (0,),
    "rule04_position_of_this_fetch": (0,),
    "rule05_seal_before_payload": (0,),
    "rule07_prefix_not_journaled_again": (14,),
    "rule08_tokens_of_another_attempt": (22,),
    "rule09_only_the_end_of_the_tail": (5,),
    "rule10_prefix_of_open_attempts_only": (56,),
    "rule11_captured_too_late": (36,),
    "rule12_published_before_its_cut": (21,),
    "rule14_floor_at_the_newest": (0,),
    "rule13_unfinished_ones_stay": (59,),
    "rule14_retired_before_durable": (1,),
    "rule14_payloads_of_trained_groups": (4,),
    "rule16_open_claim_kept": (6,),
    "rule17_retried_blindly": (8,),
    "rule19_spare_left_in_hand": (5,),
    "rule20_shortfall_forgotten": (30,),
    "rule22_cleared_during_a_save": (0,),
    "rule22_uncovered_rows": (1,),
    "rule23_counted_before_adoption": (11,),
    "slip_abandoned_twice": (12,),
    "slip_ahead_of_admission": (35,),
    "slip_batch_admitted_twice": (3,),
    "slip_claimed_groups_lost": (3,),
    "slip_claims_one_short": (0,),
    "slip_cleared_before_durable": (0,),
    "slip_committed_without_rows": (0,),
    "slip_dispatch_before_restore_completed": (3,),
    "slip_filtered_without_shrinking": (55,),
    "slip_late_loss": (87,),
    "slip_newest_checkpoint_only": (22,),
    "slip_prefix_not_used": (5,),
    "slip_resumes_failed_attempts": (149,),
    "slip_rows_not_put_back": (3,),
    "slip_starved": (4,),
    "slip_strays_stay": (11,),
    "slip_weight_fifo_waits_for_nothing": (21,),
}


@pytest.mark.parametrize("place", PLACES)
def test_place(place: str) -> None:
    """Whatever ends the process there, every promise holds afterwards."""
    where = PLACES[place]
    if callable(where):
        where()
    else:
        for seed in where:
            run_seed(seed, plain=True)
