"""A run's configuration with a tiny model, for tests with real processes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec

from unlost.engine.config_keys import (
    Config,
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    JournalConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
)
from unlost.engine.protocols import Prompt
from unlost.replay.events import PromptRef

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"

REWARDS = """
import time

def letters(prompt, response, answer, row):
    return sum(letter in answer for letter in response) / 100

def strange(prompt, response, answer, row):
    raise ValueError(f"no idea about {prompt}")

def slow(prompt, response, answer, row):
    time.sleep(60)
    return 1.0
"""


def make_model(folder: Path, *, endless: bool = False) -> Path:
    """The quickstart's random model and tokenizer. ``endless``: no token ends a response, so lengths are known."""
    before = sys.argv
    sys.argv = ["make_model.py", str(folder)]
    try:
        runpy.run_path(str(QUICKSTART / "make_model.py"), run_name="__main__")
    finally:
        sys.argv = before
    endings = {
        "config.json": "eos_token_id",
        "generation_config.json": "eos_token_id",
        "tokenizer_config.json": "eos_token",
    }
    for name, key in endings.items() if endless else ():
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, key: None}))
    return folder


def make_config(folder: Path, model: Path, **changes: Any) -> Config:
    """A run in ``folder``. ``changes``: sections to replace."""
    (folder / "run").mkdir(exist_ok=True)
    (folder / "own_rewards.py").write_text(REWARDS)
    config = Config(
        run=RunConfig(dir=str(folder / "run"), seed=3),
        model=ModelConfig(path=str(model), device="cpu"),
        data=DataConfig(train="unused.jsonl"),
        reward=RewardConfig(function="own_rewards:letters", path=str(folder), timeout_s=5),
        grpo=GrpoConfig(num_generations_per_prompt=2, learning_rate=1e-3),
        generation=GenerationConfig(max_new_tokens=100, max_batch=8),
        trainer=TrainerConfig(deterministic=True),
        journal=JournalConfig(progress_interval_tokens=16, progress_interval_ms=200.0),
    )
    return msgspec.structs.replace(config, **changes)


def prompt(number: int = 0, text: str = "say some letters: ") -> Prompt:
    return Prompt(PromptRef(f"p{number}", 0, number, 1), {"prompt": text, "answer": "abc"})
