"""A crash at every place there is in a small run: every event, every storage call, every step of a restore."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.run import run_case
from tests.simulation.test_places import plain
from tests.simulation.watch import Crash


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def small(*crashes: Crash, **keys: Any) -> Any:
    """Three steps, a checkpoint after each second one: some sixty events."""
    return plain(*crashes, grpo__max_steps=3, **keys)


def crash_until_nothing_is_hit(make: Any, limit: int, stride: int = 1) -> int:
    """Run with the crash at the 1st, 2nd, 3rd … place until one is beyond the end. Returns how many were hit."""
    for count in range(1, limit, stride):
        report = run_case(make(count))
        if report.lives == 1:
            return count - 1
    raise AssertionError(f"still hit at {limit}")


def test_the_small_run_ends() -> None:
    """Without a crash, for the figures below."""
    report = run_case(small())
    assert 50 < report.offset < 250
    assert report.lives == 1


@pytest.mark.parametrize("how", ["append", "durable"])
def test_crashes_along_the_journal(how: str) -> None:
    """Every 13th event: right after it was appended, right after it became durable; with what was not synced lost."""
    hit = crash_until_nothing_is_hit(lambda n: small(Crash(how, "*", n, power="drop")), 400, stride=13)
    assert hit > 45


@pytest.mark.slow
@pytest.mark.parametrize("power", ["", "drop", "tear"])
@pytest.mark.parametrize("how", ["append", "before", "queued", "durable"])
def test_a_crash_at_every_offset(how: str, power: str) -> None:
    """Before and after every single event of the journal, as process kill and as power cut."""
    assert crash_until_nothing_is_hit(lambda n: small(Crash(how, "*", n, power=power)), 400) > 45


@pytest.mark.slow
@pytest.mark.parametrize("power", ["", "tear"])
@pytest.mark.parametrize("payloads", ["full", "none"])
def test_a_crash_at_every_storage_call_of_a_restore(payloads: str, power: str) -> None:
    """The restore is killed inside each of its calls, and the next one ends with the same promises kept."""
    prefix = "resume" if payloads == "full" else "regenerate"
    keys = {"data_plane__payloads": payloads, "async_rl__prefix": prefix}

    def case(count: int) -> Any:
        restore = Crash("call", count=count, after_restore=True, power=power)
        return small(Crash(time_s=1.9), restore, **keys)

    for count in range(1, 240, 5):
        run_case(case(count))


@pytest.mark.slow
def test_a_crash_at_every_storage_call_of_a_small_run() -> None:
    """Every 11th call of the whole life, with the power cut tearing what was being written."""
    hit = crash_until_nothing_is_hit(lambda n: small(Crash("call", count=n, power="tear")), 4000, stride=11)
    assert hit > 300


@pytest.mark.slow
def test_restores_of_restores() -> None:
    """Three crashes in a row, each in the restore after the one before, at every pair of events of it."""
    for first in range(1, 12):
        for second in range(1, 12, 3):
            crashes = [Crash(how, "*", n, after_restore=True) for how, n in (("append", first), ("durable", second))]
            run_case(small(Crash(time_s=2.3, power="drop"), *crashes))


@pytest.mark.slow
@given(
    prompts=st.integers(1, 4),
    siblings=st.integers(1, 3),
    lookahead=st.integers(0, 3),
    room=st.integers(0, 4),
    inflight=st.integers(1, 6),
    save_period=st.integers(1, 4),
    progress=st.sampled_from([1, 4, 32]),
    moment=st.floats(0.05, 6),
    power=st.sampled_from(["", "drop", "tear", "keep"]),
    rows=st.integers(1, 9),
)
@settings(max_examples=60)
def test_any_size_of_everything(**drawn: Any) -> None:
    """Hypothesis looks for a size at which a promise breaks, and shrinks it."""
    case = small(
        Crash(time_s=drawn["moment"], power=drawn["power"]),
        grpo__num_prompts_per_step=drawn["prompts"],
        grpo__num_generations_per_prompt=drawn["siblings"],
        async_rl__sampler__max_lookahead_versions=drawn["lookahead"],
        async_rl__max_buffered_rollouts=drawn["prompts"] * (drawn["lookahead"] + 1) + drawn["room"],
        async_rl__max_inflight_prompts=drawn["inflight"],
        checkpointing__save_period=drawn["save_period"],
        journal__progress_interval_tokens=drawn["progress"],
    )
    case.rows = drawn["rows"]
    run_case(case)
