"""Payloads: the tokens behind a receipt, as records of payload journals, and the store that reads them back.

Promise: what is handed out was checked. A reference is followed only to a record that names the same attempt
(protocol rule 6), all per-token arrays have one length, the chunks are contiguous from token 0 and add up to the
recorded count, and the CRC-32 of the whole equals the one in the receipt. Anything less is ``PayloadDamaged``, never
tokens. A transient I/O error is neither damage nor loss: it is raised as it is.

Arrays outside of records are raw little-endian bytes: int32 token ids, float32 log-probabilities. Inside records they
are byte-shuffled (all lowest bytes first, then all second ones, ...), which zstd packs better. Slices do it at C speed;
neither numpy nor torch is needed to read a run.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from ..journal.errors import JournalDamaged, JournalMissing, UnlostError
from ..journal.reader import JournalReader
from ..journal.storage import Storage
from .events import AttemptKey, PayloadRecord, ProgressRecord, Receipt, SealedRecord

log = logging.getLogger(__name__)

Span = tuple[int, int, int]
"""``(first token, branch, version)``: tokens from there on, up to the next span, were made by these weights."""

PAYLOAD_DIRECTORY: Final = "payloads"
READERS_OPEN_MAX: Final = 64

_RECORD_BYTES: Final = 256
"""A record's numbers and lengths, with metrics; generous."""
_SPAN_BYTES: Final = 28
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


class AttemptTail(msgspec.Struct, frozen=True):
    """What the payload journals hold of an attempt that the event journal saw no end of.

    ``sealed``: the receipt to adopt, already verified, or None. ``prefix_tokens``: length of the longest run of
    tokens from 0 in ``chunks`` (record offsets, in token order); read them with ``PayloadStore.load_prefix``.
    """

    key: AttemptKey
    journal: str
    prefix_tokens: int
    chunks: tuple[int, ...]
    sealed: Receipt | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class PayloadLoss(msgspec.Struct, frozen=True):
    """A payload journal, or a record of one, that could not be used. ``offset`` -1: the journal as a whole."""

    journal: str
    offset: int
    reason: str
    missing: bool = False


class Tails(msgspec.Struct, frozen=True):
    """Every attempt asked for is in ``attempts``, with zero tokens if nothing of it was found."""

    attempts: dict[AttemptKey, AttemptTail]
    losses: tuple[PayloadLoss, ...]
    records_read: int


# --- codec --------------------------------------------------------------------------------------------------------


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
    ``payload`` as given has no checksum yet (any number). Arguments as for ``sealed_record``.
    """

    __slots__ = ("_chunks", "_first", "_t", "payload")

    def __init__(self, t: int, payload: Payload, first: int, chunks: Sequence[int]) -> None:
        self._t = t
        self._first = first
        self._chunks = tuple(chunks)
        self.payload = payload

    @property
    def bytes_max(self) -> int:
        """What the record takes in a frame, at most."""
        made, chunks = self.payload, 9 * len(self._chunks)
        arrays = len(made.prompt_ids) + len(made.token_ids) + len(made.logprobs) - 8 * self._first
        return arrays + _RECORD_BYTES + _SPAN_BYTES * len(made.weight_spans) + chunks

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


# --- store --------------------------------------------------------------------------------------------------------


class _Found:
    """What a scan has seen of one attempt: offsets and counts, no tokens."""

    __slots__ = ("chunks", "count", "sealed")

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.count = 0
        self.sealed = -1


class PayloadStore:
    """Reads the payload journals of a run; never writes. Calls block on I/O and are safe from several threads.

    ``root`` is the run's ``payloads`` folder. Readers are opened at first use, and the least recently used ones let go.
    """

    def __init__(self, root: str | os.PathLike[str], storage: Storage | None = None) -> None:
        self._root = os.fspath(root)
        self._storage = storage
        self._readers: OrderedDict[str, JournalReader[PayloadRecord]] = OrderedDict()
        self._lock = threading.RLock()

    def load(self, receipt: Receipt, key: AttemptKey) -> Payload:
        """The payload of attempt ``key`` (protocol rule 6). Raises PayloadDamaged, or OSError if reading failed."""
        if not receipt.journal:
            raise PayloadMissing("-", receipt.offset, f"{key.row_key()} has no journaled payload (payloads: none)")
        with self._lock:
            payload = self._sealed(receipt.journal, receipt.offset, key)
        if (payload.checksum, payload.tokens) != (receipt.checksum, receipt.tokens):
            raise PayloadDamaged(
                receipt.journal,
                receipt.offset,
                f"the receipt of {key.row_key()} says {receipt.tokens} tokens, CRC-32 {receipt.checksum:08x}; found "
                f"{payload.tokens}, {payload.checksum:08x}",
            )
        return payload

    def load_prefix(self, tail: AttemptTail) -> tuple[bytes, bytes, tuple[Span, ...]]:
        """Token ids, log-probabilities (raw) and weight spans of a tail's prefix. Raises PayloadDamaged or OSError."""
        with self._lock:
            records = self._records(tail.journal, tail.chunks)
        ids: list[bytes] = []
        logprobs: list[bytes] = []
        spans: list[Span] = []
        at = 0
        for offset, record in zip(tail.chunks, records, strict=True):
            if not isinstance(record, ProgressRecord) or record.key != tail.key or record.first != at:
                raise PayloadDamaged(tail.journal, offset, f"not the chunk at token {at} of {tail.key.row_key()}")
            if not len(record.token_ids) == len(record.logprobs) == 4 * record.count:
                raise PayloadDamaged(tail.journal, offset, f"arrays of the chunk at token {at} have unequal lengths")
            ids.append(unshuffle(record.token_ids))
            logprobs.append(unshuffle(record.logprobs))
            spans.extend(record.weight_spans)
            at += record.count
        if at != tail.prefix_tokens:
            raise PayloadDamaged(tail.journal, -1, f"{at} tokens instead of {tail.prefix_tokens}")
        return b"".join(ids), b"".join(logprobs), merge_spans(spans)

    def sealed_tails(self, open_attempts: Mapping[AttemptKey, str]) -> Tails:
        """All payload records of ``open_attempts`` (attempt -> payload journal), for a restore.

        Every record of these journals is looked at, not only those after the last referenced one (protocol rule 9).
        Name a sibling's latest attempt even if an interrupted restore has already abandoned it (rule 10). What is
        returned has been synced by this process (rule 2). A journal that is missing or damaged is named in
        ``losses``, and what could be read of it is used. Raises OSError if reading failed for another reason.
        """
        wanted: dict[str, dict[AttemptKey, _Found]] = {}
        for key, journal in open_attempts.items():
            wanted.setdefault(journal, {})[key] = _Found()
        losses: list[PayloadLoss] = []
        attempts: dict[AttemptKey, AttemptTail] = {}
        records_read = 0
        with self._lock:
            for journal, found in wanted.items():
                if journal:
                    records_read += self._scan(journal, found, losses)
                for key, state in found.items():
                    attempts[key] = self._tail(journal, key, state, losses)
        for loss in losses:
            log.warning("payload journal %s, record %d: %s", loss.journal, loss.offset, loss.reason)
        return Tails(attempts=attempts, losses=tuple(losses), records_read=records_read)

    def forget(self, journal: str | None = None) -> None:
        """Let go of a journal's open reader (of all, by default), so that the next call sees the files anew."""
        with self._lock:
            if journal is None:
                self._readers.clear()
            else:
                self._readers.pop(journal, None)

    def _scan(self, journal: str, found: dict[AttemptKey, _Found], losses: list[PayloadLoss]) -> int:
        """Index the records of the wanted attempts, then sync what was read. Returns the records seen."""
        self.forget(journal)
        seen = 0
        try:
            reader = self._reader(journal)
            for offset, record in reader.events(reader.first_offset):
                seen += 1
                state = found.get(record.key)
                if state is None:
                    continue
                if isinstance(record, SealedRecord):
                    state.sealed = offset
                elif record.first == state.count:
                    state.chunks.append(offset)
                    state.count += record.count
        except JournalMissing as error:
            losses.append(PayloadLoss(journal, -1, str(error), missing=True))
            return seen
        except JournalDamaged as error:
            losses.append(PayloadLoss(journal, error.offset, error.reason))
        reader.sync_read()
        return seen

    def _tail(self, journal: str, key: AttemptKey, state: _Found, losses: list[PayloadLoss]) -> AttemptTail:
        receipt = None
        metrics: dict[str, float] = {}
        if state.sealed >= 0:
            try:
                payload = self._sealed(journal, state.sealed, key)
            except PayloadDamaged as error:
                losses.append(PayloadLoss(journal, state.sealed, error.reason))
            else:
                receipt = receipt_of(payload, journal, state.sealed, state.chunks)
                metrics = payload.metrics
        return AttemptTail(
            key=key,
            journal=journal,
            prefix_tokens=state.count,
            chunks=tuple(state.chunks),
            sealed=receipt,
            metrics=metrics,
        )

    def _sealed(self, journal: str, offset: int, key: AttemptKey) -> Payload:
        (record,) = self._records(journal, (offset,))
        if not isinstance(record, SealedRecord):
            raise PayloadDamaged(
                journal, offset, f"not the seal of {key.row_key()} but a chunk of {record.key.row_key()}"
            )
        if record.key != key:
            raise PayloadDamaged(journal, offset, f"the seal of {record.key.row_key()}, not of {key.row_key()}")
        chunks: list[ProgressRecord] = []
        for at, chunk in zip(record.chunks, self._records(journal, record.chunks), strict=True):
            if not isinstance(chunk, ProgressRecord):
                raise PayloadDamaged(journal, at, f"a seal where a chunk of {key.row_key()} should be")
            chunks.append(chunk)
        return assemble(journal, offset, record, chunks)

    def _records(self, journal: str, offsets: Sequence[int]) -> list[PayloadRecord]:
        """Records by offset, also those that were written after the reader was opened."""
        if not offsets:
            return []
        try:
            by_offset = self._reader(journal).get_many(offsets)
        except JournalMissing as error:
            raise PayloadMissing(journal, max(offsets), str(error)) from error
        except JournalDamaged as error:
            raise PayloadDamaged(journal, error.offset, str(error)) from error
        return [by_offset[offset] for offset in offsets]

    def _reader(self, journal: str) -> JournalReader[PayloadRecord]:
        reader = self._readers.get(journal)
        if reader is None:
            reader = JournalReader(os.path.join(self._root, journal), PayloadRecord, storage=self._storage)
            self._readers[journal] = reader
            while len(self._readers) > READERS_OPEN_MAX:
                self._readers.popitem(last=False)
        self._readers.move_to_end(journal)
        return reader
