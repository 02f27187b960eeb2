"""Combinations of settings that cannot work, refused before anything starts.

Each check is one function that returns what is wrong in one line, or nothing; they run in the order of the list. What
is odd but harmless is told apart, and only logged.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from ..journal.errors import JournalError
from .config_keys import SAMPLER_KNOBS, SAMPLER_STAMPING, Config, SamplerConfig


def first_problem(config: Config) -> str | None:
    """What cannot work, in one line that names the key and the remedy; None if nothing was found."""
    for check in CHECKS:
        problem = check(config)
        if problem is not None:
            return problem
    return None


def required_buffer(config: Config) -> int:
    """Groups that the sampler's gate lets run ahead; the buffer must hold them all or the gate never opens.

    In order: P·(L+1), with the larger lookahead of warm-up and steady state; by age: P·(S+1); windowed: none.
    """
    sampler, prompts = config.async_rl.sampler, config.grpo.num_prompts_per_step
    if sampler.name == "in_order":
        return prompts * (max(sampler.max_lookahead_versions, sampler.warmup_lookahead_versions or 0) + 1)
    if sampler.name in ("weight_fifo", "ready_first"):
        return prompts * (sampler.max_staleness_versions + 1)
    return 0


def _buffer(config: Config) -> str | None:
    have, need = config.async_rl.max_buffered_rollouts, required_buffer(config)
    if have < need:
        return (
            f"async_rl.max_buffered_rollouts: {have} is too small: sampler {config.async_rl.sampler.name} with "
            f"grpo.num_prompts_per_step {config.grpo.num_prompts_per_step} needs {need}"
        )
    if have < config.streaming_groups_min:
        return (
            f"async_rl.max_buffered_rollouts: {have} is below the {config.streaming_groups_min} groups that a step "
            "starts with (async_rl.min_groups_for_streaming_train)"
        )
    return None


def _streaming(config: Config) -> str | None:
    groups, prompts = config.async_rl.min_groups_for_streaming_train, config.grpo.num_prompts_per_step
    if groups is not None and groups > prompts:
        return f"async_rl.min_groups_for_streaming_train: {groups} is more than grpo.num_prompts_per_step {prompts}"
    return None


def _sampler(config: Config) -> str | None:
    sampler = config.async_rl.sampler
    if sampler.name == "custom" and not sampler.class_:
        return "async_rl.sampler.class: sampler custom needs it, as module:ClassName"
    if sampler.name != "custom" and sampler.class_:
        return f"async_rl.sampler.class: only for async_rl.sampler.name custom, not {sampler.name}"
    warmup = sampler.warmup_lookahead_versions
    if warmup is not None and warmup < sampler.max_lookahead_versions:
        return (
            f"async_rl.sampler.warmup_lookahead_versions: {warmup} is below "
            f"max_lookahead_versions {sampler.max_lookahead_versions}"
        )
    return None


def _references(config: Config) -> str | None:
    for name, value in (
        ("reward.function", config.reward.function),
        ("async_rl.sampler.class", config.async_rl.sampler.class_),
    ):
        if value is None:
            continue
        module, colon, attribute = value.partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if not colon or not all(part.isidentifier() for part in parts):
            return f"{name}: expected module:name, got {value!r}"
    return None


def _replacement(config: Config) -> str | None:
    failure = config.rollout_failure
    if failure.on_dropped_prompt == "replace":
        for name in ("max_replacement_attempts", "replacement_reserve_prompts"):
            if getattr(failure, name) < 1:
                return f"rollout_failure.{name}: on_dropped_prompt replace needs at least 1"
    if failure.max_backoff_s < failure.backoff_base_s:
        return (
            f"rollout_failure.max_backoff_s: {failure.max_backoff_s} is below backoff_base_s {failure.backoff_base_s}"
        )
    return None


def _data_plane(config: Config) -> str | None:
    plane, saving = config.data_plane, config.checkpointing
    if not plane.enabled:
        return "data_plane.enabled: must be true: rows reach the trainer through the data plane"
    if plane.backend != "simple" and plane.payloads == "none":
        return f"data_plane.backend: {plane.backend} has no snapshots, so data_plane.payloads must be full"
    if plane.backend != "simple" and saving.enabled and saving.save_data_plane:
        return f"data_plane.backend: {plane.backend} has no snapshots: set checkpointing.save_data_plane to false"
    if plane.payloads == "none" and not (saving.enabled and saving.save_data_plane):
        return (
            "data_plane.payloads: none keeps rows in data plane snapshots alone: "
            "set checkpointing.enabled and checkpointing.save_data_plane to true"
        )
    return None


def _snapshots(config: Config) -> str | None:
    if config.rollout_checkpointing.interval_s is None:
        return None
    if not config.checkpointing.enabled:
        return "rollout_checkpointing.interval_s: needs checkpointing.enabled"
    if not config.checkpointing.save_data_plane:
        return "rollout_checkpointing.interval_s: needs checkpointing.save_data_plane"
    return None


def _backlog(config: Config) -> str | None:
    try:
        config.journal.options()
    except JournalError as error:
        return str(error)
    return None


def _devices(config: Config) -> str | None:
    if config.model.device == "cuda":
        for name, gpus in (("workers.gpus", config.workers.gpus), ("trainer.gpus", config.trainer.gpus)):
            if gpus <= 0:
                return f"{name}: model.device cuda needs more than 0 (Ray hides GPUs from who asks for none)"
    return None


def _stop(config: Config) -> str | None:
    stop = config.stop
    if stop.signal is not None:
        number = getattr(signal.Signals, stop.signal, None) if stop.signal.startswith("SIG") else None
        if number is None:
            return f"stop.signal: {stop.signal!r} is no signal here; expected a name like SIGUSR1, or null"
        if number in (signal.SIGKILL, signal.SIGSTOP):
            return f"stop.signal: {stop.signal} cannot be caught"
    if stop.deadline_s is not None and stop.deadline_s <= stop.grace_s:
        return f"stop.deadline_s: {stop.deadline_s} leaves nothing before stop.grace_s {stop.grace_s}"
    return None


CHECKS: Final[tuple[Callable[[Config], str | None], ...]] = (
    _streaming,
    _sampler,
    _buffer,
    _references,
    _replacement,
    _data_plane,
    _snapshots,
    _backlog,
    _devices,
    _stop,
)


def oddities(config: Config, given: frozenset[str]) -> list[str]:
    """What is odd but harmless, one line each. ``given``: the keys that were set on purpose."""
    found = []
    sampler, failure = config.async_rl.sampler, config.rollout_failure
    known = SAMPLER_KNOBS.get(sampler.name)
    if known is not None:
        others = {knob for knobs in SAMPLER_KNOBS.values() for knob in knobs} - set(known)
        untouched = SamplerConfig()  # a resolved configuration spells every default out: those are no one's purpose
        set_in_vain = sorted(
            knob
            for knob in others
            if f"async_rl.sampler.{knob}" in given and getattr(sampler, knob) != getattr(untouched, knob)
        )
        found += [f"async_rl.sampler.{knob} has no meaning for sampler {sampler.name}" for knob in set_in_vain]
    if failure.on_dropped_prompt == "replace":
        if sampler.name not in SAMPLER_STAMPING:
            found.append(
                f"rollout_failure.on_dropped_prompt replace acts only on stamped steps; {sampler.name} has none"
            )
        if failure.replacement_reserve_prompts > config.grpo.num_prompts_per_step:
            found.append("rollout_failure.replacement_reserve_prompts is more than a step holds")
    if not config.checkpointing.enabled:
        found.append("checkpointing.enabled is false: a restart trains from step 0 again, on journaled rollouts")
    return found
