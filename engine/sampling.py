"""Drawing tokens: the draw for token ``i`` of a response depends on (seed, i) alone.

So a retry, or a resume from a token prefix, draws as the uninterrupted response would have drawn, whatever else is in
the batch. The log-probability that goes with a token is that of ``log_softmax(logits / temperature)`` over the whole
vocabulary, *before* top-p: the trainer computes exactly this for its importance weights (``engine/grpo.py``). With
``top_p < 1`` the tokens come from a narrower distribution than the one the correction assumes; with temperature 0
(greedy) the log-probability is that of ``log_softmax(logits)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """A number in the open interval (0, 1) for draw ``index`` of ``seed``: element ``index`` of a SplitMix64 stream.

    The seed is mixed before the stream begins, so that neighbouring seeds give unrelated streams.
    """
    word = _mix(_mix((seed & _MASK) ^ _GOLDEN) + (index + 1) * _GOLDEN)
    return ((word >> 12) + 0.5) * 2.0**-52


def _mix(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def token_logprobs(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` in float32; temperature 0 counts as 1. Shapes ``(..., vocabulary)``."""
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.log_softmax(logits.float() / scale, dim=-1)


def sample(
    logits: torch.Tensor, draws: Sequence[float], temperatures: Sequence[float], top_ps: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token a row. ``logits`` is ``(rows, vocabulary)``; returns token ids and their log-probabilities.

    Inverse transform over the vocabulary in id order, with float64 sums: a change of the logits in the last bits moves
    a token only if its draw falls on the border between two.
    """
    device = logits.device
    temperature = torch.tensor(list(temperatures), dtype=torch.float32, device=device).unsqueeze(1)
    logprobs = token_logprobs(logits, temperature)
    if all(value <= 0 for value in temperatures):
        ids = logprobs.argmax(dim=-1)
    else:
        weights = logprobs.double().exp()
        if any(value < 1 for value in top_ps):
            weights = _nucleus(weights, torch.tensor(list(top_ps), dtype=torch.float64, device=device).unsqueeze(1))
        sums = weights.cumsum(dim=-1)
        total = sums[:, -1:]
        point = torch.tensor(list(draws), dtype=torch.float64, device=device).unsqueeze(1) * total
        point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
        ids = torch.searchsorted(sums, point, right=True).squeeze(1)
        ids = torch.where(temperature.squeeze(1) > 0, ids, logprobs.argmax(dim=-1))
        ids = ids.clamp_(max=logits.shape[-1] - 1)  # NaN logits would point past the end; their NaN shows in the result
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    packed = torch.stack((ids.double(), chosen.double())).tolist()  # one transfer from the device instead of two
    return [int(value) for value in packed[0]], packed[1]


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what lies outside the smallest set of most probable tokens that holds at least ``top_p``; ties by id."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    keep = (before < top_p) | (top_p >= 1)
    return torch.where(torch.zeros_like(keep).scatter(1, order, keep), weights, torch.zeros_like(weights))
