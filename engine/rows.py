"""Rows of the data plane: from journaled payloads, to what TransferQueue stores, and back; their keys and checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..replay.events import AttemptKey
from ..replay.payload_records import Payload, checksum
from .protocols import Row

PARTITION_PREFIX: Final = "rollouts-i"


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


def partition_of(key: str) -> str:
    """The partition of a row: a function of its key alone (``i3.g5.s0.a1`` -> ``rollouts-i00003``)."""
    head = key.partition(".")[0]
    if not (head.startswith("i") and head[1:].isdigit()):
        raise ValueError(f"{key!r} is no row key (expected i<incarnation>.g<group>.s<sibling>.a<attempt>)")
    return f"{PARTITION_PREFIX}{int(head[1:]):05d}"


def parse_row_key(key: str) -> AttemptKey:
    """Inverse of ``AttemptKey.row_key``. Raises ValueError."""
    parts = key.split(".")
    if [part[:1] for part in parts] != ["i", "g", "s", "a"] or not all(part[1:].isdigit() for part in parts):
        raise ValueError(f"{key!r} is no row key (expected i<incarnation>.g<group>.s<sibling>.a<attempt>)")
    return AttemptKey(*(int(part[1:]) for part in parts))


class _AboutRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a row is, besides its tensors and its checksum.

    One packed value: the list of all tags is unpacked on the controller's loop, and costs a tenth of one that is made
    of dicts and lists (24,000 rows: 6 ms instead of 56).
    """

    key: str
    reward: float
    weight_spans: tuple[tuple[int, int, int], ...]
    truncated: bool
    prompt_tokens: int


_ABOUT_ENCODER: Final = msgspec.msgpack.Encoder()
_ABOUT_DECODER: Final = msgspec.msgpack.Decoder(_AboutRow)


def encode_row(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by field, and the tag. Raises ValueError if the arrays have unequal lengths."""
    import numpy as np
    import torch

    if len(row.token_ids) != len(row.logprobs):
        raise ValueError(f"{row.key.row_key()}: {len(row.token_ids)} bytes of ids, {len(row.logprobs)} of logprobs")
    ids = np.frombuffer(row.prompt_ids + row.token_ids, dtype="<i4").copy()
    logprobs = np.frombuffer(row.logprobs, dtype="<f4").copy()
    about = _AboutRow(row.key.row_key(), row.reward, row.weight_spans, row.truncated, len(row.prompt_ids) // 4)
    tag = {"checksum": row.checksum, "row": _ABOUT_ENCODER.encode(about)}
    return {"input_ids": torch.from_numpy(ids), "logprobs": torch.from_numpy(logprobs)}, tag


def decode_row(tag: Mapping[str, Any], input_ids: Any, logprobs: Any) -> Row:
    """Inverse of ``encode_row``. The checksum is not looked at here."""
    about = _ABOUT_DECODER.decode(tag["row"])
    ids = input_ids.contiguous().numpy().tobytes()
    split = 4 * about.prompt_tokens
    return Row(
        key=parse_row_key(about.key),
        prompt_ids=ids[:split],
        token_ids=ids[split:],
        logprobs=logprobs.contiguous().numpy().tobytes(),
        weight_spans=about.weight_spans,
        reward=about.reward,
        checksum=int(tag["checksum"]),
        truncated=about.truncated,
    )


def checksum_of(row: Row) -> int:
    """CRC-32 of the row's content, to compare with ``row.checksum``."""
    return checksum(row.prompt_ids, row.token_ids, row.logprobs, row.weight_spans, row.reward)
