"""A bound on one simulated run's CPU time: a loop that never waits would hang the process, not only the virtual run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS_MAX = 60


@contextmanager
def cpu_bound() -> Iterator[None]:
    """Raise AssertionError in what runs inside after SECONDS_MAX of the process's own CPU time, whatever else runs."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS_MAX} s of CPU: something loops without waiting")

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
