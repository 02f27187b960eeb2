"""What SQL may be asked of: sources of every kind and quality, what is left out of them, and what a query may reach."""

import gzip
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zstandard

from tests.simulation.on_disk import to_disk
from tests.simulation.world import World, sim_config
from tests.synthetic_run import Shape, SyntheticRun, write_journal
from unlost.journal import JournalOptions, JournalWriter
from unlost.replay import database as databases
from unlost.replay import events as ev
from unlost.replay.database import SourceError, SqlError, find_sources, open_database
from unlost.replay.tables import INTERNAL, documented

from .postmortem_stories import everything, trace_example, write


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write(tmp_path_factory.mktemp("run") / "told", everything())


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_column_is_documented_and_no_other(run):
    """docs/sql.md speaks of exactly what is there."""
    with open_database([run]) as database:
        found = {}
        for table, column in database.query(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'main'"
        ).rows:
            found.setdefault(table, set()).add(column)
    told = {table: set(columns) for table, (_, columns) in documented().items()}

    assert {t: c for t, c in found.items() if t not in INTERNAL} == told
    assert all(text for _, columns in documented().values() for text in columns.values())


def test_raw_tables_hold_every_event_and_field(run):
    """One row per event of each kind; the events view lists them all in order, fields as JSON."""
    with open_database([run]) as database:
        events = database.query("SELECT event, event_offset FROM events ORDER BY event_offset").rows
        told = everything()
        assert [(type(e).__name__, i) for i, e in enumerate(told)] == events
        sealed = database.query("SELECT * FROM raw.attempt_sealed ORDER BY event_offset").dicts()
        assert [r["tokens"] for r in sealed] == [e.receipt.tokens for e in told if isinstance(e, ev.AttemptSealed)]
        assert sealed[2]["adopted"] == 1
        assert (
            database.value("SELECT fields->>'$.cause' FROM events WHERE event = 'AttemptFailed' ORDER BY 1")
            == "bad prompt"
        )
        assert database.value("SELECT content_hash FROM raw.batch_reserved_prompts LIMIT 1") == 9
        assert database.query("SELECT worker, tokens FROM raw.step_applied_generated ORDER BY ALL").rows == [
            (0, 130), (1, 100), (2, 41),
        ]  # fmt: skip


def test_content_hashes_use_all_64_bits(tmp_path):
    """An unsigned number above 2**63 comes back as it is."""
    told = [trace_example()[0], ev.BatchReserved(1, 0, 0, (ev.PromptRef("p", 0, 0, 2**64 - 5),), 1, 0, 1)]
    with open_database([write(tmp_path, told)]) as database:
        assert database.value("SELECT content_hash FROM raw.batch_reserved_prompts") == 2**64 - 5


@pytest.mark.parametrize("order", list(itertools.permutations(["x/a", "y/a", "z/a-2", "w/a-2"])))
def test_sources_of_one_name_are_told_apart(tmp_path, order):
    """However the numbered names collide with given ones; who comes first keeps the name."""
    for place in order:
        write(tmp_path / place, trace_example())
    found, _ = find_sources([tmp_path / place for place in order])
    names = [source.run for source in found]
    assert len(set(names)) == len(order)
    assert names[order.index(next(p for p in order if p.endswith("a")))] == "a"
    assert names[order.index(next(p for p in order if p.endswith("a-2")))] == "a-2"


def test_several_runs_and_globs_at_once(tmp_path):
    """Rows are told apart by the run's name; equal names get numbers."""
    for parent in ("a", "b"):
        write(tmp_path / parent / "run", trace_example())
    with open_database([str(tmp_path / "*" / "run")]) as database:
        assert database.query("SELECT run, incarnations FROM runs ORDER BY run").rows == [("run", 2), ("run-2", 2)]


def test_a_segment_by_itself(run, tmp_path):
    """A single file, anywhere; and with damage, what precedes it is answered and the rest is told."""
    segment = next((run / "events").glob("*.zst"))
    alone = Path(shutil.copy(segment, tmp_path / "copied.zst"))
    with open_database([alone]) as database:
        assert database.value("SELECT count(*) FROM events") == len(everything())
    content = alone.read_bytes()
    alone.write_bytes(content[:-3])
    with open_database([alone]) as database:
        assert database.value("SELECT count(*) FROM events") == 0
        assert any("left out" in note and "copied.zst" in note for note in database.notes)


def test_an_empty_run(tmp_path):
    """Answers are empty, not errors, and the notes say why."""
    JournalWriter.open(tmp_path / "events", ev.EVENT_TYPES, journal_id="empty").close()
    with open_database([tmp_path]) as database:
        assert database.value("SELECT count(*) FROM events") == 0
        assert database.query("FROM reconcile").rows == []
        assert any("holds no events" in note for note in database.notes)


@pytest.mark.parametrize("name", ["absent", "folder", "text.txt", "not_a_segment.zst"])
def test_what_is_no_source_is_named(tmp_path, name):
    """The error names the path."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "not_a_segment.zst").write_bytes(zstandard.compress(b"hello"))
    with pytest.raises(Exception, match=name) as raised:
        open_database([tmp_path / name])
    assert isinstance(raised.value, (SourceError, databases.UnlostError))


def test_a_live_run_is_read_beside_its_writer(tmp_path):
    """What is durable is answered while the writer holds the lock; more on the next look."""
    told = everything()
    with JournalWriter.open(tmp_path / "events", ev.EVENT_TYPES, journal_id="told") as writer:
        for event in told[:10]:
            writer.append(event)
        writer.sync()
        with open_database([tmp_path]) as database:
            assert database.value("SELECT max(event_offset) FROM events") == 9
            assert database.query("SELECT outcome, count(*) FROM attempts GROUP BY ALL ORDER BY 1").rows == [
                ("open", 3),
                ("sealed", 1),
            ]
        for event in told[10:]:
            writer.append(event)
        writer.sync()
        with open_database([tmp_path]) as database:
            assert database.value("SELECT max(event_offset) FROM events") == len(told) - 1


def _several_frames(folder, told):
    options = JournalOptions(frame_events_max=8)
    with JournalWriter.open(folder / "events", ev.EVENT_TYPES, journal_id="told", options=options) as writer:
        for event in told:
            writer.append(event)
    return next((folder / "events").glob("*.zst"))


def test_damage_and_torn_tails(tmp_path):
    """A flipped byte in durable frames: events before it are answered, the rest is told. A torn tail is told too."""
    segment = _several_frames(tmp_path / "damaged", everything())
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0x10
    segment.write_bytes(content)
    with open_database([tmp_path / "damaged"]) as database:
        count = database.value("SELECT count(*) FROM events")
        assert 0 < count < len(everything())
        assert count % 8 == 0
        assert any("left out" in note and segment.name in note for note in database.notes)

    segment = _several_frames(tmp_path / "torn", everything())
    with segment.open("ab") as file:
        file.write(b"\xff" * 40)
    with open_database([tmp_path / "torn"]) as database:
        assert database.value("SELECT count(*) FROM events") == len(everything())
        assert any("never durable" in note for note in database.notes)


class _Later(msgspec.Struct, frozen=True, array_like=True, tag=250):
    t: int


def test_events_of_other_versions(tmp_path):
    """Unknown kinds are counted and left out; fields that a kind did not have yet get their defaults."""

    class Older(msgspec.Struct, frozen=True, array_like=True, tag=7):  # GroupDiscarded before detail and requeued_as
        t: int
        group: int
        reason: str

    class Newer(msgspec.Struct, frozen=True, array_like=True, tag=21):  # CheckpointSkipped with a field to come
        t: int
        kind: str
        reason: str
        more: int

    with JournalWriter.open(tmp_path / "events", (_Later, Older, Newer), journal_id="mixed") as writer:
        writer.append(_Later(1))
        writer.append(Older(2, 5, "stale"))
        writer.append(Newer(3, "rollout", "why not", 7))
    with open_database([tmp_path]) as database:
        rows = database.query("SELECT group_id, reason, detail, requeued_as FROM raw.group_discarded").rows
        assert rows == [(5, "stale", "", -1)]
        assert database.query("SELECT kind, reason FROM raw.checkpoint_skipped").rows == [("rollout", "why not")]
        assert any("1 event(s) of tag 250" in note for note in database.notes)


def test_events_that_are_something_else(tmp_path):
    """Sound bytes with other fields than ours: an error that names run and offset, not a guess."""

    class Wrong(msgspec.Struct, frozen=True, array_like=True, tag=8):
        t: str

    with JournalWriter.open(tmp_path / "events", (Wrong,), journal_id="wrong") as writer:
        writer.append(Wrong("soon"))
    with pytest.raises(databases.UnlostError, match="not of the types"):
        open_database([tmp_path])


# --- what a query may reach -----------------------------------------------------------------------------------------


def test_queries_reach_neither_files_nor_settings(run, tmp_path):
    """Reading, writing, attaching, copying and undoing the lock are refused; --allow-external allows them."""
    other = tmp_path / "other.csv"
    other.write_text("a\n1\n")
    with open_database([run]) as database:
        for sql in (
            f"FROM '{other}'",
            f"COPY (SELECT 1) TO '{tmp_path / 'out.csv'}'",
            f"ATTACH '{tmp_path / 'x.db'}'",
            f"EXPORT DATABASE '{tmp_path / 'exported'}'",
            "SET enable_external_access = true",
            "SET memory_limit = '1TB'",
            f"SET temp_directory = '{tmp_path}'",
            "INSTALL httpfs",
        ):
            with pytest.raises(SqlError):
                database.query(sql)
    assert sorted(os.listdir(tmp_path)) == ["other.csv"]
    with open_database([run], allow_external=True) as database:
        assert database.value(f"SELECT a FROM '{other}'") == 1


def test_a_wrong_query_is_an_error_with_duckdbs_words(run):
    """Syntax and unknown names; no traceback's business."""
    with open_database([run]) as database, pytest.raises(SqlError, match="nothing_like_it"):
        database.query("SELECT nothing_like_it FROM runs")


def test_the_run_is_only_read_and_nothing_is_left_behind(run):
    """Not a byte of the run changes, and the temporary folder goes."""
    before = bytes_below(run)
    with open_database([run]) as database:
        database.query("FROM attempts")
        folder = database.folder
        assert folder.is_dir()
    assert bytes_below(run) == before
    assert not folder.exists()


# --- big ones -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    return write_journal(
        SyntheticRun(Shape(seed=9, events=5_000, crashes=2)), folder, JournalOptions(frame_events_max=700)
    )


@pytest.mark.slow
def test_parts_and_processes_change_nothing(simulated, monkeypatch):
    """In one part, in many (so that attempts straddle them), in one process or two: the same tables."""

    def answers(**options):
        with open_database([simulated], cache=False, **options) as database:
            return {
                table: sorted(
                    repr([round(v, 6) if isinstance(v, float) else v for v in row])
                    for row in database.query(f"FROM {table}").rows
                )
                for table in ("attempts", "groups", "losses", "reconcile", "events", "spans", "raw.attempt_sealed")
            }

    whole = answers(processes=1)
    monkeypatch.setattr("unlost.replay.parts.PART_EVENTS", 911)
    monkeypatch.setattr("unlost.replay.columns.ROWS_AT_ONCE", 100)
    assert answers(processes=1) == whole
    assert answers(processes=2) == whole


@pytest.mark.slow
def test_the_cache_is_used_until_the_run_grows(simulated, tmp_path, monkeypatch):
    """The same run again: from the cache, with its notes. A run that grew, or other code: loaded anew."""
    monkeypatch.setenv("UNLOST_CACHE", str(tmp_path))
    monkeypatch.setattr(databases, "CACHE_FROM_EVENTS", 100)
    monkeypatch.setattr("unlost.replay.database_cache.CACHE_FROM_EVENTS", 100)
    with open_database([simulated]) as database:
        first = database.query("FROM reconcile ORDER BY ALL").rows
    (kept,) = tmp_path.glob("*.duckdb")
    with monkeypatch.context() as patched:
        patched.setattr(databases, "load_part", None)
        with open_database([simulated]) as database:
            assert database.query("FROM reconcile ORDER BY ALL").rows == first
            with pytest.raises(SqlError):
                database.query("DROP TABLE groups")
            with pytest.raises(SqlError):
                database.query(f"COPY (SELECT 1) TO '{tmp_path / 'out.csv'}'")
    grown = shutil.copytree(simulated, tmp_path / "grown")
    with open_database([grown]):
        pass
    with JournalWriter.open(grown / "events", ev.EVENT_TYPES, journal_id="synthetic") as writer:
        writer.append(ev.RunStarted(10**12, "synthetic", 9, 0, "h", 1, {}, {}, {}))
    with open_database([grown]) as database:
        assert database.value("SELECT max(incarnation) FROM incarnations") == 9
    assert len(list(tmp_path.glob("*.duckdb"))) == 3
    assert kept.exists()


# --- traces as sources ----------------------------------------------------------------------------------------------


def test_compressed_traces(tmp_path):
    """Plain, gzip and zstd say the same, also several streams in one file."""
    from .postmortem_stories import TRACE_FILE

    text = TRACE_FILE.encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text))
    packed = zstandard.compress(text)
    (tmp_path / "c.jsonl.zst").write_bytes(packed + zstandard.compress(b'{"t":91,"run":"b2","event":"more"}\n'))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(text[:700]) + gzip.compress(text[700:]))
    with open_database([tmp_path / "*.jsonl*"]) as database:
        rows = database.query("SELECT run, count(*), max(t_s) FROM trace_lines GROUP BY ALL ORDER BY run").rows
        losses = database.query("SELECT run, seconds FROM losses WHERE class = 'in_flight' ORDER BY run").rows
        notes = database.notes
    assert rows == [("a", 15, 90), ("b", 15, 90), ("c", 16, 91), ("d", 15, 90)]
    assert losses == [("a", 40), ("b", 40), ("c", 40), ("d", 40)]
    assert not any("compressed data" in note for note in notes)


@pytest.mark.slow
def test_the_tools_run_where_only_the_core_is_installed(tmp_path):
    """No ray, torch, vLLM, TransferQueue, NumPy or Arrow: blocked from import, everything still answers.

    Over the folder of a run that the engine made, killed once: payload journals and checkpoints are in it.
    """
    world = World(sim_config())
    assert world.live(kill_at_s=3.0).killed
    world.live()
    target = to_disk(world, tmp_path / "run")
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        absent = 'ray torch vllm transfer_queue tensordict transformers numpy pyarrow pandas'.split()
        if name.split('.')[0] in absent:
            raise ImportError(name + ' is not installed here')
sys.meta_path.insert(0, Block())
from unlost.cli.main import run
target, out = sys.argv[1:]
for arguments in (
    ['--help'], ['replay', target], ['replay', target, '--group', '1'], ['verify', target], ['events', target],
    ['plan', target], ['checkpoints', target], ['prune', target], ['repair', target],
    ['config', target + '/config.yaml'],
    ['fork', target, out + '/forked', '--at-step', '4'],
    ['sql', target, '--query', 'waste'], ['report', target], ['report', target, '--html', out + '/r.html'],
    ['export', target, '--trace', '-o', out + '/t.jsonl'], ['export', target, '--perfetto', '-o', out + '/p.json'],
    ['export', target, '--parquet', '-o', out + '/tables'], ['sql', out + '/t.jsonl', 'FROM runs'],
    ['diff', target, '3', '9'], ['why', target], ['replay', target, '--at-time', '2.5'],
):
    code = run(arguments)
    assert code == 0, (arguments, code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(target), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").stat().st_size > 50_000
