"""The worker core, in virtual time around a scripted generator and a real payload journal."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import pytest

from tests.engine.payload_samples import float32, int32
from tests.fakes import (
    SimDataPlane,
    SimPlan,
    SimWorker,
    VirtualClock,
    run_virtual,
    sim_logprob,
    sim_reward,
    sim_token,
)
from tests.sim_storage import Fault, SimFile, SimStorage
from unlost.engine.protocols import AttemptAborted, AttemptError, AttemptRequest, Prefix, Prompt, WeightsRef, WorkerLost
from unlost.engine.rows import checksum_of
from unlost.engine.worker import WorkerCore
from unlost.engine.worker_parts import ThreadedScore, WorkerOptions
from unlost.journal import JournalOptions, JournalReader
from unlost.replay.events import AttemptKey, PayloadRecord, ProgressRecord, PromptRef, Receipt, SealedRecord
from unlost.replay.payloads import PayloadStore

ROOT = "/run/payloads"
NAME = "i00001-w00001"
KEY = AttemptKey(1, 5, 2, 0)
PROMPT = Prompt(PromptRef("p7", 0, 7, 99), {"prompt": "hello"})
INITIAL = WeightsRef(0, 0, "weights/0")


def request(key: AttemptKey = KEY, *, seed: int = 1, most: int = 1000, prefix: Prefix | None = None) -> AttemptRequest:
    return AttemptRequest(key, PROMPT, seed, most, 1.0, 1.0, prefix)


def prefix_of(seed: int, count: int) -> Prefix:
    return Prefix(
        int32([sim_token(seed, index) for index in range(count)]),
        float32([sim_logprob(seed, index) for index in range(count)]),
        ((0, 0, 0),),
    )


class Bench:
    """A started worker with its surroundings."""

    def __init__(self, script: Callable[[AttemptKey, int], SimPlan] | SimPlan, **options: Any) -> None:
        self.clock = VirtualClock()
        self.storage = options.pop("storage", None) or SimStorage()
        self.plane = SimDataPlane(self.clock, storage=self.storage)
        self.encode: Callable[[Prompt], list[int]] | None = None
        reward = options.pop("reward", sim_reward)
        journal_options = options.pop("journal_options", None)
        plan = (lambda _key, _seed: script) if isinstance(script, SimPlan) else script
        self.worker = SimWorker(
            self.clock,
            WorkerOptions(worker_id=1, journal_name=NAME, **options),
            self.plane,
            payload_root=ROOT,
            script=plan,
            storage=self.storage,
            reward=reward,
            journal_options=journal_options,
        )

    async def __aenter__(self) -> Self:
        await self.plane.start()
        await self.worker.start(INITIAL)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.worker.alive:
            await self.worker.stop()

    @property
    def core(self) -> WorkerCore:
        return self.worker.core

    def records(self) -> list[tuple[int, Any]]:
        return list(JournalReader(f"{ROOT}/{NAME}", PayloadRecord, storage=self.storage).events())

    def store(self) -> PayloadStore:
        return PayloadStore(ROOT, self.storage)


def test_a_receipt_names_a_durable_payload_with_the_generated_tokens() -> None:
    """What the receipt points to survives a power cut and holds exactly what the generator gave (protocol rule 5)."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=150)) as bench:
            receipt = await bench.worker.generate(request())
            bench.worker.kill()
            bench.storage.power_cut(random.Random(1))
            payload = bench.store().load(receipt, KEY)
            assert payload.token_ids == int32([sim_token(1, index) for index in range(150)])
            assert payload.logprobs == float32([sim_logprob(1, index) for index in range(150)])
            assert payload.prompt_ids == int32([ord(letter) for letter in "hello"])
            assert receipt.reward == payload.reward == sim_reward(PROMPT, [sim_token(1, i) for i in range(150)])
            assert (receipt.tokens, receipt.prompt_tokens, receipt.truncated) == (150, 5, False)
            assert receipt.weight_spans == ((0, 0, 0),)

    run_virtual(main)


def test_no_receipt_before_the_sync() -> None:
    """While the seal can't be synced, generate does not return; when it can, it does."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=10, seconds_per_token=0.001)) as bench:
            hold = [True]
            original = SimFile.sync

            def sync(file: SimFile) -> None:
                if hold[0]:
                    raise OSError(errno.EIO, "not now")
                original(file)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SimFile, "sync", sync)
                task = asyncio.ensure_future(bench.worker.generate(request()))
                await asyncio.sleep(0.06)  # generated, scored, appended; one failed flush
                assert bench.core._journal is not None
                assert bench.core._journal.next_offset == 1
                assert not task.done()
                hold[0] = False
                receipt = await task
            assert receipt.tokens == 10

    run_virtual(main)


def test_progress_is_journaled_every_so_many_tokens() -> None:
    """A chunk of at least the interval is appended as soon as it is there; the seal holds the rest."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=150, tokens_per_delta=16), progress_interval_tokens=64) as bench:
            await bench.worker.generate(request())
        records = [record for _, record in bench.records()]
        assert [(type(r), r.first, r.count) for r in records] == [
            (ProgressRecord, 0, 64),
            (ProgressRecord, 64, 64),
            (SealedRecord, 128, 22),
        ]
        assert records[-1].chunks == (0, 1)

    run_virtual(main)


def test_progress_is_journaled_after_so_long() -> None:
    """Slow tokens are journaled when the oldest has waited the interval, though they are few."""

    async def main() -> None:
        plan = SimPlan(tokens=6, seconds_per_token=1.0, tokens_per_delta=1)
        async with Bench(plan, progress_interval_tokens=64, progress_interval_ms=2000) as bench:
            task = asyncio.ensure_future(bench.worker.generate(request()))
            await asyncio.sleep(4.6)  # token 1 came at 1.1 s: due by 3.6 s at the latest
            bench.worker.kill()
            with pytest.raises(WorkerLost):
                await task
        (tail,) = bench.store().sealed_tails({KEY: NAME}).attempts.values()
        assert tail.prefix_tokens >= 2

    run_virtual(main)


def test_a_resumed_attempt_journals_its_prefix_again() -> None:
    """Protocol rule 7: the worker's own journal holds the whole attempt, prefix included, and the tokens go on."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=150)) as bench:
            receipt = await bench.worker.generate(request(AttemptKey(2, 5, 2, 1), prefix=prefix_of(1, 100)))
            assert bench.worker.generator is not None
            assert bench.worker.generator.generated_tokens == 50
            payload = bench.store().load(receipt, AttemptKey(2, 5, 2, 1))
            assert payload.token_ids == int32([sim_token(1, index) for index in range(150)])
            assert payload.logprobs == float32([sim_logprob(1, index) for index in range(150)])
            _, first = bench.records()[0]
            assert (first.first, first.count) == (0, 100)

    run_virtual(main)


def test_a_prefix_with_unequal_arrays_fails_the_attempt() -> None:
    """Tokens without their log-probabilities are refused before anything is generated."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=150)) as bench:
            good = prefix_of(1, 100)
            broken = Prefix(good.token_ids, good.logprobs[:-4], good.weight_spans)
            with pytest.raises(AttemptError, match="unequal lengths"):
                await bench.worker.generate(request(prefix=broken))

    run_virtual(main)


def test_tokens_are_tagged_with_the_weights_that_made_them() -> None:
    """A weight update in the middle of a response shows as a second span, in chunks, seal and receipt alike."""

    async def main() -> None:
        plan = SimPlan(tokens=96, seconds_per_token=0.01, tokens_per_delta=8)
        async with Bench(plan, progress_interval_tokens=16) as bench:
            task = asyncio.ensure_future(bench.worker.generate(request()))
            await asyncio.sleep(0.5)
            await bench.worker.update_weights(WeightsRef(0, 1, "weights/1"))
            receipt = await task
            assert receipt.weight_spans == ((0, 0, 0), (48, 0, 1))
            assert (receipt.version_min, receipt.version_max) == (0, 1)
            tail = bench.store().sealed_tails({KEY: NAME}).attempts[KEY]
            assert tail.sealed == receipt
            assert bench.store().load_prefix(tail)[2] == receipt.weight_spans

    run_virtual(main)


def test_an_abort_keeps_what_was_generated() -> None:
    """AttemptAborted says how much was generated and how much of it is durable; a power cut leaves that much."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=1000, seconds_per_token=0.01, tokens_per_delta=10)) as bench:
            task = asyncio.ensure_future(bench.worker.generate(request()))
            await asyncio.sleep(3.05)
            await bench.worker.abort([KEY, AttemptKey(9, 9, 9, 9)])
            with pytest.raises(AttemptAborted) as aborted:
                await task
            assert aborted.value.tokens == aborted.value.durable == 300
            bench.worker.kill()
            bench.storage.power_cut(random.Random(3))
            assert bench.store().sealed_tails({KEY: NAME}).attempts[KEY].prefix_tokens == 300

    run_virtual(main)


def test_an_abort_while_scoring_ends_the_attempt() -> None:
    """An attempt whose reward is being computed is aborted at once, and its tokens are kept."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=20, seconds_per_token=0.001)) as bench:

            async def slow(prompt: Prompt, token_ids: list[int]) -> float:
                await asyncio.sleep(60)
                return 1.0

            bench.core._score = slow
            task = asyncio.ensure_future(bench.worker.generate(request()))
            await asyncio.sleep(1)
            await bench.worker.abort([KEY])
            began = bench.clock.now_us()
            with pytest.raises(AttemptAborted) as aborted:
                await task
            assert aborted.value.durable == 20
            assert bench.clock.now_us() - began < 1_000_000

    run_virtual(main)


def test_an_abort_between_the_last_token_and_scoring_ends_the_attempt() -> None:
    """However close the abort comes to the end of decoding, no reward is computed and no seal is written."""

    async def main() -> None:
        def never(prompt: Prompt, token_ids: Any) -> float:
            raise AssertionError("scored")

        async with Bench(SimPlan(tokens=1000, seconds_per_token=0.01), reward=never) as bench:
            task = asyncio.ensure_future(bench.worker.generate(request()))
            await asyncio.sleep(2)
            bench.core._on_done(bench.core._attempts[KEY], "eos")
            await bench.core.abort([KEY])
            with pytest.raises(AttemptAborted):
                await task

    run_virtual(main)


def test_stopping_makes_running_attempts_durable() -> None:
    """An orderly stop loses no token: all attempts are aborted with their tokens on disk."""

    async def main() -> None:
        bench = Bench(SimPlan(tokens=1000, seconds_per_token=0.01, tokens_per_delta=10))
        keys = [AttemptKey(1, group, 0, 0) for group in range(5)]
        async with bench:
            tasks = [asyncio.ensure_future(bench.worker.generate(request(key, seed=key.group))) for key in keys]
            await asyncio.sleep(2.04)
            stats = await bench.worker.stop()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, AttemptAborted) for result in results)
        assert stats.generated_tokens == 5 * 200
        bench.storage.power_cut(random.Random(4))
        tails = bench.store().sealed_tails(dict.fromkeys(keys, NAME))
        assert [tails.attempts[key].prefix_tokens for key in keys] == [200] * 5

    run_virtual(main)


def test_a_failing_reward_fails_the_attempt() -> None:
    """AttemptError keeps kind and cause of what scoring raised, and says how many tokens are lost."""

    def reward(prompt: Prompt, token_ids: Any) -> float:
        raise AttemptError("data", "reward says no")

    async def main() -> None:
        async with Bench(SimPlan(tokens=30), reward=reward) as bench:
            with pytest.raises(AttemptError, match="reward says no") as failed:
                await bench.worker.generate(request())
            assert (failed.value.kind, failed.value.tokens) == ("data", 30)

    run_virtual(main)


def test_a_prompt_that_is_too_long_is_a_data_error() -> None:
    """It is refused before anything is generated."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=30), prompt_tokens_max=4) as bench:
            with pytest.raises(AttemptError, match="p7 has 5 tokens, 4 fit") as failed:
                await bench.worker.generate(request())
            assert failed.value.kind == "data"
            assert (await bench.worker.stats()).generated_tokens == 0

    run_virtual(main)


def test_a_failing_generator_request_is_infrastructure() -> None:
    """The cause comes through, and the tokens so far are kept for the next attempt."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=100, fail_after=40)) as bench:
            with pytest.raises(AttemptError, match="scripted") as failed:
                await bench.worker.generate(request())
            assert (failed.value.kind, failed.value.tokens) == ("infrastructure", 40)
            assert bench.store().sealed_tails({KEY: NAME}).attempts[KEY].prefix_tokens == 40

    run_virtual(main)


def test_a_generator_that_failed_as_a_whole_is_a_lost_worker() -> None:
    """Nothing more can come from this worker, so it is to be replaced instead of asked again and again."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=100, fail_after=40)) as bench:
            assert bench.worker.generator is not None
            bench.worker.generator.failure = "out of memory"
            with pytest.raises(WorkerLost, match="out of memory"):
                await bench.worker.generate(request())

    run_virtual(main)


@pytest.mark.parametrize("tokens", [10, 500])
def test_a_failed_journal_fails_attempts_as_infrastructure(tokens: int) -> None:
    """When the payload journal's disk is broken no receipt is given, and the stats say why."""

    async def main() -> None:
        options = JournalOptions(failure_backoff_ms=1, failure_backoff_ms_max=2)
        plan = SimPlan(tokens=tokens, seconds_per_token=0.01)
        async with Bench(plan, journal_options=options) as bench:
            bench.storage.faults.append(Fault("write", OSError(errno.EIO, "broken"), times=10**6))
            bench.storage.faults.append(Fault("create", OSError(errno.EIO, "broken"), times=10**6))
            with pytest.raises(AttemptError) as failed:
                await bench.worker.generate(request())
            assert failed.value.kind == "infrastructure"
            assert "payload journal" in failed.value.cause
            assert (await bench.worker.stats()).journal_failed
            bench.worker.kill()

    run_virtual(main)


def test_rows_are_put_from_memory_and_forgotten_by_size() -> None:
    """put_row stores the sealed row, twice without harm; rows beyond the bound are KeyError, the newest never."""

    async def main() -> None:
        keys = [AttemptKey(1, group, 0, 0) for group in range(3)]
        async with Bench(SimPlan(tokens=100), row_cache_bytes_max=1700) as bench:
            receipts = [await bench.worker.generate(request(key, seed=key.group)) for key in keys]
            with pytest.raises(KeyError, match=r"i1\.g0\.s0\.a0"):
                await bench.worker.put_row(keys[0])
            for _ in range(2):
                await bench.worker.put_row(keys[2])
            (row,) = await bench.plane.get([keys[2].row_key()])
            assert checksum_of(row) == row.checksum == receipts[2].checksum
            assert await bench.plane.inventory() == {keys[2].row_key(): receipts[2].checksum}

    run_virtual(main)


def test_pruning_spares_what_running_and_just_sealed_attempts_refer_to() -> None:
    """Whole segments below the floor go, but no chunk of a running attempt, nor of one sealed since the last call."""

    async def main() -> None:
        options = JournalOptions(segment_bytes_max=1)  # every flush begins a segment
        old, sealed, running = (AttemptKey(1, group, 0, 0) for group in (1, 2, 3))
        lengths = {old: 100, sealed: 200, running: 100_000}
        async with Bench(lambda key, _: SimPlan(tokens=lengths[key]), journal_options=options) as bench:
            journal = bench.worker.journal
            assert journal is not None
            await bench.worker.generate(request(old, seed=1))
            await bench.worker.prune(journal.next_offset)
            first = journal.next_offset
            receipt = await bench.worker.generate(request(sealed, seed=2))
            task = asyncio.ensure_future(bench.worker.generate(request(running, seed=3, most=100_000)))
            await asyncio.sleep(10)
            await bench.worker.prune(journal.next_offset)
            assert bench.store().load(receipt, sealed).tokens == 200
            assert JournalReader(f"{ROOT}/{NAME}", PayloadRecord, storage=bench.storage).first_offset == first
            await bench.worker.prune(journal.next_offset)
            assert JournalReader(f"{ROOT}/{NAME}", PayloadRecord, storage=bench.storage).first_offset > receipt.offset
            await bench.worker.abort([running])
            with pytest.raises(AttemptAborted) as aborted:
                await task
            tail = bench.store().sealed_tails({running: NAME}).attempts[running]
            assert tail.prefix_tokens == aborted.value.tokens

    run_virtual(main)


def test_without_payloads_the_seal_waits_for_the_row() -> None:
    """Under ``payloads: none`` there is no journal, and a receipt means that the data plane holds the row."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=30), payloads="none") as bench:
            receipt = await bench.worker.generate(request())
            assert (receipt.journal, receipt.offset) == ("", -1)
            assert await bench.plane.inventory() == {KEY.row_key(): receipt.checksum}
            assert ROOT not in bench.storage.directories
            bench.plane.fail_next("put", OSError("full"))
            with pytest.raises(AttemptError, match="row not stored") as failed:
                await bench.worker.generate(request(AttemptKey(1, 6, 0, 0)))
            assert failed.value.kind == "infrastructure"

    run_virtual(main)


def test_a_killed_worker_is_lost_and_its_journal_readable() -> None:
    """Every waiting call raises WorkerLost; what was flushed before is found."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=1000, die_after=200)) as bench:
            with pytest.raises(WorkerLost):
                await bench.worker.generate(request())
            with pytest.raises(WorkerLost):
                await bench.worker.stats()
        bench.storage.kill_process()
        bench.storage.power_cut(random.Random(5))
        assert bench.store().sealed_tails({KEY: NAME}).attempts[KEY].prefix_tokens >= 128

    run_virtual(main)


def test_a_cancelled_call_ends_its_request() -> None:
    """When nobody waits for an attempt any more, the generator stops spending tokens on it."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=10_000, seconds_per_token=0.01)) as bench:
            task = asyncio.ensure_future(bench.core.generate(request()))
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(1)
            before = (await bench.worker.stats()).generated_tokens
            await asyncio.sleep(5)
            stats = await bench.worker.stats()
            assert (stats.generated_tokens, stats.running) == (before, 0)

    run_virtual(main)


def test_the_same_attempt_twice_at_once_is_refused() -> None:
    """Two runs of one key would mix their chunks: the second is an error."""

    async def main() -> None:
        async with Bench(SimPlan(tokens=100)) as bench:
            first = asyncio.ensure_future(bench.worker.generate(request()))
            await asyncio.sleep(0.1)
            with pytest.raises(AttemptError, match="already running"):
                await bench.worker.generate(request())
            assert (await first).tokens == 100

    run_virtual(main)


def test_runs_are_reproducible() -> None:
    """The simulated worker is deterministic: two runs give the same receipts at the same times."""

    async def main() -> list[tuple[int, Receipt]]:
        seen = []

        def script(key: AttemptKey, seed: int) -> SimPlan:
            return SimPlan(tokens=20 + seed * 37 % 300, seconds_per_token=0.001 * (1 + seed % 7))

        async with Bench(script) as bench:

            async def one(group: int) -> None:
                receipt = await bench.worker.generate(request(AttemptKey(1, group, 0, 0), seed=group))
                seen.append((bench.clock.now_us(), receipt))

            await asyncio.gather(*map(one, range(30)))
        return seen

    assert run_virtual(main) == run_virtual(main)


# --- scoring in threads


async def score(function: Callable[..., Any], timeout_s: float = 5.0) -> float:
    return await ThreadedScore(function, timeout_s=timeout_s, threads=2)(PROMPT, [1, 2])


async def test_rewards_run_in_threads_side_by_side() -> None:
    """Blocking rewards do not block the loop, and at most ``threads`` run at once."""
    running, most = [0], [0]

    def reward(prompt: Prompt, token_ids: list[int]) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.05)
        running[0] -= 1
        return float(sum(token_ids))

    scorer = ThreadedScore(reward, timeout_s=5, threads=3)
    assert await asyncio.gather(*(scorer(PROMPT, [number]) for number in range(6))) == [0, 1, 2, 3, 4, 5]
    assert most[0] == 3


@pytest.mark.parametrize(
    ("error", "cause"),
    [(ValueError("bad"), "ValueError: bad"), (TimeoutError("x"), "TimeoutError"), (AttemptError("data", "own"), "own")],
)
async def test_what_a_reward_raises_is_a_data_error(error: Exception, cause: str) -> None:
    """An exception of the user's function fails its attempt with the cause; an AttemptError stays itself."""

    def reward(prompt: Prompt, token_ids: list[int]) -> float:
        raise error

    with pytest.raises(AttemptError) as failed:
        await score(reward)
    assert failed.value.kind == "data"
    assert cause in failed.value.cause


async def test_a_reward_that_hangs_times_out() -> None:
    """The attempt fails after the time-out, other rewards go on, and a late return disturbs nobody."""
    release = threading.Event()

    def reward(prompt: Prompt, token_ids: list[int]) -> float:
        if token_ids == [0]:
            release.wait(10)
        return 1.0

    scorer = ThreadedScore(reward, timeout_s=0.05, threads=1)
    with pytest.raises(AttemptError, match=r"more than 0\.05 s"):
        await scorer(PROMPT, [0])
    assert scorer.hung == 1
    assert await scorer(PROMPT, [1]) == 1.0
    release.set()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if scorer.hung == 0:
            break
    assert scorer.hung == 0
