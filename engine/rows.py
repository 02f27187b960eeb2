"""From journaled payloads to rows of the data plane."""

from __future__ import annotations

from ..replay.payloads import Payload
from .protocols import Row


def row_of(payload: Payload) -> Row:
    """A journaled payload as a row of the data plane."""
    return Row(
        key=payload.key,
        prompt_ids=payload.prompt_ids,
        token_ids=payload.token_ids,
        logprobs=payload.logprobs,
        weight_spans=payload.weight_spans,
        reward=payload.reward,
        checksum=payload.checksum,
        truncated=payload.truncated,
    )
