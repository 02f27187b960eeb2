"""One seed from beginning to end: live, crash, restore, go on, finish; then the last looks."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.sim_storage import Fault
from tests.simulation.crash import Crash
from tests.simulation.disturb import TOLERATED, Asked, arrange_more, ask, check_asked
from tests.simulation.draw import Case, draw
from tests.simulation.model import Broken, Settings, need
from tests.simulation.outage import OVERRUN, arrange_storage
from tests.simulation.raw import read_events
from tests.simulation.watch import Watch
from tests.simulation.world import EVENTS, PAYLOADS, Incarnation, World, sim_config
from unlost.engine.progress import EXIT_RESUMABLE
from unlost.replay import events as ev
from unlost.replay.state import State
from unlost.replay.transitions import apply

LIVES_MAX = 25
VIRTUAL_LIMIT_S = 600.0
EXPECTED_FAILURES = (
    "step below floor", "lost in a row", "checkpoints failed in a row", "scripted invariant", "the journal's storage",
    "journal failed", "could not be replaced", "payload journal", "[Errno 5]", "[Errno 28]",
)  # fmt: skip
GIVEN_UP = ("checkpoints failed in a row", "the journal's storage failed")
"""After so many failures in a row a run ends, also of a kind that it goes on after."""


@dataclass
class Report:
    seed: int
    lives: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    offset: int = 0
    digest: str = ""


def config_of(case: Case, life: int) -> Any:
    keys = case.keys | case.lives[min(life, len(case.lives) - 1)]
    if case.more.lives:
        keys |= case.more.lives[min(life, len(case.more.lives) - 1)]
    if case.storage.lives:
        keys |= case.storage.lives[min(life, len(case.storage.lives) - 1)]
    least = keys["async_rl__min_groups_for_streaming_train"]
    if least is not None:
        keys["async_rl__min_groups_for_streaming_train"] = min(least, keys["grpo__num_prompts_per_step"])
    if case.keys["async_rl__sampler__name"] == "custom":
        keys["async_rl__max_buffered_rollouts"] = max(
            keys["async_rl__max_buffered_rollouts"], 2 * keys["grpo__num_prompts_per_step"]
        )
    return sim_config(**keys)


def settings_of(case: Case, config: Any) -> Settings:
    failure = config.rollout_failure
    return Settings(
        prompts_per_step=config.grpo.num_prompts_per_step,
        generations=config.grpo.num_generations_per_prompt,
        rows=case.rows,
        full=config.data_plane.payloads == "full",
        resume=config.async_rl.prefix == "resume",
        granularity=config.async_rl.recovery_granularity,
        replace=failure.on_dropped_prompt == "replace",
        replacements_max=failure.max_replacement_attempts,
        keep=config.checkpointing.keep_latest_k,
        saves=config.checkpointing.enabled,
    )


def prepare(case: Case) -> Watch:
    """A world of this case with its onlooker."""
    config = config_of(case, 0)
    world = World(config, seed=case.seed, rows=case.rows, script=case.plan, reward=case.reward)
    world.worker_start_s = case.worker_start_s
    watch = Watch(world, settings_of(case, config), plane_options=case.plane, trainer_options=case.trainer)
    watch.slow = any(f["where"] == "events" or f["where"] == "payloads" for f in case.faults) or bool(case.more.faults)
    watch.slow |= bool(case.storage.outages)
    watch.folder_s = case.folder_s
    world.hooks = watch
    for kind in case.more.kinds:
        watch.coverage[f"drawn: {kind}"] += 1
    watch.coverage["drawn: several at once"] += len(case.more.kinds) > 1
    return watch


def configure(case: Case, watch: Watch, life: int) -> None:
    """The configuration of that life, and what may be lost under it."""
    before, config = watch.world.config, config_of(case, life)
    watch.world.config, watch.settings = config, settings_of(case, config)
    flush_s = config.journal.flush_interval_ms / 1000
    watch.window_us = round(2.5e6 * flush_s) + 1000
    watch.window_tokens = config.journal.progress_interval_tokens + 8 + round(2.5 * flush_s / 0.01)
    if life and "keys" in case.more.kinds:
        for section in config.__struct_fields__:
            now, then = getattr(config, section), getattr(before, section)
            for name in now.__struct_fields__ if now != then else ():
                if getattr(now, name) != getattr(then, name):
                    watch.coverage[f"disturbed: {section}.{name} changed"] += 1


def arrange(case: Case, watch: Watch, life_number: int, crash: Crash) -> Any:
    def now(life: Incarnation) -> None:
        world, loop = watch.world, life.loop
        assert loop is not None
        world.storage.sleep = lambda seconds: setattr(loop._virtual, "now", loop._virtual.now + seconds)
        if crash.how == "op":
            _crash_at_operation(watch, life, crash)
        if crash.how == "call":
            left = [crash.count]

            def hook(op: str, path: str) -> None:
                if crash.after_restore and "RestoreStarted" not in watch.step_history:
                    return
                left[0] -= 1
                if left[0] == 0:
                    watch.coverage[f"call: {op}"] += 1
                    watch.kill(life)

            world.storage.hook = hook
        for index, fault in enumerate(case.faults):
            if (life_number + index) % 2 == 0 and life_number < 6:
                loop.call_later(0.3, _inject, life, fault)
        for step in case.lose_replies if life_number == 0 else ():
            loop.call_later(0.3, lambda s=step: life.trainer.lose_reply_of.add(s) if life.trainer else None)
        arrange_more(watch, life, life_number, case.more)
        arrange_storage(watch, life, life_number, case.storage)
        again = not (case.lose_disk and life_number > 3)  # with a lost disk each time costs what was generated since
        for moment in case.lose_plane_s if again else ():
            loop.call_later(moment, lambda: life.plane.lose() if life.plane else None)
        if world.zombies:
            for number in range(6):
                loop.call_later(0.2 + 0.4 * number, lambda: None if life.dead else world.shamble(0.3))

    return now


def _crash_at_operation(watch: Watch, life: Incarnation, crash: Crash) -> None:
    """Die inside the so-manieth call of a kind on a kind of file, before it has any effect."""
    operation, part = crash.what.split(" ")
    left = [crash.count]

    def hook(op: str, path: str) -> None:
        if op == operation and part in path:
            left[0] -= 1
            if left[0] == 0:
                watch.coverage[f"call: {op} {part}"] += 1
                watch.kill(life)

    watch.world.storage.hook = hook


def _inject(life: Incarnation, fault: dict[str, Any]) -> None:
    storage = life.world.storage
    if "error" in fault:
        if life.plane is not None:
            life.plane.fail_next("save", fault["error"])
    elif "delay" in fault:
        storage.faults.append(Fault(fault["op"], skip=fault["at"], delay_s=fault["delay"], name=fault["where"]))
    else:
        storage.fail(fault["op"], fault["code"], times=1 + fault["at"] % 2, skip=fault["at"], name=fault["where"])


def run_case(case: Case) -> Report:
    """Raises Broken (or Stuck) at the first thing that is not as promised."""
    watch = prepare(case)
    world, report = watch.world, Report(case.seed)
    chance = random.Random(case.seed ^ 0x5EED)
    other = random.Random(f"{case.seed} asked")
    crashes, asks, afterwards = list(case.crashes), list(case.more.asks), list(case.more.after_the_end)
    finished = False
    while not finished:
        need(report.lives < LIVES_MAX, "progress", f"not finished after {report.lives} lives")
        configure(case, watch, report.lives)
        kind = asks.pop(0) if asks else "latest"
        asked = ask(kind, watch, other)
        if report.lives < len(case.restores):
            asked = Asked(case.restores[report.lives])
        watch.appended_events, watch.unpublished = [], set()  # a life may end while it opens the journal
        watch.crash = crash = crashes.pop(0) if crashes else Crash()
        try:
            life = world.live(
                restore=asked.mode,
                kill_at_s=crash.time_s if crash.time_s < 1e6 else None,
                stop_at_s=crash.stop_s if crash.stop_s < 1e6 else None,
                limit_s=VIRTUAL_LIMIT_S,
                arrange=arrange(case, watch, report.lives, crash),
                undead=crash.undead,
            )
        except OSError:
            coded = any("code" in fault for fault in case.faults) or bool(case.more.faults or case.storage.outages)
            need(coded, "outcome", "an opening failed, and nobody asked for it")
            watch.coverage["outcome: opening failed as scripted"] += 1
            report.lives += 1
            continue
        report.lives += 1
        if watch.broken:
            raise watch.broken[0]
        refused = check_asked(kind, asked, watch, life)
        check_began(watch, asked)
        if life.killed:
            if crash.power:
                world.storage.power_cut(chance, crash.power)
            _after_crash(case, watch, chance)
            continue
        assert life.outcome is not None
        need(not watch.unpublished, "outcome", f"checkpoints {watch.unpublished} were not published, and none was told")
        if refused:
            continue
        if life.outcome.exit_code == EXIT_RESUMABLE:
            watch.coverage["outcome: stopped as asked"] += 1
            continue
        if life.outcome.exit_code != 0:
            expected = any(text in life.outcome.detail for text in EXPECTED_FAILURES)
            if "Errno" in life.outcome.detail:
                expected = any("code" in fault for fault in case.faults)
                expected |= any(f"[Errno {fault['code']}]" in life.outcome.detail for fault in case.more.faults)
                tolerated = any(f"[Errno {code}]" in life.outcome.detail for code in TOLERATED.values())
                expected &= not tolerated or any(text in life.outcome.detail for text in GIVEN_UP)
            stuck = "a write made no progress" in life.outcome.detail
            expected |= stuck and any(fault.get("short") == 0 for fault in case.more.faults)
            codes = {outage.code for outage in case.storage.outages}
            expected |= any(f"[Errno {code}]" in life.outcome.detail for code in codes)
            expected |= bool(case.storage.outages) and OVERRUN in life.outcome.detail
            need(expected, "outcome", f"life {report.lives}: {life.outcome.detail}")
            watch.coverage["outcome: failed as scripted"] += 1
            continue
        finished = not afterwards
        if afterwards:
            asks.insert(0, afterwards.pop(0))
    _last_looks(case, watch, report)
    return report


def check_began(watch: Watch, asked: Asked) -> None:
    """A restore goes on from the newest trainer checkpoint that is finished and whole, or from a newer one."""
    led = [e.to_version for e in watch.appended_events if isinstance(e, ev.RestoreStarted)]
    completed = any(isinstance(e, ev.RestoreCompleted) for e in watch.appended_events)
    if asked.mode == "latest" and completed:
        need(led[-1] >= watch.newest, "P5", f"step {watch.newest} is saved, restored was {led}")


def _after_crash(case: Case, watch: Watch, chance: random.Random) -> None:
    """Damage that a machine may do between two lives."""
    world = watch.world
    if case.lose_disk and not watch.lost_journals:
        journals = sorted(d for d in world.storage.directories if d.startswith(PAYLOADS + "/"))
        if journals:
            gone = chance.choice(journals)
            del world.storage.directories[gone]
            watch.lost_journals.add(gone.rpartition("/")[2])
            watch.coverage["a payload disk lost"] += 1
    another = not case.more.kinds or len(watch.usable(watch.books())[0]) > 1  # after going back there may be one alone
    if chance.random() < 0.15 and not watch.coverage["a checkpoint damaged"] and another:
        _damage(watch, chance)


def _damage(watch: Watch, chance: random.Random) -> None:
    """Flip a byte of, or lose, a file of the newest checkpoint; one is left to fall back to."""
    world = watch.world
    root = world.config.checkpoint_dir
    published = sorted(d for d in world.storage.directories if re.fullmatch(re.escape(root) + "/step_[^/]*", d))
    if len(published) < 2:
        return
    newest = published[-1]
    files = [f"{newest}/manifest.json", f"{newest}/trainer/trainer.json"]
    if f"{newest}/data_plane" in world.storage.directories:
        files.append(f"{newest}/data_plane/unit-0")
    file = chance.choice(files)
    if chance.random() < 0.5:
        world.storage.delete(file)
    else:
        body = bytearray(world.storage.content(file))
        body[chance.randrange(len(body))] ^= 4
        world.storage.put(file, bytes(body))
    watch.coverage["a checkpoint damaged"] += 1
    if "/data_plane/" not in file:
        watch.damaged.add(newest.rpartition("/")[2])


def _last_looks(case: Case, watch: Watch, report: Report) -> None:
    """The whole journal again, from outside, event by event."""
    world = watch.world
    events, first = read_events(world.storage, EVENTS)
    state = State()
    model = type(watch.live)(watch.settings, lost_journals=watch.lost_journals, openings=watch.openings)
    need(first == 0, "offsets", f"the journal begins at {first}")
    stride = 1 if len(events) < 250 else 11
    for offset, event in enumerate(events):
        apply(state, offset, event)
        model.feed(offset, event)
        if offset % stride == 0 or offset == len(events) - 1:
            theirs, mine = state.summary()["prompts"], model.sets()
            need(theirs == mine, "P1", f"offset {offset}: the engine says {theirs}, the books {mine}")
    most = world.config.grpo.max_steps
    beyond = model.version > most and all(i < model.incarnation for i, _ in model.applied.values())  # it was lowered
    need(model.version == most or beyond, "end", f"ended at {model.version}")
    for step, (incarnation, groups) in model.applied.items():
        keys = [k for i, s, k in watch.trained if (i, s) == (incarnation, step)]
        need(len(keys) == 1, "rule 17", f"incarnation {incarnation} trained step {step} {len(keys)} times")
        members = {int(k.split(".")[1][1:]) for k in keys[0]}
        need(members == set(groups), "P1", f"step {step} trained {members}, journal {groups}")
    known = {c for c, (kind, version, *_) in model.checkpoints.items() if kind == "trainer" and version >= model.floor}
    left = [name for name in watch.published if name.startswith("step_") and int(name[-6:]) not in known]
    need(not left or bool(case.more.faults), "leftovers", f"{left} belong to no checkpoint that a restore may use")
    report.coverage, report.offset = watch.coverage, len(events)
    report.events = Counter(type(event).__name__ for event in events)
    report.digest = watch.digests[model.version]


def run_seed(seed: int, *, plain: bool = False) -> Report:
    """Draw and run; on-policy runs in which nothing else goes wrong end with an uninterrupted run's weights."""
    case = draw(seed, plain=plain)
    report = run_case(case)
    keys = case.keys
    on_policy = keys["async_rl__sampler__name"] == "in_order" and keys["async_rl__sampler__max_lookahead_versions"] == 0
    warm = "async_rl__sampler__warmup_lookahead_versions" in keys
    dropped = sum(report.events[kind] for kind in ("GroupDiscarded", "StepShortened", "PromptReplaced"))
    if on_policy and not warm and case.quiet and not dropped:
        again = draw(seed, plain=True)
        again.crashes, again.lose_replies = [], ()
        whole = run_case(again)
        need(whole.digest == report.digest, "weights", "not those of an uninterrupted run")
        report.coverage["final weights compared"] += 1
    return report


__all__ = ["Broken", "Report", "run_case", "run_seed"]
