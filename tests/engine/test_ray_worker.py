"""Rollout workers in real processes, with the embedded generator and TransferQueue."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from tests.engine.ray_samples import make_config, make_model, prompt
from unlost.engine import ray_worker
from unlost.engine.config_keys import Config, RewardConfig, WorkersConfig
from unlost.engine.data_plane import TransferQueueDataPlane
from unlost.engine.deadline import DeadlineExceeded
from unlost.engine.protocols import AttemptAborted, AttemptError, AttemptRequest, Prefix, WeightsRef, WorkerLost
from unlost.engine.ray_worker import AnchoredClock, RayWorker, RayWorkerFactory
from unlost.engine.rewards import RewardError
from unlost.engine.rows import checksum_of
from unlost.replay.events import AttemptKey
from unlost.replay.payloads import PayloadStore

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", endless=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Config:
    return make_config(tmp_path_factory.mktemp("run"), model)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def worker(config: Config, model: Path, real_plane: TransferQueueDataPlane) -> AsyncIterator[RayWorker]:
    made = await factory(config)(7, "i00001-w00007")
    await made.start(WeightsRef(0, 0, str(model)))
    yield made
    stats = await made.stop()
    assert stats.generated_tokens > 0
    assert stats.journal_failed == ""


def factory(config: Config) -> RayWorkerFactory:
    return RayWorkerFactory(config, run_id="test", clock=AnchoredClock(1_000_000, time.time_ns() // 1000))


def request(
    group: int, *, most: int = 40, attempt: int = 0, seed: int | None = None, prefix: Prefix | None = None
) -> AttemptRequest:
    key = AttemptKey(1, group, 0, attempt)
    return AttemptRequest(key, prompt(group), seed if seed is not None else group, most, 1.0, 1.0, prefix)


def store(config: Config) -> PayloadStore:
    return PayloadStore(os.path.join(config.run_dir, "payloads"))


async def test_attempts_end_in_durable_payloads_and_rows(
    worker: RayWorker, config: Config, real_plane: TransferQueueDataPlane
) -> None:
    """Side by side; each receipt names its payload, and its row in the data plane is the same sequence."""
    requests = [request(group) for group in range(12)]
    receipts = await asyncio.gather(*map(worker.generate, requests))
    payloads = [store(config).load(receipt, each.key) for each, receipt in zip(requests, receipts, strict=True)]
    await asyncio.gather(*(worker.put_row(each.key) for each in requests))
    rows = await real_plane.get([each.key.row_key() for each in requests])
    for payload, row, receipt in zip(payloads, rows, receipts, strict=True):
        assert (row.token_ids, row.logprobs, row.reward) == (payload.token_ids, payload.logprobs, receipt.reward)
        assert checksum_of(row) == receipt.checksum
        assert (receipt.tokens, receipt.truncated) == (40, True)
    assert len({payload.token_ids for payload in payloads}) == 12
    stats = await worker.stats()
    assert (stats.worker, stats.generated_tokens) == (7, sum(receipt.tokens for receipt in receipts))
    with pytest.raises(KeyError, match=r"i1\.g99\.s0\.a0"):
        await worker.put_row(AttemptKey(1, 99, 0, 0))
    await real_plane.clear([each.key.row_key() for each in requests])


async def test_a_resumed_attempt_goes_on_from_its_prefix(worker: RayWorker, config: Config) -> None:
    """Only the rest is generated, and the whole has the prefix's tokens and log-probabilities bit by bit."""
    full = store(config).load(await worker.generate(request(30)), AttemptKey(1, 30, 0, 0))
    half = full.tokens // 2
    before = (await worker.stats()).generated_tokens
    prefix = Prefix(full.token_ids[: 4 * half], full.logprobs[: 4 * half], full.weight_spans)
    receipt = await worker.generate(request(30, attempt=1, prefix=prefix))
    resumed = store(config).load(receipt, AttemptKey(1, 30, 0, 1))
    assert (resumed.token_ids[: 4 * half], resumed.logprobs[: 4 * half]) == (prefix.token_ids, prefix.logprobs)
    assert (await worker.stats()).generated_tokens - before == resumed.tokens - half


async def test_an_abort_ends_a_running_attempt(worker: RayWorker) -> None:
    """AttemptAborted arrives with its counts; and an attempt whose call is cancelled is ended over there too."""
    task = asyncio.ensure_future(worker.generate(request(40, most=450)))
    cancelled = asyncio.ensure_future(worker.generate(request(41, most=450)))
    await until_running(worker, 2)
    cancelled.cancel()
    await worker.abort([AttemptKey(1, 40, 0, 0)])
    with pytest.raises(AttemptAborted) as aborted:
        await task
    assert aborted.value.durable == aborted.value.tokens < 450
    await until_running(worker, 0)
    assert (await worker.stats()).generated_tokens < 12 * 40 + 80 + 2 * 450


async def until_running(worker: RayWorker, count: int) -> None:
    limit = time.monotonic() + 30
    while (await worker.stats()).running != count:
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


async def test_new_weights_tag_what_they_generate(worker: RayWorker, model: Path) -> None:
    """After an update, tokens carry the new branch and version."""
    assert await worker.update_weights(WeightsRef(2, 5, str(model))) >= 0
    receipt = await worker.generate(request(50))
    assert receipt.weight_spans == ((0, 2, 5),)


async def test_bad_requests_fail_as_data(worker: RayWorker) -> None:
    """A prompt beyond the model's context is refused with its cause; the worker goes on."""
    long = msgspec.structs.replace(request(60), prompt=prompt(60, "a" * 1000))
    with pytest.raises(AttemptError, match="context") as failed:
        await worker.generate(long)
    assert failed.value.kind == "data"
    assert (await worker.generate(request(61))).tokens > 0


async def test_a_worker_that_can_not_start_says_why(config: Config, real_plane: TransferQueueDataPlane) -> None:
    """A missing reward module arrives as the RewardError that it is; no CPU is DeadlineExceeded with the figures."""
    broken = msgspec.structs.replace(config, reward=RewardConfig(function="no_such_module:f", path=config.reward.path))
    made = await factory(broken)(8, "i00001-w00008")
    with pytest.raises(RewardError, match="no_such_module"):
        await made.start(WeightsRef(0, 0, config.model.path))
    greedy = msgspec.structs.replace(
        config, workers=WorkersConfig(cpus=500), ray=msgspec.structs.replace(config.ray, start_timeout_s=1.0)
    )
    made = await factory(greedy)(9, "i00001-w00009")
    with pytest.raises(DeadlineExceeded, match=r"start of rollout worker 9: not done after 1 s\. Of Ray's 12 CPUs"):
        await made.start(WeightsRef(0, 0, config.model.path))


async def test_a_killed_worker_is_lost_and_its_tokens_are_kept(
    config: Config, model: Path, real_plane: TransferQueueDataPlane
) -> None:
    """SIGKILL in the middle of decoding: WorkerLost for every call, and a prefix within the progress interval."""
    made = await factory(config)(10, "i00001-w00010")
    await made.start(WeightsRef(0, 0, str(model)))
    key = AttemptKey(1, 70, 0, 0)
    task = asyncio.ensure_future(made.generate(request(70, most=450)))
    journal = Path(config.run_dir) / "payloads" / "i00001-w00010"
    tails = store(config)
    limit = time.monotonic() + 60
    while tails.sealed_tails({key: journal.name}).attempts[key].prefix_tokens < 32 and not task.done():
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)
    assert not task.done()
    process = next(p for p in psutil.process_iter() if has_open(p, str(journal)))
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await task
    for call in (made.stats(), made.put_row(key), made.abort([key]), made.stop()):
        with pytest.raises(WorkerLost):
            await call
    tail = tails.sealed_tails({key: journal.name}).attempts[key]
    assert tail.prefix_tokens >= 32
    assert tail.sealed is None
    ids, logprobs, spans = tails.load_prefix(tail)
    assert len(ids) == len(logprobs) == 4 * tail.prefix_tokens
    assert spans == ((0, 0, 0),)


def has_open(process: psutil.Process, journal: str) -> bool:
    try:
        return any(file.path.startswith(journal) for file in process.open_files()) and process.pid != os.getpid()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


async def test_the_clock_of_a_worker_goes_on_from_the_runs() -> None:
    """Run time continues from the controller's reading, by the wall clock between the two and then monotonically."""
    past = time.time_ns() // 1000 - 5_000_000
    clock = ray_worker.AnchoredClock(100, past)
    first = clock.now_us()
    assert 5_000_000 <= first - 100 < 6_000_000
    assert clock.now_us() >= first
    ahead = ray_worker.AnchoredClock(100, time.time_ns() // 1000 + 10**9)
    assert ahead.now_us() >= 100
