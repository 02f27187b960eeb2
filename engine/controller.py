"""The single controller: opens the journal, restores or starts, runs the pumps, and ends orderly.

Plain asyncio over protocols: the same code runs in a Ray actor with real parts and in the simulation with virtual ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from ..journal.errors import JournalError, UnlostError
from ..replay import events as ev
from ..replay.payloads import AttemptTail, PayloadStore
from ..replay.state import State
from .checkpoints import Checkpointer, Folders
from .config_keys import Config
from .dropped import is_filtered
from .healing import HealingDataPlane, RestartableDataPlane
from .ledger import EventWriter, Ledger
from .progress import EXIT_CODES, REASON_FAILED, REASON_FINISHED, Outcome, Progress, StopRequest
from .protocols import Blocking, Clock, PromptSource, Trainer, WeightsRef, WorkerFactory
from .restore import Restorer, RestoreRefused
from .retention import prune_payloads
from .rollout import RolloutPump
from .samplers import Sampler, SamplerError
from .train import TrainPump
from .workers import WorkerPool

log = logging.getLogger(__name__)

TELEMETRY_S = 0.5
STOP_WORKERS_S = 60.0
_T = TypeVar("_T")


class RunWriter(EventWriter, Protocol):
    """What the controller itself uses of the journal's writer."""

    def metrics(self) -> Any: ...

    def sync(self, timeout_s: float | None = None) -> int: ...

    def close(self, timeout_s: float | None = None) -> None: ...


@dataclass(slots=True)
class Parts:
    """Everything with a real and a simulated version. ``payloads`` None under ``payloads: none``."""

    writer: RunWriter
    state: State
    clock: Clock
    prompts: PromptSource
    sampler: Sampler
    trainer: Trainer
    data_plane: RestartableDataPlane
    worker_factory: WorkerFactory
    payloads: PayloadStore | None
    folders: Folders
    payload_root: str
    blocking: Blocking = asyncio.to_thread


@dataclass(slots=True)
class Identity:
    """Who this incarnation is. ``fingerprints``: dataset, model, semantics."""

    run_id: str
    incarnation: int
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    versions: dict[str, str]


class SingleController:
    """One incarnation of a run. ``on_progress`` is called about twice a second and at each phase."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        identity: Identity,
        on_progress: Callable[[Progress], None],
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.parts = parts
        self.identity = identity
        self.stop_request = stop
        self.ledger = Ledger(parts.state, parts.writer, parts.clock, parts.blocking)
        self.state = parts.state
        self._on_progress = on_progress
        self._phase = "starting"
        self._message = ""
        self._wake = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._spawned: set[asyncio.Task[Any]] = set()
        self._last = Progress()
        self._last_tokens: tuple[int, int] = (0, 0)
        self._tokens_per_s = 0.0
        self.data_plane = HealingDataPlane(parts.data_plane, self.ledger, parts.payloads)
        self._train: TrainPump | None = None
        self._rollout: RolloutPump | None = None
        self._checkpointer: Checkpointer | None = None
        self.workers = WorkerPool(parts.worker_factory, self.ledger, config.workers.count)

    # --- the whole run -----------------------------------------------------------------------------------------------

    async def run(self, restore: str = "latest") -> Outcome:
        """From opening to end. Any error becomes an Outcome with its message; RunEnded is written if possible."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        self.stop_request.listen(wake)
        try:
            await self._open()
            if await self._start_unless_stopped(restore):
                reason = await self._pump()
            else:
                reason = str(self.stop_request.reason)
            detail = self.stop_request.detail
        except Exception as error:
            cause = _first_cause(error)
            reason = REASON_FAILED
            detail = str(cause) if isinstance(cause, UnlostError) else f"{type(cause).__name__}: {cause}"
            log.error("run failed: %s", detail, exc_info=cause)
        return await self._end(reason, detail)

    async def _open(self) -> None:
        """RunStarted is durable before any other effect of this incarnation (protocol rule 1)."""
        who = self.identity
        offset = self.ledger.record(
            ev.RunStarted(
                self.parts.clock.now_us(),
                who.run_id,
                who.incarnation,
                self.parts.clock.wall_us(),
                socket.gethostname(),
                os.getpid(),
                who.fingerprints,
                who.settings,
                {"python": platform.python_version(), **who.versions},
            )
        )
        await self.ledger.durable(offset)

    async def _start_unless_stopped(self, restore: str) -> bool:
        """Start up, or stop doing so when asked to: a restore can be repeated from any point."""
        starting = asyncio.create_task(self._start(restore))
        asked = asyncio.create_task(self._asked_to_stop())
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.wait((starting,))
        return False

    async def _start(self, restore: str) -> None:
        parts, config = self.parts, self.config
        required = parts.sampler.required_capacity(config.grpo.num_prompts_per_step)
        if config.async_rl.max_buffered_rollouts < required:
            raise SamplerError(
                f"async_rl.max_buffered_rollouts is {config.async_rl.max_buffered_rollouts}; "
                f"{parts.sampler.name} needs {required}"
            )
        self._say("starting", "starting trainer, data plane and workers")
        await asyncio.gather(parts.trainer.start(), self.data_plane.start())
        prefixes: dict[tuple[int, int], AttemptTail] = {}
        if self.state.needs_restore:
            prefixes = await self._restore(restore)
        elif restore not in ("latest", "none"):
            raise RestoreRefused(f"--restore {restore}: {config.run_dir} has no run yet")
        else:
            weights = await parts.trainer.publish_weights(self.state.branch)
            await self.workers.start(weights)
            self._synced(weights)
        self._checkpointer = self._make_checkpointer()
        await self._checkpointer.remove_leftovers()
        self._rollout = RolloutPump(
            config,
            self.ledger,
            parts.sampler,
            parts.prompts,
            self.workers,
            self.data_plane,
            parts.payloads,
            parts.clock,
            self._spawn,
        )
        self._rollout.prefixes = prefixes
        self._train = TrainPump(
            config,
            self.ledger,
            parts.sampler,
            self._rollout,
            self.workers,
            parts.trainer,
            self.data_plane,
            self._checkpointer,
            parts.clock,
        )

    async def _restore(self, mode: str) -> dict[tuple[int, int], AttemptTail]:
        """Take over from the incarnation before. Returns the token prefixes to go on from."""
        parts, config = self.parts, self.config
        self._say("restoring", f"incarnation {self.identity.incarnation}: restoring")
        restorer = Restorer(
            self.ledger,
            parts.sampler,
            parts.trainer,
            self.data_plane,
            parts.payloads,
            parts.folders,
            config.checkpoint_dir,
            parts.clock,
            resume_prefixes=config.async_rl.prefix == "resume",
            granularity=config.async_rl.recovery_granularity,
            filtered=functools.partial(is_filtered, config),
            on_phase=lambda phase: self._say("restoring", f"restoring: {phase}"),
        )
        restored = await restorer.run(mode, self.workers.start)
        self._say("restoring", restored.told())
        return dict(restored.prefixes)

    def _make_checkpointer(self) -> Checkpointer:
        parts, config = self.parts, self.config
        return Checkpointer(
            self.ledger,
            parts.folders,
            config.checkpoint_dir,
            parts.trainer,
            self.data_plane,
            parts.clock,
            keep_latest_k=config.checkpointing.keep_latest_k,
            failures_max=config.rollout_checkpointing.max_consecutive_failures,
            save_data_plane=config.checkpointing.save_data_plane,
            payloads_full=parts.payloads is not None,
            after_commit=self._prune,
            spawn=self._spawn,
        )

    async def _prune(self) -> None:
        if self.parts.payloads is not None:
            await prune_payloads(self.state, self.parts.payload_root, self.parts.folders, self.workers)

    def _synced(self, weights: WeightsRef) -> None:
        count = len(self.workers.members)
        t = self.parts.clock.now_us()
        self.ledger.record(ev.WeightsSynced(t, weights.branch, weights.version, 0.0, count))

    # --- pumps -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    async def _pump(self) -> str:
        """Run all pumps until the run is finished or asked to stop. Raises the first failure of any task."""
        assert self._train is not None
        assert self._rollout is not None
        self._say("running")
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            service = [
                tasks.create_task(self._rollout.run(), name="rollout pump"),
                tasks.create_task(self._train.clear_rows(), name="clears"),
                tasks.create_task(self._snapshots(), name="rollout snapshots"),
                tasks.create_task(self._telemetry(), name="telemetry"),
            ]
            train = tasks.create_task(self._train.run(), name="train pump")
            stop = tasks.create_task(self._asked_to_stop(), name="stop request")
            await asyncio.wait((train, stop), return_when=asyncio.FIRST_COMPLETED)
            asked = self.stop_request.level > 0 and not train.done()
            if asked:
                self._say("stopping", f"stopping: {self.stop_request.detail or self.stop_request.reason}")
                self.ledger.stop()
                await self._last_checkpoint(train)
            elif not train.cancelled() and train.exception() is None:
                await self._checkpoint_wait()
            self.ledger.stop()
            for task in (train, stop, *service, *self._spawned):
                task.cancel()
        return str(self.stop_request.reason) if asked else REASON_FINISHED

    async def _asked_to_stop(self) -> None:
        while self.stop_request.level == 0:
            self._wake.clear()
            await self._wake.wait()

    async def _last_checkpoint(self, train: asyncio.Task[None]) -> None:
        """An orderly stop: let the running step end, then a trainer checkpoint, both within the grace period."""
        assert self._checkpointer is not None
        grace = self.config.stop.grace_s
        harsher = asyncio.create_task(self._asked_twice())
        orderly = asyncio.create_task(self._orderly(train))
        try:
            done, _ = await asyncio.wait((harsher, orderly), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            if orderly in done:
                orderly.result()
            else:
                log.warning("no time for a last checkpoint; the journal has everything since the one before")
        finally:
            harsher.cancel()
            orderly.cancel()

    async def _orderly(self, train: asyncio.Task[None]) -> None:
        assert self._checkpointer is not None
        assert self._train is not None
        await asyncio.wait((train,))
        await self._checkpoint_wait()
        state = self.state
        saved = max((c.trainer_version for c in state.checkpoints if c.kind == ev.CHECKPOINT_TRAINER), default=0)
        if self.config.checkpointing.enabled and state.trainer_version > saved:
            self._train.release_claim()  # of streaming; a trainer checkpoint is not taken inside a step (rule 11)
            await self._checkpointer.begin(ev.CHECKPOINT_TRAINER)
            await self._checkpoint_wait()

    async def _asked_twice(self) -> None:
        while self.stop_request.level < 2:
            self._wake.clear()
            await self._wake.wait()

    async def _checkpoint_wait(self) -> None:
        if self._checkpointer is not None and self._checkpointer.busy:
            self._say("checkpointing")
            await self._checkpointer.wait()

    async def _snapshots(self) -> None:
        """Rollout snapshots on an interval: data plane and cut only."""
        interval = self.config.rollout_checkpointing.interval_s
        if interval is None or self._checkpointer is None:
            return
        while not self.ledger.stopping:
            await self.parts.clock.sleep(interval)
            if not self.ledger.stopping:  # else it would stand in the way of the last trainer checkpoint
                await self._checkpointer.begin(ev.CHECKPOINT_ROLLOUT)

    # --- telemetry ---------------------------------------------------------------------------------------------------

    async def _telemetry(self) -> None:
        logged = 0
        while True:
            await self.parts.clock.sleep(TELEMETRY_S)
            stats = await self.workers.stats()
            self.workers.raise_failed()
            failed = [s.journal_failed for s in stats if s.journal_failed]
            if failed:
                raise JournalError(f"a worker's payload journal failed: {failed[0]}")
            metrics = self.parts.writer.metrics()
            if metrics.failed:
                raise JournalError("the event journal failed; see the log")
            self._rate(sum(tokens for _, tokens in self.workers.generated()))
            self._say(self._phase)
            interval, now = self.config.rollout_checkpointing.telemetry_interval_s, self.parts.clock.now_us()
            if interval is not None and now - logged >= interval * 1e6:
                logged = now
                log.info("telemetry %s %s", msgspec.json.encode(self._last).decode(), metrics)

    def _rate(self, tokens: int) -> None:
        now = self.parts.clock.now_us()
        before, then = self._last_tokens
        if then and now > then:
            self._tokens_per_s = max(0, tokens - before) * 1e6 / (now - then)
        self._last_tokens = (tokens, now)

    def _say(self, phase: str, message: str = "") -> None:
        self._phase = phase
        state, rollout, train = self.state, self._rollout, self._train
        self._last = Progress(
            step=state.trainer_version,
            max_steps=self.config.grpo.max_steps,
            trainer_version=state.trainer_version,
            reward_mean=train.last.reward_mean if train is not None and train.last is not None else None,
            in_flight=rollout.in_flight if rollout is not None else 0,
            buffered=len(state.committed) + len(state.complete),
            unfinished=len(state.unfinished),
            tokens_per_s=self._tokens_per_s,
            generated_tokens=self._last_tokens[0],
            durable_lag_s=self.parts.writer.metrics().durable_lag_seconds,
            phase=phase,
            incarnation=state.incarnation,
            message=message,
        )
        self._on_progress(self._last)

    # --- end ---------------------------------------------------------------------------------------------------------

    async def _end(self, reason: str, detail: str) -> Outcome:
        """Stop the workers (their tails become durable), write RunEnded durably, let go of everything."""
        self.ledger.stop()  # after a failure too: what still runs must not try again on workers that stop
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.workers.stop(), STOP_WORKERS_S)
        try:
            if not self.state.ended and self.state.run_id:
                generated = self.workers.generated()
                offset = self.ledger.record(ev.RunEnded(self.parts.clock.now_us(), reason, detail[:500], generated))
                await self.ledger.durable(offset)
            await self.ledger.blocking(self.parts.writer.close)
        except Exception as error:  # noqa: BLE001 - the outcome must be told whatever fails here
            log.error("the end of the run could not be written down: %s", error)
            reason, detail = REASON_FAILED, detail or str(error)
        for part in (self.parts.trainer.stop, self.data_plane.stop):
            with contextlib.suppress(Exception):
                await part()
        self._say("ended", detail)
        return Outcome(reason=reason, exit_code=EXIT_CODES[reason], detail=detail, run_dir=self.config.run_dir)


def _first_cause(error: BaseException) -> BaseException:
    """The first real error inside a (nested) group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
