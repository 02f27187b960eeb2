"""The journal's two clocks behind one protocol, so that a simulation can drive them."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """``monotonic`` in seconds for intervals; ``wall_ns`` in nanoseconds since 1970 for what is written down."""

    def monotonic(self) -> float: ...

    def wall_ns(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds, never going back, start unspecified."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, as far as the machine knows."""
        return time.time_ns()
