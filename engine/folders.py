"""Checkpoint folders on the real file system; each call's effect is durable when it returns."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path


class RealFolders:
    """Implements ``checkpoints.Folders``. Blocking calls run in threads."""

    async def names(self, path: str) -> list[str]:
        """Entries; empty if the folder is absent."""
        try:
            return await asyncio.to_thread(os.listdir, path)
        except FileNotFoundError:
            return []

    async def make(self, path: str) -> None:
        """Make a folder and its parents."""
        await asyncio.to_thread(_make, Path(path))

    async def write(self, path: str, data: bytes) -> None:
        """Write a new file and sync it."""
        await asyncio.to_thread(_write, path, data)

    async def read(self, path: str) -> bytes:
        """A whole file."""
        return await asyncio.to_thread(Path(path).read_bytes)

    async def publish(self, source: str, target: str) -> int:
        """Sync what is below ``source``, rename, sync the parent. Returns bytes. FileExistsError if it exists."""
        return await asyncio.to_thread(_publish, source, target)

    async def remove_tree(self, path: str) -> None:
        """Remove a folder and all below; absent is fine."""
        await asyncio.to_thread(_remove, path)


def _make(path: Path) -> None:
    made = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for new in reversed(made):
        sync_folder(str(new.parent))


def _write(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _publish(source: str, target: str) -> int:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    size = 0
    for folder, _, files in os.walk(source, topdown=False):
        size += sum(os.stat(os.path.join(folder, name)).st_size for name in files)
        sync_folder(folder)
    os.rename(source, target)
    sync_folder(os.path.dirname(target))
    return size


def _remove(path: str) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Fsync a folder, so that its entries are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
