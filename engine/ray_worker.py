"""Rollout workers as Ray actors: one process each around a ``WorkerCore``, and the controller's handle on it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Final

from ..journal.options import JournalOptions
from ..journal.writer import JournalWriter
from ..replay.events import AttemptKey, PayloadRecord, Receipt
from ..replay.payload_records import PAYLOAD_DIRECTORY
from . import ray_calls
from .actor import log_to
from .config_keys import Config
from .data_plane import AttachedDataPlane
from .imports import preload
from .prompts import render
from .protocols import AttemptRequest, Clock, Prompt, WeightsRef, WorkerLost, WorkerStats
from .rewards import load_reward
from .worker import WorkerCore
from .worker_parts import ThreadedScore, WorkerOptions

log = logging.getLogger(__name__)

CALLS_AT_ONCE: Final = 10_000
STOP_TIMEOUT_S: Final = 30.0
QUICK_TIMEOUT_S: Final = 60.0


class AnchoredClock:
    """The run clock in another process: the controller's reading at some wall clock time, and monotonic from there."""

    def __init__(self, run_us: int, wall_us: int) -> None:
        now_ns = time.time_ns()
        self._start_us = run_us + max(0, now_ns // 1000 - wall_us)
        self._zero_ns = time.monotonic_ns()

    def now_us(self) -> int:
        """Run clock, microseconds."""
        return self._start_us + (time.monotonic_ns() - self._zero_ns) // 1000

    def wall_us(self) -> int:
        """Unix time, microseconds."""
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        """asyncio.sleep."""
        await asyncio.sleep(seconds)


def journal_options(config: Config) -> JournalOptions:
    """The payload journal's settings are the event journal's."""
    own = {
        name: getattr(config.journal, name)
        for name in JournalOptions.__struct_fields__
        if hasattr(config.journal, name)
    }
    return JournalOptions(**own)


class WorkerProcess:
    """The actor. Every method answers with a result or a ``Failure``."""

    def __init__(self, config: Config, run_id: str, worker_id: int, journal_name: str, anchor: tuple[int, int]) -> None:
        self._config = config
        self._run_id = run_id
        self._worker_id = worker_id
        self._journal_name = journal_name
        self._anchor = anchor
        self._tokenizer: Any = None
        self._core: WorkerCore | None = None

    async def _start(self, weights: WeightsRef) -> None:
        log_to(self._config.run_dir)
        await preload()
        self._core = self._make_core()
        await self._core.start(weights)

    def _make_core(self) -> WorkerCore:
        config, name = self._config, self._journal_name
        reward = load_reward(config.reward.function, config.reward.path)

        def score(prompt: Prompt, token_ids: list[int]) -> float:
            response = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            return reward(prompt_text(prompt), response, prompt.row.get("answer"), prompt.row)

        return WorkerCore(
            WorkerOptions(
                worker_id=self._worker_id,
                journal_name=name,
                payloads=config.data_plane.payloads,
                progress_interval_tokens=config.journal.progress_interval_tokens,
                progress_interval_ms=config.journal.progress_interval_ms,
            ),
            make_generator=self._make_generator,
            open_journal=lambda: JournalWriter.open(
                os.path.join(config.run_dir, PAYLOAD_DIRECTORY, name),
                PayloadRecord,
                journal_id=f"{self._run_id}/{name}",
                options=journal_options(config),
            ),
            encode=lambda prompt: render(prompt.row, self._tokenizer, chat_template=config.model.chat_template),
            score=ThreadedScore(score, timeout_s=config.reward.timeout_s),
            data_plane=AttachedDataPlane(start_timeout_s=config.ray.start_timeout_s),
            clock=AnchoredClock(*self._anchor),
        )

    def _work(self) -> WorkerCore:
        assert self._core is not None, "start() comes first"
        return self._core

    def _make_generator(self, weights: WeightsRef) -> Any:
        from .generator import EmbeddedGenerator
        from .models import load_tokenizer

        config = self._config
        self._tokenizer = load_tokenizer(config.model.path)
        return EmbeddedGenerator(
            weights.path,
            tokenizer=self._tokenizer,
            max_batch=config.generation.max_batch,
            device=config.model.device,
            dtype=config.model.dtype,
            deterministic=config.generation.deterministic,
            threads=config.workers.threads,
            branch=weights.branch,
            version=weights.version,
        )

    async def start(self, weights: WeightsRef) -> Any:
        return await ray_calls.guarded(self._start(weights))

    async def generate(self, request: AttemptRequest) -> Any:
        return await ray_calls.guarded(self._work().generate(request))

    async def put_row(self, key: AttemptKey) -> Any:
        return await ray_calls.guarded(self._work().put_row(key))

    async def abort(self, keys: Sequence[AttemptKey]) -> Any:
        return await ray_calls.guarded(self._work().abort(keys))

    async def update_weights(self, weights: WeightsRef) -> Any:
        return await ray_calls.guarded(self._work().update_weights(weights))

    async def prune(self, keep_from: int) -> Any:
        return await ray_calls.guarded(self._work().prune(keep_from))

    async def stats(self) -> Any:
        return await ray_calls.guarded(self._work().stats())

    async def stop(self) -> Any:
        return await ray_calls.guarded(self._work().stop())


def prompt_text(prompt: Prompt) -> str:
    """The prompt as a reward function sees it: the text, or the messages as ``role: content`` lines."""
    text = prompt.row["prompt"]
    if isinstance(text, str):
        return text
    return "\n".join(f"{message['role']}: {message['content']}" for message in text)


class RayWorker:
    """The controller's handle: ``protocols.RolloutWorker``. An actor that is gone raises WorkerLost."""

    def __init__(self, actor: Any, worker_id: int, journal_name: str, start_timeout_s: float) -> None:
        self.worker_id = worker_id
        self.journal_name = journal_name
        self.actor = actor
        self._start_timeout_s = start_timeout_s

    async def start(self, weights: WeightsRef) -> None:
        try:
            await self._ask("start", weights, timeout_s=self._start_timeout_s, cause=ray_calls.free_cpus)
        except BaseException:
            ray_calls.kill(self.actor)
            raise

    async def generate(self, request: AttemptRequest) -> Receipt:
        try:
            receipt: Receipt = await self._ask("generate", request)
        except asyncio.CancelledError:
            self.actor.abort.remote([request.key])  # nobody waits for it any more
            raise
        return receipt

    async def put_row(self, key: AttemptKey) -> None:
        await self._ask("put_row", key)

    async def abort(self, keys: Sequence[AttemptKey]) -> None:
        await self._ask("abort", list(keys), timeout_s=QUICK_TIMEOUT_S)

    async def update_weights(self, weights: WeightsRef) -> float:
        pause: float = await self._ask("update_weights", weights)
        return pause

    async def prune(self, keep_from: int) -> None:
        await self._ask("prune", keep_from)

    async def stats(self) -> WorkerStats:
        stats: WorkerStats = await self._ask("stats", timeout_s=QUICK_TIMEOUT_S)
        return stats

    async def stop(self) -> WorkerStats:
        try:
            stats: WorkerStats = await self._ask("stop", timeout_s=STOP_TIMEOUT_S)
        finally:
            ray_calls.kill(self.actor)
        return stats

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        what = f"{method} of rollout worker {self.worker_id}"
        try:
            return await ray_calls.call(getattr(self.actor, method).remote(*arguments), what=what, **options)
        except ray_calls.ActorLost as lost:
            # It may only be out of reach: it must not go on beside its replacement.
            ray_calls.kill(self.actor)
            raise WorkerLost(str(lost)) from lost


class RayWorkerFactory:
    """Makes the workers of a run: ``protocols.WorkerFactory``. ``clock``: the run clock."""

    def __init__(self, config: Config, *, run_id: str, clock: Clock) -> None:
        self._config = config
        self._run_id = run_id
        self._clock = clock

    async def __call__(self, worker_id: int, journal_name: str) -> RayWorker:
        """A worker in a process of its own, not started; Ray does not restart it (its replacement gets a new id)."""
        import ray

        workers = self._config.workers
        actor_class = ray.remote(
            num_cpus=workers.cpus,
            num_gpus=workers.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=CALLS_AT_ONCE,
        )(WorkerProcess)
        anchor = (self._clock.now_us(), self._clock.wall_us())
        actor = actor_class.remote(self._config, self._run_id, worker_id, journal_name, anchor)
        return RayWorker(actor, worker_id, journal_name, self._config.ray.start_timeout_s)
