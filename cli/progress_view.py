"""How a run shows itself: one live line on a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from ..engine.progress import Progress

_PLAIN_INTERVAL_S: Final = 10.0


def describe(progress: Progress) -> str:
    """Step, reward, what is in flight and buffered, speed, and how far the disk is behind."""
    if not progress.max_steps:  # nothing is known yet
        return f"[{progress.phase}]"
    reward = "-" if progress.reward_mean is None else f"{progress.reward_mean:.3f}"
    parts = [
        f"step {progress.step}/{progress.max_steps}",
        f"reward {reward}",
        f"in flight {progress.in_flight}",
        f"buffer {progress.buffered}",
        f"unfinished {progress.unfinished}",
        f"{progress.tokens_per_s:,.0f} tokens/s",
        f"durable lag {progress.durable_lag_s * 1e3:.0f} ms",
    ]
    if progress.incarnation > 1:
        parts.append(f"incarnation {progress.incarnation}")
    return "  ".join(parts) + ("" if progress.phase == "running" else f"  [{progress.phase}]")


class ProgressView(Protocol):
    """Takes looks at a run, from any thread, as often as they come."""

    def update(self, progress: Progress) -> None:
        """Show it, or not, as it suits the output."""
        ...


class PlainView:
    """A line when the step or the phase changes, when there is a message, and every ten seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: tuple[int, str] | None = None
        self._shown_at = float("-inf")

    def update(self, progress: Progress) -> None:
        """Print what is new."""
        with self._lock:
            if progress.message:
                print(progress.message, flush=True)
            now, state = time.monotonic(), (progress.step, progress.phase)
            if state != self._shown or now - self._shown_at >= _PLAIN_INTERVAL_S:
                self._shown, self._shown_at = state, now
                print(describe(progress), flush=True)


@contextmanager
def progress_view() -> Iterator[ProgressView]:
    """A view that fits standard output, for the length of the block."""
    if not sys.stdout.isatty():
        yield PlainView()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(Text("starting"), console=console, refresh_per_second=4, transient=True) as live:

        class LiveView:
            """One line that is rewritten; messages scroll above it."""

            def update(self, progress: Progress) -> None:
                """Replace the line."""
                if progress.message:
                    live.console.print(Text(progress.message))
                live.update(Text(describe(progress), no_wrap=True, overflow="ellipsis"))

        yield LiveView()
