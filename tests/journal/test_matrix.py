"""Exhaustive single damages: an acknowledged event comes back or the refusal names the right place. Never a silence."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable

import msgspec
import pytest

from tests.journal import independent_reader as oracle
from tests.journal.kinds import KINDS
from tests.journal.matrix import DIRECTORY, Base, Case, build, open_writer, single_damages, structural_damages
from tests.journal.refusals import nothing_else_is_refused
from tests.sim_storage import SimStorage
from unlost.journal import JournalDamaged, JournalReader, JournalWriter, verify

Counts = collections.Counter[str]
Show = Callable[[str, Counts], None]


def outcome(base: Base, case: Case, *, watermark: bool = True) -> str:
    """One of: all, torn, refused, silent (an acknowledged event is missing and nobody says so). Anything else fails."""
    files = case.files if watermark else {n: d for n, d in case.files.items() if n != "WATERMARK"}
    storage = SimStorage.of(DIRECTORY, files)
    try:
        reader = JournalReader(DIRECTORY, KINDS, storage=storage)
        found = list(reader.events())
    except JournalDamaged as error:
        if watermark and case.place is not None:
            assert (error.segment, error.byte, error.offset) == case.place, case.label
        assert error.last_good_offset == error.offset - 1
        return "refused"
    assert [offset for offset, _ in found] == list(range(len(found))), case.label
    events = [event for _, event in found]
    assert events == base.events[: len(events)], f"{case.label}: a wrong event"
    if len(events) < base.acknowledged:
        return "silent"
    return "all" if reader.tail is None else "torn"


def tally(base: Base, cases: Iterable[Case], *, watermark: bool = True) -> tuple[Counts, list[str]]:
    counts: Counts = collections.Counter()
    silent = []
    for case in cases:
        result = outcome(base, case, watermark=watermark)
        counts[f"{case.label.split()[0]}: {result}"] += 1
        counts[result] += 1
        if result == "silent":
            silent.append(case.label)
    return counts, silent


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Show:
    """Cases tried, by outcome, to be printed at the end of the run (conftest.py)."""

    def show(title: str, counts: Counts) -> None:
        tried = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        record_property("damage matrix", f"{title}: {tried}")

    return show


def test_the_base_journal_reads_back_whole() -> None:
    """Without damage both readers agree on every event: the matrix starts from a good journal."""
    base = build()
    assert outcome(base, Case("none", base.files, None)) == "all"
    assert len(base.segments) == 3
    assert len(base.events) == 16


@nothing_else_is_refused
def test_every_byte_is_protected(show: Show) -> None:
    """Truncating and zeroing from every byte and one flip in every byte never lose an acknowledged event silently."""
    base = build()
    counts, silent = tally(base, single_damages(base, flips_per_byte=1))
    show("single damages", counts)
    assert silent == []
    assert counts["all"] == 0
    assert counts["refused"] > 3000


@pytest.mark.slow
def test_every_bit_is_protected(show: Show) -> None:
    """The same with all eight bits of every byte."""
    base = build(seed=5)
    counts, silent = tally(base, single_damages(base, flips_per_byte=8))
    show("single damages, every bit", counts)
    assert silent == []
    assert counts["refused"] > 10_000


def test_missing_duplicate_and_foreign_pieces(show: Show) -> None:
    """Deleted, duplicated, swapped and foreign frames and segments are refused or harmless, never believed."""
    base = build()
    counts, silent = tally(base, structural_damages(base, build(seed=9, journal_id="run/b")))
    show("structural damages", counts)
    assert silent == []
    assert counts["refused"] > 30


def test_an_unacknowledged_tail_is_cut_and_never_more(show: Show) -> None:
    """Damage to frames that were never acknowledged is a torn tail; to acknowledged ones before them a refusal."""
    base = build(unacknowledged=3)
    name = base.segments[-1]
    tail_starts = next(start for start, _, offset in base.frames[name] if offset >= base.acknowledged)
    counts: Counts = collections.Counter()
    for number, case in enumerate(single_damages(base, flips_per_byte=1)):
        if number % 4:
            continue
        byte = int(case.label.partition("@")[2].partition(".")[0])
        in_tail = name in case.label and byte >= tail_starts
        result = outcome(base, Case(case.label, case.files, None if in_tail else case.place))
        counts[result] += 1
        if not in_tail and result != "refused":
            # zeroing from just before the tail may change nothing before it
            assert case.label.startswith(("zero", "truncate")), case.label
        if in_tail:
            assert result in ("torn", "refused", "all"), case.label
    show("unacknowledged tail", counts)
    assert counts["torn"] > 100
    assert counts["silent"] == 0


def test_opening_for_writing_judges_as_reading_does() -> None:
    """A writer that opens a damaged journal refuses it exactly where the reader does, and changes no file then."""
    base = build(seed=3)
    for case in structural_damages(base, build(seed=9, journal_id="run/b")):
        reading = outcome(base, case)
        storage = SimStorage.of(DIRECTORY, case.files)
        before = {n: d for n, d in storage.snapshot(DIRECTORY).items() if n != "LOCK"}
        try:
            writer = JournalWriter.open(DIRECTORY, KINDS, journal_id="run/ü", storage=storage, threaded=False)
        except JournalDamaged:
            assert reading == "refused", case.label
            assert {n: d for n, d in storage.snapshot(DIRECTORY).items() if n != "LOCK"} == before, case.label
        else:
            # It checks back to the newest image only, as much as a restore reads.
            assert writer.recovery.image_offset == 6
            if reading == "refused":
                assert any(name in case.label for name in base.segments[:1]), case.label
            assert writer.next_offset == len(base.events), case.label
            writer.close()


def test_verify_names_the_same_place() -> None:
    """``verify`` reports what the reader raises: same segment, byte and last good offset."""
    base = build(seed=4)
    for number, case in enumerate(single_damages(base, flips_per_byte=1)):
        if number % 7:
            continue
        report = verify(DIRECTORY, SimStorage.of(DIRECTORY, case.files))
        bad = [s for s in report.segments if s.state == "damaged"]
        assert report.state == "damaged", case.label
        assert case.place is not None
        assert (bad[0].segment, bad[0].byte, bad[0].last_good_offset) == (
            case.place[0],
            case.place[1],
            case.place[2] - 1,
        ), case.label


def test_without_watermark_only_the_last_batch_is_at_risk(show: Show) -> None:
    """With WATERMARK removed, the cases that lose events silently are counted, and all touch the last batch."""
    base = build()
    cases = [*single_damages(base, flips_per_byte=1), *structural_damages(base, build(seed=9, journal_id="run/b"))]
    counts, silent = tally(base, cases, watermark=False)
    show("without WATERMARK", counts)
    name = base.segments[-1]
    last_start = base.frames[name][-1][0]
    for label in silent:
        if label.startswith(("truncate", "zero", "flip")):
            at = int(label.partition("@")[2].partition(".")[0])
            cut_off = label.startswith(("truncate", "zero"))
            assert name in label, label
            assert cut_off or at >= last_start or at < oracle.SEGMENT.size, label
    assert counts["silent"] > 0


def test_the_independent_reader_agrees(tmp_path) -> None:
    """A reader that shares no code gives the same events for good journals, and never more for damaged ones."""
    base = build(unacknowledged=2)
    plain = [msgspec.msgpack.decode(msgspec.msgpack.encode(event)) for event in base.events]
    for number, case in enumerate([Case("none", base.files, None), *single_damages(base, flips_per_byte=1)]):
        if number % 23:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, data in case.files.items():
            (folder / name).write_bytes(data)
        mine = outcome(base, Case(case.label, case.files, None))
        try:
            events, floor, state = oracle.read(os.fspath(folder))
        except oracle.Damage:
            assert mine == "refused", case.label
            continue
        assert floor == 0
        assert events == plain[: len(events)], case.label
        assert mine != "refused" or state == "torn", case.label
        assert len(events) >= base.acknowledged, case.label


def test_a_refused_journal_is_not_written_to() -> None:
    """``open`` on the undamaged base goes on at its end, so that the comparison above can fail."""
    base = build()
    storage = SimStorage.of(DIRECTORY, base.files)
    writer = open_writer(storage)
    assert writer.next_offset == 16
    assert writer.incarnation == 3
    writer.close()
