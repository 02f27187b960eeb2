"""The commands sql, report, export, diff, why and replay's time travel, as people call them."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.replay.postmortem_stories import TRACE_FILE, everything, write
from unlost.cli.main import run
from unlost.replay import events as ev
from unlost.replay.queries import QUERIES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return write(tmp_path_factory.mktemp("run") / "told", everything())


def command(capsys, *args):
    code = run([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def squeezed(text):
    return [" ".join(line.split()) for line in text.splitlines()]


# --- sql ------------------------------------------------------------------------------------------------------------


def test_sql_prints_a_table(capsys, told):
    """Columns and rows, numbers as they are."""
    code, out, err = command(
        capsys, "sql", told, "SELECT outcome, count(*) AS n, sum(seconds) AS s FROM attempts GROUP BY ALL ORDER BY 1"
    )
    assert (code, err) == (0, "")
    assert squeezed(out) == ["outcome n s", "abandoned 2 27", "failed 2 8", "sealed 4 28"]


def test_sql_formats(capsys, told, tmp_path):
    """CSV and JSON on standard output, Parquet and CSV to a file."""
    sql = "SELECT group_id, status FROM groups ORDER BY 1"
    _, out, _ = command(capsys, "sql", told, sql, "--format", "csv")
    assert list(csv.reader(io.StringIO(out))) == [
        ["group_id", "status"], ["0", "trained"], ["1", "evicted"], ["2", "discarded"],
    ]  # fmt: skip
    _, out, _ = command(capsys, "sql", told, sql, "--format", "json")
    assert json.loads(out)[1] == {"group_id": 1, "status": "evicted"}
    for name, kind in (("out.parquet", "parquet"), ("out.csv", "csv"), ("out.json", "json")):
        code, out, _ = command(capsys, "sql", told, sql, "--format", kind, "--output", tmp_path / name)
        assert (code, out) == (0, "")
    import duckdb

    assert duckdb.sql(f"SELECT count(*) FROM '{tmp_path / 'out.parquet'}'").fetchall() == [(3,)]
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 4
    code, _, err = command(capsys, "sql", told, sql, "--format", "parquet")
    assert code == 2
    assert "--output" in err


def test_named_questions(capsys, told):
    """They are listed, and asked by name; an unknown one names the nearest."""
    code, out, _ = command(capsys, "sql", "--queries")
    assert code == 0
    assert all(query.name in out for query in QUERIES)
    code, out, _ = command(capsys, "sql", told, "--query", "waste", "--format", "json")
    assert {(row["resource"], row["waste"]) for row in json.loads(out)} >= {("generation", "crash"), ("wall", "crash")}
    code, _, err = command(capsys, "sql", told, "--query", "waist")
    assert code == 2
    assert "did you mean waste?" in err


def test_sql_errors_are_one_line(capsys, told, tmp_path):
    """A wrong query, a missing source, a forbidden file: exit code and one line, no traceback."""
    for arguments in (
        ["sql", told, "SELEC 1"],
        ["sql", told, "SELECT missing FROM runs"],
        ["sql", tmp_path / "absent", "FROM runs"],
        ["sql", told, f"COPY runs TO '{tmp_path / 'x.csv'}'"],
    ):
        code, out, err = command(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert err.startswith("unlost: ")
    assert command(capsys, "sql")[0] == 2


def test_notes_go_to_stderr(capsys, told, tmp_path):
    """What was left out is told, and does not mix with the answer."""
    (tmp_path / "t.jsonl").write_text(TRACE_FILE + '{"torn')
    code, out, err = command(capsys, "sql", tmp_path / "t.jsonl", "SELECT run FROM runs", "--format", "csv")
    assert (code, out.split()) == (0, ["run", "t"])
    assert "torn" in err


@pytest.mark.slow
def test_the_prompt(told, tmp_path):
    """Statements over several lines, dot commands, an error that does not end it; the history is kept."""
    typed = (
        "SELECT count(*) AS n\nFROM attempts;\n.tables\n.schema losses\n.query waste\n.nonsense\nSELECT oops;\n.quit\n"
    )
    pid, master = os.forkpty() if hasattr(os, "forkpty") else pytest.skip("needs a terminal")
    if pid == 0:
        os.environ["UNLOST_CACHE"] = str(tmp_path)
        os.environ["TERM"] = "dumb"
        os.environ["COLUMNS"] = "200"
        os.execv(sys.executable, [sys.executable, "-m", "unlost.cli", "sql", str(told)])
    os.write(master, typed.encode())
    out = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        out += piece
    _, status = os.waitpid(pid, 0)
    text = out.decode()
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert "batch_age" in text
    assert "thrown away for certain" in text
    assert "staleness" in text
    assert ".schema TABLE" in text
    assert "error: " in text
    assert "oops" in text
    assert (tmp_path / "sql_history").exists()


def test_sql_from_a_pipe(told):
    """Without a terminal the query may come on standard input."""
    done = subprocess.run(
        [sys.executable, "-m", "unlost.cli", "sql", str(told), "--format", "csv"],
        input="SELECT count(*) AS n FROM groups",
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["n", "3"]


# --- report and export ----------------------------------------------------------------------------------------------


def test_report_in_the_terminal_and_as_a_page(capsys, told, tmp_path):
    """The summary and the tables; JSON for programs; the page goes where it was told, never into the run."""
    code, out, _ = command(capsys, "report", told)
    assert code == 0
    assert "Everything adds up" in out
    assert any(line.startswith("generation in_flight 2 10.0") for line in squeezed(out)), out
    _, out, _ = command(capsys, "report", told, "--format", "json")
    assert json.loads(out)["run"]["kills"] == 1
    code, out, err = command(capsys, "report", told, "--html", tmp_path / "r.html")
    assert (code, out) == (0, "")
    assert "MB" in err
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    code, _, err = command(capsys, "report", told, "--html", told / "r.html")
    assert code == 2
    assert "only read" in err


def test_export_to_files_and_pipes(capsysbinary, told, tmp_path):
    """Trace and JSON stream to standard output or a file; one format at a time."""
    assert run(["export", str(told), "--json"]) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert len(lines) == len(everything())
    assert run(["export", str(told), "--trace", "-o", str(tmp_path / "t.jsonl")]) == 0
    assert (tmp_path / "t.jsonl").read_bytes().count(b"attempt_dispatched") == 8
    assert run(["export", str(told), "--perfetto", "-o", str(tmp_path / "p.json")]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert run(["export", str(told), "--parquet", "-o", str(tmp_path / "tables")]) == 0
    assert (tmp_path / "tables" / "losses.parquet").exists()
    for wrong in ([], ["--trace", "--json"], ["--parquet"]):
        assert run(["export", str(told), *wrong]) == 2


def _writes(told, place):
    """Every command that writes one file, writing to ``place``."""
    yield ["sql", told, "from runs", "--format", "csv", "-o", place]
    yield ["sql", told, "from runs", "--format", "parquet", "-o", place]
    yield ["sql", told, "--query", "waste", "-o", place]
    yield ["export", told, "--json", "-o", place]
    yield ["export", told, "--trace", "-o", place]
    yield ["export", told, "--perfetto", "-o", place]
    yield ["report", told, "--html", place]


def test_moments_that_are_none_are_one_line(capsys, told):
    """Neither numbers that are no time, nor dates that no clock shows, nor offsets the wrong way round."""
    for moment in (
        "inf",
        "-inf",
        "nan",
        "1e400",
        "-5",
        "yesterday",
        "0001-01-01T00:00:00",
        "9999-12-31T23:59:59+00:00",
    ):
        code, out, err = command(capsys, "replay", told, f"--at-time={moment}")
        if moment.startswith("9999"):
            assert code == 0
            continue
        assert (code, out) == (2, ""), moment
        assert len(err.splitlines()) == 1
    code, out, err = command(capsys, "diff", told, 9, 3)
    assert (code, out) == (2, "")
    assert "3 9" in err


def test_what_is_there_is_not_overwritten_unasked(capsys, told, tmp_path):
    """Refused before any work, naming the remedy; replaced as a whole when asked."""
    there = tmp_path / "there"
    for number in range(7):
        there.write_text("mine")
        args = list(_writes(told, there))[number]
        code, out, err = command(capsys, *args)
        assert (code, out) == (2, ""), args
        assert "--overwrite" in err
        assert there.read_text() == "mine"
        code, out, _ = command(capsys, *args, "--overwrite")
        assert (code, out) == (0, ""), args
        assert there.read_bytes()[:4] != b"mine"
    assert [file.name for file in tmp_path.iterdir() if "there" in file.name] == ["there"]


@pytest.mark.parametrize("where", ["a missing folder", "a folder", "the run", "the source"])
def test_a_place_that_cannot_be_written_is_one_line(capsys, told, tmp_path, where):
    """A folder that is not there, one that is, the run's own folder: exit code 2, and the run as it was."""
    if where == "the source":
        trace = tmp_path / "t.jsonl"
        assert run(["export", str(told), "--trace", "-o", str(trace)]) == 0
        before = trace.read_bytes()
        for source in (trace, tmp_path / "*.jsonl"):
            code, _, err = command(capsys, "sql", source, "from runs", "-o", trace, "--overwrite")
            assert (code, trace.read_bytes()) == (2, before)
            assert "what is read" in err
        return
    place = {"a missing folder": tmp_path / "no" / "x", "a folder": tmp_path, "the run": told / "config.yaml"}[where]
    before = sorted(told.rglob("*"))
    for args in _writes(told, place):
        code, out, err = command(capsys, *args, "--overwrite")
        assert (code, out) == (2, ""), args
        assert str(place) in err
        assert len(err.splitlines()) == 1
    assert sorted(told.rglob("*")) == before


@pytest.mark.slow
def test_a_query_that_fails_leaves_what_was_there(capsys, told, tmp_path):
    """The old result stays, and no half of the new one beside it."""
    old = tmp_path / "old.csv"
    old.write_text("mine")
    for kind in ("csv", "json", "table", "parquet"):
        code, _, _ = command(capsys, "sql", told, "SELECT bogus", "--format", kind, "-o", old, "--overwrite")
        assert code == 2
    assert old.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [old]


def test_a_link_is_followed_and_what_it_names_is_replaced(capsys, told, tmp_path):
    """It stays a link, also one to a file that is not there yet; a link to the source is refused as the source."""
    place, link = tmp_path / "place", tmp_path / "link"
    link.symlink_to(place)
    for flags in ([], ["--overwrite"]):
        code, _, _ = command(capsys, "sql", told, "from runs", "--format", "csv", "-o", link, *flags)
        assert code == 0
        assert link.readlink() == place
        assert place.read_text().startswith("run,")
        place.write_text("old")
    code, _, err = command(capsys, "sql", place, "from runs", "-o", link, "--overwrite")
    assert (code, place.read_text()) == (2, "old")
    assert "what is read" in err


@pytest.mark.slow
def test_pipes_and_devices_are_written_as_they_are(capsys, told):
    """/dev/null is no file to be replaced."""
    for args in _writes(told, "/dev/null"):
        assert command(capsys, *args)[0] == 0
    assert Path("/dev/null").is_char_device()


# --- time travel ----------------------------------------------------------------------------------------------------


def test_replay_at_a_time_and_before_an_incarnation(capsys, told):
    """Both are the state at an offset; only one way of saying it at a time."""
    _, out, _ = command(capsys, "replay", told, "--before-incarnation", 2, "--format", "json")
    state = json.loads(out)
    assert (state["trainer"]["version"], state["open_attempts"]) == (1, 3)
    assert command(capsys, "replay", told, "--at-time", "25", "--format", "json")[1] == out
    code, _, err = command(capsys, "replay", told, "--at", 3, "--at-time", "25")
    assert code == 2
    assert "one of" in err


def test_the_life_of_a_group(capsys, told):
    """From its reservation to its eviction, with ages; in JSON with all fields; an unknown group is an error."""
    _, out, _ = command(capsys, "replay", told, "--group", 1, "--format", "json")
    names = [line["event"] for line in json.loads(out)]
    assert names[:2] == ["BatchReserved", "BatchAdmitted"]
    assert names[-1] == "GroupEvicted"
    assert names.count("AttemptDispatched") == 3
    _, out, _ = command(capsys, "replay", told, "--group", 1)
    assert any(line.startswith("40 55.000 +54.000 GroupEvicted") or "GroupEvicted" in line for line in squeezed(out))
    code, _, err = command(capsys, "replay", told, "--group", 99)
    assert code == 2
    assert "group 99" in err


def test_diff(capsys, told):
    """What the restore changed, for people and for programs."""
    kill = next(i for i, e in enumerate(everything()) if isinstance(e, ev.StepApplied))
    done = next(i for i, e in enumerate(everything()) if isinstance(e, ev.RestoreCompleted))
    code, out, _ = command(capsys, "diff", told, kill, done)
    assert code == 0
    lines = squeezed(out)
    assert "trainer_version 1 0" in lines
    assert "trained committed 1 0" in lines
    assert "dispatched idle 2" in lines
    _, out, _ = command(capsys, "diff", told, kill, done, "--format", "json")
    assert json.loads(out)["changed"]["branch"] == {"from": 0, "to": 1}
    assert command(capsys, "diff", told, 0, 10_000)[0] == 2


def test_why(capsys, told):
    """An ended run says so first, in both formats."""
    code, out, _ = command(capsys, "why", told)
    assert code == 0
    assert "the run has ended" in out
    _, out, _ = command(capsys, "why", told, "--format", "json")
    assert json.loads(out)["findings"][0]["what"] == "the run has ended"


def test_help_loads_none_of_it(told):
    """`unlost --help` imports neither DuckDB nor Jinja nor the journal."""
    code = (
        "import sys; from unlost.cli.main import run; run(['--help']); "
        "bad = {'duckdb', 'jinja2', 'unlost.replay.database', 'unlost.journal.reader'} & set(sys.modules); "
        "sys.exit(bool(bad))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
