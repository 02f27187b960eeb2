"""Payload records and the store that reads them back."""

from __future__ import annotations

import binascii
import errno
import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.payload_samples import payload
from tests.sim_storage import Fault, SimFile, SimStorage
from unlost.journal import JournalWriter
from unlost.replay.events import AttemptKey, PayloadRecord, Receipt
from unlost.replay.payload_records import (
    Payload,
    PayloadDamaged,
    PayloadMissing,
    Unsealed,
    checksum,
    clip_spans,
    merge_spans,
    progress_record,
    receipt_of,
    sealed_record,
    shuffle,
    unshuffle,
)
from unlost.replay.payloads import PayloadStore

ROOT = "/run/payloads"
NAME = "i00001-w00001"
KEY = AttemptKey(1, 5, 2, 0)


def write(
    storage: SimStorage, payload: Payload, cuts: Sequence[int] = (), *, name: str = NAME, seal: bool = True
) -> Receipt | None:
    """Journal a payload as a worker does: chunks up to each cut, then the seal."""
    with JournalWriter.open(
        f"{ROOT}/{name}", PayloadRecord, journal_id=name, storage=storage, threaded=False
    ) as journal:
        return append(journal, payload, cuts, name=name, seal=seal)


def append(
    journal: JournalWriter[Any], payload: Payload, cuts: Sequence[int] = (), *, name: str = NAME, seal: bool = True
) -> Receipt | None:
    chunks, first = [], 0
    for stop in cuts:
        part = slice(4 * first, 4 * stop)
        record = progress_record(
            1, payload.key, first, payload.token_ids[part], payload.logprobs[part], payload.weight_spans
        )
        chunks.append(journal.append(record))
        first = stop
    receipt = None
    if seal:
        receipt = receipt_of(payload, name, journal.append(sealed_record(2, payload, first, chunks)))
    journal.pump()
    return receipt


# --- codec


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_shuffle_is_what_numpy_makes_of_it_and_comes_back(values: list[int]) -> None:
    """Byte shuffling equals a transposition of the byte matrix, and its inverse restores every value."""
    data = np.array(values, dtype="<i4").tobytes()
    expected = np.frombuffer(data, dtype=np.uint8).reshape(-1, 4).T.tobytes()
    assert shuffle(data) == expected
    assert unshuffle(expected) == data


def test_shuffle_refuses_half_an_item() -> None:
    """Bytes that are no whole 4-byte items are an error, not a silent cut."""
    for function in (shuffle, unshuffle):
        with pytest.raises(ValueError, match="4-byte"):
            function(b"12345")


def test_checksum_is_pinned() -> None:
    """The checksum is part of the format: CRC-32 over these very bytes, written out by hand."""
    head = b"ulp1" + b"\4\0\0\0" + b"\4\0\0\0" + b"\1\0\0\0" + b"\0\0\0\0\0\0\xe0\x3f"
    span = b"\0" * 8 + b"\1" + b"\0" * 7 + b"\2" + b"\0" * 7
    expected = binascii.crc32(head + span + b"\1\0\0\0" + b"\2\0\0\0" + b"\0\0\0\0")
    assert checksum(b"\1\0\0\0", b"\2\0\0\0", b"\0\0\0\0", ((0, 1, 2),), 0.5) == expected == 0xE5659A9E


def test_checksum_sees_every_part() -> None:
    """Changing any part, or moving a boundary between two arrays, changes the checksum."""
    base = (b"\1\0\0\0", b"\2\0\0\0", b"\3\0\0\0", ((0, 1, 2),), 0.5)
    others = [
        (b"\1\0\0\1", *base[1:]),
        (base[0], b"\2\0\0\1", *base[2:]),
        (*base[:2], b"\3\0\0\1", *base[3:]),
        (*base[:3], ((0, 1, 3),), 0.5),
        (*base[:3], ((0, 1, 2), (1, 1, 3)), 0.5),
        (*base[:4], 0.25),
        (b"\1\0\0\0\2\0\0\0", b"", *base[2:]),
        (b"", b"\1\0\0\0\2\0\0\0", *base[2:]),
    ]
    assert len({checksum(*parts) for parts in [base, *others]}) == 1 + len(others)


def test_spans_of_a_chunk_begin_at_its_first_token() -> None:
    """Cutting spans keeps, for every token of the chunk, the weights that made it."""
    spans = ((0, 0, 1), (10, 0, 2), (20, 1, 1))
    assert clip_spans(spans, 0, 5) == ((0, 0, 1),)
    assert clip_spans(spans, 5, 15) == ((5, 0, 1), (10, 0, 2))
    assert clip_spans(spans, 10, 25) == ((10, 0, 2), (20, 1, 1))
    assert clip_spans(spans, 7, 7) == ()
    assert merge_spans([(0, 0, 1), (5, 0, 1), (10, 0, 2)]) == ((0, 0, 1), (10, 0, 2))


# --- store


@pytest.mark.parametrize("cuts", [(), (64,), (64, 100), (1, 2, 3, 99)])
def test_a_sealed_payload_comes_back_whole(cuts: tuple[int, ...]) -> None:
    """However the tokens were cut into chunks, the store gives back the payload bit by bit."""
    storage, expected = SimStorage(), payload(KEY, 100, spans=((0, 0, 3), (70, 0, 4)))
    receipt = write(storage, expected, cuts)
    assert receipt is not None
    assert PayloadStore(ROOT, storage).load(receipt, KEY) == expected
    assert (receipt.tokens, receipt.version_min, receipt.version_max, receipt.prompt_tokens) == (100, 3, 4, 7)


@pytest.mark.parametrize(("tokens", "prompt"), [(0, 0), (0, 5), (1, 0), (1, 1)])
def test_empty_arrays_are_payloads_too(tokens: int, prompt: int) -> None:
    """No tokens, or no prompt, is no damage."""
    storage, expected = SimStorage(), payload(KEY, tokens, prompt)
    receipt = write(storage, expected)
    assert receipt is not None
    assert PayloadStore(ROOT, storage).load(receipt, KEY) == expected


@pytest.mark.parametrize(
    "other", [AttemptKey(2, 5, 2, 0), AttemptKey(1, 6, 2, 0), AttemptKey(1, 5, 3, 0), AttemptKey(1, 5, 2, 1)]
)
def test_a_reference_to_another_attempts_record_is_refused(other: AttemptKey) -> None:
    """Protocol rule 6: incarnation, group, sibling and attempt of the record must all be the receipt's."""
    storage = SimStorage()
    receipt = write(storage, payload(KEY))
    assert receipt is not None
    with pytest.raises(PayloadDamaged, match=r"the seal of i1\.g5\.s2\.a0"):
        PayloadStore(ROOT, storage).load(receipt, other)


def test_a_reference_to_a_chunk_is_refused() -> None:
    """An offset that holds a progress record of the very attempt is still no seal."""
    storage = SimStorage()
    receipt = write(storage, payload(KEY), (64,))
    assert receipt is not None
    with pytest.raises(PayloadDamaged, match="not the seal"):
        PayloadStore(ROOT, storage).load(msgspec.structs.replace(receipt, offset=0), KEY)


def test_a_receipt_with_another_checksum_or_count_is_refused() -> None:
    """The receipt in the event journal must agree with the payload it names."""
    storage = SimStorage()
    receipt = write(storage, payload(KEY))
    assert receipt is not None
    store = PayloadStore(ROOT, storage)
    for wrong in ({"checksum": receipt.checksum ^ 1}, {"tokens": 99}):
        with pytest.raises(PayloadDamaged, match="the receipt"):
            store.load(msgspec.structs.replace(receipt, **wrong), KEY)


OTHER = AttemptKey(1, 5, 2, 1)
"""A later attempt at the same sibling: its chunks look alike, and are not KEY's."""


def broken_seals() -> list[tuple[str, dict[str, Any]]]:
    good = sealed_record(2, payload(KEY, 100), 64, [1])
    return [
        ("the seal says 99", {"total": 99}),
        ("are missing or twice", {"first": 65}),
        ("unequal lengths", {"logprobs": good.logprobs[:-4]}),
        ("unequal lengths", {"count": good.count - 1}),
        ("are missing or twice", {"chunks": ()}),
        ("are missing or twice", {"chunks": (1, 1)}),
        ("a seal where a chunk", {"chunks": (2,)}),
        ("belongs to", {"chunks": (0,)}),
        ("CRC-32", {"checksum": good.checksum ^ 1}),
        ("CRC-32", {"token_ids": bytes([good.token_ids[0] ^ 1]) + good.token_ids[1:]}),
        ("CRC-32", {"logprobs": bytes([good.logprobs[0] ^ 1]) + good.logprobs[1:]}),
        ("the prompt has", {"prompt_count": 8}),
        ("CRC-32", {"weight_spans": ((0, 0, 4),)}),
        ("CRC-32", {"reward": 9.0}),
        ("no event 17", {"chunks": (17,)}),
    ]


@pytest.mark.parametrize(("reason", "change"), broken_seals())
def test_a_seal_that_does_not_add_up_is_damage(reason: str, change: dict[str, Any]) -> None:
    """Identity, counts, lengths, chunk order and checksum are each checked, with a reason; none gives out tokens."""
    storage, made = SimStorage(), payload(KEY, 100)
    with JournalWriter.open(
        f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
    ) as journal:
        append(journal, payload(OTHER, 100), (64,), seal=False)
        append(journal, made, (64,), seal=False)
        offset = journal.append(msgspec.structs.replace(sealed_record(2, made, 64, [1]), **change))
    with pytest.raises(PayloadDamaged, match=reason):
        PayloadStore(ROOT, storage).load(receipt_of(made, NAME, offset), KEY)
    tails = PayloadStore(ROOT, storage).sealed_tails({KEY: NAME})
    assert tails.attempts[KEY].sealed is None
    assert tails.attempts[KEY].prefix_tokens == 64
    assert [loss.offset for loss in tails.losses] == [offset]


def test_a_prefix_with_unequal_arrays_is_refused() -> None:
    """A chunk whose log-probabilities are fewer than its tokens never becomes a prefix."""
    storage, made = SimStorage(), payload(KEY, 64)
    chunk = progress_record(1, KEY, 0, made.token_ids, made.logprobs, made.weight_spans)
    with JournalWriter.open(
        f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
    ) as journal:
        journal.append(msgspec.structs.replace(chunk, logprobs=chunk.logprobs[:-4]))
    store = PayloadStore(ROOT, storage)
    with pytest.raises(PayloadDamaged, match="unequal lengths"):
        store.load_prefix(store.sealed_tails({KEY: NAME}).attempts[KEY])


def test_what_is_written_after_opening_is_found() -> None:
    """A reader that is already open sees records and segments that the worker appends later."""
    storage = SimStorage()
    store = PayloadStore(ROOT, storage)
    with JournalWriter.open(
        f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
    ) as journal:
        for group in range(3):
            made = payload(AttemptKey(1, group, 0, 0))
            receipt = append(journal, made, (10,))
            assert receipt is not None
            assert store.load(receipt, made.key) == made
            journal.rotate()


def test_a_missing_journal_or_record_is_named() -> None:
    """Loss is PayloadMissing with the journal in its message, never another kind of error."""
    storage = SimStorage()
    receipt = write(storage, payload(KEY))
    assert receipt is not None
    store = PayloadStore(ROOT, storage)
    with pytest.raises(PayloadMissing, match="i00009-w00001"):
        store.load(msgspec.structs.replace(receipt, journal="i00009-w00001"), KEY)
    with pytest.raises(PayloadMissing, match=NAME):
        store.load(msgspec.structs.replace(receipt, offset=99), KEY)
    with pytest.raises(PayloadMissing, match="payloads: none"):
        store.load(msgspec.structs.replace(receipt, journal="", offset=-1), KEY)


def test_an_io_error_is_raised_as_it_is() -> None:
    """A transient error is neither damage nor loss: OSError comes through from load and from the tail search."""
    storage = SimStorage()
    receipt = write(storage, payload(KEY))
    assert receipt is not None
    for call in (lambda s: s.load(receipt, KEY), lambda s: s.sealed_tails({KEY: NAME})):
        storage.faults.append(Fault("read", OSError(errno.EIO, "flaky"), times=1))
        with pytest.raises(OSError, match="flaky"):
            call(PayloadStore(ROOT, storage))
        storage.faults.clear()
        call(PayloadStore(ROOT, storage))


# --- tails


def test_tails_find_seals_and_prefixes_among_other_records() -> None:
    """Protocol rule 9: every record of an open attempt counts, wherever it is in the journal."""
    storage = SimStorage()
    finished, running, quiet = (AttemptKey(1, group, 0, 0) for group in (1, 2, 3))
    others = [AttemptKey(1, group, 1, 0) for group in range(10, 30)]
    made = {key: payload(key, 200) for key in (finished, running, *others)}
    with JournalWriter.open(
        f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
    ) as journal:
        append(journal, made[finished], (64, 128))
        for key in others[:10]:
            append(journal, made[key], (64,))
        append(journal, made[running], (64, 128, 192), seal=False)
        for key in others[10:]:
            append(journal, made[key], (64,))
    store = PayloadStore(ROOT, storage)
    tails = store.sealed_tails({finished: NAME, running: NAME, quiet: NAME})
    assert tails.losses == ()
    assert tails.attempts[finished].sealed is not None
    assert store.load(tails.attempts[finished].sealed, finished) == made[finished]
    assert tails.attempts[running].sealed is None
    ids, logprobs, spans = store.load_prefix(tails.attempts[running])
    assert (ids, logprobs) == (made[running].token_ids[: 4 * 192], made[running].logprobs[: 4 * 192])
    assert spans == ((0, 0, 3),)
    assert tails.attempts[quiet].prefix_tokens == 0
    assert store.load_prefix(tails.attempts[quiet]) == (b"", b"", ())


def test_a_prefix_ends_where_a_chunk_is_missing() -> None:
    """Tokens after a gap are never taken for a prefix."""
    storage, made = SimStorage(), payload(KEY, 100)
    with JournalWriter.open(
        f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
    ) as journal:
        for first, stop in ((0, 10), (20, 30), (10, 15)):
            part = slice(4 * first, 4 * stop)
            journal.append(progress_record(1, KEY, first, made.token_ids[part], made.logprobs[part], made.weight_spans))
    store = PayloadStore(ROOT, storage)
    tail = store.sealed_tails({KEY: NAME}).attempts[KEY]
    assert (tail.prefix_tokens, tail.chunks) == (15, (0, 2))
    assert store.load_prefix(tail)[0] == made.token_ids[: 4 * 15]


def test_what_a_tail_search_returns_survives_the_next_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol rule 2: what was seen only in the page cache is synced before it is given out."""
    for seed in range(20):
        storage, made = SimStorage(), payload(KEY, 100)
        with monkeypatch.context() as patch:  # the worker dies between its writes and its syncs
            patch.setattr(SimFile, "sync", lambda _: None)
            patch.setattr(SimStorage, "sync_directory", lambda *_: None)
            journal = JournalWriter.open(
                f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
            )
            append(journal, made, (64,))
        storage.kill_process()
        tail = PayloadStore(ROOT, storage).sealed_tails({KEY: NAME}).attempts[KEY]
        assert (tail.prefix_tokens, tail.sealed is not None) == (64, True)
        storage.power_cut(random.Random(seed))
        assert PayloadStore(ROOT, storage).sealed_tails({KEY: NAME}).attempts[KEY] == tail


def test_a_damaged_journal_gives_what_is_readable_and_names_the_loss() -> None:
    """A flipped byte in the middle costs what lies behind it, and the result says so."""
    storage = SimStorage()
    first, second = AttemptKey(1, 1, 0, 0), AttemptKey(1, 2, 0, 0)
    with JournalWriter.open(
        f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
    ) as journal:
        append(journal, payload(first), (64,))
        end_of_first = sum(segment_sizes(storage).values())
        append(journal, payload(second), (64,))
    (segment,) = segment_sizes(storage)
    content = bytearray(storage.content(f"{ROOT}/{NAME}/{segment}"))
    content[end_of_first + 80] ^= 0x55
    storage.put(f"{ROOT}/{NAME}/{segment}", bytes(content))
    tails = PayloadStore(ROOT, storage).sealed_tails({first: NAME, second: NAME, AttemptKey(1, 3, 0, 0): "i1-w9"})
    assert tails.attempts[first].sealed is not None
    assert tails.attempts[second].sealed is None
    assert {(loss.journal, loss.missing) for loss in tails.losses} == {(NAME, False), ("i1-w9", True)}


def segment_sizes(storage: SimStorage) -> dict[str, int]:
    names = [name for name in storage.list_names(f"{ROOT}/{NAME}") if name.endswith(".zst")]
    return {name: len(storage.content(f"{ROOT}/{NAME}/{name}")) for name in names}


@pytest.mark.slow
def test_the_codec_is_fast_and_small() -> None:
    """Journaling a group of 8 rows of 1,024 tokens costs the caller at most 0.15 ms, and 6.5 bytes a token."""
    storage = SimStorage()
    draw = np.random.default_rng(1)
    rows = []
    for sibling in range(8):
        ids = draw.integers(0, 50_000, 1024).astype("<i4").tobytes()
        logprobs = draw.normal(-1, 1, 1024).astype("<f4").tobytes()
        rows.append((AttemptKey(1, 1, sibling, 0), ids, logprobs))
    with JournalWriter.open(
        f"{ROOT}/{NAME}", PayloadRecord, journal_id=NAME, storage=storage, threaded=False
    ) as journal:
        best = 1.0
        groups = 40
        for _ in range(groups):
            began = time.perf_counter()
            for key, ids, logprobs in rows:
                journal.append(progress_record(1, key, 0, ids, logprobs, ((0, 0, 1),)))
            best = min(best, time.perf_counter() - began)
            journal.pump()
    size = sum(segment_sizes(storage).values())
    print(f"payload: {best * 1e3:.3f} ms on the caller for a group, {size / groups / 8 / 1024:.2f} bytes a token")
    assert size / groups / 8 / 1024 <= 6.5


def test_what_cannot_be_a_record_is_refused_at_the_call() -> None:
    """Not on the flush thread, where it would end the journal: unequal arrays, a rest that begins nowhere."""
    whole = payload(KEY)
    for first in (-1, 101):
        with pytest.raises(ValueError, match="of 100 tokens"):
            Unsealed(0, whole, first, ())
    with pytest.raises(ValueError, match="bytes of token ids"):
        Unsealed(0, msgspec.structs.replace(whole, logprobs=whole.logprobs[:-4]), 0, ())


@pytest.mark.parametrize("metrics", [0, 1, 10, 50])
@pytest.mark.parametrize("first", [0, 90, 100])
def test_the_size_of_a_record_to_be_built_is_an_upper_bound(first: int, metrics: int) -> None:
    """Of what is held until then, the whole arrays, and of the record, however many metrics it has."""
    named = {f"métrique_{number}": 0.1 for number in range(metrics)}
    whole = msgspec.structs.replace(payload(KEY), metrics=named)
    sealing = Unsealed(2**40, whole, first, range(first))
    assert sealing.bytes_max >= len(msgspec.msgpack.encode(sealing.record()))
    assert sealing.bytes_max >= len(whole.prompt_ids) + len(whole.token_ids) + len(whole.logprobs)
