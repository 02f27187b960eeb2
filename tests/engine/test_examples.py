"""The examples: their parts fit together, and the quickstart's task can be learned from its reward."""

from __future__ import annotations

import hashlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.plain_loop import PlainLoop
from unlost.engine import models
from unlost.engine.config import load_config
from unlost.engine.grpo import GrpoSettings
from unlost.engine.prompts import JsonlPrompts, render
from unlost.engine.rewards import load_reward

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"
SMOLLM2 = EXAMPLES / "smollm2"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads, path = torch.get_num_threads(), list(sys.path)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.path[:] = path


def make_model(folder: Path) -> Path:
    before = sys.argv
    sys.argv = ["make_model.py", str(folder)]
    try:
        runpy.run_path(str(QUICKSTART / "make_model.py"), run_name="__main__")
    finally:
        sys.argv = before
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("quickstart") / "model")


def test_the_quickstart_model_is_the_same_each_time_and_complete(model: Path, tmp_path: Path) -> None:
    """Two builds have the same bytes; the folder passes the check that a run makes."""
    again = make_model(tmp_path / "again")
    digests = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        for folder in (model, again)
    ]
    assert digests[0] == digests[1]
    assert models.check_model_folder(model) == model
    assert models.model_fingerprint(model) == models.model_fingerprint(again)


def test_quickstart_prompts_survive_the_tokenizer(model: Path) -> None:
    """Every prompt is encoded one token a character, none unknown, and decodes to itself."""
    tokenizer = models.load_tokenizer(model)
    prompts, _, _ = JsonlPrompts(QUICKSTART / "prompts.jsonl").fetch(0, 0, 48)
    assert len({prompt.ref.sample_id for prompt in prompts}) == 48
    for prompt in prompts:
        ids = render(prompt.row, tokenizer)
        assert tokenizer.unk_token_id not in ids
        assert len(ids) == len(prompt.row["prompt"])
        assert tokenizer.decode(ids) == prompt.row["prompt"]


@pytest.mark.parametrize(
    ("response", "expected"), [("aeiou" * 4, 1.0), ("aeioubcdfg" * 2, 0.5), ("aeiou", 0.25), ("", 0.0), ("a" * 40, 1.0)]
)
def test_the_quickstart_reward_is_the_share_of_wanted_characters(response: str, expected: float) -> None:
    """Worked examples; a short response counts as if it were filled up with wrong characters."""
    reward = load_reward("reward:share", QUICKSTART)
    assert reward("vowels", response, "aeiou", {"length": 20}) == expected


def test_quickstart_configuration_names_what_is_there() -> None:
    """Files exist, the reward loads, and the prompts' length is the number of tokens generated."""
    config = load_config(QUICKSTART / "config.yaml")
    prompts, _, _ = JsonlPrompts(config.data.train).fetch(0, 0, 48)
    assert {prompt.row["length"] for prompt in prompts} == {config.generation.max_new_tokens}
    load_reward(config.reward.function, QUICKSTART)
    assert Path(config.model.path) == QUICKSTART / "model"


@pytest.mark.slow
def test_quickstart_reward_rises(model: Path, tmp_path: Path) -> None:
    """Thirty steps with the configuration's numbers take the mean reward from chance to well above half."""
    config = load_config(QUICKSTART / "config.yaml")
    loop = PlainLoop(
        model,
        JsonlPrompts(config.data.train, shuffle=config.data.shuffle, seed=config.data.seed),
        load_reward(config.reward.function, QUICKSTART),
        tmp_path,
        prompts_per_step=config.grpo.num_prompts_per_step,
        generations=config.grpo.num_generations_per_prompt,
        max_new_tokens=config.generation.max_new_tokens,
        settings=GrpoSettings(
            learning_rate=config.grpo.learning_rate,
            weight_decay=config.grpo.weight_decay,
            micro_batch_tokens=config.grpo.micro_batch_tokens,
        ),
    )
    rewards = loop.run(config.grpo.max_steps).rewards
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.6
    # On-policy throughout: generator and trainer agree on every token's probability.
    assert max(metrics["kl_behaviour"] for metrics in loop.curve.metrics) < 1e-4


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("12", 1.0),
        ("7 + 5 = 12.", 1.0),
        ("12, or 7 + 5", 0.2),
        ("5", 0.0),
        ("no idea", 0.0),
        ("-12", 0.0),
        ("1,012", 0.0),
    ],
)
def test_the_arithmetic_reward_reads_the_last_number(response: str, expected: float) -> None:
    """Worked examples: the sign counts, a separator belongs to its number."""
    assert load_reward("reward:last_number", SMOLLM2)("", response, 12, {}) == expected


def test_arithmetic_questions_are_the_same_each_time_and_right(tmp_path: Path) -> None:
    """Each question once; the answers are what Python says; the configuration names the files that are made."""
    functions = runpy.run_path(str(SMOLLM2 / "prepare.py"))
    for name in ("a", "b"):
        functions["make_questions"](tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    source = JsonlPrompts(tmp_path / "a")
    assert len(source) == 176
    for prompt in source.fetch(0, 0, len(source))[0]:
        first, sign, second = prompt.ref.sample_id.split()
        expected = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert prompt.row["answer"] == expected
        assert f"What is {prompt.ref.sample_id}?" in prompt.row["prompt"]
    config = load_config(SMOLLM2 / "config.yaml")
    assert (config.data.train, config.model.path) == (str(SMOLLM2 / "questions.jsonl"), str(SMOLLM2 / "model"))
