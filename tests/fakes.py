"""Simulated data plane, rollout worker and trainer, and a virtual-time event loop to run them in.

They pass the same contract tests as the real parts (tests/engine/test_data_plane_contract.py and friends). Nothing here
starts a thread or looks at the wall clock: time comes from the ``Clock`` handed in, everything random from seeds, files
go through the ``Storage`` handed in. The worker is the real ``WorkerCore`` around a scripted generator and the real
payload journal, so that a simulation exercises the code that runs in production.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
import struct
from array import array
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from unlost.engine.data_plane import DataPlaneLost, RowDamaged
from unlost.engine.protocols import (
    AttemptRequest,
    CheckpointDamaged,
    Clock,
    Prompt,
    Row,
    SnapshotMismatch,
    StepMismatch,
    StepResult,
    WeightsRef,
    WorkerLost,
    WorkerStats,
)
from unlost.engine.rows import checksum_of
from unlost.engine.worker import WorkerCore
from unlost.engine.worker_parts import WorkerOptions
from unlost.journal.options import JournalOptions
from unlost.journal.storage import RealStorage, Storage, read_exact, write_all
from unlost.journal.writer import JournalWriter
from unlost.replay.events import AttemptKey, PayloadRecord, Receipt

T = TypeVar("T")


# --- virtual time -------------------------------------------------------------------------------------------------


class _VirtualSelector(selectors.SelectSelector):
    """Instead of waiting, moves the loop's time on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task waits for something that nobody will do")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer. ``asyncio.sleep`` and ``asyncio.timeout`` are virtual too."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class VirtualClock:
    """``Clock`` of a VirtualLoop. ``start_us`` lets a second incarnation go on where the first ended."""

    def __init__(self, start_us: int = 0) -> None:
        self._start_us = start_us
        self._loop: asyncio.AbstractEventLoop | None = None

    def now_us(self) -> int:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # kept, so that what is closed after the loop still has a time
        return self._start_us + round(self._loop.time() * 1e6)

    def wall_us(self) -> int:
        return 1_700_000_000_000_000 + self.now_us()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class JournalClock:
    """The journal's clock on top of the engine's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.now_us() / 1e6

    def wall_ns(self) -> int:
        return self._clock.wall_us() * 1000


def run_virtual(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function to its end in a fresh virtual loop."""

    async def body() -> T:
        return await main()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body())


# --- files --------------------------------------------------------------------------------------------------------


def write_files(storage: Storage, directory: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """New files in a directory, synced. Returns name -> SHA-256."""
    storage.make_directory(directory)
    for name, data in files.items():
        file = storage.create(f"{directory}/{name}")
        write_all(file, 0, data)
        file.sync()
        file.close()
    storage.sync_directory(directory)
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def read_verified(storage: Storage, directory: str, digests: Mapping[str, str]) -> dict[str, bytes]:
    """The files with their digests checked. Raises CheckpointDamaged."""
    files: dict[str, bytes] = {}
    for name, digest in digests.items():
        try:
            file = storage.open(f"{directory}/{name}")
        except FileNotFoundError:
            raise CheckpointDamaged(f"{directory}/{name} is missing") from None
        files[name] = read_exact(file, 0, file.size())
        file.close()
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise CheckpointDamaged(f"{directory}/{name} has another digest")
    return files


# --- data plane ---------------------------------------------------------------------------------------------------


class SimDataPlane:
    """Rows in a dict, with TransferQueue's habits: a fuzzy snapshot, puts that stall while it is taken.

    The snapshot's index is of its beginning and its rows are of its end: a row put meanwhile is not in it, and a row
    cleared meanwhile leaves an entry without a row (``inventory`` names it, ``get`` does not find it).
    ``lose`` plays the death of a storage process.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        storage: Storage | None = None,
        storage_units: int = 1,
        put_seconds: float = 0.004,
        get_seconds: float = 0.001,
        save_seconds: float = 0.5,
    ) -> None:
        self.clock = clock
        self.storage: Storage = storage or RealStorage()
        self.storage_units = storage_units
        self.put_seconds = put_seconds
        self.get_seconds = get_seconds
        self.save_seconds = save_seconds
        self.started = False
        self.puts = 0
        self._index: dict[str, int] = {}
        self._rows: dict[str, Row] = {}
        self._lost = False
        self._services = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._failures: dict[str, list[Exception]] = {}

    def attach(self) -> SimAttachedDataPlane:
        """A worker's client of this service."""
        return SimAttachedDataPlane(self)

    def fail_next(self, call: str, *errors: Exception) -> None:
        """The next calls of this name raise these, one each."""
        self._failures.setdefault(call, []).extend(errors)

    def lose(self) -> None:
        """A storage process dies: everything raises DataPlaneLost until ``restart``."""
        self._lost = True

    async def start(self) -> None:
        await self.clock.sleep(self.get_seconds)
        self._index, self._rows = {}, {}
        self._lost = False
        self.started = True
        self._services += 1

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def check(self) -> None:
        self._enter("check")

    def _enter(self, call: str, service: int | None = None) -> int:
        """``service``: the one that the call began with; another one, started since, knows nothing of it."""
        if not self.started or service not in (None, self._services):
            raise DataPlaneLost(f"{call}: the data plane is not running")
        if self._failures.get(call):
            raise self._failures[call].pop(0)
        if self._lost:
            raise DataPlaneLost(f"{call}: a storage unit is gone")
        return self._services

    async def put(self, row: Row) -> None:
        service = self._enter("put")
        await self.clock.sleep(self.put_seconds)
        await self._quiet.wait()
        self._enter("put", service)
        key = row.key.row_key()
        self._rows[key] = row
        self._index[key] = row.checksum
        self.puts += 1

    async def get(self, keys: Sequence[str]) -> list[Row]:
        service = self._enter("get")
        await self.clock.sleep(self.get_seconds)
        self._enter("get", service)
        missing = [key for key in keys if key not in self._rows]
        if missing:
            raise KeyError(f"rows not in the data plane: {', '.join(missing)}")
        rows = [self._rows[key] for key in keys]
        if damaged := [row.key.row_key() for row in rows if checksum_of(row) != row.checksum]:
            raise RowDamaged(damaged)
        return rows

    async def inventory(self) -> dict[str, int]:
        service = self._enter("inventory")
        await self.clock.sleep(self.get_seconds)
        self._enter("inventory", service)
        return dict(self._index)

    async def clear(self, keys: Sequence[str]) -> None:
        service = self._enter("clear")
        await self.clock.sleep(self.get_seconds)
        self._enter("clear", service)
        for key in keys:
            self._index.pop(key, None)
            self._rows.pop(key, None)

    async def save(self, directory: str) -> dict[str, str]:
        service = self._enter("save")
        await self._quiet.wait()
        self._enter("save", service)
        index = dict(self._index)
        self._quiet.clear()
        try:
            await self.clock.sleep(self.save_seconds)
            self._enter("save", service)
            units: list[dict[str, Row]] = [{} for _ in range(self.storage_units)]
            for number, (key, row) in enumerate(self._rows.items()):
                units[number % self.storage_units][key] = row
            files = {"index": msgspec.msgpack.encode((self.storage_units, index))}
            files |= {f"unit-{number}": msgspec.msgpack.encode(rows) for number, rows in enumerate(units)}
            return write_files(self.storage, directory, files)
        finally:
            self._quiet.set()

    async def load(self, directory: str, digests: Mapping[str, str]) -> None:
        service = self._enter("load")
        files = read_verified(self.storage, directory, digests)
        await self.clock.sleep(self.save_seconds)
        self._enter("load", service)
        if "index" not in files:
            raise CheckpointDamaged(f"{directory}: no digest of its index")
        units, index = msgspec.msgpack.decode(files["index"], type=tuple[int, dict[str, int]])
        if len(files) - 1 != units:
            raise CheckpointDamaged(f"{directory}: {len(files) - 1} digests for {units} storage units")
        if units != self.storage_units:
            raise SnapshotMismatch(f"{units} storage units in the snapshot, {self.storage_units} here")
        self._index = index
        self._rows = {}
        for name, data in files.items():
            if name.startswith("unit-"):
                self._rows |= msgspec.msgpack.decode(data, type=dict[str, Row])

    async def stop(self) -> None:
        self.started = False


class SimAttachedDataPlane:
    """The part of a data plane that workers see; its life is not theirs."""

    def __init__(self, plane: SimDataPlane) -> None:
        self._plane = plane
        self.put = plane.put
        self.get = plane.get
        self.inventory = plane.inventory
        self.clear = plane.clear
        self.save = plane.save
        self.load = plane.load

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


# --- generator and worker -----------------------------------------------------------------------------------------


class SimPlan(msgspec.Struct, frozen=True):
    """How one request goes. ``tokens``: length of its response (cut at max_new_tokens).

    ``fail_after`` >= 0: the request fails after that many tokens; ``die_after`` >= 0: the whole worker does.
    """

    tokens: int
    seconds_per_token: float = 0.02
    tokens_per_delta: int = 16
    fail_after: int = -1
    die_after: int = -1


Script = Callable[[AttemptKey, int], SimPlan]
"""(attempt, seed) -> plan."""


def sim_token(seed: int, index: int) -> int:
    """The token that position ``index`` of a response gets: a function of seed and position alone."""
    return (seed * 6364136223846793005 + index * 1442695040888963407 + 1013904223) % (1 << 64) >> 49


def sim_logprob(seed: int, index: int) -> float:
    """Exactly representable as float32."""
    return -(1 + sim_token(seed ^ 0x5DEECE66D, index) % 1024) / 256


class SimGenerator:
    """A ``GeneratorEngine`` whose tokens are a function of the seed and whose pace is a script's."""

    def __init__(self, clock: Clock, script: Script, weights: WeightsRef) -> None:
        self.clock = clock
        self.script = script
        self.generated_tokens = 0
        self.failure = ""
        self.on_die: Callable[[], None] = lambda: None
        self._weights = (weights.branch, weights.version)
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._aborted: set[Hashable] = set()

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def waiting(self) -> int:
        return 0

    def submit(
        self,
        request_id: Hashable,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        prefix_ids: Sequence[int] = (),
        on_delta: Callable[[Any, Any, int, int], None],
        on_done: Callable[[str], None],
    ) -> None:
        assert isinstance(request_id, AttemptKey)
        if self.failure:
            raise ValueError(self.failure)
        plan = self.script(request_id, seed)
        expected = [sim_token(seed, index) for index in range(len(prefix_ids))]
        if list(prefix_ids) != expected:  # the strongest check there is that a prefix belongs to this sibling
            raise AssertionError(f"{request_id}: the prefix is not what this seed generates")

        async def decode() -> None:
            at, stop = len(prefix_ids), min(plan.tokens, max_new_tokens)
            while at < stop:
                limit = min(stop, at + plan.tokens_per_delta)
                for point in (plan.fail_after, plan.die_after):
                    if at <= point < limit:
                        limit = max(point, at)
                await self.clock.sleep(plan.seconds_per_token * max(1, limit - at))
                if request_id in self._aborted:
                    return finish("aborted")
                self.generated_tokens += limit - at
                if limit > at:
                    ids = array("i", (sim_token(seed, index) for index in range(at, limit)))
                    logprobs = array("f", (sim_logprob(seed, index) for index in range(at, limit)))
                    on_delta(ids, logprobs, *self._weights)
                at = limit
                if at == plan.fail_after:
                    return finish("failed: scripted")
                if at == plan.die_after:
                    return self.on_die()
            return finish("length" if plan.tokens > stop else "eos")

        def finish(reason: str) -> None:
            self._tasks.pop(request_id, None)
            self._aborted.discard(request_id)
            on_done(reason)

        async def body() -> None:
            try:
                await decode()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                finish(f"failed: on_delta raised {type(error).__name__}: {error}")

        self._tasks[request_id] = asyncio.get_running_loop().create_task(body())

    def abort(self, request_ids: Iterable[Hashable]) -> None:
        self._aborted.update(request_id for request_id in request_ids if request_id in self._tasks)

    def load_weights(self, path: str, branch: int, version: int) -> float:
        self._weights = (branch, version)
        return 0.0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Everything ends without a word, as in a process that was killed."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()


def sim_reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
    """A number that depends on every token."""
    return (sum(token_ids) % 1000) / 1000


async def inline(function: Callable[..., T], *arguments: Any) -> T:
    """Stands in for ``asyncio.to_thread``."""
    return function(*arguments)


class SimWorker:
    """A rollout worker in this process, made of WorkerCore. ``kill`` ends it as SIGKILL ends a process.

    ``payload_root``: the run's payload folder in ``storage``. The journal's flush thread is played by a task that
    pumps every ``flush_interval_ms`` while there is something to flush.
    """

    def __init__(
        self,
        clock: Clock,
        options: WorkerOptions,
        plane: SimDataPlane,
        *,
        payload_root: str,
        script: Script,
        storage: Storage | None = None,
        journal_options: JournalOptions | None = None,
        start_seconds: float = 0.1,
        reward: Callable[[Prompt, Sequence[int]], float] = sim_reward,
        journal_id: str = "sim",
    ) -> None:
        self.worker_id = options.worker_id
        self.journal_name = options.journal_name
        self.alive = True
        self.generator: SimGenerator | None = None
        self.journal: JournalWriter[PayloadRecord] | None = None
        self._clock = clock
        self._start_seconds = start_seconds
        self._journal_options = journal_options or JournalOptions()
        self._calls: dict[asyncio.Future[Any], None] = {}  # in order: a set of futures goes by their addresses
        self._pump: asyncio.Task[None] | None = None
        self._busy = asyncio.Event()

        def make_generator(weights: WeightsRef) -> SimGenerator:
            self.generator = SimGenerator(clock, script, weights)
            self.generator.on_die = self.kill
            return self.generator

        def open_journal() -> JournalWriter[PayloadRecord]:
            self.journal = JournalWriter.open(
                f"{payload_root}/{options.journal_name}",
                PayloadRecord,
                journal_id=f"{journal_id}/{options.journal_name}",
                options=self._journal_options,
                storage=storage,
                threaded=False,
                clock=JournalClock(clock),
            )
            return self.journal

        async def score(prompt: Prompt, token_ids: Sequence[int]) -> float:
            return reward(prompt, token_ids)

        self.core = WorkerCore(
            options,
            make_generator=make_generator,
            open_journal=open_journal,
            encode=lambda prompt: [ord(letter) for letter in str(prompt.row["prompt"])],
            score=score,
            data_plane=plane.attach(),
            clock=clock,
            blocking=inline,
        )

    async def start(self, weights: WeightsRef) -> None:
        await self._clock.sleep(self._start_seconds)
        await self._call(self.core.start(weights))
        if self.journal is not None:
            self._pump = asyncio.get_running_loop().create_task(self._flush())

    async def generate(self, request: AttemptRequest) -> Receipt:
        return await self._call(self.core.generate(request))

    async def put_row(self, key: AttemptKey) -> None:
        await self._call(self.core.put_row(key))

    async def prune(self, keep_from: int) -> None:
        await self._call(self.core.prune(keep_from))

    async def abort(self, keys: Sequence[AttemptKey]) -> None:
        await self._call(self.core.abort(keys))

    async def update_weights(self, weights: WeightsRef) -> float:
        return await self._call(self.core.update_weights(weights))

    async def stats(self) -> WorkerStats:
        return await self._call(self.core.stats())

    async def stop(self) -> WorkerStats:
        stats = await self._call(self.core.stop())
        self._end_pump()
        self.alive = False
        return stats

    def kill(self) -> None:
        """Nothing more happens in here; every waiting and later call raises WorkerLost."""
        if not self.alive:
            return
        self.alive = False
        self._end_pump()
        if self.generator is not None:
            self.generator.cancel()
        if self.journal is not None:
            self.journal.abandon()
        for call in list(self._calls):
            call.cancel()

    def _end_pump(self) -> None:
        if self._pump is not None:
            self._pump.cancel()

    async def _call(self, work: Awaitable[T]) -> T:
        call = asyncio.ensure_future(work)
        if not self.alive:
            call.cancel()
            raise WorkerLost(f"worker {self.worker_id} is dead")
        self._calls[call] = None
        self._busy.set()
        try:
            return await call
        except asyncio.CancelledError:
            if self.alive:
                raise
            raise WorkerLost(f"worker {self.worker_id} died") from None
        finally:
            self._calls.pop(call, None)
            if not call.done():
                call.cancel()

    async def _flush(self) -> None:
        assert self.journal is not None
        while True:
            await self._busy.wait()
            await self._clock.sleep(self._journal_options.flush_interval_ms / 1000)
            self.journal.pump()
            if not self._calls and self.journal.durable_upto == self.journal.next_offset:
                self._busy.clear()


# --- trainer ------------------------------------------------------------------------------------------------------


class SimTrainer:
    """A trainer whose weights are a hash of everything it was trained on, in order.

    ``lose_reply_of``: these steps are applied and then the call raises ConnectionError, once each.
    """

    def __init__(
        self,
        clock: Clock,
        plane: SimDataPlane,
        *,
        storage: Storage | None = None,
        step_seconds: float = 1.0,
        save_seconds: float = 0.5,
        weights_root: str = "weights",
    ) -> None:
        self.clock = clock
        self.plane = plane
        self.storage: Storage = storage or RealStorage()
        self.step_seconds = step_seconds
        self.save_seconds = save_seconds
        self.weights_root = weights_root
        self.applied = 0
        self.weights = hashlib.sha256(b"initial").hexdigest()
        self.trained: list[tuple[str, ...]] = []
        self.lose_reply_of: set[int] = set()
        self._busy = asyncio.Lock()

    async def start(self) -> None:
        await self.clock.sleep(0.1)

    async def train(self, step: int, groups: Sequence[Sequence[str]]) -> StepResult:
        async with self._busy:
            if step != self.applied:
                raise StepMismatch(f"asked for step {step}, the next one is {self.applied}")
            rows = [await self.plane.get(group) for group in groups]
            await self.clock.sleep(self.step_seconds)
            digest = hashlib.sha256(self.weights.encode())
            for group in rows:
                for row in group:
                    digest.update(row.key.row_key().encode() + struct.pack("<Id", row.checksum, row.reward))
            self.weights = digest.hexdigest()
            self.trained.append(tuple(key for group in groups for key in group))
            self.applied += 1
        if step in self.lose_reply_of:
            self.lose_reply_of.discard(step)
            raise ConnectionError("the reply was lost")
        rewards = [row.reward for group in rows for row in group]
        tokens = sum(len(row.token_ids) // 4 for group in rows for row in group)
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        return StepResult(step, self.applied, 0.0, mean, tokens, self.step_seconds)

    async def version(self) -> int:
        async with self._busy:
            return self.applied

    async def publish_weights(self, branch: int) -> WeightsRef:
        await self.clock.sleep(0.01)
        return WeightsRef(branch, self.applied, f"{self.weights_root}/b{branch}-v{self.applied}")

    async def save(self, directory: str) -> dict[str, str]:
        state = msgspec.json.encode({"version": self.applied, "weights": self.weights})
        await self.clock.sleep(self.save_seconds)
        return write_files(self.storage, directory, {"trainer.json": state})

    async def load(self, directory: str, digests: Mapping[str, str]) -> int:
        files = read_verified(self.storage, directory, digests)
        if "trainer.json" not in files:
            raise CheckpointDamaged(f"{directory}: no digest of trainer.json")
        state = msgspec.json.decode(files["trainer.json"])
        await self.clock.sleep(self.save_seconds)
        self.applied, self.weights = state["version"], state["weights"]
        return self.applied

    async def stop(self) -> None:
        pass
