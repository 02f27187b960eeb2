"""The onlooker: crashes a life where its plan says so, checks each effect as it happens, and counts what was hit.

It stands between the controller and its parts. Rules about the order of effects are checked here, when the effect
happens; what the events say is checked by ``model``, which is fed each event as it is appended.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import SimDataPlane, SimTrainer, SimWorker
from tests.sim_storage import SimCrash
from tests.simulation.crash import Crash
from tests.simulation.disturb import kill_at_calls
from tests.simulation.model import LIVE, SEALED, Broken, Model, Settings, Sibling, Tail, need
from tests.simulation.parts import WatchedFolders, WatchedPlane, WatchedTrainer, WatchedWriter
from tests.simulation.raw import read_events, read_payloads
from tests.simulation.world import EVENTS, PAYLOADS, Hooks, Incarnation, RunClock, SimFolders, World
from unlost.engine.progress import Progress
from unlost.journal import JournalWriter
from unlost.replay import events as ev


@dataclass
class Watch(Hooks):
    world: World
    settings: Settings
    crash: Crash = field(default_factory=Crash)
    live: Model = field(init=False)
    durable: Model = field(init=False)
    coverage: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)
    trained: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    produced: dict[ev.AttemptKey, int] = field(default_factory=dict)
    pending: list[tuple[int, Any, int]] = field(default_factory=list)
    lost_journals: set[str] = field(default_factory=set)
    folder_s: float = 0.0
    window_tokens: int = 0
    window_us: int = 0
    slow: bool = False
    openings: dict[int, Settings] = field(default_factory=dict)  # free keys may change from one to the next
    token_windows: dict[int, int] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)  # trainer checkpoints
    unpublished: set[int] = field(default_factory=set)  # of this life, not told yet
    newest: int = -1
    digests: dict[int, str] = field(default_factory=dict)
    plane_options: dict[str, Any] = field(default_factory=dict)
    trainer_options: dict[str, Any] = field(default_factory=dict)
    life: Incarnation | None = None
    step: str = ""
    last_event: str = ""
    seen: int = 0
    target: int = -1
    reserved_at: dict[int, int] = field(default_factory=dict)
    completed_at: int = -1
    step_history: set[str] = field(default_factory=set)
    appended_events: list[Any] = field(default_factory=list)  # of this life
    on_submit: Callable[[ev.AttemptKey, int], object] = lambda key, prefix: None

    def __post_init__(self) -> None:
        self.live = Model(self.settings)
        self.durable = Model(self.settings)

    # --- crashing --------------------------------------------------------------------------------------------------

    def current(self, life: Incarnation) -> bool:
        """Whether this life is the one that counts: not dead, not undead."""
        return life is self.life and not life.dead

    def occurs(self, life: Incarnation, how: str, what: str) -> None:
        """Something that a crash may be planned at."""
        if not self.current(life):
            return
        crash = self.crash
        if crash.how != how or crash.what not in (what, "*"):
            return
        if crash.after_restore and "RestoreStarted" not in self.step_history:
            return
        self.seen += 1
        if self.seen == crash.count:
            self.kill(life)

    def kill(self, life: Incarnation) -> None:
        life.die()
        if self.crash.how != "phase":  # there a coroutine is waiting to be awaited
            raise SimCrash("planned")

    def breaks(self, error: Broken) -> None:
        self.broken.append(error)
        raise error

    def check(self, ok: bool, rule: str, why: str) -> None:
        if not ok:
            self.breaks(Broken(f"{rule}: {why}"))

    # --- opening -----------------------------------------------------------------------------------------------------

    def opened(self, life: Incarnation) -> None:
        self.life = life
        self.seen, self.target, self.completed_at = 0, -1, -1
        self.step, self.last_event = "opened", "opening"
        self.step_history, self.appended_events = set(), []
        self.pending, self.reserved_at, self.unpublished = [], {}, set()
        assert life.writer is not None
        self.openings[life.writer.incarnation] = self.settings
        self.token_windows[life.writer.incarnation] = self.window_tokens
        self.live, self.durable = self.books(), self.books()
        self.newest = max(self.usable(self.live)[0], default=-1)
        self.live.sees_disks = True
        assert life.state is not None
        need(life.state.offset == self.live.offset, "P6", f"opened at {life.state.offset}, on disk {self.live.offset}")
        self.same_sets(life)
        if self.settings.full:
            self._look_at_payloads()

    def books(self) -> Model:
        """What the journal says now."""
        events, first = read_events(self.world.storage, EVENTS)
        model = Model(self.settings, offset=first, lost_journals=self.lost_journals, openings=self.openings)
        for offset, event in enumerate(events, first):
            model.feed(offset, event)
        return model

    def usable(self, model: Model) -> tuple[list[int], list[int]]:
        """Steps with a finished, whole trainer checkpoint that a restore may use; and those with broken ones alone."""
        whole, known, maybe = set(), set(), set()
        there = set(self.published)
        for checkpoint, (kind, version, _, done, incarnation) in model.checkpoints.items():
            if kind == "trainer" and model.floor <= version <= model.version:
                name = f"step_{version:07d}-i{incarnation:05d}-c{checkpoint:06d}"
                known.add(version)
                if name in there and name not in self.damaged:
                    (whole if done else maybe).add(version)
        return sorted(whole), sorted(known - whole - maybe)

    def same_sets(self, life: Incarnation) -> None:
        """P1: the engine's sets are the books' sets."""
        assert life.state is not None
        theirs, mine = life.state.summary()["prompts"], self.live.sets()
        need(theirs == mine, "P1", f"the engine says {theirs}, the books {mine}")

    def _look_at_payloads(self) -> None:
        """Rules 5 to 10: sealed payloads are there; and how much of each open attempt is on disk."""
        records: dict[str, dict[int, Any]] = {}

        def of(journal: str) -> dict[int, Any]:
            if journal not in records:
                records[journal] = read_payloads(self.world.storage, f"{PAYLOADS}/{journal}") if journal else {}
            return records[journal]

        model = self.live
        for group in model.groups.values():
            kept = group.fate in LIVE or (group.fate == "trained" and group.trained_in >= model.floor)
            for index, sibling in enumerate(group.siblings if kept else ()):
                receipt = sibling.receipt
                if sibling.status != SEALED or receipt is None or receipt.journal in self.lost_journals:
                    continue
                found = of(receipt.journal).get(receipt.offset)
                key = ev.AttemptKey(sibling.incarnation, group.id, index, sibling.attempt)
                good = isinstance(found, ev.SealedRecord) and found.key == key and found.checksum == receipt.checksum
                need(good, "rule 5", f"the durable seal of {key.row_key()} has no payload in {receipt.journal}")
                need(
                    all(c in of(receipt.journal) for c in found.chunks),
                    "rule 14",
                    f"chunks of {key.row_key()} are gone",
                )
        model.tails = {}
        for (group_id, index), sibling in model.wanted_attempts().items():
            key = ev.AttemptKey(sibling.incarnation, group_id, index, sibling.attempt)
            model.tails[group_id, index] = tail = tail_of(of(model.workers.get(sibling.worker, "")), key)
            for incarnation, attempt, worker in sibling.chain:
                older = ev.AttemptKey(incarnation, group_id, index, attempt)
                tail.tokens = max(tail.tokens, tail_of(of(model.workers.get(worker, "")), older).tokens)
            made = self.produced.get(key, 0)
            if not self.slow and not tail.sealed and model.workers.get(sibling.worker) not in self.lost_journals:
                lost, most = made - tail.tokens, self.token_windows.get(key.incarnation, self.window_tokens)
                need(lost <= most, "P2", f"{lost} tokens of {key.row_key()} lost, at most {most}")
            if tail.sealed:
                self.coverage["window: payload sealed, seal not durable"] += 1

    # --- parts -------------------------------------------------------------------------------------------------------

    def writer(self, life: Incarnation, writer: JournalWriter[Any]) -> Any:
        return WatchedWriter(self, life, writer)

    def plane(self, life: Incarnation, clock: RunClock) -> SimDataPlane:
        units = life.world.config.data_plane.storage_units
        return WatchedPlane(self, life, clock, storage=self.world.storage, storage_units=units, **self.plane_options)

    def trainer(self, life: Incarnation, clock: RunClock, plane: SimDataPlane) -> SimTrainer:
        return WatchedTrainer(self, life, clock, plane, storage=self.world.storage, **self.trainer_options)

    def folders(self, life: Incarnation) -> SimFolders:
        return WatchedFolders(self, life)

    def worker(self, life: Incarnation, worker: SimWorker) -> None:
        """Rule 3 at each dispatch, rule 14 at each prune, and the tokens as the generator counts them."""
        self.before_effect(life, "worker")
        start, generate, prune = worker.start, worker.generate, worker.prune

        async def watched_start(weights: Any) -> None:
            await start(weights)
            generator = worker.generator
            assert generator is not None
            submit = generator.submit

            def watched_submit(request_id: Any, prompt_ids: Any, **options: Any) -> None:
                self.produced[request_id] = len(options["prefix_ids"])
                self.on_submit(request_id, self.produced[request_id])
                on_delta = options["on_delta"]

                def counted(ids: Any, *rest: Any) -> None:
                    self.produced[request_id] += len(ids)
                    on_delta(ids, *rest)

                submit(request_id, prompt_ids, **{**options, "on_delta": counted})

            generator.submit = watched_submit  # type: ignore[method-assign]

        async def watched_generate(request: Any) -> Any:
            if self.current(life):
                upto = life.writer.durable_upto if life.writer else 0
                at = self.reserved_at.get(request.key.group, -1)
                self.check(
                    at < upto, "rule 3", f"group {request.key.group} dispatched before its reservation is durable"
                )
                self.check(self.completed_at < upto, "RestoreCompleted first", "dispatched before it is durable")
                self.check(
                    request.key.incarnation == self.live.incarnation, "rule 3", f"{request.key} is of another life"
                )
                self.occurs(life, "effect", "generate")
            return await generate(request)

        async def watched_prune(keep_from: int) -> None:
            name = worker.journal_name
            before = read_payloads(self.world.storage, f"{PAYLOADS}/{name}")
            await prune(keep_from)
            after = read_payloads(self.world.storage, f"{PAYLOADS}/{name}")
            gone = {r.key for offset, r in before.items() if offset not in after}
            if gone:
                self.coverage["pruned a live payload journal"] += 1
            self.check(
                not gone & self.needed_keys(name), "rule 14", f"pruned records of {gone & self.needed_keys(name)}"
            )

        worker.start, worker.generate, worker.prune = watched_start, watched_generate, watched_prune  # type: ignore[method-assign]
        kill_at_calls(self, life, worker)

    def needed_keys(self, journal: str) -> set[ev.AttemptKey]:
        """Attempts with records in ``journal`` that a restore from what is durable now could ask for."""
        model, needed = self.durable, set()
        wanted = model.wanted_attempts()
        for group in model.groups.values():
            if group.fate not in LIVE and not (group.fate == "trained" and group.trained_in >= model.floor):
                continue
            for index, sibling in enumerate(group.siblings):
                key = ev.AttemptKey(sibling.incarnation, group.id, index, sibling.attempt)
                if sibling.receipt is not None and sibling.receipt.journal == journal:
                    needed.add(key)
                elif (group.id, index) in wanted:
                    needed |= self._needed_prefix(group.id, index, sibling, journal)
        return needed

    def _needed_prefix(self, group: int, index: int, sibling: Sibling, journal: str) -> set[ev.AttemptKey]:
        """Of the attempts that went on from each other: the latest, and one before it that holds more than it does."""
        storage, workers = self.world.storage, self.durable.workers
        latest, needed = 0, set()
        for incarnation, attempt, worker in reversed(sibling.chain):
            key = ev.AttemptKey(incarnation, group, index, attempt)
            tokens = tail_of(read_payloads(storage, f"{PAYLOADS}/{workers[worker]}"), key).tokens
            if workers[worker] == journal and (attempt == sibling.attempt or tokens > latest):
                needed.add(key)
            latest = max(latest, tokens)
        return needed

    # --- effects -----------------------------------------------------------------------------------------------------

    def before_effect(self, life: Incarnation, name: str) -> None:
        """Rule 1 for every effect of an incarnation."""
        if not self.current(life):
            return
        writer = life.writer
        assert writer is not None
        self.check(self.durable.incarnation == writer.incarnation, "rule 1", f"{name} before RunStarted is durable")
        self.step = name
        self.step_history.add(name)
        self.occurs(life, "effect", f"before {name}")

    def after_effect(self, life: Incarnation, name: str) -> None:
        if self.current(life):
            self.step = f"after {name}"
            self.occurs(life, "effect", f"after {name}")

    def progress(self, life: Incarnation, progress: Progress) -> None:
        if self.current(life) and progress.message.startswith("restoring: "):
            self.step = progress.message
            self.step_history.add(progress.message)
            if progress.message == "restoring: payload tails" and self.settings.full:
                self._look_at_payloads()  # once more: a zombie's workers may have written since
            if progress.message == "restoring: rows" and self.settings.full:
                before = self.live.tails
                self._look_at_payloads()  # and while they were read
                for place, tail in self.live.tails.items():
                    if place in before:
                        tail.tokens_before, tail.sealed_before = before[place].tokens, before[place].sealed
            self.occurs(life, "phase", progress.message)

    def before_append(self, life: Incarnation, event: Any) -> None:
        kind = type(event).__name__
        self.occurs(life, "before", kind)
        if isinstance(event, ev.AttemptSealed) and event.receipt.journal and not event.adopted:
            journal = next(w.journal for w in life.workers if w.journal_name == event.receipt.journal)
            assert journal is not None
            self.check(event.receipt.offset < journal.durable_upto, "rule 5", "a seal before its payload is durable")
        if isinstance(event, ev.GroupCommitted):
            assert life.plane is not None
            rows = self.live.groups[event.group].rows()
            healed = getattr(life.plane, "restarted", False) or life.plane._lost  # then rows come back meanwhile
            self.check(
                healed or rows <= life.plane._rows.keys(),
                "rows in TQ",
                f"group {event.group} committed without its rows",
            )
        if isinstance(event, ev.StepApplied):
            self._step_applied(life, event)
        if isinstance(event, ev.RestoreCompleted):
            self._rows_as_owned(life)
        if isinstance(event, ev.CheckpointCommitted):
            self.check(event.checkpoint not in self.unpublished, "rule 12", "committed, though it was not published")
        if isinstance(event, ev.CheckpointFailed):
            self.unpublished.discard(event.checkpoint)
        if isinstance(event, ev.AttemptAbandoned) and event.reason == "worker_lost" and self.settings.full:
            self._tail_of_lost(event)

    def _tail_of_lost(self, event: ev.AttemptAbandoned) -> None:
        group = self.live.groups[event.group]
        if group.fate == "unfinished" and not self.live.restoring:
            sibling = group.siblings[event.sibling]
            tail = self.live.tails[group.id, event.sibling] = Tail(0, sealed=False)
            for incarnation, attempt, worker in sibling.chain:
                records = read_payloads(self.world.storage, f"{PAYLOADS}/{self.live.workers[worker]}")
                found = tail_of(records, ev.AttemptKey(incarnation, group.id, event.sibling, attempt))
                tail.tokens, tail.sealed = max(tail.tokens, found.tokens), found.sealed
            tail.lost_worker = True
            key = ev.AttemptKey(sibling.incarnation, group.id, event.sibling, sibling.attempt)
            lost = 0 if self.slow or tail.sealed else self.produced.get(key, 0) - tail.tokens
            self.check(lost <= self.window_tokens, "P2", f"{lost} tokens of {key.row_key()} lost with its worker")

    def _step_applied(self, life: Incarnation, event: ev.StepApplied) -> None:
        """What the trainer says that it was given is what the fold says."""
        trainer = life.trainer
        assert trainer is not None
        self.check(trainer.applied == event.trainer_version, "rule 17", f"the trainer is at {trainer.applied}")
        incarnation, step, keys = self.trained[-1]
        self.check((incarnation, step) == (self.live.incarnation, event.step), "rule 17", f"last trained was {step}")
        slots = sorted((self.live.groups[g] for g in self.live.claimed), key=lambda g: g.slot)
        rows = tuple(s.row(g.id, i) for g in slots for i, s in enumerate(g.siblings))
        self.check(rows == keys, "rule 17", f"trained {keys}, claimed {rows}")

    def _rows_as_owned(self, life: Incarnation) -> None:
        assert life.plane is not None
        owned, there = self.live.owned_rows(), set(life.plane._index)
        self.check(owned == there, "rows", f"missing {sorted(owned - there)}, strays {sorted(there - owned)}")
        self.check(owned <= life.plane._rows.keys(), "rule 22", "the index names rows that are gone")
        for group in self.live.groups.values():
            if group.fate not in LIVE:
                continue
            for index, sibling in enumerate(group.siblings):
                if sibling.receipt is not None:
                    same = life.plane._index[sibling.row(group.id, index)] == sibling.receipt.checksum
                    self.check(same, "rule 6", f"another row under {sibling.row(group.id, index)}")

    def appended(self, life: Incarnation, offset: int, event: Any) -> None:
        if not self.current(life):
            return
        try:
            self.live.feed(offset, event)
        except Broken as error:
            self.breaks(error)
        kind = type(event).__name__
        self.last_event = kind
        self.step = f"{kind} appended"
        self.step_history.add(kind)
        assert life.clock is not None
        self.pending.append((offset, event, life.clock.now_us()))
        self.appended_events.append(event)
        if isinstance(event, ev.BatchReserved):
            for group in (*range(event.first_group, event.first_group + len(event.prompts)), *event.pool_groups):
                self.reserved_at[group] = offset
        if isinstance(event, ev.RestoreCompleted):
            self.completed_at = offset
        if self.crash.how in ("queued", "durable") and self.crash.what in (kind, "*") and self.target < 0:
            self.seen += 1
            if self.seen == self.crash.count:
                self.target = offset
        self.occurs(life, "append", kind)

    def before_pump(self, life: Incarnation) -> None:
        if self.crash.how == "queued" and self.target >= 0 and self.current(life):
            self.kill(life)

    def pumped(self, life: Incarnation) -> None:
        """Feed what is durable now."""
        if not self.current(life):
            return
        assert life.writer is not None
        upto = life.writer.durable_upto
        while self.pending and self.pending[0][0] < upto:
            offset, event, _ = self.pending.pop(0)
            try:
                self.durable.feed(offset, event)
            except Broken as error:
                self.breaks(error)
            self.step = f"{type(event).__name__} durable"
        if self.crash.how == "durable" and 0 <= self.target < upto:
            self.kill(life)

    # --- the end of a life -------------------------------------------------------------------------------------------

    def ended(self, life: Incarnation) -> None:
        if life is not self.life:
            return
        if life.killed:
            self.coverage["crashes"] += 1
            self._cover(life)
            if self.pending and not self.slow and life.clock is not None:
                age = life.clock.now_us() - self.pending[0][2]  # its own clock: an undead one may have run on
                need(age <= self.window_us, "P3", f"an event of {age} µs ago is not durable, at most {self.window_us}")

    def _cover(self, life: Incarnation) -> None:
        cover, pending = self.coverage, [event for _, event, _ in self.pending]
        cover[f"event: {self.last_event}"] += 1
        cover[f"sampler: {self.world.config.async_rl.sampler.name}"] += 1
        kinds = {type(event).__name__ for event in pending}
        for kind in kinds:
            cover[f"window: {kind} not durable"] += 1
        live, durable = self.live, self.durable
        if live.restoring:
            cover[f"restore: {self.step}"] += 1
        trainer = life.trainer
        facts = {
            "reserved, not admitted": bool(durable.admissions),
            "all sealed, group not committed": any(g.complete for g in live.groups.values() if g.fate == "unfinished"),
            "claimed, not trained": live.claim_step >= 0,
            "trained, StepApplied not durable": trainer is not None
            and not live.restoring
            and trainer.applied > durable.version,
            "checkpoint in progress": any(not c[3] for c in live.checkpoints.values()) and not live.restoring,
            "published, commit not durable": any(
                name.startswith(("step_", "rollout_"))
                and int(name[-6:]) in durable.checkpoints
                and not durable.checkpoints[int(name[-6:])][3]
                for name in self.published
            ),
            "spares in the pool": bool(live.of("spare")),
            "loan or shortfall": bool(live.shortfall) or live.counts.get("PromptReplaced", 0) > 0,
            "rows cleared by event, still there": life.plane is not None
            and bool(getattr(life.plane, "to_clear", None)),
        }
        for name, holds in facts.items():
            cover[f"window: {name}"] += holds

    @property
    def published(self) -> list[str]:
        root = self.world.config.checkpoint_dir
        return [
            d[len(root) + 1 :]
            for d in self.world.storage.directories
            if re.fullmatch(re.escape(root) + "/[sr][^/]*", d)
        ]


def tail_of(records: dict[int, Any], key: ev.AttemptKey) -> Tail:
    """The longest run of an attempt's tokens from 0, and whether its sealed record is there."""
    tokens, sealed = 0, False
    for _, record in sorted(records.items()):
        if record.key != key:
            continue
        if isinstance(record, ev.SealedRecord):
            sealed = True
        elif record.first == tokens:
            tokens += record.count
    return Tail(tokens, sealed)


def cut(world: World, crash: Crash, seed: int) -> None:
    if crash.power:
        world.storage.power_cut(random.Random(seed), crash.power)


__all__ = ["Crash", "Sequence", "Watch", "cut", "tail_of"]
