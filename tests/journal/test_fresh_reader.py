"""docs/FORMAT.md is enough: a reader written from it alone gives the library's events and verdicts, damaged or not."""

from __future__ import annotations

import collections
import errno
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.journal import fresh_reader
from tests.journal.forged import (
    Head,
    frames,
    needs_another_release,
    of_a_later_version,
    one_field_changed,
    rebuilt,
    watermark,
    with_field,
)
from tests.journal.kinds import KINDS, Event, Image
from tests.journal.matrix import DIRECTORY, some_events
from tests.sim_storage import SimStorage
from unlost.journal import (
    JournalDamaged,
    JournalOptions,
    JournalReader,
    JournalUnsupported,
    JournalWriter,
    verify,
)

Files = dict[str, bytes]
GOLDEN = Path(__file__).parent / "golden"


def incarnation(storage: SimStorage, rng: random.Random, taken: list[Files]) -> None:
    """One writer's life: rotations, images, pruning, failing syncs; now and then a copy of the live files is taken."""
    options = JournalOptions(
        segment_bytes_max=rng.choice([400, 700, 1 << 20]), frame_events_max=rng.choice([2, 100]), max_write_failures=99
    )
    writer: JournalWriter[Event] = JournalWriter.open(
        DIRECTORY, KINDS, journal_id="fresh/ü", storage=storage, threaded=False, options=options
    )
    for event in some_events(rng.randrange(1000), rng.choice([0, 2, 12])):
        chance = rng.random()
        if chance < 0.15:
            writer.rotate(event if isinstance(event, Image) else None)
        if chance >= 0.15 or not isinstance(event, Image):
            writer.append(event)
        if chance < 0.1:
            storage.fail("sync", errno.EIO, name=".zst")
        if rng.random() < 0.7:
            writer.pump()
        if chance > 0.95:
            writer.prune(rng.randrange(writer.durable_upto + 1))
        if rng.random() < 0.1:
            taken.append(storage.snapshot(DIRECTORY))
    storage.faults.clear()
    if rng.random() < 0.5:
        writer.abandon()
    else:
        writer.close()


def journals(rng: random.Random, count: int) -> list[Files]:
    """Of one to three incarnations; some seen live, some after a power cut."""
    taken: list[Files] = []
    for _ in range(count):
        storage = SimStorage()
        for _ in range(rng.choice([1, 2, 3])):
            incarnation(storage, rng, taken)
            if rng.random() < 0.3:
                storage.power_cut(rng)
        taken.append(storage.snapshot(DIRECTORY))
    return taken


def odd_names(name: str) -> list[str]:
    """Names that ``\\d`` and ``$`` take for a segment's, and docs/FORMAT.md does not."""
    arabic = name.translate({ord(str(digit)): 0x660 + digit for digit in range(10)})
    return [arabic, name[0] + arabic[1:], f"{name}\n"]


def hurt(files: Files, rng: random.Random, others: list[Files]) -> Files:
    """One damage."""
    files = dict(files)
    segments = sorted(name for name in files if name.endswith(".zst"))
    if not segments:
        return files
    name = rng.choice([segments[-1], rng.choice(segments)])
    data, other = files[name], rng.choice(others)
    lies = frames(data) or [(0, len(data))]
    (start, end), at = rng.choice(lies), rng.randrange(len(data) + 1)
    mark = rng.choice(["WATERMARK", "WATERMARK", "FLOOR"])
    match rng.choice(["cut", "zero", "flip", "flip", "frame", "segment", "mark", "bytes"]):
        case "cut":
            files[name] = data[:at]
        case "zero":
            files[name] = data[:at] + bytes(len(data) - at)
        case "flip":
            files[name] = flipped(data, rng.choice([at, start + rng.randrange(76)]), rng)
        case "frame":
            moved = [data[end:], data[start:end] * 2 + data[end:], data[lies[-1][0] :] + data[start:]]
            files[name] = data[:start] + rng.choice(moved)
        case "segment":
            other_number = f"{int(name[:20]) + rng.choice([1, 40]):020d}.zst"
            to = rng.choice([*segments, other_number, f"{name}.new", *odd_names(name)])
            files[name], files[to] = files.get(to, b""), data
            if rng.random() < 0.5:
                del files[name]
        case "mark":
            changed = rng.choice([other.get(mark), files.get(mark, b"")[:4096], flipped(files.get(mark, b""), at, rng)])
            files[mark] = changed or b""
            if rng.random() < 0.5:
                del files[mark]
        case "bytes":
            junk = rng.choice([rng.randbytes(90), bytes(90), data[start:end], other.get(name, b"")[196:]])
            at = rng.choice([len(data), start])
            files[name] = data[:at] + junk + data[at:]
    return files


def flipped(data: bytes, at: int, rng: random.Random) -> bytes:
    at %= max(len(data), 1)
    return data[:at] + bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 1]) + data[at + 1 :]


Verdict = tuple[Any, ...]


def said(error: JournalDamaged | JournalUnsupported) -> Verdict:
    if isinstance(error, JournalUnsupported):
        return ("refused",)
    assert error.last_good_offset == error.offset - 1
    return ("damaged", error.segment, error.byte, error.offset)


def by_reader(files: Files) -> tuple[list[Any], Verdict]:
    """Events, and how iterating ended."""
    events: list[Any] = []
    try:
        reader = JournalReader(DIRECTORY, KINDS, storage=SimStorage.of(DIRECTORY, files))
        for offset, event in reader.events():
            events.append((offset, msgspec.msgpack.decode(msgspec.msgpack.encode(event))))
    except (JournalDamaged, JournalUnsupported) as error:
        return events, said(error)
    return events, ("clean",) if reader.tail is None else ("torn", reader.tail.segment, reader.tail.byte)


def by_verify(files: Files) -> Verdict:
    try:
        report = verify(DIRECTORY, storage=SimStorage.of(DIRECTORY, files))
    except JournalUnsupported as error:
        return said(error)
    bad = next((s for s in report.segments if s.state == report.state != "clean"), None)
    if bad is None or bad.state != "damaged":
        return (report.state,) if bad is None else (report.state, bad.segment, bad.byte)
    assert bad.last_good_offset is not None
    return (report.state, bad.segment, bad.byte, bad.last_good_offset + 1)


def by_opening(files: Files) -> tuple[Files, Verdict]:
    """What lies there afterwards, but for the lock and what was put aside, and what was raised, or whether it cut."""
    storage = SimStorage.of(DIRECTORY, files)
    options = JournalOptions(scan_on_open="all")
    try:
        journal_id = JournalReader(DIRECTORY, KINDS, storage=storage).journal_id
    except (JournalDamaged, JournalUnsupported):
        journal_id = None
    try:
        writer: JournalWriter[Event] = JournalWriter.open(
            DIRECTORY, KINDS, journal_id=journal_id or "fresh/ü", storage=storage, threaded=False, options=options
        )
    except (JournalDamaged, JournalUnsupported) as error:
        verdict: Verdict = said(error)
    else:
        verdict = ("torn",) if writer.recovery.torn else ("clean",)
        writer.close()
    return {name: data for name, data in storage.snapshot(DIRECTORY).items() if name != "LOCK"}, verdict


def opening(files: Files) -> tuple[list[Any], Verdict]:
    """The events that an opening keeps and its verdict, by docs/FORMAT.md: if the head goes, the rest is judged."""
    _, verdict = fresh_reader.read(files, decode=lambda h, payload: [None] * h.n)
    if verdict[0] != "torn":
        return fresh_reader.read(files)[0], verdict
    gone = {verdict[1]} | {n for n in files if n > verdict[1] and n.endswith(".zst") and not head_of(files, n)}
    if verdict[2] != 196:
        return fresh_reader.read(files)[0], ("torn",)
    events, then = opening({name: data for name, data in files.items() if name not in gone})
    return events, ("torn",) if then[0] == "clean" else then


def head_of(files: Files, name: str) -> Any:
    return fresh_reader.preamble(files[name], int(name[:20]))


def compare(files: Files, case: object) -> str:
    """The verdict's kind, after the other reader, ours, ``verify`` and opening agreed on it and its place.

    ``verify`` and opening go on after a damage, and may find what needs another release after it.
    """
    files = {name: data for name, data in files.items() if name != "LOCK"}
    events, verdict = fresh_reader.read(files)
    assert by_reader(files) == (events, verdict), case
    elsewhere = {("refused",)} if any(map(needs_another_release, files.values())) else set()
    assert by_verify(files) in {verdict} | (elsewhere if verdict[0] == "damaged" else set()), case
    after, opened = by_opening(files)
    kept, expected = opening(files)
    assert opened in {expected} | (elsewhere if expected[0] == "damaged" else set()), case
    if opened[0] in ("damaged", "refused"):
        assert after == files, f"{case}: changed, and then refused"
    elif verdict[0] != "damaged":
        assert by_reader(after) == (kept, ("clean",)), case
    return str(verdict[0])


@pytest.mark.slow
def test_both_readers_agree_on_what_is_there_and_on_what_is_wrong() -> None:
    """Real journals, whole, live and after power cuts, with one damage or two: all four judges say the same."""
    rng = random.Random(1)
    bases = journals(rng, 16)
    kinds = {compare(files, number) for number, files in enumerate(bases)}
    assert "damaged" not in kinds
    assert any("FLOOR" in files for files in bases)
    counts = {"clean": 0, "torn": 0, "damaged": 0}
    for number in range(500):
        files = rng.choice(bases)
        for _ in range(rng.choice([1, 1, 2])):
            files = hurt(files, rng, bases)
        counts[compare(files, number)] += 1
    assert min(counts.values()) > 30, counts


def test_both_readers_agree_on_the_golden_journal() -> None:
    """The journal kept in the repository, whole and damaged: all four judges say the same."""
    files = {path.name: path.read_bytes() for path in (GOLDEN / "v1").iterdir()}
    assert compare(files, "golden") == "clean"
    events, _ = fresh_reader.read(files)
    want = msgspec.json.decode((GOLDEN / "v1" / "events.json").read_bytes())
    assert msgspec.json.decode(msgspec.json.encode([event for _, event in events])) == want
    rng = random.Random(2)
    for number in range(60):
        compare(hurt(files, rng, [files]), number)


def two_segments() -> tuple[Files, str, str]:
    storage = SimStorage()
    incarnation_of = {"journal_id": "j", "storage": storage, "threaded": False}
    for number in range(2):
        with JournalWriter.open(DIRECTORY, KINDS, **incarnation_of) as writer:
            for event in some_events(number, 4):
                writer.append(event)
                writer.sync()
    files = storage.snapshot(DIRECTORY)
    first, second = sorted(name for name in files if name.endswith(".zst"))
    return files, first, second


def test_a_damaged_file_after_a_torn_end_is_not_passed_over() -> None:
    """A write that failed and could not be cut back left bytes behind its segment; the next one's preamble is hurt."""
    files, first, second = two_segments()
    files[first] += b"left behind"
    assert compare(files, "leftover") == "clean"
    files[second] = b"x" + files[second][1:]
    assert by_reader(files)[1] == ("damaged", second, 0, 4)
    assert compare(files, "leftover, hurt") == "damaged"


@pytest.mark.parametrize("statement", [None, 4, 8])
@pytest.mark.parametrize("wrong", [5, 6])
def test_a_segment_under_a_wrong_name_is_not_passed_over(wrong: int, statement: int | None) -> None:
    """Nor does it end the look at the files after it."""
    files, first, second = two_segments()
    data = files.pop(second)
    files[f"{wrong:020d}.zst"] = data
    if statement is None:
        del files["WATERMARK"]
    elif statement == 4:
        files["WATERMARK"] = watermark(4, "j")
    place = (first, len(files[first]), 4) if statement == 8 else (f"{wrong:020d}.zst", 0, 4)
    assert by_reader(files)[1] == ("damaged", *place)
    assert compare(files, statement) == "damaged"
    files[f"{5:020d}.zst"], files[f"{6:020d}.zst"] = (data, b"") if wrong == 5 else (b"", data)
    assert compare(files, statement) == "damaged"


def test_a_name_is_twenty_digits_and_nothing_else() -> None:
    """Digits of other scripts, a line's end: other names are no segments, whatever Python thinks of them."""
    files, _, second = two_segments()
    data = files.pop(second)
    del files["WATERMARK"]
    for number, name in enumerate([*odd_names(second), second.upper(), f"0{second}", second[1:], f" {second}"]):
        assert compare(files | {name: data}, name) == "clean", number
        assert [offset for offset, _ in by_reader(files | {name: data})[0]] == [0, 1, 2, 3]
    assert [offset for offset, _ in by_reader(files | {second: data})[0]] == list(range(8))


def test_checksums_that_hold_prove_nothing() -> None:
    """Any field of a preamble or frame another, its checksums right: refused or harmless, for every judge alike."""
    rng = random.Random(3)
    bases = journals(rng, 12)
    counts: collections.Counter[str] = collections.Counter()
    for number in range(350):
        files = dict(rng.choice(bases))
        segments = sorted(name for name in files if name.endswith(".zst") and len(files[name]) > 196)
        for name in segments and rng.choices([segments[-1], rng.choice(segments)], k=rng.choice([1, 1, 2])):
            files[name] = one_field_changed(files[name], rng)
        if rng.random() < 0.3:
            files = hurt(files, rng, bases)
        counts[compare(files, number)] += 1
    assert min(counts[kind] for kind in ("clean", "torn", "damaged", "refused")) > 5, counts


@pytest.mark.parametrize("named", [1, 195, 196, 197])
def test_a_length_that_leaves_no_room_for_a_frame(named: int) -> None:
    """A successor that says so is damage of its predecessor, where its first frame would begin."""
    files, first, second = two_segments()
    files[second] = rebuilt(
        files[second], lambda n, head: (with_field(head[0], 48, "<Q", named), head[1]) if n < 0 else head
    )
    assert by_reader(files) == ([], ("damaged", first, 196, 0))
    assert compare(files, named) == "damaged"


@pytest.mark.parametrize("named", [4, 5, 40])
def test_a_predecessor_that_does_not_begin_before_is_damage_of_the_segment_that_names_it(named: int) -> None:
    """Whether a file of that name is there or not: it is not the one that is wrong."""
    files, _, second = two_segments()
    files[second] = rebuilt(
        files[second], lambda n, head: (with_field(head[0], 40, "<Q", named), head[1]) if n < 0 else head
    )
    for others in ({}, {f"{named:020d}.zst": files[second]} if named > 4 else {}):
        assert by_reader(others | files)[1] == ("damaged", second, 0, 4)
        assert compare(others | files, named) == "damaged"


def test_the_search_ends_at_the_first_proof_of_damage() -> None:
    """A frame of a later version after it is refused by those who read on, and not by a reader."""
    files, first, _ = two_segments()
    files = {first: files[first]}
    (start, _), *_ = frames(files[first])
    later = of_a_later_version(files[first], 4, 3)
    hurt_one = later[: start + 9] + b"?" + later[start + 10 :]
    assert by_reader({first: hurt_one})[1] == ("damaged", first, start, 0)
    assert compare({first: hurt_one}, "first proof") == "damaged"


@pytest.mark.parametrize("then", ["nothing", "a frame", "the link", "the end", "a torn end"])
def test_a_frame_that_does_not_decode_is_named_before_what_is_bad_after_it(then: str) -> None:
    """``verify`` names the place at which a reader stops, whatever follows it."""
    files, first, second = two_segments()
    name = first if then == "the link" else second
    (start, _), (after, _) = frames(files[name])[1:3]
    files[name] = rebuilt(files[name], lambda n, head: (head[0], b"?" + head[1][1:]) if n == 1 else head)
    if then == "a frame":
        files[name] = files[name][: after + 9] + b"?" + files[name][after + 10 :]
    elif then == "the end":
        files[name] = files[name][:after]
    elif then == "a torn end":
        files[name] += b"left behind"
    offset = 1 if then == "the link" else 5
    assert by_reader(files)[1] == ("damaged", name, start, offset)
    assert compare(files, then) == "damaged"


@pytest.mark.parametrize("longer", [0, 4, 3900])
@pytest.mark.parametrize("statement", ["present", "stale", "absent"])
def test_what_a_later_version_wrote_is_refused_whatever_the_length_of_its_headers(statement: str, longer: int) -> None:
    """Whole segments or frames alone; nothing is cut, nothing removed."""
    files, first, second = two_segments()
    if statement == "stale":
        files["WATERMARK"] = watermark(4, "j")
    elif statement == "absent":
        del files["WATERMARK"]
    for name in (first, second):
        for frame in range(-1, 4):
            changed = files | {name: of_a_later_version(files[name], longer, frame)}
            if name == first:
                del changed[second]
            assert compare(changed, (name, frame)) == "refused"


def test_a_later_version_s_journal_is_never_cut_however_damaged() -> None:
    """Its preamble hurt, its frames still say what they are, at any length of their headers."""
    rng = random.Random(4)
    bases = journals(rng, 12)
    counts: collections.Counter[str] = collections.Counter()
    for number in range(250):
        base = rng.choice(bases)
        names = sorted(name for name in base if name.endswith(".zst") and len(frames(base[name])) > 1)
        if not names:
            continue
        since = rng.choice(names)
        longer, frame = rng.choice([0, 1, 8, 900, 4096 - 196]), rng.choice([-1, -1, 0, 1])
        files = base | {name: of_a_later_version(base[name], longer, frame) for name in names if name >= since}
        if rng.random() < 0.5:
            files.pop("WATERMARK", None)
        counts[f"whole: {compare(files, number)}"] += 1
        hit = bytearray(files[since])
        hit[rng.randrange(14)] ^= 1 << rng.randrange(8)
        counts[f"preamble hurt: {compare(files | {since: bytes(hit)}, number)}"] += 1
        counts[f"hurt: {compare(hurt(files, rng, bases), number)}"] += 1
    assert set(counts) & {"whole: torn", "whole: clean", "preamble hurt: torn"} == set(), counts
    assert counts["whole: refused"] > 100, counts
    assert counts["preamble hurt: refused"] > 10, counts


def test_of_two_torn_places_the_first_is_the_tail() -> None:
    """A torn head and a file of no use after it."""
    files, _, second = two_segments()
    end = len(files[second])
    files[second] += b"left behind"
    files[f"{8:020d}.zst"] = b"begun"
    assert by_reader(files)[1] == ("torn", second, end)
    assert compare(files, "two") == "torn"


def test_a_successor_s_chain_without_its_offset_is_no_link() -> None:
    """Segment 4 renumbered to begin at 5, all else right: event 4 is missing, and said to be."""
    files, first, second = two_segments()

    def one_later(number: int, head: Head) -> Head:
        (offset,) = struct.unpack_from("<Q", head[0], 32)
        return with_field(head[0], 32, "<Q", offset + 1), head[1]

    files[f"{5:020d}.zst"] = rebuilt(files.pop(second), one_later)
    assert by_reader(files)[1] == ("damaged", first, len(files[first]), 4)
    assert compare(files, "renumbered") == "damaged"


@pytest.mark.parametrize("window", [64, 77, 100])
def test_a_later_frame_is_found_wherever_the_read_pieces_meet(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is read ahead, and with any number of bytes before the one frame that proves the damage."""
    monkeypatch.setattr("unlost.journal.scan._WINDOW_BYTES", window)
    files, _, second = two_segments()
    del files["WATERMARK"]
    *_, (start, _) = frames(files[second])
    for junk in range(1, 110):
        data = files[second]
        assert compare(files | {second: data[:start] + b"?" * junk + data[start:]}, junk) == "damaged"
