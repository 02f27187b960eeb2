"""The GRPO objective of one micro-batch, for tokens that other weights than the current ones may have drawn.

Three policies have a part in it. *Behaviour* drew the tokens (its log-probabilities come with the rows). *Proximal* is
the trainer at the beginning of the step. *Current* is being optimised. With token advantage A::

    weight = min(proximal / behaviour, max_importance_weight)        a constant, corrects for off-policy tokens
    ratio  = current / proximal                                      carries the gradient
    loss   = - sum over tokens of weight * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) / number of tokens

With one optimizer update a step, proximal and current are the same numbers, the ratio is 1 and the clip at rest; it
acts from the second update on the same groups on. The number of tokens is that of the whole step, all ranks together:
every token counts the same, however long its response is.

Behaviour log-probabilities are ``log_softmax(logits / temperature)`` (``engine/sampling.py``), and so are the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .grpo_batch import MicroBatch
from .sampling import token_logprobs

_LOG_RATIO_MAX = 20.0
"""Beyond this a ratio is only large; without a bound, two of them would overflow to infinity."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants of the formula above. ``kl_coef`` weighs the distance to the starting model; 0 is off."""

    clip_low: float
    clip_high: float
    max_importance_weight: float
    kl_coef: float


@dataclass(frozen=True, slots=True)
class LossParts:
    """``total`` is to be minimised (already divided by the number of tokens); ``sums`` are over tokens, for metrics."""

    total: torch.Tensor
    sums: dict[str, torch.Tensor]


def response_logprobs(logits: torch.Tensor, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Log-probability of each response token, (rows, response columns); padding holds what it holds.

    ``logits`` are those of the last ``response columns + 1`` positions (or more).
    """
    columns = batch.responses.shape[1]
    table = token_logprobs(logits[:, -columns - 1 : -1], temperature)
    return table.gather(-1, batch.responses.unsqueeze(-1)).squeeze(-1)


def loss_parts(
    current: torch.Tensor,
    batch: MicroBatch,
    settings: LossSettings,
    tokens: float,
    *,
    proximal: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> LossParts:
    """The loss of a micro-batch. ``current``, ``proximal`` and ``reference``: (rows, response columns).

    ``proximal`` is left out at the first update: it is ``current`` then, without its gradient.
    """
    mask = batch.mask
    anchor = current.detach() if proximal is None else proximal
    off_policy = _log_ratio(anchor, batch.behaviour, mask)
    weight_free = off_policy.exp()
    weight = weight_free.clamp(max=settings.max_importance_weight)
    ratio = _log_ratio(current, anchor, mask).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    total = -(weight * gain * mask).sum() / tokens
    sums = {
        "entropy": -(anchor * mask).sum(),
        "kl_behaviour": ((weight_free - 1 - off_policy) * mask).sum(),
        "importance_weight_mean": (weight * mask).sum(),
        "importance_truncated_fraction": ((weight_free > settings.max_importance_weight) & mask).sum(),
        "clip_fraction": ((ratio * batch.advantages > clipped * batch.advantages) & mask).sum(),
    }
    if reference is not None:
        drift = _log_ratio(reference, current, mask)
        penalty = drift.exp() - 1 - drift
        total = total + settings.kl_coef * (penalty * mask).sum() / tokens
        sums["kl_reference"] = (penalty.detach() * mask).sum()
    return LossParts(total, {name: value.detach().double() for name, value in sums.items()})


def _log_ratio(above: torch.Tensor, below: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, above - below, 0.0).clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX)
