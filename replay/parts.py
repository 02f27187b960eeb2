"""A part of a journal, or one segment file, as Parquet files: what one loading process does."""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ..journal.errors import JournalDamaged
from ..journal.format import COMPAT_IMAGE, HEADER_BYTES_LIMIT, parse_preamble
from ..journal.frames import FrameOpener, PayloadError
from ..journal.reader import FrameView
from ..journal.scan import BytesSource, FrameWalk, Window
from .columns import FRAMES, ColumnsError, EventColumns, TableFiles, table_columns
from .fold import open_events

if TYPE_CHECKING:
    from ..journal.storage import Storage

PART_EVENTS: Final = 500_000
"""Events in a part of the journal, the unit that a process takes."""


class Part(NamedTuple):
    """Events ``start`` ≤ offset < ``stop``, for one process. ``path``: a run folder, or one segment file."""

    path: str
    start: int
    stop: int
    folder: str
    name: str


class PartResult(NamedTuple):
    """``end``: offset after the last event read. ``unknown``: tag → events that this release does not know.

    ``problem``: why reading ended early, in the error's words; empty if it did not.
    """

    end: int
    unknown: dict[int, int]
    problem: str


def load_part(part: Part, storage: Storage | None = None) -> PartResult:
    """Turn a part of a journal into Parquet files. Damage ends the part and is told in the result, not raised."""
    files = TableFiles(Path(part.folder), part.name, table_columns())
    columns = EventColumns(files)
    decode: Callable[[bytes], list[list[Any]]] = msgspec.msgpack.Decoder(list[list[Any]]).decode
    end, problem = part.start, ""
    was_collecting = gc.isenabled()
    gc.disable()  # millions of small lists, none in a cycle: looking for cycles would take half of the time
    try:
        try:
            for view in _views(part, storage):
                end = _add_view(part, view, files, columns, decode)
        except JournalDamaged as error:
            problem = str(error)
        columns.flush()
        files.close()
    except (msgspec.MsgspecError, struct.error, TypeError, AttributeError, IndexError) as error:
        raise ColumnsError(
            f"{part.path}: the events from offset {end} on are not of the types that this release knows ({error}); "
            f"`unlost verify {part.path}` checks the bytes"
        ) from error
    finally:
        if was_collecting:
            gc.enable()
    return PartResult(end, columns.unknown, problem)


def _add_view(
    part: Part, view: FrameView, files: TableFiles, columns: EventColumns, decode: Callable[[bytes], list[list[Any]]]
) -> int:
    """Take a frame's events that belong to the part. Returns the offset after them."""
    if view.image:
        t = columns.add_image(view.first_offset, view.payload)
        _add_frame(files, view, t, t)
    else:
        rows = decode(view.payload)
        if view.first_offset >= part.start:  # a frame belongs to the part that it begins in
            _add_frame(files, view, rows[0][1], rows[-1][1])
        skip = max(part.start - view.first_offset, 0)
        if skip or view.first_offset + len(rows) > part.stop:
            rows = rows[skip : part.stop - view.first_offset]
        columns.add(view.first_offset + skip, rows)
    return min(view.first_offset + view.count, part.stop)


def _add_frame(files: TableFiles, view: FrameView, first_t: int, last_t: int) -> None:
    row = (
        view.first_offset,
        view.count,
        view.incarnation,
        view.wall_ns,
        first_t,
        last_t,
        len(view.payload),
        view.segment,
    )
    files.add(FRAMES, [[value] for value in row])


def _views(part: Part, storage: Storage | None) -> Iterator[FrameView]:
    if os.path.isdir(part.path):
        yield from open_events(part.path, storage).frames(part.start, part.stop)
    else:
        yield from segment_frames(part.path)


def segment_frames(path: str) -> Iterator[FrameView]:
    """The frames of one segment file by itself, wherever it lies; nothing says here how far it was durable.

    Raises ColumnsError if it is not a segment, JournalDamaged where bytes are bad (a torn tail too: it can't be told).
    """
    with open(path, "rb") as file:
        window = Window(BytesSource(file.read()))
    preamble = parse_preamble(window.read(0, HEADER_BYTES_LIMIT), path)
    if isinstance(preamble, str):
        raise ColumnsError(f"{path}: not an event segment: {preamble}")
    walk, opener, name = FrameWalk(window, preamble, path), FrameOpener(), os.path.basename(path)
    while (header := walk.step()) is not None and (stored := walk.payload(header)) is not None:
        byte = walk.position.byte - header.total_bytes
        try:
            payload = opener.open(stored, header.raw_bytes)
        except PayloadError as error:
            raise JournalDamaged(os.path.dirname(path), name, byte, header.first_offset, str(error)) from error
        yield FrameView(
            header.first_offset, header.events, header.incarnation, header.wall_ns,
            bool(header.compat & COMPAT_IMAGE), payload, name, byte,
        )  # fmt: skip
    if walk.bad is not None:
        at = walk.bad.position
        raise JournalDamaged(os.path.dirname(path), name, at.byte, at.offset, walk.bad.reason)
