"""Brings a run to the buffer that a scenario describes, by events that the engine would write, over real journals.

Group ids: first ``warm`` groups that were trained to bring the trainer to its version, then the scenario's prompts.
Works over SimStorage and a simulated data plane in virtual time, and over a folder and TransferQueue.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tests.fakes import JournalClock, SimTrainer, sim_logprob, sim_token
from unlost.engine.checkpoints import Checkpointer
from unlost.engine.healing import HealingDataPlane
from unlost.engine.ledger import Ledger
from unlost.engine.restore import Restored, Restorer
from unlost.engine.rows import row_of
from unlost.engine.samplers import Sampler, make_sampler
from unlost.journal import JournalOptions, JournalWriter
from unlost.replay import events as ev
from unlost.replay.fold import fold_reader
from unlost.replay.payload_records import Payload, checksum, receipt_of, sealed_record
from unlost.replay.payloads import PayloadStore
from unlost.replay.state import State

TOKENS = 6


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def sampler_of(name: str, lag: int) -> Sampler:
    return make_sampler(name, max_lookahead_versions=lag, max_staleness_versions=lag)


class Place:
    """Where a run's bytes are: a storage, folders, and a maker of fresh data planes. ``root`` is the run."""

    def __init__(self, storage: Any, folders: Any, root: str, clock: Any, plane: Any, fresh_plane: Any) -> None:
        self.storage, self.folders, self.root, self.clock = storage, folders, root, clock
        self.plane, self.fresh_plane = plane, fresh_plane

    def open_events(self) -> JournalWriter[Any]:
        return JournalWriter.open(
            f"{self.root}/events",
            ev.EVENT_TYPES,
            journal_id="scenario",
            options=JournalOptions(flush_interval_ms=1),
            storage=self.storage,
            threaded=False,
            clock=JournalClock(self.clock),
        )


class Life:
    """One incarnation over a place: ledger, one payload journal, trainer. Nothing is scheduled: tests act by hand."""

    def __init__(self, place: Place) -> None:
        self.place = place
        place.storage.make_directory(place.root)
        place.storage.make_directory(f"{place.root}/payloads")
        place.storage.make_directory(f"{place.root}/checkpoints")
        self.writer = place.open_events()
        self.state = self._folded() if self.writer.next_offset else State()
        self.ledger = Ledger(self.state, self.writer, place.clock, inline)
        self.trainer = SimTrainer(place.clock, place.plane, storage=place.storage, step_seconds=0.01, save_seconds=0.01)
        self._pump = asyncio.get_running_loop().create_task(self._flush())
        t, incarnation = place.clock.now_us(), max(self.writer.incarnation, self.state.incarnation + 1)
        self.ledger.record(ev.RunStarted(t, "scenario", incarnation, place.clock.wall_us(), "host", 1, {}, {}, {}))
        self.worker = self.state.next_worker
        self.journal_name = f"i{incarnation:05d}-w{self.worker:05d}"
        self.ledger.record(ev.WorkerStarted(t, self.worker, self.journal_name))
        self.payloads: JournalWriter[Any] = JournalWriter.open(
            f"{place.root}/payloads/{self.journal_name}",
            ev.PayloadRecord,
            journal_id=self.journal_name,
            storage=place.storage,
            threaded=False,
            clock=JournalClock(place.clock),
        )

    def _folded(self) -> State:
        from unlost.journal import JournalReader

        return fold_reader(JournalReader(f"{self.place.root}/events", ev.EVENT_TYPES, storage=self.place.storage))

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            self.writer.pump()

    def now(self) -> int:
        return int(self.place.clock.now_us())

    def die(self) -> None:
        """The process ends with everything in it; what was flushed stays."""
        self.writer.pump()
        self._pump.cancel()
        self.writer.abandon()
        self.payloads.abandon()

    # --- acting ------------------------------------------------------------------------------------------------------

    def reserve(self, prompts: Iterable[int], generations: int, kind: str = ev.KIND_ORDINARY) -> int:
        refs = [ev.PromptRef(f"p{p}", 0, p, p) for p in prompts]
        admission, _ = self.ledger.reserve(refs, generations, (0, self.state.position + len(refs)), kind=kind)
        return admission

    def admit(self, admission: int, target: int, index: int) -> None:
        self.ledger.record(ev.BatchAdmitted(self.now(), admission, target, index, self.state.trainer_version))

    def dispatch(self, group: int, sibling: int, version: int) -> ev.AttemptKey:
        return self.ledger.dispatch(group, sibling, self.worker, (self.state.branch, version))

    async def seal(self, key: ev.AttemptKey, version: int, reward: float = 0.5) -> None:
        """As a worker does: payload durable, receipt, row."""
        seed = key.group * 1000 + key.sibling
        ids = array("i", (sim_token(seed, i) for i in range(TOKENS))).tobytes()
        logprobs = array("f", (sim_logprob(seed, i) for i in range(TOKENS))).tobytes()
        prompt, spans = array("i", [key.group]).tobytes(), ((0, self.state.branch, version),)
        crc = checksum(prompt, ids, logprobs, spans, reward)
        payload = Payload(key, prompt, ids, logprobs, spans, reward, crc, truncated=False, metrics={})
        offset = self.payloads.append(sealed_record(self.now(), payload, 0, ()))
        self.payloads.sync()
        assert self.ledger.seal(key, receipt_of(payload, self.journal_name, offset))
        await self.place.plane.put(row_of(payload))

    async def finish(self, group: int, version: int) -> None:
        """Generate what the group lacks with these weights, and commit it."""
        for index, sibling in enumerate(self.state.groups[group].siblings):
            if sibling.status == 0:
                await self.seal(self.dispatch(group, index, version), version)
        self.ledger.commit_group(group)

    def train(self, groups: list[int]) -> None:
        step = self.state.trainer_version
        self.ledger.record(ev.StepClaimed(self.now(), step, tuple(groups)))
        self.ledger.record(ev.StepApplied(self.now(), step, step + 1))
        self.trainer.applied = step + 1

    async def warm_up(self, versions: int, generations: int) -> None:
        """Train one group a step until the trainer is at ``versions``."""
        for step in range(versions):
            self.admit(self.reserve([1000 + step], generations), -1, self.state.dispatch_index)
            await self.finish(self.state.next_group - 1, step)
            self.train([self.state.next_group - 1])

    async def save(self) -> None:
        """The real checkpoint."""

        def spawn(work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
            return asyncio.get_running_loop().create_task(work)

        async def nothing() -> None:
            pass

        checkpointer = Checkpointer(
            self.ledger,
            self.place.folders,
            f"{self.place.root}/checkpoints",
            self.trainer,
            self.place.plane,
            self.place.clock,
            keep_latest_k=2,
            failures_max=1,
            save_data_plane=True,
            payloads_full=True,
            after_commit=nothing,
            spawn=spawn,
        )
        task = await checkpointer.begin(ev.CHECKPOINT_TRAINER)
        assert task is not None
        assert await task

    async def restore(self, sampler: Sampler) -> Restored:
        """The real restore of a fresh life, onto a fresh data plane."""
        place = self.place
        self.trainer.plane = place.plane
        await self.trainer.start()
        restorer = Restorer(
            self.ledger,
            sampler,
            self.trainer,
            HealingDataPlane(place.plane, self.ledger, None),
            PayloadStore(f"{place.root}/payloads", place.storage),
            place.folders,
            f"{place.root}/checkpoints",
            place.clock,
            resume_prefixes=True,
            granularity="sibling",
            on_phase=lambda phase: None,
        )

        async def no_workers(weights: Any) -> None:
            pass

        return await restorer.run("latest", no_workers)


async def rebuild(place: Place, scenario: dict[str, Any], version: int) -> tuple[Life, dict[str, int]]:
    """A life whose buffer is the scenario's, with the trainer at ``version``. Returns group id by the vector's name."""
    life = Life(place)
    generations = scenario["rollouts_per_group"]
    groups = scenario["groups"]
    trained = [g for g in groups if g["fate"] == "trained"]
    await life.warm_up(version - bool(trained), generations)
    ids: dict[str, int] = {}
    batches: dict[Any, list[dict[str, Any]]] = {}
    for group in groups:
        stamp = group["target_step"] if group["fate"] != "trained" or group["target_step"] == 5 else None
        batches.setdefault(-1 if stamp is None else stamp, []).append(group)
    for stamp, members in batches.items():
        first = life.state.next_group
        admission = life.reserve([g["prompt"] for g in members], generations)
        life.admit(admission, stamp, max(stamp, life.state.dispatch_index))
        for number, group in enumerate(members):
            ids[group["id"]] = first + number
    for group in groups:
        for index in range(generations):
            key = life.dispatch(ids[group["id"]], index, group["start_weight"])
            if index < group["done"]:
                await life.seal(key, group["start_weight"])
        life.ledger.commit_group(ids[group["id"]])
    for group in groups:
        if group["fate"] == "discarded":
            life.ledger.record(ev.GroupEvicted(life.now(), ids[group["id"]], ev.ABANDON_STALE))
    if trained:
        life.train([ids[g["id"]] for g in trained])
    assert life.state.trainer_version == version
    return life, ids
