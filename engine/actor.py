"""The thin Ray actor that hosts the single controller, and the real parts that it is put together from."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import Any

from ..journal.errors import UnlostError
from ..journal.reader import JournalReader
from ..replay.events import EVENT_TYPES
from ..replay.fold import EVENTS_FOLDER
from ..replay.payload_records import PAYLOAD_DIRECTORY
from ..replay.payloads import PayloadStore
from .config_keys import Config
from .controller import Parts, SingleController
from .folders import RealFolders
from .live_trace import TRACE_FILE, LiveTrace
from .progress import EXIT_FAILED, REASON_FAILED, Outcome, Progress, StopRequest
from .prompts import JsonlPrompts
from .runfolder import LOG_FILE, OpenRun, open_run
from .samplers import Sampler, make_sampler

PROGRESS_KEPT = 1000


def sampler_of(config: Config) -> Sampler:
    """The configured sampler. Raises SamplerError."""
    chosen = config.async_rl.sampler
    return make_sampler(
        chosen.name,
        max_lookahead_versions=chosen.max_lookahead_versions,
        warmup_lookahead_versions=chosen.warmup_lookahead_versions,
        max_staleness_versions=chosen.max_staleness_versions,
        sample_freshest_first=chosen.sample_freshest_first,
        custom_class=chosen.class_ or "",
    )


def log_to(run_dir: str) -> None:
    """Send this process's log to ``RUN/run.log``, beside what the terminal gets."""
    root = logging.getLogger("unlost")
    if any(isinstance(handler, logging.FileHandler) for handler in root.handlers):
        return
    handler = logging.FileHandler(Path(run_dir) / LOG_FILE, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)


class ControllerHost:
    """Runs one incarnation in an async actor; ``progress`` and ``stop`` are served while ``run`` goes on."""

    def __init__(self, config: Config, fingerprints: dict[str, str], *, take_over: bool = False) -> None:
        self.config = config
        self.fingerprints = fingerprints
        self.take_over = take_over
        self._stop = StopRequest()
        self._progress: deque[tuple[int, Progress]] = deque(maxlen=PROGRESS_KEPT)
        self._count = 0

    def _note(self, progress: Progress) -> None:
        self._count += 1
        self._progress.append((self._count, progress))

    async def progress(self, after: int) -> tuple[int, list[Progress]]:
        """What was told since number ``after``, and the number to ask with next time."""
        return self._count, [p for number, p in self._progress if number > after]

    async def stop(self, reason: str, detail: str) -> None:
        """Ask the run to stop."""
        self._stop.set(reason, detail)

    async def run(self, restore: str) -> Outcome:
        """Open the run, put the real parts together, and run to an Outcome."""
        try:
            opened = await asyncio.to_thread(open_run, self.config, self.fingerprints, take_over=self.take_over)
        except (UnlostError, OSError) as error:
            return Outcome(reason=REASON_FAILED, exit_code=EXIT_FAILED, detail=str(error), run_dir=self.config.run_dir)
        log_to(self.config.run_dir)
        controller = SingleController(self.config, self._parts(opened), opened.identity, self._note, self._stop)
        trace = live_trace(self.config, opened) if self.config.rollout_checkpointing.trace else None
        try:
            return await controller.run(restore)
        finally:
            if trace is not None:
                await asyncio.to_thread(trace.close)

    def _parts(self, opened: OpenRun) -> Parts:
        from .data_plane import TransferQueueDataPlane
        from .ray_trainer import RayTrainer
        from .ray_worker import RayWorkerFactory

        config = self.config
        payload_root = str(Path(config.run_dir) / PAYLOAD_DIRECTORY)
        return Parts(
            writer=opened.writer,
            state=opened.state,
            clock=opened.clock,
            prompts=JsonlPrompts(config.data.train, shuffle=config.data.shuffle, seed=config.data.seed),
            sampler=sampler_of(config),
            trainer=RayTrainer(config),
            data_plane=TransferQueueDataPlane(
                storage_units=config.data_plane.storage_units, start_timeout_s=config.ray.start_timeout_s
            ),
            worker_factory=RayWorkerFactory(config, run_id=opened.identity.run_id, clock=opened.clock),
            payloads=PayloadStore(payload_root) if config.data_plane.payloads == "full" else None,
            folders=RealFolders(),
            payload_root=payload_root,
        )


def live_trace(config: Config, opened: OpenRun) -> LiveTrace:
    """The run's trace, started: it follows the journal in the background, and asks nothing of the controller."""
    events = Path(config.run_dir) / EVENTS_FOLDER
    trace = LiveTrace(
        str(Path(config.run_dir) / TRACE_FILE),
        lambda: JournalReader(events, EVENT_TYPES),
        lambda: opened.writer.durable_upto,
    )
    trace.start()
    return trace


def controller_actor(config: Config, fingerprints: dict[str, str], **options: Any) -> Any:
    """A ControllerHost in an actor of its own; not restarted by Ray, since only a new incarnation may go on."""
    import ray

    actor = ray.remote(num_cpus=1, max_restarts=0, max_concurrency=16)(ControllerHost)
    return actor.remote(config, fingerprints, **options)
