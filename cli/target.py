"""Files that commands write: whole or not at all, never into what is only read, never over what is there unasked."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")]
PART: Final = ".part"


def check_target(path: Path, sources: Sequence[str | Path], *, overwrite: bool) -> None:
    """Raises UsageFault, before any work is done, if ``path`` can't or must not be written."""
    from ..replay.export import check_target as check_outside
    from .errors import UsageFault

    for source in sources:
        if os.path.exists(source) and os.path.exists(path) and os.path.samefile(source, path):
            raise UsageFault(f"{path}: is what is read; choose another place")
        check_outside(source, path)
    if path.is_dir():
        raise UsageFault(f"{path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UsageFault(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not _is_special(path) and not overwrite:
        raise UsageFault(f"{path}: is there already; choose another name, or give --overwrite")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write ``path``: beside it, and moved there when the block ends well. Pipes and devices: themselves.

    What was there before stays until then, and for good if the block fails or the machine stops. A link is followed.
    """
    if _is_special(path):
        yield path
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
