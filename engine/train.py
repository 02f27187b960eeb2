"""The train pump: evict → select → claim → train → apply → sync weights, and the clears that follow."""

from __future__ import annotations

import functools
import logging

from ..replay import events as ev
from .checkpoints import Checkpointer
from .config_keys import Config
from .dropped import RunFailed, step_target
from .healing import HealingDataPlane
from .ledger import Ledger
from .protocols import Clock, StepResult, Trainer
from .rollout import RolloutPump
from .samplers import Sampler, by_slot
from .workers import WorkerPool

log = logging.getLogger(__name__)

LOST_REPLIES_MAX = 3
LAST_SAVE_AGAIN_S = 1.0


class TrainPump:
    """One optimizer step after the other until ``max_steps``."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        sampler: Sampler,
        rollout: RolloutPump,
        workers: WorkerPool,
        trainer: Trainer,
        data_plane: HealingDataPlane,
        checkpointer: Checkpointer | None,
        clock: Clock,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.state = ledger.state
        self.sampler = sampler
        self.rollout = rollout
        self.workers = workers
        self.trainer = trainer
        self.data_plane = data_plane
        self.checkpointer = checkpointer
        self.clock = clock
        self.last: StepResult | None = None
        self._save_due = False

    async def run(self) -> None:
        """Steps until ``max_steps``, or until asked to stop between two steps."""
        state = self.state
        while state.trainer_version < self.config.grpo.max_steps and not self.ledger.stopping:
            if not await self._claim_step():
                return
            if not await self._train_step():
                continue
            await self._sync_weights()
            await self._checkpoint_if_due()

    def drop_stale(self) -> int:
        """Evict from the buffer, and abort in flight, what the sampler calls too old. Returns the groups dropped."""
        state = self.state
        requeue = self.config.async_rl.stale_prompts == "requeue"
        old = self.sampler.evictable(state)
        for group_id in old:
            again = state.next_group if requeue else -1
            self.ledger.record(ev.GroupEvicted(self.clock.now_us(), group_id, ev.ABANDON_STALE, again))
        in_flight = self.sampler.stale_in_flight(state)
        self.rollout.discard(in_flight, ev.DISCARD_STALE_IN_FLIGHT)
        return len(old) + len(in_flight)

    async def _claim_step(self) -> bool:
        """Claim the next step's groups as they become ready. False when stopping before the step is whole."""
        state = self.state
        step = state.trainer_version
        streaming = self.config.async_rl.min_groups_for_streaming_train
        while True:
            missing = step_target(state, self.config, step) - len(state.open_groups)
            if missing <= 0:
                return True
            self.drop_stale()
            least = missing if streaming is None else min(streaming, missing)
            chosen = self.sampler.select(state, least, missing)
            if chosen:
                self.ledger.record(ev.StepClaimed(self.clock.now_us(), step, tuple(chosen)))
                continue
            if not await self.ledger.wait_until(functools.partial(self._may_claim, step, least)):
                return False

    def _may_claim(self, step: int, least: int) -> bool:
        """Cheap: enough groups are ready, something is stale, or a group was given up and the step needs fewer."""
        state = self.state
        missing = step_target(state, self.config, step) - len(state.open_groups)
        return missing < least or self.sampler.ready(state) >= least or self.sampler.has_stale(state)

    async def _train_step(self) -> bool:
        """Train exactly once, also when the trainer's answer is lost (protocol rule 17).

        False if rows of the step are lost with their payloads: then it is not claimed any more.
        """
        state = self.state
        step = state.open_step
        groups = by_slot(state, state.open_groups)
        keys = [state.groups[g].sealed_row_keys() for g in groups]
        try:
            result = await self._trained_once(step, keys)
        except KeyError as gone:
            await self._give_up_lost(step, gone)
            return False
        if (result.step, result.trainer_version) != (step, step + 1):
            raise RunFailed(f"the trainer answered step {result.step} version {result.trainer_version} to step {step}")
        await self.workers.stats()
        self.ledger.record(
            ev.StepApplied(
                self.clock.now_us(),
                step,
                result.trainer_version,
                result.loss,
                result.reward_mean,
                result.tokens,
                result.seconds,
                self.workers.generated(),
                dict(result.metrics),
            )
        )
        self.last = result
        return True

    async def _trained_once(self, step: int, keys: list[list[str]]) -> StepResult:
        """The step's result; where the reply is lost, the trainer is asked before anything is repeated.

        Raises KeyError if rows are neither in the data plane nor to be had from payloads.
        """
        began = self.clock.now_us()
        for _ in range(LOST_REPLIES_MAX):
            try:
                return await self.data_plane.with_healing(lambda: self.trainer.train(step, keys))
            except (ConnectionError, TimeoutError) as lost:
                version = await self.trainer.version()
                log.warning("the reply to step %d was lost (%s); the trainer is at version %d", step, lost, version)
                if version != step:
                    return StepResult(step, version, 0.0, *self._rewards_and_tokens(), self._seconds_since(began))
        raise RunFailed(f"the replies to step {step} were lost {LOST_REPLIES_MAX} times, and it was not applied")

    async def _give_up_lost(self, step: int, gone: KeyError) -> None:
        """Let go of the claim, and have the siblings that are lost generated again."""
        there = await self.data_plane.inventory()
        groups = [self.state.groups[g] for g in self.state.open_groups]
        lost = [key for g in groups for i in range(len(g.siblings)) if (key := g.key(i)).row_key() not in there]
        if not lost:
            raise RunFailed(
                f"step {step}: {gone.args[0]}, says the trainer, though they are there. The same command again starts "
                f"both anew"
            ) from gone
        log.error("step %d: %s, and their payloads can't be read: they are generated again", step, gone.args[0])
        self.release_claim()
        for key in lost:
            self.ledger.lose(key, ev.ABANDON_PAYLOAD_LOST)

    def release_claim(self) -> None:
        """Groups claimed for a step that is not trained now go back, as a restore would do it (rules 11, 16)."""
        state = self.state
        if state.open_step >= 0:
            version, groups = state.trainer_version, tuple(state.open_groups)
            self.ledger.record(ev.TrainerRolledBack(self.clock.now_us(), version, version, state.branch, groups))

    def _rewards_and_tokens(self) -> tuple[float, int]:
        """Mean reward and tokens of the open step, from its receipts."""
        siblings = [s for g in self.state.open_groups for s in self.state.groups[g].siblings]
        receipts = [s.receipt for s in siblings if s.receipt is not None]
        return sum(r.reward for r in receipts) / len(receipts), sum(r.tokens for r in receipts)

    def _seconds_since(self, t: int) -> float:
        return (self.clock.now_us() - t) / 1e6

    async def _sync_weights(self) -> None:
        """New weights for every worker; running sequences go on with them, or start again (``weight_sync: abort``)."""
        state = self.state
        weights = await self.trainer.publish_weights(state.branch)
        if self.config.async_rl.weight_sync == "abort":
            running = [key for g in state.unfinished for key in self.ledger.running(g)]
            await self.workers.abort(running, ev.ABANDON_WEIGHT_SYNC)
        pause = await self.workers.sync(weights)
        self.ledger.record(
            ev.WeightsSynced(self.clock.now_us(), weights.branch, weights.version, pause, len(self.workers.members))
        )

    async def _checkpoint_if_due(self) -> None:
        """At each ``save_period``-th step and at the last; one that was skipped is taken at the next boundary."""
        checkpointing = self.config.checkpointing
        if self.checkpointer is None or not checkpointing.enabled:
            return
        version = self.state.trainer_version
        last = version >= self.config.grpo.max_steps
        self._save_due = self._save_due or last or version % checkpointing.save_period == 0
        if not self._save_due:
            return
        if last:
            await self._save_last(self.checkpointer)
        elif await self.checkpointer.begin(ev.CHECKPOINT_TRAINER) is not None:
            self._save_due = False

    async def _save_last(self, checkpointer: Checkpointer) -> None:
        """No later boundary makes up for this one: until it is published, or CheckpointLimit ends the run as failed."""
        while True:
            await checkpointer.wait()
            saving = await checkpointer.begin(ev.CHECKPOINT_TRAINER)
            if saving is not None and await saving:
                return
            await self.clock.sleep(LAST_SAVE_AGAIN_S)

    async def clear_rows(self) -> None:
        """Clear rows of groups that are trained or gone: event durable first, and never while a snapshot is written.

        Under ``payloads: none`` rows of trained groups stay until a durable trainer checkpoint covers their step.
        """
        state = self.state
        full = self.config.data_plane.payloads == "full"
        late = self.rollout.late_rows
        while True:
            ready = [g for g in state.uncleared if full or self._covered(g)]
            if not ready and not late:
                if not await self.ledger.wait_until(
                    lambda: bool(late) or any(full or self._covered(g) for g in state.uncleared)
                ):
                    return
                continue
            if self.checkpointer is not None and not self.checkpointer.clears_may_run.is_set():
                self.checkpointer.clears_deferred += len(ready)
                await self.checkpointer.clears_may_run.wait()
                continue
            keys = [*late, *(key for g in ready for key in state.uncleared[g])]
            late.clear()  # what comes from here on belongs to groups whose end may not be durable by then
            if ready:
                self.ledger.record(ev.RowsCleared(self.clock.now_us(), tuple(ready)))
            await self.ledger.before_destructive(state.offset - 1)
            await self._clear(keys)

    async def _clear(self, keys: list[str]) -> None:
        """Clear when no snapshot is being written; one that begins meanwhile waits for the end of the clear."""
        if self.checkpointer is None:
            await self.data_plane.clear(keys)
            return
        await self.checkpointer.clears_may_run.wait()
        self.checkpointer.no_clear_runs.clear()
        try:
            await self.data_plane.clear(keys)
        finally:
            self.checkpointer.no_clear_runs.set()

    def _covered(self, group_id: int) -> bool:
        group = self.state.groups.get(group_id)
        if group is None:
            return True
        saved = [c.trainer_version for c in self.state.checkpoints if c.kind == ev.CHECKPOINT_TRAINER]
        return group.trained_step < max(saved, default=0)
