"""A key-value cache whose sequences come and go between decode steps.

All rows of a batch are aligned to the right: a row that is shorter than the batch has unused columns on its left, which
the attention mask hides. Columns are reserved in blocks, so that a decode step writes one column instead of copying
the cache (copying was the largest single cost of a decode step at 16 sequences of a 135M model on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .models import forward_arguments

BLOCK_COLUMNS: Final = 64


class BlockLayer(DynamicLayer):  # type: ignore[misc,unused-ignore]
    """Keys and values of one layer, ``(rows, heads, columns, size)``.

    ``keys`` and ``values`` are views of the used columns. Sliding-window layers use it too: the window is applied by
    the model's mask, all columns are kept.
    """

    def __init__(self, **_kwargs: Any) -> None:
        super().__init__()
        self._columns = 0
        self._key_store: torch.Tensor | None = None
        self._value_store: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns; returns all used columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used, needed = self._columns, self._columns + key_states.shape[-2]
        self._key_store = _with_room(self._key_store, key_states, used, needed)
        self._value_store = _with_room(self._value_store, value_states, used, needed)
        self._key_store[:, :, used:needed] = key_states
        self._value_store[:, :, used:needed] = value_states
        self._show(needed)
        return self.keys, self.values

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold exactly these columns from now on."""
        self._columns = keys.shape[-2]
        self._key_store = _with_room(None, keys, 0, self._columns)
        self._value_store = _with_room(None, values, 0, self._columns)
        self._key_store[:, :, : self._columns] = keys
        self._value_store[:, :, : self._columns] = values
        self._show(self._columns)

    def _show(self, columns: int) -> None:
        assert self._key_store is not None
        assert self._value_store is not None
        self._columns = columns
        self.keys = self._key_store[:, :, :columns]
        self.values = self._value_store[:, :, :columns]


def _with_room(store: torch.Tensor | None, like: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    if store is not None and store.shape[-2] >= needed:
        return store
    columns = -(-(needed + 1) // BLOCK_COLUMNS) * BLOCK_COLUMNS
    grown = like.new_zeros((like.shape[0], like.shape[1], columns, like.shape[-1]))
    if store is not None:
        grown[:, :, :used] = store[:, :, :used]
    return grown


def new_cache() -> Cache:
    """An empty cache; its layers appear as the model fills them."""
    return Cache(layer_class_to_replicate=BlockLayer)


def columns(cache: Cache) -> int:
    """Columns in use, unused left padding included."""
    return int(cache.get_seq_length())


def merge(parts: Sequence[tuple[Cache, Sequence[int], int]]) -> Cache:
    """One batch out of several: of each ``(cache, rows, length)`` those rows, in this order.

    ``length`` is the longest sequence among the rows: only that many columns, from the right, are taken over.
    """
    parts = [part for part in parts if part[1]]
    width = max(length for _, _, length in parts)
    merged = new_cache()
    for index in range(len(parts[0][0])):
        layer = BlockLayer()
        sources = [(cache.layers[index], rows, length) for cache, rows, length in parts]
        layer.lazy_initialization(sources[0][0].keys, sources[0][0].values)
        layer.replace(
            torch.cat([_aligned(source.keys, rows, length, width) for source, rows, length in sources]),
            torch.cat([_aligned(source.values, rows, length, width) for source, rows, length in sources]),
        )
        merged.layers.append(layer)
    return merged


def _aligned(states: torch.Tensor, rows: Sequence[int], length: int, width: int) -> torch.Tensor:
    taken = states[:, :, states.shape[-2] - length :]
    if list(rows) != list(range(states.shape[0])):
        taken = taken[torch.tensor(list(rows), device=states.device)]
    return torch.nn.functional.pad(taken, (0, 0, width - length, 0))


class Forward:
    """Calls a causal language model with a cache, under the names that this model and this transformers know."""

    def __init__(self, model: Any) -> None:
        self.model = model
        known = forward_arguments(model)
        # transformers renamed the argument in 5.x; either name is right for some release that we support.
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._takes_positions = "position_ids" in known
        self._keep: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def last_logits(self, token_ids: torch.Tensor, lengths: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits after the last of ``token_ids`` ``(rows, new columns)``, ``(rows, vocabulary)``; fills the cache.

        ``lengths`` are the rows' true lengths, the new tokens included; what is to the left of them is padding.
        """
        new = token_ids.shape[1]
        total = columns(cache) + new
        column = torch.arange(total, device=token_ids.device).unsqueeze(0)
        padding = (total - lengths).unsqueeze(1)
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True, **self._keep}
        if self._takes_positions:
            arguments["position_ids"] = (column[:, total - new :] - padding).clamp(min=0)
        logits = self.model(input_ids=token_ids, attention_mask=(column >= padding).long(), **arguments).logits
        result: torch.Tensor = logits[:, -1]
        return result
