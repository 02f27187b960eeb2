"""Big journals as DuckDB files in the user's cache folder: made once, used until the journal changes."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Final, Protocol

log = logging.getLogger(__name__)

CACHE_FROM_EVENTS: Final = 500_000
CACHE_FILES_MAX: Final = 4


class Cached(Protocol):
    """The part of ``database.Source`` that names what a database was made of."""

    path: str
    run: str
    start: int
    stop: int
    stamp: str


def cache_folder() -> Path:
    """Where databases and the prompt's history are kept."""
    base = os.environ.get("UNLOST_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unlost"


def cache_file(sources: Sequence[Cached]) -> Path | None:
    """Where a database of these very sources, made by this very code, lies or would lie; None if they are small."""
    import duckdb

    if sum(source.stop - source.start for source in sources) < CACHE_FROM_EVENTS:
        return None
    digest = hashlib.sha256(duckdb.__version__.encode())
    for module in (
        "views.sql",
        "bounds.py",
        "columns.py",
        "parts.py",
        "pairing.py",
        "database.py",
        "events.py",
        "trace_events.py",
        "trace_matching.py",
        "trace_reading.py",
        "trace_runs.py",
    ):
        digest.update(resources.files(__package__).joinpath(module).read_bytes())
    for source in sources:
        digest.update(f"\0{source.run}\0{os.path.realpath(source.path)}\0{source.stamp}".encode())
    return cache_folder() / f"{digest.hexdigest()[:32]}.duckdb"


def keep(made: Path, kept: Path) -> Path:
    """Move a database into the cache; where that fails it is used where it is."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        shutil.move(made, partial)
        os.replace(partial, kept)
        old = sorted(kept.parent.glob("*.duckdb"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in old[CACHE_FILES_MAX:]:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: not cached: %s", kept, error)
        return made if made.exists() else partial
    return kept
