"""The rollout pump: fetch → reserve → admit → dispatch, and each group's way from dispatch to commit.

What is decided is in the ledger. This module holds only what a crash may lose: which tasks run, where a prompt's text
is cached, how many slots are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..replay import events as ev
from ..replay.payload_records import PayloadDamaged
from ..replay.payloads import AttemptTail, PayloadStore
from ..replay.plan import holders, longest_tail
from ..replay.state import COMPLETE, IDLE, UNFINISHED, Group
from .config_keys import Config
from .dropped import RunFailed, is_filtered, may_shrink, replacement, require_floor, spare_for, step_target
from .healing import HealingDataPlane
from .ledger import Ledger
from .protocols import (
    AttemptAborted,
    AttemptError,
    AttemptRequest,
    Clock,
    Prefix,
    Prompt,
    PromptSource,
    WorkerLost,
)
from .rows import row_of
from .samplers import Sampler, by_slot
from .workers import Member, WorkerPool

log = logging.getLogger(__name__)


CAUSE_LENGTH = 300
SUSPECT_LOSSES = 2
"""Lost workers after which a prompt is tried alone: who ran beside the one that kills must not be blamed with it."""

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


def attempt_seed(run_seed: int, group: int, sibling: int) -> int:
    """63-bit sampling seed of a sibling, the same for every attempt at it."""
    digest = hashlib.sha256(f"{run_seed}/{group}/{sibling}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class RolloutPump:
    """Keeps rollouts going until the ledger stops. ``spawn`` starts a task whose failure ends the run."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        sampler: Sampler,
        prompts: PromptSource,
        workers: WorkerPool,
        data_plane: HealingDataPlane,
        payloads: PayloadStore | None,
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.state = ledger.state
        self.sampler = sampler
        self.prompts = prompts
        self.workers = workers
        self.data_plane = data_plane
        self.payloads = payloads
        self.clock = clock
        self.in_flight = 0  # launched groups with unsealed siblings
        self.launched = 0  # launched groups not yet committed or gone
        self.prefixes: dict[tuple[int, int], AttemptTail] = {}
        self._spawn = spawn
        self._rows: dict[int, Prompt] = {}
        self._waiting: deque[int] = deque()  # admitted groups without a slot
        self._suspects = asyncio.Lock()
        self._spares_reserved_at = -1  # offset of this incarnation's latest reservation of spares
        self.late_rows: list[str] = []  # rows that came when their group was gone; the train pump clears them

    # --- the pump ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Relaunch what a restore left, then ordinary work, until the ledger stops."""
        state = self.state
        self._spawn(self._launcher())
        self.ledger.reopened = self._launch
        for group_id in by_slot(state, [*state.complete, *state.unfinished]):
            self._launch(group_id)
        for admission_id in sorted(state.reserved):
            await self._admit(admission_id)
        limit = self.config.grpo.max_steps
        while not self.ledger.stopping:
            await self.ledger.wait_until(lambda: self.sampler.admits_at_most(limit, state) or self._starved())
            reserved = await self._reserve()
            if reserved is not None:
                admission_id, offset = reserved
                await self.ledger.durable(offset)
                await self._admit(admission_id)

    async def _reserve(self) -> tuple[int, int] | None:
        """Take the next batch out of the loader (protocol rules 3, 4), requeued prompts first. None when stopping."""
        grpo = self.config.grpo
        if not await self.ledger.wait_until(self._may_reserve):
            return None
        await self.ledger.writer.drain()
        state = self.state
        await self._fill_reserve_pool()
        again = list(state.requeued)[: grpo.num_prompts_per_step]
        count = grpo.num_prompts_per_step - len(again)
        fetched, epoch, position = self.prompts.fetch(state.epoch, state.position, count)
        first = state.next_group
        admission_id, offset = self.ledger.reserve(
            [p.ref for p in fetched],
            grpo.num_generations_per_prompt,
            (epoch, position),
            kind=ev.KIND_POOL if again else ev.KIND_ORDINARY,
            pool_groups=again,
        )
        for index, prompt in enumerate(fetched):
            self._rows[first + index] = prompt
        return admission_id, offset

    def _may_reserve(self) -> bool:
        """One batch may wait at the gate; ungated samplers are held by capacity alone."""
        return len(self._waiting) < self.config.grpo.num_prompts_per_step

    async def _fill_reserve_pool(self) -> None:
        """``replace``: divert one whole batch to the spare pool when it runs low, once a step has been stamped."""
        failure = self.config.rollout_failure
        state = self.state
        wanted = failure.on_dropped_prompt == "replace" and self.sampler.stamps and state.dispatch_index >= 0
        if not wanted or len(state.spares) >= failure.replacement_reserve_prompts:
            return
        grpo = self.config.grpo
        fetched, epoch, position = self.prompts.fetch(state.epoch, state.position, grpo.num_prompts_per_step)
        first = state.next_group
        _, offset = self.ledger.reserve(
            [p.ref for p in fetched], grpo.num_generations_per_prompt, (epoch, position), kind=ev.KIND_SPARE
        )
        self._spares_reserved_at = offset
        for index, prompt in enumerate(fetched):
            self._rows[first + index] = prompt
        await self.ledger.durable(offset)

    async def _admit(self, admission_id: int) -> None:
        """Wait at the gate without changing anything, then admit in one event and launch.

        A batch that only makes up for groups that are gone passes beside the gate and moves no cursor.
        """
        state, sampler = self.state, self.sampler
        limit = self.config.grpo.max_steps

        def gate_open() -> bool:
            return sampler.admits_at_most(limit, state) and sampler.gate_open(state)

        if not await self.ledger.wait_until(lambda: gate_open() or self._starved()):
            return
        target_step, index = sampler.stamp(state) if gate_open() else (-1, state.dispatch_index)
        groups = list(state.reserved[admission_id].groups)
        self.ledger.record(
            ev.BatchAdmitted(self.clock.now_us(), admission_id, target_step, index, state.trainer_version)
        )
        for group_id in groups:
            self._launch(group_id)

    def _starved(self) -> bool:
        """Whether the next step can't be formed of all that was admitted: groups of it were given up or went stale.

        Only where batches carry no stamp. A stamped step gets a replacement or becomes smaller instead.
        """
        state = self.state
        if self.sampler.stamps or state.trainer_version >= self.config.grpo.max_steps:
            return False
        owned = len(state.unfinished) + len(state.complete) + len(state.committed) + len(state.open_groups)
        return owned < step_target(state, self.config, state.trainer_version)

    # --- one group --------------------------------------------------------------------------------------------------

    def _launch(self, group_id: int) -> None:
        self._waiting.append(group_id)
        self.ledger.changed.set()

    async def _launch_spare(self, group_id: int) -> None:
        """A spare may be needed before its reservation is durable; it is not dispatched before (protocol rule 3)."""
        if self._spares_reserved_at >= 0:
            await self.ledger.durable(self._spares_reserved_at)
        self._launch(group_id)

    async def _launcher(self) -> None:
        """Start waiting groups as capacity allows, in the order of their admission."""
        while True:
            if not await self.ledger.wait_until(lambda: self._next_to_start() >= 0 or self._held_back()):
                return
            index = self._next_to_start()
            if index < 0:
                await self.ledger.writer.drain()  # no event says when the backlog is short again, and none may follow
                continue
            group_id = self._waiting[index]
            del self._waiting[index]
            self._spawn(self._run_group(group_id))
            await asyncio.sleep(0)  # it takes its slots before the next one is looked at

    def _held_back(self) -> bool:
        """Whether groups wait and the journal's backlog may be why."""
        return bool(self._waiting) and self.ledger.writer.above_high_mark

    def _next_to_start(self) -> int:
        """Index in the queue, or -1.

        A group that the next step needs never waits for a slot (protocol rule 21): a restore with more owned groups
        than slots is slow, not stuck. After a rollback, groups of a step that is further ahead than admission would
        allow wait until it would.
        """
        state, limits = self.state, self.config.async_rl
        if not self._waiting:
            return -1
        synced = (state.synced_branch, state.synced_version) == (state.branch, state.trainer_version)
        if self.sampler.is_on_policy and not synced:
            return -1  # the gate is open since the step was applied, but the workers still have the weights before it
        busy = self.in_flight >= limits.max_inflight_prompts or self.ledger.writer.above_high_mark
        room = not busy and self.launched + len(state.committed) < limits.max_buffered_rollouts
        for index, group_id in enumerate(self._waiting):
            group = state.groups.get(group_id)
            if group is None or group.status == COMPLETE or self.sampler.needed_next(state, group):
                return index
            if room and self.sampler.may_start(state, group):
                return index
        return -1

    async def _run_group(self, group_id: int) -> None:
        """From launch (or relaunch) to commit or removal."""
        state = self.state
        self.launched += 1
        try:
            while not self.ledger.stopping:
                group = state.groups.get(group_id)
                if group is None or group.status not in (UNFINISHED, COMPLETE):
                    return
                if group.status == COMPLETE:
                    self._commit(group)
                    continue
                idle = [i for i, s in enumerate(group.siblings) if s.status == IDLE]
                self.in_flight += 1
                try:
                    await asyncio.gather(*(self._run_sibling(group_id, index) for index in idle))
                finally:
                    self.in_flight -= 1
        finally:
            self.launched -= 1
            self.ledger.changed.set()
            if group_id not in state.groups or state.groups[group_id].status not in (UNFINISHED, COMPLETE):
                self._rows.pop(group_id, None)

    async def _run_sibling(self, group_id: int, index: int) -> None:
        """Attempts at one sibling until it is sealed, or its group is gone or complete without it."""
        state = self.state
        while not self.ledger.stopping:
            group = state.groups.get(group_id)
            if group is None or group.status != UNFINISHED or group.siblings[index].status != IDLE:
                return
            await self._back_off(group)
            async with self._suspects if group.worker_losses >= SUSPECT_LOSSES else contextlib.nullcontext():
                await self._try_sibling(group_id, index)

    async def _try_sibling(self, group_id: int, index: int) -> None:
        """One attempt at a sibling, on the least loaded worker."""
        state = self.state
        worker = await self.workers.acquire()
        try:
            group = state.groups.get(group_id)
            if group is None or self.ledger.stopping or group.siblings[index].status != IDLE:
                return
            prompt = self._prompt(group)
            prefix, prefix_from = await self._prefix(group_id, index)
            if group_id not in state.groups or group.status != UNFINISHED:
                return  # discarded while its prefix was being read
            tokens = prefix.count if prefix is not None else 0
            weights = self.workers.weights_of(worker)
            key = self.ledger.dispatch(group_id, index, worker.worker_id, weights, tokens, prefix_from)
            await self._attempt(worker, key, prompt, prefix)
        finally:
            self.workers.release(worker)

    async def _attempt(self, worker: Member, key: ev.AttemptKey, prompt: Prompt, prefix: Prefix | None) -> None:
        """One dispatched attempt to its event, whatever it is."""
        generation = self.config.generation
        request = AttemptRequest(
            key=key,
            prompt=prompt,
            seed=attempt_seed(self.config.run.seed, key.group, key.sibling),
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            top_p=generation.top_p,
            prefix=prefix,
        )
        try:
            receipt = await worker.handle.generate(request)
        except AttemptError as error:
            if self.ledger.fail(key, error.kind, error.cause, error.tokens):
                await self._after_failure(key.group, error.cause)
            return
        except AttemptAborted as aborted:
            self.ledger.abandon(key, self.workers.abort_reason(key), aborted.tokens, aborted.durable)
            return
        except WorkerLost:
            await self.workers.lost(worker)
            await self._after_loss(key)
            return
        self.workers.note_sealed()
        taken = self.ledger.seal(key, receipt)
        if self.payloads is None:  # its row is in the data plane already
            if not taken:
                self._late_row(key)
        elif taken:
            await self._put_row(worker, key, receipt)

    async def _put_row(self, worker: Member, key: ev.AttemptKey, receipt: ev.Receipt) -> None:
        """Row into the data plane. The worker has it at hand; else it comes from the payload journal."""
        try:
            await self.data_plane.with_healing(lambda: worker.handle.put_row(key))
        except (WorkerLost, KeyError):
            if not await self._put_from_payload(key, receipt):
                self.ledger.lose(key, ev.ABANDON_PAYLOAD_LOST)
        if key.group not in self.state.groups:  # discarded while its row was on the way
            self._late_row(key)

    def _late_row(self, key: ev.AttemptKey) -> None:
        """Nobody owns this row; it is cleared when clears may run (protocol rule 22)."""
        self.late_rows.append(key.row_key())
        self.ledger.changed.set()

    async def _put_from_payload(self, key: ev.AttemptKey, receipt: ev.Receipt) -> bool:
        if self.payloads is None:
            return False
        try:
            payload = await self.ledger.blocking(self.payloads.load, receipt, key)
        except PayloadDamaged as error:
            log.error("group %d sibling %d: %s", key.group, key.sibling, error)
            return False
        await self.data_plane.put(row_of(payload))
        return True

    def _commit(self, group: Group) -> None:
        """All rows are in the data plane: hand the group to the buffer, unless a filter refuses it."""
        if not (is_filtered(self.config, group) and self._drop(group, ev.DISCARD_FILTERED, "zero variance")):
            self.ledger.commit_group(group.id)

    def _prompt(self, group: Group) -> Prompt:
        prompt = self._rows.get(group.id)
        if prompt is None:
            prompt = self._rows[group.id] = self.prompts.reread(group.prompt)
        return prompt

    async def _prefix(self, group_id: int, index: int) -> tuple[Prefix | None, int]:
        """The sibling's longest durable prefix (protocol rules 7, 10), if it is to be reused, and whose it is."""
        tail = self.prefixes.pop((group_id, index), None)
        if tail is None or self.payloads is None or self.config.async_rl.prefix != "resume":
            return None, -1
        try:
            ids, logprobs, spans = await self.ledger.blocking(self.payloads.load_prefix, tail)
        except PayloadDamaged as error:
            log.error("group %d sibling %d: prefix not used: %s", group_id, index, error)
            return None, -1
        return Prefix(token_ids=ids, logprobs=logprobs, weight_spans=spans), tail.key.attempt

    async def _after_loss(self, key: ev.AttemptKey) -> None:
        """A worker died: what it had made durable is the next attempt's prefix, or already its seal."""
        sealed = tail = None
        if self.payloads is None:
            self._late_row(key)  # the worker may have put it before it died
        elif self.ledger.is_running(key):
            wanted = holders(self.state, self.state.groups[key.group], key.sibling)
            tails = await self.ledger.blocking(self.payloads.sealed_tails, wanted)
            sealed = tails.attempts[key].sealed
            if sealed is None and self.ledger.is_running(key):
                tail = longest_tail(tails.attempts, self.state.groups[key.group], key.sibling)
        if sealed is not None and self.ledger.is_running(key):  # its own seal: an undead source may have one, too
            self.ledger.seal(key, sealed, adopted=True)
            if not await self._put_from_payload(key, sealed):
                raise RunFailed(f"group {key.group} sibling {key.sibling}: its payload was readable and now is not")
            return
        durable = tail.prefix_tokens if tail is not None else 0
        if tail is not None and durable:
            self.prefixes[key.group, key.sibling] = tail
        if self.ledger.abandon(key, ev.ABANDON_WORKER_LOST, durable, durable):
            group = self.state.groups[key.group]
            if group.worker_losses > self.config.rollout_failure.max_infra_attempts_per_prompt:
                self._give_up(group, ev.DISCARD_POISONED, f"{group.worker_losses} workers lost")

    # --- failures ---------------------------------------------------------------------------------------------------

    async def _back_off(self, group: Group) -> None:
        failure = self.config.rollout_failure
        tries = group.infra_failures
        if tries:
            await self.clock.sleep(min(failure.backoff_base_s * 2 ** (tries - 1), failure.max_backoff_s))

    async def _after_failure(self, group_id: int, cause: str) -> None:
        group = self.state.groups.get(group_id)
        if group is None:
            return
        failure, last = self.config.rollout_failure, " ".join(cause.split())[:CAUSE_LENGTH]
        if group.data_failures >= failure.max_data_attempts_per_prompt:
            why = f"{group.data_failures} attempts failed on its data, the last: {last}"
            self._give_up(group, ev.DISCARD_DROPPED, why)
        elif group.infra_failures >= failure.max_infra_attempts_per_prompt:
            why = f"{group.infra_failures} attempts failed on infrastructure, the last: {last}"
            self._give_up(group, ev.DISCARD_DROPPED, why)

    def _give_up(self, group: Group, reason: str, detail: str) -> None:
        """A prompt that can't be worked off leaves, within the run's budget for that. Raises RunFailed beyond it."""
        state, failure = self.state, self.config.rollout_failure
        if not self._drop(group, reason, detail):
            require_floor(state, self.config, group.target_step, f"prompt {group.prompt.sample_id}: {detail}")
        log.error("prompt %s (group %d) given up: %s", group.prompt.sample_id, group.id, detail)
        given_up = state.counters.get("prompts_given_up", 0)
        if given_up > failure.max_skipped_prompts:
            raise RunFailed(
                f"{given_up} prompt(s) given up, rollout_failure.max_skipped_prompts is {failure.max_skipped_prompts}; "
                f"the last: {group.prompt.sample_id}: {detail}. See `unlost events RUN --kind AttemptFailed`"
            )

    def _drop(self, group: Group, reason: str, detail: str) -> bool:
        """Replace, shrink or discard in one event, then cancel what still runs. False if its step can't spare it."""
        state, t = self.state, self.clock.now_us()
        running = self.ledger.running(group.id)
        spare = spare_for(state, self.config, group)
        if spare is not None:
            self.ledger.record(replacement(state, t, group, reason, spare))
            self._spawn(self._launch_spare(spare))
        elif group.target_step < 0:
            self.ledger.record(ev.GroupDiscarded(t, group.id, reason, detail))
        elif may_shrink(state, self.config, group.target_step):
            self.ledger.record(ev.StepShortened(t, group.id, reason, group.target_step))
        else:
            return False
        self.abort(running, ev.ABANDON_GROUP_DISCARDED)
        return True

    def discard(self, group_ids: Sequence[int], reason: str) -> None:
        """Discard groups that are not worth finishing: ledger first, then their tasks' attempts."""
        requeue = self.config.async_rl.stale_prompts == "requeue"
        for group_id in group_ids:
            running = self.ledger.running(group_id)
            again = self.state.next_group if requeue else -1
            self.ledger.record(ev.GroupDiscarded(self.clock.now_us(), group_id, reason, "", again))
            self.abort(running, ev.ABANDON_GROUP_DISCARDED)

    def abort(self, keys: Sequence[ev.AttemptKey], reason: str) -> None:
        """Tell the workers to end these attempts, without waiting."""
        if keys:
            self._spawn(self.workers.abort(keys, reason))
