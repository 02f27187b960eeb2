"""The runs of a trace and their clocks: which opening a line belongs to, and when it was.

Times are Unix times. The clock may have been set between two runs: what unlost wrote tells the run's own clock too, so
that the time between two of its openings is the journal's; anyone else's run that begins before the end of the run
before it in the file is moved on to that end.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Final

from . import events as ev
from .trace_reading import COUNT_MAX, Fields, Lacking

RUN_STARTED: Final = "run_started"


class Opening:
    """What ``run_started`` tells. ``clock``: the run's clock then, in microseconds, if it is one of ours."""

    def __init__(self, f: Fields) -> None:
        self.incarnation = f.integer("incarnation", 0)
        self.host = f.text("host")
        self.pid = f.integer("pid", 0, most=COUNT_MAX)
        self.clock = f.seconds("clock")
        self.settings: dict[str, Any] = f.settings("settings")


class Runs:
    """Told of every line in order. ``run`` is that of the last one, ``journal`` the same without its incarnation.

    ``contiguous``: the lines of a run follow one another, so that times that step back tell of a clock that was set.
    """

    def __init__(self, count: Counter[str], *, contiguous: bool) -> None:
        self.run = ""
        self.journal = ""
        self.shift = 0
        self.last_t: dict[int, int] = {}
        self._count = count
        self._contiguous = contiguous
        self._numbers: dict[str, int] = {}
        self._own: set[str] = set()
        self._anchors: dict[str, int] = {}
        self._t = 0

    @property
    def own(self) -> bool:
        """Whether unlost wrote this run, going by its lines so far."""
        return self.run in self._own

    def is_new(self, run: str) -> bool:
        """Whether a line of that run begins a run, or goes on with another than the line before."""
        return run != self.run or not self._numbers

    def begin(self, run: str, f: Fields, *, started: bool) -> list[ev.Event]:
        """A run's first line. ``started``: it is a ``run_started``."""
        self.run, self.journal = run, run.rpartition("-")[0] or run
        if run in self._numbers:
            self._count["mixed"] += 1
            return []
        opening = Opening(Fields({}))
        if started:
            with contextlib.suppress(Lacking):  # the line's handler tells
                opening = Opening(f)
        raw = f.seconds("t")
        self.shift = 0
        if raw is not None:
            self._set_clock(raw, opening.clock)
        before = max(self._numbers.values(), default=0)
        number = self._numbers[run] = max(opening.incarnation, before + 1)
        self._t = self._t if raw is None else raw + self.shift
        run_id = run if opening.clock is None else self.journal
        wall = self._t if raw is None else raw
        settings = opening.settings
        return [ev.RunStarted(self._t, run_id, number, wall, opening.host, opening.pid, {}, settings, {})]

    def _set_clock(self, raw: int, clock: int | None) -> None:
        if clock is not None:
            anchor = raw - clock
            self.shift = self._anchors.setdefault(self.journal, anchor) - anchor
        if self._numbers and self._contiguous and raw + self.shift < self._t:
            self._count["stepped"] += 1
            self.shift = self._t - raw

    def is_ours(self) -> None:
        """Unlost wrote this run."""
        self._own.add(self.run)

    def time(self, f: Fields) -> int:
        """When the line was, in microseconds."""
        raw = f.seconds("t")
        if raw is None:
            self._count["timeless"] += 1
        elif raw + self.shift < self._t:
            self._count["backwards"] += 1
        else:
            self._t = raw + self.shift
        self.last_t[self._numbers[self.run]] = self._t
        return self._t
