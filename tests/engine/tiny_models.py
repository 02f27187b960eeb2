"""Tiny random models of several architectures, on disk, for tests of generator and trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

VOCABULARY = 96
EOS = 1
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "initializer_range": 0.3,  # large, so that greedy choices are clear and depend on the whole context
}


def build(kind: str, **overrides: Any) -> Any:
    """A model with weights drawn from a fixed seed. ``kind``: llama, qwen2, gpt_neox, mistral (window of 8)."""
    transformers_logging.disable_progress_bar()
    settings = {**_COMMON, **overrides}
    torch.manual_seed(7)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **settings)).eval()
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **settings)).eval()
    if kind == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**settings)).eval()
    assert kind == "mistral"
    return MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=8, **settings)).eval()


def save(kind: str, folder: Path, **overrides: Any) -> Path:
    """Write such a model into ``folder``, without a tokenizer."""
    build(kind, **overrides).save_pretrained(str(folder))
    return folder
