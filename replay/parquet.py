"""Writes Parquet: whole columns of integers, floats or text, nothing else; the way from Python to DuckDB.

Why by hand: DuckDB takes columns quickly only from Arrow, NumPy or files, and the post-mortem tools install neither of
the first two. These are the parts of the format that flat, required columns need: one PLAIN page per column and row
group, zstd-compressed, and the footer in Thrift's compact protocol. Files are read by DuckDB alone, in the same
process's lifetime or from our own cache; users' exports are written by DuckDB itself.

Format: https://parquet.apache.org/docs/file-format/ (page header and footer: parquet.thrift).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

import zstandard

INT64: Final = "BIGINT"
UINT64: Final = "UBIGINT"
DOUBLE: Final = "DOUBLE"
TEXT: Final = "VARCHAR"
"""Column types, by their SQL names."""

_PHYSICAL: Final = {INT64: 2, UINT64: 2, DOUBLE: 5, TEXT: 6}
_CONVERTED: Final = {TEXT: 0, UINT64: 14}
_ZSTD_CODEC: Final = 6
_PLAIN: Final = 0
_RLE: Final = 3
_MAGIC: Final = b"PAR1"
_LENGTH: Final = struct.Struct("<I")

# Thrift compact protocol, the types used here.
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12


class Column(NamedTuple):
    """Name and type (INT64, UINT64, DOUBLE or TEXT) of a column."""

    name: str
    type: str


class _Chunk(NamedTuple):
    column: Column
    values: int
    offset: int
    raw_bytes: int
    stored_bytes: int


class ParquetWriter:
    """One file. ``write`` makes a row group; ``close`` writes the footer, without which there is no file."""

    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self.columns = list(columns)
        self.rows = 0
        self._file = file
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._groups: list[tuple[int, list[_Chunk]]] = []
        self._at = file.write(_MAGIC)

    def write(self, count: int, plain: Sequence[bytes | bytearray]) -> None:
        """Append a row group of ``count`` rows from columns that ``encode_plain`` made."""
        chunks = []
        for column, raw in zip(self.columns, plain, strict=True):
            stored = self._compressor.compress(raw)
            header = _page_header(count, len(raw), len(stored))
            chunks.append(_Chunk(column, count, self._at, len(raw) + len(header), len(stored) + len(header)))
            self._at += self._file.write(header)
            self._at += self._file.write(stored)
        self._groups.append((count, chunks))
        self.rows += count

    def close(self) -> None:
        """Write the footer and close the file."""
        footer = self._footer()
        self._file.write(footer)
        self._file.write(_LENGTH.pack(len(footer)) + _MAGIC)
        self._file.close()

    def _footer(self) -> bytes:
        root = _struct((4, _BINARY, _binary(b"schema")), (5, _I32, _zigzag(len(self.columns))))
        schema = [root] + [
            _struct(
                (1, _I32, _zigzag(_PHYSICAL[column.type])),
                (3, _I32, _zigzag(0)),  # required
                (4, _BINARY, _binary(column.name.encode())),
                *([(6, _I32, _zigzag(_CONVERTED[column.type]))] if column.type in _CONVERTED else []),
            )
            for column in self.columns
        ]
        groups = [
            _struct(
                (1, _LIST, _list(_STRUCT, [_column_chunk(chunk) for chunk in chunks])),
                (2, _I64, _zigzag(sum(chunk.raw_bytes for chunk in chunks))),
                (3, _I64, _zigzag(count)),
            )
            for count, chunks in self._groups
        ]
        return _struct(
            (1, _I32, _zigzag(1)),
            (2, _LIST, _list(_STRUCT, schema)),
            (3, _I64, _zigzag(self.rows)),
            (4, _LIST, _list(_STRUCT, groups)),
            (6, _BINARY, _binary(b"unlost")),
        )


def encode_plain(kind: str, values: Sequence[Any]) -> bytes:
    """A column's values in Parquet's PLAIN encoding; encodings of pieces can be joined.

    Raises struct.error for a value that the type can't hold.
    """
    if kind == INT64:  # four times as fast as array.array
        return struct.pack(f"<{len(values)}q", *values)
    if kind == UINT64:
        return struct.pack(f"<{len(values)}Q", *values)
    if kind == DOUBLE:
        return struct.pack(f"<{len(values)}d", *values)
    # Few distinct values, many rows: encode each once.
    pieces: dict[str, bytes] = {}
    for text in set(values):
        data = text.encode("utf-8", "replace")
        pieces[text] = _LENGTH.pack(len(data)) + data
    return b"".join(map(pieces.__getitem__, values))


def _page_header(count: int, raw_bytes: int, stored_bytes: int) -> bytes:
    data_page = _struct(
        (1, _I32, _zigzag(count)), (2, _I32, _zigzag(_PLAIN)), (3, _I32, _zigzag(_RLE)), (4, _I32, _zigzag(_RLE))
    )
    return _struct(
        (1, _I32, _zigzag(0)), (2, _I32, _zigzag(raw_bytes)), (3, _I32, _zigzag(stored_bytes)), (5, _STRUCT, data_page)
    )


def _column_chunk(chunk: _Chunk) -> bytes:
    meta = _struct(
        (1, _I32, _zigzag(_PHYSICAL[chunk.column.type])),
        (2, _LIST, _list(_I32, [_zigzag(_PLAIN), _zigzag(_RLE)])),
        (3, _LIST, _list(_BINARY, [_binary(chunk.column.name.encode())])),
        (4, _I32, _zigzag(_ZSTD_CODEC)),
        (5, _I64, _zigzag(chunk.values)),
        (6, _I64, _zigzag(chunk.raw_bytes)),
        (7, _I64, _zigzag(chunk.stored_bytes)),
        (9, _I64, _zigzag(chunk.offset)),
    )
    return _struct((2, _I64, _zigzag(chunk.offset)), (3, _STRUCT, meta))


# --- Thrift's compact protocol --------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zigzag(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _binary(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    count = len(items)
    head = bytes((count << 4 | kind,)) if count < 15 else bytes((0xF0 | kind,)) + _varint(count)
    return head + b"".join(items)


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """Fields in rising order of their ids, each ``(id, type, encoded value)``; ids never jump by more than 15 here."""
    return b"".join(bytes((step << 4 | kind,)) + data for step, kind, data in _steps(fields)) + b"\0"


def _steps(fields: Iterable[tuple[int, int, bytes]]) -> Iterable[tuple[int, int, bytes]]:
    before = 0
    for number, kind, data in fields:
        yield number - before, kind, data
        before = number
