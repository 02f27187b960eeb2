"""Calls into Ray actors whose errors arrive as what they are.

Ray wraps what an actor raises and pickles exceptions by their arguments, which breaks those that build their message in
``__init__``. So actors of ours never raise: a ``Failure`` carries the exception's class and attributes, and the caller
raises it again. What Ray itself raises then means one thing only: the process, or the way to it, is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..journal.errors import UnlostError
from .deadline import DeadlineExceeded

T = TypeVar("T")


class ActorLost(Exception):
    """The actor's process is gone, or can't be reached."""


class RemoteFailure(UnlostError):
    """An error of an actor whose class does not exist here; the message holds its text."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way. ``kind``: the class; ``text``: traceback over there, for the log."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Pack an exception; what can't be pickled is replaced by its text."""
        text = "".join(traceback.format_exception(error))
        # An OSError's file names are in none of its attributes, only in what it is rebuilt from.
        arguments = tuple(error.__reduce__()[1]) if isinstance(error, OSError) else error.args
        failure = cls(type(error), arguments, dict(error.__dict__), text)
        try:
            pickle.dumps((failure.kind, failure.arguments, failure.attributes))
        except Exception:  # noqa: BLE001  # whatever a foreign class provokes
            return cls(RemoteFailure, (f"{type(error).__name__}: {error}",), {}, text)
        return failure

    def error(self) -> BaseException:
        """The exception again, without running its ``__init__``."""
        error = self.kind.__new__(self.kind, *self.arguments)
        if not isinstance(error, OSError):
            error.args = self.arguments
        error.__dict__.update(self.attributes)
        error.add_note(f"in another process:\n{self.text}")
        return error


async def guarded(work: Awaitable[T]) -> T | Failure:
    """Inside an actor: the result, or the error packed."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  # raised again by the caller
        return Failure.of(error)


async def call(reference: Any, *, what: str, timeout_s: float | None = None, cause: Callable[[], str] = str) -> Any:
    """Await the reply of a ``guarded`` method. Raises what it raised, ActorLost, or DeadlineExceeded."""
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(timeout_s) as limit:
            reply = await reference
    except RayError as error:
        raise ActorLost(
            f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"{what}: not done after {timeout_s:g} s. {cause()}") from None
    if isinstance(reply, Failure):
        raise reply.error()
    return reply


def kill(actor: Any) -> None:
    """End an actor's process; harmless if it is gone."""
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=True)


def free_cpus() -> str:
    """A sentence on what Ray has free, for the cause of a deadline."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    return (
        f"Of Ray's {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs, {free.get('CPU', 0):g} and "
        f"{free.get('GPU', 0):g} are free; what a process asks for must be (workers.*, trainer.*, ray.num_cpus)."
    )
