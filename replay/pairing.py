"""Dispatches and seals, part by part, become the rows of ``attempt_rows``.

Nearly always both lie in the same part of the journal. Joined part by part, the table to look things up in stays small;
over a whole long journal the join would spill to disk. What finds no partner in its part is left in
``single_dispatched`` and ``single_sealed``; views.sql joins those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from .columns import table_columns

if TYPE_CHECKING:
    import duckdb

MERGED: Final = {"attempt_dispatched": "dispatched", "attempt_sealed": "sealed"}
"""Event tables that become one: table → prefix of its offset and time there."""
_KEYS: Final = ("group_id", "sibling", "attempt")
_LATER: Final = {  # filled from the other ways in which an attempt ends, and from the next attempt
    "failed_offset": "BIGINT", "failed_t": "BIGINT", "failed_tokens": "BIGINT", "failed_kind": "VARCHAR",
    "cause": "VARCHAR", "abandoned_offset": "BIGINT", "abandoned_t": "BIGINT", "abandoned_tokens": "BIGINT",
    "durable": "BIGINT", "reason": "VARCHAR", "next_prefix": "BIGINT", "next_prefix_from": "BIGINT", "reused": "BIGINT",
}  # fmt: skip


def pair_attempts(
    connection: duckdb.DuckDBPyConnection, runs: Mapping[str, str], files: Mapping[str, Mapping[str, str]]
) -> None:
    """``runs``: part → SQL literal of its run. ``files``: event table → part → Parquet file."""
    columns = table_columns()
    for table, event in MERGED.items():
        typed = ", ".join(f'"{column.name}" {column.type}' for column in columns[table])
        connection.execute(f"CREATE TABLE single_{event} (run run_name, {typed})")
    later = ", ".join(f"NULL::{kind} AS {name}" for name, kind in _LATER.items())
    both = f"{_merged('attempt_dispatched', 'd')}, {_merged('attempt_sealed', 's', without=_KEYS)}"
    connection.execute(
        f"CREATE TABLE attempt_rows AS SELECT d.run, {both}, {later} FROM single_dispatched d, single_sealed s"
    )
    keys = ", ".join(_KEYS)
    for part, run in runs.items():
        d, s = (_read(files.get(table, {}).get(part), event) for table, event in MERGED.items())
        connection.execute(
            f"INSERT INTO attempt_rows BY NAME SELECT {run} AS run, {both} FROM {d} d JOIN {s} s USING ({keys})"
        )
        for event, mine, other in (("dispatched", d, s), ("sealed", s, d)):
            single = f"SELECT {run} AS run, * FROM {mine} m ANTI JOIN {other} o USING ({keys})"
            connection.execute(f"INSERT INTO single_{event} BY NAME {single}")


def _read(file: str | None, event: str) -> str:
    return f"read_parquet('{file}')" if file else f"(SELECT * EXCLUDE (run) FROM single_{event} WHERE false)"


def _name(column: str, event: str) -> str:
    return f"{event}_{column}" if column in ("event_offset", "t") else f'"{column}"'


def _merged(table: str, alias: str, without: tuple[str, ...] = ()) -> str:
    chosen = [column.name for column in table_columns()[table] if column.name not in without]
    return ", ".join(f'{alias}."{name}" AS {_name(name, MERGED[table])}' for name in chosen)


def merged_views() -> Iterator[str]:
    """The two event tables as they were: views over ``attempt_rows``, and over seals whose dispatch is not kept."""
    for table, event in MERGED.items():
        names = [column.name for column in table_columns()[table]]
        chosen = ", ".join(f'{_name(name, event)} AS "{name}"' for name in names)
        sql = (
            f"CREATE VIEW raw.{table} AS SELECT run, {chosen} FROM attempt_rows WHERE {event}_event_offset IS NOT NULL"
        )
        if event == "sealed":
            listed = ", ".join(f's."{name}"' for name in names)
            sql += (
                f" UNION ALL SELECT s.run, {listed} FROM single_sealed s "
                "ANTI JOIN attempt_rows r USING (run, group_id, sibling, attempt)"
            )
        yield sql
