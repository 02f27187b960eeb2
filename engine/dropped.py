"""What becomes of a step when one of its prompts is given up: a loan and a spare, or one group less.

Failure budgets are counted in the ledger, so they hold across restarts. The loader goes round without end, so the
spare pool needs no draining at the end of the data: spares left when the run ends are owned, and never trained.
"""

from __future__ import annotations

import math

from ..journal.errors import UnlostError
from ..replay import events as ev
from ..replay.state import Group, State
from .config_keys import Config


class RunFailed(UnlostError):
    """The run can't go on; the message says why and what to do."""


def is_filtered(config: Config, group: Group) -> bool:
    """Whether ``async_rl.group_filter`` refuses this complete group."""
    if config.async_rl.group_filter != "zero_variance":
        return False
    return len({s.receipt.reward for s in group.siblings if s.receipt is not None}) <= 1


def spare_for(state: State, config: Config, group: Group) -> int | None:
    """The spare that may take the place of ``group``; None if it has to be done without."""
    failure = config.rollout_failure
    if failure.on_dropped_prompt != "replace" or group.target_step < 0:
        return None
    if group.replacements >= failure.max_replacement_attempts:
        return None
    return next(iter(state.spares), None)


def replacement(state: State, t: int, group: Group, reason: str, spare: int) -> ev.PromptReplaced:
    """Give up ``group``: borrow a ready group of the furthest later step if there is one, and let the spare repay."""
    target = group.target_step
    lender = max((step for step in state.committed_by_target if step > target), default=-1)
    borrowed = -1
    if lender >= 0 and target >= state.trainer_version:
        borrowed = min(state.committed_by_target[lender], key=lambda g: state.groups[g].slot)
    return ev.PromptReplaced(
        t,
        group.id,
        reason,
        target,
        spare,
        lender if borrowed >= 0 else target,
        state.trainer_version,
        borrowed,
        lender if borrowed >= 0 else -1,
    )


def step_target(state: State, config: Config, step: int) -> int:
    """Groups that ``step`` trains: the batch less its shortfall (protocol rule 20)."""
    return config.grpo.num_prompts_per_step - state.shortfall.get(step, 0)


def floor_groups(config: Config) -> int:
    """Groups that a step must keep: ``min_step_batch_fraction`` of its prompts, rounded up, one at least."""
    part = config.grpo.num_prompts_per_step * config.rollout_failure.min_step_batch_fraction
    return max(1, math.ceil(round(part, 9)))


def may_shrink(state: State, config: Config, step: int) -> bool:
    """Whether ``step`` may lose another group."""
    return step_target(state, config, step) - 1 >= floor_groups(config)


def require_floor(state: State, config: Config, step: int, last: str) -> None:
    """Raise RunFailed if one group less would put ``step`` below ``min_step_batch_fraction``; ``last``: the loss."""
    if not may_shrink(state, config, step):
        prompts, floor = config.grpo.num_prompts_per_step, floor_groups(config)
        lost = state.shortfall.get(step, 0) + 1
        raise RunFailed(
            f"step below floor: step {step} has lost {lost} of {prompts} groups, {prompts - lost} left, floor {floor} "
            f"(rollout_failure.min_step_batch_fraction); the last: {last}. See `unlost events RUN --kind AttemptFailed`"
        )
