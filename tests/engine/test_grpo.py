"""The trainer's core against a plain, unbatched computation of the same formula, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.engine import tiny_models
from unlost.engine.generator import EmbeddedGenerator
from unlost.engine.grpo import GrpoSettings, GrpoTrainer, TrainingFailed
from unlost.engine.grpo_batch import RowRefused, advantages, micro_batches, samples_of, staleness
from unlost.engine.protocols import Row, StepMismatch
from unlost.replay.events import AttemptKey

FAST = GrpoSettings(learning_rate=1e-3, weight_decay=0.0, micro_batch_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), initializer_range=0.05)


def make_row(group: int, sibling: int, prompt: list[int], ids: list[int], logprobs: list[float], **fields: Any) -> Row:
    values: dict[str, Any] = {"weight_spans": ((0, 0, 0),), "reward": 0.0, "checksum": 0, **fields}
    return Row(
        AttemptKey(1, group, sibling, 0),
        np.array(prompt, "<i4").tobytes(),
        np.array(ids, "<i4").tobytes(),
        np.array(logprobs, "<f4").tobytes(),
        **values,
    )


def make_groups(seed: int, groups: int = 3, siblings: int = 4, shift: float = 0.0) -> list[list[Row]]:
    """Random rows of mixed lengths with random rewards; ``shift`` scatters behaviour around a uniform policy."""
    numbers = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = numbers.integers(2, 96, numbers.integers(1, 9)).tolist()
        rows = []
        for sibling in range(siblings):
            ids = numbers.integers(2, 96, numbers.integers(1, 14)).tolist()
            logprobs = (-math.log(96) + shift * numbers.standard_normal(len(ids))).tolist()
            rows.append(make_row(group, sibling, prompt, ids, logprobs, reward=float(numbers.integers(0, 4))))
        made.append(rows)
    return made


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


def plain_logprobs(model: Any, row: Row, temperature: float = 1.0) -> torch.Tensor:
    prompt, ids = ints(row.prompt_ids), ints(row.token_ids)
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.stack([(logits[i] / temperature).log_softmax(-1)[token] for i, token in enumerate(ids)])


def plain_loss(
    model: Any, groups: list[list[Row]], anchors: list[torch.Tensor], settings: GrpoSettings
) -> torch.Tensor:
    """The documented formula, token by token."""
    total, tokens = torch.zeros(()), 0
    anchor_of = iter(anchors)
    for group in groups:
        rewards = [row.reward for row in group]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for row in group:
            advantage = row.reward - mean
            if settings.normalize_std:
                advantage = advantage / (deviation + 1e-6)
            anchor, current = next(anchor_of), plain_logprobs(model, row, settings.temperature)
            for i, behaviour in enumerate(floats(row.logprobs)):
                weight = min(math.exp(float(anchor[i]) - behaviour), settings.max_importance_weight)
                ratio = torch.exp(current[i] - anchor[i])
                bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
                total = total - weight * torch.minimum(ratio * advantage, bounded * advantage)
                tokens += 1
    return total / tokens


def plain_gradient(trainer: GrpoTrainer, groups: list[list[Row]]) -> tuple[float, dict[str, torch.Tensor]]:
    model = trainer.model
    anchors = [plain_logprobs(model, row, trainer.settings.temperature).detach() for group in groups for row in group]
    model.zero_grad()
    loss = plain_loss(model, groups, anchors, trainer.settings)
    loss.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), gradient


def recorded(trainer: GrpoTrainer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The gradients as they are when the optimizer is called."""
    seen: list[dict[str, torch.Tensor]] = []
    step = trainer.optimizer.step

    def recording() -> None:
        seen.append({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})
        step()

    monkeypatch.setattr(trainer.optimizer, "step", recording)
    return seen


def weights_of(trainer: GrpoTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"normalize_std": False},
        {"max_importance_weight": 1.05},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 100000},
    ],
)
def test_the_gradient_is_that_of_the_formula(
    llama: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Loss and gradient over padded micro-batches equal a token-by-token computation without padding."""
    settings = GrpoSettings(**{"max_grad_norm": 1e9, "micro_batch_tokens": 64, **changes})
    trainer = GrpoTrainer(llama, settings, device="cpu")
    groups = make_groups(1, shift=0.5)
    expected_loss, expected = plain_gradient(trainer, groups)
    seen = recorded(trainer, monkeypatch)
    result = trainer.train(0, groups)
    assert result.loss == pytest.approx(expected_loss, abs=1e-5)
    assert seen[0].keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(seen[0][name], gradient, rtol=1e-3, atol=2e-6), name
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


def test_gpt_neox_gives_the_formula_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another architecture: other position handling, nothing tied."""
    folder = tiny_models.save("gpt_neox", tmp_path, initializer_range=0.05)
    trainer = GrpoTrainer(folder, GrpoSettings(max_grad_norm=1e9, micro_batch_tokens=64), device="cpu")
    groups = make_groups(2, shift=0.5)
    _, expected = plain_gradient(trainer, groups)
    seen = recorded(trainer, monkeypatch)
    trainer.train(0, groups)
    assert all(torch.allclose(seen[0][name], expected[name], rtol=1e-3, atol=2e-6) for name in expected)


def test_the_clip_acts_from_the_second_update_on(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second update's gradient is the formula's with the step's first weights as anchor, clips included."""
    settings = GrpoSettings(
        learning_rate=0.02, weight_decay=0.0, updates_per_step=2, clip_low=0.1, clip_high=0.15, max_grad_norm=1e9
    )
    trainer = GrpoTrainer(llama, settings, device="cpu")
    groups = make_groups(3, shift=0.3)
    anchors = [plain_logprobs(trainer.model, row).detach() for group in groups for row in group]
    expected: list[dict[str, torch.Tensor]] = []
    step = trainer.optimizer.step

    def comparing() -> None:
        kept = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        trainer.model.zero_grad()
        plain_loss(trainer.model, groups, anchors, settings).backward()
        expected.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        for name, parameter in trainer.model.named_parameters():
            assert torch.allclose(kept[name], expected[-1][name], rtol=1e-3, atol=1e-5), (len(expected), name)
            parameter.grad.copy_(kept[name])
        step()

    monkeypatch.setattr(trainer.optimizer, "step", comparing)
    result = trainer.train(0, groups)
    assert len(expected) == 2
    assert 0.2 < result.metrics["clip_fraction"] < 1
    assert result.trainer_version == 1


def test_an_off_policy_step_reports_what_it_corrected(llama: Path) -> None:
    """Importance weights, their truncation and the KL estimate equal sums over tokens done by hand."""
    trainer = GrpoTrainer(llama, GrpoSettings(max_importance_weight=1.2), device="cpu")
    groups = make_groups(4, shift=0.4)
    logratios = [
        float(current) - behaviour
        for group in groups
        for row in group
        for current, behaviour in zip(plain_logprobs(trainer.model, row).detach(), floats(row.logprobs), strict=True)
    ]
    metrics = trainer.train(0, groups).metrics
    count = len(logratios)
    assert metrics["importance_weight_mean"] == pytest.approx(
        sum(min(math.exp(x), 1.2) for x in logratios) / count, 1e-4
    )
    assert metrics["importance_truncated_fraction"] == pytest.approx(sum(math.exp(x) > 1.2 for x in logratios) / count)
    assert metrics["kl_behaviour"] == pytest.approx(sum(math.exp(x) - 1 - x for x in logratios) / count, rel=1e-3)
    assert metrics["clip_fraction"] == 0


def test_on_policy_rows_from_the_generator_need_no_correction(llama: Path) -> None:
    """Generator and trainer agree on a token's probability: mean weight 1, KL 0, at a temperature below 1 too."""
    generator = EmbeddedGenerator(llama, device="cpu")
    rows: list[Row] = []
    for sibling in range(8):
        ids: list[int] = []
        logprobs: list[float] = []
        generator.submit(
            sibling, [3, 4, 5], seed=sibling, max_new_tokens=12, temperature=0.7,
            on_delta=lambda i, p, *_, a=ids, b=logprobs: (a.extend(i), b.extend(p)), on_done=lambda _: None,
        )  # fmt: skip
        while generator.running or generator.waiting:
            generator.step()
        rows.append(make_row(0, sibling, [3, 4, 5], ids, logprobs, reward=float(sibling % 2)))
    metrics = GrpoTrainer(llama, GrpoSettings(temperature=0.7), device="cpu").train(0, [rows]).metrics
    assert metrics["importance_weight_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-6)
    wrong = GrpoTrainer(llama, GrpoSettings(temperature=1.0), device="cpu").train(0, [rows]).metrics
    assert wrong["kl_behaviour"] > 1e-3, "the test would not notice a wrong temperature"


def test_advantages_are_normalised_within_the_group() -> None:
    """Worked example; equal rewards give exact zeros, whatever their value; a single sibling too."""
    assert advantages([1, 2, 3, 6], normalize_std=False) == [-2.0, -1.0, 0.0, 3.0]
    assert advantages([1, 2, 3, 6], normalize_std=True) == pytest.approx(
        [value / math.sqrt(3.5) for value in (-2, -1, 0, 3)], abs=1e-5
    )
    assert advantages([0.1] * 5, normalize_std=True) == [0.0] * 5
    assert advantages([7.0], normalize_std=True) == [0.0]
    assert advantages([], normalize_std=True) == []


def test_groups_without_variance_leave_the_weights_alone(llama: Path) -> None:
    """Zero advantage, zero gradient, no weight decay: the step counts, the weights stay."""
    trainer = GrpoTrainer(llama, FAST, device="cpu")
    before = weights_of(trainer)
    groups = [[msgspec.structs.replace(row, reward=2.0) for row in group] for group in make_groups(5)]
    result = trainer.train(0, groups)
    assert same(before, weights_of(trainer))
    assert (result.metrics["groups_zero_variance"], result.metrics["groups"], trainer.version) == (3, 3, 1)
    assert result.metrics["grad_norm"] == 0


def test_step_result_counts_rows_tokens_and_ages(llama: Path) -> None:
    """Reward statistics, token count and staleness of a worked example."""
    trainer = GrpoTrainer(llama, FAST, device="cpu")
    for step in range(3):
        trainer.train(step, make_groups(step))
    spans = ((0, 0, 1), (2, 0, 2), (3, 1, 3))
    rows = [
        make_row(0, 0, [5], [6, 7, 8, 9], [-4.0] * 4, reward=1.0, weight_spans=spans, truncated=True),
        make_row(0, 1, [5], [6, 7], [-4.0] * 2, reward=0.0, weight_spans=((0, 0, 9),)),
    ]
    result = trainer.train(3, [rows])
    assert (result.step, result.trainer_version, result.tokens, result.reward_mean) == (3, 4, 6, 0.5)
    metrics = result.metrics
    assert metrics["staleness_mean"] == pytest.approx((2 + 2 + 1 + 0) / 6)
    assert (metrics["staleness_max"], metrics["truncated_fraction"], metrics["reward_std"]) == (2, 0.5, 0.5)
    assert result.seconds > 0


def test_empty_spans_do_not_count_towards_staleness() -> None:
    """A swap before any token of the new weights leaves a span without tokens."""
    row = make_row(0, 0, [5], [6, 7], [-1.0] * 2, weight_spans=((0, 0, 0), (0, 0, 4), (2, 0, 5)))
    assert staleness(row, 5) == (2.0, 1.0)


def test_another_step_than_the_next_changes_nothing(llama: Path) -> None:
    """Protocol rule 17, for earlier and later steps."""
    trainer = GrpoTrainer(llama, FAST, device="cpu")
    trainer.train(0, make_groups(0))
    before = weights_of(trainer)
    for step in (0, 2):
        with pytest.raises(StepMismatch, match=f"asked for step {step}, the next one is 1"):
            trainer.train(step, make_groups(1))
    assert same(before, weights_of(trainer))
    assert trainer.version == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": b"\0" * 4}, "8 bytes of token ids, 4 of log-probabilities"),
        ({"token_ids": b"\0" * 7, "logprobs": b"\0" * 7}, "multiples of 4"),
        ({"prompt_ids": b""}, "no prompt tokens"),
        ({"token_ids": np.array([5, 96], "<i4").tobytes()}, "outside the vocabulary of 96"),
        ({"logprobs": np.array([-1.0, np.nan], "<f4").tobytes()}, "not finite"),
        ({"reward": math.inf}, "not finite"),
    ],
)
def test_a_bad_row_is_refused_before_anything_changes(llama: Path, changes: dict[str, Any], message: str) -> None:
    """The row's key is named; weights and version are as before; the step can be tried again."""
    trainer = GrpoTrainer(llama, FAST, device="cpu")
    before = weights_of(trainer)
    good = make_row(4, 1, [5, 6], [7, 8], [-1.0, -2.0])
    bad = msgspec.structs.replace(good, **changes)
    with pytest.raises(RowRefused, match=message) as caught:
        trainer.train(0, [*make_groups(0), [bad]])
    assert "i1.g4.s1.a0" in str(caught.value)
    assert same(before, weights_of(trainer))
    assert trainer.train(0, make_groups(0)).trainer_version == 1


def test_a_gradient_that_is_not_finite_is_not_applied(llama: Path) -> None:
    """The step fails by name; weights, optimizer and version are as before."""
    trainer = GrpoTrainer(llama, FAST, device="cpu")
    trainer.train(0, make_groups(0))
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = math.inf
    before = weights_of(trainer)
    with pytest.raises(TrainingFailed, match="step 1: the gradient's norm is nan"):
        trainer.train(1, make_groups(1))
    assert trainer.version == 1
    assert same(before, weights_of(trainer))


def test_a_half_applied_step_spoils_the_trainer(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that stops in the middle: neither training nor saving goes on from there."""
    trainer = GrpoTrainer(llama, FAST, device="cpu")

    def broken() -> None:
        raise MemoryError

    monkeypatch.setattr(trainer.optimizer, "step", broken)
    with pytest.raises(MemoryError):
        trainer.train(0, make_groups(0))
    with pytest.raises(TrainingFailed, match="step 0: the optimizer stopped half-way"):
        trainer.train(0, make_groups(0))
    with pytest.raises(TrainingFailed, match="restore a checkpoint"):
        trainer.capture()


def test_empty_steps_and_responses_are_harmless(llama: Path) -> None:
    """A step without groups, and a row without tokens, are counted and change nothing."""
    trainer = GrpoTrainer(llama, FAST, device="cpu")
    before = weights_of(trainer)
    assert trainer.train(0, []).tokens == 0
    rows = [make_row(0, 0, [5], [], [], reward=1.0), make_row(0, 1, [5], [], [], reward=0.0)]
    result = trainer.train(1, [rows])
    assert (result.tokens, result.reward_mean, trainer.version) == (0, 0.5, 2)
    assert same(before, weights_of(trainer))


def test_the_kl_penalty_measures_the_distance_to_the_start_and_pulls_back(llama: Path) -> None:
    """Zero at the first step, positive later, and with a large weight the policy stays nearer to where it began."""
    results = {}
    for coefficient in (1e-9, 50.0):
        settings = GrpoSettings(learning_rate=5e-3, weight_decay=0.0, kl_coef=coefficient)
        trainer = GrpoTrainer(llama, settings, device="cpu")
        results[coefficient] = [trainer.train(step, make_groups(0)).metrics["kl_reference"] for step in range(6)]
        assert results[coefficient][0] == pytest.approx(0, abs=1e-7)
    assert results[1e-9][-1] > 0.05
    assert results[50.0][-1] < results[1e-9][-1] / 3


def test_the_learning_rate_warms_up_by_version(llama: Path) -> None:
    """Linear over warmup_steps, constant after; a function of the version, so a restore needs no schedule state."""
    trainer = GrpoTrainer(llama, GrpoSettings(learning_rate=0.01, warmup_steps=4), device="cpu")
    rates = [trainer.train(step, make_groups(step)).metrics["learning_rate"] for step in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {}])
def test_recomputation_and_bfloat16_give_nearly_the_same(llama: Path, settings: dict[str, Any]) -> None:
    """Gradient checkpointing changes nothing, autocast to bfloat16 little; weights stay float32."""
    groups = make_groups(6, shift=0.3)
    base = GrpoTrainer(llama, GrpoSettings(), device="cpu").train(0, groups)
    trainer = GrpoTrainer(llama, GrpoSettings(**settings), device="cpu", dtype="float32" if settings else "bfloat16")
    result = trainer.train(0, groups)
    assert result.loss == pytest.approx(base.loss, abs=1e-6 if settings else 0.02)
    assert result.metrics["grad_norm"] == pytest.approx(base.metrics["grad_norm"], rel=1e-3 if settings else 0.1)
    assert {tensor.dtype for tensor in trainer.model.state_dict().values()} == {torch.float32}


def test_micro_batches_keep_to_their_size_and_lose_nothing() -> None:
    """Every sample with a response is in exactly one batch; only a single row may be larger than the limit."""
    samples = samples_of(make_groups(9, groups=6), normalize_std=True, vocabulary=96)
    for limit in (1, 30, 60, 1000):
        batches = micro_batches(samples, limit, "cpu")
        assert sorted(row for batch in batches for row in batch.rows) == list(range(len(samples)))
        for batch in batches:
            assert batch.token_ids.numel() <= limit or len(batch.rows) == 1
            for line, row in enumerate(batch.rows):
                sample = samples[row]
                assert batch.token_ids[line][batch.attention[line].bool()].tolist() == [
                    *sample.prompt,
                    *sample.response,
                ]
                assert batch.responses[line][batch.mask[line]].tolist() == sample.response.tolist()
                assert batch.behaviour[line][batch.mask[line]].tolist() == pytest.approx(sample.behaviour.tolist())
