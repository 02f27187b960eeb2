"""A run in other formats: rollout trace, Parquet, JSON lines, and a timeline for Perfetto.

Everything is written to where the caller says, never into the run's folder. Traces and JSON are streamed; Parquet and
the timeline go through the SQL tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from ..journal.errors import EXIT_USAGE, UnlostError
from .database import Database, open_database
from .events import Event, StateImage
from .fold import open_events
from .tables import documented
from .trace import line_bytes, projection_at

EXPORTED: Final = tuple(name for name in documented() if name not in ("trace_lines", "events", "sources", "notes"))
"""Tables of ``write_parquet``; ``events`` is among them only if asked for: it is the whole journal as JSON text."""


class ExportError(UnlostError):
    """The target can't be written to, or lies in the run."""

    exit_code = EXIT_USAGE


def check_target(run: str | Path, target: str | Path) -> None:
    """Raises ExportError if ``target`` lies inside the run's folder: exports never write there."""
    inside = os.path.realpath(target)
    folder = os.path.realpath(run)
    if os.path.isdir(folder) and os.path.commonpath([inside, folder]) == folder:
        raise ExportError(f"{target}: lies in the run's folder, which is only read; choose another place")


def trace_of(run: str | Path) -> Iterator[bytes]:
    """The run as lines of a rollout trace (docs/trace.md), from its oldest kept event on."""
    reader = open_events(run)
    start = reader.first_offset
    projection = projection_at(reader, start)
    for offset, event in reader.events(start):
        for line in projection.feed(offset, event):
            yield line_bytes(line)


def json_of(run: str | Path) -> Iterator[bytes]:
    """The run's events, a JSON object a line: ``offset``, ``event``, the fields by name; of state images the size."""
    reader = open_events(run)
    encode = msgspec.json.Encoder(enc_hook=str).encode
    for offset, event in reader.events(reader.first_offset):
        yield encode({"offset": offset, "event": type(event).__name__} | _fields(event)) + b"\n"


def _fields(event: Event) -> dict[str, Any]:
    if isinstance(event, StateImage):
        return {"t": event.t, "state_bytes": len(event.state)}
    return {name: _plain(getattr(event, name)) for name in event.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def write_parquet(run: str | Path, folder: Path, *, events: bool = False) -> dict[str, int]:
    """One Parquet file per table, into a new or empty folder. Returns rows by table."""
    check_target(run, folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder}: is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    tables = (*EXPORTED, "events") if events else EXPORTED
    files = {table: folder / f"{table}.parquet" for table in tables}
    counts = {}
    with open_database([run], writable=list(files.values())) as database:
        for table, file in files.items():
            target = os.path.abspath(file).replace("'", "''")
            counts[table] = database.query(f"COPY {table} TO '{target}' (FORMAT parquet, COMPRESSION zstd)").rows[0][0]
    return counts


# --- Perfetto -------------------------------------------------------------------------------------------------------

_RUN_PID, _WORKERS_PID, _GROUPS_PID = 1, 2, 3
_GROUP_TRACKS_MAX: Final = 2_000


def write_perfetto(run: str | Path, file: IO[bytes]) -> dict[str, int]:
    """The run's timeline as Chrome trace-event JSON, which https://ui.perfetto.dev opens.

    A track per worker (one per slot that it used at once), a track per group, one each for trainer, checkpoints,
    weights and restarts. Of more than 2,000 groups, those with losses and then the slowest get a track. Returns counts.
    """
    counts = {"slices": 0, "groups": 0, "groups_left_out": 0}
    with open_database([run]) as database:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for event in _perfetto_events(database, counts):
            file.write((b"" if first else b",\n") + msgspec.json.encode(event))
            first = False
            counts["slices"] += event["ph"] == "X"
        file.write(b"\n]}\n")
    return counts


def _slice(pid: int, tid: int, name: str, start_s: float, end_s: float, /, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": round(start_s * 1e6),
        "dur": max(round((end_s - start_s) * 1e6), 1),
        "args": {key: value for key, value in args.items() if value is not None},
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _perfetto_events(database: Database, counts: dict[str, int]) -> Iterator[dict[str, Any]]:
    for pid, name in ((_RUN_PID, "run"), (_WORKERS_PID, "workers"), (_GROUPS_PID, "groups")):
        yield _name("process_name", pid, 0, name)
    yield from _run_tracks(database)
    yield from _worker_tracks(database)
    yield from _group_tracks(database, counts)


def _run_tracks(database: Database) -> Iterator[dict[str, Any]]:
    for tid, name in enumerate(("incarnations", "trainer", "checkpoints", "weights", "down"), 1):
        yield _name("thread_name", _RUN_PID, tid, name)
    for row in database.query("SELECT * FROM incarnations ORDER BY started_s").dicts():
        label = f"incarnation {row['incarnation']} ({row['ended'] or row['status']})"
        yield _slice(_RUN_PID, 1, label, row["started_s"], row["last_event_s"], host=row["host"], pid=row["pid"])
    for row in database.query("SELECT * FROM steps ORDER BY applied_s").dicts():
        begin = row["applied_s"] - (row["train_seconds"] or 0.0)
        if row["claimed_s"] is not None:
            begin = max(begin, row["claimed_s"])
        label = f"step {row['step']}" + (" (rolled back)" if row["rolled_back"] else "")
        yield _slice(
            _RUN_PID,
            2,
            label,
            begin,
            row["applied_s"],
            tokens=row["tokens"],
            loss=row["loss"],
            reward=row["reward_mean"],
        )
    for row in database.query("SELECT * FROM checkpoints WHERE ended_s IS NOT NULL ORDER BY cut_s").dicts():
        label = f"{row['kind']} {row['checkpoint']} {row['outcome']}"
        yield _slice(_RUN_PID, 3, label, row["cut_s"], row["ended_s"], cut=row["cut"], reason=row["reason"])
    for row in database.query("SELECT version, branch, t, seconds FROM raw.weights_synced ORDER BY t").dicts():
        end = row["t"] / 1e6
        yield _slice(_RUN_PID, 4, f"weights {row['branch']}.{row['version']}", end - row["seconds"], end)
    for row in database.query("SELECT * FROM restores ORDER BY started_s").dicts():
        begin = row["died_min_s"] if row["died_min_s"] is not None else row["started_s"]
        end = row["first_dispatch_s"] or row["completed_s"] or row["started_s"]
        yield _slice(_RUN_PID, 5, f"restart as {row['incarnation']}", begin, max(end, begin), counters=row["counters"])


def _outcome(row: dict[str, Any]) -> str:
    return str(row["lost_reason"] or row["reason"] or row["outcome"])


def _attempt_slice(pid: int, tid: int, row: dict[str, Any]) -> dict[str, Any]:
    return _slice(
        pid,
        tid,
        f"g{row['group_id']} s{row['sibling']} a{row['attempt']} {_outcome(row)}",
        row["dispatched_s"],
        row["ended_s"],
        tokens=row["tokens"],
        prefix=row["prefix"] or None,
        thrown_tokens=row["thrown_tokens"] or None,
        worker=row["worker"],
        cause=row["cause"],
        offset=row["dispatched_offset"],
    )


def _worker_tracks(database: Database) -> Iterator[dict[str, Any]]:
    """Attempts that overlap on a worker go to tracks of their own: slices of a track must nest."""
    slots: dict[int, list[float]] = {}
    tracks: dict[tuple[int, int], int] = {}
    for row in _attempts(database, "SELECT * FROM attempts ORDER BY dispatched_s, dispatched_offset"):
        ends = slots.setdefault(row["worker"], [])
        slot = next((i for i, end in enumerate(ends) if end <= row["dispatched_s"]), len(ends))
        if slot == len(ends):
            ends.append(0.0)
        ends[slot] = row["ended_s"]
        tid = tracks.setdefault((row["worker"], slot), len(tracks) + 1)
        if tid == len(tracks):
            yield _name("thread_name", _WORKERS_PID, tid, f"worker {row['worker']}, slot {slot}")
        yield _attempt_slice(_WORKERS_PID, tid, row)


def _group_tracks(database: Database, counts: dict[str, int]) -> Iterator[dict[str, Any]]:
    chosen = (
        "SELECT group_id FROM groups g LEFT JOIN (SELECT group_id, sum(seconds) AS lost FROM losses "
        "WHERE class NOT LIKE 'stale%' GROUP BY group_id) l USING (group_id) WHERE g.dispatched_s IS NOT NULL "
        "ORDER BY l.lost DESC NULLS LAST, complete_s - dispatched_s DESC NULLS LAST, group_id "
        f"LIMIT {_GROUP_TRACKS_MAX}"
    )
    total = database.value("SELECT count(*) FROM groups WHERE dispatched_s IS NOT NULL")
    counts["groups"] = min(total, _GROUP_TRACKS_MAX)
    counts["groups_left_out"] = total - counts["groups"]
    named: set[int] = set()
    sql = f"SELECT * FROM attempts WHERE group_id IN ({chosen}) ORDER BY group_id, sibling, attempt"
    for row in _attempts(database, sql):
        tid = row["group_id"] * 64 + row["sibling"] + 1
        if tid not in named:
            named.add(tid)
            yield _name("thread_name", _GROUPS_PID, tid, f"group {row['group_id']}, sibling {row['sibling']}")
        yield _attempt_slice(_GROUPS_PID, tid, row)


def _attempts(database: Database, sql: str) -> Iterator[dict[str, Any]]:
    """Rows as they come, never all at once."""
    cursor = database.connection.cursor().execute(sql)
    names = [column[0] for column in cursor.description]
    while rows := cursor.fetchmany(10_000):
        for row in rows:
            yield dict(zip(names, row, strict=True))
