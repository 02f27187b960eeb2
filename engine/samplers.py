"""Which groups may start, which the trainer takes next, and which are too old.

A sampler is a set of pure rules over the folded state: it holds no state of its own, so every sampler is restorable.
Admission has two phases: ``gate_open`` is waited for without changing anything, then ``stamp`` gives what the one
BatchAdmitted event writes. Versions are scheduling versions (protocol rule 18).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

from ..journal.errors import EXIT_USAGE, UnlostError
from ..replay.state import Group, State


class SamplerError(UnlostError):
    """A sampler that can't be used, or was used against its rules."""

    exit_code = EXIT_USAGE


class Sampler(ABC):
    """Base of all samplers, and the interface of custom ones.

    ``supports_buffer_checkpoint`` must be declared True by a custom sampler: it says that all it needs is in the state.
    ``stamps``: whether admitted batches get a target step.
    """

    name = "custom"
    supports_buffer_checkpoint = False
    stamps = False

    @abstractmethod
    def gate_open(self, state: State) -> bool:
        """Whether another batch may be admitted now."""

    @abstractmethod
    def stamp(self, state: State) -> tuple[int, int]:
        """(target step or -1, dispatch index) of the batch to be admitted now."""

    @abstractmethod
    def buckets(self, state: State) -> list[Collection[int]]:
        """Committed groups that the next step may use, in any order; must not loop over groups."""

    def order(self, state: State, groups: Iterable[int]) -> list[int]:
        """Their order of preference: slots, that is the order of admission."""
        return by_slot(state, groups)

    def ready(self, state: State) -> int:
        """How many groups the next step could take now."""
        return sum(len(bucket) for bucket in self.buckets(state))

    def selectable(self, state: State) -> list[int]:
        """Those groups in the order of preference."""
        return self.order(state, (g for bucket in self.buckets(state) for g in bucket))

    def has_stale(self, state: State) -> bool:
        """Whether ``evictable`` or ``stale_in_flight`` would name any group; cheap."""
        return False

    def evictable(self, state: State) -> list[int]:
        """Committed groups that no step will use any more."""
        return []

    def stale_in_flight(self, state: State) -> list[int]:
        """Groups that are not committed and not worth finishing."""
        return []

    def needed_next(self, state: State, group: Group) -> bool:
        """Whether the next step can't be formed without this unfinished group (protocol rule 21)."""
        return False

    def may_start(self, state: State, group: Group) -> bool:
        """Whether an admitted group may be worked on now; not if a rollback put its step out of admission's reach."""
        return True

    def required_capacity(self, num_prompts_per_step: int) -> int:
        """Buffer slots without which the sampler would block itself; 0 for none."""
        return 0

    @property
    def is_on_policy(self) -> bool:
        """Whether every group is trained by the version that generated it."""
        return False

    def admits_at_most(self, max_steps: int, state: State) -> bool:
        """Whether a further batch could still be trained before ``max_steps``."""
        return True

    def select(self, state: State, minimum: int, maximum: int) -> list[int]:
        """Between ``minimum`` and ``maximum`` groups for the next step, or none."""
        if not 1 <= minimum <= maximum:
            raise SamplerError(f"select needs 1 <= min <= max, got {minimum} and {maximum}")
        return self.selectable(state)[:maximum] if self.ready(state) >= minimum else []


def by_slot(state: State, groups: Iterable[int]) -> list[int]:
    """In the order in which they were admitted."""
    return sorted(groups, key=lambda g: state.groups[g].slot)


class _Gated(Sampler):
    """Admission runs at most ``ahead`` batches ahead of the trainer."""

    supports_buffer_checkpoint = True

    def __init__(self, ahead: int) -> None:
        if ahead < 0:
            raise SamplerError(f"async_rl.sampler: {ahead} versions ahead; give 0 or more")
        self.ahead = ahead

    def gate_open(self, state: State) -> bool:
        return state.dispatch_index < state.trainer_version + self.ahead

    def stamp(self, state: State) -> tuple[int, int]:
        if not self.gate_open(state):
            raise SamplerError(f"{self.name}: admission while the gate is shut")
        return -1, state.dispatch_index + 1

    def required_capacity(self, num_prompts_per_step: int) -> int:
        return num_prompts_per_step * (self.ahead + 1)

    @property
    def is_on_policy(self) -> bool:
        return self.ahead == 0

    def admits_at_most(self, max_steps: int, state: State) -> bool:
        return state.dispatch_index + 1 < max_steps


class InOrder(_Gated):
    """Each batch is stamped with the step that trains it. ``warmup``: a wider gate until the first step is applied."""

    name = "in_order"
    stamps = True

    def __init__(self, max_lookahead_versions: int = 1, warmup_lookahead_versions: int | None = None) -> None:
        super().__init__(max_lookahead_versions)
        if warmup_lookahead_versions is not None and warmup_lookahead_versions < max_lookahead_versions:
            raise SamplerError("async_rl.sampler: warmup_lookahead_versions is below max_lookahead_versions")
        self.warmup = warmup_lookahead_versions

    def _ahead(self, state: State) -> int:
        return self.ahead if self.warmup is None or state.trainer_version > 0 else self.warmup

    def gate_open(self, state: State) -> bool:
        return state.dispatch_index < state.trainer_version + self._ahead(state)

    def stamp(self, state: State) -> tuple[int, int]:
        _, index = super().stamp(state)
        return index, index

    def buckets(self, state: State) -> list[Collection[int]]:
        return [state.committed_by_target.get(state.trainer_version, ())]

    def has_stale(self, state: State) -> bool:
        return any(t < state.trainer_version for t in state.committed_by_target)

    def evictable(self, state: State) -> list[int]:
        old = [t for t in state.committed_by_target if t < state.trainer_version]
        return by_slot(state, (g for t in old for g in state.committed_by_target[t]))

    def needed_next(self, state: State, group: Group) -> bool:
        return group.target_step == state.trainer_version

    def may_start(self, state: State, group: Group) -> bool:
        return group.target_step <= state.trainer_version + self._ahead(state)

    def required_capacity(self, num_prompts_per_step: int) -> int:
        return num_prompts_per_step * (max(self.ahead, self.warmup or 0) + 1)


class _Staleness:
    """Window arithmetic shared by the samplers that look at start weights."""

    def __init__(self, max_staleness_versions: int) -> None:
        self.staleness = max_staleness_versions

    def oldest(self, state: State) -> int:
        return max(0, state.trainer_version - self.staleness)

    def has_stale(self, state: State) -> bool:
        oldest = self.oldest(state)
        return any(w < oldest for w in state.committed_by_weight)

    def evictable(self, state: State) -> list[int]:
        oldest = self.oldest(state)
        old = [w for w in state.committed_by_weight if w < oldest]
        return by_slot(state, (g for w in old for g in state.committed_by_weight[w]))


class Windowed(_Staleness, Sampler):
    """Whatever is inside the window; admission is limited by capacity alone."""

    name = "windowed"
    supports_buffer_checkpoint = True

    def __init__(self, max_staleness_versions: int = 1, sample_freshest_first: bool = False) -> None:
        if max_staleness_versions < 0:
            raise SamplerError("async_rl.sampler: max_staleness_versions is below 0")
        super().__init__(max_staleness_versions)
        self.freshest_first = sample_freshest_first

    def gate_open(self, state: State) -> bool:
        return True

    def stamp(self, state: State) -> tuple[int, int]:
        return -1, state.dispatch_index

    def buckets(self, state: State) -> list[Collection[int]]:
        oldest, newest = self.oldest(state), state.trainer_version
        return [groups for w, groups in state.committed_by_weight.items() if oldest <= w <= newest]

    def order(self, state: State, groups: Iterable[int]) -> list[int]:
        if self.freshest_first:
            return sorted(groups, key=lambda g: (-state.groups[g].start_weight, state.groups[g].slot))
        return by_slot(state, groups)

    def has_stale(self, state: State) -> bool:
        oldest = self.oldest(state)
        return super().has_stale(state) or any(w < oldest for w in state.pending_by_weight)

    def stale_in_flight(self, state: State) -> list[int]:
        oldest = self.oldest(state)
        if all(w >= oldest for w in state.pending_by_weight):
            return []
        return [g for g in (*state.unfinished, *state.complete) if state.groups[g].start_weight < oldest]

    @property
    def is_on_policy(self) -> bool:
        return self.staleness == 0


class WeightFifo(_Staleness, _Gated):
    """The oldest weight in the window first, waiting for its unfinished groups."""

    name = "weight_fifo"

    def __init__(self, max_staleness_versions: int = 1) -> None:
        _Gated.__init__(self, max_staleness_versions)
        _Staleness.__init__(self, max_staleness_versions)

    def _weights(self, state: State) -> list[int]:
        oldest, newest = self.oldest(state), state.trainer_version
        present = {*state.committed_by_weight, *state.pending_by_weight}
        return sorted(w for w in present if oldest <= w <= newest)

    def buckets(self, state: State) -> list[Collection[int]]:
        """The oldest weight's groups; newer ones too once all of an older one's are ready.

        Where groups were given up, the oldest weight alone may be too few for a step: nothing of it would come any
        more, and the step would wait for ever.
        """
        found: list[Collection[int]] = []
        for weight in self._weights(state):
            found.append(state.committed_by_weight.get(weight, ()))
            if weight in state.pending_by_weight:
                break
        return found

    def select(self, state: State, minimum: int, maximum: int) -> list[int]:
        """The oldest weight alone as long as it has ``minimum`` groups, else as few of the next as it takes."""
        chosen = super().select(state, minimum, maximum)
        if len(chosen) < minimum:
            return chosen
        newest = state.groups[chosen[minimum - 1]].start_weight  # in the order of weights
        return [g for g in chosen if state.groups[g].start_weight <= newest]

    def order(self, state: State, groups: Iterable[int]) -> list[int]:
        return sorted(groups, key=lambda g: (state.groups[g].start_weight, state.groups[g].slot))

    def needed_next(self, state: State, group: Group) -> bool:
        return group.start_weight == next(iter(self._weights(state)), None)


class ReadyFirst(_Gated):
    """Whatever is ready, in slot order; nothing is too old."""

    name = "ready_first"

    def __init__(self, max_staleness_versions: int = 1) -> None:
        super().__init__(max_staleness_versions)

    def buckets(self, state: State) -> list[Collection[int]]:
        return [groups for w, groups in state.committed_by_weight.items() if w <= state.trainer_version]


def make_sampler(
    name: str,
    *,
    max_lookahead_versions: int = 1,
    warmup_lookahead_versions: int | None = None,
    max_staleness_versions: int = 1,
    sample_freshest_first: bool = False,
    custom_class: str = "",
    custom_options: dict[str, Any] | None = None,
) -> Sampler:
    """The sampler of that name. Raises SamplerError for a custom one that is missing or does not declare itself."""
    if name == "in_order":
        return InOrder(max_lookahead_versions, warmup_lookahead_versions)
    if name == "windowed":
        return Windowed(max_staleness_versions, sample_freshest_first)
    if name == "weight_fifo":
        return WeightFifo(max_staleness_versions)
    if name == "ready_first":
        return ReadyFirst(max_staleness_versions)
    module_name, _, class_name = custom_class.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SamplerError(
            f"async_rl.sampler.class: can't load {custom_class!r} (module:ClassName): {error}"
        ) from error
    if getattr(cls, "supports_buffer_checkpoint", False) is not True:
        raise SamplerError(f"async_rl.sampler.class: {custom_class} must declare supports_buffer_checkpoint = True")
    for phase in ("gate_open", "stamp"):
        if not callable(getattr(cls, phase, None)):
            raise SamplerError(
                f"async_rl.sampler.class: {custom_class} lacks {phase}(): admission needs its two phases"
            )
    sampler = cls(**(custom_options or {}))
    if not isinstance(sampler, Sampler):
        raise SamplerError(
            f"async_rl.sampler.class: {custom_class} is not a subclass of unlost.engine.samplers.Sampler"
        )
    return sampler
