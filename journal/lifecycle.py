"""What happens to open writers when the process forks or ends."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0


class _Writer(Protocol):
    @property
    def threaded(self) -> bool: ...

    def close(self, timeout_s: float | None = None) -> None: ...

    def after_fork_in_child(self) -> None: ...


LIVE: weakref.WeakSet[_Writer] = weakref.WeakSet()
"""Every open writer of this process."""


def _after_fork_in_child() -> None:
    for writer in list(LIVE):
        writer.after_fork_in_child()
    LIVE.clear()


def _at_exit() -> None:
    """A daemon thread dies with the interpreter: what is queued is made durable before that.

    A writer without a thread is pumped by its owner, who may be a simulation of a machine that is gone.
    """
    for writer in list(LIVE):
        try:
            if writer.threaded:
                writer.close(_EXIT_TIMEOUT_S)
        except Exception:
            logger.exception("closing a journal at exit")


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
