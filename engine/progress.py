"""Three small types between whoever starts a run and the run itself: how it goes, how it ended, how to stop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from ..replay.events import ENDED_FINISHED

EXIT_FINISHED: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_RESUMABLE: Final = 75
EXIT_INTERRUPTED: Final = 130

REASON_FINISHED: Final = ENDED_FINISHED
REASON_FAILED: Final = "failed"
REASON_INTERRUPTED: Final = "interrupted"
REASON_SIGNAL: Final = "signal"
REASON_DEADLINE: Final = "deadline"

EXIT_CODES: Final[dict[str, int]] = {
    REASON_FINISHED: EXIT_FINISHED,
    REASON_FAILED: EXIT_FAILED,
    REASON_INTERRUPTED: EXIT_INTERRUPTED,
    REASON_SIGNAL: EXIT_RESUMABLE,
    REASON_DEADLINE: EXIT_RESUMABLE,
}
"""Why a run ended -> exit code of the command. 75 is sysexits' EX_TEMPFAIL: run the same command again."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A look at a running run; crosses process boundaries.

    ``step``: steps applied, of ``max_steps``. ``in_flight``: groups being generated; ``buffered``: complete groups not
    yet claimed; ``unfinished``: groups that a restart would have to finish. ``tokens_per_s`` over the last interval,
    ``generated_tokens`` in this incarnation. ``durable_lag_s``: age of the oldest event not yet durable. ``phase``:
    starting, restoring, running, checkpointing, stopping, ended; ``message`` is shown once, as a line of its own.
    """

    step: int = 0
    max_steps: int = 0
    trainer_version: int = 0
    reward_mean: float | None = None
    in_flight: int = 0
    buffered: int = 0
    unfinished: int = 0
    tokens_per_s: float = 0.0
    generated_tokens: int = 0
    durable_lag_s: float = 0.0
    phase: str = "starting"
    incarnation: int = 0
    message: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. ``exit_code`` is the command's; ``detail`` is one line for people."""

    reason: str
    exit_code: int
    detail: str
    run_dir: str


@dataclass(frozen=True, slots=True)
class _Asked:
    reason: str
    detail: str


class StopRequest:
    """Asks a run to stop; may be set from a signal handler or any thread, more than once.

    The first call asks for an orderly end, with a last checkpoint if time allows. A further one makes it harsher: no
    checkpoint, only a durable end (``level`` 2). What was journaled is kept either way.

    No lock: a signal handler runs on the main thread between two bytecodes and would wait for a lock that this same
    thread holds. Each call is one append to a list, which is atomic.
    """

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._listeners: list[Callable[[], None]] = []

    def set(self, reason: str, detail: str = "") -> None:
        """Ask. ``reason``: interrupted, signal or deadline; ``detail``: e.g. the signal's name. Listeners are told."""
        self._asked.append(_Asked(reason, detail))
        for listener in tuple(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at every ``set``, from the thread that sets, and now if it is set already.

        It may be called once too often, so it must only wake up who looks at ``level``
        (``lambda: loop.call_soon_threadsafe(event.set)``).
        """
        self._listeners.append(listener)
        if self._asked:
            listener()

    @property
    def level(self) -> int:
        """0: go on; 1: end orderly; 2: end now."""
        return min(len(self._asked), 2)

    @property
    def reason(self) -> str | None:
        """Of the first call."""
        return self._asked[0].reason if self._asked else None

    @property
    def detail(self) -> str:
        """Of the first call."""
        return self._asked[0].detail if self._asked else ""
