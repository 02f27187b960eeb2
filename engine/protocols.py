"""What the controller needs from its parts.

Each protocol has a real implementation and, for tests, a simulated one; both pass the same contract tests.

All calls are coroutines on the controller's event loop. Times are seconds unless a name says otherwise; tokens are
counted per attempt, prompt not included.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ..journal.errors import UnlostError
from ..replay.events import AttemptKey, PromptRef, Receipt


class Clock(Protocol):
    """Time of the run."""

    def now_us(self) -> int:
        """Run clock, microseconds, never going backwards within a run."""
        ...

    def wall_us(self) -> int:
        """Unix time, microseconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        ...


Blocking = Callable[..., Awaitable[Any]]
"""Runs a blocking function off the loop: ``asyncio.to_thread``, or inline in a simulation."""


class Prompt(msgspec.Struct, frozen=True):
    """A dataset row and where it came from. ``row`` holds at least ``prompt``; maybe ``answer``, ``id``, ``task``."""

    ref: PromptRef
    row: dict[str, Any]


class WeightsRef(msgspec.Struct, frozen=True, array_like=True):
    """Published weights: ``path`` is a model folder (Hugging Face layout) that every worker can read."""

    branch: int
    version: int
    path: str


class Prefix(msgspec.Struct, frozen=True):
    """A durable token prefix to go on from. Raw little-endian bytes, not shuffled: int32 ids, float32 logprobs."""

    token_ids: bytes
    logprobs: bytes
    weight_spans: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        """Tokens in the prefix."""
        return len(self.token_ids) // 4


class AttemptRequest(msgspec.Struct, frozen=True):
    """One try at one sibling. ``seed`` depends on run seed, group and sibling only, so that a retry samples alike."""

    key: AttemptKey
    prompt: Prompt
    seed: int
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    prefix: Prefix | None = None


class AttemptError(Exception):
    """A try failed. ``kind``: ``infrastructure`` or ``data``; ``tokens`` generated and lost. Safe to pickle."""

    def __init__(self, kind: str, cause: str, tokens: int = 0) -> None:
        super().__init__(kind, cause, tokens)
        self.kind = kind
        self.cause = cause
        self.tokens = tokens


class AttemptAborted(Exception):
    """The try was ended by ``abort``. ``tokens`` generated so far; ``durable`` of these are in the payload journal."""

    def __init__(self, tokens: int = 0, durable: int = 0) -> None:
        super().__init__(tokens, durable)
        self.tokens = tokens
        self.durable = durable


class WorkerLost(Exception):
    """The worker's process is gone; its attempts must go elsewhere."""


class WorkerStats(msgspec.Struct, frozen=True):
    """``generated_tokens``: cumulative since the worker's start, counted in the generator, not in the journal."""

    worker: int
    generated_tokens: int
    running: int
    waiting: int
    durable_lag_seconds: float
    journal_failed: str = ""


class RolloutWorker(Protocol):
    """One generating worker with its own payload journal."""

    worker_id: int
    journal_name: str

    async def start(self, weights: WeightsRef) -> None:
        """Load model and weights, open the payload journal. Raises if it can't."""
        ...

    async def generate(self, request: AttemptRequest) -> Receipt:
        """Generate, score, and return once the sealed payload is durable (protocol rule 5).

        Raises AttemptError, AttemptAborted or WorkerLost.
        """
        ...

    async def put_row(self, key: AttemptKey) -> None:
        """Put the sealed row into the data plane; again is harmless. Raises WorkerLost, or KeyError if unknown."""
        ...

    async def abort(self, keys: Sequence[AttemptKey]) -> None:
        """End these attempts; their ``generate`` raises AttemptAborted. Unknown keys are ignored."""
        ...

    async def update_weights(self, weights: WeightsRef) -> float:
        """Pause decoding, load, go on with the same sequences. Returns the pause in seconds."""
        ...

    async def prune(self, keep_from: int) -> None:
        """Drop whole payload segments before offset ``keep_from``, but nothing that a running attempt needs."""
        ...

    async def stats(self) -> WorkerStats:
        """Counters now."""
        ...

    async def stop(self) -> WorkerStats:
        """Flush and close the payload journal; the process ends."""
        ...


class Row(msgspec.Struct, frozen=True):
    """One trained sequence. Raw little-endian bytes: int32 ids, float32 log-probabilities of the generated tokens."""

    key: AttemptKey
    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    weight_spans: tuple[tuple[int, int, int], ...]
    reward: float
    checksum: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an applied step reports."""

    step: int
    trainer_version: int
    loss: float
    reward_mean: float
    tokens: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepMismatch(Exception):
    """The trainer was asked for another step than its next one (protocol rule 17)."""


class Trainer(Protocol):
    """A group of one or more trainer ranks seen as one."""

    async def start(self) -> None:
        """Load the model; version 0 unless ``load`` follows."""
        ...

    async def train(self, step: int, groups: Sequence[Sequence[str]]) -> StepResult:
        """One optimizer step over ``groups`` (row keys by group, siblings in order), read from the data plane.

        ``step`` must equal the trainer's version, else StepMismatch and nothing happens (protocol rule 17).
        """
        ...

    async def version(self) -> int:
        """Applied steps. The answer to "did that lost call happen?"."""
        ...

    async def publish_weights(self, branch: int) -> WeightsRef:
        """Write the current weights where workers can load them, under a name that no other branch uses."""
        ...

    async def save(self, directory: str) -> dict[str, str]:
        """Write this version's weights, optimizer and random state into an existing directory, fsynced.

        Returns relative path -> SHA-256, taken while writing. State is captured before the first await returns to the
        trainer's queue: a later ``train`` does not change what is saved.
        """
        ...

    async def load(self, directory: str, digests: Mapping[str, str]) -> int:
        """Load what ``save`` wrote, each file verified against its digest before use. Returns the version."""
        ...

    async def stop(self) -> None:
        """Free the processes."""
        ...


class DataPlane(Protocol):
    """Rows by key. One client; the calls below are safe from one event loop."""

    async def start(self) -> None:
        """Bring the service up, within a deadline that names its cause."""
        ...

    async def put(self, row: Row) -> None:
        """Store one row singly (a batch put would make a snapshot a multiple of the data)."""
        ...

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Rows in the order of the keys. KeyError names those that are missing."""
        ...

    async def inventory(self) -> dict[str, int]:
        """Every row key there is, with its payload checksum, without touching payloads."""
        ...

    async def clear(self, keys: Sequence[str]) -> None:
        """Remove rows; unknown keys are ignored."""
        ...

    async def save(self, directory: str) -> dict[str, str]:
        """Native snapshot into a new directory, fsynced. Returns relative path -> SHA-256. Puts go on meanwhile."""
        ...

    async def load(self, directory: str, digests: Mapping[str, str]) -> None:
        """Load a snapshot into a freshly started service; digests are verified before anything is unpickled.

        SnapshotMismatch if it can't be loaded here (another number of storage units).
        """
        ...

    async def stop(self) -> None:
        """Free the processes."""
        ...


class SnapshotMismatch(Exception):
    """The snapshot does not fit this data plane; rows must be rebuilt from payloads."""


class CheckpointDamaged(UnlostError):
    """A file of a checkpoint is missing or its digest differs: proven damage, so an older checkpoint may serve.

    Raised by ``Trainer.load`` and ``DataPlane.load``; a transient I/O error is raised as the OSError that it is.
    """


class PromptSource(Protocol):
    """A map-style dataset in a stable order, or a seeded permutation per epoch."""

    fingerprint: str

    def __len__(self) -> int:
        """Rows per epoch."""
        ...

    def fetch(self, epoch: int, position: int, count: int) -> tuple[list[Prompt], int, int]:
        """``count`` prompts from there on, over the end of the epoch if need be; and where the next fetch begins."""
        ...

    def reread(self, ref: PromptRef) -> Prompt:
        """The prompt behind a reference. Raises PromptChanged if its content hash differs."""
        ...


WorkerFactory = Callable[[int, str], Awaitable[RolloutWorker]]
"""(worker id, payload journal name) -> a worker, not yet started."""
