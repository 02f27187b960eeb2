"""Time travel, differences, and what a run waits for."""

import shutil

import pytest

from unlost.journal import JournalWriter
from unlost.replay import events as ev
from unlost.replay.fold import fold_run, open_events
from unlost.replay.travel import NoSuchMoment, difference, offset_at_time, offset_before_incarnation
from unlost.replay.why import why

from .postmortem_stories import counters_example, everything, started, us, write


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write(tmp_path_factory.mktemp("run") / "told", everything())


def test_a_moment_is_the_last_event_at_or_before_it(run):
    """Between, on and after events; before the first one there is nothing."""
    told = everything()
    reader = open_events(run)
    for moment in (0, 2, 2.5, 19.99, 20, 29, 30, 56, 1e6):
        expected = max(i for i, e in enumerate(told) if e.t <= us(moment))
        assert offset_at_time(reader, str(moment)) == expected
    with pytest.raises(NoSuchMoment, match="first event is at"):
        offset_at_time(reader, "-1")
    with pytest.raises(NoSuchMoment, match="neither seconds"):
        offset_at_time(reader, "yesterday")


def test_a_date_and_time_counts_from_the_incarnations_anchor(run):
    """Run clock 20 was Unix time 1020; a zone may be given."""
    reader = open_events(run)
    assert offset_at_time(reader, "1970-01-01T00:17:00+00:00") == offset_at_time(reader, "20")
    assert offset_at_time(reader, "1970-01-01T02:17:35+02:00") == offset_at_time(reader, "55")


def test_before_an_incarnation_is_what_its_restore_found(run):
    """The last event of the one before; the first has none before it; others don't exist."""
    reader = open_events(run)
    offset = offset_before_incarnation(reader, 2)
    assert reader.get(offset + 1).incarnation == 2
    with pytest.raises(NoSuchMoment, match="from before incarnation 1"):
        offset_before_incarnation(reader, 1)
    with pytest.raises(NoSuchMoment, match="there are: 1, 2"):
        offset_before_incarnation(reader, 3)


def test_incarnations_of_their_own_segments(tmp_path):
    """One writer per incarnation, as in a real run: found from the segments."""
    for number in (1, 2, 3):
        with JournalWriter.open(tmp_path / "events", ev.EVENT_TYPES, journal_id="told", incarnation=number) as writer:
            writer.append(started(10 * number, number))
            writer.append(ev.CheckpointSkipped(us(10 * number + 1), "rollout", "why not"))
    reader = open_events(tmp_path)
    assert [offset_before_incarnation(reader, n) for n in (2, 3)] == [1, 3]


def test_difference_of_two_offsets(run):
    """From the kill to after the restore: rolled back, groups returned, attempts over."""
    told = everything()
    before = next(i for i, e in enumerate(told) if isinstance(e, ev.StepApplied))
    after = next(i for i, e in enumerate(told) if isinstance(e, ev.RestoreCompleted))
    found = difference(fold_run(run, before), fold_run(run, after))

    assert found["changed"]["trainer_version"] == {"from": 1, "to": 0}
    assert found["changed"]["branch"] == {"from": 0, "to": 1}
    assert found["changed"]["open_attempts"] == {"from": 3, "to": 0}
    assert found["groups"]["moved"] == [{"group": 0, "from": "trained", "to": "committed"}]
    assert [(s["group"], s["sibling"], s["from"], s["to"]) for s in found["groups"]["siblings"]] == [
        (1, 0, "dispatched", "sealed"),
        (1, 1, "dispatched", "idle"),
        (2, 0, "dispatched", "idle"),
    ]
    assert found["counters"] == {"abandoned_restart": 2}
    assert found["workers"]["died"] == [0, 1]
    assert difference(fold_run(run, after), fold_run(run, after))["changed"] == {}


def test_new_and_gone_groups(run):
    """A reservation shows new groups, an eviction a gone one."""
    told = everything()
    reserved = next(i for i, e in enumerate(told) if isinstance(e, ev.BatchReserved))
    found = difference(fold_run(run, reserved - 1), fold_run(run, reserved))["groups"]
    assert [g["group"] for g in found["new"]] == [0, 1, 2]
    evicted = next(i for i, e in enumerate(told) if isinstance(e, ev.GroupEvicted))
    assert difference(fold_run(run, evicted - 1), fold_run(run, evicted))["groups"]["gone"] == [
        {"group": 1, "was": "committed"}
    ]


def test_why_of_a_dead_run(tmp_path):
    """No one runs it, eight groups are unfinished; the missing siblings are listed, longest first."""
    told = counters_example()
    kill = next(i for i, e in enumerate(told) if isinstance(e, ev.RunStarted) and e.incarnation == 2)
    found = why(write(tmp_path / "dead", told[:kill]))

    assert found.alive is False
    whats = [f.what for f in found.findings]
    assert whats[0] == "no one runs it"
    assert found.findings[0].since_s > 3600  # it died in 1970
    assert "step 0 waits for groups" in whats
    assert "admitted groups have no slot yet" in whats
    step = next(f for f in found.findings if f.what == "step 0 waits for groups")
    assert "7 committed" in step.detail
    assert "8 unfinished" in step.detail
    assert len(found.missing) == 18
    assert [m["state"] for m in found.missing].count("running") == 6
    assert found.missing == sorted(found.missing, key=lambda m: -m["since_s"])
    assert set(found.components) == {"workers", "loader", "sampler", "dispatch", "generation", "data plane"}


def test_why_of_a_running_run_counts_up_to_now(tmp_path):
    """While its writer is alive, ages grow with the wall clock; a full buffer and a closed gate are named."""
    import time

    told = counters_example()[:3]  # reserved, not admitted
    anchor = time.time_ns() // 1000 - us(100)
    told[0] = ev.RunStarted(0, "told", 1, anchor, "h", 1, {}, {"grpo.num_prompts_per_step": 4}, {})
    with JournalWriter.open(tmp_path / "events", ev.EVENT_TYPES, journal_id="told") as writer:
        for event in told:
            writer.append(event)
        writer.sync()
        (tmp_path / "config.yaml").write_text("async_rl:\n  max_buffered_rollouts: 0\n")
        found = why(tmp_path)
    assert found.alive is True
    details = {f.what: f for f in found.findings}
    gate = details["the sampler's gate is closed, or the run stopped at it"]
    assert gate.since_s == pytest.approx(98, abs=2)
    assert "the buffer is full" in details
    assert "0 of 4 claimed" in details["step 0 waits for groups"].detail


def test_why_of_an_ended_run_and_of_a_checkpoint_in_progress(run, tmp_path):
    """The end is told first, and alone if it was the last step; a checkpoint that was begun is named with its age."""
    assert why(run).findings[0].what == "the run has ended"
    for reason, waiting in (("finished", False), ("signal", True)):
        told = [*counters_example()[:30], ev.RunEnded(us(60), reason)]
        found = why(write(tmp_path / reason, told))
        assert found.findings[0].detail == f"reason: {reason}"
        assert (len(found.findings) > 1, found.missing != []) == (waiting, waiting)
    told = [*counters_example()[:4], ev.CheckpointStarted(us(50), 0, ev.CHECKPOINT_ROLLOUT, 0)]
    told.append(ev.CheckpointSkipped(us(53), ev.CHECKPOINT_ROLLOUT, "busy"))
    found = {f.what: f for f in why(write(tmp_path / "saving", told)).findings}
    assert found["a checkpoint is being written"].since_s == 3
    shutil.rmtree(tmp_path / "saving")
