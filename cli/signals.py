"""From signals and the clock to a StopRequest.

| what comes | first | second | third |
|---|---|---|---|
| Ctrl-C (SIGINT) | orderly end, with a last checkpoint | no checkpoint, only a durable end | gone at once |
| SIGTERM, ``stop.signal`` | orderly end | no checkpoint | the same |
| ``stop.deadline_s`` less ``stop.grace_s`` | orderly end | | |
| ``stop.grace_s`` after any of these | | no checkpoint | |

Nothing that was journaled is lost by any of them, the last included: that is what the journal is for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..engine.config_keys import StopConfig
    from ..engine.progress import StopRequest

_HARD_EXIT_CODE: Final = 130


@contextmanager
def stopping(stop: StopRequest, config: StopConfig) -> Iterator[Callable[[], None]]:
    """Route signals and the deadline to ``stop`` while the block runs. On the main thread only.

    Yields a function that puts the handlers in place again, to be called every now and then: when Ray's core starts, it
    installs a SIGTERM handler of its own below Python's, which aborts the process three seconds later.
    """
    from ..engine.progress import REASON_DEADLINE, REASON_INTERRUPTED, REASON_SIGNAL

    interrupts = 0
    timers: list[threading.Timer] = []

    def start_timer(seconds: float, reason: str, detail: str) -> None:
        timer = threading.Timer(seconds, stop.set, (reason, detail))
        timer.daemon = True
        timers.append(timer)
        timer.start()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the handler's signature
        nonlocal interrupts
        signal.alarm(0)  # should Ray's handler have come first: it has set the alarm that aborts
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts > 2:
                os._exit(_HARD_EXIT_CODE)
        stop.set(REASON_INTERRUPTED if number == signal.SIGINT else REASON_SIGNAL, signal.Signals(number).name)
        if stop.level == 1:
            print("stopping; once more: without a checkpoint", file=sys.stderr)

    graced = False

    def on_stop() -> None:
        nonlocal graced
        if not graced:
            graced = True
            start_timer(config.grace_s, stop.reason or REASON_SIGNAL, "grace_s is over")

    stop.listen(on_stop)
    numbers = {signal.SIGINT, signal.SIGTERM}
    if config.signal is not None:
        numbers.add(signal.Signals[config.signal])
    before = {number: signal.getsignal(number) for number in numbers}

    def install() -> None:
        for number in numbers:
            signal.signal(number, on_signal)

    install()
    if config.deadline_s is not None:
        seconds = config.deadline_s - config.grace_s
        start_timer(seconds, REASON_DEADLINE, f"deadline of {config.deadline_s:g} s")
    try:
        yield install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()
