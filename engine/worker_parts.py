"""What a rollout worker is put together from: the generator's protocol, the settings, and scoring in threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from ..replay.events import FAIL_DATA
from .protocols import AttemptError, Prompt, Row

log = logging.getLogger(__name__)


class HasBytes(Protocol):
    """An array of 4-byte items (numpy, array.array)."""

    def tobytes(self) -> bytes:
        """Its items, little-endian."""
        ...


class GeneratorEngine(Protocol):
    """What a worker needs from a generator; the embedded one has it, and vLLM's is wrapped to have it.

    Callbacks may come on any thread, in token order per request, ``on_done`` last. Reasons: ``eos``, ``length``,
    ``aborted``, or ``failed: <cause>``.
    """

    generated_tokens: int
    failure: str
    """Why it takes no more requests, or empty."""

    @property
    def running(self) -> int:
        """Sequences being decoded."""
        ...

    @property
    def waiting(self) -> int:
        """Requests not begun."""
        ...

    def submit(
        self,
        request_id: Hashable,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        prefix_ids: Sequence[int] = (),
        on_delta: Callable[[Any, Any, int, int], None],
        on_done: Callable[[str], None],
    ) -> None:
        """Queue a request; ``max_new_tokens`` counts the prefix. Raises for a request that can't work."""
        ...

    def abort(self, request_ids: Iterable[Hashable]) -> None:
        """End requests; unknown ids are ignored."""
        ...

    def load_weights(self, path: str, branch: int, version: int) -> float:
        """Swap weights between two steps. Blocks; returns the pause in seconds."""
        ...

    def start(self) -> None:
        """Begin to decode."""
        ...

    def stop(self) -> None:
        """End; what runs is done as aborted."""
        ...


class RowSink(Protocol):
    """The part of a data plane that a worker needs."""

    async def start(self) -> None:
        """Reach the service."""
        ...

    async def put(self, row: Row) -> None:
        """Store one row."""
        ...

    async def stop(self) -> None:
        """Let go of it."""
        ...


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker. ``row_cache_bytes_max``: sealed rows kept at hand for ``put_row``."""

    worker_id: int
    journal_name: str
    payloads: Literal["full", "none"] = "full"
    progress_interval_tokens: int = 64
    progress_interval_ms: float = 1000.0
    prompt_tokens_max: int = 0
    row_cache_bytes_max: int = 256 << 20


Encode = Callable[[Prompt], list[int]]
"""Prompt to token ids. What it raises is the prompt's fault."""

Score = Callable[[Prompt, list[int]], Awaitable[float]]
"""Prompt and generated token ids to a reward. Raises AttemptError."""


class ThreadedScore:
    """A blocking reward function in threads of its own, with a time-out. At most ``threads`` at once.

    A call that exceeds ``timeout_s`` fails its attempt (data) and its thread is left behind as a daemon: Python can't
    end it. ``function`` gets the prompt and the generated token ids.
    """

    def __init__(self, function: Callable[[Prompt, list[int]], float], *, timeout_s: float, threads: int = 8) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(threads)
        self.hung = 0

    async def __call__(self, prompt: Prompt, token_ids: list[int]) -> float:
        """The reward. Raises AttemptError: what the function raised, or that it took too long."""
        loop = asyncio.get_running_loop()
        async with self._slots:
            outcome: asyncio.Future[float] = loop.create_future()

            def settle(reward: float, error: Exception | None) -> None:
                if outcome.done():
                    self.hung -= 1  # it came back after all
                elif error is None:
                    outcome.set_result(reward)
                else:
                    outcome.set_exception(error)

            def body() -> None:
                reward, error = 0.0, None
                try:
                    reward = self._function(prompt, token_ids)
                except Exception as raised:  # noqa: BLE001  # a user's function: its fault fails the attempt
                    error = raised
                if not loop.is_closed():
                    loop.call_soon_threadsafe(settle, reward, error)

            threading.Thread(target=body, name="reward", daemon=True).start()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await outcome
            except AttemptError:
                raise
            except TimeoutError:
                if outcome.done() and not outcome.cancelled():
                    raise AttemptError(FAIL_DATA, "the reward function raised a TimeoutError") from None
                self.hung += 1
                log.warning("a reward call takes more than %g s; %d are hanging now", self._timeout_s, self.hung)
                raise AttemptError(FAIL_DATA, f"the reward function took more than {self._timeout_s:g} s") from None
            except Exception as error:
                raise AttemptError(FAIL_DATA, f"the reward raised {type(error).__name__}: {error}") from error
