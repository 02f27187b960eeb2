"""Killing a process and everything that it has started, at once and without notice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import psutil

MARKER: Final = "UNLOST_DEMO"
_GONE_WITHIN_S: Final = 15.0
_POLL_S: Final = 0.05


def kill_tree(pid: int, marker: str) -> int:
    """SIGKILL ``pid``, its descendants, and every process whose environment holds ``UNLOST_DEMO=marker``.

    The environment finds what has left the tree (a daemon whose parent died first). Returns how many were killed.
    Raises TimeoutError if some are still there after 15 s.
    """
    import psutil

    killed: set[int] = set()
    deadline = time.monotonic() + _GONE_WITHIN_S
    while True:
        found = _descendants(pid) + _marked(marker)
        for process in found:
            try:
                process.kill()
                killed.add(process.pid)
            except psutil.NoSuchProcess:
                continue
        # Not psutil.wait_procs: it would reap our own child and take its exit status from whoever waits for it.
        left = _marked(marker)
        if not left:
            return len(killed)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes do not die: {[process.pid for process in left]}")
        time.sleep(_POLL_S)


def _descendants(pid: int) -> list[psutil.Process]:
    import psutil

    try:
        root = psutil.Process(pid)
        # The root first: what it would notice of its children's death, it shall not live to see.
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _marked(marker: str) -> list[psutil.Process]:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found
