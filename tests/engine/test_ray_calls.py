"""Errors on their way out of an actor."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable

import pytest

from unlost.engine import ray_calls
from unlost.engine.data_plane import RowDamaged
from unlost.engine.deadline import DeadlineExceeded, call_in_daemon_thread
from unlost.engine.protocols import AttemptAborted, AttemptError, StepMismatch
from unlost.journal.errors import JournalDamaged
from unlost.replay.payload_records import PayloadDamaged

ERRORS = [
    AttemptError("data", "bad reward", 17),
    AttemptAborted(5, 3),
    StepMismatch("asked for step 3"),
    KeyError("i1.g1.s0.a0"),
    OSError(28, "No space left on device", "/somewhere"),
    RowDamaged(["i1.g1.s0.a0", "i1.g2.s0.a0"]),
    JournalDamaged("/run/events", "000.zst", 17, 3, "bad CRC"),
    PayloadDamaged("i00001-w00001", 5, "gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_arrives_as_what_it_is(error: Exception) -> None:
    """Class, text and attributes survive pickling, also of exceptions that build their message themselves."""

    async def failing() -> None:
        raise error

    reply = pickle.loads(pickle.dumps(await ray_calls.guarded(failing())))
    assert isinstance(reply, ray_calls.Failure)
    arrived = reply.error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    expected = {name: value for name, value in vars(error).items() if name != "__notes__"}
    assert {name: value for name, value in vars(arrived).items() if name != "__notes__"} == expected
    if isinstance(error, OSError):
        assert (arrived.errno, arrived.filename) == (28, "/somewhere")  # type: ignore[attr-defined]


async def test_an_error_that_can_not_travel_is_told() -> None:
    """What can't be pickled arrives as a RemoteFailure with its text."""

    class Local(Exception):
        pass

    async def failing() -> None:
        raise Local("only here")

    reply = await ray_calls.guarded(failing())
    assert isinstance(reply, ray_calls.Failure)
    arrived = pickle.loads(pickle.dumps(reply)).error()
    assert isinstance(arrived, ray_calls.RemoteFailure)
    assert str(arrived) == "Local: only here"


async def test_cancelling_passes_through() -> None:
    """A cancelled call in an actor is cancelled, not answered."""
    task = asyncio.ensure_future(ray_calls.guarded(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def reply_of(value: object) -> asyncio.Future[object]:
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


async def test_a_call_raises_what_the_actor_raised() -> None:
    """A Failure is raised as its error, with the remote traceback attached; a result is returned."""
    assert await ray_calls.call(reply_of(5), what="x") == 5
    with pytest.raises(AttemptError, match="bad") as raised:
        await ray_calls.call(reply_of(ray_calls.Failure.of(AttemptError("data", "bad"))), what="x")
    assert "in another process" in raised.value.__notes__[0]


async def test_a_dead_actor_is_lost() -> None:
    """Whatever Ray raises by itself means that the process is gone."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    for error in (ActorDiedError(), ActorUnavailableError("out of reach", None)):
        with pytest.raises(ray_calls.ActorLost, match="stats of worker 3: Actor"):
            await ray_calls.call(reply_of(error), what="stats of worker 3")


async def test_a_call_has_a_deadline_with_a_cause() -> None:
    """A reply that does not come in time is DeadlineExceeded; a TimeoutError of the actor stays what it is."""
    never: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    with pytest.raises(DeadlineExceeded, match=r"start of x: not done after 0\.01 s. No CPU is free"):
        await ray_calls.call(never, what="start of x", timeout_s=0.01, cause=lambda: "No CPU is free.")
    failure = ray_calls.Failure.of(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        await ray_calls.call(reply_of(failure), what="x", timeout_s=5)


@pytest.mark.parametrize("value", [None, 7])
async def test_a_daemon_thread_returns_its_result(value: object) -> None:
    """The result of the call comes back, None too."""
    assert await call_in_daemon_thread(lambda: value, name="x", timeout_s=5, cause=str) == value


async def test_a_daemon_threads_error_and_deadline() -> None:
    """What the call raises is raised, TimeoutError included; a hanging call is DeadlineExceeded and left behind."""

    def raising(error: Exception) -> Callable[[], None]:
        def call() -> None:
            raise error

        return call

    for error in (ValueError("wrong"), TimeoutError("own")):
        with pytest.raises(type(error), match=str(error)) as raised:
            await call_in_daemon_thread(raising(error), name="x", timeout_s=5, cause=str)
        assert not isinstance(raised.value, DeadlineExceeded)
    release = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"look: not done after 0\.02 s. It hangs"):
        await call_in_daemon_thread(release.wait, name="look", timeout_s=0.02, cause=lambda: "It hangs.")
    release.set()
