"""``apply(state, event)``: the one function by which the live engine and a replay change state.

Each event kind has a check, which raises IllegalTransition and changes nothing, and an effect, which can't fail after
its check passed. The ledger runs check → encode and enqueue → effect; a fold runs check → effect. So an illegal
transition writes nothing, and live and restored state can't drift. The rules stand in ``rules_prompts``,
``rules_attempts`` and ``rules_training``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from . import events as ev
from . import rules_attempts as attempts
from . import rules_prompts as prompts
from . import rules_training as training
from .rules import IllegalTransition
from .rules_training import returned_groups
from .state import State

__all__ = ["TRANSITIONS", "IllegalTransition", "apply", "returned_groups"]

_Check = Callable[[State, Any], None]

TRANSITIONS: Final[dict[type[ev.Event], tuple[_Check, _Check]]] = {
    ev.RunStarted: (prompts.check_run_started, prompts.do_run_started),
    ev.RunEnded: (prompts.check_run_ended, prompts.do_run_ended),
    ev.BatchReserved: (prompts.check_batch_reserved, prompts.do_batch_reserved),
    ev.BatchAdmitted: (prompts.check_batch_admitted, prompts.do_batch_admitted),
    ev.PromptReplaced: (prompts.check_prompt_replaced, prompts.do_prompt_replaced),
    ev.StepShortened: (prompts.check_step_shortened, prompts.do_step_shortened),
    ev.GroupDiscarded: (prompts.check_group_discarded, prompts.do_group_discarded),
    ev.AttemptDispatched: (attempts.check_attempt_dispatched, attempts.do_attempt_dispatched),
    ev.AttemptSealed: (attempts.check_attempt_sealed, attempts.do_attempt_sealed),
    ev.AttemptFailed: (attempts.check_attempt_failed, attempts.do_attempt_failed),
    ev.AttemptAbandoned: (attempts.check_attempt_abandoned, attempts.do_attempt_abandoned),
    ev.GroupCommitted: (training.check_group_committed, training.do_group_committed),
    ev.GroupEvicted: (training.check_group_evicted, training.do_group_evicted),
    ev.StepClaimed: (training.check_step_claimed, training.do_step_claimed),
    ev.StepApplied: (training.check_step_applied, training.do_step_applied),
    ev.WeightsSynced: (training.check_weights_synced, training.do_weights_synced),
    ev.RowsCleared: (training.check_rows_cleared, training.do_rows_cleared),
    ev.CheckpointStarted: (training.check_checkpoint_started, training.do_checkpoint_started),
    ev.CheckpointCommitted: (training.check_checkpoint_committed, training.do_checkpoint_committed),
    ev.CheckpointFailed: (training.check_checkpoint_failed, training.do_checkpoint_failed),
    ev.CheckpointSkipped: (training.check_nothing, training.do_checkpoint_skipped),
    ev.RestoreStarted: (training.check_restore_started, training.do_restore_started),
    ev.TrainerRolledBack: (training.check_trainer_rolled_back, training.do_trainer_rolled_back),
    ev.RestoreCompleted: (training.check_restore_completed, training.do_restore_completed),
    ev.StateImage: (training.check_nothing, training.do_state_image),
    ev.WorkerStarted: (prompts.check_worker_started, prompts.do_worker_started),
    ev.DataPlaneRestarted: (training.check_nothing, prompts.do_data_plane_restarted),
    ev.WorkerStopped: (prompts.check_worker_stopped, prompts.do_worker_stopped),
}


def apply(state: State, offset: int, event: ev.Event) -> None:
    """Check, then change ``state`` by one event at ``offset``; ``state.offset`` is then ``offset + 1``.

    Raises IllegalTransition, and changes nothing, if the event is not allowed here.
    """
    check, effect = TRANSITIONS[type(event)]
    check(state, event)
    state.offset = offset
    effect(state, event)
    state.offset = offset + 1
    state.t = event.t
