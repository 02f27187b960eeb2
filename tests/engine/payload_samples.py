"""Payloads and rows for tests: deterministic, of any length."""

from __future__ import annotations

import random
import struct

from unlost.engine.protocols import Row
from unlost.replay.events import AttemptKey
from unlost.replay.payload_records import Payload, checksum

Span = tuple[int, int, int]


def int32(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def float32(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def payload(
    key: AttemptKey, tokens: int = 100, prompt_tokens: int = 7, *, seed: int = 0, spans: tuple[Span, ...] = ((0, 0, 3),)
) -> Payload:
    draw = random.Random(f"{key}/{seed}")
    prompt = int32([draw.randrange(50_000) for _ in range(prompt_tokens)])
    ids = int32([draw.randrange(50_000) for _ in range(tokens)])
    logprobs = float32([-draw.expovariate(1) for _ in range(tokens)])
    reward = draw.random()
    return Payload(
        key=key,
        prompt_ids=prompt,
        token_ids=ids,
        logprobs=logprobs,
        weight_spans=spans,
        reward=reward,
        checksum=checksum(prompt, ids, logprobs, spans, reward),
        truncated=tokens % 2 == 0,
        metrics={"seconds": 1.5},
    )


def row(key: AttemptKey, tokens: int = 100, prompt_tokens: int = 7, *, seed: int = 0) -> Row:
    made = payload(key, tokens, prompt_tokens, seed=seed)
    return Row(
        key=made.key,
        prompt_ids=made.prompt_ids,
        token_ids=made.token_ids,
        logprobs=made.logprobs,
        weight_spans=made.weight_spans,
        reward=made.reward,
        checksum=made.checksum,
        truncated=made.truncated,
    )
