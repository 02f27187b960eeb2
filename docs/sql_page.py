"""The text of ``sql.md``: tables of ``replay/tables.py``, raw tables from the events, questions of ``queries.py``."""

from __future__ import annotations

from collections.abc import Iterator

from unlost.replay.columns import EVENT_TABLES, table_columns
from unlost.replay.queries import QUERIES
from unlost.replay.tables import documented

HEAD = """# SQL over runs and traces

`unlost sql SOURCE... "QUERY"` asks any mix of run folders (also of running runs), event segments (`.zst`) and rollout
traces (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`), or globs of them, in [DuckDB's
SQL](https://duckdb.org/docs/sql/introduction). Without a query there is a prompt (`.help`). `--query NAME` asks one
of the [questions below](#questions-with-names), `--format` prints `table`, `csv`, `json` or, with `--output FILE`,
`parquet`.

```
unlost sql runs/demo --query thrown-away
unlost sql 'runs/*' "SELECT run, kills, steps, new_tokens FROM runs"
unlost sql runs/a rollout_trace.jsonl.gz "SELECT run, class, sum(seconds) FROM losses GROUP BY ALL"
```

* Sources are only read. What could not be read (damage, a torn tail, unknown events) is told on stderr; the rest is
  answered.
* A query reaches no file but the sources, and writes none, unless `--allow-external` is given.
* Columns ending in `_s` are seconds on the run's clock (of a trace: Unix time). It goes on through restarts.
* A number that a kill made unknowable is a pair: what is certain, and `..._max`, an upper bound (`NULL`: there is
  none). A killed attempt ran at least until its controller's last durable event and at most until the next start. The
  tokens that nobody could tell of are at most two chunks of `journal.progress_interval_tokens` per attempt, as long
  as the payload journal's storage keeps up, and never more than `generation.max_new_tokens` leaves room for. When a
  controller died is not known better: after its last durable event nothing of it is in the journal until the next
  start, so the upper bound of seconds grows with the time that nobody restarted the run.
* Where no payload journal tells (`data_plane.payloads: none`, a journal of which nothing was left, a group that was
  given up, an attempt that has not ended), the room that is left of a response is the only bound of its tokens.
* Of a journal whose beginning was pruned the figures are of what is kept, and of what lived when the kept part begins:
  its first state image tells of the groups alive with their running and sealed attempts (these without seconds). They
  are in `raw.<event>` with offsets below 0, not in `events`. What workers had counted before can't be compared.
* Seconds that an attempt took over with a reused prefix go with its tokens: if they are thrown away later, they count
  there.
* A trace has no tokens unless it was written by unlost; then they are `NULL`, not 0.
* Journals of half a million events or more are kept as a database in the cache folder (`$UNLOST_CACHE`, or
  `~/.cache/unlost`; the newest four) until they change; `--no-cache` does without.
"""

RAW_HEAD = """
## Raw events

`raw.<event>` has a row per event of that kind: `run`, `event_offset`, then the fields of [the event](events.md) as
they are in the journal (`t` in microseconds; `group` is called `group_id`). A seal's receipt is spread over columns,
of which those that say where the payload is begin with `payload_`; `span_branch` and `span_version` are set if one
set of weights made the whole response. A field that is a list is a table of its own with `event_offset` and
`position`; a mapping is JSON text.

| table | columns |
|---|---|
"""

QUERIES_HEAD = """
## Questions with names

`unlost sql SOURCE... --query NAME`, or `.query NAME` at the prompt.
"""


def sql_page() -> str:
    """The page without the notice at its top."""
    return "".join([HEAD, *_tables(), *_raw(), *_queries()])


def _tables() -> Iterator[str]:
    yield "\n## Tables\n\n| table | |\n|---|---|\n"
    for name, (text, _) in documented().items():
        yield f"| [{name}](#{name}) | {_cell(text)} |\n"
    for name, (text, columns) in documented().items():
        yield f"\n### {name}\n\n{text}\n\n| column | |\n|---|---|\n"
        for column, doc in columns.items():
            yield f"| `{column}` | {_cell(doc)} |\n"


def _raw() -> Iterator[str]:
    yield RAW_HEAD
    everything = table_columns()
    for table in EVENT_TABLES:
        for name in (table.name, *(child.table for child in table.children)):
            listed = ", ".join(f"`{column.name}`" for column in everything[name][1:])
            yield f"| `raw.{name}` | {listed} |\n"
    listed = ", ".join(f"`{column.name}`" for column in everything["frames"])
    yield f"\n`raw.frames` has a row per frame: {listed}.\n"


def _queries() -> Iterator[str]:
    yield QUERIES_HEAD
    for query in QUERIES:
        yield f"\n### {query.name}\n\n{query.title}"
        yield f" {query.note}\n" if query.note else "\n"
        yield f"\n```sql\n{query.sql}\n```\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
