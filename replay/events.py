"""The event vocabulary: one Struct per atomic transition of the single controller.

Promise: whatever must never be seen apart is in one event, so no lock is needed to keep it together.
``docs/events.md`` is generated from this module; nothing else lists the events.

Compatibility: tags are explicit and never reused; fields are only ever appended, with defaults. ``t`` is the run
clock in microseconds: monotonic over the whole run, incarnations included (``RunStarted.wall_us`` ties it to wall
clock time). Weights are named by ``(branch, version)``: ``version`` counts applied steps, a rollback starts a new
branch. A *step* is named by the trainer version it starts from, so ``StepClaimed.step == 3`` makes version 4.
"""

from __future__ import annotations

from typing import Any, Final, Union

import msgspec

# Reasons and causes are open strings in the journal (they grow); those that code compares are named here.
ABANDON_RESTART: Final = "restart"
ABANDON_STALE: Final = "stale"
ABANDON_WEIGHT_SYNC: Final = "weight_sync"
ABANDON_WORKER_LOST: Final = "worker_lost"
ABANDON_PAYLOAD_LOST: Final = "payload_lost"
ABANDON_STOPPED: Final = "stopped"
ABANDON_GROUP_DISCARDED: Final = "group_discarded"
ABANDON_GRANULARITY: Final = "prompt_group"

DISCARD_STALE_IN_FLIGHT: Final = "stale_in_flight"
DISCARD_DROPPED: Final = "dropped"
DISCARD_FILTERED: Final = "filtered"
DISCARD_POISONED: Final = "poisoned"
DISCARD_LOADER_END: Final = "loader_end"

FAIL_INFRASTRUCTURE: Final = "infrastructure"
FAIL_DATA: Final = "data"

ENDED_FINISHED: Final = "finished"

KIND_ORDINARY: Final = "ordinary"
KIND_SPARE: Final = "spare"
KIND_POOL: Final = "pool"

CHECKPOINT_TRAINER: Final = "trainer"
CHECKPOINT_ROLLOUT: Final = "rollout"


class PromptRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a prompt comes from; its body is read again from the dataset and must match ``content_hash``.

    ``sample_id`` is the dataset's own id, ``epoch`` the pass over the dataset, ``index`` the row in the dataset's
    stable order, ``content_hash`` the first 8 bytes of SHA-256 over the row's canonical JSON, as an unsigned integer.
    """

    sample_id: str
    epoch: int
    index: int
    content_hash: int
    task: str = ""


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker hands over for a sealed attempt: numbers, and where its payload is. Never tokens.

    ``journal`` and ``offset`` name the sealed payload record (``journal`` is the payload journal's folder name,
    empty under ``payloads: none``); ``checksum`` is CRC-32 over the payload's canonical bytes. ``weight_spans`` lists
    ``(first_token, branch, version)`` in rising order: which weights generated which tokens. ``tokens`` counts
    generated tokens, reused prefix included. ``first_offset`` is that of the attempt's first record in ``journal``:
    retention keeps everything from there on.
    """

    reward: float
    tokens: int
    version_min: int
    version_max: int
    journal: str
    offset: int
    checksum: int
    weight_spans: tuple[tuple[int, int, int], ...] = ()
    truncated: bool = False
    prompt_tokens: int = 0
    first_offset: int = 0


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Base of all events. ``t``: run clock, microseconds."""

    t: int


class RunStarted(Event, frozen=True, tag=1):
    """An incarnation begins. Durable before anything else that it does (protocol rule 1).

    ``fingerprints`` maps dataset, model and semantics to digests; ``settings`` is the rollout-semantic configuration.
    """

    run_id: str
    incarnation: int
    wall_us: int
    host: str
    pid: int
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    versions: dict[str, str]


class RunEnded(Event, frozen=True, tag=2):
    """An orderly end. ``reason``: finished, failed, interrupted, signal, deadline. ``generated``: (worker, tokens)."""

    reason: str
    detail: str = ""
    generated: tuple[tuple[int, int], ...] = ()


class BatchReserved(Event, frozen=True, tag=3):
    """The loader advances and the ledger owns the prompts, in one step.

    New groups get ids ``first_group .. first_group + len(prompts) - 1``. ``epoch``/``position`` is where the *next*
    fetch begins (protocol rule 4). ``kind``: ordinary, spare (goes to the reserve pool), or pool (an admission formed
    from ``pool_groups``, spares or requeued prompts taken out of the pool, besides any new prompts).
    """

    admission_id: int
    first_group: int
    prompts: tuple[PromptRef, ...]
    generations: int
    epoch: int
    position: int
    kind: str = KIND_ORDINARY
    pool_groups: tuple[int, ...] = ()


class BatchAdmitted(Event, frozen=True, tag=4):
    """The sampler admits a reserved batch; cursor and ledger move together. ``target_step``: -1 when unstamped."""

    admission_id: int
    target_step: int
    dispatch_index: int
    trainer_version: int


class PromptReplaced(Event, frozen=True, tag=5):
    """A prompt is given up and a spare repays it: one event (protocol rule 19).

    ``borrowed`` (or -1): a committed group re-stamped from ``borrowed_from`` to ``target_step``. ``spare`` is admitted
    for ``spare_target``: the lender's step when there was a loan, else ``target_step``.
    """

    group: int
    reason: str
    target_step: int
    spare: int
    spare_target: int
    trainer_version: int
    borrowed: int = -1
    borrowed_from: int = -1


class StepShortened(Event, frozen=True, tag=6):
    """A prompt is given up and its step made ``count`` groups smaller (kept by protocol rule 20)."""

    group: int
    reason: str
    step: int
    count: int = 1


class GroupDiscarded(Event, frozen=True, tag=7):
    """A group leaves the ledger on purpose. ``requeued_as`` >= 0: its prompt lives on under that new group id."""

    group: int
    reason: str
    detail: str = ""
    requeued_as: int = -1


class AttemptDispatched(Event, frozen=True, tag=8):
    """A worker is told to generate. ``prefix``: tokens reused from the sibling's longest durable prefix.

    ``prefix_from``: the attempt whose records hold that prefix, until this attempt's own journal holds it too.
    """

    group: int
    sibling: int
    attempt: int
    worker: int
    branch: int
    version: int
    prefix: int = 0
    prefix_from: int = -1


class AttemptSealed(Event, frozen=True, tag=9):
    """A sibling is finished and its payload durable (protocol rule 5). ``adopted``: taken over at restore."""

    group: int
    sibling: int
    attempt: int
    receipt: Receipt
    adopted: bool = False


class AttemptFailed(Event, frozen=True, tag=10):
    """A try went wrong by itself. ``kind``: infrastructure or data. ``tokens``: generated and thrown away."""

    group: int
    sibling: int
    attempt: int
    kind: str
    cause: str
    tokens: int = 0


class AttemptAbandoned(Event, frozen=True, tag=11):
    """A try was ended by us. ``tokens``: what it had generated, if known; ``durable``: of these, kept on disk."""

    group: int
    sibling: int
    attempt: int
    reason: str
    tokens: int = 0
    durable: int = 0


class GroupCommitted(Event, frozen=True, tag=12):
    """All rows of the group are in the data plane: the ledger hands it to the replay buffer."""

    group: int
    rows: int
    tokens: int
    version_min: int
    version_max: int


class GroupEvicted(Event, frozen=True, tag=13):
    """A committed group leaves the buffer by the sampler's staleness rule."""

    group: int
    reason: str
    requeued_as: int = -1


class StepClaimed(Event, frozen=True, tag=14):
    """The trainer takes ``groups`` for ``step``. A streamed step claims several times; one step is open at a time."""

    step: int
    groups: tuple[int, ...]


class StepApplied(Event, frozen=True, tag=15):
    """The optimizer step is done: ``trainer_version == step + 1``. ``generated``: (worker, cumulative tokens)."""

    step: int
    trainer_version: int
    loss: float = 0.0
    reward_mean: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    generated: tuple[tuple[int, int], ...] = ()
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class WeightsSynced(Event, frozen=True, tag=16):
    """All workers generate with these weights from here on. ``seconds``: how long generation was paused at most."""

    branch: int
    version: int
    seconds: float
    workers: int = 0


class RowsCleared(Event, frozen=True, tag=17):
    """The rows of these groups may go. Durable before the clear itself."""

    groups: tuple[int, ...]


class CheckpointStarted(Event, frozen=True, tag=18):
    """This event's own offset is the cut. ``kind``: trainer (step boundary) or rollout (any moment)."""

    checkpoint: int
    kind: str
    trainer_version: int


class CheckpointCommitted(Event, frozen=True, tag=19):
    """Published and durable. ``floor`` is the oldest trainer version that a restore may still fall back to."""

    checkpoint: int
    kind: str
    trainer_version: int
    cut: int
    name: str
    digest: str
    bytes: int
    seconds: float
    floor: int
    rows: int = 0
    rows_missing: int = 0
    clears_deferred: int = 0


class CheckpointFailed(Event, frozen=True, tag=20):
    """``retryable``: counts towards the limit; otherwise the run stops."""

    checkpoint: int
    kind: str
    reason: str
    retryable: bool
    seconds: float = 0.0


class CheckpointSkipped(Event, frozen=True, tag=21):
    """An attempt that did not start, and why."""

    kind: str
    reason: str


class RestoreStarted(Event, frozen=True, tag=22):
    """A restart begins to take over. ``checkpoint`` -1: from step 0."""

    checkpoint: int
    from_version: int
    to_version: int
    name: str = ""
    last_t: int = 0


class TrainerRolledBack(Event, frozen=True, tag=23):
    """The trainer goes back to ``to_version`` on a new ``branch``; ``groups`` return to the buffer complete.

    To the version that it is at, on the same branch, it only lets go of a claim: at a restore, at an orderly end, and
    where rows of the claim are lost.
    """

    from_version: int
    to_version: int
    branch: int
    groups: tuple[int, ...]


class RestoreCompleted(Event, frozen=True, tag=24):
    """Durable before the first dispatch. ``counters``: all restore counters together, zeros too (protocol rule 23)."""

    counters: dict[str, int]
    seconds: float
    timings: dict[str, float] = msgspec.field(default_factory=dict)


class StateImage(Event, frozen=True, tag=25):
    """The whole folded state as of the event before this one; a fold may begin here."""

    state: msgspec.Raw


class WorkerStarted(Event, frozen=True, tag=26):
    """A rollout worker is ready. Worker ids are never reused in a run (protocol rule 6)."""

    worker: int
    journal: str
    host: str = ""
    pid: int = 0


class WorkerStopped(Event, frozen=True, tag=27):
    """A rollout worker is gone. ``generated``: its own last known token count; -1 unknown."""

    worker: int
    reason: str
    generated: int = -1


class DataPlaneRestarted(Event, frozen=True, tag=28):
    """The data plane was lost and came back; ``rows`` were put back from payloads."""

    rows: int
    seconds: float


AnyEvent = Union[  # noqa: UP007 - msgspec and EVENT_TYPES read its arguments
    RunStarted,
    RunEnded,
    BatchReserved,
    BatchAdmitted,
    PromptReplaced,
    StepShortened,
    GroupDiscarded,
    AttemptDispatched,
    AttemptSealed,
    AttemptFailed,
    AttemptAbandoned,
    GroupCommitted,
    GroupEvicted,
    StepClaimed,
    StepApplied,
    WeightsSynced,
    RowsCleared,
    CheckpointStarted,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSkipped,
    RestoreStarted,
    TrainerRolledBack,
    RestoreCompleted,
    StateImage,
    WorkerStarted,
    WorkerStopped,
    DataPlaneRestarted,
]

EVENT_TYPES: Final[tuple[type[Event], ...]] = AnyEvent.__args__  # type: ignore[attr-defined]


# --- payload journals: two record kinds of their own ---------------------------------------------------------------


def row_key(incarnation: int, group: int, sibling: int, attempt: int) -> str:
    """The key of an attempt's row in the data plane; ``AttemptKey.row_key`` without making the key first."""
    return f"i{incarnation}.g{group}.s{sibling}.a{attempt}"


class AttemptKey(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """Identity of an attempt across the whole run; every payload record, row key and receipt names it.

    ``incarnation`` is that of the dispatch (protocol rule 3).
    """

    incarnation: int
    group: int
    sibling: int
    attempt: int

    def row_key(self) -> str:
        """The key of this attempt's row in the data plane."""
        return row_key(self.incarnation, self.group, self.sibling, self.attempt)


class ProgressRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Tokens ``first .. first + count - 1`` of an attempt, with the weights that made them.

    ``token_ids``: int32, ``logprobs``: float32; both little-endian, byte-shuffled (see ``payload_records.shuffle``).
    """

    t: int
    key: AttemptKey
    first: int
    count: int
    token_ids: bytes
    logprobs: bytes
    weight_spans: tuple[tuple[int, int, int], ...]


class SealedRecord(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The attempt is finished: the rest of its tokens, and the counts and results of the whole.

    ``first``/``count`` describe the tokens in this record; ``total`` = all generated tokens = sum of all chunks.
    ``chunks`` are the offsets of this attempt's progress records in the same journal, in token order (protocol rule 7:
    its own journal is enough). An adopted seal needs nothing else: reward and weight spans are here. ``prompt_ids``:
    int32, little-endian, byte-shuffled like ``token_ids``.
    """

    t: int
    key: AttemptKey
    first: int
    count: int
    token_ids: bytes
    logprobs: bytes
    weight_spans: tuple[tuple[int, int, int], ...]
    total: int
    reward: float
    checksum: int
    truncated: bool
    prompt_ids: bytes
    prompt_count: int
    chunks: tuple[int, ...] = ()
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


PayloadRecord = ProgressRecord | SealedRecord
