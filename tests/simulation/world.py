"""A whole run in virtual time: the real controller, ledger, samplers, worker core and journals over SimStorage.

``World`` is the durable world (storage, dataset) that survives crashes; ``Incarnation`` one process life in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import JournalClock, SimDataPlane, SimPlan, SimTrainer, SimWorker, VirtualLoop, write_files
from tests.sim_storage import SimCrash, SimStorage
from unlost.engine.config import Config, build_config, semantic_settings
from unlost.engine.controller import Identity, Parts, SingleController
from unlost.engine.progress import Outcome, Progress, StopRequest
from unlost.engine.protocols import Prompt, RolloutWorker
from unlost.engine.samplers import make_sampler
from unlost.engine.worker_parts import WorkerOptions
from unlost.journal import JournalOptions, JournalReader, JournalWriter
from unlost.replay.events import EVENT_TYPES, AttemptKey, Event, PromptRef
from unlost.replay.fold import fold_reader
from unlost.replay.payloads import PayloadStore
from unlost.replay.state import State

EVENTS = "run/events"
PAYLOADS = "run/payloads"
CHECKPOINTS = "run/checkpoints"


class SimFolders:
    """``checkpoints.Folders`` over SimStorage; publication is atomic and durable, as after its fsyncs."""

    def __init__(self, storage: SimStorage) -> None:
        self.storage = storage

    def _below(self, path: str) -> list[str]:
        path = os.path.normpath(path)
        return [d for d in self.storage.directories if d == path or d.startswith(path + "/")]

    async def names(self, path: str) -> list[str]:
        path = os.path.normpath(path)
        parts = {d[len(path) + 1 :].split("/")[0] for d in self._below(path) if d != path}
        files = self.storage.list_names(path) if path in self.storage.directories else []
        return sorted(parts | set(files))

    async def make(self, path: str) -> None:
        parts = os.path.normpath(path).split("/")
        for i in range(1, len(parts) + 1):
            self.storage.make_directory("/".join(parts[:i]))

    async def write(self, path: str, data: bytes) -> None:
        write_files(self.storage, os.path.dirname(path), {os.path.basename(path): data})

    async def read(self, path: str) -> bytes:
        if os.path.normpath(os.path.dirname(path)) not in self.storage.directories:
            raise FileNotFoundError(path)
        file = self.storage.open(path)
        return file.read_at(0, file.size())

    async def publish(self, source: str, target: str) -> int:
        self.storage.call("publish", source)
        source, target = os.path.normpath(source), os.path.normpath(target)
        if self._below(target):
            raise FileExistsError(target)
        for path in self._below(source):
            self.storage.directories[target + path[len(source) :]] = self.storage.directories.pop(path)
        return 1

    async def remove_tree(self, path: str) -> None:
        for d in self._below(path):
            self.storage.call("remove_tree", d)
            del self.storage.directories[d]


class SimPrompts:
    """``rows`` prompts in order, epoch after epoch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.fingerprint = f"sim-{rows}"

    def __len__(self) -> int:
        return self.rows

    def _prompt(self, epoch: int, index: int) -> Prompt:
        return Prompt(PromptRef(f"p{index}", epoch, index, 7 * index + 1), {"prompt": f"question {index}"})

    def fetch(self, epoch: int, position: int, count: int) -> tuple[list[Prompt], int, int]:
        found = []
        for _ in range(count):
            found.append(self._prompt(epoch, position))
            position += 1
            if position == self.rows:
                epoch, position = epoch + 1, 0
        return found, epoch, position

    def reread(self, ref: PromptRef) -> Prompt:
        return self._prompt(ref.epoch, ref.index)


async def _turn() -> None:
    await asyncio.sleep(0)


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class RunClock:
    """Virtual time that goes on over incarnations."""

    def __init__(self, start_us: int) -> None:
        self._start = start_us
        self._loop = asyncio.get_running_loop()

    def now_us(self) -> int:
        return self._start + round(self._loop.time() * 1e6)

    def wall_us(self) -> int:
        return 1_700_000_000_000_000 + self.now_us()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def sim_config(**overrides: Any) -> Config:
    """A small configuration; ``overrides`` are dotted keys with ``__`` for dots."""
    tree: dict[str, Any] = {
        "run": {"dir": "run", "name": "sim"},
        "model": {"path": "model"},
        "data": {"train": "data"},
        "reward": {"function": "m:f"},
    }
    defaults = {
        "grpo.num_prompts_per_step": 3,
        "grpo.num_generations_per_prompt": 2,
        "grpo.max_steps": 6,
        "generation.max_new_tokens": 64,
        "async_rl.max_inflight_prompts": 8,
        "async_rl.max_buffered_rollouts": 16,
        "checkpointing.save_period": 2,
        "workers.count": 2,
        "journal.progress_interval_tokens": 8,
        "rollout_failure.max_skipped_prompts": 1000,
        "rollout_failure.min_step_batch_fraction": 0.1,
    }
    defaults |= {k.replace("__", "."): v for k, v in overrides.items()}
    for path, value in defaults.items():
        node = tree
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return build_config(tree, folder="/")


@dataclass
class World:
    """What survives a crash, and what the outside knows: tokens generated, steps trained."""

    config: Config
    seed: int = 0
    rows: int = 1000
    storage: SimStorage = field(default_factory=SimStorage)
    now_us: int = 0
    incarnations: int = 0
    generated: list[dict[int, int]] = field(default_factory=list)
    script: Callable[[AttemptKey, int], SimPlan] | None = None
    trained: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)

    def plan(self, key: AttemptKey, seed: int) -> SimPlan:
        """Response lengths depend on the sibling alone, so that a retry is the same response."""
        if self.script is not None:
            return self.script(key, seed)
        h = int.from_bytes(hashlib.sha256(f"{self.seed}/{key.group}/{key.sibling}".encode()).digest()[:4], "little")
        return SimPlan(tokens=4 + h % 60, seconds_per_token=0.02, tokens_per_delta=4)

    def reader(self) -> JournalReader[Event]:
        return JournalReader(EVENTS, EVENT_TYPES, storage=self.storage)

    def events(self) -> list[tuple[int, Event]]:
        reader = self.reader()
        return list(reader.events(start=reader.first_offset))

    def fold(self) -> State:
        return fold_reader(self.reader())

    def live(
        self,
        *,
        restore: str = "latest",
        kill_at_s: float | None = None,
        stop_at_s: float | None = None,
        arrange: Callable[[Incarnation], None] | None = None,
    ) -> Incarnation:
        """One process life. ``kill_at_s``: the process dies at that moment of virtual time."""
        life = Incarnation(self)
        self.incarnations += 1
        if arrange is not None:
            arrange(life)
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        try:
            task = loop.create_task(life.run(restore, stop_at_s))
            if kill_at_s is not None:
                loop.call_later(kill_at_s, life.die)
            try:
                loop.run_until_complete(asyncio.wait((task, life.death(loop)), return_when=asyncio.FIRST_COMPLETED))
                life.killed = life.dead
                if not life.killed:
                    life.outcome = task.result()
            except SimCrash:
                life.killed = True
            finally:
                life.end(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        return life


class Incarnation:
    """The parts of one life. ``plane``, ``trainer`` and ``workers`` die with it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outcome: Outcome | None = None
        self.killed = False
        self.workers: list[SimWorker] = []
        self.trainer: SimTrainer | None = None
        self.plane: SimDataPlane | None = None
        self.writer: JournalWriter[Any] | None = None
        self.controller: SingleController | None = None
        self.state: State | None = None
        self.stop = StopRequest()
        self.dead = False
        self.clock: RunClock | None = None
        self.before_start: Callable[[], None] | None = None

    async def run(self, restore: str, stop_at_s: float | None) -> Outcome:
        world, config = self.world, self.world.config
        storage = world.storage
        for path in ("run", PAYLOADS, CHECKPOINTS):
            await SimFolders(storage).make(path)
        clock = self.clock = RunClock(world.now_us)
        self.writer = JournalWriter.open(
            EVENTS,
            EVENT_TYPES,
            journal_id="sim",
            options=config.journal.options(),
            storage=storage,
            threaded=False,
            clock=JournalClock(clock),
        )
        state = self.state = fold_reader(world.reader()) if self.writer.next_offset else State()
        assert state.offset == self.writer.next_offset
        self.plane = SimDataPlane(clock, storage=storage)
        self.trainer = SimTrainer(clock, self.plane, storage=storage)
        pump = asyncio.create_task(self._flush())
        sampler = config.async_rl.sampler
        parts = Parts(
            writer=self.writer,
            state=state,
            clock=clock,
            prompts=SimPrompts(world.rows),
            sampler=make_sampler(
                sampler.name,
                max_lookahead_versions=sampler.max_lookahead_versions,
                warmup_lookahead_versions=sampler.warmup_lookahead_versions,
                max_staleness_versions=sampler.max_staleness_versions,
                sample_freshest_first=sampler.sample_freshest_first,
            ),
            trainer=self.trainer,
            data_plane=self.plane,
            worker_factory=self._worker,
            payloads=PayloadStore(PAYLOADS, storage) if config.data_plane.payloads == "full" else None,
            folders=SimFolders(storage),
            payload_root=PAYLOADS,
            blocking=inline,
        )
        identity = Identity("sim", self.writer.incarnation, {"dataset": "d"}, semantic_settings(config), {})
        self.controller = SingleController(config, parts, identity, world.progress.append, self.stop)
        if stop_at_s is not None:
            asyncio.get_running_loop().call_later(stop_at_s, self.stop.set, "signal", "test")
        if self.before_start is not None:
            self.before_start()
        outcome = await self.controller.run(restore)
        pump.cancel()
        return outcome

    async def _worker(self, worker_id: int, journal_name: str) -> RolloutWorker:
        world, config = self.world, self.world.config
        assert self.plane is not None
        assert self.clock is not None
        worker = SimWorker(
            self.clock,
            WorkerOptions(
                worker_id=worker_id,
                journal_name=journal_name,
                payloads=config.data_plane.payloads,
                progress_interval_tokens=config.journal.progress_interval_tokens,
            ),
            self.plane,
            payload_root=PAYLOADS,
            script=world.plan,
            storage=world.storage,
            journal_options=config.journal.options(),
        )
        self.workers.append(worker)
        return worker

    async def _flush(self) -> None:
        """The flush thread of the event journal."""
        assert self.writer is not None
        while True:
            await asyncio.sleep(self.world.config.journal.flush_interval_ms / 1000)
            self.writer.pump()

    def death(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Done when ``die`` was called."""
        self._death = loop.create_future()
        return self._death

    def die(self) -> None:
        """SIGKILL: nothing that this life does from here on has an effect."""
        self.dead = True
        self.world.storage.crashed = True
        if not self._death.done():
            self._death.set_result(None)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Clean up after an end of either kind; counts what the workers generated, from their own counters."""
        assert self.clock is not None
        world = self.world
        world.now_us = self.clock._start + round(loop.time() * 1e6)
        world.generated.append({w.worker_id: w.generator.generated_tokens for w in self.workers if w.generator})
        world.storage.crashed = True
        journals = [self.writer, *(worker.journal for worker in self.workers)]
        for worker in self.workers:
            worker.alive = False
        for journal in journals:
            if journal is not None:
                with contextlib.suppress(SimCrash):
                    journal.abandon()
        for _ in range(5):
            for task in asyncio.all_tasks(loop):
                task.cancel()
            with contextlib.suppress(SimCrash, asyncio.CancelledError, RuntimeError):
                loop.run_until_complete(_turn())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.set_exception_handler(lambda *_: None)
        world.storage.kill_process()
        if self.trainer is not None:
            world.trained.extend((self.world.incarnations, step, keys) for step, keys in enumerate(self.trainer.trained))


def cut_power(world: World, seed: int, mode: str = "tear") -> None:
    """The machine lost power: what was not synced is dropped, torn or reordered."""
    world.storage.power_cut(random.Random(seed), mode)


def steps_of(events: Sequence[tuple[int, Event]]) -> list[Event]:
    return [e for _, e in events]
