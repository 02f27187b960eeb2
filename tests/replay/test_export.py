"""Exports: what they hold is what the journal holds, and none goes into the run's folder."""

import json
from itertools import pairwise

import pytest

from tests.synthetic_run import Shape, SyntheticRun, write_journal
from unlost.replay import events as ev
from unlost.replay import export
from unlost.replay.database import open_database
from unlost.replay.fold import open_events
from unlost.replay.trace import TraceProjection

from .postmortem_stories import everything, trace_example, write


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return write_journal(SyntheticRun(Shape(seed=11, events=1_500, crashes=2)), tmp_path_factory.mktemp("simulated"))


_EXACT = (
    """SELECT group_id, sibling, attempt, outcome, reason, fate, tokens, new_tokens, kept_tokens, prefix, killed,
       adopted FROM attempts WHERE run = ? ORDER BY ALL""",
    "SELECT class, resource, count(*), sum(tokens) FROM losses WHERE run = ? GROUP BY ALL ORDER BY ALL",
    """SELECT group_id, status, reason, times_trained, trained_step, sealed, tokens FROM groups WHERE run = ?
       ORDER BY ALL""",
    "SELECT step, rolled_back, tokens FROM steps WHERE run = ? ORDER BY applied_offset",
    "SELECT step, tokens, round(age_mean, 9) FROM batch_age WHERE run = ? ORDER BY applied_offset",
)
_NEARLY = (
    "SELECT seconds FROM attempts WHERE run = ? ORDER BY group_id, sibling, attempt",
    "SELECT seconds FROM losses WHERE run = ? ORDER BY class, group_id, sibling, attempt, event_offset",
    """SELECT cut_s - (SELECT min(started_s) FROM incarnations i WHERE i.run = c.run) FROM checkpoints c
       WHERE outcome = 'committed' AND run = ? ORDER BY cut_s""",
)


def test_a_trace_says_what_the_journal_says(simulated, tmp_path):
    """Every table that a trace can fill is the same from the exported trace, on a run with kills and losses."""
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"".join(export.trace_of(simulated)))
    with open_database([simulated, trace]) as database:
        for sql in _EXACT:
            journal, exported = (database.query(sql, [run]).rows for run in (simulated.name, "trace"))
            assert journal == exported
            assert journal
        for sql in _NEARLY:  # a trace's times are Unix times
            journal, exported = (
                [row[0] for row in database.query(sql, [run]).rows] for run in (simulated.name, "trace")
            )
            assert journal == pytest.approx(exported, abs=1e-5)
            assert journal


def test_trace_lines_have_the_fields_of_the_format(tmp_path):
    """The lines of the worked example: names and fields as others read them."""
    lines = [json.loads(line) for line in export.trace_of(write(tmp_path / "told", trace_example()))]
    first = next(line for line in lines if line["event"] == "attempt_dispatched")
    assert (first["t"], first["prompt_id"], first["generation_index"], first["attempt"]) == (1012, "7", 2, 0)
    snapshot = next(line for line in lines if line["event"] == "snapshot_published")
    assert (snapshot["t"], snapshot["cut_time"], snapshot["step"]) == (1043, 1040, 0)
    assert [line["t"] for line in lines if line["event"] == "group_sealed"] == [1090]
    assert [line["path"] for line in lines if line["event"] == "restore_started"] == ["rollout_0"]
    assert len({line["run"] for line in lines}) == 2
    assert all({"t", "run", "event"} <= set(line) for line in lines)


def test_every_kind_of_event_can_be_projected():
    """No event is silent (it is a sign of life), none breaks the projection; images are no event of the run's."""
    seen = set()
    projection = TraceProjection()
    for offset, event in enumerate(everything()):
        assert projection.feed(offset, event) or isinstance(event, (ev.CheckpointStarted, ev.RowsCleared))
        seen.add(type(event))
    assert len(seen) > 12


def test_json_lines(tmp_path):
    """One line per event, in order, nested parts by name."""
    run = write(tmp_path / "told", everything())
    lines = [json.loads(line) for line in export.json_of(run)]
    assert [line["event"] for line in lines] == [type(e).__name__ for e in everything()]
    sealed = next(line for line in lines if line["event"] == "AttemptSealed")
    assert sealed["receipt"]["weight_spans"] == [[0, 0, 0]]


def test_parquet_holds_the_tables(simulated, tmp_path):
    """Each file reads back with as many rows as the table has, and the same sums."""
    import duckdb

    counts = export.write_parquet(simulated, tmp_path / "out", events=True)
    assert set(counts) == {path.stem for path in (tmp_path / "out").iterdir()}
    assert counts["events"] == open_events(simulated).end_offset
    with open_database([simulated]) as database:
        told = database.query("SELECT count(*), sum(new_tokens)::BIGINT FROM attempts").rows
    read = duckdb.sql(
        f"SELECT count(*), sum(new_tokens)::BIGINT FROM '{tmp_path / 'out' / 'attempts.parquet'}'"
    ).fetchall()
    assert read == told
    with pytest.raises(export.ExportError, match="not an empty folder"):
        export.write_parquet(simulated, tmp_path / "out")


def test_the_timeline_nests(simulated, tmp_path):
    """Known phases, slices of one track never overlap in part, and every attempt is there."""
    with (tmp_path / "p.json").open("wb") as file:
        counts = export.write_perfetto(simulated, file)
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == counts["slices"]
    assert {e["ph"] for e in events} == {"X", "M"}
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} <= names
    tracks = {}
    for e in slices:
        assert e["dur"] >= 1
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for (pid, _), spans in tracks.items():
        if pid == 2:  # workers
            spans.sort()
            assert all(a[1] <= b[0] + 1 for a, b in pairwise(spans))
    with open_database([simulated]) as database:
        assert sum(e["pid"] == 2 for e in slices) == database.value("SELECT count(*) FROM attempts")


def test_nothing_is_written_into_a_run(simulated, tmp_path):
    """A target inside the run's folder is refused before anything is read."""
    with pytest.raises(export.ExportError, match="only read"):
        export.check_target(simulated, simulated / "events" / "x.json")
    (tmp_path / "link").symlink_to(simulated)
    with pytest.raises(export.ExportError, match="only read"):
        export.write_parquet(simulated, tmp_path / "link" / "out")
