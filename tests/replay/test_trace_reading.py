"""Traces as they come: damaged, cut short, with values that no event may have, with clocks that were set."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unlost.replay.database import Database, open_database
from unlost.replay.export import trace_of
from unlost.replay.queries import QUERIES
from unlost.replay.report import gather, summary
from unlost.replay.trace_events import TraceEvents, load_trace
from unlost.replay.trace_reading import Line, TraceFile

from .postmortem_stories import TRACE_FILE, everything, write

Json = dict[str, Any]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """Lines of our own, of a run with a kill, a rollback and every kind of loss."""
    return [json.loads(line) for line in trace_of(write(tmp_path_factory.mktemp("run") / "told", everything()))]


FOREIGN: list[Json] = [json.loads(line) for line in TRACE_FILE.splitlines()] + [
    {"t": 91, "run": "b2", "event": "step_claimed", "step": 0, "prompt_ids": ["7"]},
    {"t": 95, "run": "b2", "event": "step_applied", "step": 0, "tokens": 23, "seconds": 4.0},
    {"t": 96, "run": "b2", "event": "weights_synced", "version": 1},
    {"t": 97, "run": "b2", "event": "attempt_dispatched", "prompt_id": "8", "generation_index": 0},
    {"t": 98, "run": "b2", "event": "attempt_failed", "prompt_id": "8", "generation_index": 0, "cause": "x"},
    {"t": 99, "run": "b2", "event": "group_discarded", "prompt_id": "8", "reason": "dropped"},
]


def text_of(lines: list[Json]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def bearable(value: Any) -> bool:
    """No number in it is beyond what can be written and added up."""
    if isinstance(value, float):
        return not abs(value) > 1e15
    if isinstance(value, int):
        return abs(value) < 2**62
    return not isinstance(value, list | dict) or all(
        map(bearable, value.values() if isinstance(value, dict) else value)
    )


def fed(lines: list[Json]) -> tuple[list[bool], list[Any], list[str]]:
    """Whether each line was understood, all events, and the notes."""
    made = TraceEvents("t")
    understood, events = [], []
    for number, line in enumerate(lines, 1):
        ok, more = made.feed(Line(number, line, ""), str(line.get("run", "")))
        understood.append(ok)
        events += more
    events += made.close()
    assert bearable(msgspec.to_builtins(events)), events
    return understood, events, made.notes


# --- lines that lack something ----------------------------------------------------------------------------------------

ODD = (
    None, True, "", "x", "²", "9" * 30, "9" * 5000, 7, -7, 0.5, 1e30, 1e300, 2**31, 2**63, 2**64, -(2**70), [], [0],
    [[0, 0]], {}, {"a": 1}, {"a": 2**70}, {"a": "x"}, [[0, 0, 2**70]], [None], [{}], "\0", "\u202e",
)  # fmt: skip


def bent(line: Json, chance: random.Random | None) -> Iterator[tuple[str, Json]]:
    """The line without one of its fields, or with odd values (three of them) in its place; its run and time stay."""
    for name in line:
        if name in ("run", "t"):
            continue
        yield name, {key: value for key, value in line.items() if key != name}
        for odd in ODD if chance is None else chance.sample(ODD, 3):
            yield name, line | {name: odd}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["own", "foreign"])
def test_a_line_that_is_left_out_leaves_nothing_behind(kind: str, every: bool, own: list[Json]) -> None:
    """Before each line, the same with an odd value: no error; if that is not understood, all is as without it."""
    lines = own if kind == "own" else FOREIGN
    chance = None if every else random.Random(7)
    left_out = 0
    for at, line in enumerate(lines):
        gone = {"t": line["t"], "run": line["run"], "event": "nothing"}
        without = None
        for name, other in bent(line, chance):
            understood, events, notes = fed([*lines[:at], other, *lines[at:]])
            if understood[at] or name in ("event", "offset") or line["event"] == "something_new":
                continue
            left_out += 1
            without = without or fed([*lines[:at], gone, *lines[at:]])
            assert repr(events) == repr(without[1]), other
            assert any(f"line {at + 1}: {line['event']}: " in note and name in note for note in notes), (other, notes)
    assert left_out > (40 if kind == "foreign" else 200) * (5 if every else 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 3) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
mutations = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.just("drop") | st.just("double") | json_values),
    min_size=1,
    max_size=6,
)


def mutated(lines: list[Json], changes: list[tuple[int, int, Any]]) -> str:
    lines = [dict(line) for line in lines]
    for place, which, change in changes:
        line = lines[place % len(lines)]
        name = sorted(line)[which % len(line)] if line else "event"
        if change == "drop":
            line.pop(name, None)
        elif change == "double":
            lines.insert(place % (len(lines) + 1), dict(line))
        else:
            line[name] = change
    return text_of(lines)


@pytest.mark.slow
@settings(max_examples=100)
@given(changes=mutations, foreign=st.booleans())
@example(changes=[(0, 1, "x")], foreign=True)
@example(changes=[(1, 4, math.nan)], foreign=True)
def test_any_trace_is_loaded(
    own: list[Json], tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, Any]], foreign: bool
) -> None:
    """Whatever single fields say: the tables are written, with every line that is JSON in ``trace_lines``."""
    folder = tmp_path_factory.mktemp("loaded")
    text = mutated(FOREIGN if foreign else own, changes)
    (folder / "t.jsonl").write_text(text)
    load_trace(str(folder / "t.jsonl"), folder, "0-0")
    assert (folder / "trace_lines.0-0.parquet").exists()


def hard(own: list[Json], seed: int) -> str:
    chance = random.Random(seed)
    lines = FOREIGN if seed % 2 else own
    changes = [
        (chance.randrange(10**6), chance.randrange(10**6), chance.choice(("drop", "double", *ODD)))
        for _ in range(chance.choice((1, 3, 10, 60)))
    ]
    return mutated(lines, changes)


@pytest.mark.slow
def test_any_trace_is_answered(own: list[Json], tmp_path: Path) -> None:
    """Over traces with many odd values, every question has an answer, and the report is written."""
    for seed in range(30):
        (tmp_path / f"t{seed}.jsonl").write_text(hard(own, seed))
    with open_database([tmp_path / "*.jsonl"]) as database:
        for query in QUERIES:
            database.query(query.sql)
        database.query("FROM events")
        counted = dict(database.query("SELECT run, count(*) FROM trace_lines GROUP BY ALL").rows)
        assert sum(counted.values()) > 300
        for run in sorted(counted)[:5]:
            assert summary(gather(database, run))


def test_lines_that_are_no_json_objects(tmp_path: Path) -> None:
    """Left out and told by number, also those that a decoder gives up at; the others are answered."""
    bad = [b"[" * 100_000, b'{"a":' + b"[" * 100_000, b"7", b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":1e999}', b"\0", b"{"]
    (tmp_path / "t.jsonl").write_bytes(TRACE_FILE.encode() + b"\n".join(bad) + b"\n" + b'{"run":"b2","event":"x"}\n')
    with open_database([tmp_path / "t.jsonl"]) as database:
        assert database.value("SELECT count(*) FROM trace_lines") == 16
        assert any("8 line(s) are no JSON objects" in note and ": 16, 17" in note for note in database.notes)


def test_a_group_whose_beginning_is_not_there(tmp_path: Path) -> None:
    """As in a trace of a pruned run: what ends it is counted and left out; a later attempt of it counts."""
    told = [
        {"t": 1, "run": "a", "event": "group_discarded", "prompt_id": "7", "reason": "dropped"},
        {"t": 1, "run": "a", "event": "group_evicted", "prompt_id": "7"},
        {"t": 1, "run": "a-1", "event": "group_discarded", "group_id": 4, "requeued_as": 9, "offset": 50},
        {"t": 1, "run": "a-1", "event": "prompt_replaced", "group_id": 5, "spare": 6, "offset": 51},
        {"t": 1, "run": "a-1", "event": "group_committed", "group_id": 5, "offset": 52},
        {"t": 2, "run": "a-1", "event": "attempt_dispatched", "prompt_id": "3", "group_id": 8, "generation_index": 1,
         "attempt": 2, "offset": 53},
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_text(text_of(told))
    with open_database([tmp_path / "t.jsonl"]) as database:
        assert database.query("SELECT group_id, sample_id, attempts FROM groups").rows == [(8, "3", 1)]
        assert database.query("SELECT group_id, sibling, attempt FROM attempts").rows == [(8, 1, 2)]
        assert any("5 line(s) end an attempt or group whose start" in note for note in database.notes)


# --- runs and clocks --------------------------------------------------------------------------------------------------


def stopped_and_resumed(second: float) -> list[Json]:
    """Run a from 100 to 120 is killed with an attempt running; run b begins at ``second``."""
    attempt = {"prompt_id": "1", "generation_index": 0}
    return [
        {"t": 100, "run": "a", "event": "attempt_dispatched"} | attempt,
        {"t": 110, "run": "a", "event": "snapshot_published", "step": 0, "cut_time": 105},
        {"t": 120, "run": "a", "event": "something"},
        {"t": second, "run": "b", "event": "restore_started"},
        {"t": second, "run": "b", "event": "attempt_abandoned", "reason": "restart"} | attempt,
        {"t": second + 5, "run": "b", "event": "attempt_dispatched"} | attempt,
        {"t": second + 15, "run": "b", "event": "snapshot_published", "step": 0, "cut_time": second + 10},
        {"t": second + 25, "run": "b", "event": "attempt_sealed"} | attempt,
    ]


SECONDS = (80, 110, 119.9, 120, 130, 0)


@pytest.fixture(scope="module")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Traces of the same story: by the second run's clock, with their lines mixed, and with few that name their run."""
    folder = tmp_path_factory.mktemp("clocks")
    for second in SECONDS:
        (folder / f"at_{second}.jsonl").write_text(text_of(stopped_and_resumed(second)))
    lines = stopped_and_resumed(130)
    (folder / "mixed.jsonl").write_text(text_of([*lines[3:5], *lines[:3], *lines[5:]]))
    few = [{k: v for k, v in line.items() if k != "run" or i % 3 == 0} for i, line in enumerate(lines)]
    (folder / "few.jsonl").write_text(text_of(few))
    with open_database([folder / "*.jsonl"]) as database:
        yield database


@pytest.mark.parametrize("second", [*SECONDS, "mixed", "few"])
def test_a_stop_is_told_whatever_the_clock_and_the_order(second: float | str, clocks: Database) -> None:
    """The same attempt is lost, with the same seconds; of runs one after the other, the file's order counts."""
    name, at = (f"at_{second}", float(second)) if not isinstance(second, str) else (second, 130.0)

    def rows(sql: str) -> list[Any]:
        return clocks.query(sql, [name]).rows

    lives = rows("SELECT run_id, status FROM incarnations WHERE run = ? ORDER BY life")
    assert lives == [("a", "killed"), ("b", "open")]
    idle = max(at - 120, 0)
    assert rows(
        "SELECT seconds, seconds_before_cut, seconds_after_cut, seconds_max FROM losses "
        "WHERE class = 'in_flight' AND run = ?"
    ) == [(20, 5, 15, 20 + idle)]
    assert rows("SELECT outcome, seconds FROM attempts WHERE run = ? ORDER BY attempt") == [
        ("abandoned", 20), ("sealed", 20),
    ]  # fmt: skip
    assert rows("SELECT seconds, seconds_max FROM losses WHERE class = 'restart_idle' AND run = ?") == [(5, 5 + idle)]
    notes = [note for note in clocks.notes if f"/{name}.jsonl" in note]
    assert any("begin before the end of the run before" in note for note in notes) == (at < 120)
    assert any("of 2 runs are mixed" in note for note in notes) == (name == "mixed")
    assert len(notes) == (at < 120) + (name == "mixed")


# --- compressed files -------------------------------------------------------------------------------------------------


def read(path: Path, data: bytes) -> tuple[list[int], str]:
    path.write_bytes(data)
    file = TraceFile(str(path))
    numbers = [line.number for line in file]
    return numbers, "; ".join(file.notes)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_data_cut_anywhere(suffix: str, tmp_path: Path) -> None:
    """That they end early is told, and never that the trace is empty or a line torn; what was there is given."""
    chance = random.Random(1)
    text = b"".join(b'{"t":%d,"run":"a","event":"%x"}\n' % (i, chance.getrandbits(200)) for i in range(20_000))
    packed = gzip.compress(text, 1) if suffix == ".gz" else zstandard.compress(text)
    lengths = [1, 5, 12, 13, len(packed) // 3, len(packed) - 5, len(packed) - 1]
    if suffix == ".zst":
        small = zstandard.compress(text[:300])
        numbers, note = read(tmp_path / "t.jsonl.zst", small[:-1])
        assert (numbers, "end early" in note) == ([], True)
    for length in lengths:
        numbers, note = read(tmp_path / f"t.jsonl{suffix}", packed[:length])
        assert "the compressed data end early" in note
        assert f"{len(numbers)} line(s) were read" in note
        assert "empty" not in note
        assert "torn" not in note
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= 20_000 * (length / len(packed)) - 6_000
    assert read(tmp_path / f"t.jsonl{suffix}", packed) == (list(range(1, 20_001)), "")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_data_with_a_bad_byte_anywhere(suffix: str, tmp_path: Path) -> None:
    """Either the lines are what they were, or the damage is told; never another error. What precedes it is given.

    (Of zstd this is one block, which is given as a whole or not at all.)
    """
    chance = random.Random(2)
    text = b"".join(b'{"t":%d,"run":"a","event":"%x"}\n' % (i, chance.getrandbits(100)) for i in range(60))
    packer = zstandard.ZstdCompressor(write_checksum=True)
    packed = gzip.compress(text, mtime=0) if suffix == ".gz" else packer.compress(text)
    for place in range(0, len(packed), 5):
        data = bytearray(packed)
        data[place] ^= 1 << chance.randrange(8)
        path = tmp_path / f"t.jsonl{suffix}"
        path.write_bytes(data)
        file = TraceFile(str(path))
        lines = [line.text for line in file]
        if file.notes:
            assert any("are damaged" in note or "end early" in note for note in file.notes) or len(lines) < 60
            if suffix == ".gz" and len(packed) // 2 < place < len(packed) - 8:
                assert len(lines) > 15
        else:
            assert lines == text.decode().splitlines()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_files_that_are_no_compressed_data(suffix: str, tmp_path: Path) -> None:
    """Something else is told as damage, nothing at all as an empty trace."""
    assert "damaged" in read(tmp_path / f"t.jsonl{suffix}", b"something else entirely\n")[1]
    assert read(tmp_path / f"t.jsonl{suffix}", b"")[1].endswith("the trace is empty")
