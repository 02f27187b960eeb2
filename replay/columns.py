"""Event journal → columns: one Parquet file per event type and part of the journal, in one or several processes.

Every event type has a table, named and shaped after its Struct: numbers and text become columns, a receipt's fields
join its event's, a tuple becomes a child table with one row per element, a mapping becomes JSON text. So the tables
follow ``events.py`` by themselves, and an event written before a field existed gets that field's default.

Frames are decoded to plain lists and transposed with ``zip``; no Struct is built. That is what makes ten million events
a matter of seconds (docs/benchmarks.md).
"""

from __future__ import annotations

import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ..journal.errors import UnlostError
from . import events as ev
from .parquet import DOUBLE, INT64, TEXT, UINT64, Column, ParquetWriter, encode_plain

ROWS_AT_ONCE: Final = 4_000
"""Events that are Python objects at one time: few enough for the processor's cache (50,000 take thrice as long)."""
ROW_GROUP_ROWS: Final = 100_000


class ColumnsError(UnlostError):
    """A source that is no event journal, or whose events this release can't read as columns."""


class Field(NamedTuple):
    """Where a column comes from. ``path``: index into the encoded event, then maybe into a nested struct."""

    column: Column
    path: tuple[int, ...]


class Child(NamedTuple):
    """A tuple field as a table: event offset, position, then the element's fields (``value`` if it is a number)."""

    table: str
    at: int
    columns: tuple[Column, ...]
    nested: bool


class EventTable(NamedTuple):
    """The tables of one event type."""

    name: str
    event: type[ev.Event]
    tag: int
    fields: tuple[Field, ...]
    children: tuple[Child, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """``event_offset``, then the fields that are not tables of their own."""
        more = _SINGLE_SPAN if self.event is ev.AttemptSealed else ()
        return (OFFSET, *(field.column for field in self.fields), *more)


OFFSET: Final = Column("event_offset", INT64)
POSITION: Final = Column("position", INT64)
_SINGLE_SPAN: Final = (Column("span_branch", INT64), Column("span_version", INT64))
"""Of an attempt that saw one set of weights from its first token on; else -1."""
_CHILD_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "generated": ("worker", "tokens"),
    "weight_spans": ("first_token", "branch", "version"),
}
_COLUMN_NAMES: Final = {"group": "group_id"}  # a word of SQL
_RECEIPT_RENAMED: Final = {"offset", "journal", "checksum", "first_offset"}


def snake(name: str) -> str:
    """``AttemptSealed`` → ``attempt_sealed``."""
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _scalar(kind: Any) -> str | None:
    return {int: INT64, bool: INT64, float: DOUBLE, str: TEXT}.get(kind)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _event_table(event: type[ev.Event]) -> EventTable:
    fields: list[Field] = []
    children: list[Child] = []
    name = snake(event.__name__)
    for index, field in enumerate(msgspec.structs.fields(event), start=1):
        kind = _scalar(field.type)
        if kind is not None:
            fields.append(Field(Column(_COLUMN_NAMES.get(field.name, field.name), kind), (index,)))
        elif field.type is ev.Receipt:
            fields += _receipt_fields(index)
            children.append(_child(name, index, "weight_spans", tuple[int, int, int]))
        elif typing.get_origin(field.type) is tuple:
            children.append(_child(name, index, field.name, typing.get_args(field.type)[0]))
        else:
            fields.append(Field(Column(field.name, TEXT), (index,)))
    tag = event.__struct_config__.tag
    assert isinstance(tag, int)
    return EventTable(name, event, tag, tuple(fields), tuple(children))


def _receipt_fields(index: int) -> Iterator[Field]:
    for inner, field in enumerate(msgspec.structs.fields(ev.Receipt)):
        kind = _scalar(field.type)
        if kind is not None:
            name = f"payload_{field.name}" if field.name in _RECEIPT_RENAMED else field.name
            yield Field(Column(name, kind), (index, inner))


def _child(table: str, index: int, name: str, element: Any) -> Child:
    if element is ev.PromptRef:
        columns = tuple(_prompt_column(f) for f in msgspec.structs.fields(element))
        return Child(f"{table}_{name}", index, columns, nested=True)
    if element is int:
        return Child(f"{table}_{name}", index, (Column("value", INT64),), nested=False)
    return Child(f"{table}_{name}", index, tuple(Column(c, INT64) for c in _CHILD_COLUMNS[name]), nested=True)


def _prompt_column(field: msgspec.structs.FieldInfo) -> Column:
    if field.name == "content_hash":  # uses all 64 bits
        return Column(field.name, UINT64)
    return Column(field.name, _scalar(field.type) or TEXT)


EVENT_TABLES: Final = tuple(_event_table(event) for event in ev.EVENT_TYPES)
_BY_TAG: Final = {table.tag: table for table in EVENT_TABLES}
_SPANS_IN_RECEIPT: Final = ev.Receipt.__struct_fields__.index("weight_spans")
_RECEIPT_INDEX: Final = 1 + ev.AttemptSealed.__struct_fields__.index("receipt")
_IMAGE: Final = _event_table(ev.StateImage)


FRAMES: Final = "frames"
_FRAME_COLUMNS: Final = (
    Column("first_offset", INT64),
    Column("events", INT64),
    Column("incarnation", INT64),
    Column("wall_ns", INT64),
    Column("first_t", INT64),
    Column("last_t", INT64),
    Column("raw_bytes", INT64),
    Column("segment", TEXT),
)


TRACE_LINES: Final = "trace_lines"
_TRACE_COLUMNS: Final = (
    Column("line", INT64),
    Column("t_s", DOUBLE),
    Column("trace_run", TEXT),
    Column("event", TEXT),
    Column("prompt_id", TEXT),
    Column("generation_index", INT64),
    Column("attempt", INT64),
    Column("understood", INT64),
    Column("fields", TEXT),
)
_SEALED: Final = next(table for table in EVENT_TABLES if table.event is ev.AttemptSealed)


def table_columns() -> dict[str, tuple[Column, ...]]:
    """Every table that a journal is turned into, child tables included."""
    found: dict[str, tuple[Column, ...]] = {}
    for table in EVENT_TABLES:
        found[table.name] = table.columns
        for child in table.children:
            found[child.table] = (OFFSET, POSITION, *child.columns)
    found[FRAMES] = _FRAME_COLUMNS
    found[TRACE_LINES] = _TRACE_COLUMNS
    return found


class TableFiles:
    """Columns on their way to Parquet files ``<folder>/<table>.<part>.parquet``; a file appears with its first row."""

    def __init__(self, folder: Path, part: str, tables: Mapping[str, Sequence[Column]]) -> None:
        self._folder = folder
        self._part = part
        self._columns = tables
        self._writers: dict[str, ParquetWriter] = {}
        self._waiting: dict[str, tuple[int, list[bytearray]]] = {}

    def add(self, table: str, columns: Sequence[Sequence[Any]]) -> None:
        """Take rows, column-wise, in the order of the table's columns; written once there are enough of them.

        Raises struct.error or AttributeError if a value is not of its column's type.
        """
        count, held = self._waiting.get(table) or (0, [bytearray() for _ in columns])
        for column, store, values in zip(self._columns[table], held, columns, strict=True):
            store.extend(encode_plain(column.type, values))
        self._waiting[table] = (count + len(columns[0]), held)
        if count >= ROW_GROUP_ROWS:
            self._write(table)

    def _write(self, table: str) -> None:
        writer = self._writers.get(table)
        if writer is None:
            file = (self._folder / f"{table}.{self._part}.parquet").open("xb")
            writer = self._writers[table] = ParquetWriter(file, self._columns[table])
        writer.write(*self._waiting.pop(table))

    def close(self) -> None:
        """Write what waits, and the footers."""
        for table in list(self._waiting):
            self._write(table)
        for writer in self._writers.values():
            writer.close()


class EventColumns:
    """Sorts events by type and turns them into columns."""

    def __init__(self, files: TableFiles) -> None:
        self._files = files
        self._rows: defaultdict[int, list[list[Any]]] = defaultdict(list)
        self._held = 0
        self.unknown: dict[int, int] = {}

    def add(self, first_offset: int, rows: Sequence[list[Any]]) -> None:
        """Events as msgpack arrays ``[tag, field, …]``, which are taken over; the first has ``first_offset``."""
        by_tag = self._rows
        for offset, row in enumerate(rows, first_offset):
            tag = row[0]
            row[0] = offset  # becomes the first column
            by_tag[tag].append(row)
        self._held += len(rows)
        if self._held >= ROWS_AT_ONCE:
            self.flush()

    def add_image(self, offset: int, payload: bytes) -> int:
        """A frame that holds one StateImage: its size is wanted, not its content. Returns its time."""
        image = msgspec.msgpack.decode(payload, type=list[ev.StateImage])[0]
        self._files.add(_IMAGE.name, [[offset], [image.t], [str(len(image.state))]])
        return image.t

    def flush(self) -> None:
        """Turn what was added into columns."""
        for tag, rows in self._rows.items():
            table = _BY_TAG.get(tag)
            if table is None:
                self.unknown[tag] = self.unknown.get(tag, 0) + len(rows)
            elif table is _SEALED:
                self._files.add(table.name, self._sealed_columns(rows))
            else:
                self._flush_type(table, rows)
        self._rows.clear()
        self._held = 0

    def _flush_type(self, table: EventTable, rows: list[list[Any]]) -> None:
        columns = _transpose(rows, _DEFAULTS[table.tag])
        out: list[Any] = [columns[0]]
        for field in table.fields:
            values = columns[field.path[0]]
            out.append(_as_text(values) if field.column.type == TEXT else values)
        self._files.add(table.name, out)
        for child in table.children:
            self._flush_child(child, columns[child.at], columns[0])

    def _sealed_columns(self, rows: list[list[Any]]) -> list[Sequence[Any]]:
        columns = _transpose(rows, _DEFAULTS[_SEALED.tag])
        receipts = _transpose(columns[_RECEIPT_INDEX], _RECEIPT_DEFAULTS)
        spans = receipts[_SPANS_IN_RECEIPT]
        # Most attempts see one set of weights: that fits in two columns, and only the others need the child table.
        heads = [s[0] if len(s) == 1 else _MIXED for s in spans]
        first_tokens, branches, versions = zip(*heads, strict=True)
        if any(first_tokens):
            heads = [head if not head[0] else _MIXED for head in heads]
            _, branches, versions = zip(*heads, strict=True)
        mixed = [(offset, s) for offset, s, version in zip(columns[0], spans, versions, strict=True) if version < 0]
        if mixed:
            self._flush_child(_SEALED.children[0], [s for _, s in mixed], [offset for offset, _ in mixed])
        return [
            columns[0],
            *(columns[f.path[0]] if len(f.path) == 1 else receipts[f.path[1]] for f in _SEALED.fields),
            branches,
            versions,
        ]

    def _flush_child(self, child: Child, lists: Sequence[Sequence[Any]], offsets: Sequence[int]) -> None:
        counts = list(map(len, lists))
        elements = list(chain.from_iterable(lists))
        if not elements:
            return
        out: list[Any] = [
            list(chain.from_iterable(map(repeat, offsets, counts))),
            list(chain.from_iterable(map(range, counts))),
        ]
        if child.nested:
            out += _transpose(elements, [""] * len(child.columns))
        else:
            out.append(elements)
        self._files.add(child.table, out)


_MIXED: Final = (0, -1, -1)


def _transpose(rows: Sequence[list[Any]], defaults: Sequence[Any]) -> list[Sequence[Any]]:
    """Rows to columns. A row from before a field existed gets its default; fields unknown here are left out."""
    width = len(defaults)
    if min(map(len, rows)) < width:
        for row in rows:
            row.extend(defaults[len(row) :])
    return list(zip(*rows, strict=False))


_DEFAULTS: Final = {
    table.tag: [None, *(_default(field) for field in msgspec.structs.fields(table.event))] for table in EVENT_TABLES
}
_RECEIPT_DEFAULTS: Final = [_default(field) for field in msgspec.structs.fields(ev.Receipt)]


def _as_text(values: Sequence[Any]) -> Sequence[str]:
    if isinstance(values[0], str):
        return values
    encode = msgspec.json.encode
    return [encode(value).decode() for value in values]
