"""Trainer ranks as Ray actors, and the controller's handle that makes one trainer of them.

A step has two phases. First every rank reads its share of the rows and looks whether the step is its next one: whatever
goes wrong here changes nothing, on any rank, and no rank waits in a collective for one that gave up. Then all of them
apply it. A reply that is lost is asked about, never assumed (protocol rule 17).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from ..journal.errors import UnlostError
from . import ray_calls
from .actor import log_to
from .config_keys import Config
from .data_plane import AttachedDataPlane
from .imports import preload
from .protocols import Row, StepMismatch, StepResult, WeightsRef
from .runfolder import WEIGHTS_FOLDER

log = logging.getLogger(__name__)

T = TypeVar("T")

PUBLISHED_KEPT: Final = 2
LOST_REPLIES_MAX: Final = 3


class TrainerLost(UnlostError):
    """A trainer rank is gone, and the weights with it: the run goes on from its last checkpoint when started again."""


def _made_ns(folder: Path) -> int:
    """When a folder got its last entry; 0 if it is gone."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class TrainerProcess:
    """The actor of one rank. Every method answers with a result or a ``Failure``.

    Everything that touches the model runs in one thread, in the order in which the calls came.
    """

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._data_plane = AttachedDataPlane(start_timeout_s=config.ray.start_timeout_s)
        self._queue = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._trainer: Any = None
        self._fetched: tuple[int, list[list[Row]]] | None = None
        self._last: StepResult | None = None
        self._published: list[str] = []

    async def meeting_point(self) -> str:
        """Where the ranks find each other: a free port of this rank's machine."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    async def start(self, init_method: str) -> Any:
        return await ray_calls.guarded(self._start(init_method))

    async def _start(self, init_method: str) -> None:
        log_to(self._config.run_dir)
        await preload()
        await asyncio.gather(self._in_order(lambda: self._load_model(init_method)), self._data_plane.start())

    def _load_model(self, init_method: str) -> None:
        from .grpo import GrpoSettings, GrpoTrainer

        config = self._config
        names = set(GrpoSettings.__dataclass_fields__) & set(config.grpo.__struct_fields__)
        settings = {name: getattr(config.grpo, name) for name in names}
        settings |= {"temperature": config.generation.temperature, "seed": config.run.seed}
        self._trainer = GrpoTrainer(
            config.model.path,
            GrpoSettings(**settings),
            device=config.model.device,
            dtype=config.model.dtype,
            deterministic=config.trainer.deterministic,
            threads=config.trainer.threads,
            rank=self._rank,
            world_size=self._world_size,
            init_method=init_method,
        )

    async def fetch(self, step: int, groups: Sequence[Sequence[str]]) -> Any:
        """First phase: read this rank's rows. Nothing changes."""
        return await ray_calls.guarded(self._fetch(step, groups))

    async def _fetch(self, step: int, groups: Sequence[Sequence[str]]) -> None:
        version = await self._in_order(lambda: self._trainer.version)
        if step != version:
            raise StepMismatch(f"asked for step {step}, the next one is {version}")
        share = self._trainer.share(groups)
        rows = await self._data_plane.get([key for group in share for key in group])
        at = iter(rows)
        self._fetched = (step, [[next(at) for _ in group] for group in share])

    async def apply(self, step: int) -> Any:
        """Second phase: train on what was read."""
        return await ray_calls.guarded(self._in_order(lambda: self._apply(step)))

    def _apply(self, step: int) -> StepResult:
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched[0] != step:
            raise StepMismatch(f"the rows of step {step} were not read")
        result: StepResult = self._trainer.train(step, fetched[1])
        self._last = result
        return result

    async def outcome(self) -> Any:
        """Applied steps, and the result of the last one applied here. Waits for a step in progress."""
        return await ray_calls.guarded(self._in_order(lambda: (self._trainer.version, self._last)))

    async def publish(self, branch: int) -> Any:
        return await ray_calls.guarded(self._in_order(lambda: self._publish(branch)))

    def _publish(self, branch: int) -> WeightsRef:
        root = Path(self._config.run_dir) / WEIGHTS_FOLDER
        version = self._trainer.version
        name = f"b{branch:05d}-v{version:07d}"
        self._trainer.publish(root / name)
        # A worker may still be reading the one before; nobody reads what is older, or what a killed run left. What is
        # younger than the one before is a successor's, if this run was taken over and does not know it yet.
        self._published = [*(n for n in self._published if n != name), name][-PUBLISHED_KEPT:]
        before = _made_ns(root / self._published[0])
        for other in os.listdir(root):
            if other not in self._published and _made_ns(root / other) <= before:
                shutil.rmtree(root / other, ignore_errors=True)
        return WeightsRef(branch, version, str(root / name))

    async def save(self, directory: str) -> Any:
        return await ray_calls.guarded(self._save(directory))

    async def _save(self, directory: str) -> dict[str, str]:
        captured = await self._in_order(self._trainer.capture)
        digests: dict[str, str] = await asyncio.to_thread(captured.write, directory)
        return digests

    async def load(self, directory: str, digests: Mapping[str, str]) -> Any:
        return await ray_calls.guarded(self._in_order(lambda: self._trainer.load(directory, digests)))

    async def stop(self) -> Any:
        return await ray_calls.guarded(self._stop())

    async def _stop(self) -> None:
        await self._data_plane.stop()
        if self._trainer is not None:
            await self._in_order(self._trainer.close)

    def _in_order(self, function: Callable[[], T]) -> Awaitable[T]:
        """Queue work on the model's thread; queued at the call, not at the await."""
        return asyncio.get_running_loop().run_in_executor(self._queue, function)


class RayTrainer:
    """The controller's handle: ``protocols.Trainer`` over ``trainer.world_size`` ranks.

    A rank that is gone raises TrainerLost: the others can't go on without it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ranks: list[Any] = []

    async def start(self) -> None:
        """Start the ranks side by side. Raises what loading the model raises, TrainerLost, or DeadlineExceeded."""
        import ray

        config, size = self._config, self._config.trainer.world_size
        actor_class = ray.remote(
            num_cpus=config.trainer.cpus,
            num_gpus=config.trainer.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=64,
        )(TrainerProcess)
        self._ranks = [actor_class.remote(config, rank, size) for rank in range(size)]
        limit: dict[str, Any] = {"timeout_s": config.ray.start_timeout_s, "cause": ray_calls.free_cpus}
        try:
            meet = await self._ask([self._ranks[0].meeting_point.remote()], "start of trainer rank 0", **limit)
            await self._ask([rank.start.remote(meet[0]) for rank in self._ranks], "start of the trainer", **limit)
        except BaseException:
            self._kill()
            raise

    async def train(self, step: int, groups: Sequence[Sequence[str]]) -> StepResult:
        """One step. Raises StepMismatch, or what reading rows and training raise; then nothing has changed."""
        keys = [list(group) for group in groups]
        for _ in range(LOST_REPLIES_MAX):
            try:
                await self._ask([rank.fetch.remote(step, keys) for rank in self._ranks], f"rows of step {step}")
                results = await self._ask([rank.apply.remote(step) for rank in self._ranks], f"step {step}")
            except TrainerLost as lost:
                result = await self._outcome_of(step, lost)
                if result is not None:
                    return result
                log.warning("%s; step %d was not applied: once more", lost, step)
            else:
                first: StepResult = results[0]
                return first
        raise TrainerLost(f"step {step}: the replies were lost {LOST_REPLIES_MAX} times in a row")

    async def _outcome_of(self, step: int, lost: TrainerLost) -> StepResult | None:
        """Rule 17: what became of a step whose reply is lost. None: it did not happen. Raises ``lost`` if unknown."""
        try:
            outcomes = await self._ask([rank.outcome.remote() for rank in self._ranks], f"outcome of step {step}")
        except TrainerLost:
            raise lost from None
        versions = {version for version, _ in outcomes}
        if versions == {step}:
            return None
        if versions == {step + 1} and outcomes[0][1] is not None:
            result: StepResult = outcomes[0][1]
            return result
        raise TrainerLost(f"the ranks are at versions {sorted(versions)} after step {step}: restore a checkpoint")

    async def version(self) -> int:
        """Applied steps, the same on all ranks."""
        outcomes = await self._ask([rank.outcome.remote() for rank in self._ranks], "version of the trainer")
        versions = {version for version, _ in outcomes}
        if len(versions) != 1:
            raise TrainerLost(f"the ranks are at versions {sorted(versions)}: restore a checkpoint")
        return int(versions.pop())

    async def publish_weights(self, branch: int) -> WeightsRef:
        """Rank 0 writes a model folder ``weights/b<branch>-v<version>`` in the run's folder."""
        (weights,) = await self._ask([self._ranks[0].publish.remote(branch)], "publishing weights")
        published: WeightsRef = weights
        return published

    async def save(self, directory: str) -> dict[str, str]:
        """All ranks capture their state before any later call, and write it side by side."""
        references = [rank.save.remote(directory) for rank in self._ranks]  # queued before the first await
        merged: dict[str, str] = {}
        for digests in await self._ask(references, "saving the trainer"):
            merged |= digests
        return merged

    async def load(self, directory: str, digests: Mapping[str, str]) -> int:
        """All ranks load and verify."""
        versions = await self._ask([rank.load.remote(directory, dict(digests)) for rank in self._ranks], "loading")
        return int(versions[0])

    async def stop(self) -> None:
        """End the ranks."""
        try:
            await self._ask([rank.stop.remote() for rank in self._ranks], "stopping the trainer", timeout_s=15.0)
        except UnlostError as error:
            log.warning("%s", error)
        finally:
            self._kill()

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray_calls.kill(rank)

    async def _ask(self, references: Sequence[Any], what: str, **options: Any) -> list[Any]:
        """All replies. Every rank is waited for, then an error is raised: none is left behind in a call.

        A rank that is gone comes first: what the others say then (a broken collective) is only its consequence.
        """
        replies = await asyncio.gather(
            *(ray_calls.call(reference, what=what, **options) for reference in references), return_exceptions=True
        )
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        for error in sorted(errors, key=lambda error: not isinstance(error, ray_calls.ActorLost)):
            if isinstance(error, ray_calls.ActorLost):
                raise TrainerLost(f"{error}: a trainer rank is gone; run the same command again") from error
            raise error
        return list(replies)
