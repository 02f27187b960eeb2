"""What a made-up run looks like, and what its simulator knows that no journal can."""

from __future__ import annotations

from dataclasses import dataclass, field

CHUNK = 64


@dataclass(frozen=True)
class Shape:
    """What the run looks like. Times in seconds, lengths in tokens; ``crashes`` are spread evenly over the events."""

    seed: int = 0
    events: int = 20_000
    crashes: int = 2
    ends: bool = True
    workers: int = 4
    slots: int = 8
    siblings: int = 4
    prompts_per_step: int = 8
    inflight_groups: int = 24
    lag: int = 1
    tokens_median: float = 300.0
    tokens_spread: float = 0.8
    tokens_per_s: float = 50.0
    train_s: float = 14.0
    save_period: int = 3
    save_s: float = 6.0
    snapshot_s: float = 40.0
    fail_share: float = 0.01
    data_fail_share: float = 0.003
    worker_loss_every: int = 4_000
    adopt_share: float = 0.1
    weight_sync_abort: bool = False
    resume_prefixes: bool = True
    run_id: str = "synthetic"


@dataclass
class Truth:
    """What really happened, counted by the simulator as it happens. Keys of ``tries`` are (group, sibling, attempt)."""

    tries: dict[tuple[int, int, int], tuple[int, float]] = field(default_factory=dict)
    deaths: list[float] = field(default_factory=list)
    generated: int = 0


@dataclass
class Try:
    group: int
    sibling: int
    attempt: int
    worker: int
    prefix: int
    total: int
    began_us: int
    us_per_token: float
    fails: str

    def made(self, t: int) -> int:
        """Tokens it holds at ``t``, reused prefix included."""
        return min(self.total, self.prefix + int((t - self.began_us) / self.us_per_token))
