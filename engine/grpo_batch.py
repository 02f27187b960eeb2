"""From rows to training batches: advantages, decoding of the raw bytes, micro-batches.

Pure functions; no model. Layout of a micro-batch: prompts are padded on the left and responses on the right, so that
every response starts in the same column and logits are needed only from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..journal.errors import UnlostError
from .protocols import Row


class RowRefused(UnlostError):
    """A row can't be trained on; the message names its key and what is wrong. Nothing was changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence. Token arrays are int64; ``behaviour`` holds the generator's log-probabilities, float32."""

    prompt: npt.NDArray[np.int64]
    response: npt.NDArray[np.int64]
    behaviour: npt.NDArray[np.float32]
    advantage: float

    @property
    def tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tensors of one forward pass. ``rows`` are positions in the list of samples that it was made from.

    ``token_ids``, ``attention`` and ``positions``: (rows, prompt columns + response columns); ``responses``,
    ``behaviour`` and ``mask`` (True where there is a token): (rows, response columns); ``advantages``: (rows, 1).
    """

    rows: tuple[int, ...]
    token_ids: torch.Tensor
    attention: torch.Tensor
    positions: torch.Tensor
    responses: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor


def advantages(rewards: Sequence[float], *, normalize_std: bool, epsilon: float = 1e-6) -> list[float]:
    """Each reward against its group: (reward - mean) / (population standard deviation + epsilon).

    Without ``normalize_std`` the difference alone. A group whose rewards are all equal gives exact zeros.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) == 0 or bool(np.all(values == values[0])):
        return [0.0] * len(values)
    centred = values - values.mean()
    scaled = centred / (values.std() + epsilon) if normalize_std else centred
    return [float(value) for value in scaled]


def samples_of(groups: Sequence[Sequence[Row]], *, normalize_std: bool, vocabulary: int) -> list[Sample]:
    """The rows of all groups, in order, with their advantages. Raises RowRefused."""
    samples: list[Sample] = []
    for group in groups:
        for row, advantage in zip(
            group, advantages([row.reward for row in group], normalize_std=normalize_std), strict=True
        ):
            samples.append(_sample(row, advantage, vocabulary))
    return samples


def _sample(row: Row, advantage: float, vocabulary: int) -> Sample:
    name = row.key.row_key()
    if len(row.token_ids) % 4 or len(row.prompt_ids) % 4 or len(row.logprobs) != len(row.token_ids):
        raise RowRefused(
            f"row {name}: {len(row.token_ids)} bytes of token ids, {len(row.logprobs)} of log-probabilities; they "
            "must be equal and multiples of 4"
        )
    prompt = np.frombuffer(row.prompt_ids, dtype="<i4").astype(np.int64)
    response = np.frombuffer(row.token_ids, dtype="<i4").astype(np.int64)
    behaviour = np.frombuffer(row.logprobs, dtype="<f4").astype(np.float32)
    if len(prompt) == 0:
        raise RowRefused(f"row {name}: no prompt tokens, so its first token has nothing to be predicted from")
    both = np.concatenate((prompt, response))
    if both.min() < 0 or both.max() >= vocabulary:
        raise RowRefused(f"row {name}: a token id outside the vocabulary of {vocabulary}")
    if not np.isfinite(behaviour).all() or not np.isfinite(row.reward):
        raise RowRefused(f"row {name}: a log-probability or its reward ({row.reward}) is not finite")
    return Sample(prompt, response, behaviour, advantage)


def staleness(row: Row, version: int) -> tuple[float, float]:
    """(sum over tokens, maximum) of how many versions old the weights of the row's tokens are.

    Tokens of weights from before a rollback may have a higher version than the trainer: they count as 0.
    """
    total = worst = 0.0
    count = len(row.token_ids) // 4
    starts = [first for first, _, _ in row.weight_spans] + [count]
    for (first, _, made_by), following in zip(row.weight_spans, starts[1:], strict=True):
        age = max(version - made_by, 0)
        total += age * (following - first)
        worst = max(worst, age) if following > first else worst
    return total, worst


def micro_batches(samples: Sequence[Sample], max_tokens: int, device: str) -> list[MicroBatch]:
    """Samples of similar length together, each batch at most ``max_tokens`` padding included (one row at least).

    Longest first: if memory does not suffice, that shows in the first forward pass. Samples without a response token
    are left out. The order depends on lengths and positions alone.
    """
    order = sorted(
        (index for index, sample in enumerate(samples) if len(sample.response)),
        key=lambda index: (-samples[index].tokens, index),
    )
    batches: list[list[int]] = []
    width = (0, 0)
    for index in order:
        sample = samples[index]
        wider = (max(width[0], len(sample.prompt)), max(width[1], len(sample.response)))
        if batches and sum(wider) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
            width = wider
        else:
            batches.append([index])
            width = (len(sample.prompt), len(sample.response))
    return [_collate(samples, rows, device) for rows in batches]


def _collate(samples: Sequence[Sample], rows: list[int], device: str) -> MicroBatch:
    before = max(len(samples[row].prompt) for row in rows)
    after = max(len(samples[row].response) for row in rows)
    token_ids = np.zeros((len(rows), before + after), np.int64)
    attention = np.zeros((len(rows), before + after), np.int64)
    behaviour = np.zeros((len(rows), after), np.float32)
    for line, row in enumerate(rows):
        sample = samples[row]
        begin, end = before - len(sample.prompt), before + len(sample.response)
        token_ids[line, begin:before] = sample.prompt
        token_ids[line, before:end] = sample.response
        attention[line, begin:end] = 1
        behaviour[line, : len(sample.response)] = sample.behaviour
    attention_tensor = torch.from_numpy(attention).to(device)
    token_tensor = torch.from_numpy(token_ids).to(device)
    return MicroBatch(
        rows=tuple(rows),
        token_ids=token_tensor,
        attention=attention_tensor,
        positions=(attention_tensor.cumsum(dim=-1) - 1).clamp(min=0),
        responses=token_tensor[:, before:],
        behaviour=torch.from_numpy(behaviour).to(device),
        mask=attention_tensor[:, before:].bool(),
        advantages=torch.tensor([[samples[row].advantage] for row in rows], dtype=torch.float32, device=device),
    )
