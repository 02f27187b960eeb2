"""The embedded generator, stepped by hand: against transformers' own generate and full forwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import tiny_models
from unlost.engine import models, sampling
from unlost.engine.generator import EmbeddedGenerator, GeneratorError

PROMPTS = [[5, 9, 13], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [40, 41, 42, 43, 44]]


@dataclass
class Collected:
    """What a request's callbacks were given."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights: list[tuple[int, int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def on_delta(self, ids: Any, logprobs: Any, branch: int, version: int) -> None:
        assert ids.dtype == np.int32
        assert logprobs.dtype == np.float32
        assert len(ids) == len(logprobs)
        assert not self.done
        self.ids += ids.tolist()
        self.logprobs += logprobs.tolist()
        self.weights += [(branch, version)] * len(ids)

    def on_done(self, reason: str) -> None:
        self.done.append(reason)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


def submit(generator: EmbeddedGenerator, name: Any, prompt: list[int], **overrides: Any) -> Collected:
    collected = Collected()
    settings: dict[str, Any] = {"seed": 11, "max_new_tokens": 20, "temperature": 1.0, **overrides}
    generator.submit(name, prompt, on_delta=collected.on_delta, on_done=collected.on_done, **settings)
    return collected


def finish(generator: EmbeddedGenerator) -> None:
    for _ in range(1000):
        if not generator.running and not generator.waiting:
            return
        generator.step()
    raise AssertionError("the generator does not come to an end")


def alone(folder: Path, prompt: list[int], **overrides: Any) -> Collected:
    generator = EmbeddedGenerator(folder, device="cpu")
    collected = submit(generator, "alone", prompt, **overrides)
    finish(generator)
    return collected


def full_forward_logprobs(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    table = (logits / temperature).log_softmax(-1)
    return [float(table[row, token]) for row, token in enumerate(ids)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "mistral"])
def test_greedy_batches_equal_generate_one_by_one(kind: str, tmp_path: Path) -> None:
    """Prompts of mixed lengths, batched, give what transformers' generate gives for each alone (window layers too)."""
    folder = tiny_models.save(kind, tmp_path)
    generator = EmbeddedGenerator(folder, device="cpu")
    results = [submit(generator, i, p, temperature=0.0, max_new_tokens=24) for i, p in enumerate(PROMPTS)]
    finish(generator)
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = generator.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert result.ids == expected
        assert result.done == ["eos" if expected[-1] == tiny_models.EOS else "length"]
    distinct = {token for result in results for token in result.ids}
    assert len(distinct) > 8, "a test model that repeats one token would show nothing"


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_logprobs_are_those_of_a_full_forward_over_the_temperature(kind: str, tmp_path: Path) -> None:
    """Sampled tokens carry log_softmax(logits / temperature), before top-p, within 1e-4."""
    generator = EmbeddedGenerator(tiny_models.save(kind, tmp_path), device="cpu")
    results = [submit(generator, i, p, seed=i, temperature=0.7, top_p=0.8) for i, p in enumerate(PROMPTS)]
    finish(generator)
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = full_forward_logprobs(generator.model, prompt, result.ids, 0.7)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_joining_and_leaving_change_nothing(llama: Path) -> None:
    """Requests that start late, end early or are aborted leave the others' tokens as they are alone."""
    generator = EmbeddedGenerator(llama, device="cpu", max_batch=3)
    lengths = [3, 30, 9, 17, 1, 25, 12]
    results = []
    for index, length in enumerate(lengths):
        prompt = PROMPTS[index % len(PROMPTS)]
        results.append(submit(generator, index, prompt, seed=index, max_new_tokens=length))
        generator.step()
        generator.step()
        if index == 3:
            generator.abort([1, "unknown"])
    assert generator.running <= 3
    finish(generator)
    assert results[1].done == ["aborted"]
    assert generator.generated_tokens == sum(len(result.ids) for result in results)
    for index, length in enumerate(lengths):
        expected = alone(llama, PROMPTS[index % len(PROMPTS)], seed=index, max_new_tokens=length)
        if index == 1:
            assert results[1].ids == expected.ids[: len(results[1].ids)]
            continue
        assert results[index].ids == expected.ids
        assert results[index].done == expected.done
        assert results[index].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_token_i_is_drawn_with_number_i_of_the_seed(llama: Path) -> None:
    """Each token is what draw i picks from a full forward over all before it, wherever the response began."""
    prompt, seed = PROMPTS[2], 2**63 + 12345
    result = alone(llama, prompt, seed=seed, top_p=0.9)
    model = models.load_model(llama, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + result.ids])).logits[0, len(prompt) - 1 : -1]
    for index, token in enumerate(result.ids):
        draw = sampling.uniform(seed, index)
        assert sampling.sample(logits[index : index + 1], [draw], [1.0], [0.9])[0] == [token]


def test_a_prompt_that_ends_with_the_end_token_is_still_answered(llama: Path) -> None:
    """Only generated tokens end a response; chat templates end the user's turn with that token."""
    result = alone(llama, [5, tiny_models.EOS])
    assert len(result.ids) > 0


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_resumed_response_goes_on_as_the_uninterrupted_one(llama: Path, cut: int) -> None:
    """Prompt + prefix gives the remaining tokens of the whole response: draws depend on seed and index only."""
    whole = alone(llama, PROMPTS[0])
    rest = alone(llama, PROMPTS[0], prefix_ids=whole.ids[:cut])
    assert rest.ids == whole.ids[cut:]
    assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)


@pytest.mark.parametrize("cut", [1, 2, 9, 18, 19])
def test_deterministic_resume_is_bit_identical(llama: Path, cut: int) -> None:
    """With ``deterministic`` a resumed response has the very bits of the uninterrupted one, at every cut."""

    def run(**overrides: Any) -> Collected:
        generator = EmbeddedGenerator(llama, device="cpu", deterministic=True)
        others = [submit(generator, i, PROMPTS[i], seed=i) for i in (1, 2)]
        collected = submit(generator, "it", PROMPTS[3], max_new_tokens=20, **overrides)
        finish(generator)
        assert all(other.done for other in others)
        return collected

    whole, rest = run(), run(prefix_ids=run().ids[:cut])
    assert len(whole.ids) == 20
    assert rest.ids == whole.ids[cut:]
    assert rest.logprobs == whole.logprobs[cut:]


def test_reused_tokens_are_not_counted_as_generated(llama: Path) -> None:
    """generated_tokens counts each drawn token once, and no token of a prefix, replayed or not."""
    for deterministic in (False, True):
        generator = EmbeddedGenerator(llama, device="cpu", deterministic=deterministic)
        results = [submit(generator, i, PROMPTS[i], prefix_ids=[50, 51, 52]) for i in range(3)]
        finish(generator)
        assert generator.generated_tokens == sum(len(result.ids) for result in results)
        assert all(result.done == ["eos"] or len(result.ids) == 17 for result in results)


@pytest.mark.parametrize(("prefix", "reason"), [([8] * 20, "length"), ([8, 8, tiny_models.EOS], "eos")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_complete_prefix_is_done_at_once(llama: Path, prefix: list[int], reason: str, deterministic: bool) -> None:
    """A crash between the last durable token and the seal: nothing is generated again."""
    generator = EmbeddedGenerator(llama, device="cpu", deterministic=deterministic)
    result = submit(generator, 0, PROMPTS[0], prefix_ids=prefix)
    finish(generator)
    assert (result.ids, result.done, generator.generated_tokens) == ([], [reason], 0)


def test_eos_is_part_of_the_response_and_ends_it(llama: Path) -> None:
    """The end token is delivered as the last token, with reason eos."""
    free = alone(llama, PROMPTS[1], temperature=0.0)
    generator = EmbeddedGenerator(llama, device="cpu", eos=[free.ids[4]])
    result = submit(generator, 0, PROMPTS[1], temperature=0.0)
    finish(generator)
    first = free.ids.index(free.ids[4])
    assert (result.ids, result.done) == (free.ids[: first + 1], ["eos"])


def test_a_weight_swap_tags_each_token_with_the_weights_that_made_it(llama: Path, tmp_path: Path) -> None:
    """Tokens before the swap carry the old name, later ones the new; the sequence goes on and the new weights act."""
    other = tiny_models.build("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
    models.publish_model(other, tmp_path / "w")
    generator = EmbeddedGenerator(llama, device="cpu", branch=0, version=3)
    result = submit(generator, 0, PROMPTS[0], temperature=0.0)
    for _ in range(6):
        generator.step()
    pause = generator.load_weights(tmp_path / "w", branch=1, version=4)
    finish(generator)
    assert 0 <= pause < 5
    assert result.weights == [(0, 3)] * 6 + [(1, 4)] * (len(result.ids) - 6)
    kept = alone(llama, PROMPTS[0], temperature=0.0)
    assert result.ids[:6] == kept.ids[:6]
    assert result.ids[6:] != kept.ids[6:]
    fresh = submit(generator, 1, PROMPTS[2], temperature=0.0)
    finish(generator)
    assert fresh.ids == alone(tmp_path / "w", PROMPTS[2], temperature=0.0).ids


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(llama: Path, tmp_path: Path) -> None:
    """A folder that doesn't fit changes nothing: same tokens, same name."""
    tiny_models.save("llama", tmp_path, hidden_size=64)
    generator = EmbeddedGenerator(llama, device="cpu")
    with pytest.raises(models.PublishError, match="shape"):
        generator.load_weights(tmp_path, 0, 1)
    result = submit(generator, 0, PROMPTS[0])
    finish(generator)
    assert (result.ids, generator.weights) == (alone(llama, PROMPTS[0]).ids, (0, 0))


def test_the_decode_thread_serves_many_callers_and_swaps(llama: Path) -> None:
    """With the loop running: all requests end, weights get in between steps, the counter equals what was delivered."""
    generator = EmbeddedGenerator(llama, device="cpu", max_batch=4)
    generator.start()
    ended = threading.Semaphore(0)
    results = [Collected() for _ in range(24)]
    for index, result in enumerate(results):
        generator.submit(
            index, PROMPTS[index % 4], seed=index, max_new_tokens=8 + index, temperature=1.0,
            on_delta=result.on_delta, on_done=lambda reason, r=result: (r.on_done(reason), ended.release()),
        )  # fmt: skip
        if index % 8 == 7:
            assert generator.load_weights(llama, 0, index) < 5
    generator.abort([23])
    for _ in results:
        assert ended.acquire(timeout=30)
    generator.stop()
    assert generator.generated_tokens == sum(len(result.ids) for result in results)
    assert all(len(result.done) == 1 for result in results)
    assert {result.done[0] for result in results[:23]} <= {"eos", "length"}


def test_stop_gives_back_what_is_unfinished(llama: Path) -> None:
    """Running and waiting requests are done as aborted; later requests are refused."""
    generator = EmbeddedGenerator(llama, device="cpu", max_batch=1)
    generator.start()
    results = [submit(generator, i, PROMPTS[0], max_new_tokens=200, seed=i) for i in range(3)]
    generator.stop()
    assert [len(result.done) for result in results] == [1, 1, 1]
    assert results[2].done == ["aborted"]
    with pytest.raises(GeneratorError, match="stopped"):
        submit(generator, 9, PROMPTS[0])


def test_a_model_error_ends_every_request_with_its_cause(llama: Path) -> None:
    """Nobody waits for ever for a generator that has failed."""
    generator = EmbeddedGenerator(llama, device="cpu", max_batch=1)
    results = [submit(generator, i, PROMPTS[0]) for i in range(2)]
    generator.step()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    generator.model.forward = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        generator.step()
    assert [result.done for result in results] == [["failed: RuntimeError: out of memory"]] * 2
    with pytest.raises(GeneratorError, match="out of memory"):
        submit(generator, 9, PROMPTS[0])


def test_weights_without_finite_logits_fail_the_request_only(llama: Path, tmp_path: Path) -> None:
    """NaN weights give a failed request that names them, not an endless response."""
    spoiled = tiny_models.build("llama")
    with torch.no_grad():
        next(iter(spoiled.parameters())).fill_(float("nan"))
    models.publish_model(spoiled, tmp_path / "w")
    generator = EmbeddedGenerator(llama, device="cpu")
    generator.load_weights(tmp_path / "w", 0, 9)
    result = submit(generator, 0, PROMPTS[0])
    finish(generator)
    assert result.ids == []
    assert result.done[0].startswith("failed: weights 0.9")


def test_a_raising_callback_ends_its_own_request_only(llama: Path) -> None:
    """The decode loop survives a caller's error."""
    generator = EmbeddedGenerator(llama, device="cpu")
    bad = Collected()

    def raising(*_: Any) -> None:
        raise ValueError("disk full")

    generator.submit(
        "bad", PROMPTS[0], seed=1, max_new_tokens=5, temperature=1.0, on_delta=raising, on_done=bad.on_done
    )
    good = submit(generator, "good", PROMPTS[1])
    finish(generator)
    assert bad.done == ["failed: on_delta raised ValueError: disk full"]
    assert good.ids == alone(llama, PROMPTS[1]).ids


@pytest.mark.parametrize(
    ("prompt", "overrides", "message"),
    [
        ([], {}, "no tokens"),
        ([96], {}, "outside the model's vocabulary of 96"),
        ([5] * 250, {}, "exceed the model's context of 256"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens 0"),
        ([5], {"temperature": -1.0}, "temperature -1"),
        ([5], {"top_p": 0.0}, "top_p 0"),
    ],
)
def test_impossible_requests_are_refused_at_once(
    llama: Path, prompt: list[int], overrides: dict[str, Any], message: str
) -> None:
    """Each is an error that says what is wrong, before anything is queued."""
    generator = EmbeddedGenerator(llama, device="cpu")
    with pytest.raises(GeneratorError, match=message):
        submit(generator, 0, prompt, **overrides)
    assert generator.waiting == 0


def test_a_request_id_can_be_used_again_only_after_its_end(llama: Path) -> None:
    """Two running requests never share a name."""
    generator = EmbeddedGenerator(llama, device="cpu")
    submit(generator, 0, PROMPTS[0])
    with pytest.raises(GeneratorError, match="already running"):
        submit(generator, 0, PROMPTS[1])
    finish(generator)
    assert submit(generator, 0, PROMPTS[1]).done == []


def test_large_prefills_are_split(llama: Path) -> None:
    """Newcomers are taken in portions of max_prefill_tokens, and all of them come out right."""
    generator = EmbeddedGenerator(llama, device="cpu", max_prefill_tokens=13)
    results = [submit(generator, i, p, seed=i) for i, p in enumerate(PROMPTS)]
    generator.step()
    assert generator.running == 2
    finish(generator)
    assert [result.ids for result in results] == [alone(llama, p, seed=i).ids for i, p in enumerate(PROMPTS)]
