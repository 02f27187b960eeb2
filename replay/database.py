"""A DuckDB database over runs and traces: what ``unlost sql`` and the report ask.

Promises: sources are only read, also beside a running run. What could not be read is told in ``notes``, and the rest
is answered. Unless asked otherwise, a query can neither write a file nor read one that is not a source. Memory stays
within ``memory_limit`` plus the loading processes; what does not fit lies in a temporary folder, removed at ``close``.

Journals of ``CACHE_FROM_EVENTS`` events or more are kept as a DuckDB file in the user's cache folder
(``$UNLOST_CACHE``, else ``$XDG_CACHE_HOME/unlost``, else ``~/.cache/unlost``), named after what they were made of; the
newest ``CACHE_FILES_MAX`` stay.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from ..journal.errors import EXIT_USAGE, JournalDamaged, JournalMissing, UnlostError
from . import parts as loading
from .bounds import KEYS, Unheard, configured, unheard
from .columns import EVENT_TABLES, table_columns
from .database_cache import CACHE_FROM_EVENTS, cache_file, keep
from .fold import EVENTS_FOLDER, open_events
from .pairing import MERGED, merged_views, pair_attempts
from .parts import Part, PartResult, load_part, segment_frames
from .pruned import Opening, load_image

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

MEMORY_LIMIT: Final = "320MB"
_TRACE_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_PROCESSES_MAX: Final = 8
_SMALL_FILES_BYTES: Final = 20 << 20


class SqlError(UnlostError):
    """A query that DuckDB refuses, in its words."""

    exit_code = EXIT_USAGE


class SourceError(UnlostError):
    """A source that is none: absent, or neither a run, a segment nor a trace."""

    exit_code = EXIT_USAGE


@dataclass(slots=True)
class Source:
    """Something to query. ``kind``: run, segment or trace. ``run`` is its name in the column ``run``.

    ``from_image``: its journal begins with a state image, since what was before was pruned, or the run is a fork.
    """

    path: str
    kind: str
    run: str
    start: int = 0
    stop: int = 0
    stamp: str = ""
    from_image: bool = False


@dataclass(slots=True)
class Rows:
    """A query's result. ``types``: DuckDB's names of the column types."""

    columns: list[str]
    types: list[str]
    rows: list[tuple[Any, ...]]

    def dicts(self) -> list[dict[str, Any]]:
        """Rows by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(slots=True)
class Database:
    """Loaded sources. Use as a context manager, or ``close`` it."""

    connection: duckdb.DuckDBPyConnection
    sources: list[Source]
    notes: list[str]
    folder: Path | None
    _closed: bool = field(default=False)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """Run one or several statements; the last one's rows. Raises SqlError."""
        import duckdb

        try:
            cursor = self.connection.execute(sql, list(parameters)) if parameters else self.connection.execute(sql)
            if cursor.description is None:
                return Rows([], [], [])
            return Rows([d[0] for d in cursor.description], [str(d[1]) for d in cursor.description], cursor.fetchall())
        except duckdb.Error as error:
            raise SqlError(_one_error(str(error))) from error

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """The first column of the first row; None if there is none."""
        rows = self.query(sql, parameters).rows
        return rows[0][0] if rows else None

    def close(self) -> None:
        """Let go of the database and its temporary files."""
        if self._closed:
            return
        self._closed = True
        self.connection.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _one_error(text: str) -> str:
    """DuckDB's message without its class prefix doubled and without the caret lines' padding."""
    return re.sub(r"\n{2,}", "\n", text.strip())


def open_database(
    paths: Sequence[str | Path],
    *,
    allow_external: bool = False,
    writable: Sequence[str | Path] = (),
    cache: bool = True,
    memory_limit: str = MEMORY_LIMIT,
    processes: int | None = None,
) -> Database:
    """Load run folders (live ones too), event segments and traces, or globs of them, and build the views.

    ``writable``: files that a query may write all the same (for ``COPY … TO``). ``allow_external``: no restrictions.
    Raises SourceError, ColumnsError, and what a journal raises that can't be opened.
    """
    folder = Path(tempfile.mkdtemp(prefix="unlost-sql-"))
    try:
        sources, notes = find_sources(paths)
        kept = cache_file(sources) if cache else None
        if kept is not None and kept.exists():
            connection = _connect(kept, folder, memory_limit, read_only=True)
            with contextlib.suppress(OSError):
                os.utime(kept)
            notes = [row[0] for row in connection.execute("SELECT note FROM notes ORDER BY position").fetchall()]
        else:
            made = folder / "database"
            connection = _connect(":memory:" if _is_small(sources) else made, folder, memory_limit)
            connection.execute("BEGIN")
            connection.execute("CREATE TABLE notes (position BIGINT, note VARCHAR)")
            notes += _load(connection, sources, folder, processes)
            for position, note in enumerate(notes):
                connection.execute("INSERT INTO notes VALUES (?, ?)", [position, note])
            connection.execute("COMMIT")
            if kept is not None:
                connection.close()
                connection = _connect(keep(made, kept), folder, memory_limit, read_only=True)
        if not allow_external:
            _restrict(connection, writable)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Database(connection, sources, notes, folder)


def _is_small(sources: Sequence[Source]) -> bool:
    """Whether everything fits into memory with ease: then no database file is written at all."""
    events = sum(source.stop - source.start for source in sources)
    files = sum(os.path.getsize(source.path) for source in sources if source.kind != "run")
    return events < CACHE_FROM_EVENTS and files < _SMALL_FILES_BYTES


def _connect(
    path: Path | str, folder: Path, memory_limit: str, *, read_only: bool = False
) -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect(str(path), read_only=read_only)
    connection.execute(f"SET memory_limit = '{memory_limit}'")
    connection.execute(f"SET temp_directory = {_quoted(str(folder / 'spill'))}")
    for setting in ("autoinstall_known_extensions", "autoload_known_extensions", "enable_progress_bar"):
        connection.execute(f"SET {setting} = false")
    return connection


def _restrict(connection: duckdb.DuckDBPyConnection, writable: Sequence[str | Path]) -> None:
    """From here on SQL reaches no file but ``writable``, and can't change that."""
    if writable:
        listed = ", ".join(_quoted(os.path.abspath(path)) for path in writable)
        connection.execute(f"SET allowed_paths = [{listed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# --- sources --------------------------------------------------------------------------------------------------------


def find_sources(paths: Sequence[str | Path]) -> tuple[list[Source], list[str]]:
    """What the paths and globs name, each once, with names for the column ``run``. Raises SourceError."""
    found: dict[str, Source] = {}
    notes: list[str] = []
    for given in paths:
        for path in _expand(str(given)):
            source = _source(path, notes)
            found.setdefault(os.path.realpath(source.path), source)
    names = {source.run for source in found.values()}
    taken: set[str] = set()
    for source in found.values():
        if source.run in taken:
            numbered = (f"{source.run}-{number}" for number in itertools.count(2))
            source.run = next(name for name in numbered if name not in names)
            names.add(source.run)
        taken.add(source.run)
    return list(found.values()), notes


def _expand(path: str) -> list[str]:
    if os.path.exists(path):
        return [path]
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise SourceError(f"{path}: there is no such run folder, segment or trace, and no file matches it as a pattern")
    return matches


def _source(path: str, notes: list[str]) -> Source:
    name = os.path.basename(os.path.abspath(path))
    if os.path.isdir(path):
        if not os.path.isdir(os.path.join(path, EVENTS_FOLDER)) and name == EVENTS_FOLDER:
            path = os.path.dirname(os.path.abspath(path))
            name = os.path.basename(path)
        return _run_source(path, name, notes)
    for suffix in _TRACE_SUFFIXES:
        if name.endswith(suffix):
            return Source(path, "trace", name.removesuffix(suffix), stamp=_stamp(path))
    if name.endswith(".zst"):
        with contextlib.suppress(
            JournalDamaged
        ):  # told when it is loaded; here it matters whether it is a segment at all
            if next(segment_frames(path), None) is None:
                notes.append(f"{path}: the segment holds no frame")
        return Source(path, "segment", name.removesuffix(".zst"), stamp=_stamp(path))
    raise SourceError(
        f"{path}: neither a run folder, an event segment (.zst) nor a trace (.jsonl, .jsonl.gz, .jsonl.zst)"
    )


def _stamp(path: str) -> str:
    stat = os.stat(path)
    return f"{stat.st_size}/{stat.st_mtime_ns}"


def _run_source(path: str, name: str, notes: list[str]) -> Source:
    try:
        reader = open_events(path)
    except JournalMissing as error:
        raise SourceError(f"{error}. Give a run's folder, an event segment or a rollout trace") from error
    segments = reader.segments()
    # Beyond what the headers promise, damage ends a part early; the length of the journal is only an upper bound here.
    stop = _end_of(reader, notes)
    if reader.first_offset:
        notes.append(
            f"{path}: the journal begins at offset {reader.first_offset}; what was before was pruned, so sums over "
            f"the whole run lack it"
        )
    notes += [f"{path}: {note}" for note in reader.notes]
    if stop <= reader.first_offset:
        notes.append(f"{path}: the journal holds no events")
    stamp = f"{reader.journal_id}/{stop}/" + ",".join(f"{s.name}:{s.size}" for s in segments)
    from_image = reader.first_offset > 0 or any(s.starts_with_image for s in segments[:1])
    return Source(path, "run", name, reader.first_offset, stop, stamp, from_image)


def _end_of(reader: Any, notes: list[str]) -> int:
    try:
        end: int = reader.end_offset
    except JournalDamaged as error:
        return error.offset
    if reader.tail is not None:
        tail = reader.tail
        notes.append(
            f"{reader.directory}/{tail.segment}: the last {tail.length_bytes} bytes were never durable and are left "
            f"out ({tail.reason})"
        )
    return end


# --- loading --------------------------------------------------------------------------------------------------------


def _load(
    connection: duckdb.DuckDBPyConnection, sources: Sequence[Source], folder: Path, processes: int | None
) -> list[str]:
    parts_folder = folder / "parts"
    parts_folder.mkdir()
    notes: list[str] = []
    parts: list[tuple[Source, Part]] = []
    begun: dict[str, list[Opening]] = {}
    for number, source in enumerate(sources):
        if source.from_image:
            begun[source.run], more = load_image(source.path, parts_folder, f"{number}-begin")
            notes += more
        if source.kind == "trace":
            from .trace_events import load_trace

            notes += load_trace(source.path, parts_folder, f"{number}-0")
        elif source.kind == "segment":
            parts.append((source, Part(source.path, 0, 1 << 62, str(parts_folder), f"{number}-0")))
        else:
            starts = range(source.start, source.stop, loading.PART_EVENTS)
            parts += [
                (
                    source,
                    Part(
                        source.path,
                        start,
                        min(start + starts.step, source.stop),
                        str(parts_folder),
                        f"{number}-{i:06d}",
                    ),
                )
                for i, start in enumerate(starts)
            ]
    unread: list[tuple[str, int, int | None, str]] = []
    for (source, part), result in _run_parts(parts, processes):
        notes += _part_notes(source, part, result)
        if result.problem:
            last = part.stop - 1 if source.kind == "run" else None
            unread.append((source.run, result.end, last, result.problem))
    _create_raw(connection, sources, parts_folder)
    connection.execute("CREATE TABLE unread (run run_name, first_offset BIGINT, last_offset BIGINT, problem VARCHAR)")
    for row in unread:
        connection.execute("INSERT INTO unread VALUES (?, ?, ?, ?)", list(row))
    _create_views(connection, sources, begun)
    shutil.rmtree(parts_folder)
    return notes


def _part_notes(source: Source, part: Part, result: PartResult) -> Iterator[str]:
    if result.problem:
        last = "the end of the file" if source.kind == "segment" else str(part.stop - 1)
        yield f"{source.path}: events {result.end} to {last} are left out: {result.problem}"
    for tag, count in sorted(result.unknown.items()):
        yield f"{source.path}: {count} event(s) of tag {tag}, which this release does not know, are left out"


def _run_parts(
    parts: Sequence[tuple[Source, Part]], processes: int | None
) -> Iterator[tuple[tuple[Source, Part], PartResult]]:
    count = processes if processes is not None else min(os.cpu_count() or 1, _PROCESSES_MAX)
    if count <= 1 or len(parts) <= 1:
        for item in parts:
            yield item, load_part(item[1])
        return
    import multiprocessing

    # Not fork: the caller may have threads (DuckDB has), and a forked child would wait for locks that no one lets go.
    with ProcessPoolExecutor(min(count, len(parts)), multiprocessing.get_context("spawn")) as pool:
        yield from zip(parts, pool.map(load_part, [part for _, part in parts]), strict=True)


def _create_raw(connection: duckdb.DuckDBPyConnection, sources: Sequence[Source], folder: Path) -> None:
    """The raw tables from the Parquet files; a table without a file is there, and empty."""
    connection.execute("CREATE SCHEMA raw")
    # A small integer that reads as text.
    connection.execute(f"CREATE TYPE run_name AS ENUM ({', '.join(_quoted(source.run) for source in sources)})")
    files: dict[str, dict[str, str]] = {}
    runs: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        table, part, _ = file.name.split(".")
        files.setdefault(table, {})[part] = str(file)
        runs[part] = f"{_quoted(sources[int(part.split('-')[0])].run)}::run_name"
    for table, columns in table_columns().items():
        if table in MERGED:
            continue
        typed = ", ".join(f'NULL::{column.type} AS "{column.name}"' for column in columns)
        selects = [f"SELECT NULL::run_name AS run, {typed} WHERE false"]
        by_run: dict[str, list[str]] = {}
        for part, path in files.get(table, {}).items():
            by_run.setdefault(runs[part], []).append(path)
        for run, paths in by_run.items():
            selects.append(f"SELECT {run}, * FROM read_parquet([{', '.join(map(_quoted, paths))}])")
        connection.execute(f"CREATE TABLE raw.{table} AS {' UNION ALL '.join(selects)}")
    pair_attempts(connection, runs, files)


def _create_views(
    connection: duckdb.DuckDBPyConnection, sources: Sequence[Source], begun: Mapping[str, Sequence[Opening]]
) -> None:
    connection.execute("CREATE TABLE sources (run run_name, path VARCHAR, kind VARCHAR)")
    connection.execute("CREATE TABLE bounds (run run_name, chunks BIGINT, response BIGINT)")
    for source in sources:
        connection.execute("INSERT INTO sources VALUES (?, ?, ?)", [source.run, source.path, source.kind])
        connection.execute("INSERT INTO bounds VALUES (?, ?, ?)", [source.run, *_unheard(connection, source)])
    connection.execute(f"CREATE MACRO life_of(r, o) AS {_life_expression(connection)}")
    connection.execute(f"CREATE MACRO incarnation_before(r, o) AS {_before_expression(begun)}")
    sections = dict(view_sections())
    connection.execute(sections.pop("attempt_rows"))
    for sql in merged_views():
        connection.execute(sql)
    index = " UNION ALL ".join(
        f"SELECT run, event_offset, t, '{table.event.__name__}' AS event FROM raw.{table.name}"
        for table in EVENT_TABLES
    )
    connection.execute(f"CREATE VIEW event_index AS {index}")
    connection.execute(f"CREATE VIEW events AS {_events_sql()}")
    for sql in sections.values():
        connection.execute(sql)
    connection.execute("DROP TABLE single_dispatched")


def _life_expression(connection: duckdb.DuckDBPyConnection) -> str:
    """Which opening of run ``r`` (1, 2, …) the event at offset ``o`` belongs to.

    Written out as comparisons: for millions of rows and few openings that is many times as fast as a join on ranges.
    """
    starts: dict[str, list[int]] = {}
    for run, offset in connection.execute("SELECT run, event_offset FROM raw.run_started ORDER BY ALL").fetchall():
        starts.setdefault(run, []).append(offset)
    cases = [
        f"WHEN {_quoted(run)} THEN " + " + ".join(f"(o >= {offset})::BIGINT" for offset in offsets)
        for run, offsets in starts.items()
    ]
    return f"CASE r {' '.join(cases)} END" if cases else "NULL::BIGINT"


def _before_expression(begun: Mapping[str, Sequence[Opening]]) -> str:
    """The incarnation of an event ``o`` below 0: one that a state image tells of."""
    cases = [
        f"WHEN r = {_quoted(run)} AND o < 0 AND o >= {opening.first_offset} AND {opening.incarnation} > 0 "
        f"THEN {opening.incarnation}"
        for run, openings in begun.items()
        for opening in reversed(openings)
    ]
    return f"CASE {' '.join(cases)} END" if cases else "NULL::BIGINT"


def _events_sql() -> str:
    """Every event with its fields as JSON, made when asked for."""
    selects = []
    for table in EVENT_TABLES:
        names = {column.name for column in table.columns}
        keys = [name if name in names else f"NULL::BIGINT AS {name}" for name in ("group_id", "sibling", "attempt")]
        body = ", ".join(f"{name} := {name}" for name in (f'"{c.name}"' for c in table.columns[2:])) or "t := t"
        selects.append(
            f"SELECT run, event_offset, t / 1e6 AS t_s, '{table.event.__name__}' AS event, {', '.join(keys)}, "
            f"to_json(struct_pack({body})) AS fields FROM raw.{table.name} WHERE event_offset >= 0"
        )
    return " UNION ALL ".join(selects)


def view_sections() -> list[tuple[str, str]]:
    """``(name, SQL)`` of views.sql, in the order in which they must be created."""
    text = resources.files(__package__).joinpath("views.sql").read_text(encoding="utf-8")
    found = re.split(r"^-- @(\w+).*\n", text, flags=re.MULTILINE)[1:]
    return list(zip(found[::2], found[1::2], strict=True))


def _unheard(connection: duckdb.DuckDBPyConnection, source: Source) -> Unheard:
    """From the recorded settings; what an older journal does not record, from the run's config.yaml."""
    import msgspec

    started = connection.execute("SELECT DISTINCT settings FROM raw.run_started WHERE run = ?", [source.run]).fetchall()
    recorded = [msgspec.json.decode(row[0]) for row in started] or [{}]
    lacking = any(key not in each for each in recorded for key in KEYS)
    more = configured(Path(source.path)) if lacking and source.kind == "run" else {}
    return unheard(more | each for each in recorded)
