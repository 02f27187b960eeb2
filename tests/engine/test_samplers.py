"""The samplers against their rules, stated again over plain lists of slots."""

from __future__ import annotations

import random
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unlost.engine.config_checks import required_buffer
from unlost.engine.samplers import Sampler, SamplerError, make_sampler
from unlost.replay.events import PromptRef
from unlost.replay.state import COMMITTED, COMPLETE, UNFINISHED, Group, Sibling, State

NAMES = ("in_order", "weight_fifo", "windowed", "ready_first")


@dataclass(frozen=True)
class Slot:
    """A place in the buffer. ``ready``: committed; else still being generated."""

    id: int
    weight: int
    target: int
    ready: bool


def state_of(slots: list[Slot], version: int, index: int = -1) -> State:
    state = State()
    state.trainer_version, state.dispatch_index = version, index
    for slot in slots:
        status = COMMITTED if slot.ready else UNFINISHED
        group = Group(slot.id, PromptRef(str(slot.id), 0, slot.id, 0), status, 0, [Sibling()], 0)
        group.target_step, group.start_weight, group.slot = slot.target, slot.weight, slot.id
        state.groups[slot.id] = group
    state._derive()
    return state


def evicted(name: str, slots: list[Slot], v: int, age: int) -> list[int]:
    ready = [s for s in slots if s.ready]
    if name == "in_order":
        return [s.id for s in ready if s.target < v]
    return [] if name == "ready_first" else [s.id for s in ready if s.weight < max(0, v - age)]


def selected(name: str, slots: list[Slot], v: int, age: int, least: int, most: int, freshest: bool) -> list[int]:
    oldest = max(0, v - age)
    if name == "weight_fifo":
        found: list[Slot] = []
        for weight in sorted({s.weight for s in slots if oldest <= s.weight <= v}):
            found += [s for s in slots if s.weight == weight and s.ready]
            if len(found) >= least or any(s.weight == weight and not s.ready for s in slots):
                break
    elif name == "in_order":
        found = [s for s in slots if s.ready and s.target == v]
    elif name == "ready_first":
        found = [s for s in slots if s.ready and s.weight <= v]
    else:
        found = [s for s in slots if s.ready and oldest <= s.weight <= v]
        if freshest:
            found.sort(key=lambda s: (v - s.weight, s.id))
    return [s.id for s in found][:most] if len(found) >= least else []


@st.composite
def buffers(draw: st.DrawFn) -> tuple[list[Slot], int, int, int, int]:
    version, age = draw(st.integers(0, 6)), draw(st.integers(0, 3))
    size = draw(st.integers(0, 12))
    weights = st.integers(max(0, version - 4), version)
    slots = [
        Slot(i, draw(weights), draw(st.integers(max(0, version - 2), version + 3)), draw(st.booleans()))
        for i in range(size)
    ]
    least = draw(st.integers(1, 4))
    return slots, version, age, least, draw(st.integers(least, 6))


@pytest.mark.parametrize("name", NAMES)
@given(buffer=buffers(), freshest=st.booleans())
@settings(max_examples=60)
def test_select_and_evict_follow_the_rules(name: str, buffer: tuple[Any, ...], freshest: bool) -> None:
    """Which groups a step takes and which are too old, over random buffers."""
    slots, version, age, least, most = buffer
    sampler = make_sampler(name, max_lookahead_versions=age, max_staleness_versions=age, sample_freshest_first=freshest)
    state = state_of(slots, version)
    freshest = freshest and name == "windowed"
    assert sampler.evictable(state) == evicted(name, slots, version, age)
    assert sampler.select(state, least, most) == selected(name, slots, version, age, least, most, freshest)
    assert sampler.has_stale(state) == bool(sampler.evictable(state) or sampler.stale_in_flight(state))
    assert sampler.ready(state) >= len(sampler.select(state, 1, 99)) or name == "weight_fifo"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("age", [0, 1, 3])
def test_the_gate_and_what_it_stamps(name: str, age: int) -> None:
    """Admission waits while the dispatch index is at version + lookahead; only in_order stamps."""
    sampler = make_sampler(name, max_lookahead_versions=age, max_staleness_versions=age)
    for version in range(4):
        for index in range(-1, 8):
            state = state_of([], version, index)
            open_ = name == "windowed" or index < version + age
            assert sampler.gate_open(state) == open_
            if open_:
                following = index if name == "windowed" else index + 1
                assert sampler.stamp(state) == (following if name == "in_order" else -1, following)
            else:
                with pytest.raises(SamplerError, match="gate is shut"):
                    sampler.stamp(state)


def test_warm_up_opens_the_gate_wider_until_the_first_step() -> None:
    """Before version 1 the warm-up lookahead counts; below the usual one it is refused."""
    sampler = make_sampler("in_order", max_lookahead_versions=1, warmup_lookahead_versions=3)
    assert [sampler.gate_open(state_of([], 0, index)) for index in (2, 3)] == [True, False]
    assert [sampler.gate_open(state_of([], 1, index)) for index in (1, 2)] == [True, False]
    assert sampler.required_capacity(4) == 16
    with pytest.raises(SamplerError, match="warmup_lookahead_versions is below"):
        make_sampler("in_order", max_lookahead_versions=3, warmup_lookahead_versions=2)


@pytest.mark.parametrize("name", NAMES)
def test_only_windowed_aborts_in_flight(name: str) -> None:
    """What is not worth finishing: older than the window, and only there."""
    slots = [Slot(0, 0, 5, False), Slot(1, 3, 5, False), Slot(2, 4, 6, False)]
    state = state_of(slots, 5)
    sampler = make_sampler(name, max_staleness_versions=1, max_lookahead_versions=1)
    assert sampler.stale_in_flight(state) == ([0, 1] if name == "windowed" else [])


def test_a_complete_group_that_is_too_old_does_not_make_the_pump_look_for_ever() -> None:
    """Complete but not committed: has_stale says yes only because stale_in_flight names it."""
    state = state_of([Slot(0, 0, -1, False)], 5)
    state.leave(state.groups[0])
    state.groups[0].status = COMPLETE
    state.enter(state.groups[0])
    sampler = make_sampler("windowed", max_staleness_versions=1)
    assert sampler.has_stale(state)
    assert sampler.stale_in_flight(state) == [0]


@pytest.mark.parametrize(
    ("name", "capacity"), [("in_order", 12), ("weight_fifo", 12), ("ready_first", 12), ("windowed", 0)]
)
def test_required_capacity_is_checked_at_set_up_by_the_same_number(name: str, capacity: int) -> None:
    """Prompts times (lookahead + 1), in the sampler and in the configuration's check."""
    from tests.simulation.world import sim_config
    from unlost.engine.config import ConfigError

    assert make_sampler(name, max_lookahead_versions=2, max_staleness_versions=2).required_capacity(4) == capacity
    keys: dict[str, Any] = {"async_rl__sampler__name": name, "grpo__num_prompts_per_step": 4}
    keys |= {"async_rl__sampler__max_lookahead_versions": 2, "async_rl__sampler__max_staleness_versions": 2}
    assert required_buffer(sim_config(**keys, async_rl__max_buffered_rollouts=12)) == capacity
    if capacity:
        with pytest.raises(ConfigError, match="max_buffered_rollouts"):
            sim_config(**keys, async_rl__max_buffered_rollouts=capacity - 1)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_means_no_lag(name: str) -> None:
    """Zero lookahead or staleness; anything else is off-policy. All are restorable."""
    for lag in (0, 1):
        sampler = make_sampler(name, max_lookahead_versions=lag, max_staleness_versions=lag)
        assert sampler.is_on_policy == (lag == 0)
        assert sampler.supports_buffer_checkpoint


def test_select_refuses_impossible_limits() -> None:
    """1 <= min <= max, or it is the caller's mistake."""
    sampler = make_sampler("windowed")
    for least, most in ((0, 1), (3, 2)):
        with pytest.raises(SamplerError, match="1 <= min <= max"):
            sampler.select(state_of([], 0), least, most)


def test_negative_lags_are_refused() -> None:
    """A staleness or lookahead below zero has no meaning."""
    for name, key in (("in_order", "max_lookahead_versions"), ("windowed", "max_staleness_versions")):
        with pytest.raises(SamplerError, match=r"below 0|0 or more"):
            make_sampler(name, **{key: -1})


def _module(**names: Any) -> str:
    module = types.ModuleType(f"sampler_under_test_{random.getrandbits(40)}")
    vars(module).update(names)
    sys.modules[module.__name__] = module
    return module.__name__


class Good(Sampler):
    supports_buffer_checkpoint = True

    def gate_open(self, state: State) -> bool:
        return True

    def stamp(self, state: State) -> tuple[int, int]:
        return -1, 0

    def buckets(self, state: State) -> list[Any]:
        return [state.committed]


class Undeclared(Good):
    supports_buffer_checkpoint = False


class OnePhase:
    supports_buffer_checkpoint = True


class Foreign:
    supports_buffer_checkpoint = True

    def gate_open(self, state: State) -> bool:
        return True

    def stamp(self, state: State) -> tuple[int, int]:
        return -1, 0


def test_a_custom_sampler_is_loaded_by_name() -> None:
    """``module:ClassName``; what it does not override works as for the others."""
    sampler = make_sampler("custom", custom_class=_module(Good=Good) + ":Good")
    assert isinstance(sampler, Good)
    assert sampler.select(state_of([Slot(0, 0, -1, True), Slot(1, 0, -1, True)], 0), 1, 2) == [0, 1]


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Undeclared, "must declare supports_buffer_checkpoint = True"),
        (OnePhase, r"lacks gate_open\(\): admission needs its two phases"),
        (Foreign, "is not a subclass"),
        (None, "can't load"),
    ],
)
def test_a_custom_sampler_that_can_not_be_restored_is_refused(cls: type | None, says: str) -> None:
    """Undeclared, without the two phases, of another kind, or not there: each named at set-up."""
    name = _module(**({} if cls is None else {"Thing": cls}))
    with pytest.raises(SamplerError, match=says):
        make_sampler("custom", custom_class=f"{name}:Thing")


def test_in_order_holds_back_what_a_rollback_put_out_of_reach() -> None:
    """A restored group of a far step waits until admission would have let it in; the next step's never waits."""
    sampler = make_sampler("in_order", max_lookahead_versions=1)
    state = state_of([Slot(0, 0, 2, False), Slot(1, 0, 3, False), Slot(2, 0, 4, False)], 2)
    assert [sampler.may_start(state, state.groups[g]) for g in range(3)] == [True, True, False]
    assert [sampler.needed_next(state, state.groups[g]) for g in range(3)] == [True, False, False]
