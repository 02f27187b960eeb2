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

from tests.fakes import JournalClock, SimDataPlane, SimPlan, SimTrainer, SimWorker, VirtualLoop, sim_reward, write_files
from tests.sim_storage import SimCrash, SimStorage
from tests.simulation.machine import one_machine
from unlost.engine.config import Config, build_config, recorded_settings
from unlost.engine.controller import Identity, Parts, SingleController
from unlost.engine.progress import Outcome, Progress, StopRequest
from unlost.engine.protocols import Prompt, RolloutWorker
from unlost.engine.samplers import make_sampler
from unlost.engine.worker_parts import WorkerOptions
from unlost.journal import JournalReader, JournalWriter
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
    """Stands in for a thread: what it does is done later, and other things happen before."""
    await asyncio.sleep(0.0007)
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


class Hooks:
    """What an onlooker may put between the parts. Here: nothing."""

    def writer(self, life: Incarnation, writer: JournalWriter[Any]) -> Any:
        return writer

    def plane(self, life: Incarnation, clock: RunClock) -> SimDataPlane:
        return SimDataPlane(clock, storage=life.world.storage, storage_units=life.world.config.data_plane.storage_units)

    def trainer(self, life: Incarnation, clock: RunClock, plane: SimDataPlane) -> SimTrainer:
        return SimTrainer(clock, plane, storage=life.world.storage)

    def folders(self, life: Incarnation) -> SimFolders:
        return SimFolders(life.world.storage)

    def worker(self, life: Incarnation, worker: SimWorker) -> None:
        """A worker was made, not yet started."""

    def opened(self, life: Incarnation) -> None:
        """The journal is open and folded; nothing was written yet."""

    def progress(self, life: Incarnation, progress: Progress) -> None:
        life.world.progress.append(progress)

    def ended(self, life: Incarnation) -> None:
        """The life is over, by whatever end; its storage is as it left it."""


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
    run_id: str = "sim"
    rows: int = 1000
    storage: SimStorage = field(default_factory=SimStorage)
    now_us: int = 0
    incarnations: int = 0
    generated: list[dict[int, int]] = field(default_factory=list)
    script: Callable[[AttemptKey, int], SimPlan] | None = None
    trained: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    reward: Callable[[Prompt, Sequence[int]], float] = sim_reward
    worker_start_s: float = 0.1
    zombies: list[tuple[Incarnation, VirtualLoop]] = field(default_factory=list)

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

    @one_machine()
    def live(
        self,
        *,
        restore: str = "latest",
        kill_at_s: float | None = None,
        stop_at_s: float | None = None,
        limit_s: float = 3600.0,
        arrange: Callable[[Incarnation], None] | None = None,
        undead: bool = False,
    ) -> Incarnation:
        """One process life. ``kill_at_s``: the process dies at that moment of virtual time.

        ``undead``: it only seems to die; whoever comes next finds its lock without effect, and it can be let run on
        (``shamble``). Raises Stuck if the life is not over after ``limit_s``.
        """
        life = Incarnation(self)
        self.incarnations += 1
        life.undead = undead
        loop = life.loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        try:
            life.death = loop.create_future()
            task = loop.create_task(life.run(restore, stop_at_s))
            if arrange is not None:
                arrange(life)
            if kill_at_s is not None:
                loop.call_later(kill_at_s, life.die)
            limit = loop.call_later(limit_s, loop.stop)
            try:
                loop.run_until_complete(asyncio.wait((task, life.death), return_when=asyncio.FIRST_COMPLETED))
                life.killed = life.dead
                if not life.killed:
                    life.outcome = task.result()
            except SimCrash:
                life.killed = True
            except RuntimeError as error:
                raise Stuck(f"not over after {limit_s} s of virtual time: {error}") from error
            finally:
                limit.cancel()
                if life.killed and undead:
                    self.zombies.append((life, loop))
                    life.account()
                    self.now_us = max(self.now_us, life.clock._start + round(loop.time() * 1e6) if life.clock else 0)
                else:
                    self.bury(life, loop)
        finally:
            asyncio.set_event_loop(None)
        return life

    def bury(self, life: Incarnation, loop: VirtualLoop) -> None:
        """End a life's loop, and those of the undead before it."""
        for other, other_loop in [*self.zombies, (life, loop)]:
            asyncio.set_event_loop(other_loop)
            other.end(other_loop)
            other_loop.close()
        self.zombies.clear()
        self.storage.kill_process()
        self.hooks.ended(life)

    def shamble(self, seconds: float) -> None:
        """Let the undead run on for so long, from a callback of the living one's loop."""
        here = asyncio.get_running_loop()
        for _, loop in self.zombies:
            asyncio._set_running_loop(None)  # type: ignore[arg-type]
            loop.call_later(seconds, loop.stop)
            with contextlib.suppress(SimCrash):
                loop.run_forever()
            asyncio._set_running_loop(here)


class Stuck(AssertionError):
    """A run that neither ends nor fails."""


class Incarnation:
    """The parts of one life. ``plane``, ``trainer`` and ``workers`` die with it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.config = world.config  # an undead life keeps its own
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
        self.undead = False
        self.loop: VirtualLoop | None = None
        self.death: asyncio.Future[None] | None = None
        self.kills: list[Any] = []  # those that wait for a call of a worker

    async def run(self, restore: str, stop_at_s: float | None) -> Outcome:
        world, config = self.world, self.config
        storage = world.storage
        for path in ("run", PAYLOADS, CHECKPOINTS):
            await SimFolders(storage).make(path)
        clock = self.clock = RunClock(world.now_us)
        storage.enforce_locks = not world.zombies
        self.writer = JournalWriter.open(
            EVENTS,
            EVENT_TYPES,
            journal_id=world.run_id,
            options=config.journal.options(),
            storage=storage,
            threaded=False,
            clock=JournalClock(clock),
            take_over=bool(world.zombies),
        )
        state = self.state = fold_reader(world.reader()) if self.writer.next_offset else State()
        assert state.offset == self.writer.next_offset
        hooks = world.hooks
        hooks.opened(self)
        self.plane = hooks.plane(self, clock)
        self.trainer = hooks.trainer(self, clock, self.plane)
        self.journal = hooks.writer(self, self.writer)
        pump = asyncio.create_task(self._flush())
        sampler = config.async_rl.sampler
        parts = Parts(
            writer=self.journal,
            state=state,
            clock=clock,
            prompts=SimPrompts(world.rows),
            sampler=make_sampler(
                sampler.name,
                max_lookahead_versions=sampler.max_lookahead_versions,
                warmup_lookahead_versions=sampler.warmup_lookahead_versions,
                max_staleness_versions=sampler.max_staleness_versions,
                sample_freshest_first=sampler.sample_freshest_first,
                custom_class=sampler.class_ or "",
            ),
            trainer=self.trainer,
            data_plane=self.plane,
            worker_factory=self._worker,
            payloads=PayloadStore(PAYLOADS, storage) if config.data_plane.payloads == "full" else None,
            folders=hooks.folders(self),
            payload_root=PAYLOADS,
            blocking=inline,
        )
        identity = Identity(world.run_id, self.writer.incarnation, {"dataset": "d"}, recorded_settings(config), {})
        self.controller = SingleController(config, parts, identity, self._progress, self.stop)
        if stop_at_s is not None:
            asyncio.get_running_loop().call_later(stop_at_s, self.stop.set, "signal", "test")
        if self.before_start is not None:
            self.before_start()
        outcome = await self.controller.run(restore)
        pump.cancel()
        return outcome

    def _progress(self, progress: Progress) -> None:
        self.world.hooks.progress(self, progress)

    async def _worker(self, worker_id: int, journal_name: str) -> RolloutWorker:
        world, config = self.world, self.config
        assert self.plane is not None
        assert self.clock is not None
        worker = SimWorker(
            self.clock,
            WorkerOptions(
                worker_id=worker_id,
                journal_name=journal_name,
                payloads=config.data_plane.payloads,
                progress_interval_tokens=config.journal.progress_interval_tokens,
                progress_interval_ms=config.journal.progress_interval_ms,
            ),
            self.plane,
            payload_root=PAYLOADS,
            script=world.plan,
            storage=world.storage,
            journal_options=config.journal.options(),
            reward=world.reward,
            start_seconds=world.worker_start_s,
        )
        world.hooks.worker(self, worker)
        self.workers.append(worker)
        return worker

    async def _flush(self) -> None:
        """The flush thread of the event journal."""
        while True:
            await asyncio.sleep(self.config.journal.flush_interval_ms / 1000)
            self.journal.pump()

    def die(self) -> None:
        """SIGKILL: nothing that this life does from here on has an effect."""
        if self.dead:
            return
        self.dead = True
        if not self.undead:
            self.world.storage.crashed = True
        assert self.death is not None
        if not self.death.done():
            self.death.set_result(None)

    def account(self) -> None:
        """What the outside knows of this life, from the parts' own counters."""
        world = self.world
        world.generated.append({w.worker_id: w.generator.generated_tokens for w in self.workers if w.generator})
        if self.trainer is not None:
            world.trained.extend((world.incarnations, step, keys) for step, keys in enumerate(self.trainer.trained))

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Clean up after an end of either kind."""
        world = self.world
        if self.clock is not None:
            world.now_us = max(world.now_us, self.clock._start + round(loop.time() * 1e6))
            if not self.undead:
                self.account()
        world.storage.crashed = True
        journals = [self.writer, *(worker.journal for worker in self.workers)]
        for worker in self.workers:
            worker.alive = False
        for journal in journals:
            if journal is not None:
                with contextlib.suppress(SimCrash):
                    journal.abandon()
        loop.set_exception_handler(lambda *_: None)
        for _ in range(5):
            for task in asyncio.all_tasks(loop):
                task.cancel()
            with contextlib.suppress(SimCrash, asyncio.CancelledError, RuntimeError):
                loop.run_until_complete(_turn())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]


def cut_power(world: World, seed: int, mode: str = "tear") -> None:
    """The machine lost power: what was not synced is dropped, torn or reordered."""
    world.storage.power_cut(random.Random(seed), mode)


def steps_of(events: Sequence[tuple[int, Event]]) -> list[Event]:
    return [e for _, e in events]
