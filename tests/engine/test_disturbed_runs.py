"""Runs that are disturbed at awkward moments by something other than a crash: they go on, or end as what they are."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes import SimDataPlane, SimPlan, SimTrainer, sim_reward
from tests.simulation.world import PAYLOADS, Hooks, Incarnation, RunClock, World, sim_config
from unlost.engine.progress import EXIT_RESUMABLE, Progress
from unlost.replay import events as ev
from unlost.replay.events import AttemptKey
from unlost.replay.state import State

pytestmark = pytest.mark.slow  # in sum more than a fast suite should take

SAMPLERS = ("in_order", "weight_fifo", "windowed", "ready_first")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def of(place: World, kind: type[Any]) -> list[Any]:
    return [e for _, e in place.events() if isinstance(e, kind)]


def published(place: World) -> list[int]:
    """Versions of the trainer checkpoints on disk."""
    found = (re.fullmatch(r".*/step_(\d+)-[^/]*", d) for d in place.storage.directories)
    return sorted(int(match[1]) for match in found if match)


def ended(life: Incarnation, code: int = 0) -> str:
    assert life.outcome is not None
    assert life.outcome.exit_code == code, life.outcome
    return life.outcome.detail


def later(life: Incarnation, seconds: float, what: Callable[[], object]) -> None:
    assert life.loop is not None
    life.loop.call_later(seconds, what)


class Wrapped:
    """A journal writer with some methods replaced."""

    def __init__(self, writer: Any, **methods: Callable[..., Any]) -> None:
        self._writer = writer
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


# --- the last checkpoint --------------------------------------------------------------------------------------------


def _save_fails(error: Exception, times: int) -> Callable[[World, Incarnation], None]:
    def arrange(place: World, life: Incarnation) -> None:
        def now() -> None:
            assert life.plane is not None
            life.plane.fail_next("save", *[error] * times)

        later(life, 0.01, now)

    return arrange


def _publish_fails(times: int) -> Callable[[World, Incarnation], None]:
    return lambda place, life: place.storage.fail("publish", errno.ENOSPC, times=times)


@pytest.mark.parametrize(
    "fault",
    [_save_fails(OSError(errno.EIO, "x"), 1), _save_fails(TimeoutError("x"), 2), _publish_fails(1), _publish_fails(2)],
    ids=["io error", "two time-outs", "full disk", "full twice"],
)
def test_a_finished_run_has_its_last_step_saved(fault: Callable[[World, Incarnation], None]) -> None:
    """The only checkpoint of a run fails at first: it is tried again, since no later boundary makes up for it."""
    place = World(sim_config(grpo__max_steps=3, checkpointing__save_period=10))
    ended(place.live(arrange=lambda life: fault(place, life), limit_s=600))
    assert published(place) == [3]


def test_a_run_whose_last_step_can_not_be_saved_has_not_finished() -> None:
    """It fails with the cause, and the same command ends it once there is room."""
    place = World(sim_config(grpo__max_steps=3, checkpointing__save_period=10))
    life = place.live(arrange=lambda life: _publish_fails(3)(place, life), limit_s=600)
    assert "3 checkpoints failed in a row" in ended(life, 1)
    ended(place.live(limit_s=600))
    assert published(place) == [3]


@pytest.mark.parametrize("stop_at_s", [2.0 + 0.1 * n for n in range(8)])
def test_rollout_snapshots_do_not_stand_in_the_way_of_the_last_checkpoint(stop_at_s: float) -> None:
    """Snapshots follow each other without a gap: a stop, and the end, still save what was trained."""
    place = World(
        sim_config(grpo__max_steps=6, checkpointing__save_period=10, rollout_checkpointing__interval_s=0.05), seed=1
    )
    ended(place.live(stop_at_s=stop_at_s, limit_s=600), EXIT_RESUMABLE)
    assert published(place)[-1:] == [place.fold().trainer_version]
    ended(place.live(limit_s=600))
    assert published(place)[-1] == 6


@pytest.mark.parametrize("sampler", ["in_order", "weight_fifo", "ready_first"])
def test_a_stop_inside_a_claim_saves_what_was_trained(sampler: str) -> None:
    """Streaming: groups are claimed for a step that is not whole yet. They go back, and no step is trained again."""

    def script(key: AttemptKey, seed: int) -> SimPlan:
        return SimPlan(tokens=8 if key.group % 3 else 300, seconds_per_token=0.05, tokens_per_delta=4)

    keys = {"async_rl__sampler__name": sampler, "async_rl__min_groups_for_streaming_train": 1}
    keys |= {"generation__max_new_tokens": 300, "checkpointing__save_period": 50}
    place = World(sim_config(grpo__max_steps=200, **keys), script=script)
    for stop_at_s in (18.0, 9.0, 12.0):
        ended(place.live(stop_at_s=stop_at_s, limit_s=600), EXIT_RESUMABLE)
        state = place.fold()
        assert published(place)[-1:] == ([state.trainer_version] if state.trainer_version else [])
    ended(place.live(stop_at_s=1.5, limit_s=600), EXIT_RESUMABLE)
    back = of(place, ev.TrainerRolledBack)
    assert back, "no claim was open at any stop"
    assert all(e.from_version == e.to_version for e in back)


# --- what can not be removed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3, 1000])
@pytest.mark.parametrize("name", ["", PAYLOADS, "/step_"])
def test_what_can_not_be_removed_stays_behind(name: str, times: int) -> None:
    """Retention meets a folder that another process holds: the run does not end for it, and it goes the next time."""
    place = World(sim_config(grpo__max_steps=6, checkpointing__save_period=1))
    place.live(kill_at_s=4.0)
    place.storage.fail("remove_tree", errno.EBUSY, times=times, name=name)
    ended(place.live(limit_s=600))
    if times < 1000:
        assert published(place) == [5, 6]


@pytest.mark.parametrize("times", [1, 3, 1000])
@pytest.mark.parametrize("part", ["checkpoints", "payloads"])
def test_what_can_not_be_listed_is_tidied_up_later(part: str, times: int) -> None:
    """Retention can't read a folder for a while: the run does not end for it, and what has to go goes the next time."""
    place = World(sim_config(grpo__max_steps=6, checkpointing__save_period=1))
    place.live(kill_at_s=4.0)
    folder = {"checkpoints": place.config.checkpoint_dir, "payloads": PAYLOADS}[part]
    left = [times]

    def hook(op: str, path: str) -> None:
        if op == "list" and path == folder and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, "scripted")

    place.storage.hook = hook
    ended(place.live(limit_s=600))
    assert left[0] < times
    if times < 1000:
        assert published(place) == [5, 6]


# --- the data plane is lost -----------------------------------------------------------------------------------------

PHASES = ("trainer load", "data plane load", "payload tails", "rows")


@pytest.mark.parametrize("save_data_plane", [True, False])
@pytest.mark.parametrize("moments", [(0, 3, 8), (15, 30)], ids=["early", "late"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_data_plane_may_be_lost_at_any_moment_of_a_restore(
    phase: str, moments: tuple[int, ...], save_data_plane: bool
) -> None:
    """Rows of groups that a rollback returns are there when the restore is completed, whenever they were lost."""
    for moment in moments:
        place = World(
            sim_config(
                grpo__max_steps=5,
                async_rl__sampler__max_lookahead_versions=2,
                checkpointing__save_data_plane=save_data_plane,
            )
        )
        assert place.live(kill_at_s=5.7).killed
        place.hooks = hooks = _LosesDataPlane(phase, 0.005 * moment)
        ended(place.live(limit_s=600))
        assert hooks.lost
        assert of(place, ev.TrainerRolledBack)


class _LosesDataPlane(Hooks):
    """A slow one, lost some time after a phase of the restore began."""

    def __init__(self, phase: str, after_s: float) -> None:
        self.phase, self.after_s, self.lost = phase, after_s, False

    def plane(self, life: Incarnation, clock: RunClock) -> SimDataPlane:
        return SimDataPlane(clock, storage=life.world.storage, put_seconds=0.05, save_seconds=0.1)

    def progress(self, life: Incarnation, progress: Progress) -> None:
        if progress.message == f"restoring: {self.phase}" and not self.lost:
            self.lost = True
            assert life.plane is not None
            later(life, self.after_s, life.plane.lose)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_group_of_the_buffer_whose_rows_and_payloads_are_lost_is_generated_again(sampler: str) -> None:
    """Data plane and a payload journal at once, in mid-run: nobody waits for ever for a group that nobody works on."""
    keys = {"async_rl__sampler__max_lookahead_versions": 2, "async_rl__sampler__max_staleness_versions": 2}
    place = World(sim_config(grpo__max_steps=6, async_rl__sampler__name=sampler, **keys))
    hit: list[int] = []

    def arrange(life: Incarnation) -> None:
        def strike() -> None:
            state = life.state
            assert state is not None
            assert life.plane is not None
            if not state.committed or state.trainer_version < 1 or state.open_step >= 0:
                later(life, 0.05, strike)
                return
            hit.extend(state.committed)
            _spoil_payloads(place, state, hit[-1])
            life.plane.lose()
            assert life.controller is not None
            noticed = asyncio.ensure_future(life.controller.data_plane.inventory())
            noticed.add_done_callback(lambda task: task.result())

        later(life, 0.3, strike)

    ended(place.live(arrange=arrange, limit_s=600))
    lost = {e.group for e in of(place, ev.AttemptAbandoned) if e.reason == ev.ABANDON_PAYLOAD_LOST}
    assert lost & set(hit)


def _spoil_payloads(place: World, state: State, group: int) -> None:
    """All that the payload journal of that group's first sibling holds is zeros."""
    receipt = state.groups[group].siblings[0].receipt
    assert receipt is not None
    folder = f"{PAYLOADS}/{receipt.journal}"
    for name in (n for n in place.storage.list_names(folder) if n.endswith(".zst")):
        size = len(place.storage.content(f"{folder}/{name}"))
        place.storage.put(f"{folder}/{name}", bytes(size))


@pytest.mark.parametrize("streaming", [None, 1])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_claim_whose_rows_and_payloads_are_lost_is_let_go(sampler: str, streaming: int | None) -> None:
    """Data plane and payload journals at once, with a checkpoint under way, when a step is about to be trained.

    Its groups go back to the buffer, what is lost is generated again, and the same run trains every step once.
    """
    lost_of: list[int] = []

    class Strikes(Hooks):
        def plane(self, life: Incarnation, clock: RunClock) -> SimDataPlane:
            return SimDataPlane(clock, storage=life.world.storage, save_seconds=0.3)

        def trainer(self, life: Incarnation, clock: RunClock, plane: SimDataPlane) -> SimTrainer:
            trainer = SimTrainer(clock, plane, storage=life.world.storage, save_seconds=1.0)
            train = trainer.train

            async def watched(step: int, keys: Any) -> Any:
                state = life.state
                assert state is not None
                if step == 2 and not lost_of:
                    assert state.started
                    lost_of.extend(state.open_groups)
                    for group in lost_of:
                        _spoil_payloads(life.world, state, group)
                    plane.lose()
                return await train(step, keys)

            trainer.train = watched  # type: ignore[method-assign]
            return trainer

    place = World(
        sim_config(
            grpo__max_steps=5,
            async_rl__sampler__name=sampler,
            async_rl__sampler__max_lookahead_versions=2,
            async_rl__sampler__max_staleness_versions=2,
            async_rl__min_groups_for_streaming_train=streaming,
            checkpointing__save_period=2,
        ),
        hooks=Strikes(),
    )
    ended(place.live(limit_s=600))
    (released,) = of(place, ev.TrainerRolledBack)
    assert (released.from_version, released.to_version, set(released.groups)) == (2, 2, set(lost_of))
    again = {e.group for e in of(place, ev.AttemptAbandoned) if e.reason == ev.ABANDON_PAYLOAD_LOST}
    assert again & set(lost_of)
    assert [e.step for e in of(place, ev.StepApplied)] == [0, 1, 2, 3, 4]
    assert len(of(place, ev.CheckpointCommitted)) >= 2


@pytest.mark.parametrize("moment", [0.3, 1.2, 2.1, 3.4, 4.7, 5.5])
def test_without_payloads_a_lost_data_plane_costs_no_prompt(moment: float) -> None:
    """``payloads: none``: rows that can't be stored are not the prompts' fault, and none is given up for it."""
    keys: dict[str, Any] = {"data_plane__payloads": "none", "async_rl__prefix": "regenerate"}
    place = World(sim_config(grpo__max_steps=4, rollout_failure__max_infra_attempts_per_prompt=1, **keys))

    def lose(life: Incarnation) -> None:
        later(life, moment, lambda: life.plane.lose() if life.plane is not None else None)

    assert "a storage unit is gone" in ended(place.live(arrange=lose, limit_s=600), 1)
    ended(place.live(limit_s=600))
    assert not of(place, ev.AttemptFailed)
    assert not of(place, ev.GroupDiscarded)


def test_without_payloads_a_lost_data_plane_ends_the_run_with_that_cause() -> None:
    """``payloads: none``, lost while a snapshot is written: it is not started anew, empty, under a run that goes on."""
    place = World(sim_config(grpo__max_steps=4, data_plane__payloads="none", async_rl__prefix="regenerate"))

    def arrange(life: Incarnation) -> None:
        def strike() -> None:
            assert life.plane is not None
            assert life.state is not None
            if life.plane._quiet.is_set() or life.state.trainer_version < 4:  # nothing else touches it in the last save
                later(life, 0.02, strike)
            else:
                life.plane.lose()

        later(life, 0.3, strike)

    life = place.live(arrange=arrange, limit_s=600)
    assert "save: a storage unit is gone" in ended(life, 1)
    assert not of(place, ev.DataPlaneRestarted)
    ended(place.live(limit_s=600))


# --- filters and late rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_after_s", [0.0, 0.03, 0.06])
def test_a_restore_does_not_let_a_group_past_the_filter(kill_after_s: float) -> None:
    """All its siblings sealed and no verdict yet when the run died: the filter decides afterwards, as it would have."""
    flat = {3, 4, 7}

    class SlowPuts(Hooks):
        def plane(self, life: Incarnation, clock: RunClock) -> SimDataPlane:
            return SimDataPlane(clock, storage=life.world.storage, put_seconds=0.1)

        def writer(self, life: Incarnation, writer: Any) -> Any:
            def watched(event: Any) -> Any:
                offset = writer.append(event)
                assert life.state is not None
                first = life.world.incarnations == 1 and isinstance(event, ev.AttemptSealed)
                if first and event.group == 3 and life.state.groups[3].sealed == 1:
                    later(life, 0.021 + kill_after_s, life.die)
                return offset

            return Wrapped(writer, append=watched)

    keys = {"async_rl__sampler__name": "ready_first", "async_rl__group_filter": "zero_variance"}
    place = World(
        sim_config(grpo__max_steps=4, **keys),
        reward=lambda prompt, ids: 1.0 if prompt.ref.index in flat else sim_reward(prompt, ids),
        hooks=SlowPuts(),
    )
    assert place.live(limit_s=600).killed
    assert place.fold().groups[3].sealed == 2
    ended(place.live(limit_s=600))
    assert not flat & {e.group for e in of(place, ev.GroupCommitted)}
    assert flat <= {e.group for e in of(place, ev.GroupDiscarded) if e.reason == ev.DISCARD_FILTERED}


def test_a_late_row_goes_after_its_groups_end_is_durable() -> None:
    """A group is discarded, and its row arrives, while the clear before is being made durable: it waits its turn."""
    cleared: list[tuple[set[str], int]] = []

    class Arranged(Hooks):
        group = -1
        ended_at = -1
        row = ""

        def plane(self, life: Incarnation, clock: RunClock) -> SimDataPlane:
            plane = SimDataPlane(clock, storage=life.world.storage)
            clear = plane.clear

            async def watched(keys: Any) -> None:
                assert life.writer is not None
                cleared.append((set(keys), life.writer.durable_upto))
                await clear(keys)

            plane.clear = watched  # type: ignore[method-assign]
            return plane

        def writer(self, life: Incarnation, writer: Any) -> Any:
            def watched() -> None:
                writer.sync_watermark()
                state, controller = life.state, life.controller
                assert state is not None
                assert controller is not None
                rollout = controller._rollout
                sealed = [g for g in state.unfinished if state.groups[g].sealed > 0]
                if self.group < 0 and rollout is not None and sealed and state.uncleared == {}:
                    self.group = sealed[0]
                    row = state.groups[self.group].sealed_row_keys()[0]
                    rollout.discard([self.group], ev.DISCARD_STALE_IN_FLIGHT)
                    self.ended_at, self.row = state.offset - 1, row
                    rollout.late_rows.append(row)

            return Wrapped(writer, sync_watermark=watched)

    hooks = Arranged()
    place = World(sim_config(grpo__max_steps=4, async_rl__sampler__name="windowed"), hooks=hooks)
    ended(place.live(limit_s=600))
    assert hooks.group >= 0
    durable = [upto for keys, upto in cleared if hooks.row in keys]
    assert durable
    assert min(durable) > hooks.ended_at


# --- rows that are gone for good ------------------------------------------------------------------------------------


class RowsGone(Hooks):
    """The trainer does not find the rows of step 1, and no payload brings them back."""

    def trainer(self, life: Incarnation, clock: RunClock, plane: SimDataPlane) -> Any:
        trainer = super().trainer(life, clock, plane)
        train = trainer.train

        async def without_rows(step: int, keys: Any) -> Any:
            if step == 1 and life.world.incarnations == 1:
                raise KeyError(f"rows not in the data plane: {keys[0][0]}")
            return await train(step, keys)

        trainer.train = without_rows  # type: ignore[method-assign]
        return trainer


def test_rows_that_nothing_brings_back_end_the_run_with_what_to_do() -> None:
    """A trainer that can't see rows that are there: not a bare KeyError; and the same command again finishes."""
    place = World(sim_config(grpo__max_steps=4), hooks=RowsGone())
    detail = ended(place.live(), 1)
    assert "step 1: rows not in the data plane: i1.g" in detail
    assert "though they are there. The same command again starts both anew" in detail
    ended(place.live())


# --- back-pressure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [1, 300])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_the_backlog_held_back_starts_once_it_is_short_again(sampler: str, high: int) -> None:
    """The last event for a while goes into a backlog above its high mark: nothing else would wake who waits for it."""
    keys = {"async_rl__max_inflight_prompts": 2, "journal__flush_interval_ms": 100.0}
    place = World(sim_config(async_rl__sampler__name=sampler, journal__backlog_high_bytes=high, **keys))
    assert place.live(kill_at_s=2.5, limit_s=600).killed
    ended(place.live(limit_s=600))


# --- a small backlog ------------------------------------------------------------------------------------------------


def test_a_restore_waits_for_the_storage_as_dispatches_do() -> None:
    """It ends 48 attempts, more than the backlog may hold at once: else no start would ever get through."""
    keys = {
        "grpo__num_prompts_per_step": 6,
        "grpo__num_generations_per_prompt": 4,
        "async_rl__max_inflight_prompts": 12,
        "async_rl__max_buffered_rollouts": 24,
    }
    place = World(sim_config(**keys), seed=5)
    place.live(kill_at_s=0.3)
    place.config = sim_config(**keys, journal__backlog_high_bytes=1, journal__backlog_max_bytes=3000)
    place.live(kill_at_s=2.5)
    (started,) = [offset for offset, e in place.events() if isinstance(e, ev.RestoreStarted)]
    (completed,) = [offset for offset, e in place.events() if isinstance(e, ev.RestoreCompleted)]
    assert completed - started > 48
    place.config = sim_config(**keys)
    ended(place.live())
