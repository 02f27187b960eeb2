"""SQL over a long journal: loading, canned questions and the report at 10⁶ and 10⁷ events.

Beside it, the same run as a rollout trace of JSON lines, asked by DuckDB alone: the questions that can be put to such a
file with a few joins.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.synthetic_run import Shape, SyntheticRun, write_journal
from unlost.replay.database import MEMORY_LIMIT, open_database
from unlost.replay.export import trace_of
from unlost.replay.queries import QUERIES
from unlost.replay.report import gather
from unlost.replay.report_page import page

from . import child
from .result import Cell, Result, Table, Target, sig

TARGET_S = 15
TARGET_MB = 500

# What was thrown away by a stop (the trace's own rule), outcomes, and the busiest workers.
TRACE_QUESTIONS = {
    "thrown away by stops": """
        WITH d AS (SELECT prompt_id, generation_index, run, t FROM lines WHERE event = 'attempt_dispatched'),
             a AS (SELECT prompt_id, generation_index, run, t FROM lines
                   WHERE event = 'attempt_abandoned' AND reason = 'restart'),
             s AS (SELECT cut_time FROM lines WHERE event = 'snapshot_published'),
             hit AS (SELECT a.prompt_id, a.generation_index, a.t AS stopped, max(d.t) AS began FROM a JOIN d
                     ON d.prompt_id = a.prompt_id AND d.generation_index = a.generation_index AND d.t < a.t
                     GROUP BY ALL)
        SELECT count(*), sum(cut - began) FILTER (cut > began)
        FROM (SELECT hit.*, (SELECT max(cut_time) FROM s WHERE cut_time < hit.stopped) AS cut FROM hit)""",
    "outcomes": "SELECT event, count(*) FROM lines WHERE event LIKE 'attempt_%' GROUP BY ALL ORDER BY ALL",
    "seconds by sibling": """
        WITH d AS (SELECT group_id, generation_index, attempt, t FROM lines WHERE event = 'attempt_dispatched'),
             e AS (SELECT group_id, generation_index, attempt, t, event FROM lines
                   WHERE event IN ('attempt_sealed', 'attempt_failed', 'attempt_abandoned'))
        SELECT e.event, count(*), sum(e.t - d.t) FROM d JOIN e USING (group_id, generation_index, attempt)
        GROUP BY ALL""",
}
OURS = {
    "thrown away by stops": "SELECT count(*), sum(seconds_before_cut) FROM losses WHERE class = 'in_flight'",
    "outcomes": "SELECT outcome, count(*) FROM attempts GROUP BY ALL ORDER BY ALL",
    "seconds by sibling": "SELECT outcome, count(*), sum(seconds) FROM attempts GROUP BY ALL",
}


def make(folder: str, events: int) -> int:
    """Write the journal. Returns its events."""
    small = events < 200_000
    shape = Shape(
        seed=1, events=events, crashes=3, workers=4 if small else 32, slots=8 if small else 16,
        siblings=8, prompts_per_step=8 if small else 32, inflight_groups=32 if small else 128,
        worker_loss_every=50_000, lag=6, save_period=20, snapshot_s=300.0,
    )  # fmt: skip
    run = SyntheticRun(shape, keep_truth=False)
    write_journal(run, Path(folder))
    return run.state.offset


def load(folder: str, cache: bool) -> dict[str, Any]:
    """Seconds until the first question can be asked; then each canned question, and three that the trace gets too."""
    began = time.perf_counter()
    with open_database([folder], cache=cache) as database:
        loaded = time.perf_counter() - began
        seconds = {}
        for query in QUERIES:
            begin = time.perf_counter()
            database.query(query.sql)
            seconds[query.name] = time.perf_counter() - begin
        ours = {}
        for name, sql in OURS.items():
            begin = time.perf_counter()
            database.query(sql)
            ours[name] = time.perf_counter() - begin
        residues = database.value("SELECT count(*) FROM reconcile WHERE NOT ok")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "load_s": loaded,
        "queries": seconds,
        "ours": ours,
        "residues": residues,
        "loader_cpu_s": children.ru_utime + children.ru_stime,
        "loader_mb": children.ru_maxrss * 1024 / 1e6,
    }


def report(folder: str) -> dict[str, float]:
    """Seconds for the report's data and page, from the cached database; the page's size."""
    begin = time.perf_counter()
    with open_database([folder]) as database:
        data = gather(database, database.sources[0].run)
    gathered = time.perf_counter()
    text = page(data)
    return {"gather_s": gathered - begin, "page_s": time.perf_counter() - gathered, "mb": len(text.encode()) / 1e6}


def trace(folder: str, target: str) -> float:
    """Write the trace. Returns its size in MB."""
    with open(target, "wb") as file:
        file.writelines(trace_of(folder))
    return Path(target).stat().st_size / 1e6


def ask_trace(target: str) -> dict[str, float]:
    """DuckDB alone: load the lines into a table, then ask."""
    import duckdb

    begin = time.perf_counter()
    base = Path(target).parent
    connection = duckdb.connect(str(base / "trace.duckdb"))
    connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
    connection.execute(f"SET temp_directory = '{base / 'spill'}'")
    connection.execute(
        "CREATE TABLE lines AS SELECT * FROM read_json(?, format = 'newline_delimited', columns = {t: 'DOUBLE', "
        "run: 'VARCHAR', event: 'VARCHAR', prompt_id: 'VARCHAR', group_id: 'BIGINT', generation_index: 'BIGINT', "
        "attempt: 'BIGINT', reason: 'VARCHAR', cut_time: 'DOUBLE', tokens: 'BIGINT', worker: 'BIGINT'})",
        [target],
    )
    seconds = {"load": time.perf_counter() - begin}
    for name, sql in TRACE_QUESTIONS.items():
        begin = time.perf_counter()
        connection.execute(sql).fetchall()
        seconds[name] = time.perf_counter() - begin
    connection.close()
    return seconds


def run(quick: bool) -> Result:
    """See the module docstring."""
    sizes = (20_000,) if quick else (1_000_000, 10_000_000)
    loads: list[list[Cell]] = []
    beside: list[list[Cell]] = []
    queries: dict[str, list[float]] = {query.name: [] for query in QUERIES}
    base = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    last: dict[str, Any] = {}
    try:
        for size in sizes:
            last = _one(base / str(size), size, loads, beside, queries)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    rows: list[list[Cell]] = [[name, *(sig(s) for s in seconds)] for name, seconds in queries.items()]
    heads = [f"{size:,} events, s" for size in sizes]
    met = None if quick else last["load_s"] <= TARGET_S and last["peak_mb"] <= TARGET_MB
    measured = f"{sig(last['load_s'])} s, {last['peak_mb']:.0f} MB"
    return Result(
        name="postmortem",
        title="SQL, canned questions and report over a long journal",
        order=70,
        method=(
            "A simulated run with 32 workers, three kills, lost workers, failures, stale groups and checkpoints "
            "(`tests/synthetic_run.py`) is written as a journal. Loading ends when every table and view is there. "
            "Columns are made in one process per core, then DuckDB reads them; peak memory is the larger of all "
            "loading processes together and of the process that holds DuckDB. CPU seconds are of the loading processes."
            "\n\n"
            "The same run is written as a rollout trace; DuckDB alone reads it into one table and answers three "
            "questions that such a file allows."
        ),
        tables=[
            Table(
                "Loading and report",
                ["events", "load, s", "of it CPU of loaders, s", "peak memory, MB", "again, from the cache, s",
                 "report: data, s", "page, s", "page, MB", "sums that don't come out"],
                loads,
            ),
            Table("Canned questions, loaded", ["question", *heads], rows),
            Table(
                "Beside DuckDB over the trace",
                ["events", "what", "from the journal, s", "from the trace, s"],
                beside,
            ),
        ],
        limits=(
            "A simulated run: real ones have other shares of events. The trace's questions are fewer and looser: it "
            "knows no tokens' fate, no rollback and no bounds."
        ),
        targets=[
            Target("load 10 million events", f"≤ {TARGET_S} s in ≤ {TARGET_MB} MB on 2 cores", measured, met)
        ],
    )  # fmt: skip


def _one(
    folder: Path, size: int, loads: list[list[Cell]], beside: list[list[Cell]], queries: dict[str, list[float]]
) -> dict[str, Any]:
    events = child.run("benchmarks.postmortem:make", str(folder), size).value
    first = child.run("benchmarks.postmortem:load", str(folder), False)
    value = first.value
    child.run("benchmarks.postmortem:load", str(folder), True)  # fills the cache, where the size is worth it
    again = child.run("benchmarks.postmortem:load", str(folder), True).value
    told = child.run("benchmarks.postmortem:report", str(folder)).value
    peak_mb = max(first.peak_mb, 2 * value["loader_mb"])
    loads.append(
        [f"{events:,}", sig(value["load_s"]), sig(value["loader_cpu_s"]), f"{peak_mb:.0f}", sig(again["load_s"]),
         sig(told["gather_s"]), sig(told["page_s"]), sig(told["mb"]), value["residues"]]
    )  # fmt: skip
    for name, seconds in value["queries"].items():
        queries[name].append(seconds)
    target = folder / "trace.jsonl"
    child.run("benchmarks.postmortem:trace", str(folder), str(target))
    asked = child.run("benchmarks.postmortem:ask_trace", str(target)).value
    beside.append([f"{events:,}", "load", sig(value["load_s"]), sig(asked["load"])])
    beside.extend([f"{events:,}", name, sig(value["ours"][name]), sig(asked[name])] for name in OURS)
    return {"load_s": value["load_s"], "peak_mb": peak_mb}
