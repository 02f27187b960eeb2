"""What a rollout worker does, without Ray: generate, journal, score, seal, and put rows.

Promises: a receipt is returned only when the sealed payload is durable (protocol rule 5; under ``payloads: none``, when
the row is in the data plane). While an attempt runs, its tokens go to the worker's own payload journal every
``progress_interval_tokens`` or ``progress_interval_ms``, so that a crash loses at most that and the flush interval. A
reused prefix is journaled again first (rule 7): the worker's own journal holds all of an attempt, always.

Tokens are taken over on the generator's thread, where they arrive; everything else happens on the event loop. Time,
threads and the generator are handed in, so that a simulation can run this very code under a virtual clock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from ..journal.errors import JournalError
from ..journal.writer import JournalWriter
from ..replay.events import FAIL_DATA, FAIL_INFRASTRUCTURE, AttemptKey, Receipt
from ..replay.payload_records import Payload, Span, Unsealed, progress_later, receipt_of, with_checksum
from .data_plane import DataPlaneLost
from .protocols import (
    AttemptAborted,
    AttemptError,
    AttemptRequest,
    Blocking,
    Clock,
    Prompt,
    Row,
    WeightsRef,
    WorkerLost,
    WorkerStats,
)
from .rows import row_of
from .worker_parts import Encode, GeneratorEngine, HasBytes, RowSink, Score, WorkerOptions

log = logging.getLogger(__name__)

REASON_LENGTH: Final = "length"
REASON_ABORTED: Final = "aborted"
COMPLETE_REASONS: Final = frozenset({"eos", REASON_LENGTH})
STOP_GRACE_S: Final = 10.0


class _Attempt:
    """A running attempt. Its buffers are shared with the generator's thread, under the worker's lock."""

    __slots__ = (
        "aborted",
        "chunks",
        "decoding",
        "done",
        "error",
        "ids",
        "journaled",
        "key",
        "last_offset",
        "logprobs",
        "loop",
        "prompt_ids",
        "scoring",
        "since_us",
        "spans",
        "started_us",
    )

    def __init__(self, key: AttemptKey, prompt_ids: bytes, loop: asyncio.AbstractEventLoop, now_us: int) -> None:
        self.key = key
        self.prompt_ids = prompt_ids
        self.loop = loop
        self.done: asyncio.Future[str] = loop.create_future()
        self.ids = bytearray()
        self.logprobs = bytearray()
        self.spans: list[Span] = []
        self.journaled = 0  # tokens that are in the journal, durable or about to be
        self.chunks: list[int] = []
        self.last_offset = -1
        self.since_us = now_us  # when the oldest token that is not in the journal arrived
        self.started_us = now_us
        self.error: AttemptError | None = None
        self.aborted = False
        self.decoding = False
        self.scoring: asyncio.Future[float] | None = None

    @property
    def tokens(self) -> int:
        """Generated so far, reused prefix included."""
        return len(self.ids) // 4


class WorkerCore:
    """A rollout worker (see ``protocols.RolloutWorker``) around a generator. All calls from one event loop.

    ``make_generator`` loads model and weights; ``open_journal`` opens the payload journal (not called under
    ``payloads: none``); both may block and run through ``blocking``.

    ``AttemptAborted.tokens`` and ``AttemptError.tokens`` count the reused prefix, as ``Receipt.tokens`` does.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        make_generator: Callable[[WeightsRef], GeneratorEngine],
        open_journal: Callable[[], JournalWriter[Any]],
        encode: Encode,
        score: Score,
        data_plane: RowSink,
        clock: Clock,
        blocking: Blocking = asyncio.to_thread,
    ) -> None:
        self.worker_id = options.worker_id
        self.journal_name = options.journal_name
        self.options = options
        self._make_generator = make_generator
        self._open_journal = open_journal
        self._encode = encode
        self._score = score
        self._data_plane = data_plane
        self._clock = clock
        self._blocking = blocking
        self._generator: GeneratorEngine | None = None
        self._journal: JournalWriter[Any] | None = None
        self._journal_failed = ""
        self._lock = threading.Lock()
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._ended = asyncio.Event()
        self._sealed_since_prune: list[int] = []
        self._rows: OrderedDict[AttemptKey, Row] = OrderedDict()
        self._rows_bytes = 0
        self._weights = (0, 0)
        self._ticker: asyncio.Task[None] | None = None
        self._stopping = False

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self, weights: WeightsRef) -> None:
        """Load model and weights, open the payload journal, reach the data plane. Raises whatever failed."""
        self._weights = (weights.branch, weights.version)
        parts: list[Awaitable[Any]] = [self._blocking(self._make_generator, weights), self._data_plane.start()]
        if self.options.payloads == "full":
            parts.append(self._blocking(self._open_journal))
        generator, _, *journal = await asyncio.gather(*parts)
        self._generator = generator
        self._journal = journal[0] if journal else None
        generator.start()

    async def stop(self) -> WorkerStats:
        """Abort what runs, make it durable, close. Returns the last counters."""
        self._stopping = True
        await self.abort(list(self._attempts))
        await self._until_idle()
        stats = await self.stats()
        if self._ticker is not None:
            self._ticker.cancel()
        if self._generator is not None:
            await self._blocking(self._generator.stop)
        if self._journal is not None:
            try:
                await self._blocking(self._journal.close)
            except JournalError as error:
                self._journal_failed = str(error)
        await self._data_plane.stop()
        return msgspec.structs.replace(stats, journal_failed=self._journal_failed)

    async def stats(self) -> WorkerStats:
        """Counters now. ``generated_tokens`` is the generator's own count: it passes through no journal."""
        generator, journal = self._generator, self._journal
        lag = 0.0
        if journal is not None:
            metrics = journal.metrics()
            lag = metrics.durable_lag_seconds
            if metrics.failed and not self._journal_failed:
                self._journal_failed = f"payload journal {self.journal_name} has failed"
        return WorkerStats(
            worker=self.worker_id,
            generated_tokens=generator.generated_tokens if generator is not None else 0,
            running=generator.running if generator is not None else 0,
            waiting=generator.waiting if generator is not None else 0,
            durable_lag_seconds=lag,
            journal_failed=self._journal_failed,
        )

    async def update_weights(self, weights: WeightsRef) -> float:
        """Swap weights between two decode steps; running sequences go on. Returns the pause in seconds."""
        pause = await self._blocking(
            self._running_generator().load_weights, weights.path, weights.branch, weights.version
        )
        self._weights = (weights.branch, weights.version)
        return float(pause)

    async def abort(self, keys: Sequence[AttemptKey]) -> None:
        """End these attempts; unknown keys are ignored, and so are attempts whose seal is already written."""
        attempts = [self._attempts[key] for key in keys if key in self._attempts]
        for attempt in attempts:
            attempt.aborted = True
            if attempt.scoring is not None:
                attempt.scoring.cancel()
        if attempts:
            self._running_generator().abort([attempt.key for attempt in attempts])

    async def prune(self, keep_from: int) -> None:
        """Drop whole payload segments before ``keep_from``, but nothing that an attempt here may still refer to.

        A seal that was handed over a moment ago may not be in what ``keep_from`` was computed from: what was sealed
        since the last call stays until the next.
        """
        if self._journal is not None:
            running = [attempt.chunks[0] for attempt in self._attempts.values() if attempt.chunks]
            handed_over, self._sealed_since_prune = self._sealed_since_prune, []
            await self._blocking(self._journal.prune, min([keep_from, *running, *handed_over]))

    async def put_row(self, key: AttemptKey) -> None:
        """Put a sealed row into the data plane. KeyError if it is no longer at hand."""
        row = self._rows.get(key)
        if row is None:
            raise KeyError(key.row_key())
        self._rows.move_to_end(key)
        await self._data_plane.put(row)

    # --- an attempt -----------------------------------------------------------------------------------------------

    async def generate(self, request: AttemptRequest) -> Receipt:
        """Generate, score, seal. Raises AttemptError, AttemptAborted, or WorkerLost if the generator itself failed.

        DataPlaneLost under ``payloads: none``: the row can't be stored, nor can any other.
        """
        key = request.key
        if key in self._attempts or self._stopping:
            raise AttemptError(FAIL_INFRASTRUCTURE, f"{key.row_key()} is already running, or the worker stops")
        prompt_ids = self._prompt_ids(request.prompt)
        attempt = _Attempt(key, _int32(prompt_ids), asyncio.get_running_loop(), self._clock.now_us())
        self._attempts[key] = attempt
        self._keep_ticking()
        try:
            reason = await self._decode(attempt, request, prompt_ids)
            reward = await self._reward(attempt, request)
            return await self._seal(attempt, reward, truncated=reason == REASON_LENGTH)
        except JournalError as error:
            raise self._infrastructure(attempt, error) from error
        finally:
            if attempt.decoding:  # this task was cancelled: nobody waits for the tokens any more
                self._running_generator().abort([key])
            del self._attempts[key]
            self._ended.set()

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        try:
            prompt_ids = self._encode(prompt)
        except Exception as error:
            raise AttemptError(FAIL_DATA, f"prompt {prompt.ref.sample_id} can't be tokenized: {error}") from error
        limit = self.options.prompt_tokens_max
        if limit and len(prompt_ids) > limit:
            raise AttemptError(FAIL_DATA, f"prompt {prompt.ref.sample_id} has {len(prompt_ids)} tokens, {limit} fit")
        return prompt_ids

    async def _decode(self, attempt: _Attempt, request: AttemptRequest, prompt_ids: list[int]) -> str:
        """Run the generator over the attempt. Returns ``eos`` or ``length``."""
        prefix = request.prefix
        if prefix is not None and prefix.count:
            if len(prefix.logprobs) != len(prefix.token_ids):
                raise AttemptError(FAIL_INFRASTRUCTURE, f"prefix of {attempt.key.row_key()}: arrays of unequal lengths")
            with self._lock:
                attempt.ids += prefix.token_ids
                attempt.logprobs += prefix.logprobs
                attempt.spans += prefix.weight_spans
                self._journal_progress(attempt)
        attempt.decoding = True
        try:
            self._running_generator().submit(
                attempt.key,
                prompt_ids,
                seed=request.seed,
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                prefix_ids=_from_int32(bytes(attempt.ids)),
                on_delta=lambda ids, logprobs, branch, version: self._on_delta(attempt, ids, logprobs, branch, version),
                on_done=lambda reason: self._on_done(attempt, reason),
            )
        except Exception as error:
            attempt.decoding = False
            self._refuse_if_failed()
            raise AttemptError(FAIL_DATA, f"the generator refused {attempt.key.row_key()}: {error}") from error
        reason = await attempt.done
        if attempt.error is not None:
            raise attempt.error
        if reason == REASON_ABORTED or attempt.aborted:
            raise await self._aborted(attempt)
        if reason not in COMPLETE_REASONS:
            await self._keep_rest(attempt)
            self._refuse_if_failed()
            raise AttemptError(FAIL_INFRASTRUCTURE, f"generator: {reason}", attempt.tokens)
        return reason

    def _refuse_if_failed(self) -> None:
        """A generator that has failed generates nothing any more: the worker is to be replaced, not asked again."""
        if failure := self._running_generator().failure:
            raise WorkerLost(f"worker {self.worker_id}: its generator failed: {failure}")

    def _on_delta(self, attempt: _Attempt, ids: HasBytes, logprobs: HasBytes, branch: int, version: int) -> None:
        """New tokens; on the generator's thread. An error here ends the request."""
        with self._lock:
            before = attempt.tokens
            if before == attempt.journaled:
                attempt.since_us = self._clock.now_us()
            if not attempt.spans or attempt.spans[-1][1:] != (branch, version):
                attempt.spans.append((before, branch, version))
            attempt.ids += ids.tobytes()
            attempt.logprobs += logprobs.tobytes()
            if len(attempt.ids) != len(attempt.logprobs):
                attempt.error = AttemptError(
                    FAIL_INFRASTRUCTURE, "the generator gave arrays of unequal lengths", before
                )
                raise attempt.error
            if attempt.tokens - attempt.journaled >= self.options.progress_interval_tokens:
                try:
                    self._journal_progress(attempt)
                except JournalError as error:
                    attempt.error = self._infrastructure(attempt, error)
                    raise

    def _on_done(self, attempt: _Attempt, reason: str) -> None:
        def settle() -> None:
            attempt.decoding = False
            if not attempt.done.done():
                attempt.done.set_result(reason)

        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is attempt.loop:
            settle()
        elif not attempt.loop.is_closed():
            attempt.loop.call_soon_threadsafe(settle)

    async def _reward(self, attempt: _Attempt, request: AttemptRequest) -> float:
        token_ids = _from_int32(bytes(attempt.ids))
        attempt.scoring = asyncio.ensure_future(self._score(request.prompt, token_ids))
        try:
            return float(await attempt.scoring)
        except asyncio.CancelledError:
            if not attempt.aborted:
                raise
            raise await self._aborted(attempt) from None
        except AttemptError as error:
            raise AttemptError(error.kind, error.cause, attempt.tokens) from error
        finally:
            attempt.scoring = None

    async def _seal(self, attempt: _Attempt, reward: float, *, truncated: bool) -> Receipt:
        payload = self._payload(attempt, reward, truncated=truncated)
        if self._journal is None:
            payload = with_checksum(payload)
            row = row_of(payload)
            try:
                await self._data_plane.put(row)
            except DataPlaneLost:
                raise  # no fault of this attempt, whose budget it must not cost: every other would meet it too
            except Exception as error:
                raise AttemptError(FAIL_INFRASTRUCTURE, f"row not stored: {error}", payload.tokens) from error
            self._remember(row)
            return receipt_of(payload, "", -1)
        with self._lock:
            sealing = Unsealed(self._clock.now_us(), payload, attempt.journaled, attempt.chunks)
            offset = self._journal.append_later(sealing.record, sealing.bytes_max)
            attempt.journaled = payload.tokens
            self._sealed_since_prune.append((*attempt.chunks, offset)[0])
        await self._journal.flushed(offset)
        payload = sealing.payload
        self._remember(row_of(payload))
        return receipt_of(payload, self.journal_name, offset, attempt.chunks)

    def _payload(self, attempt: _Attempt, reward: float, *, truncated: bool) -> Payload:
        """The attempt as it is; its checksum is still to be made."""
        token_ids, logprobs = bytes(attempt.ids), bytes(attempt.logprobs)
        # A response of no tokens (nothing was asked for) still has weights that would have made it.
        spans = tuple(attempt.spans) or ((0, *self._weights),)
        return Payload(
            key=attempt.key,
            prompt_ids=attempt.prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            weight_spans=spans,
            reward=reward,
            checksum=0,
            truncated=truncated,
            metrics={"seconds": (self._clock.now_us() - attempt.started_us) / 1e6},
        )

    # --- journal --------------------------------------------------------------------------------------------------

    def _journal_progress(self, attempt: _Attempt) -> None:
        """Append the tokens that are not in the journal yet. Under the lock. Raises JournalError."""
        first = attempt.journaled
        if self._journal is None or attempt.tokens == first:
            return
        build, size = progress_later(
            self._clock.now_us(),
            attempt.key,
            first,
            bytes(attempt.ids[4 * first :]),
            bytes(attempt.logprobs[4 * first :]),
            attempt.spans,
        )
        attempt.last_offset = self._journal.append_later(build, size)
        attempt.chunks.append(attempt.last_offset)
        attempt.journaled = attempt.tokens

    async def _keep_rest(self, attempt: _Attempt) -> int:
        """Make what an unfinished attempt has generated durable, for whoever goes on. Returns the durable tokens."""
        if self._journal is None:
            return 0
        try:
            with self._lock:
                self._journal_progress(attempt)
            if attempt.last_offset >= 0:
                await self._journal.flushed(attempt.last_offset)
        except JournalError as error:
            self._journal_failed = str(error)
            log.error("%s: its last tokens could not be kept: %s", attempt.key.row_key(), error)
            return 0
        return attempt.journaled

    async def _aborted(self, attempt: _Attempt) -> AttemptAborted:
        durable = await self._keep_rest(attempt)
        return AttemptAborted(attempt.tokens, durable)

    def _infrastructure(self, attempt: _Attempt, error: JournalError) -> AttemptError:
        self._journal_failed = str(error)
        return AttemptError(FAIL_INFRASTRUCTURE, f"payload journal: {error}", attempt.tokens)

    def _keep_ticking(self) -> None:
        if self._journal is not None and (self._ticker is None or self._ticker.done()):
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        """While attempts run: journal tokens that have waited ``progress_interval_ms``, however few they are."""
        interval_us = int(self.options.progress_interval_ms * 1000)
        while self._attempts:
            await self._clock.sleep(interval_us / 4e6)
            due_us = self._clock.now_us() - interval_us
            for attempt in list(self._attempts.values()):
                with self._lock:
                    if attempt.tokens == attempt.journaled or attempt.since_us > due_us:
                        continue
                    try:
                        self._journal_progress(attempt)
                    except JournalError as error:
                        attempt.error = self._infrastructure(attempt, error)
                        self._running_generator().abort([attempt.key])

    # --- rest -----------------------------------------------------------------------------------------------------

    def _remember(self, row: Row) -> None:
        self._rows[row.key] = row
        self._rows_bytes += _row_bytes(row)
        while self._rows_bytes > self.options.row_cache_bytes_max and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._rows_bytes -= _row_bytes(oldest)

    def _running_generator(self) -> GeneratorEngine:
        assert self._generator is not None, "start() comes first"
        return self._generator

    async def _until_idle(self) -> None:
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                while self._attempts:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            log.error("attempts %s do not end", ", ".join(key.row_key() for key in self._attempts))


def _row_bytes(row: Row) -> int:
    return len(row.prompt_ids) + len(row.token_ids) + len(row.logprobs)


def _int32(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _from_int32(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist()
