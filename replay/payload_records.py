"""Payloads as records of payload journals: the tokens behind a receipt, packed, summed, and put together again.

Promise: all per-token arrays have one length, the chunks are contiguous from token 0 and add up to the recorded count,
and the CRC-32 of the whole equals the one in the seal. Anything less is ``PayloadDamaged``, never tokens.

Arrays outside of records are raw little-endian bytes: int32 token ids, float32 log-probabilities. Inside records they
are byte-shuffled (all lowest bytes first, then all second ones, ...), which zstd packs better. Slices do it at C speed;
neither numpy nor torch is needed to read a run.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec

from ..journal.errors import UnlostError
from .events import AttemptKey, PayloadRecord, ProgressRecord, Receipt, SealedRecord

Span = tuple[int, int, int]
"""``(first token, branch, version)``: tokens from there on, up to the next span, were made by these weights."""

PAYLOAD_DIRECTORY: Final = "payloads"

_RECORD_BYTES: Final = 256
"""A record's numbers and lengths; generous."""
_SPAN_BYTES: Final = 28
_METRIC_BYTES: Final = 14
_CHECKSUM_HEAD: Final = struct.Struct("<4sIIId")
_CHECKSUM_SPAN: Final = struct.Struct("<QQQ")


class PayloadDamaged(UnlostError):
    """The payload that a receipt names can't be used: it is missing, incomplete, wrong or another attempt's.

    ``journal`` and ``offset`` name the record, ``reason`` what is wrong. The group's tokens must be generated again.
    """

    def __init__(self, journal: str, offset: int, reason: str) -> None:
        self.journal = journal
        self.offset = offset
        self.reason = reason
        super().__init__(
            f"{PAYLOAD_DIRECTORY}/{journal}, record {offset}: {reason}. The attempt has to be generated again; "
            f"`unlost verify` shows what else this journal lost."
        )


class PayloadMissing(PayloadDamaged):
    """There is no such journal or record any more (a lost disk, or a receipt made under ``payloads: none``)."""


class Payload(msgspec.Struct, frozen=True):
    """A sealed attempt with all its tokens. ``token_ids`` and ``logprobs`` have ``4 * tokens`` bytes each."""

    key: AttemptKey
    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    weight_spans: tuple[Span, ...]
    reward: float
    checksum: int
    truncated: bool
    metrics: dict[str, float]

    @property
    def tokens(self) -> int:
        """Generated tokens, prompt not included."""
        return len(self.token_ids) // 4


def shuffle(data: bytes) -> bytes:
    """Regroup 4-byte items by byte position. ``len(data)`` must be a multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no array of 4-byte items")
    return b"".join((data[0::4], data[1::4], data[2::4], data[3::4]))


def unshuffle(data: bytes) -> bytes:
    """Inverse of ``shuffle``."""
    quarter, rest = divmod(len(data), 4)
    if rest:
        raise ValueError(f"{len(data)} bytes are no array of 4-byte items")
    out = bytearray(len(data))
    for lane in range(4):
        out[lane::4] = data[lane * quarter : (lane + 1) * quarter]
    return bytes(out)


def checksum(prompt_ids: bytes, token_ids: bytes, logprobs: bytes, weight_spans: Sequence[Span], reward: float) -> int:
    """CRC-32 over the canonical bytes of a payload: counts, reward, spans, then the raw arrays.

    The counts come first, so that no shift of a boundary between two arrays gives the same bytes.
    """
    crc = zlib.crc32(
        _CHECKSUM_HEAD.pack(b"ulp1", len(prompt_ids), len(token_ids), len(weight_spans), reward)
        + b"".join(_CHECKSUM_SPAN.pack(*span) for span in weight_spans)
    )
    for part in (prompt_ids, token_ids, logprobs):
        crc = zlib.crc32(part, crc)
    return crc


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Drop spans that go on with the weights of the one before."""
    merged: list[Span] = []
    for span in spans:
        if not merged or merged[-1][1:] != span[1:]:
            merged.append(span)
    return tuple(merged)


def clip_spans(spans: Sequence[Span], first: int, stop: int) -> tuple[Span, ...]:
    """The spans of tokens ``first .. stop - 1``; the first of them begins at ``first``. Empty for no tokens."""
    if first >= stop:
        return ()
    clipped: list[Span] = []
    for start, branch, version in spans:
        if start >= stop:
            break
        if start <= first:
            clipped = [(first, branch, version)]
        else:
            clipped.append((start, branch, version))
    return tuple(clipped)


def progress_record(
    t: int, key: AttemptKey, first: int, token_ids: bytes, logprobs: bytes, weight_spans: Sequence[Span]
) -> ProgressRecord:
    """A chunk of raw arrays as a record. ``weight_spans`` are the attempt's; the record gets those of the chunk."""
    count = _token_count(token_ids, logprobs)
    return ProgressRecord(
        t=t,
        key=key,
        first=first,
        count=count,
        token_ids=shuffle(token_ids),
        logprobs=shuffle(logprobs),
        weight_spans=clip_spans(weight_spans, first, first + count),
    )


def progress_later(
    t: int, key: AttemptKey, first: int, token_ids: bytes, logprobs: bytes, weight_spans: Sequence[Span]
) -> tuple[Callable[[], ProgressRecord], int]:
    """``progress_record`` of these arguments, for ``JournalWriter.append_later``: what builds it, and its size."""
    _token_count(token_ids, logprobs)
    spans = clip_spans(weight_spans, first, first + len(token_ids) // 4)
    size = len(token_ids) + len(logprobs) + _RECORD_BYTES + _SPAN_BYTES * len(spans)
    return partial(progress_record, t, key, first, token_ids, logprobs, spans), size


def sealed_record(t: int, payload: Payload, first: int, chunks: Sequence[int]) -> SealedRecord:
    """The end of an attempt: tokens from ``first`` on, and the results of the whole.

    ``chunks``: offsets of the progress records that hold the tokens before ``first``. ``weight_spans`` of a sealed
    record are those of the whole attempt, so that an adopted seal needs nothing else.
    """
    total = _token_count(payload.token_ids, payload.logprobs)
    return SealedRecord(
        t=t,
        key=payload.key,
        first=first,
        count=total - first,
        token_ids=shuffle(payload.token_ids[4 * first :]),
        logprobs=shuffle(payload.logprobs[4 * first :]),
        weight_spans=payload.weight_spans,
        total=total,
        reward=payload.reward,
        checksum=payload.checksum,
        truncated=payload.truncated,
        prompt_ids=shuffle(payload.prompt_ids),
        prompt_count=len(payload.prompt_ids) // 4,
        chunks=tuple(chunks),
        metrics=payload.metrics,
    )


class Unsealed:
    """A finished attempt whose checksum and records the journal's flush thread makes, off the generating thread.

    ``record`` is for ``JournalWriter.append_later``; once that offset is durable, ``payload`` is the sealed attempt.
    ``payload`` as given has no checksum yet (any number). Arguments as for ``sealed_record``; ValueError, at once, if
    they can't be a record.
    """

    __slots__ = ("_chunks", "_first", "_t", "payload")

    def __init__(self, t: int, payload: Payload, first: int, chunks: Sequence[int]) -> None:
        total = _token_count(payload.token_ids, payload.logprobs)
        if not 0 <= first <= total:
            raise ValueError(f"the rest from token {first} on of {total} tokens")
        self._t = t
        self._first = first
        self._chunks = tuple(chunks)
        self.payload = payload

    @property
    def bytes_max(self) -> int:
        """What it holds until then, and what the record takes in a frame, at most."""
        made, chunks = self.payload, 9 * len(self._chunks)
        arrays = len(made.prompt_ids) + len(made.token_ids) + len(made.logprobs)
        metrics = _METRIC_BYTES * len(made.metrics) + 4 * sum(map(len, made.metrics))
        return arrays + _RECORD_BYTES + _SPAN_BYTES * len(made.weight_spans) + chunks + metrics

    def record(self) -> SealedRecord:
        """Sum up, shuffle, build."""
        self.payload = with_checksum(self.payload)
        return sealed_record(self._t, self.payload, self._first, self._chunks)


def with_checksum(payload: Payload) -> Payload:
    """The payload with the checksum of its content."""
    made = checksum(payload.prompt_ids, payload.token_ids, payload.logprobs, payload.weight_spans, payload.reward)
    return msgspec.structs.replace(payload, checksum=made)


def receipt_of(payload: Payload, journal: str, offset: int, chunks: Sequence[int] = ()) -> Receipt:
    """The receipt for a payload whose sealed record is at ``offset`` of ``journal`` ("" and -1: not journaled)."""
    versions = [version for _, _, version in payload.weight_spans] or [0]
    return Receipt(
        reward=payload.reward,
        tokens=payload.tokens,
        version_min=min(versions),
        version_max=max(versions),
        journal=journal,
        offset=offset,
        checksum=payload.checksum,
        weight_spans=payload.weight_spans,
        truncated=payload.truncated,
        prompt_tokens=len(payload.prompt_ids) // 4,
        first_offset=chunks[0] if chunks else offset,
    )


def assemble(journal: str, offset: int, sealed: SealedRecord, chunks: Sequence[ProgressRecord]) -> Payload:
    """Put a sealed attempt together. Raises PayloadDamaged unless every count and the checksum agree."""

    def damaged(reason: str) -> PayloadDamaged:
        return PayloadDamaged(journal, offset, reason)

    ids: list[bytes] = []
    logprobs: list[bytes] = []
    at = 0
    parts: list[PayloadRecord] = [*chunks, sealed]
    for record in parts:
        if record.key != sealed.key:
            raise damaged(f"chunk at token {at} belongs to {record.key.row_key()}, not to {sealed.key.row_key()}")
        if record.first != at:
            raise damaged(f"tokens {at} .. {record.first} are missing or twice")
        if not len(record.token_ids) == len(record.logprobs) == 4 * record.count:
            raise damaged(f"arrays of the chunk at token {at} have unequal lengths")
        ids.append(unshuffle(record.token_ids))
        logprobs.append(unshuffle(record.logprobs))
        at += record.count
    if at != sealed.total:
        raise damaged(f"the chunks hold {at} tokens, the seal says {sealed.total}")
    if len(sealed.prompt_ids) != 4 * sealed.prompt_count:
        raise damaged(f"the prompt has {len(sealed.prompt_ids)} bytes for {sealed.prompt_count} tokens")
    payload = Payload(
        key=sealed.key,
        prompt_ids=unshuffle(sealed.prompt_ids),
        token_ids=b"".join(ids),
        logprobs=b"".join(logprobs),
        weight_spans=sealed.weight_spans,
        reward=sealed.reward,
        checksum=sealed.checksum,
        truncated=sealed.truncated,
        metrics=sealed.metrics,
    )
    found = checksum(payload.prompt_ids, payload.token_ids, payload.logprobs, payload.weight_spans, payload.reward)
    if found != sealed.checksum:
        raise damaged(f"its tokens have CRC-32 {found:08x}, the seal says {sealed.checksum:08x}")
    return payload


def _token_count(token_ids: bytes, logprobs: bytes) -> int:
    if len(token_ids) != len(logprobs) or len(token_ids) % 4:
        raise ValueError(f"{len(token_ids)} bytes of token ids, {len(logprobs)} of log-probabilities")
    return len(token_ids) // 4
