"""A sampler as a user may write one: no stamps, and of what is ready the newest admission first."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from unlost.engine.samplers import Sampler
from unlost.replay.state import State


class EveryOther(Sampler):
    """Admits while fewer than two batches are ahead; takes groups from the newest to the oldest."""

    name = "custom"
    supports_buffer_checkpoint = True

    def gate_open(self, state: State) -> bool:
        return state.dispatch_index < state.trainer_version + 1

    def stamp(self, state: State) -> tuple[int, int]:
        return -1, state.dispatch_index + 1

    def buckets(self, state: State) -> list[Collection[int]]:
        return [state.committed]

    def order(self, state: State, groups: Iterable[int]) -> list[int]:
        return sorted(groups, key=lambda g: -state.groups[g].slot)

    def admits_at_most(self, max_steps: int, state: State) -> bool:
        return state.dispatch_index + 1 < max_steps

    def required_capacity(self, num_prompts_per_step: int) -> int:
        return 2 * num_prompts_per_step
