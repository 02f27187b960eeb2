"""Trainer ranks in real processes, reading rows from TransferQueue."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import ray
import torch

from tests.engine.payload_samples import float32, int32
from tests.engine.ray_samples import make_config, make_model
from unlost.engine import ray_calls
from unlost.engine.config_keys import Config, ModelConfig, TrainerConfig
from unlost.engine.data_plane import TransferQueueDataPlane
from unlost.engine.grpo import GrpoTrainer
from unlost.engine.models import ModelFolderError
from unlost.engine.protocols import CheckpointDamaged, Row, StepMismatch
from unlost.engine.ray_trainer import RayTrainer, TrainerLost
from unlost.engine.rows import checksum_of
from unlost.replay.events import AttemptKey

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module", autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def rows_of(step: int, groups: int = 2, siblings: int = 2) -> list[list[Row]]:
    """Made-up rollouts of this model's vocabulary; rewards differ within a group."""
    made = []
    for group in range(groups):
        number = 100 * step + group
        made.append([_row(AttemptKey(1, number, sibling, 0)) for sibling in range(siblings)])
    return made


def _row(key: AttemptKey) -> Row:
    ids = int32([4 + (key.group * 7 + key.sibling * 5 + index * 3) % 40 for index in range(24)])
    row = Row(key, int32([5, 6, 7]), ids, float32([-3.5] * 24), ((0, 0, 0),), float(key.sibling), 0)
    return msgspec.structs.replace(row, checksum=checksum_of(row))


def keys_of(groups: list[list[Row]]) -> list[list[str]]:
    return [[row.key.row_key() for row in group] for group in groups]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def steps(real_plane: TransferQueueDataPlane) -> AsyncIterator[list[list[list[Row]]]]:
    """Rows of four steps, in the data plane."""
    made = [rows_of(step) for step in range(4)]
    rows = [row for step in made for group in step for row in group]
    await asyncio.gather(*map(real_plane.put, rows))
    yield made
    await real_plane.clear([row.key.row_key() for row in rows])


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Config:
    return make_config(tmp_path, model)


@pytest_asyncio.fixture(loop_scope="package")
async def trainer(config: Config, steps: Any) -> AsyncIterator[RayTrainer]:
    made = RayTrainer(config)
    await made.start()
    yield made
    await made.stop()


async def test_steps_saves_and_weights(
    trainer: RayTrainer, config: Config, steps: list[list[list[Row]]], tmp_path: Path, model: Path
) -> None:
    """Rows by key give the very weights that training on them here gives; refused steps change nothing.

    A save holds the state of its moment although the next step is asked for at once; loading it, and the same step
    again, ends in the same bits. Published weights carry branch and version, and only the newest two are kept.
    """
    local = GrpoTrainer(config.model.path, trainer_settings(config), device="cpu", deterministic=True, threads=1)
    expected = local.train(0, steps[0])
    result = await trainer.train(0, keys_of(steps[0]))
    assert (result.step, result.trainer_version, result.tokens) == (0, 1, expected.tokens)
    assert (result.loss, result.reward_mean) == (expected.loss, expected.reward_mean)
    for wrong in (0, 2):
        with pytest.raises(StepMismatch, match=f"asked for step {wrong}, the next one is 1"):
            await trainer.train(wrong, keys_of(steps[1]))
    with pytest.raises(KeyError, match=r"i1\.g999\.s0\.a0"):
        await trainer.train(1, [*keys_of(steps[1]), ["i1.g999.s0.a0"]])
    assert await trainer.version() == 1
    saved = tmp_path / "saved"
    saved.mkdir()
    digests, result = await asyncio.gather(trainer.save(str(saved)), trainer.train(1, keys_of(steps[1])))
    assert {name: hashlib.sha256((saved / name).read_bytes()).hexdigest() for name in os.listdir(saved)} == digests
    assert await trainer.version() == 2
    first = await published(trainer)
    assert await trainer.load(str(saved), digests) == 1
    assert (await trainer.train(1, keys_of(steps[1]))).loss == result.loss
    assert await published(trainer) == first
    local.train(1, steps[1])
    local.publish(tmp_path / "local")
    assert (tmp_path / "local" / "model.safetensors").read_bytes() == first
    damaged = next(saved.glob("*.json"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged):
        await trainer.load(str(saved), digests)
    assert await trainer.version() == 2
    await trainer.train(2, keys_of(steps[2]))
    weights = await trainer.publish_weights(3)
    assert (weights.branch, weights.version) == (3, 3)
    assert Path(weights.path).parent == Path(config.run_dir) / "weights"
    assert sorted(os.listdir(Path(config.run_dir) / "weights")) == ["b00000-v0000002", "b00003-v0000003"]
    successors = Path(config.run_dir) / "weights" / "b00004-v0000003"
    successors.mkdir()  # this run was taken over, and has not noticed yet
    await trainer.publish_weights(5)
    assert sorted(os.listdir(successors.parent)) == ["b00003-v0000003", "b00004-v0000003", "b00005-v0000003"]


def trainer_settings(config: Config) -> Any:
    from unlost.engine.grpo import GrpoSettings

    return GrpoSettings(learning_rate=config.grpo.learning_rate, seed=config.run.seed)


async def published(trainer: RayTrainer) -> bytes:
    return (Path((await trainer.publish_weights(0)).path) / "model.safetensors").read_bytes()


async def test_a_lost_reply_is_asked_about(
    trainer: RayTrainer, steps: list[list[list[Row]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol rule 17: a step whose reply was lost after it was applied is not applied again; a lost request is."""
    from ray.exceptions import ActorUnavailableError

    real, lose = ray_calls.call, [""]
    seen: list[str] = []

    async def lossy(reference: Any, *, what: str, **options: Any) -> Any:
        seen.append(what)
        reply = await real(reference, what=what, **options)
        if what == lose[0]:
            lose[0] = ""
            raise ray_calls.ActorLost(f"{what}: {ActorUnavailableError.__name__}")
        return reply

    monkeypatch.setattr(ray_calls, "call", lossy)
    lose[0] = "step 0"  # applied, then the reply is lost
    first = await trainer.train(0, keys_of(steps[0]))
    assert (first.step, first.trainer_version) == (0, 1)
    assert seen == ["rows of step 0", "step 0", "outcome of step 0"]
    assert await trainer.version() == 1
    seen.clear()
    lose[0] = "rows of step 1"  # lost before it could be applied
    second = await trainer.train(1, keys_of(steps[1]))
    assert (second.step, second.trainer_version) == (1, 2)
    assert seen == ["rows of step 1", "outcome of step 1", "rows of step 1", "step 1"]
    assert await trainer.version() == 2


async def test_two_ranks_are_one_trainer(
    config: Config, steps: list[list[list[Row]]], tmp_path: Path, model: Path
) -> None:
    """Two ranks agree with one on the same step, save side by side, and a rank that is killed loses the trainer."""
    one = GrpoTrainer(config.model.path, trainer_settings(config), device="cpu", deterministic=True, threads=1)
    expected = one.train(0, steps[0])
    two = RayTrainer(msgspec.structs.replace(config, trainer=TrainerConfig(world_size=2, deterministic=True)))
    await two.start()
    try:
        with pytest.raises(KeyError):  # only the second rank's share is missing; the first must not wait for it
            await two.train(0, [keys_of(steps[0])[0], ["i1.g999.s0.a0"]])
        result = await two.train(0, keys_of(steps[0]))
        assert (result.tokens, result.reward_mean) == (expected.tokens, expected.reward_mean)
        assert result.loss == pytest.approx(expected.loss, abs=1e-5)
        saved = tmp_path / "saved"
        saved.mkdir()
        digests = await two.save(str(saved))
        assert set(digests) == set(os.listdir(saved)) >= {"random-00000.safetensors", "random-00001.safetensors"}
        assert await two.load(str(saved), digests) == 1
        pid = await two._ranks[1].__ray_call__.remote(lambda _: os.getpid())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainerLost, match="a trainer rank is gone"):
            await two.train(1, keys_of(steps[1]))
        with pytest.raises(TrainerLost):
            await two.version()
    finally:
        await two.stop()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_trainer_that_can_not_start_says_why(config: Config, steps: Any, tmp_path: Path) -> None:
    """A missing model folder arrives as what it is, and no process stays."""
    missing = RayTrainer(msgspec.structs.replace(config, model=ModelConfig(path=str(tmp_path / "nothing"))))
    with pytest.raises(ModelFolderError, match="nothing"):
        await missing.start()
    free = ray.cluster_resources()["CPU"] - 3  # TransferQueue has its controller and two units
    for _ in range(100):
        if ray.available_resources().get("CPU", 0) == free:
            break
        await asyncio.sleep(0.1)
    assert ray.available_resources().get("CPU", 0) == free
