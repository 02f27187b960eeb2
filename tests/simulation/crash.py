"""Where and how a life ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Crash:
    """Where a life ends. ``how``: append, before, queued, durable (an event), effect, phase, call, op, time.

    ``what`` names the event kind, effect or phase; ``count``: at its so-manieth occurrence. At ``time_s`` it ends
    anyway. ``after_restore``: occurrences count from RestoreStarted on.
    """

    how: str = "time"
    what: str = ""
    count: int = 1
    time_s: float = 1e9
    power: str = ""
    undead: bool = False
    after_restore: bool = False
    stop_s: float = 1e9  # asked to stop at that moment, orderly
