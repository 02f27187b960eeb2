"""``unlost sql``: questions to runs and traces, in SQL or by name."""

from __future__ import annotations

import contextlib
import csv
import glob
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import print_json, print_table
from .target import Overwrite, check_target, whole_file

if TYPE_CHECKING:
    from ..replay.database import Database, Rows


class SqlFormat(StrEnum):
    """How a result is printed."""

    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


def sql(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE... [QUERY]",
            help="Run folders, event segments, traces (.jsonl, .gz, .zst) or globs of them; then maybe a query.",
            show_default=False,
        ),
    ] = None,
    query: Annotated[str | None, typer.Option("--query", "-q", metavar="NAME", help="A question by its name.")] = None,
    queries: Annotated[bool, typer.Option("--queries", help="List the questions that have names.")] = False,
    format: Annotated[SqlFormat, typer.Option(help="Of the result.")] = SqlFormat.table,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result there.")
    ] = None,
    overwrite: Overwrite = False,
    allow_external: Annotated[
        bool, typer.Option("--allow-external", help="Let SQL read and write files other than the sources.")
    ] = False,
    cache: Annotated[bool, typer.Option(help="Keep big journals as a database in the cache folder.")] = True,
) -> None:
    """Ask runs and traces anything. Without a query: a prompt. Reads only, also beside a running run."""
    if queries:
        show_queries()
        return
    paths, text = split_arguments(list(sources or []), named=query is not None)
    if query is not None:
        from ..replay.queries import named

        text = named(query).sql
    if not paths:
        from .errors import UsageFault

        raise UsageFault("give a run folder, a segment or a trace to ask")
    if format is SqlFormat.parquet and (output is None or text is None):
        from .errors import UsageFault

        raise UsageFault("--format parquet needs a query, and --output FILE to write to")
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read()
    if output is None:
        _ask(paths, text, format, None, allow_external=allow_external, cache=cache)
        return
    if text is None:
        from .errors import UsageFault

        raise UsageFault("--output needs a query whose result goes there")
    check_target(output, [found for path in paths for found in glob.glob(path) or [path]], overwrite=overwrite)
    with whole_file(output) as part:
        _ask(paths, text, format, part, allow_external=allow_external, cache=cache)


def _ask(
    paths: list[str], text: str | None, format: SqlFormat, output: Path | None, *, allow_external: bool, cache: bool
) -> None:
    """``text`` None: the prompt. ``output`` None: to standard output."""
    from ..replay.database import open_database

    writable = [output] if output is not None and format is SqlFormat.parquet else []
    with open_database(paths, allow_external=allow_external, writable=writable, cache=cache) as database:
        for note in database.notes:
            print(f"unlost: note: {note}", file=sys.stderr)
        if text is None:
            prompt(database)
        elif output is None:
            _write(database.query(text), format, sys.stdout)
        elif format is SqlFormat.parquet:
            target = os.path.abspath(output).replace("'", "''")
            database.query(f"COPY ({text.strip().rstrip(';')}) TO '{target}' (FORMAT parquet)")
        else:
            with output.open("w", encoding="utf-8", newline="") as file:
                _write(database.query(text), format, file)


def split_arguments(arguments: list[str], *, named: bool) -> tuple[list[str], str | None]:
    """Sources and the query: the last argument, if it is no file, matches none, and has more than one word."""
    if named or not arguments:
        return arguments, None
    last = arguments[-1]
    if len(last.split()) > 1 and not os.path.exists(last) and not glob.glob(last):
        return arguments[:-1], last
    return arguments, None


def show_queries() -> None:
    """Names and questions."""
    from ..replay.queries import QUERIES

    print_table("", ["name", "question"], [(q.name, q.title) for q in QUERIES])


def _write(rows: Rows, format: SqlFormat, file: Any) -> None:
    if format is SqlFormat.json:
        if file is sys.stdout:
            print_json(rows.dicts())
        else:
            import msgspec

            file.write(msgspec.json.encode(rows.dicts()).decode() + "\n")
    elif format is SqlFormat.csv:
        writer = csv.writer(file)
        writer.writerow(rows.columns)
        writer.writerows(rows.rows)
    elif file is sys.stdout:
        show_rows(rows)
    else:
        for row in [tuple(rows.columns), *rows.rows]:
            file.write("\t".join(_cell(value) for value in row) + "\n")


_NUMBERS = ("INT", "DOUBLE", "DECIMAL", "FLOAT")


def show_rows(rows: Rows, title: str = "") -> None:
    """A result as a table; numbers to the right."""
    if not rows.columns:
        return
    right = [c for c, kind in zip(rows.columns, rows.types, strict=True) if any(n in kind.upper() for n in _NUMBERS)]
    print_table(title, rows.columns, [[_cell(value) for value in row] for row in rows.rows], right=right)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else f"{value:g}"
    if isinstance(value, list):
        return "[" + ", ".join(_cell(item) for item in value) + "]"
    return str(value)


# --- the prompt -----------------------------------------------------------------------------------------------------

_HELP = """SQL, ending with a semicolon; or
  .tables           the tables and views
  .schema TABLE     its columns
  .queries          questions that have names
  .query NAME       ask one of them
  .quit             (or Ctrl-D)"""


def prompt(database: Database) -> None:
    """Read and answer until the end of the input. The history is kept in the cache folder."""
    history = _history()
    print(f"{len(database.sources)} source(s). SQL, or .help")
    lines: list[str] = []
    while True:
        try:
            line = input("unlost> " if not lines else "   ...> ")
        except EOFError:
            print()
            break
        except KeyboardInterrupt:
            print()
            lines = []
            continue
        if not lines and line.strip().startswith("."):
            if line.strip() in (".quit", ".exit"):
                break
            _answer(database, line.strip())
            continue
        lines.append(line)
        if line.rstrip().endswith(";"):
            _answer(database, "\n".join(lines))
            lines = []
    if history is not None:
        history()


def _answer(database: Database, text: str) -> None:
    from ..journal.errors import UnlostError

    try:
        if text.startswith("."):
            _command(database, text[1:].split())
        elif text.strip(" ;\n"):
            show_rows(database.query(text))
    except UnlostError as error:
        print(f"error: {error}", file=sys.stderr)


def _command(database: Database, words: Sequence[str]) -> None:
    from ..replay.queries import named
    from ..replay.tables import documented

    tables = documented()
    match list(words):
        case ["tables"]:
            print_table("", ["table", "what it holds"], [(name, doc) for name, (doc, _) in tables.items()])
        case ["schema", name] if name in tables:
            print_table("", ["column", "what it is"], tables[name][1].items())
        case ["schema", name]:
            show_rows(database.query(f"DESCRIBE {name}"))
        case ["queries"]:
            show_queries()
        case ["query", name]:
            show_rows(database.query(named(name).sql))
        case _:
            print(_HELP)


def _history() -> Any:
    """Line editing with a history file, where Python has it. Returns what saves it."""
    try:
        import readline
    except ImportError:
        return None
    from ..replay.database_cache import cache_folder

    file = cache_folder() / "sql_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(2000)

    def save() -> None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)

    return save
