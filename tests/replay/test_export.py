"""Exports: what they hold is what the journal holds, and none goes into the run's folder."""

import json
import logging
from itertools import pairwise

import pytest

from tests.simulation import run as simulation
from tests.simulation.draw import draw
from tests.simulation.on_disk import to_disk
from tests.synthetic_run import Shape, SyntheticRun, write_journal
from unlost.replay import events as ev
from unlost.replay import export
from unlost.replay.database import open_database
from unlost.replay.fold import open_events
from unlost.replay.tables import documented
from unlost.replay.trace import TraceProjection

from .postmortem_stories import everything, trace_example, write


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return write_journal(SyntheticRun(Shape(seed=11, events=1_500, crashes=2)), tmp_path_factory.mktemp("simulated"))


# --- a trace against its journal --------------------------------------------------------------------------------------

_OWN_TABLES = {"throughput", "events", "trace_lines", "sources", "unread", "notes"}
"""Of the source as such; and bins of time begin elsewhere on another clock."""
_OWN_COLUMNS = {"path", "source", "events", "cut"}
_RATES = ("_per_s", "_wall_s", "busy_s", "width_s")


def told_alike(database, pairs):
    """Every other table has the same rows for journal and trace, but for offsets.

    Moments count from the start, as a trace's are Unix times.
    """
    starts = dict(database.query("SELECT run, min(started_s) FROM incarnations GROUP BY run").rows)
    for table, (_, columns) in documented().items():
        chosen = [c for c in columns if c not in _OWN_COLUMNS and c != "run" and not c.endswith("offset")]
        if table in _OWN_TABLES:
            continue
        moments = [c.endswith("_s") and not c.endswith(_RATES) for c in chosen]
        found = {run: [] for run in starts}
        for run, *row in database.query(f"SELECT run, {', '.join(chosen)} FROM {table}").rows:
            start = starts[run]
            found[run].append([v - start if at and v is not None else v for v, at in zip(row, moments, strict=True)])
        for rows in found.values():
            rows.sort(key=lambda row: repr([round(v, 2) if isinstance(v, float) else v for v in row]))
        for journal, trace in pairs:
            assert len(found[journal]) == len(found[trace]), (journal, table)
            for expected, row in zip(found[journal], found[trace], strict=True):
                for column, one, other in zip(chosen, expected, row, strict=True):
                    alike = (
                        isinstance(one, float) and isinstance(other, float) and (abs(one - other) < 1e-5 or one != one)
                    )
                    assert one == other or alike, (journal, table, column, expected, row)


def test_a_trace_says_what_the_journal_says(simulated, tmp_path):
    """Every table is the same from the exported trace, on a run with kills and losses."""
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"".join(export.trace_of(simulated)))
    with open_database([simulated, trace]) as database:
        assert database.notes == []
        assert database.value("SELECT count(DISTINCT class) FROM losses") > 6
        told_alike(database, [(simulated.name, "trace")])


SEEDS, MORE = (2, 5, 8), (15, 23, 25, 36, 55, 57, 14, *range(100, 125))
"""Of runs whose prompts come round several times, are requeued, replaced, shared out and trained again."""


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_traces_of_drawn_runs_say_what_their_journals_say(seeds, tmp_path, monkeypatch):
    """Whatever happens to a run, crashes, troubles and restores: no table knows whether it was a journal or a trace."""
    watches = []
    monkeypatch.setattr(
        simulation, "prepare", lambda case, kept=simulation.prepare: watches.append(kept(case)) or watches[-1]
    )
    logging.disable(logging.CRITICAL)  # scripted failures are loud
    try:
        for seed in seeds:
            simulation.run_case(draw(seed))
    finally:
        logging.disable(logging.NOTSET)
    paths = []
    for seed, watch in zip(seeds, watches, strict=True):
        run, trace = to_disk(watch.world, tmp_path / f"s{seed}"), tmp_path / f"t{seed}.jsonl"
        trace.write_bytes(b"".join(export.trace_of(run)))
        paths += [run, trace]
    for some in (paths[i : i + 40] for i in range(0, len(paths), 40)):
        with open_database(some) as database:
            assert [note for note in database.notes if ".jsonl" in note] == []
            told_alike(database, [(run.name, trace.stem) for run, trace in zip(some[::2], some[1::2], strict=True)])
            assert database.value("SELECT count(*) FROM reconcile WHERE NOT ok") == 0
            assert database.value("SELECT count(*) FROM steps WHERE rolled_back") > 0
            assert database.value("SELECT count(*) FROM groups WHERE requeued_as IS NOT NULL OR kind = 'spare'") > 0


# --- lines ----------------------------------------------------------------------------------------------------------


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
