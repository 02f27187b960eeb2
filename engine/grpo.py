"""The trainer's core: group-relative policy optimization on one rank, with bit-exact saves without pickles.

Promise: ``train`` applies exactly the step that it is asked for, or raises and changes nothing; ``capture`` copies the
state at once, so that writing it may go on beside later steps; ``load`` verifies every file before it uses any, and
what follows a load is, bit for bit, what would have followed without the interruption (``deterministic``; same
machine, world size and settings).

Ranks are data parallel: each rank is given its own share of the groups (``share``) and calls the same methods in the
same order; gradients and sums are added over the ranks. Rank 0 writes weights and optimizer, each rank its random
state. No Ray in here.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from ..journal.errors import UnlostError
from . import models, tensors
from .grpo_batch import MicroBatch, RowRefused, Sample, micro_batches, samples_of, staleness
from .grpo_loss import LossSettings, loss_parts, response_logprobs
from .protocols import Row, StepMismatch, StepResult

log = logging.getLogger(__name__)

T = TypeVar("T")

WEIGHTS_FILE: Final = "weights.safetensors"
OPTIMIZER_FILE: Final = "optimizer.safetensors"
STATE_FILE: Final = "trainer.json"
_FORMAT: Final = 1
_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")


def random_file(rank: int) -> str:
    """Name of the file with a rank's random state."""
    return f"random-{rank:05d}.safetensors"


class TrainingFailed(UnlostError):
    """The step can't be applied, or the trainer's state can't be relied on any more; the message says which."""


class CheckpointMismatch(UnlostError):
    """The saved state is sound but belongs to another model or format."""


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """Hyper-parameters; all may differ on resume. See ``engine/grpo_loss.py`` for the formula.

    ``updates_per_step``: optimizer updates on the same groups. ``warmup_steps``: the learning rate rises linearly over
    that many. ``micro_batch_tokens``: size of a forward pass, padding included. ``temperature``: of the generation.
    """

    learning_rate: float = 1e-6
    weight_decay: float = 0.01
    warmup_steps: int = 0
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_importance_weight: float = 2.0
    kl_coef: float = 0.0
    normalize_std: bool = True
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 8192
    temperature: float = 1.0
    updates_per_step: int = 1
    gradient_checkpointing: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Captured:
    """A copy of one rank's state at ``version``, independent of the trainer; ``write`` may run in any thread."""

    version: int
    rank: int
    world_size: int
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    random: Mapping[str, torch.Tensor]

    def write(self, directory: str | Path) -> dict[str, str]:
        """Write into an existing directory that no other capture was written to; fsync files and directory.

        Returns relative path -> SHA-256 of this rank's files, taken while writing. Raises OSError.
        """
        folder = Path(directory)
        digests = {random_file(self.rank): tensors.write_tensors(folder / random_file(self.rank), self.random)}
        if self.rank == 0:
            digests[WEIGHTS_FILE] = tensors.write_tensors(folder / WEIGHTS_FILE, self.weights)
            digests[OPTIMIZER_FILE] = tensors.write_tensors(folder / OPTIMIZER_FILE, self.optimizer)
            state = {"format": _FORMAT, "version": self.version, "world_size": self.world_size}
            digests[STATE_FILE] = tensors.write_json(folder / STATE_FILE, state)
        tensors.sync_folder(folder)
        return digests


class GrpoTrainer:
    """One rank of the trainer. All methods are to be called from one thread.

    ``device``: auto, cpu, cuda, cuda:N. ``dtype``: of forward and backward passes: bfloat16 by autocast, auto as
    the folder stores them, float16 counts as float32 (it would need its losses scaled); weights and optimizer are
    always float32. ``init_method``: where ranks meet
    (``tcp://host:port`` or ``file:///path``), for ``world_size`` > 1; a rank that waits for another longer than
    ``rank_timeout_s`` raises. Raises ModelFolderError.
    """

    def __init__(
        self,
        model_path: str | Path,
        settings: GrpoSettings | None = None,
        *,
        device: str = "auto",
        dtype: str = "float32",
        deterministic: bool = False,
        threads: int = 0,
        rank: int = 0,
        world_size: int = 1,
        init_method: str = "",
        rank_timeout_s: float = 600.0,
    ) -> None:
        self.settings = settings or GrpoSettings()
        self.rank, self.world_size = rank, world_size
        if deterministic:
            models.make_deterministic(threads or 1)
        elif threads:
            torch.set_num_threads(threads)
        self.model_path = Path(model_path)
        self.device = models.resolve_device(device)
        bfloat16 = models.resolve_dtype(dtype, model_path) == torch.bfloat16
        self._compute_dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.model = models.load_model(model_path, device=self.device, dtype=torch.float32)
        self.model.config.use_cache = False
        if self.settings.gradient_checkpointing:
            older = self.model.gradient_checkpointing_enable  # renamed in transformers 5.x
            getattr(self.model, "activation_checkpointing_enable", older)()
            self.model.train()  # transformers recomputes in training mode only
        self._reference = self._load_reference()
        self._parameters = {name: p for name, p in models.named_tensors(self.model).items() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )
        self._forward = _Scores(self.model, self.device, self._compute_dtype, self.settings.temperature)
        self.version = 0
        self._spoiled = ""
        self._reseed()
        if world_size > 1 and not dist.is_initialized():
            timeout = dt.timedelta(seconds=rank_timeout_s)
            dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)

    def _load_reference(self) -> Any:
        if self.settings.kl_coef == 0:
            return None
        return models.load_model(self.model_path, device=self.device, dtype=torch.float32).requires_grad_(
            requires_grad=False
        )

    def _reseed(self) -> None:
        torch.manual_seed((self.settings.seed << 20) + (self.version << 8) + self.rank)

    def share(self, groups: Sequence[T]) -> Sequence[T]:
        """Of all groups of a step, those that this rank trains on."""
        return groups[self.rank :: self.world_size]

    # --- training ---------------------------------------------------------------------------------------------

    def train(self, step: int, groups: Sequence[Sequence[Row]]) -> StepResult:
        """One step over this rank's share of the groups; the result is that of all ranks together.

        Raises StepMismatch when ``step`` is not the trainer's version (protocol rule 17), RowRefused for a bad row and
        TrainingFailed for a gradient that is not finite: nothing has changed then, on any rank.
        """
        if self._spoiled:
            raise TrainingFailed(f"this trainer's weights can't be relied on: {self._spoiled}; restore a checkpoint")
        if step != self.version:
            raise StepMismatch(f"asked for step {step}, the next one is {self.version}")
        started = time.perf_counter()
        samples = self._agreed_samples(groups)
        metrics = self._row_metrics(groups)
        tokens = int(metrics.pop("tokens"))
        batches = micro_batches(samples, self.settings.micro_batch_tokens, self.device)
        loss = self._updates(batches, max(tokens, 1), metrics)
        self.version += 1
        reward_mean = metrics.pop("reward_mean")
        seconds = time.perf_counter() - started
        return StepResult(step, self.version, loss, reward_mean, tokens, seconds, metrics)

    def _agreed_samples(self, groups: Sequence[Sequence[Row]]) -> list[Sample]:
        """The samples, once every rank has found its rows good: none must wait for the gradient of one that gave up."""
        refused: RowRefused | None = None
        samples: list[Sample] = []
        try:
            samples = samples_of(
                groups, normalize_std=self.settings.normalize_std, vocabulary=self.model.config.vocab_size
            )
        except RowRefused as error:
            refused = error
        ranks_refusing = self._added({"refused": float(refused is not None)})["refused"]
        if refused is not None:
            raise refused
        if ranks_refusing:
            raise RowRefused(f"{int(ranks_refusing)} other rank(s) refused their rows")
        return samples

    def _row_metrics(self, groups: Sequence[Sequence[Row]]) -> dict[str, float]:
        rows = [row for group in groups for row in group]
        ages = [staleness(row, self.version) for row in rows]
        equal = sum(1 for group in groups if len({row.reward for row in group}) <= 1)
        total = self._added(
            {
                "rows": len(rows),
                "groups": len(groups),
                "groups_equal": equal,
                "tokens": sum(len(row.token_ids) // 4 for row in rows),
                "rewards": sum(row.reward for row in rows),
                "squares": sum(row.reward**2 for row in rows),
                "ages": sum(age for age, _ in ages),
                "truncated": sum(row.truncated for row in rows),
            }
        )
        count, tokens = max(total["rows"], 1), max(total["tokens"], 1)
        mean = total["rewards"] / count
        return {
            "tokens": total["tokens"],
            "reward_mean": mean,
            "reward_std": math.sqrt(max(total["squares"] / count - mean**2, 0.0)),
            "groups": total["groups"],
            "groups_zero_variance": total["groups_equal"],
            "response_tokens_mean": total["tokens"] / count,
            "truncated_fraction": total["truncated"] / count,
            "staleness_mean": total["ages"] / tokens,
            "staleness_max": self._largest(max((worst for _, worst in ages), default=0.0)),
        }

    def _updates(self, batches: list[MicroBatch], tokens: int, metrics: dict[str, float]) -> float:
        """Apply the optimizer updates of a step; adds to ``metrics`` and returns the mean loss."""
        updates = self.settings.updates_per_step
        proximal = [None] * len(batches)
        if updates > 1:
            with torch.no_grad():
                proximal = [self._forward(batch) for batch in batches]
        losses: list[float] = []
        for update in range(updates):
            loss, sums = self._gradient(batches, proximal, tokens)
            norm = self._reduced_norm()
            if not math.isfinite(norm):
                self._give_up(update, f"step {self.version}: the gradient's norm is {norm}; lower grpo.learning_rate")
            try:
                self._optimizer_step()
            except BaseException as error:
                self._spoiled = f"step {self.version}: the optimizer stopped half-way ({type(error).__name__}: {error})"
                raise
            losses.append(loss)
            metrics |= {name: value / tokens for name, value in sums.items()}
            metrics["grad_norm"] = norm
        metrics["learning_rate"] = self._learning_rate()
        return sum(losses) / len(losses)

    def _give_up(self, update: int, reason: str) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if update:
            self._spoiled = reason  # earlier updates of this step have been applied
        raise TrainingFailed(reason)

    def _gradient(
        self, batches: list[MicroBatch], proximal: Sequence[torch.Tensor | None], tokens: int
    ) -> tuple[float, dict[str, float]]:
        """Leave this rank's gradient in the parameters; returns loss and token sums of all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        constants = LossSettings(
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            max_importance_weight=self.settings.max_importance_weight,
            kl_coef=self.settings.kl_coef,
        )
        sums: dict[str, float] = dict.fromkeys(_TOKEN_SUMS, 0.0) | {"loss": 0.0}
        if self._reference is not None:
            sums["kl_reference"] = 0.0
        for batch, anchor in zip(batches, proximal, strict=True):
            reference = self._reference_logprobs(batch)
            current = self._forward(batch)
            parts = loss_parts(current, batch, constants, tokens, proximal=anchor, reference=reference)
            parts.total.backward()
            sums["loss"] += float(parts.total.detach())
            for name, value in parts.sums.items():
                sums[name] += float(value)
        sums = self._added(sums)
        return sums.pop("loss"), sums

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return _Scores(self._reference, self.device, self._compute_dtype, self.settings.temperature)(batch)

    def _reduced_norm(self) -> float:
        """Add the gradients over the ranks and clip them; returns their norm before clipping."""
        for parameter in self._parameters.values():
            if parameter.grad is None:  # a rank without rows still takes part
                parameter.grad = torch.zeros_like(parameter)
        if self.world_size > 1:
            works = [dist.all_reduce(p.grad, async_op=True) for p in self._parameters.values()]
            for work in works:
                work.wait()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.settings.max_grad_norm)
        return float(norm)

    def _optimizer_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _learning_rate(self) -> float:
        warmup = self.settings.warmup_steps
        return self.settings.learning_rate * (min(1.0, (self.version + 1) / warmup) if warmup else 1.0)

    def _added(self, values: Mapping[str, float]) -> dict[str, float]:
        if self.world_size == 1:
            return dict(values)
        vector = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(vector)
        return dict(zip(values, vector.tolist(), strict=True))

    def _largest(self, value: float) -> float:
        if self.world_size == 1:
            return value
        vector = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        return float(vector[0])

    # --- state ------------------------------------------------------------------------------------------------

    def capture(self) -> Captured:
        """Copy the state to host memory. Raises TrainingFailed if it can't be relied on."""
        if self._spoiled:
            raise TrainingFailed(f"this trainer's weights can't be relied on: {self._spoiled}; restore a checkpoint")
        saved: dict[str, torch.Tensor] = {}
        weights: dict[str, torch.Tensor] = {}
        if self.rank == 0:
            weights = {name: _host_copy(tensor) for name, tensor in models.named_tensors(self.model).items()}
            saved = {name: _host_copy(tensor) for name, tensor in self._optimizer_tensors()}
        random = {"torch": torch.get_rng_state()}
        if self.device.startswith("cuda"):
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return Captured(self.version, self.rank, self.world_size, weights, saved, random)

    def _optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            state = self.optimizer.state.get(parameter, {})
            for kind in _MOMENTS:
                if kind in state:
                    yield f"{kind}:{name}", state[kind]

    def load(self, directory: str | Path, digests: Mapping[str, str]) -> int:
        """Load what ``Captured.write`` wrote, on every rank; returns the version.

        All files are read and verified before the first tensor is changed. Raises CheckpointDamaged,
        CheckpointMismatch, or OSError (a failing disk, not damage).
        """
        state = tensors.read_json(directory, STATE_FILE, digests)
        if state.get("format") != _FORMAT:
            raise CheckpointMismatch(f"{directory}/{STATE_FILE}: format {state.get('format')}, this release: {_FORMAT}")
        weights = tensors.read_tensors(directory, WEIGHTS_FILE, digests)
        saved = tensors.read_tensors(directory, OPTIMIZER_FILE, digests)
        random = None
        if random_file(self.rank) in digests and state["world_size"] == self.world_size:
            random = tensors.read_tensors(directory, random_file(self.rank), digests)
        self._check_fits(directory, weights, saved)
        self._restore(int(state["version"]), weights, saved)
        self._restore_random(random)
        return self.version

    def _check_fits(
        self, directory: str | Path, weights: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
    ) -> None:
        own = models.named_tensors(self.model)
        moments = {f"{kind}:{name}" for name in self._parameters for kind in _MOMENTS}
        if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
            wrong = next(
                name for name in [*own, *weights] if name not in own or name not in weights
                or own[name].shape != weights[name].shape
            )  # fmt: skip
            raise CheckpointMismatch(f"{directory}/{WEIGHTS_FILE}: {wrong} does not fit the model in {self.model_path}")
        if saved and saved.keys() != moments:
            wrong = min(saved.keys() ^ moments)
            raise CheckpointMismatch(f"{directory}/{OPTIMIZER_FILE}: {wrong} does not fit the model's parameters")

    def _restore(self, version: int, weights: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in models.named_tensors(self.model).items():
                tensor.copy_(weights[name])  # into the memory that is there: its alignment is part of the bits
        self.optimizer.state.clear()
        for name, parameter in self._parameters.items() if saved else ():
            self.optimizer.state[parameter] = {
                kind: saved[f"step:{name}"].clone()
                if kind == "step"
                else torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(saved[f"{kind}:{name}"])
                for kind in _MOMENTS
            }
        self.optimizer.zero_grad(set_to_none=True)
        self.version = version
        self._spoiled = ""

    def _restore_random(self, random: Mapping[str, torch.Tensor] | None) -> None:
        if random is None:
            log.warning("the checkpoint is of another number of ranks: random state is drawn afresh from the seed")
            self._reseed()
            return
        torch.set_rng_state(random["torch"])
        if self.device.startswith("cuda") and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)

    def publish(self, path: str | Path) -> None:
        """Write the current weights as a model folder, tokenizer included; it appears whole. Rank 0's business.

        Raises PublishError.
        """
        models.publish_model(self.model, path, like=self.model_path)

    def close(self) -> None:
        """Leave the ranks' meeting."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


_TOKEN_SUMS: Final = (
    "entropy",
    "kl_behaviour",
    "importance_weight_mean",
    "importance_truncated_fraction",
    "clip_fraction",
)


class _Scores:
    """Log-probabilities of a micro-batch's responses under a model."""

    def __init__(self, model: Any, device: str, dtype: torch.dtype, temperature: float) -> None:
        known = models.forward_arguments(model)
        self._model = model
        self._autocast = dtype if dtype != torch.float32 else None
        self._device_type = torch.device(device).type
        self._temperature = temperature
        self._positions = "position_ids" in known
        self._keeps = "logits_to_keep" in known

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        arguments: dict[str, Any] = {"use_cache": False}
        if self._positions:
            arguments["position_ids"] = batch.positions
        if self._keeps:
            arguments["logits_to_keep"] = batch.responses.shape[1] + 1
        with torch.autocast(self._device_type, dtype=self._autocast, enabled=self._autocast is not None):
            logits = self._model(input_ids=batch.token_ids, attention_mask=batch.attention, **arguments).logits
        return response_logprobs(logits, batch, self._temperature)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
