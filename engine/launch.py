"""Start a run from a plain process: check first, then bring up Ray, host the controller, pass on stop requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..replay.state import State
from .actor import log_to, sampler_of
from .config import ConfigError
from .config_keys import Config
from .models import model_fingerprint
from .progress import EXIT_CODES, EXIT_FAILED, REASON_FAILED, REASON_FINISHED, Outcome, Progress, StopRequest
from .prompts import JsonlPrompts
from .restore import RestoreRefused, check_restore
from .rewards import load_reward
from .runfolder import check_free, check_run, nothing_to_do

log = logging.getLogger(__name__)

POLL_S = 0.3
LEAVE_S = 30.0
LOCK_WAIT_S = 10.0


def preflight(
    config: Config, *, restore: str = "latest", take_over: bool = False
) -> tuple[dict[str, str], State | None]:
    """Everything that can be found wrong before a process is started.

    Returns the fingerprints of data and model, and the state that the run goes on from (None: a new run). Raises
    UnlostError: prompts, model folder, reward, sampler, a run folder that does not match or is in use, a checkpoint
    that is not there.
    """
    prompts = JsonlPrompts(config.data.train, shuffle=config.data.shuffle, seed=config.data.seed)
    fingerprints = {"dataset": prompts.fingerprint, "model": model_fingerprint(config.model.path)}
    load_reward(config.reward.function, config.reward.path)
    sampler_of(config)
    if config.data_plane.backend != "simple":
        raise ConfigError(f"data_plane.backend {config.data_plane.backend}: this release can only start `simple`")
    state = check_run(config, fingerprints)
    if state is not None:
        check_restore(state, restore)
    elif restore not in ("latest", "none"):
        raise RestoreRefused(f"--restore {restore}: {config.run_dir} has no run yet")
    if not take_over:
        check_free(config, LOCK_WAIT_S)
    return fingerprints, state


def already_finished(config: Config, state: State | None) -> Outcome | None:
    """The outcome of a run that has nothing left to do, else None."""
    if state is None or not (detail := nothing_to_do(config, state)):
        return None
    return Outcome(reason=REASON_FINISHED, exit_code=EXIT_CODES[REASON_FINISHED], detail=detail, run_dir=config.run_dir)


def run_training(
    config: Config,
    *,
    restore: str = "latest",
    on_progress: Callable[[Progress], None] = lambda _: None,
    stop: StopRequest | None = None,
    take_over: bool = False,
) -> Outcome:
    """Run to an Outcome; the same call again goes on with what is in ``run.dir``. Blocks.

    Raises UnlostError for what ``preflight`` or the start of the cluster finds; later errors are in the Outcome.
    """
    from .cluster import Cluster

    stop = stop or StopRequest()
    fingerprints, state = preflight(config, restore=restore, take_over=take_over)
    if restore == "latest" and (done := already_finished(config, state)) is not None:
        return done
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    log_to(config.run_dir)
    on_progress(Progress(phase="starting", message="starting Ray"))
    with Cluster(config):
        return _Host(config, fingerprints, restore, on_progress, stop, take_over).run()


class _Host:
    """Watches over the controller's actor."""

    def __init__(
        self,
        config: Config,
        fingerprints: dict[str, str],
        restore: str,
        on_progress: Callable[[Progress], None],
        stop: StopRequest,
        take_over: bool,
    ) -> None:
        from .actor import controller_actor

        self.config = config
        self.on_progress = on_progress
        self.stop = stop
        self.actor: Any = controller_actor(config, fingerprints, take_over=take_over)
        self.result = self.actor.run.remote(restore)
        self._asked = 0
        self._seen = 0
        self._leave_by = 0.0

    def run(self) -> Outcome:
        """Until the controller answers, dies, or does not stop in time."""
        import ray
        from ray.exceptions import RayError

        try:
            while True:
                done, _ = ray.wait([self.result], timeout=POLL_S)
                self._show()
                if done:
                    outcome: Outcome = ray.get(self.result)
                    return outcome
                self._pass_on_stop()
                if self._leave_by and time.monotonic() > self._leave_by:
                    return self._left("the controller did not stop in time and was killed")
        except RayError as error:
            return Outcome(
                reason=REASON_FAILED,
                exit_code=EXIT_FAILED,
                detail=f"the controller's process is gone ({type(error).__name__}); the same command goes on from the "
                f"journal. See run.log",
                run_dir=self.config.run_dir,
            )

    def _show(self) -> None:
        import ray

        self._seen, told = ray.get(self.actor.progress.remote(self._seen))
        for progress in told:
            self.on_progress(progress)

    def _pass_on_stop(self) -> None:
        while self._asked < self.stop.level:
            self._asked += 1
            self.actor.stop.remote(str(self.stop.reason), self.stop.detail)
            grace = self.config.stop.grace_s if self.stop.level < 2 else 0.0
            self._leave_by = time.monotonic() + grace + LEAVE_S

    def _left(self, detail: str) -> Outcome:
        reason = str(self.stop.reason)
        return Outcome(reason=reason, exit_code=EXIT_CODES[reason], detail=detail, run_dir=self.config.run_dir)
