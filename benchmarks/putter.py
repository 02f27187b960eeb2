"""A worker's side of the data plane, in a Ray actor: makes payloads, journals them, puts rows, times single puts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from unlost.engine.data_plane import AttachedDataPlane
from unlost.engine.rows import row_of
from unlost.journal import JournalOptions, JournalWriter
from unlost.replay.events import AttemptKey, PayloadRecord
from unlost.replay.payload_records import Payload, checksum, receipt_of, sealed_record

PUTS_AT_ONCE = 16
PROBE_EVERY_S = 0.05
PROMPT_TOKENS = 64
SPANS = ((0, 0, 0),)


class Putter:
    """Rows of ``tokens`` generated tokens each. One event loop; start it with ``attach``."""

    def __init__(self, payload_root: str, journal: str, tokens: int) -> None:
        self._root, self._journal_name, self._tokens = payload_root, journal, tokens
        self._rng = np.random.default_rng(5)
        self._plane = AttachedDataPlane()
        self._probing: asyncio.Task[None] | None = None
        self._probes: list[tuple[float, float]] = []
        self._probe_group = 1_000_000

    async def attach(self) -> None:
        """Join the service and open the payload journal."""
        await self._plane.start()
        self._journal = JournalWriter.open(
            os.path.join(self._root, self._journal_name), PayloadRecord, journal_id="bench",
            options=JournalOptions(backlog_max_bytes=512 << 20),
        )  # fmt: skip

    async def reattach(self) -> None:
        """Join the service again after its restart."""
        await self._plane.stop()
        await self._plane.start()

    def _payload(self, key: AttemptKey) -> Payload:
        ids = self._rng.integers(0, 152_000, self._tokens, dtype=np.int32).tobytes()
        logprobs = (-self._rng.standard_exponential(self._tokens, dtype=np.float32)).tobytes()
        prompt = self._rng.integers(0, 152_000, PROMPT_TOKENS, dtype=np.int32).tobytes()
        return Payload(key, prompt, ids, logprobs, SPANS, 0.5, checksum(prompt, ids, logprobs, SPANS, 0.5), False, {})

    async def make(self, keys: Sequence[tuple[int, int, int, int]]) -> list[Any]:
        """Journal and put these attempts; their receipts as tuples, once durable and put."""
        limit = asyncio.Semaphore(PUTS_AT_ONCE)
        receipts = []

        async def put(payload: Payload) -> None:
            async with limit:
                await self._plane.put(row_of(payload))

        puts = []
        offset = -1
        for key in keys:
            payload = self._payload(AttemptKey(*key))
            offset = self._journal.append(sealed_record(0, payload, 0, ()))
            receipts.append(receipt_of(payload, self._journal_name, offset))
            puts.append(put(payload))
        await asyncio.gather(self._journal.flushed(offset), *puts)
        return receipts

    async def probe(self, on: bool) -> list[tuple[float, float]]:
        """Begin to put a row every 50 ms, or end; then the puts' (wall clock time, seconds)."""
        if on:
            self._probes = []
            self._probing = asyncio.get_running_loop().create_task(self._probe())
            return []
        assert self._probing is not None
        self._probing.cancel()
        await asyncio.gather(self._probing, return_exceptions=True)
        return self._probes

    async def _probe(self) -> None:
        while True:
            self._probe_group += 1
            row = row_of(self._payload(AttemptKey(1, self._probe_group, 0, 0)))
            wall, began = time.time(), time.perf_counter()
            await self._plane.put(row)
            self._probes.append((wall, time.perf_counter() - began))
            await asyncio.sleep(PROBE_EVERY_S)

    async def close(self) -> None:
        """Leave the service, close the journal."""
        self._journal.close()
        await self._plane.stop()
