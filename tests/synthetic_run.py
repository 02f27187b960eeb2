"""A made-up run, told in legal events: the base of post-mortem tests and benchmarks.

``SyntheticRun(Shape(seed=..., events=...))`` simulates workers, trainer, checkpoints and a controller that is killed
now and then, and hands out the events of its journal in order. Every event goes through ``transitions`` first, so the
story can't be an impossible one. The simulator knows what a killed controller can't know (how many tokens each try had
really made): ``truth`` holds those figures, which the SQL's bounds are checked against. The same shape gives the same
events, byte for byte.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from unlost.journal import JournalOptions, JournalWriter
from unlost.replay import events as ev
from unlost.replay.state import COMMITTED, COMPLETE, DISPATCHED, RESERVED, SEALED, UNFINISHED, State
from unlost.replay.transitions import TRANSITIONS, returned_groups

from .synthetic_shape import CHUNK, Shape, Truth, Try

_WALL_US = 1_750_000_000_000_000


class SyntheticRun:
    """One run. Iterate ``events()`` once; then ``state`` is the fold and ``truth`` what the simulator saw."""

    def __init__(self, shape: Shape, *, keep_truth: bool = True) -> None:
        self.shape = shape
        self.random = random.Random(shape.seed)
        self.state = State()
        self.truth = Truth()
        self._keep = keep_truth
        self._out: list[ev.Event] = []
        self._t = 0
        self._offset = 0
        self._epoch_rows = 100_000
        self._lengths: dict[tuple[int, int], int] = {}
        self._next_crash = 0
        self._spent: dict[int, int] = {}
        self._reset()

    def _reset(self) -> None:
        """What a dead process takes with it."""
        self._heap: list[tuple[int, int, str, Any]] = []
        self._ticket = 0
        self._queue: deque[tuple[int, int]] = deque()
        self._prefix: dict[tuple[int, int], int] = {}
        self._running: dict[tuple[int, int], Try] = {}
        self._free: deque[int] = deque()
        self._alive: dict[int, None] = {}
        self._saving = -1
        self._doomed: set[int] = set()

    # --- events ------------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[ev.Event]:
        """All events in order."""
        shape = self.shape
        marks = [shape.events * (i + 1) // (shape.crashes + 1) for i in range(shape.crashes)]
        self._begin()
        while True:
            yield from self._drain()
            if marks and self._offset >= marks[0]:
                marks.pop(0)
                self._die_and_restart()
                continue
            if self._offset >= shape.events:
                break
            self._step()
        if shape.ends:
            self._end()
            yield from self._drain()

    def _drain(self) -> list[ev.Event]:
        out, self._out = self._out, []
        return out

    def _say(self, event: ev.Event) -> None:
        check, effect = TRANSITIONS[type(event)]
        state = self.state
        check(state, event)
        state.offset = self._offset
        effect(state, event)
        self._offset += 1
        state.offset = self._offset
        state.t = event.t
        self._out.append(event)

    def _now(self) -> int:
        self._t += 1 + int(self.random.random() * 40)
        return self._t

    def _later(self, seconds: float, what: str, about: Any = None) -> None:
        self._ticket += 1
        heapq.heappush(self._heap, (self._t + int(seconds * 1e6), self._ticket, what, about))

    # --- a life of the controller ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        shape, state = self.shape, self.state
        settings = {"grpo.num_generations_per_prompt": shape.siblings, "journal.progress_interval_tokens": CHUNK}
        self._say(
            ev.RunStarted(
                self._t, shape.run_id, state.incarnation + 1, _WALL_US + self._t, "host", 1, {"dataset": "d"}, settings,
                {"unlost": "0"},
            )
        )  # fmt: skip
        if state.needs_restore:
            self._restore()
        else:
            for _ in range(shape.workers):
                self._add_worker()
            self._say(ev.WeightsSynced(self._now(), 0, 0, 0.0, shape.workers))
        self._later(shape.snapshot_s, "snapshot")
        self._fill()

    def _add_worker(self) -> None:
        worker = self.state.next_worker
        self._say(ev.WorkerStarted(self._now(), worker, f"i{self.state.incarnation:05d}-w{worker:05d}", "host", 2))
        self._alive[worker] = None
        self._spent[worker] = 0
        self._free.extend([worker] * self.shape.slots)

    def _restore(self) -> None:
        state, now = self.state, self._now
        began = self._t
        saved = [c for c in state.checkpoints if c.kind == ev.CHECKPOINT_TRAINER]
        newest = max(saved, key=lambda c: (c.trainer_version, c.id), default=None)
        to = newest.trainer_version if newest else 0
        self._say(ev.RestoreStarted(now(), newest.id if newest else -1, state.trainer_version, to, "step", state.t))
        for _ in range(self.shape.workers):
            self._add_worker()
        returning = returned_groups(state, to)
        if returning or to < state.trainer_version or state.open_step >= 0:
            branch = state.branch + (to < state.trainer_version)
            self._say(ev.TrainerRolledBack(now(), state.trainer_version, to, branch, tuple(returning)))
        for key in list(state.zombies):
            self._say(ev.AttemptAbandoned(now(), key.group, key.sibling, key.attempt, ev.ABANDON_RESTART))
        counters = {"siblings_reused": 0, "siblings_rerun": 0, "groups_unfinished_found": 0}
        complete = len(state.committed) + len(state.complete)
        for group in sorted(state.groups.values(), key=lambda g: g.id):
            if group.status not in (UNFINISHED, RESERVED):
                continue
            for index, sibling in enumerate(group.siblings):
                if sibling.status == DISPATCHED:
                    self._after_death(group.id, index, sibling)
            if group.status == COMPLETE:
                complete += 1
                continue
            counters["groups_unfinished_found"] += 1
            reused = sum(s.status == SEALED for s in group.siblings)
            counters["siblings_reused"] += reused
            counters["siblings_rerun"] += len(group.siblings) - reused
        for group_id in list(state.complete):
            self._commit(group_id)
        if state.uncleared:
            self._say(ev.RowsCleared(now(), tuple(state.uncleared)))
        self._say(ev.WeightsSynced(now(), state.branch, state.trainer_version, 0.0))
        counters["groups_complete_restored"] = complete
        counters["groups_rolled_back"] = len(returning)
        self._t += int(3e6)
        self._say(ev.RestoreCompleted(now(), counters, (self._t - began) / 1e6))
        for group_id in list(state.unfinished):
            self._enqueue(group_id)
        for admission in list(state.reserved):
            self._admit(admission)

    def _after_death(self, group_id: int, index: int, sibling: Any) -> None:
        """A try of the dead process: adopted, or abandoned with what is durable of it."""
        tried = self._dead.get((group_id, index))
        assert tried is not None
        made = tried.made(self._death)
        now = self._now()
        if self.random.random() < self.shape.adopt_share:
            total = max(made, 1)
            self._lengths[group_id, index] = total
            spans = self._spans(tried, total)
            self._say(
                ev.AttemptSealed(now, group_id, index, sibling.attempt, self._receipt(total, spans), adopted=True)
            )
            return
        durable = made // CHUNK * CHUNK
        durable = max(durable, tried.prefix) if made > tried.prefix else 0
        self._say(ev.AttemptAbandoned(now, group_id, index, sibling.attempt, ev.ABANDON_RESTART, durable, durable))
        if durable and self.shape.resume_prefixes:
            self._prefix[group_id, index] = durable

    def _die_and_restart(self) -> None:
        """Kill -9, some seconds of nothing, a new incarnation."""
        self._death = self._t + int(self.random.random() * 20_000)
        self._dead = self._running
        for tried in self._running.values():
            self._note(tried, self._death)
        self.truth.deaths.append(self._death / 1e6)
        self._t = self._death + int((5 + 20 * self.random.random()) * 1e6)
        waiting = self._prefix  # durable prefixes that no attempt has taken up yet are still on disk
        self._reset()
        self._prefix = waiting
        self._begin()

    def _end(self) -> None:
        for tried in list(self._running.values()):
            self._stop(tried, ev.ABANDON_STOPPED)
        for worker in self._alive:
            self._say(ev.WorkerStopped(self._now(), worker, "stopped", self._spent[worker]))
        self._say(ev.RunEnded(self._now(), "finished", "", self._generated()))

    def _generated(self) -> tuple[tuple[int, int], ...]:
        """As the workers count: tokens of running tries included."""
        spent = {worker: self._spent[worker] for worker in self._alive}
        for tried in self._running.values():
            spent[tried.worker] += tried.made(self._t) - tried.prefix
        return tuple(spent.items())

    # --- the clock ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        at, _, what, about = heapq.heappop(self._heap)
        self._t = max(self._t, at)
        getattr(self, f"_on_{what}")(about)
        if self._offset % self.shape.worker_loss_every < 3 and len(self._alive) > 1 and self._offset > 100:
            self._lose_worker()
        self._fill()

    def _fill(self) -> None:
        """Reserve, admit and dispatch as far as there is room; train if a step is ready."""
        state, shape = self.state, self.shape
        while len(state.unfinished) < shape.inflight_groups and len(state.committed) < 3 * shape.prompts_per_step:
            self._reserve()
        while self._free and self._queue:
            self._dispatch()
        self._train()

    def _reserve(self) -> None:
        state, shape = self.state, self.shape
        first, count = state.next_group, shape.prompts_per_step
        prompts = []
        epoch, row = state.epoch, state.position
        for _ in range(count):
            prompts.append(ev.PromptRef(f"p{row}", epoch, row, row * 7 + 1, "sums" if row % 3 else "words"))
            epoch, row = (epoch + 1, 0) if row + 1 == self._epoch_rows else (epoch, row + 1)
        admission = state.next_admission
        self._say(ev.BatchReserved(self._now(), admission, first, tuple(prompts), shape.siblings, epoch, row))
        self._admit(admission)

    def _admit(self, admission: int) -> None:
        state = self.state
        groups = list(state.reserved[admission].groups)
        self._say(ev.BatchAdmitted(self._now(), admission, -1, state.dispatch_index + 1, state.trainer_version))
        for group_id in groups:
            self._enqueue(group_id)

    def _enqueue(self, group_id: int) -> None:
        for index, sibling in enumerate(self.state.groups[group_id].siblings):
            if sibling.status not in (SEALED, DISPATCHED):
                self._queue.append((group_id, index))

    # --- tries -------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        place = self._queue.popleft()
        group = self.state.groups.get(place[0])
        if group is None or group.status != UNFINISHED or place in self._running:
            return
        worker = self._free.popleft()
        rnd, shape, state = self.random, self.shape, self.state
        total = self._lengths.get(place)
        if total is None:
            total = 1 + int(shape.tokens_median * math.exp(shape.tokens_spread * rnd.gauss(0, 1)))
            self._lengths[place] = total
        prefix = self._prefix.pop(place, 0)
        luck = rnd.random()
        fails = ""
        if luck < shape.data_fail_share:
            fails = ev.FAIL_DATA
        elif luck < shape.data_fail_share + shape.fail_share:
            fails = ev.FAIL_INFRASTRUCTURE
        attempt = group.siblings[place[1]].attempt + 1
        began = self._now()
        speed = 1e6 / (shape.tokens_per_s * (0.7 + 0.6 * rnd.random()))
        tried = Try(*place, attempt, worker, min(prefix, total), total, began, speed, fails)
        self._running[place] = tried
        self._say(
            ev.AttemptDispatched(began, *place, attempt, worker, state.branch, state.trainer_version, tried.prefix)
        )
        share = rnd.random() if fails else 1.0
        self._later((total - tried.prefix) * speed * share / 1e6 + 0.001, "done", tried)

    def _on_done(self, tried: Try) -> None:
        place = (tried.group, tried.sibling)
        if self._running.get(place) is not tried:
            return
        if tried.fails:
            made = tried.made(self._t)
            self._forget(tried)
            self._say(ev.AttemptFailed(self._now(), *place, tried.attempt, tried.fails, f"{tried.fails} trouble", made))
            if self.state.groups[tried.group].data_failures >= 2:
                self._drop(tried.group, ev.DISCARD_DROPPED)
            else:
                self._queue.append(place)
            return
        self._forget(tried, tried.total)
        spans = self._spans(tried, tried.total)
        self._say(ev.AttemptSealed(self._now(), *place, tried.attempt, self._receipt(tried.total, spans)))
        self._lengths.pop(place, None)
        if tried.group in self.state.complete:
            self._commit(tried.group)

    def _spans(self, tried: Try, total: int) -> tuple[tuple[int, int, int], ...]:
        """The weights moved on while it ran, if they did."""
        sibling = self.state.groups[tried.group].siblings[tried.sibling]
        first = (0, sibling.branch, sibling.version)
        now = (self.state.branch, self.state.trainer_version)
        if now > (sibling.branch, sibling.version) and now[0] == sibling.branch and total > 1:
            return (first, (total // 2, *now))
        return (first,)

    def _receipt(self, total: int, spans: tuple[tuple[int, int, int], ...]) -> ev.Receipt:
        versions = [version for _, _, version in spans]
        return ev.Receipt(
            round(self.random.random(), 3), total, min(versions), max(versions), "j", self._offset, 1, spans,
            truncated=total > 4000, prompt_tokens=20,
        )  # fmt: skip

    def _forget(self, tried: Try, made: int | None = None) -> None:
        """It runs no more; its worker counted what it made."""
        self._note(tried, self._t, made)
        del self._running[tried.group, tried.sibling]
        if tried.worker in self._alive:
            self._free.append(tried.worker)

    def _note(self, tried: Try, t: int, made: int | None = None) -> None:
        new = (tried.made(t) if made is None else made) - tried.prefix
        self._spent[tried.worker] += new
        self.truth.generated += new
        if self._keep:
            seconds = (t - tried.began_us) / 1e6
            self.truth.tries[tried.group, tried.sibling, tried.attempt] = (new, seconds)

    def _stop(self, tried: Try, reason: str) -> None:
        """An abort: the worker tells what it has and makes it durable."""
        made = tried.made(self._t)
        self._forget(tried)
        place = (tried.group, tried.sibling)
        self._say(ev.AttemptAbandoned(self._now(), *place, tried.attempt, reason, made, made))
        if made and self.shape.resume_prefixes and place[0] in self.state.groups:
            self._prefix[place] = made

    def _lose_worker(self) -> None:
        worker = next(iter(self._alive))
        del self._alive[worker]
        self._free = deque(w for w in self._free if w != worker)
        for tried in [t for t in self._running.values() if t.worker == worker]:
            made = tried.made(self._t)
            durable = made // CHUNK * CHUNK
            durable = max(durable, tried.prefix) if made > tried.prefix else 0
            self._forget(tried)
            place = (tried.group, tried.sibling)
            self._say(ev.AttemptAbandoned(self._now(), *place, tried.attempt, ev.ABANDON_WORKER_LOST, durable, durable))
            if durable and self.shape.resume_prefixes:
                self._prefix[place] = durable
            self._queue.append(place)
        self._say(ev.WorkerStopped(self._now(), worker, ev.ABANDON_WORKER_LOST))
        self._add_worker()

    def _drop(self, group_id: int, reason: str) -> None:
        running = [t for t in self._running.values() if t.group == group_id]
        self._say(ev.GroupDiscarded(self._now(), group_id, reason, "by the simulator"))
        for tried in running:
            self._stop(tried, ev.ABANDON_GROUP_DISCARDED)

    # --- buffer, trainer, checkpoints --------------------------------------------------------------------------------

    def _commit(self, group_id: int) -> None:
        receipts = [s.receipt for s in self.state.groups[group_id].siblings if s.receipt is not None]
        self._say(
            ev.GroupCommitted(
                self._now(), group_id, len(receipts), sum(r.tokens for r in receipts),
                min(r.version_min for r in receipts), max(r.version_max for r in receipts),
            )
        )  # fmt: skip

    def _train(self) -> None:
        state, shape = self.state, self.shape
        if state.open_step >= 0:
            return
        oldest = state.trainer_version - shape.lag
        for group_id in [g for g in state.committed if state.groups[g].start_weight < oldest]:
            self._say(ev.GroupEvicted(self._now(), group_id, ev.ABANDON_STALE))
        for group_id in [
            g for g in state.unfinished if state.groups[g].start_weight < oldest and state.groups[g].version_min >= 0
        ]:
            self._drop(group_id, ev.DISCARD_STALE_IN_FLIGHT)
        chosen = sorted(state.committed, key=lambda g: (state.groups[g].start_weight, g))[: shape.prompts_per_step]
        if len(chosen) < shape.prompts_per_step:
            return
        self._say(ev.StepClaimed(self._now(), state.trainer_version, tuple(chosen)))
        self._later(shape.train_s * (0.8 + 0.4 * self.random.random()), "applied")

    def _on_applied(self, _: Any) -> None:
        state, shape = self.state, self.shape
        step, trained = state.open_step, tuple(state.open_groups)
        receipts = [s.receipt for g in trained for s in state.groups[g].siblings if s.receipt is not None]
        self._say(
            ev.StepApplied(
                self._now(), step, step + 1, 1.0 / (step + 1), sum(r.reward for r in receipts) / len(receipts),
                sum(r.tokens for r in receipts), shape.train_s, self._generated(), {"kl": 0.5},
            )
        )  # fmt: skip
        if shape.weight_sync_abort:
            for tried in list(self._running.values()):
                self._stop(tried, ev.ABANDON_WEIGHT_SYNC)
                self._queue.append((tried.group, tried.sibling))
        self._t += 200_000
        self._say(ev.WeightsSynced(self._now(), state.branch, state.trainer_version, 0.2, len(self._alive)))
        self._say(ev.RowsCleared(self._now(), trained))
        if state.trainer_version % shape.save_period == 0:
            self._save(ev.CHECKPOINT_TRAINER)

    def _on_snapshot(self, _: Any) -> None:
        self._save(ev.CHECKPOINT_ROLLOUT)
        self._later(self.shape.snapshot_s, "snapshot")

    def _save(self, kind: str) -> None:
        state = self.state
        if self._saving >= 0:
            self._say(ev.CheckpointSkipped(self._now(), kind, "another checkpoint is still being written"))
            return
        self._saving = state.next_checkpoint
        cut = self._offset
        self._say(ev.CheckpointStarted(self._now(), self._saving, kind, state.trainer_version))
        seconds = self.shape.save_s * (0.5 + self.random.random())
        self._later(seconds, "saved", (self._saving, kind, state.trainer_version, cut, seconds))

    def _on_saved(self, about: tuple[int, str, int, int, float]) -> None:
        checkpoint, kind, version, cut, seconds = about
        self._saving = -1
        if self.random.random() < 0.08:
            self._say(ev.CheckpointFailed(self._now(), checkpoint, kind, "disk full", True, seconds))
            return
        floor = self.state.floor
        if kind == ev.CHECKPOINT_TRAINER:
            kept = [c.trainer_version for c in self.state.checkpoints if c.kind == kind]
            floor = max(floor, max(kept, default=0))
        self._say(
            ev.CheckpointCommitted(
                self._now(), checkpoint, kind, version, cut, f"{kind}_{version:06d}", "d", 1 << 20, seconds, floor, 10
            )
        )
        if kind == ev.CHECKPOINT_TRAINER:
            self._say(ev.StateImage(self._now(), msgspec.Raw(self.state.image())))


def write_journal(run: SyntheticRun, folder: Path, options: JournalOptions | None = None) -> Path:
    """Write the run's events to ``folder/events``, one writer per incarnation; images begin segments."""
    options = options or JournalOptions(flush_interval_ms=50, backlog_max_bytes=256 << 20)
    writer: JournalWriter[Any] | None = None
    unsynced = 0
    for event in run.events():
        if type(event) is ev.RunStarted:
            if writer is not None:
                writer.close()
            writer = JournalWriter.open(
                folder / "events",
                ev.EVENT_TYPES,
                journal_id=event.run_id,
                options=options,
                incarnation=event.incarnation,
            )
        assert writer is not None
        if type(event) is ev.StateImage:
            writer.rotate(event)
        else:
            writer.append(event)
        unsynced += 1
        if unsynced == 500_000:
            writer.sync()
            unsynced = 0
    assert writer is not None
    writer.close()
    return folder


__all__ = ["CHUNK", "COMMITTED", "Shape", "SyntheticRun", "Truth", "write_journal"]
