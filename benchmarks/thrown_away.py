"""Tokens thrown away per crash: token prefixes, whole siblings only, and two snapshot designs on the same crashes.

The real controller, worker core and journals run in virtual time (tests/simulation) and are crashed over and over:
half of the crashes end the process, half take the power away with everything that was not synced.
"""

from __future__ import annotations

import logging
import random
import statistics
from dataclasses import dataclass
from typing import Any

from tests.fakes import SimPlan
from tests.simulation.model import Settings
from tests.simulation.raw import read_payloads
from tests.simulation.watch import Crash, Watch, tail_of
from tests.simulation.world import PAYLOADS, World, sim_config
from unlost.replay import events as ev
from unlost.replay.events import AttemptKey

from .result import Result, Table, Target

SEEDS = 10
CHUNK = 64
CRASHES = 21
PROMPTS, SIBLINGS = 4, 4
TOKENS_PER_S = 30
MEDIAN_TOKENS, TOKENS_MAX = 600, 4096
LIFE_S = (20.0, 280.0)
SNAPSHOTS_S = (120, 2)
TARGET = 80


@dataclass(frozen=True)
class Loss:
    """Of one crash, tokens. ``snapshot``: by interval."""

    prefixes: int
    siblings: int
    snapshot: dict[int, int]
    in_flight: int


def _script(seed: int) -> Any:
    def script(key: AttemptKey, _: int) -> SimPlan:
        r = random.Random(f"{seed}/{key.group}/{key.sibling}")
        tokens = min(TOKENS_MAX, max(16, round(r.lognormvariate(0, 1.0) * MEDIAN_TOKENS)))
        return SimPlan(tokens=tokens, seconds_per_token=1 / TOKENS_PER_S, tokens_per_delta=8)

    return script


def _watch(seed: int, progress_tokens: int) -> Watch:
    config = sim_config(
        grpo__num_prompts_per_step=PROMPTS,
        grpo__num_generations_per_prompt=SIBLINGS,
        grpo__max_steps=100_000,
        generation__max_new_tokens=TOKENS_MAX,
        async_rl__sampler__name="ready_first",
        async_rl__max_inflight_prompts=2 * PROMPTS,
        async_rl__max_buffered_rollouts=4 * PROMPTS,
        checkpointing__save_period=5,
        journal__progress_interval_tokens=progress_tokens,
    )
    world = World(config, seed=seed, rows=100_000, script=_script(seed))
    settings = Settings(PROMPTS, SIBLINGS, 100_000)
    watch = Watch(world, settings, trainer_options={"step_seconds": 5.0}, window_us=1_000_000, window_tokens=10_000)
    world.hooks = watch
    return watch


def _loss(watch: Watch, began: dict[AttemptKey, int], start_us: int, end_us: int, seals: dict[AttemptKey, int]) -> Loss:
    """What a crash cost, from the generators' own counts and from what is on the disks after it."""
    model, storage = watch.live, watch.world.storage
    records = {
        name: read_payloads(storage, path)
        for path in list(storage.directories)
        if path.startswith(PAYLOADS + "/") and (name := path.rpartition("/")[2])
    }
    prefixes = siblings = 0
    lost_by = dict.fromkeys(SNAPSHOTS_S, 0)
    in_flight = 0
    for key, before in began.items():
        group = model.groups.get(key.group)
        made = watch.produced[key]
        new = made - before
        trained = group is not None and group.fate == "trained"
        tails = [tail_of(found, key) for found in records.values()]
        if key not in seals and not trained:
            in_flight += 1
            siblings += new
            durable = max((made if tail.sealed else tail.tokens for tail in tails), default=0)
            prefixes += made - max(durable, before)
        elif key in seals and not any(tail.sealed for tail in tails):
            prefixes += new  # sealed, and gone with the power
            siblings += new
        for interval in SNAPSHOTS_S:
            cut = start_us + (end_us - start_us) // (interval * 1_000_000) * interval * 1_000_000
            if key not in seals or (seals[key] > cut and not trained):
                lost_by[interval] += new
    return Loss(prefixes, siblings, lost_by, in_flight)


def simulate(seed: int, crashes: int, progress_tokens: int) -> list[Loss]:
    """The losses of so many crashes of one run."""
    watch = _watch(seed, progress_tokens)
    chance = random.Random(seed)
    losses = []
    for _ in range(crashes):
        watch.crash = Crash()
        known = set(watch.produced)
        start = watch.world.now_us
        began: dict[AttemptKey, int] = {}
        life_s = chance.uniform(*LIFE_S)
        watch.on_submit = lambda key, prefix, began=began: began.setdefault(key, prefix)
        life = watch.world.live(kill_at_s=life_s, limit_s=10 * life_s)
        assert life.killed, life.outcome
        seals = {
            AttemptKey(watch.live.incarnation, e.group, e.sibling, e.attempt): e.t
            for e in watch.appended_events
            if isinstance(e, ev.AttemptSealed)
        }
        assert known.isdisjoint(began)
        if chance.random() < 0.5:
            watch.world.storage.power_cut(chance, "drop")
        losses.append(_loss(watch, began, start, watch.world.now_us, seals))
    return losses


def run(quick: bool) -> Result:
    """All seeds with the default chunk, some with others."""
    logging.disable(logging.CRITICAL)
    seeds, crashes = (2, 3) if quick else (SEEDS, CRASHES)
    rows: list[list[Any]] = []
    ratios: dict[int, float] = {}
    kept: list[Loss] = []
    for chunk in (CHUNK, 16) if quick else (CHUNK, 16, 256):
        some = range(seeds if chunk == CHUNK else min(seeds, 2))
        losses = [loss for seed in some for loss in simulate(seed, crashes, chunk)]
        mean = {
            "prefixes": statistics.mean(loss.prefixes for loss in losses),
            "siblings": statistics.mean(loss.siblings for loss in losses),
            **{f"{i} s": statistics.mean(loss.snapshot[i] for loss in losses) for i in SNAPSHOTS_S},
        }
        ratios[chunk] = mean["120 s"] / mean["prefixes"]
        kept = kept or losses
        rows.append(
            [
                chunk,
                len(losses),
                *(round(mean[name]) for name in ("prefixes", "siblings", "2 s", "120 s")),
                f"1/{mean['2 s'] / mean['prefixes']:.0f}",
                f"1/{ratios[chunk]:.0f}",
            ]
        )
    in_flight = statistics.mean(loss.in_flight for loss in kept)
    return Result(
        name="thrown_away",
        title="Tokens thrown away per crash",
        order=70,
        method=(
            f"The real controller, samplers, worker core and journals in virtual time, crashed after {LIFE_S[0]:.0f} "
            f"to {LIFE_S[1]:.0f} s of work and restored, {crashes} times in each of {seeds} runs; half of the crashes "
            f"take the power away too. {2 * PROMPTS} groups of {SIBLINGS} siblings at once ({in_flight:.0f} attempts "
            f"in flight at the average crash), {TOKENS_PER_S} tokens/s each, response lengths lognormal with median "
            f"{MEDIAN_TOKENS}, sigma 1, at most {TOKENS_MAX}. Tokens are counted by the generators; what survived is "
            "read from the disks.\n\n"
            "*Prefixes*: what `prefix: resume` does. *Siblings*: finished siblings are kept, the others start again. "
            "*Snapshots*: on the same crashes, what a design loses that restores the newest snapshot: the tokens of "
            "every attempt in flight, and of those finished since its cut."
        ),
        tables=[
            Table(
                "Mean tokens thrown away per crash, and the ratio of prefixes to each snapshot design",
                ["progress_interval_tokens", "crashes", "prefixes", "siblings", "2 s", "120 s", "to 2 s", "to 120 s"],
                rows,
            )
        ],
        limits=(
            "In favour of the snapshot designs: a snapshot takes no time and never fails, trained groups count as "
            "saved, and tokens that a prefix carried over from an earlier life are not counted against them. Lengths "
            "are drawn, not generated by a model; restart idle time is not in these figures."
        ),
        targets=[
            Target(
                "thrown-away tokens per crash with prefixes, against a 120 s snapshot design on the same seeds",
                f"≤ 1/{TARGET}",
                f"1/{ratios[CHUNK]:.0f}",
                ratios[CHUNK] >= TARGET,
            )
        ],
    )
