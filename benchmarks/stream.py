"""A training's events as benchmarks need them: legal, fast to make, and with the entropy of real ones.

``engine_events`` tells a run that goes on for ever: batches are reserved, admitted and dispatched ahead, their siblings
seal in a shuffled order, groups commit, steps are claimed and applied, and every so many steps a trainer checkpoint is
committed, after which ``images`` asks for a StateImage. Lengths are long-tailed, checksums random, rewards by choice.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from unlost.replay import events as ev

PROMPTS, SIBLINGS, WORKERS, AHEAD = 32, 8, 8, 3
EVENTS_PER_STEP = PROMPTS * SIBLINGS * 2 + PROMPTS + 6


REWARDS: dict[str, Callable[[float], float]] = {
    "right or wrong": lambda share: float(share < 0.5),
    "graded": lambda share: int(share * 20) / 20,
    "any float": lambda share: share,
}


class _Noise:
    """Random numbers drawn ahead: drawing them one by one would cost more than the events."""

    def __init__(self, seed: int, reward: str = "graded") -> None:
        rnd = random.Random(seed)
        self.tokens = array("i", (1 + int(400 * rnd.lognormvariate(0, 0.9)) for _ in range(1 << 16)))
        self.bits = array("Q", (rnd.getrandbits(32) for _ in range(1 << 16)))
        self.gaps = array("i", (1 + int(rnd.expovariate(1 / 45)) for _ in range(1 << 16)))
        self.rewards = array("d", (REWARDS[reward](rnd.random()) for _ in range(1 << 16)))
        self.at = 0

    def next(self) -> int:
        self.at = (self.at + 1) & 0xFFFF
        return self.at


def engine_events(
    seed: int = 0,
    *,
    save_period: int = 10,
    images: Callable[[], None] | None = None,
    prompts: int = PROMPTS,
    reward: str = "graded",
) -> Iterator[ev.Event]:
    """Legal from an empty state on. ``images`` is called where an image is due, before the next event."""
    noise = _Noise(seed, reward)
    rnd = random.Random(seed)
    t = 0
    yield ev.RunStarted(t, f"{seed:032x}", 1, 1_750_000_000_000_000, "host", 1, {"dataset": "d"}, {}, {})
    for worker in range(WORKERS):
        yield ev.WorkerStarted(t, worker, f"i00001-w{worker:05d}", "host", 2)
    open_batches: deque[int] = deque()
    offsets = [0] * WORKERS
    step = checkpoint = 0
    offset = 1 + WORKERS
    while True:
        for event in _one_step(noise, rnd, open_batches, offsets, step, t, prompts):
            offset += 1
            t = event.t
            yield event
        step += 1
        if step % save_period == 0:
            yield ev.CheckpointStarted(t, checkpoint, ev.CHECKPOINT_TRAINER, step)
            floor = max(0, step - save_period)
            yield ev.CheckpointCommitted(
                t + 5, checkpoint, ev.CHECKPOINT_TRAINER, step, offset, f"step_{step:07d}", f"{checkpoint:064x}",
                1 << 30, 8.25, floor, 700,
            )  # fmt: skip
            offset += 2
            checkpoint += 1
            if images is not None:
                images()
                offset += 1


def _one_step(
    noise: _Noise, rnd: random.Random, batches: deque[int], offsets: list[int], step: int, t: int, prompts: int
) -> Iterator[ev.Event]:
    while len(batches) < AHEAD:
        batch = batches[-1] + 1 if batches else step
        batches.append(batch)
        for event in _begin_batch(noise, batch, step, t, prompts):
            t = event.t
            yield event
    first = batches.popleft() * prompts
    siblings = [(first + g, s) for g in range(prompts) for s in range(SIBLINGS)]
    rnd.shuffle(siblings)
    left = dict.fromkeys(range(first, first + prompts), SIBLINGS)
    for group, sibling in siblings:
        t += noise.gaps[noise.at]
        yield _seal(noise, offsets, t, group, sibling, step)
        left[group] -= 1
        if not left[group]:
            t += 3
            yield ev.GroupCommitted(t, group, SIBLINGS, SIBLINGS * noise.tokens[noise.at], max(0, step - AHEAD), step)
    groups = tuple(range(first, first + prompts))
    yield ev.StepClaimed(t + 40, step, groups)
    generated = tuple((worker, 400 * offsets[worker]) for worker in range(WORKERS))
    loss = noise.bits[noise.next()] / 2**32
    yield ev.StepApplied(t + 900, step, step + 1, loss, 1 - loss, 400 * len(siblings), 3.5, generated, {"kl": loss / 9})
    yield ev.WeightsSynced(t + 990, 0, step + 1, 0.05, WORKERS)
    yield ev.RowsCleared(t + 1000, groups)


def _begin_batch(noise: _Noise, batch: int, step: int, t: int, prompts: int) -> Iterator[ev.Event]:
    first = batch * prompts
    refs = tuple(
        ev.PromptRef(f"sample-{row}", 0, row, noise.bits[noise.next()] << 31 | row, "sums")
        for row in range(first, first + prompts)
    )
    yield ev.BatchReserved(t + 20, batch, first, refs, SIBLINGS, 0, first + prompts)
    yield ev.BatchAdmitted(t + 30, batch, batch, batch, step)
    t += 60
    for group in range(first, first + prompts):
        for sibling in range(SIBLINGS):
            t += noise.gaps[noise.next()]
            yield ev.AttemptDispatched(t, group, sibling, 0, (group + sibling) % WORKERS, 0, step)


def _seal(noise: _Noise, offsets: list[int], t: int, group: int, sibling: int, step: int) -> ev.AttemptSealed:
    at = noise.next()
    worker, tokens = (group + sibling) % WORKERS, noise.tokens[at]
    offsets[worker] += 1 + tokens // 64
    began = max(0, step - AHEAD + 1)
    spans = ((0, 0, began), (tokens // 2, 0, step)) if tokens > 900 and step > began else ((0, 0, began),)
    receipt = ev.Receipt(
        noise.rewards[at], tokens, began, spans[-1][2], f"i00001-w{worker:05d}", offsets[worker],
        noise.bits[at], spans, tokens > 4000, 100 + at % 60, offsets[worker] - tokens // 64,
    )  # fmt: skip
    return ev.AttemptSealed(t, group, sibling, 0, receipt)


# --- one hot pair of records, as Structs for a journal and as dicts for the others --------------------------------


class Records:
    """Record ``i`` of an endless series, half dispatches, half seals: ``struct(i)`` and ``mapping(i)`` say the same."""

    def __init__(self) -> None:
        self.noise = _Noise(1)

    def struct(self, i: int) -> ev.Event:
        """As the ledger builds it."""
        group, sibling = i >> 4, i >> 1 & 7
        if i & 1 == 0:
            return ev.AttemptDispatched(45 * i, group, sibling, 0, group & 7, 0, i >> 9)
        at = i & 0xFFFF
        noise = self.noise
        tokens = noise.tokens[at]
        receipt = ev.Receipt(
            noise.rewards[at], tokens, i >> 9, i >> 9, "i00001-w00003", i, noise.bits[at], ((0, 0, i >> 9),),
            False, 120, i - 6,
        )  # fmt: skip
        return ev.AttemptSealed(45 * i, group, sibling, 0, receipt)

    def mapping(self, i: int) -> dict[str, Any]:
        """As a program that logs JSON lines would."""
        group, sibling = i >> 4, i >> 1 & 7
        if i & 1 == 0:
            return {
                "kind": "attempt_dispatched", "t": 45 * i, "group": group, "sibling": sibling, "attempt": 0,
                "worker": group & 7, "branch": 0, "version": i >> 9,
            }  # fmt: skip
        at = i & 0xFFFF
        noise = self.noise
        tokens = noise.tokens[at]
        return {
            "kind": "attempt_sealed", "t": 45 * i, "group": group, "sibling": sibling, "attempt": 0,
            "reward": noise.rewards[at], "tokens": tokens, "version_min": i >> 9, "version_max": i >> 9,
            "journal": "i00001-w00003", "offset": i, "checksum": noise.bits[at], "weight_spans": [[0, 0, i >> 9]],
            "truncated": False, "prompt_tokens": 120, "first_offset": i - 6,
        }  # fmt: skip
