"""From one integer seed: a configuration, a script of lengths and failures, and the crashes of a run."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import SimPlan, sim_reward
from tests.simulation.crash import Crash
from tests.simulation.disturb import More, draw_more
from tests.simulation.outage import Storage, draw_storage
from unlost.engine.protocols import AttemptError, Prompt
from unlost.replay import events as ev
from unlost.replay.events import AttemptKey

SAMPLERS = ("in_order", "weight_fifo", "windowed", "ready_first", "custom")
CUSTOM = "tests.simulation.custom_sampler:EveryOther"
KINDS = tuple(t.__name__ for t in ev.EVENT_TYPES)
RARE = (
    "PromptReplaced", "StepShortened", "GroupDiscarded", "GroupEvicted", "AttemptFailed", "AttemptAbandoned",
    "CheckpointFailed", "CheckpointSkipped", "WorkerStopped", "RowsCleared", "CheckpointCommitted", "StateImage",
    "BatchReserved", "StepApplied", "WeightsSynced", "RunEnded",
)  # fmt: skip
RESTORE_EVENTS = (
    "RestoreStarted", "TrainerRolledBack", "AttemptSealed", "AttemptAbandoned", "GroupCommitted", "RowsCleared",
    "CheckpointCommitted", "WorkerStarted", "WeightsSynced", "RestoreCompleted",
)  # fmt: skip
PHASES = tuple(f"restoring: {p}" for p in ("trainer load", "data plane load", "payload tails", "rows"))
STOPPED_AT = ("put", "clear", "plane save", "plane load", "train", "trainer save", "trainer load", "publish", "remove")
EFFECTS = (
    *(f"{when} {what}" for what in STOPPED_AT for when in ("before", "after")),
    *("generate", "before worker", "before trainer start"),
)


@dataclass
class Case:
    """All that a seed decides."""

    seed: int
    keys: dict[str, Any]
    rows: int
    crashes: list[Crash]
    plane: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    lives: list[dict[str, Any]] = field(default_factory=list)  # keys changed from life to life
    faults: list[dict[str, Any]] = field(default_factory=list)
    lose_disk: bool = False
    lose_plane_s: tuple[float, ...] = ()
    folder_s: float = 0.0
    worker_start_s: float = 0.1
    lose_replies: tuple[int, ...] = ()
    restores: tuple[str, ...] = ()  # how each life is started; latest beyond
    more: More = field(default_factory=More)
    storage: Storage = field(default_factory=Storage)
    failing: float = 0.0
    dying: float = 0.0
    bad_rewards: float = 0.0
    flat_rewards: float = 0.0
    lengths: tuple[float, float] = (12, 0.9)
    calls: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        """Nothing goes wrong but crashes."""
        bad = self.failing or self.dying or self.bad_rewards or self.flat_rewards or self.faults
        return not (bad or self.lose_disk or self.lose_plane_s) and self.more.quiet

    @property
    def disturbed(self) -> bool:
        """Whether there is more than crashes and scripted troubles."""
        return bool(self.more.kinds or self.storage.lives)

    def _chance(self, *what: Any) -> random.Random:
        return random.Random(zlib.crc32(repr((self.seed, *what)).encode()))

    def plan(self, key: AttemptKey, seed: int) -> SimPlan:
        """Lengths have a long tail and depend on the sibling alone; failures on the attempt as well."""
        r = self._chance("length", key.group, key.sibling)
        tokens = max(1, round(r.lognormvariate(0, self.lengths[1]) * self.lengths[0]))
        pace = 0.01 * (1 + r.randrange(3))
        bad, fatal = r.random() < self.failing, r.random() < self.dying
        tries = r.choice((1, 1, 2, 3, 6))
        at = r.randrange(tokens)
        failing = bad and key.attempt < tries
        return SimPlan(
            tokens=tokens,
            seconds_per_token=pace,
            tokens_per_delta=4,
            fail_after=at if failing else -1,
            die_after=at if fatal and not failing and key.attempt < tries else -1,
        )

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        """Some responses can't be scored the first few times; some groups all score the same."""
        sibling = (prompt.ref.epoch, prompt.ref.index, token_ids[0] if token_ids else -1)
        r = self._chance("reward", *sibling)
        if r.random() < self.bad_rewards:
            self.calls[sibling] = self.calls.get(sibling, 0) + 1
            if self.calls[sibling] <= r.choice((1, 1, 2, 3)):
                raise AttemptError(ev.FAIL_DATA, "scripted")
        if self._chance("flat", *sibling[:2]).random() < self.flat_rewards:
            return 1.0
        return sim_reward(prompt, token_ids)


def draw(seed: int, *, plain: bool = False) -> Case:
    """The case of a seed; the same every time. ``plain``: without those of ``disturb`` and ``outage``."""
    r = random.Random(seed)
    prompts, siblings = r.choice((2, 3, 3, 4)), r.choice((1, 2, 2, 3))
    sampler = SAMPLERS[seed % len(SAMPLERS)]
    ahead = r.choice((0, 1, 1, 2))
    keys: dict[str, Any] = {
        "grpo__num_prompts_per_step": prompts,
        "grpo__num_generations_per_prompt": siblings,
        "grpo__max_steps": r.choice((3, 4, 6)),
        "async_rl__sampler__name": sampler,
        "async_rl__max_inflight_prompts": r.choice((1, 2, prompts, 8)),
        "async_rl__max_buffered_rollouts": prompts * (ahead + 1) + r.choice((0, 0, 1, prompts)),
        "async_rl__recovery_granularity": r.choice(("sibling", "sibling", "sibling", "prompt_group")),
        "async_rl__stale_prompts": r.choice(("drop", "requeue")),
        "async_rl__prefix": r.choice(("resume", "resume", "resume", "regenerate")),
        "async_rl__weight_sync": r.choice(("continue", "continue", "abort")),
        "async_rl__min_groups_for_streaming_train": r.choice((None, None, 1, 2)),
        "checkpointing__save_period": r.choice((1, 2, 3, 10)),
        "checkpointing__keep_latest_k": r.choice((2, 2, 3)),
        "data_plane__payloads": r.choice(("full", "full", "full", "none")),
        "journal__progress_interval_tokens": r.choice((4, 8, 16)),
        "journal__flush_interval_ms": r.choice((5.0, 20.0, 20.0, 100.0)),
        "journal__segment_bytes_max": r.choice((64 << 20, 2000)),
        "rollout_checkpointing__interval_s": r.choice((None, None, 0.4, 1.5)),
        "rollout_checkpointing__max_consecutive_failures": 3,
        "rollout_failure__backoff_base_s": 0.1,
        "rollout_failure__max_backoff_s": 1.0,
        "rollout_failure__on_dropped_prompt": r.choice(("shrink", "replace")),
        "rollout_failure__max_replacement_attempts": r.choice((1, 2)),
        "rollout_failure__replacement_reserve_prompts": r.choice((1, prompts)),
        "rollout_failure__max_infra_attempts_per_prompt": r.choice((2, 3)),
    }
    keys["async_rl__sampler__max_staleness_versions"] = ahead
    if sampler == "in_order":
        keys["async_rl__sampler__max_lookahead_versions"] = ahead
        if r.random() < 0.2:
            keys["async_rl__sampler__warmup_lookahead_versions"] = ahead + 1
            keys["async_rl__max_buffered_rollouts"] += prompts
    if sampler == "custom":
        keys["async_rl__sampler__class"] = CUSTOM
    if sampler == "windowed":
        keys["async_rl__sampler__sample_freshest_first"] = r.random() < 0.5
    if keys["data_plane__payloads"] == "full":
        keys["checkpointing__save_data_plane"] = (
            keys["rollout_checkpointing__interval_s"] is not None or r.random() < 0.8
        )
    else:
        keys["async_rl__prefix"] = "regenerate"
    case = Case(seed, keys, rows=r.choice((1000, 1000, prompts * 2 + 1, 2)), crashes=[])
    case.lengths = (r.choice((6, 12, 25)), r.choice((0.4, 0.9, 1.3)))
    _paces(case, r)
    if r.random() < 0.12:
        keys |= {"async_rl__sampler__name": "in_order", "async_rl__sampler__max_lookahead_versions": 0}
        keys.pop("async_rl__sampler__class", None)
        keys.pop("async_rl__sampler__warmup_lookahead_versions", None)
    else:
        _troubles(case, r, siblings)
    case.crashes = [draw_crash(r) for _ in range(r.choice((1, 2, 3, 3)))]
    for _ in range(len(case.crashes) + 1):
        changed: dict[str, Any] = {"workers__count": r.choice((1, 2, 3))}
        if r.random() < 0.2:
            changed["data_plane__storage_units"] = 2
        case.lives.append(changed)
    if not plain:
        case.more = draw_more(case)
        case.storage = draw_storage(seed, len(case.crashes) + 2)
    return case


def _paces(case: Case, r: random.Random) -> None:
    case.folder_s, case.worker_start_s = r.choice((0.0, 0.0, 0.02, 0.3)), r.choice((0.1, 0.1, 1.0))
    case.plane = {"put_seconds": r.choice((0.004, 0.004, 0.1)), "save_seconds": r.choice((0.1, 0.5))}
    case.trainer = {"step_seconds": r.choice((0.1, 0.5, 1.0)), "save_seconds": r.choice((0.05, 0.5))}


def _troubles(case: Case, r: random.Random, siblings: int) -> None:
    if r.random() < 0.3:
        case.failing = 0.1
    if r.random() < 0.25:
        case.dying = 0.05
    if r.random() < 0.25:
        case.bad_rewards = 0.15
    if siblings > 1 and r.random() < 0.2:
        case.keys["async_rl__group_filter"] = "zero_variance"
        case.flat_rewards = r.choice((0.2, 0.6))
    if r.random() < 0.15:
        case.lose_replies = tuple(r.sample(range(4), 2))
    if r.random() < 0.08 and case.keys["data_plane__payloads"] == "full":
        case.lose_disk = True
    if r.random() < 0.1 and case.keys["data_plane__payloads"] == "full":
        case.lose_plane_s = tuple(r.uniform(0.3, 6) for _ in range(2))
    for _ in range(r.choice((0, 0, 0, 1, 2))):
        case.faults.append(
            r.choice(
                (
                    {"where": "checkpoints", "op": "sync", "code": 5},
                    {"where": "checkpoints", "op": "write", "code": 28},
                    {"where": "plane save", "error": OSError(5, "scripted")},
                    {"where": "plane save", "error": TimeoutError("scripted")},
                    {"where": "plane save", "error": ValueError("scripted invariant")},
                    {"where": "events", "op": "sync", "code": 5},
                    {"where": "events", "op": "sync", "delay": 0.3},
                    {"where": "payloads", "op": "sync", "code": 5},
                    {"where": "payloads", "op": "sync", "delay": 0.3},
                )
            )
            | {"at": r.randrange(1, 12)}
        )


def draw_crash(r: random.Random) -> Crash:
    hows = ["time", "call", "op", "append", "before", "queued", "durable", "effect", "phase", "stop"]
    how = r.choices([*hows, "restore event", "restore call"], (14, 6, 6, 8, 6, 6, 8, 12, 6, 4, 12, 5))[0]
    crash = Crash(how=how, time_s=r.uniform(0.05, 12), power=r.choice(("", "", "drop", "tear", "keep")))
    crash.undead = how == "time" and r.random() < 0.3
    if how == "time":
        if crash.undead:
            crash.power = ""
    elif how in ("append", "before", "queued", "durable"):
        crash.what = r.choice(KINDS if r.random() < 0.5 else RARE)
        crash.count = r.choice((1, 1, 2, 3, 5))
    elif how == "effect":
        crash.what, crash.count = r.choice(EFFECTS), r.choice((1, 1, 2, 3, 6))
    elif how == "phase":
        crash.what = r.choice(PHASES)
    elif how == "restore event":
        crash.how = r.choice(("append", "before", "queued", "durable"))
        crash.what, crash.count, crash.after_restore = r.choice(RESTORE_EVENTS), r.choice((1, 1, 2)), True
    elif how == "op":
        crash.what = f"{r.choice(('sync', 'sync', 'write', 'sync_directory'))} {r.choice(('payloads', 'events'))}"
        crash.count = r.choice((1, 2, 5, 10, 20))
    elif how == "stop":
        crash.stop_s, crash.time_s = crash.time_s, r.choice((1e9, crash.time_s + r.uniform(0, 0.5)))
    elif how == "call":
        crash.count = r.randrange(1, 400)
    elif how == "restore call":
        crash.how, crash.after_restore, crash.count = "call", True, r.randrange(1, 80)
    return crash
