"""The configuration tree: every key with its type, default, unit, one line of documentation and its rule on resume.

Promise: this module is the only list of configuration keys. ``docs/configuration.md`` is generated from it, unknown
keys are found by it, and the semantics fingerprint of a run is taken over the keys that are ``FIXED`` here.

A key is ``FIXED`` when changing it between two incarnations would make journaled work mean something else (which
prompts belong to which step, how tokens are drawn, what a reward is). Everything else is ``FREE``: speed, limits,
places, training hyper-parameters. Model and dataset are ``FREE`` here since their *content* is fingerprinted by the
run itself: their folder may move, their bytes may not change.

Units stand last in names (``_s`` seconds, ``_ms`` milliseconds, ``_bytes``); counts name what they count.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from ..journal.options import JournalOptions

FIXED: Final = "fixed"
FREE: Final = "free"

SAMPLER_STAMPING: Final = ("in_order",)
SAMPLER_KNOBS: Final[dict[str, tuple[str, ...]]] = {
    "in_order": ("max_lookahead_versions", "warmup_lookahead_versions"),
    "weight_fifo": ("max_staleness_versions",),
    "windowed": ("max_staleness_versions", "sample_freshest_first"),
    "ready_first": ("max_staleness_versions",),
}
"""Which of the sampler keys each sampler reads; ``custom`` may read all of them."""


def key(doc: str, *, unit: str = "", resume: str = FREE, path: bool = False) -> msgspec.Meta:
    """What a key carries besides its type. ``path``: relative values are resolved when the configuration is read."""
    return msgspec.Meta(description=doc, extra={"unit": unit, "resume": resume, "path": path})


Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections; immutable."""


class RunConfig(Section, frozen=True):
    """Which run this is."""

    dir: Annotated[Text | None, key("Folder of the run; default `runs/<run.name>`", path=True)] = None
    name: Annotated[
        Text | None, key("Name in displays; default: the file's name, or its folder's if the file is `config.yaml`")
    ] = None
    seed: Annotated[Natural, key("Seed of everything drawn at random, except the order of prompts", resume=FIXED)] = 0


class ModelConfig(Section, frozen=True):
    """The policy."""

    path: Annotated[
        Text, key("Model folder in Hugging Face format, with tokenizer (content is fingerprinted)", path=True)
    ]
    device: Annotated[Literal["auto", "cpu", "cuda"], key("`auto` takes a GPU if the process is given one")] = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "auto"],
        key("Number format of weights; `auto` as stored in the folder", resume=FIXED),
    ] = "float32"
    chat_template: Annotated[
        Literal["auto", "none"],
        key("`auto` renders prompts with the tokenizer's chat template if it has one", resume=FIXED),
    ] = "auto"


class DataConfig(Section, frozen=True):
    """The prompts."""

    train: Annotated[
        Text, key("JSONL file: `prompt`, and optionally `answer`, `id`, `task` (content is fingerprinted)", path=True)
    ]
    shuffle: Annotated[bool, key("A seeded permutation per epoch instead of the file's order", resume=FIXED)] = True
    seed: Annotated[Natural, key("Seed of that permutation", resume=FIXED)] = 0


class RewardConfig(Section, frozen=True):
    """How a response is scored."""

    function: Annotated[
        Text, key("`module:function`, called as `f(prompt, response, answer, row) -> float`", resume=FIXED)
    ]
    path: Annotated[
        Text | None,
        key("Folder that its module is looked for in, first; default: the configuration's folder", path=True),
    ] = None
    timeout_s: Annotated[Positive, key("A call that takes longer fails its attempt", unit="seconds")] = 30.0


class GrpoConfig(Section, frozen=True):
    """The training step."""

    num_prompts_per_step: Annotated[Count, key("Groups in a step", unit="prompts", resume=FIXED)] = 32
    num_generations_per_prompt: Annotated[Count, key("Siblings in a group", unit="rollouts", resume=FIXED)] = 8
    max_steps: Annotated[Count, key("The run is finished after this many", unit="steps")] = 100
    learning_rate: Annotated[NonNegative, key("Of AdamW")] = 1e-6
    weight_decay: Annotated[NonNegative, key("Of AdamW")] = 0.01
    clip_low: Annotated[NonNegative, key("The probability ratio is clipped below at 1 - this")] = 0.2
    clip_high: Annotated[NonNegative, key("The probability ratio is clipped above at 1 + this")] = 0.2
    max_importance_weight: Annotated[Positive, key("Off-policy correction is truncated at this weight")] = 2.0
    kl_coef: Annotated[NonNegative, key("Weight of the penalty on leaving the starting model; 0: off")] = 0.0
    normalize_std: Annotated[bool, key("Divide advantages by the group's standard deviation")] = True
    max_grad_norm: Annotated[Positive, key("Gradients are scaled down to this norm")] = 1.0
    micro_batch_tokens: Annotated[Count, key("A forward pass holds at most this many", unit="tokens")] = 8192


class GenerationConfig(Section, frozen=True):
    """How tokens are drawn."""

    max_new_tokens: Annotated[Count, key("A response ends here at the latest", unit="tokens", resume=FIXED)] = 256
    temperature: Annotated[NonNegative, key("0 is greedy", resume=FIXED)] = 1.0
    top_p: Annotated[Fraction, key("Nucleus sampling; 1: off", resume=FIXED)] = 1.0
    max_batch: Annotated[Count, key("Sequences that one worker decodes together", unit="sequences")] = 32
    deterministic: Annotated[
        bool, key("One sequence a batch, so that the same seed gives the same bits (slow)", resume=FIXED)
    ] = False


class SamplerConfig(Section, frozen=True):
    """Which groups a step trains on, and how far generation may run ahead."""

    name: Annotated[
        Literal["in_order", "weight_fifo", "windowed", "ready_first", "custom"],
        key("`in_order` stamps each batch with its step; see `docs/protocol.md`", resume=FIXED),
    ] = "in_order"
    max_lookahead_versions: Annotated[
        Natural,
        key(
            "`in_order`: steps that generation may be ahead; 0: on-policy. Above 0, what starts between a step and the "
            "weights it made is one version older",
            unit="versions",
            resume=FIXED,
        ),
    ] = 1
    warmup_lookahead_versions: Annotated[
        Natural | None,
        key(
            "`in_order`: the same before the first step; at least `max_lookahead_versions`",
            unit="versions",
            resume=FIXED,
        ),
    ] = None
    max_staleness_versions: Annotated[
        Natural, key("Other samplers: how old the weights of a trained group may be", unit="versions", resume=FIXED)
    ] = 1
    sample_freshest_first: Annotated[bool, key("`windowed`: newest weights first instead of oldest", resume=FIXED)] = (
        False
    )
    class_: Annotated[Text | None, key("`custom`: `module:ClassName`", resume=FIXED)] = msgspec.field(
        default=None, name="class"
    )


class AsyncRlConfig(Section, frozen=True):
    """The two pumps."""

    sampler: SamplerConfig = SamplerConfig()
    max_inflight_prompts: Annotated[Count, key("Groups being generated at once", unit="prompts")] = 32
    max_buffered_rollouts: Annotated[Count, key("Groups dispatched and not yet claimed for a step", unit="groups")] = 64
    min_groups_for_streaming_train: Annotated[
        Count | None, key("A step starts with so many ready groups; default: with all of them", unit="groups")
    ] = None
    recovery_granularity: Annotated[
        Literal["sibling", "prompt_group"],
        key("What a restart goes on from: finished siblings, or only finished groups"),
    ] = "sibling"
    stale_prompts: Annotated[
        Literal["drop", "requeue"], key("The prompt of a group that went stale is gone, or served again")
    ] = "drop"
    prefix: Annotated[
        Literal["resume", "regenerate"],
        key("An interrupted attempt goes on from its durable tokens, or from the first (needs `payloads: full`)"),
    ] = "resume"
    weight_sync: Annotated[
        Literal["continue", "abort"], key("On new weights, sequences in progress go on with them, or start again")
    ] = "continue"
    group_filter: Annotated[
        Literal["none", "zero_variance"], key("Discard groups whose rewards are all the same", resume=FIXED)
    ] = "none"


class RolloutFailureConfig(Section, frozen=True):
    """Budgets; all count across restarts."""

    max_infra_attempts_per_prompt: Annotated[
        Count, key("Tries that may fail through lost workers and the like", unit="attempts")
    ] = 5
    max_data_attempts_per_prompt: Annotated[
        Count, key("Tries that may fail through the prompt or its reward", unit="attempts")
    ] = 2
    backoff_base_s: Annotated[NonNegative, key("Wait before the second try; doubles each time", unit="seconds")] = 1.0
    max_backoff_s: Annotated[NonNegative, key("The wait grows no further", unit="seconds")] = 30.0
    max_skipped_prompts: Annotated[
        Natural, key("Prompts given up before the run stops (raise it and run again)", unit="prompts")
    ] = 0
    on_dropped_prompt: Annotated[
        Literal["shrink", "replace"], key("Train the step without the prompt, or put a spare in", resume=FIXED)
    ] = "shrink"
    max_replacement_attempts: Annotated[Natural, key("`replace`: spares tried for one place", unit="prompts")] = 1
    replacement_reserve_prompts: Annotated[Natural, key("`replace`: spares kept ready", unit="prompts")] = 1
    min_step_batch_fraction: Annotated[Fraction, key("A step shrunk below this part of its prompts stops the run")] = (
        0.9
    )


class WorkersConfig(Section, frozen=True):
    """Rollout workers."""

    count: Annotated[Count, key("Rollout workers", unit="processes")] = 1
    cpus: Annotated[NonNegative, key("Ray CPUs for each", unit="CPUs")] = 1.0
    gpus: Annotated[NonNegative, key("Ray GPUs for each", unit="GPUs")] = 0.0
    threads: Annotated[Count, key("torch threads in each", unit="threads")] = 1


class TrainerConfig(Section, frozen=True):
    """Trainer ranks."""

    world_size: Annotated[Count, key("Data-parallel trainer ranks", unit="processes")] = 1
    cpus: Annotated[NonNegative, key("Ray CPUs for each", unit="CPUs")] = 1.0
    gpus: Annotated[NonNegative, key("Ray GPUs for each", unit="GPUs")] = 0.0
    threads: Annotated[Count, key("torch threads in each", unit="threads")] = 1
    deterministic: Annotated[bool, key("Deterministic torch operations and order (slower)", resume=FIXED)] = False


class RayConfig(Section, frozen=True):
    """Where processes run."""

    address: Annotated[Text | None, key("Cluster to join; default: start one on this machine")] = None
    num_cpus: Annotated[
        Count | None, key("Logical CPUs of the cluster started here; default: what the run needs", unit="CPUs")
    ] = None
    start_timeout_s: Annotated[Positive, key("Start-up gives up after this, naming the cause", unit="seconds")] = 120.0


class CheckpointingConfig(Section, frozen=True):
    """Trainer checkpoints, at step boundaries."""

    enabled: Annotated[bool, key("Without, a restart trains from step 0 again, on journaled rollouts")] = True
    checkpoint_dir: Annotated[Text | None, key("Default: `checkpoints` in the run's folder", path=True)] = None
    save_period: Annotated[Count, key("Every so many", unit="steps")] = 10
    keep_latest_k: Annotated[
        Annotated[int, msgspec.Meta(ge=2)],
        key("Older ones are removed; two at least, so that a damaged one has a fallback", unit="checkpoints"),
    ] = 2
    save_data_plane: Annotated[bool, key("Put a data plane snapshot in; without, rows come from payloads")] = True


class RolloutCheckpointingConfig(Section, frozen=True):
    """Data plane snapshots between trainer checkpoints, and telemetry."""

    interval_s: Annotated[Positive | None, key("Time between snapshots; default: none are taken", unit="seconds")] = (
        None
    )
    max_consecutive_failures: Annotated[
        Count, key("Retryable failures in a row, trainer checkpoints included, before the run stops", unit="failures")
    ] = 3
    telemetry_interval_s: Annotated[
        Positive | None, key("Time between telemetry lines; default: off", unit="seconds")
    ] = None
    trace: Annotated[bool, key("Write `rollout_trace.jsonl` into the run's folder while running (`docs/trace.md`)")] = (
        False
    )


class DataPlaneConfig(Section, frozen=True):
    """Where rows lie between generation and training."""

    enabled: Annotated[bool, key("Must be on: rows reach the trainer through it")] = True
    backend: Annotated[
        Literal["simple", "mooncake", "yuanrong"],
        key("TransferQueue's storage; only `simple` has snapshots (the others: `save_data_plane: false`)"),
    ] = "simple"
    storage_units: Annotated[Count, key("Its storage processes", unit="processes")] = 1
    payloads: Annotated[
        Literal["full", "none"],
        key(
            "Journal every token (nothing durable is generated twice), or only the data plane holds them", resume=FIXED
        ),
    ] = "full"


class JournalConfig(Section, frozen=True):
    """Event journal and payload journals."""

    flush_interval_ms: Annotated[Positive, key("Events wait at most this long for company", unit="milliseconds")] = 20.0
    flush_interval_ms_max: Annotated[
        Positive, key("… and on slow storage, where the wait follows the sync time, this long", unit="milliseconds")
    ] = 1000.0
    segment_bytes_max: Annotated[Count, key("A new segment begins above this", unit="bytes")] = 64 << 20
    compression_level: Annotated[Annotated[int, msgspec.Meta(ge=1, le=19)], key("Of zstd")] = 1
    backlog_high_bytes: Annotated[Count, key("Above this, nothing new is dispatched", unit="bytes")] = 16 << 20
    backlog_max_bytes: Annotated[Count, key("At this, the run stops cleanly", unit="bytes")] = 256 << 20
    max_write_failures: Annotated[Count, key("Failed writes or syncs in a row before the journal has failed")] = 3
    on_failure: Annotated[
        Literal["stop", "degrade"], key("Then: end the run, or go on in memory, loudly, until `backlog_max_bytes`")
    ] = "stop"
    heartbeat_s: Annotated[Positive, key("The holder of a run says so often that it lives", unit="seconds")] = 5.0
    scan_on_open: Annotated[
        Literal["from_image", "all"], key("Opening checks the bytes that a restore reads, or all of them")
    ] = "from_image"
    progress_interval_tokens: Annotated[
        Count, key("Workers journal an attempt's tokens every so many", unit="tokens")
    ] = 64
    progress_interval_ms: Annotated[Positive, key("… or when the oldest has waited this long", unit="milliseconds")] = (
        1000.0
    )

    def options(self) -> JournalOptions:
        """The writer's settings (the keys of the same name). Raises JournalError for values that it refuses."""
        names = JournalOptions.__struct_fields__
        return JournalOptions(**{name: getattr(self, name) for name in self.__struct_fields__ if name in names})


class StopConfig(Section, frozen=True):
    """What ends a run early, orderly. Ctrl-C and SIGTERM always do."""

    signal: Annotated[Text | None, key("Another signal that does (Slurm: `#SBATCH --signal=B:USR1@120`)")] = "SIGUSR1"
    deadline_s: Annotated[
        Positive | None,
        key("Be over so long after the command started: it stops `grace_s` before; default: never", unit="seconds"),
    ] = None
    grace_s: Annotated[
        NonNegative, key("Time for a last checkpoint after any of these; less than `deadline_s`", unit="seconds")
    ] = 60.0


class Config(Section, frozen=True, kw_only=True):
    """A whole configuration, as read: paths absolute, ``run.dir``, ``run.name`` and the like filled in."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    grpo: GrpoConfig = GrpoConfig()
    generation: GenerationConfig = GenerationConfig()
    async_rl: AsyncRlConfig = AsyncRlConfig()
    rollout_failure: RolloutFailureConfig = RolloutFailureConfig()
    workers: WorkersConfig = WorkersConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray: RayConfig = RayConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    rollout_checkpointing: RolloutCheckpointingConfig = RolloutCheckpointingConfig()
    data_plane: DataPlaneConfig = DataPlaneConfig()
    journal: JournalConfig = JournalConfig()
    stop: StopConfig = StopConfig()

    @property
    def streaming_groups_min(self) -> int:
        """Ready groups with which a step may start: ``min_groups_for_streaming_train``, or the whole step."""
        return self.async_rl.min_groups_for_streaming_train or self.grpo.num_prompts_per_step

    @property
    def run_dir(self) -> str:
        """``run.dir``, which reading a configuration always fills in."""
        assert self.run.dir is not None, "a configuration built by hand needs run.dir"
        return self.run.dir

    @property
    def checkpoint_dir(self) -> str:
        """``checkpointing.checkpoint_dir``, which reading a configuration always fills in."""
        return self.checkpointing.checkpoint_dir or f"{self.run_dir}/checkpoints"


def get_key(config: Config, dotted: str) -> Any:
    """The value at ``section.key``, spelled as in the file."""
    node: Any = config
    for part in dotted.split("."):
        node = getattr(node, "class_" if part == "class" else part)
    return node
