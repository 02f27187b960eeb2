"""The store that reads payloads back: from a receipt, or from what a dead worker left behind.

Promise: what is handed out was checked. A reference is followed only to a record that names the same attempt
(protocol rule 6), and whole (see ``payload_records``). A transient I/O error is neither damage nor loss: it is raised
as it is.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ..journal.errors import JournalDamaged, JournalMissing
from ..journal.reader import JournalReader
from ..journal.storage import Storage
from .events import AttemptKey, PayloadRecord, ProgressRecord, Receipt, SealedRecord
from .payload_records import (
    Payload,
    PayloadDamaged,
    PayloadMissing,
    Span,
    assemble,
    merge_spans,
    receipt_of,
    unshuffle,
)

log = logging.getLogger(__name__)

READERS_OPEN_MAX: Final = 64


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
        try:
            reader.sync_read()
        except JournalMissing:  # its writer, which only seemed to be dead, has begun the segment anew: once more
            return seen + self._scan(journal, found, losses)
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
