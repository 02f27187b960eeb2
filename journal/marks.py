"""Two small files beside the segments: WATERMARK (how far the journal is durable) and FLOOR (where it begins).

WATERMARK holds two alternating checksummed slots and is written after each fdatasync, not itself synced: always a
lower bound of what is durable, and exact after a process kill. FLOOR is replaced atomically and durably before
segments are unlinked, so that retention does not read as damage. Bytes: docs/FORMAT.md.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple
from zlib import crc32

from .storage import Storage, StorageFile, read_exact, write_all

WATERMARK_NAME = "WATERMARK"
FLOOR_NAME = "FLOOR"
SLOT_STRIDE_BYTES = 4096
"""Slots lie in different pages and sectors, so that one torn write can't take both."""

_SLOT = struct.Struct("<4sHHIIQQq")
_CRC = struct.Struct("<I")
SLOT_BYTES = _SLOT.size + _CRC.size
_WATERMARK_MAGIC = b"UNLW"
_FLOOR_MAGIC = b"UNLB"
_VERSION = 1


class Mark(NamedTuple):
    """One slot: an offset that an incarnation stated about a journal, with a sequence number to tell the newest."""

    incarnation: int
    journal_crc: int
    sequence: int
    offset: int
    wall_ns: int


def journal_crc(journal_id: str) -> int:
    """The 4 bytes by which a mark names its journal."""
    return crc32(journal_id.encode())


def _pack(magic: bytes, mark: Mark) -> bytes:
    body = _SLOT.pack(magic, _VERSION, 0, mark.incarnation, mark.journal_crc, mark.sequence, mark.offset, mark.wall_ns)
    return body + _CRC.pack(crc32(body))


def _parse(magic: bytes, data: bytes) -> Mark | None:
    if len(data) < SLOT_BYTES or crc32(data[: _SLOT.size]) != _CRC.unpack_from(data, _SLOT.size)[0]:
        return None
    found, version, reserved, *fields = _SLOT.unpack_from(data)
    if found != magic or version != _VERSION or reserved != 0:
        return None
    return Mark(*fields)


def read_watermark(storage: Storage, directory: str) -> list[Mark]:
    """The valid slots; empty when the file is missing or neither slot is intact."""
    try:
        file = storage.open(os.path.join(directory, WATERMARK_NAME))
    except FileNotFoundError:
        return []
    try:
        slots = (_parse(_WATERMARK_MAGIC, read_exact(file, at, SLOT_BYTES)) for at in (0, SLOT_STRIDE_BYTES))
        return [slot for slot in slots if slot is not None]
    finally:
        file.close()


class WatermarkFile:
    """The writer's handle on WATERMARK."""

    def __init__(self, storage: Storage, directory: str, journal_id: str, incarnation: int) -> None:
        self._storage = storage
        self._directory = directory
        self._journal_crc = journal_crc(journal_id)
        self._incarnation = incarnation
        self._sequence = max((slot.sequence for slot in read_watermark(storage, directory)), default=0)
        self._file = self._open()

    def _open(self) -> StorageFile:
        path = os.path.join(self._directory, WATERMARK_NAME)
        try:
            return self._storage.open(path, writable=True)
        except FileNotFoundError:
            file = self._storage.create(path)
            write_all(file, 0, bytes(SLOT_STRIDE_BYTES + SLOT_BYTES))
            return file

    def write(self, offset: int, wall_ns: int) -> None:
        """State that every event below ``offset`` is durable, in the slot that does not hold the newest statement."""
        sequence = self._sequence + 1
        mark = Mark(self._incarnation, self._journal_crc, sequence, offset, wall_ns)
        write_all(self._file, SLOT_STRIDE_BYTES * (sequence % 2), _pack(_WATERMARK_MAGIC, mark))
        self._sequence = sequence

    def sync(self) -> None:
        """Make the newest statement survive a power cut. After an OSError, ``replace`` the file."""
        self._file.sync()

    def replace(self, offset: int, wall_ns: int) -> None:
        """Write a fresh file and put it, durably, in the place of one that could not be synced."""
        mark = Mark(self._incarnation, self._journal_crc, self._sequence + 1, offset, wall_ns)
        content = bytearray(SLOT_STRIDE_BYTES + SLOT_BYTES)
        at = SLOT_STRIDE_BYTES * (mark.sequence % 2)
        content[at : at + SLOT_BYTES] = _pack(_WATERMARK_MAGIC, mark)
        file = _replace_file(self._storage, self._directory, WATERMARK_NAME, bytes(content))
        self._file.close()
        self._file, self._sequence = file, mark.sequence

    def close(self) -> None:
        """Close without syncing."""
        self._file.close()


def read_floor(storage: Storage, directory: str) -> Mark | None:
    """The recorded floor, or None when nothing was ever pruned (or the record is unreadable)."""
    try:
        file = storage.open(os.path.join(directory, FLOOR_NAME))
    except FileNotFoundError:
        return None
    try:
        return _parse(_FLOOR_MAGIC, read_exact(file, 0, SLOT_BYTES))
    finally:
        file.close()


def write_floor(
    storage: Storage, directory: str, *, journal_id: str, incarnation: int, offset: int, wall_ns: int
) -> None:
    """Record durably that the journal begins at ``offset``; the older record is replaced in one step."""
    previous = read_floor(storage, directory)
    sequence = previous.sequence + 1 if previous else 1
    mark = Mark(incarnation, journal_crc(journal_id), sequence, offset, wall_ns)
    _replace_file(storage, directory, FLOOR_NAME, _pack(_FLOOR_MAGIC, mark)).close()


def _replace_file(storage: Storage, directory: str, name: str, content: bytes) -> StorageFile:
    temporary = os.path.join(directory, name + ".new")
    if name + ".new" in storage.list_names(directory):
        storage.remove(temporary)
    file = storage.create(temporary)
    try:
        write_all(file, 0, content)
        file.sync()
        storage.rename(temporary, os.path.join(directory, name))
        storage.sync_directory(directory)
    except BaseException:
        file.close()
        raise
    return file
