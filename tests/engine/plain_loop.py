"""Synchronous GRPO without Ray, journal or data plane: prompts -> generator -> reward -> trainer, in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unlost.engine import models
from unlost.engine.generator import EmbeddedGenerator
from unlost.engine.grpo import GrpoSettings, GrpoTrainer
from unlost.engine.prompts import JsonlPrompts, render
from unlost.engine.protocols import Prompt, Row
from unlost.engine.rewards import Reward
from unlost.replay.events import AttemptKey


@dataclass
class Curve:
    """What happened, step by step."""

    rewards: list[float] = field(default_factory=list)
    seconds_generating: float = 0.0
    seconds_training: float = 0.0
    metrics: list[dict[str, float]] = field(default_factory=list)
    samples: list[tuple[str, str, float]] = field(default_factory=list)


class PlainLoop:
    """One process, one step after the other; weights are always those of the step."""

    def __init__(
        self, model: Path, prompts: JsonlPrompts, reward: Reward, work: Path, *, prompts_per_step: int,
        generations: int, max_new_tokens: int, settings: GrpoSettings, temperature: float = 1.0, chat: str = "auto",
    ) -> None:  # fmt: skip
        self.prompts, self.reward, self.work = prompts, reward, work
        self.prompts_per_step, self.generations, self.max_new_tokens = prompts_per_step, generations, max_new_tokens
        self.temperature, self.chat = temperature, chat
        self.tokenizer = models.load_tokenizer(model)
        self.generator = EmbeddedGenerator(model, tokenizer=self.tokenizer, device="cpu", max_batch=64)
        self.trainer = GrpoTrainer(model, settings, device="cpu")
        self.curve = Curve()
        self._at = (0, 0)

    def run(self, steps: int) -> Curve:
        for _ in range(steps):
            self._step()
        return self.curve

    def _step(self) -> None:
        version = self.trainer.version
        started = time.perf_counter()
        if version:
            self.trainer.publish(self.work / "weights")
            self.generator.load_weights(self.work / "weights", 0, version)
        batch, *at = self.prompts.fetch(*self._at, self.prompts_per_step)
        self._at = (at[0], at[1])
        groups = self._generate(batch, version)
        middle = time.perf_counter()
        result = self.trainer.train(version, groups)
        self.curve.seconds_generating += middle - started
        self.curve.seconds_training += time.perf_counter() - middle
        self.curve.rewards.append(result.reward_mean)
        self.curve.metrics.append(dict(result.metrics))

    def _generate(self, batch: list[Prompt], version: int) -> list[list[Row]]:
        made: dict[tuple[int, int], tuple[list[int], list[float], list[str]]] = {}
        ids = [render(prompt.row, self.tokenizer, chat_template=self.chat) for prompt in batch]
        for group in range(len(batch)):
            for sibling in range(self.generations):
                tokens, logprobs, done = made.setdefault((group, sibling), ([], [], []))
                self.generator.submit(
                    (version, group, sibling), ids[group], seed=version * 1000003 + group * 1009 + sibling,
                    max_new_tokens=self.max_new_tokens, temperature=self.temperature,
                    on_delta=lambda i, p, *_, a=tokens, b=logprobs: (a.extend(i.tolist()), b.extend(p.tolist())),
                    on_done=done.append,
                )  # fmt: skip
        while self.generator.running or self.generator.waiting:
            self.generator.step()
        return [[self._row(version, g, s, ids[g], batch[g].row, *made[g, s]) for s in range(self.generations)]
                for g in range(len(batch))]  # fmt: skip

    def _row(
        self, version: int, group: int, sibling: int, prompt: list[int], row: dict[str, Any], ids: list[int],
        logprobs: list[float], done: list[str],
    ) -> Row:  # fmt: skip
        response = self.tokenizer.decode(ids, skip_special_tokens=True)
        reward = self.reward(str(row["prompt"]), response, row.get("answer"), row)
        self.curve.samples.append((str(row["prompt"]), response, reward))
        return Row(
            AttemptKey(1, version * self.prompts_per_step + group, sibling, 0), np.array(prompt, "<i4").tobytes(),
            np.array(ids, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes(), ((0, 0, version),), reward, 0,
            done[0] != "eos",
        )  # fmt: skip
