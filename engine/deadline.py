"""Blocking calls from an event loop, with a deadline that names its cause.

``asyncio.to_thread`` is not enough where the call may never return (Ray and TransferQueue wait for ever for a resource
that does not exist): its pool joins the hung thread when the interpreter exits. These threads are daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from ..journal.errors import UnlostError

T = TypeVar("T")


class DeadlineExceeded(UnlostError, TimeoutError):
    """Something did not finish in time; the message says what, how long it was given, and the likely cause."""


async def call_in_daemon_thread(call: Callable[[], T], *, name: str, timeout_s: float, cause: Callable[[], str]) -> T:
    """Run ``call`` in a daemon thread of its own and return its result, or raise what it raised.

    After ``timeout_s`` seconds DeadlineExceeded is raised with the text of ``cause()``; the thread is left behind.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # T itself may include None

    def body() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001  # handed to the waiting task, whatever it is
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.shield(outcome), timeout_s)
    except TimeoutError:
        if outcome.done() and not outcome.cancelled() and outcome.exception() is not None:
            raise  # the call itself raised a TimeoutError
        outcome.cancel()
        raise DeadlineExceeded(f"{name}: not done after {timeout_s:g} s. {cause()}") from None
