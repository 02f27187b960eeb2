"""Names that two openings of a run must never share (protocol rules 3, 6 and 13)."""

from __future__ import annotations

from itertools import product

from unlost.engine.checkpoints import checkpoint_name
from unlost.engine.workers import payload_journal_name
from unlost.replay import events as ev
from unlost.replay.events import AttemptKey

NUMBERS = (0, 1, 2, 10, 11, 12, 112)


def test_no_two_attempts_share_a_row_key() -> None:
    """Opening, group, sibling and attempt: a row that differs in any of them has another key."""
    keys = list(product(NUMBERS, repeat=4))
    assert len({AttemptKey(*key).row_key() for key in keys}) == len(keys)


def test_no_two_workers_or_openings_share_a_payload_journal() -> None:
    """A worker of the next opening does not write on in the journal of the one before."""
    pairs = list(product(NUMBERS, repeat=2))
    assert len({payload_journal_name(*pair) for pair in pairs}) == len(pairs)


def test_no_two_checkpoints_share_a_folder() -> None:
    """Neither kind, step, opening nor number: publishing never meets a folder that is there."""
    kinds = (ev.CHECKPOINT_TRAINER, ev.CHECKPOINT_ROLLOUT)
    of_all = list(product(kinds, NUMBERS, NUMBERS, NUMBERS))
    assert len({checkpoint_name(*one) for one in of_all}) == len(of_all)
