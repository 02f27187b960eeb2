"""How the demo tells its figures."""

from __future__ import annotations

from typing import Any, Final

from .demo_figures import Figures, Owned
from .output import print_fields

_BARS: Final = "▁▂▃▄▅▆▇█"


def print_owned(death: Owned) -> None:
    """What was owned when the process died, one line each."""
    print_fields(
        [
            ("events", death.offset),
            ("trainer at step", f"{death.trainer_version}, its last checkpoint at {death.checkpoint_version}"),
            ("groups trained", death.trained),
            ("groups claimed for the open step", death.claimed),
            ("groups complete, not trained", death.complete),
            ("groups unfinished", death.unfinished),
            ("  siblings finished", death.siblings_sealed),
            ("  siblings being generated", death.siblings_running),
            ("  siblings not begun", death.siblings_idle),
            ("finished tokens not trained", death.tokens_sealed),
            ("every prompt in exactly one place", "yes" if death.promise_holds else "NO"),
        ]
    )


def print_figures(found: Figures, final: dict[str, Any]) -> None:
    """What the restart reused, did again and threw away, and how the run ended. ``final``: the last state's summary.

    What a killed worker had generated since its last durable progress record is in no journal; only a bound is known,
    the one that the report gives too.
    """
    counters, prompts = found.counters, final["prompts"]
    rolled_back = "none"
    if found.rolled_back:
        before, after = found.rolled_back
        rolled_back = f"{before} to {after}; {counters.get('groups_rolled_back')} groups came back from the journal"
    one_place = "yes" if prompts["holds"] else "NO"
    end = f"{found.ended or 'not ended'} at step {final['trainer']['version']}, incarnation {found.incarnations}"
    print_fields(
        [
            ("restore", f"{found.restore_seconds:.2f} s"),
            ("trainer steps rolled back", rolled_back),
            ("siblings finished unseen, adopted", counters.get("attempts_adopted")),
            ("groups restored complete", counters.get("groups_complete_restored")),
            ("groups found unfinished", counters.get("groups_unfinished_found")),
            ("  finished siblings reused", counters.get("siblings_reused")),
            ("  siblings run again", counters.get("siblings_rerun")),
            ("  of these from a prefix", found.prefixes),
            ("  prefix tokens reused", counters.get("prefix_tokens_reused")),
            ("attempts cut off by the kill", found.interrupted),
            ("  durable tokens thrown away", counters.get("tokens_lost_known")),
            ("  not yet journaled, lost", "unknown" if found.hidden is None else f"{found.hidden} tokens at most"),
            ("finished siblings generated again", len(found.sealed_again)),
            ("groups trained twice", len(found.trained_twice)),
            ("prompts handed out", f"{prompts['handed_out']}, each in exactly one place: {one_place}"),
            ("run", end),
            ("mean reward", reward_curve([reward for _, reward in found.rewards])),
        ]
    )


def reward_curve(rewards: list[float]) -> str:
    """``0.120 ▁▂▅█ 0.740``: first and last step's mean reward, with what lies between."""
    if not rewards:
        return "no steps"
    low, high = min(rewards), max(rewards)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_BARS[round((reward - low) * scale)] for reward in rewards)
    return f"{rewards[0]:.3f} {bars} {rewards[-1]:.3f}"
