"""Further draws of a seed, from a stream of their own: what else may happen to a run besides crashes.

Free keys changed from life to life, restarts at an older step or at step 0, faults where checkpoints are published and
where old files are removed, workers killed at any moment, checkpoints switched off; about a quarter of the seeds have
one of these, some several at once.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.fakes import SimWorker
from tests.sim_storage import Fault
from tests.simulation.model import need
from unlost.engine.progress import EXIT_RESUMABLE
from unlost.replay import events as ev

if TYPE_CHECKING:
    from tests.simulation.draw import Case
    from tests.simulation.watch import Watch
    from tests.simulation.world import Incarnation

SHARE = 0.27
KINDS = ("keys", "restore", "faults", "kills", "no checkpoints")
TOLERATED = {"publish": 122, "publish done": 122, "remove_tree": 16, "remove": 16, "list checkpoints": 116}
"""Operation (and place) -> errno that it fails with; a run goes on, unless checkpoints fail too often in a row."""
CALLS = ("start", "generate", "put_row", "prune", "abort", "update_weights", "stats", "stop")


@dataclass
class Kill:
    """A worker is killed: at ``at_s`` of a life, or at the ``count``-th ``call`` of any worker, before or during it."""

    life: int
    at_s: float = -1.0
    call: str = ""
    count: int = 1
    after_s: float = -1.0
    which: int = 0
    all: bool = False


@dataclass
class More:
    """What was drawn. ``asks``: how each life is started (latest, older, newest, none, absent, damaged)."""

    kinds: tuple[str, ...] = ()
    lives: list[dict[str, Any]] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    after_the_end: list[str] = field(default_factory=list)

    @property
    def quiet(self) -> bool:
        """Whether a run ends with an undisturbed one's weights all the same."""
        return not any("grpo__max_steps" in keys for keys in self.lives)


def draw_more(case: Case) -> More:
    """What else happens in the run of this case; most often nothing."""
    r, more = random.Random(f"{case.seed} more"), More()
    if r.random() >= SHARE:
        return more
    number = r.choice((1, 1, 1, 2, 2, 3))
    kinds = r.sample(KINDS, number)
    if case.keys["data_plane__payloads"] == "none" and "no checkpoints" in kinds:
        kinds[kinds.index("no checkpoints")] = "restore"
    more.kinds = tuple(sorted(set(kinds)))
    lives = len(case.crashes) + 2
    more.lives = [{} for _ in range(lives)]
    for kind, drawn in (("keys", _keys), ("restore", _asks), ("faults", _faults), ("kills", _kills)):
        if kind in more.kinds:
            drawn(case, more, r, lives)
    if "no checkpoints" in more.kinds:
        off = range(lives) if r.random() < 0.4 else r.sample(range(lives), r.randrange(1, lives))
        for life in off:
            more.lives[life] |= {"checkpointing__enabled": False, "rollout_checkpointing__interval_s": None}
    if r.random() < 0.15:
        more.after_the_end = [r.choice(("older", "none", "latest", "newest")) for _ in range(r.choice((1, 2)))]
    return more


def _keys(case: Case, more: More, r: random.Random, lives: int) -> None:
    for life in range(lives):
        choices = free_keys(case)
        for name in r.sample(sorted(choices), r.choice((0, 1, 1, 2, 4, 8))):
            more.lives[life][name] = r.choice(choices[name])
        keys = more.lives[life]
        if keys.get("rollout_checkpointing__interval_s", case.keys["rollout_checkpointing__interval_s"]) is not None:
            keys.pop("checkpointing__save_data_plane", None)
            if not case.keys.get("checkpointing__save_data_plane", True):
                keys["checkpointing__save_data_plane"] = True


def free_keys(case: Case) -> dict[str, tuple[Any, ...]]:
    """Keys that may change on resume (docs/configuration.md), with values that fit this case."""
    keys = case.keys
    prompts = keys["grpo__num_prompts_per_step"]
    ahead = keys["async_rl__sampler__max_staleness_versions"]
    least = prompts * (max(ahead, keys.get("async_rl__sampler__warmup_lookahead_versions") or 0) + 1)
    choices: dict[str, tuple[Any, ...]] = {
        "grpo__max_steps": tuple(keys["grpo__max_steps"] + more for more in (-1, 1, 2)),
        "async_rl__max_inflight_prompts": (1, 2, 8),
        "async_rl__max_buffered_rollouts": (least, least + 1, least + 4 * prompts),
        "async_rl__min_groups_for_streaming_train": (None, 1, 2),
        "async_rl__recovery_granularity": ("sibling", "prompt_group"),
        "async_rl__stale_prompts": ("drop", "requeue"),
        "async_rl__weight_sync": ("continue", "abort"),
        "checkpointing__save_period": (1, 2, 3, 10),
        "checkpointing__keep_latest_k": (2, 3, 4),
        "rollout_checkpointing__interval_s": (None, 0.1, 0.4, 1.5),
        "rollout_checkpointing__max_consecutive_failures": (2, 3, 5),
        "rollout_failure__backoff_base_s": (0.0, 0.1, 0.5),
        "rollout_failure__max_infra_attempts_per_prompt": (1, 2, 3, 5),
        "rollout_failure__max_data_attempts_per_prompt": (1, 2, 3),
        "rollout_failure__max_replacement_attempts": (1, 2, 3),
        "rollout_failure__replacement_reserve_prompts": (1, prompts),
        "workers__count": (1, 2, 3, 5),
        "data_plane__storage_units": (1, 2, 3),
        "journal__flush_interval_ms": (1.0, 5.0, 20.0, 100.0),
        "journal__segment_bytes_max": (500, 2000, 64 << 20),
        "journal__compression_level": (1, 3, 9),
        "journal__backlog_high_bytes": (1, 2000, 16 << 20),
        "journal__scan_on_open": ("from_image", "all"),
        "journal__progress_interval_tokens": (1, 4, 16, 64),
        "journal__progress_interval_ms": (50.0, 1000.0),
        "stop__grace_s": (0.0, 0.3, 60.0),
    }
    if keys["data_plane__payloads"] == "full":
        choices["async_rl__prefix"] = ("resume", "regenerate")
        choices["checkpointing__save_data_plane"] = (True, False)
    return choices


def _asks(case: Case, more: More, r: random.Random, lives: int) -> None:
    kinds = ("latest", "older", "older", "older", "newest", "none", "absent", "damaged")
    more.asks = ["latest", *(r.choice(kinds) for _ in range(lives - 1))]
    if r.random() < 0.6:
        more.after_the_end = [r.choice(("older", "older", "none"))]
    if r.random() < 0.5:  # else there is often nothing older to go back to
        for keys in more.lives:
            keys |= {"checkpointing__save_period": 1, "checkpointing__keep_latest_k": r.choice((2, 3, 9))}


def _faults(case: Case, more: More, r: random.Random, lives: int) -> None:
    places = (
        ("publish", ""), ("publish", "/tmp_step"), ("publish", "/tmp_rollout"), ("publish done", ""),
        ("remove_tree", ""), ("remove_tree", "payloads"), ("remove_tree", "/step_"), ("remove_tree", "tmp_"),
        ("remove", "payloads"), ("remove", "payloads"), ("list", "checkpoints"), ("list", "payloads"),
        ("create", "events"), ("create", "payloads"), ("create", "checkpoints"), ("write", "events"),
        ("write", "payloads"), ("sync_directory", "events"), ("sync_directory", "payloads"),
        ("sync_directory", "checkpoints"), ("make_directory", "checkpoints"), ("make_directory", "payloads"),
        ("truncate", "events"), ("truncate", "payloads"), ("read", "checkpoints"), ("read", "payloads"),
        ("read", "events"), ("open", "checkpoints"), ("open", "payloads"), ("rename", ""),
    )  # fmt: skip
    for _ in range(r.choice((1, 1, 2, 3))):
        op, name = r.choice(places) if r.random() < 0.5 else r.choice(places[:10])
        fault = {
            "op": op,
            "name": name,
            "code": TOLERATED.get(op) or TOLERATED.get(f"{op} {name}") or r.choice((5, 28)),
            "life": r.choice((0, r.randrange(lives - 1))),
            "at_s": r.choice((0.0, 0.3, r.uniform(0.3, 3))),
            "skip": r.choice((0, 0, 0, 1, 2, 5)),
            "times": r.choice((1, 1, 2, 3, 1000)) if op in ("remove_tree", "remove") else r.choice((1, 1, 2)),
        }
        if op == "write" and r.random() < 0.5:
            fault["short"] = r.choice((0, 1, 20))
        more.faults.append(fault)
    often: dict[str, Any] = {"checkpointing__save_period": 1} if r.random() < 0.6 else {}
    small: dict[str, Any] = {"journal__segment_bytes_max": 400} if r.random() < 0.6 else {}
    for keys in more.lives:
        keys |= often | small


def _kills(case: Case, more: More, r: random.Random, lives: int) -> None:
    for _ in range(r.choice((1, 2, 3, 5))):
        kill = Kill(r.choice((0, r.randrange(lives - 1))), which=r.randrange(8), all=r.random() < 0.15)
        if r.random() < 0.4:
            kill.at_s = r.uniform(0.0, 1.0) if r.random() < 0.4 else r.uniform(0.0, 8.0)
        else:
            kill.call, kill.count = r.choice(CALLS), r.choice((1, 1, 2, 3, 6, 12))
            kill.after_s = r.choice((-1.0, 0.0, 0.001, 0.005, 0.03))
        more.kills.append(kill)


# --- in a life ------------------------------------------------------------------------------------------------------


def arrange_more(watch: Watch, life: Incarnation, number: int, more: More) -> None:
    """Set up what is to happen in the life of that number."""
    assert life.loop is not None
    for fault in more.faults:
        if fault["life"] == number:
            if fault["at_s"]:
                life.loop.call_later(fault["at_s"], _inject, watch, life, fault)
            else:
                _inject(watch, life, fault)
    kills = [replace(kill) for kill in more.kills if kill.life == number]
    for kill in kills:
        if kill.at_s >= 0:
            life.loop.call_later(kill.at_s, _strike, watch, life, kill, None, "at some moment")
    life.kills = [kill for kill in kills if kill.call]
    if number < len(more.lives) and more.lives[number].get("checkpointing__enabled") is False:
        watch.coverage["disturbed: checkpoints switched off"] += 1


class Told(Fault):
    """A fault that is counted when it strikes."""

    coverage: Counter[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "times" and self.coverage is not None:
            self.coverage[f"disturbed: {self.op} {self.name}".rstrip() + " failed"] += 1


def _inject(watch: Watch, life: Incarnation, fault: dict[str, Any]) -> None:
    if life.dead:
        return
    short, code = fault.get("short"), fault["code"]
    error = None if short is not None else OSError(code, os.strerror(code))
    told = Told(fault["op"], error, fault["times"], fault["skip"], short, name=fault["name"])
    told.coverage = watch.coverage
    watch.world.storage.faults.append(told)


def kill_at_calls(watch: Watch, life: Incarnation, worker: SimWorker) -> None:
    """Let the kills that wait for a call of any worker see this one's calls."""

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            for kill in life.kills:
                if kill.call == name:
                    kill.count -= 1
                    if kill.count == 0 and kill.after_s < 0:
                        _strike(watch, life, kill, worker, f"before {name}")
                    elif kill.count == 0:
                        later = (_strike, watch, life, kill, worker, f"during or after {name}")
                        life.loop.call_later(kill.after_s, *later)  # type: ignore[union-attr]
            return await method(*arguments)

        return call

    if life.kills:
        for name in CALLS:
            setattr(worker, name, watched(name, getattr(worker, name)))


def _strike(watch: Watch, life: Incarnation, kill: Kill, worker: SimWorker | None, when: str) -> None:
    if life.dead:
        return
    alive = [w for w in life.workers if w.alive]
    if not kill.all:
        alive = (
            [worker] if worker is not None and worker.alive else alive[kill.which % len(alive) :][:1] if alive else []
        )
    for victim in alive:
        busy = "starting" if victim.generator is None else "busy" if victim.generator.running else "idle"
        victim.kill()
        watch.coverage[f"disturbed: worker killed {when}"] += 1
        watch.coverage[f"disturbed: worker killed while {busy}{', in a restore' * watch.live.restoring}"] += 1
    if len(alive) > 1:
        watch.coverage["disturbed: all workers killed at once"] += 1


# --- between lives --------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """``mode``: what ``--restore`` is given. ``version``: where it must lead, -1: not known beforehand.

    ``refused``: what a refusal that must follow says, one of these; none: it may not be refused.
    """

    mode: str = "latest"
    version: int = -1
    refused: tuple[str, ...] = ()


def ask(kind: str, watch: Watch, chance: random.Random) -> Asked:
    """What a life is asked for, of what the journal and the folders hold now. Told by the books, not by the engine."""
    if kind == "latest":
        return Asked()
    model = watch.books()
    if not model.incarnation:
        return Asked("3", refused=("has no run yet",)) if kind == "absent" else Asked()
    usable, unusable = watch.usable(model)
    if kind == "none":
        return Asked("none", 0, ("no usable checkpoint at or above version",) if model.floor else ())
    if kind == "absent":
        return Asked(str(model.version + 7), refused=("no checkpoint of that step",))
    if kind == "damaged":
        texts = ("can't be used", "no checkpoint of that step")
        return Asked(str(unusable[-1]), refused=texts) if unusable else Asked()
    versions = usable if kind == "newest" else usable[:-1] or usable
    if not versions:
        return Asked()
    version = versions[-1] if kind == "newest" else chance.choice(versions)
    return Asked(str(version), version)


def check_asked(kind: str, asked: Asked, watch: Watch, life: Incarnation) -> bool:
    """Whether the life did what it was asked for. Returns True if it was refused as it had to be."""
    events = watch.appended_events
    led = [e.to_version for e in events if isinstance(e, ev.RestoreStarted)]
    if asked.version >= 0 and not asked.refused:
        need(all(v == asked.version for v in led), "--restore", f"asked for {asked.version}, led to {led}")
    outcome = life.outcome
    if asked.refused:
        done = {type(e).__name__ for e in events} - {"RunStarted", "RestoreStarted", "RunEnded"}
        need(not done, "--restore", f"{asked.mode} was to be refused, done was {done}")
        if outcome is None or life.killed:
            return False
        right = outcome.exit_code != 0 and any(text in outcome.detail for text in asked.refused)
        disturbed = "Errno" in outcome.detail
        need(right or disturbed or outcome.exit_code == EXIT_RESUMABLE, "--restore", f"{asked.mode} gave {outcome}")
        if right:
            watch.coverage[f"disturbed: --restore {kind} refused"] += 1
        return right
    if asked.mode != "latest" and any(isinstance(e, ev.RestoreCompleted) for e in events):
        back = any(isinstance(e, ev.TrainerRolledBack) and e.to_version < e.from_version for e in events)
        watch.coverage[f"disturbed: --restore {kind}, {'steps undone' if back else 'no step undone'}"] += 1
    return False
