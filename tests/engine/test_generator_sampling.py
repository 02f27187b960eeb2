"""The draws themselves: distribution, top-p, independence, exactness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unlost.engine import sampling


def test_draws_depend_on_seed_and_index_and_are_uniform() -> None:
    """Same (seed, index), same number; over 20,000 draws each tenth of the interval holds its share."""
    numbers = [sampling.uniform(seed, index) for seed in range(200) for index in range(100)]
    assert numbers[:100] == [sampling.uniform(0, index) for index in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) > 0
    assert max(numbers) < 1
    counts = [0] * 10
    for number in numbers:
        counts[int(number * 10)] += 1
    assert all(abs(count - 2000) < 5 * math.sqrt(2000 * 0.9) for count in counts)


def test_neighbouring_seeds_and_indices_are_uncorrelated() -> None:
    """Siblings have neighbouring seeds: the streams must not run in step."""
    for seed_step, index_step in ((1, 0), (0, 1), (1, -1)):
        pairs = [
            (sampling.uniform(s, i), sampling.uniform(s + seed_step, i + index_step))
            for s in range(100)
            for i in range(1, 51)
        ]
        covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
        assert abs(covariance * 12) < 5 / math.sqrt(len(pairs))


class SplitMix64:
    """The published generator, written down again with numpy's wrapping arithmetic."""

    def __init__(self, state: int) -> None:
        self.state = np.array([state], np.uint64)

    def next(self) -> int:
        self.state += np.uint64(0x9E3779B97F4A7C15)
        return int(self.finish(self.state)[0])

    @staticmethod
    def finish(word: np.ndarray) -> np.ndarray:
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))


def test_the_stream_is_splitmix64_with_a_mixed_seed() -> None:
    """What a resumed run relies on may not change between releases; the oracle gives the generator's known values."""
    known = SplitMix64(1234567)
    assert [known.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        oracle = SplitMix64(int(SplitMix64.finish(np.array([seed ^ 0x9E3779B97F4A7C15], np.uint64))[0]))
        expected = [((oracle.next() >> 12) + 0.5) / 2**52 for _ in range(5)]
        assert [sampling.uniform(seed, index) for index in range(5)] == expected


def test_tokens_follow_the_distribution() -> None:
    """Frequencies over 20,000 draws match softmax(logits / temperature) within five standard errors."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, float("-inf")]])
    draws = [sampling.uniform(3, index) for index in range(20000)]
    ids, logprobs = sampling.sample(logits.expand(20000, 5), draws, [0.5] * 20000, [1.0] * 20000)
    expected = torch.softmax(logits[0] / 0.5, -1).tolist()
    for token, probability in enumerate(expected):
        share = ids.count(token) / 20000
        assert abs(share - probability) <= 5 * math.sqrt(probability * (1 - probability) / 20000)
    assert logprobs == pytest.approx([math.log(expected[token]) for token in ids], abs=1e-6)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    """With probabilities .4 .3 .2 .1: p 0.7 keeps two tokens, 0.71 three, and the kept ones keep their ratio."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    draws = [sampling.uniform(5, index) for index in range(4000)]

    def drawn(top_p: float) -> list[int]:
        return sampling.sample(logits.expand(4000, 4), draws, [1.0] * 4000, [top_p] * 4000)[0]

    assert set(drawn(0.69)) == {1, 3}
    assert set(drawn(0.72)) == {1, 3, 2}
    assert set(drawn(0.001)) == {1}
    assert drawn(0.69).count(1) / 4000 == pytest.approx(4 / 7, abs=0.04)


def test_rows_do_not_influence_each_other() -> None:
    """Greedy, sampled and top-p rows in one batch give what each gives alone, log-probabilities before top-p."""
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    settings = [(0.3, 0.0, 1.0), (0.6, 1.3, 1.0), (0.9, 0.8, 0.5)]
    together = sampling.sample(logits, *(list(column) for column in zip(*settings, strict=True)))
    for row, (draw, temperature, top_p) in enumerate(settings):
        ids, logprobs = sampling.sample(logits[row : row + 1], [draw], [temperature], [top_p])
        assert (ids[0], logprobs[0]) == (together[0][row], together[1][row])
        table = torch.log_softmax(logits[row] / (temperature or 1.0), -1)
        assert logprobs[0] == pytest.approx(float(table[ids[0]]), abs=1e-6)
    assert together[0][0] == int(logits[0].argmax())


def test_the_largest_draw_never_picks_an_impossible_token() -> None:
    """A draw next to 1 stays within tokens of positive probability."""
    logits = torch.tensor([[3.0, 1.0, float("-inf"), float("-inf")]])
    assert sampling.sample(logits, [math.nextafter(1.0, 0.0)], [1.0], [1.0])[0] == [1]
    assert sampling.sample(logits, [1.0], [1.0], [1.0])[0] == [1]
