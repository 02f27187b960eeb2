"""SQL over runs told by hand: every number here was computed on paper."""

import pytest

from unlost.replay.database import open_database
from unlost.replay.export import trace_of
from unlost.replay.queries import QUERIES, named

from . import postmortem_stories as stories
from .postmortem_stories import TRACE_FILE, write


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """The same examples as journals, as a foreign trace, and as traces exported from the journals."""
    root = tmp_path_factory.mktemp("told")
    paths = []
    for name in ("trace_example", "counters_example", "everything"):
        run = write(root / name, getattr(stories, name)())
        trace = root / f"{name}_trace.jsonl"
        trace.write_bytes(b"".join(trace_of(run)))
        paths += [run, trace]
    foreign = root / "foreign.jsonl"
    foreign.write_text(TRACE_FILE)
    with open_database([*paths, foreign]) as opened:
        yield opened


def ask(database, name, run):
    return database.query(f"SELECT * FROM ({named(name).sql}) WHERE run = ?", [run]).dicts()


def losses(database, run):
    rows = database.query("SELECT * FROM losses WHERE run = ? ORDER BY class, event_offset", [run]).dicts()
    return {row["class"]: row for row in rows}


@pytest.mark.parametrize("run", ["trace_example", "trace_example_trace", "foreign"])
def test_thrown_away_of_a_stop_is_28_and_12_seconds(database, run):
    """From dispatch (12) to the cut (40), and on to the death (52; at most 60), from journal and traces alike."""
    row = losses(database, run)["in_flight"]

    assert (row["seconds_before_cut"], row["seconds_after_cut"]) == (28, 12)
    assert (row["seconds"], row["seconds_max"]) == (40, 48)


@pytest.mark.parametrize("run", ["trace_example", "trace_example_trace", "foreign"])
def test_an_attempt_abandoned_before_the_stop_counts_once(database, run):
    """Sibling 1 ran from 14 to 30 and ended then; the restart's second telling (in the foreign trace) adds nothing."""
    found = database.query(
        "SELECT class, count(*), sum(seconds) FROM losses WHERE run = ? AND resource = 'generation' "
        "GROUP BY ALL ORDER BY ALL",
        [run],
    ).rows

    assert found == [("in_flight", 1, 40.0), ("weight_sync", 1, 16.0)]


def test_a_trace_says_what_it_could_not_use(database):
    """The abandonment that was told twice is in the notes; the unknown event stays queryable."""
    assert any("foreign.jsonl: 1 line(s) end an attempt that had ended before" in note for note in database.notes)
    assert database.query(
        "SELECT event, fields->>'$.anything.goes[1]' FROM trace_lines WHERE run = 'foreign' AND NOT understood"
    ).rows == [("something_new", "2")]


@pytest.mark.parametrize("run", ["counters_example", "counters_example_trace"])
def test_restore_counters_are_7_8_14_and_18(database, run):
    """Counted from the events, not copied from the restore; and the two agree."""
    (row,) = ask(database, "reuse", run)

    assert row["groups_complete_restored"] == 7
    assert row["groups_unfinished_found"] == 8
    assert (row["siblings_reused"], row["siblings_rerun"]) == (14, 18)
    assert row["siblings_reused"] + row["siblings_rerun"] == 8 * 4
    told = {r["what"]: r for r in ask(database, "reconcile", run)}["restore counters"]
    assert (told["ok"], told["expected"], told["found"]) == (True, 7 + 8 + 14 + 18, 7 + 8 + 14 + 18)


@pytest.mark.parametrize("run", ["everything", "everything_trace"])
def test_attempts_of_the_whole_story(database, run):
    """Outcome, seconds and tokens of each of the eight attempts."""
    rows = database.query(
        "SELECT group_id, sibling, attempt, outcome, fate, seconds, tokens, new_tokens, thrown_tokens, killed "
        "FROM attempts WHERE run = ? ORDER BY ALL",
        [run],
    ).rows

    assert rows == [
        (0, 0, 0, "sealed", "trained", 2, 20, 20, 0, False),
        (0, 1, 0, "sealed", "trained", 4, 40, 40, 0, False),
        (1, 0, 0, "sealed", "evicted", 17, 90, 90, 0, True),  # adopted: it ran until the death at most known, 20
        (1, 1, 0, "abandoned", "continued", 17, 64, 64, 0, True),
        (1, 1, 1, "sealed", "evicted", 5, 100, 36, 0, False),
        (2, 0, 0, "failed", "continued", 2, 6, 6, 6, False),
        (2, 0, 1, "abandoned", "continued", 10, 0, 0, 0, True),
        (2, 0, 2, "failed", "discarded", 6, 5, 5, 5, False),
    ]


def test_thrown_away_by_cause(database):
    """Each class of the story, in seconds and tokens, with what the kill hid as a bound (chunks of 32: at most 64)."""
    rows = {row["class"]: row for row in ask(database, "thrown-away", "everything")}
    figures = {c: (r["resource"], r["losses"], r["seconds"], r["tokens"]) for c, r in rows.items()}

    assert figures == {
        # 1.1.0 was continued whole: nothing is lost for certain; 2.0.1 left nothing: its 10 s are
        "in_flight": ("generation", 2, 10, 0),
        "failed": ("generation", 2, 2 + 6, 6 + 5),
        # 1.0.0 (17 s) and 1.1.1 (5 s and the 17 s that it took over)
        "stale_evicted": ("generation", 2, 17 + 5 + 17, 90 + 100),
        "rolled_back_training": ("trainer", 1, 14, 0),
        "restart_idle": ("wall", 1, 35 - 30, 0),
        "weight_sync_pause": ("wall", 2, 0.75, 0),
    }
    # 2.0.1: 10 s more until 30; 1.1.0: the same, and the share of its last chunks, 17 s * 64 / (64 + 64)
    assert rows["in_flight"]["seconds_at_most"] == pytest.approx(10 + 10 + 10 + 17 * 64 / 128)
    assert rows["in_flight"]["tokens_at_most"] == 2 * 64
    assert rows["restart_idle"]["seconds_at_most"] == 35 - 20


def test_waste_beside_waste(database):
    """Crash, staleness, weight sync and failures of the same story."""
    rows = {(r["resource"], r["waste"]): (r["seconds"], r["tokens"]) for r in ask(database, "waste", "everything")}

    assert rows == {
        ("generation", "crash"): (10, 0),
        ("generation", "failures"): (8, 11),
        ("generation", "staleness"): (39, 190),
        ("trainer", "crash"): (14, 0),
        ("wall", "crash"): (5, 0),
        ("wall", "weight sync"): (0.75, 0),
    }


def test_everything_reconciles(database):
    """All sums come out; what workers counted and no event tells of is told as hidden by the kill."""
    rows = {row["what"]: row for row in ask(database, "reconcile", "everything")}

    assert all(row["ok"] for row in rows.values()), rows
    assert rows["attempts"]["expected"] == 8
    assert rows["token fates"]["expected"] == 20 + 40 + 90 + 64 + 36 + 6 + 0 + 5
    # worker 0 counted 130; events tell of 20 + 90 + 6: 14 hidden; worker 1 counted 100 of 40 + 64: nothing is
    hidden = rows["worker counts after a kill"]
    assert (hidden["unknown_min"], hidden["unknown_max"]) == (14, 2 * 64)
    assert rows["worker counts"]["residue"] == 0  # 36 + 5 = 41


def test_prompts_given_up_and_generated_again(database):
    """The evicted and the dropped one; the two siblings with more than one attempt."""
    skipped = ask(database, "prompts-skipped", "everything")
    assert [(r["sample_id"], r["status"], r["reason"]) for r in skipped] == [
        ("p2", "discarded", "dropped"),
        ("p1", "evicted", "stale"),
    ]
    again = ask(database, "prompts-regenerated", "everything")
    assert [
        (r["group_id"], r["sibling"], r["attempts"], r["ended_by"], r["tokens_reused"], r["tokens_thrown"])
        for r in again
    ] == [
        (2, 0, 3, ["infrastructure", "restart"], 0, 11),
        (1, 1, 2, ["restart"], 64, 0),
    ]


def test_steps_and_their_groups(database):
    """Step 0 was applied twice, on branches 0 and 1; only the second stands, and the prompt counts as trained once."""
    steps = database.query(
        "SELECT step, branch, rolled_back, claimed_s, applied_s FROM steps WHERE run = 'everything' ORDER BY applied_s"
    ).rows
    assert steps == [(0, 0, True, 6, 20), (0, 1, False, 43, 53)]
    group = database.query("FROM groups WHERE run = 'everything' AND group_id = 0").dicts()[0]
    assert (group["status"], group["times_applied"], group["times_trained"], group["applied_s"]) == (
        "trained",
        2,
        1,
        53,
    )
    assert ask(database, "prompts-trained-twice", "everything") == []


def test_weights_and_ages(database):
    """Group 0 saw one set of weights, age 0; the span of 1.1.1 is split where it was continued."""
    assert [(r["weights"], r["groups"]) for r in ask(database, "version-spans", "everything")] == [(1, 1)]
    assert [(r["age_of_oldest"], r["groups"], r["tokens"]) for r in ask(database, "staleness", "everything")] == [
        (0, 1, 60)
    ]
    ages = ask(database, "batch-age", "everything")
    assert [(r["step"], r["tokens"], r["age_mean"]) for r in ages] == [(0, 60, 0), (0, 60, 0)]
    spans = database.query(
        "SELECT span, first_token, tokens, branch FROM spans WHERE run = 'everything' AND attempt = 1 ORDER BY 1"
    ).rows
    assert spans == [(0, 0, 64, 0), (1, 64, 36, 1)]


def test_workers_and_tasks(database):
    """Tokens and busy seconds by worker; rewards and losses by task."""
    rows = {r["worker"]: r for r in ask(database, "worker-throughput", "everything")}
    assert {w: (r["attempts"], r["new_tokens"], r["busy_s"]) for w, r in rows.items()} == {
        0: (4, 20 + 90 + 6 + 0, 2 + 17 + 2 + 10),
        1: (2, 40 + 64, 4 + 17),
        2: (2, 36 + 5, 5 + 6),
    }
    tasks = {r["task"]: r for r in ask(database, "task-throughput", "everything")}
    assert (tasks["words"]["groups"], tasks["words"]["trained"], tasks["words"]["lost_tokens"]) == (2, 1, 6 + 5)
    assert (tasks["sums"]["groups"], tasks["sums"]["tokens"], tasks["sums"]["lost_tokens"]) == (1, 190, 190)


def test_other_snapshot_intervals(database):
    """Snapshots alone, at 10 s: the cut before the death at 20 is at 20, and what ran then is lost; at 30 s all is."""
    rows = {r["interval_s"]: r for r in ask(database, "snapshot-intervals", "everything")}
    # cut at 20 = death: nothing ended after it. (1.0.0, 1.1.0 and 2.0.1 end at 20, not after.)
    assert (rows[10]["attempts"], rows[10]["seconds_with_snapshots_alone"]) == (0, 0)
    # no cut yet: all five attempts of the first process that were sealed or killed
    assert (rows[30]["attempts"], rows[30]["seconds_with_snapshots_alone"]) == (5, 2 + 4 + 17 + 17 + 10)
    assert rows[30]["seconds_lost"] == 10


def test_loss_by_length(database):
    """Five siblings in five of ten buckets, by their longest attempt; which ones lost something."""
    rows = ask(database, "loss-by-length", "everything")
    assert [(r["longest"], r["siblings"], r["with_losses"], r["tokens"]) for r in rows] == [
        (6, 1, 1, 11),
        (20, 1, 0, 0),
        (40, 1, 0, 0),
        (90, 1, 1, 90),
        (100, 1, 1, 100),
    ]


def test_tenths_with_the_same_bounds_are_one(tmp_path):
    """Two short siblings, and eighteen that reached the limit of 64: two rows, not ten that mostly say 64 to 64."""
    told = [stories.started(0, 1), stories.reserved(1, 0, 0, 1, 20), stories.admitted(1, 0)]
    for sibling in range(20):
        told += [stories.dispatched(2, 0, sibling), stories.sealed(3, 0, sibling, tokens=64 if sibling > 1 else 5)]
    with open_database([write(tmp_path, told)]) as opened:
        rows = opened.query(named("loss-by-length").sql).dicts()

    assert [(r["decile"], r["shortest"], r["longest"], r["siblings"]) for r in rows] == [(1, 5, 5, 2), (10, 64, 64, 18)]


def test_checkpoints_and_stalls(database):
    """One committed (3 s) and one skipped; between its cut (40) and its end (43) nothing was sealed."""
    rows = ask(database, "checkpoints", "trace_example")
    assert [(r["outcome"], r["checkpoints"], r["seconds_mean"]) for r in rows] == [
        ("committed", 1, 3.0),
        ("skipped", 1, None),
    ]
    (stall,) = ask(database, "checkpoint-stalls", "trace_example")
    assert (stall["seconds"], stall["seals"], stall["gap_longest"]) == (3, 0, None)


def test_slow_and_stuck_groups(database):
    """The evicted group took 37 s; of the example with open groups the ones never dispatched wait since admission."""
    slow = ask(database, "slowest-groups", "everything")
    assert [(r["group_id"], r["seconds"]) for r in slow] == [(1, 37), (0, 4)]
    stuck = ask(database, "stuck-groups", "counters_example")
    assert [r["group_id"] for r in stuck][:3] == [12, 13, 14]
    assert stuck[0]["waiting_s"] == 62 - 3
    assert len(stuck) == 8


def test_restores_and_deaths(database):
    """Death lies between the last event and the next start; generation goes on at 35."""
    (row,) = ask(database, "restores", "everything")
    assert (row["died_min_s"], row["died_max_s"], row["first_dispatch_s"]) == (20, 30, 35)
    assert (row["from_version"], row["to_version"], row["before"]) == (1, 0, "killed")


class _Clock:
    """A wall clock that a test moves."""

    def __init__(self):
        self.wall_s = 1000.0

    def monotonic(self):
        return self.wall_s

    def wall_ns(self):
        return round(self.wall_s * 1e9)


def test_durable_lag_is_from_the_oldest_event_to_its_frame(tmp_path):
    """Events of second 1 and 3, written at wall second 1004 (run clock 4): the frame waited 3 s."""
    from unlost.journal import JournalWriter
    from unlost.replay import events as ev

    clock = _Clock()
    writer = JournalWriter.open(tmp_path / "events", ev.EVENT_TYPES, journal_id="told", clock=clock, threaded=False)
    writer.append(stories.started(0, 1))
    writer.pump()
    clock.wall_s = 1004.0
    writer.append(ev.WorkerStarted(stories.us(1), 0, "w"))
    writer.append(ev.WorkerStarted(stories.us(3), 1, "w"))
    writer.pump()
    writer.close()
    with open_database([tmp_path]) as opened:
        (row,) = opened.query(named("durable-lag").sql).dicts()

    assert row["events"] == 3
    assert row["ms_max"] == pytest.approx(3000, abs=1)


def test_a_prompt_trained_twice_is_found(tmp_path):
    """A loader that serves a prompt twice in an epoch: the one question whose answer must be empty is not."""
    told = [stories.started(0, 1), stories.reserved(1, 0, 0, 1, 1, index=5), stories.admitted(1, 0)]
    told += [stories.reserved(2, 1, 1, 1, 1, index=5), stories.admitted(2, 1)]
    for group in (0, 1):
        told += [stories.dispatched(3 + group, group, 0), stories.sealed(5 + group, group, 0)]
    told += [stories.committed(7, group, 1, 10) for group in (0, 1)]
    told += [stories.ev.StepClaimed(stories.us(8), 0, (0, 1)), stories.ev.StepApplied(stories.us(9), 0, 1)]
    with open_database([write(tmp_path, told)]) as opened:
        rows = opened.query(named("prompts-trained-twice").sql).dicts()

    assert [(r["sample_id"], r["times_trained"], r["groups"]) for r in rows] == [("p5", 2, [0, 1])]


def test_every_question_begins_with_the_run(database):
    """So that several runs can be compared in one call."""
    for query in QUERIES:
        assert database.query(query.sql).columns[0] == "run", query.name


def test_age_of_weights_that_two_rollbacks_went_below(tmp_path):
    """Made by version 5, then the trainer went back to 3 and to 2: on step 2 it counts as version 2, age 0."""
    ev = stories.ev
    told = [stories.started(0, 1), stories.reserved(1, 0, 0, 1, 1), stories.admitted(1, 0), stories.dispatched(2, 0, 0)]
    told += [stories.sealed(3, 0, 0, tokens=10, spans=((0, 0, 1), (4, 0, 5))), stories.committed(3, 0, 1, 10)]
    told += [ev.TrainerRolledBack(stories.us(4), 5, 3, 1, ()), ev.TrainerRolledBack(stories.us(5), 3, 2, 2, ())]
    told += [ev.StepClaimed(stories.us(6), 2, (0,)), ev.StepApplied(stories.us(7), 2, 3)]
    with open_database([write(tmp_path, told, legal=False)]) as opened:
        (row,) = opened.query("SELECT step, branch, age_mean, age_min, age_max, weights FROM batch_age").dicts()

    # four tokens of version 1, six of version 5, which counts as 2
    assert row == {"step": 2, "branch": 2, "age_mean": 0.4, "age_min": 0, "age_max": 1, "weights": 2}


def test_a_prefix_may_come_from_an_attempt_before_the_last(tmp_path):
    """Attempt 0 left 640 tokens; 1 began anew, made 100 and was lost; 2 goes on from 0's 640: only the 100 are lost."""
    ev = stories.ev
    told = [stories.started(0, 1), stories.reserved(1, 0, 0, 1, 1), stories.admitted(1, 0)]
    told += [stories.dispatched(2, 0, 0), stories.abandoned(4, 0, 0, ev.ABANDON_WORKER_LOST, 0, 640, 640)]
    told += [stories.dispatched(5, 0, 0, 1), stories.abandoned(6, 0, 0, ev.ABANDON_WORKER_LOST, 1, 100, 64)]
    told += [ev.AttemptDispatched(stories.us(7), 0, 0, 2, 0, 0, 0, 640, 0), stories.sealed(9, 0, 0, 2, tokens=700)]
    with open_database([write(tmp_path, told, legal=False)]) as opened:
        rows = opened.query("SELECT new_tokens, kept_tokens, thrown_tokens FROM attempts ORDER BY attempt").rows
        sums = {row["what"]: row["ok"] for row in opened.query("FROM reconcile").dicts()}

    assert rows == [(640, 640, 0), (100, 0, 100), (60, 700, 0)]
    assert sums["token fates"]
    assert sums["token losses"]


def test_a_seal_whose_payload_is_lost(tmp_path):
    """Sealed at 5, given up at 8, generated again: one seal of the two stands, its 3 s and 30 tokens are lost."""
    ev = stories.ev
    told = [stories.started(0, 1), stories.reserved(1, 0, 0, 1, 1), stories.admitted(1, 0)]
    told += [stories.dispatched(2, 0, 0), stories.sealed(5, 0, 0, tokens=30), stories.committed(5, 0, 1, 30)]
    told += [stories.abandoned(8, 0, 0, ev.ABANDON_PAYLOAD_LOST, 0, 30)]
    with open_database([write(tmp_path / "lost", told)]) as opened:
        assert opened.value("SELECT status FROM groups") == "unfinished"
    told += [stories.dispatched(9, 0, 0, 1), stories.sealed(11, 0, 0, 1, tokens=40), stories.committed(11, 0, 1, 40)]
    with open_database([write(tmp_path / "again", told)]) as opened:
        assert opened.query("SELECT status, sealed, tokens FROM groups").rows == [("committed", 1, 40)]
        assert opened.query(
            "SELECT outcome, lost_reason, kept_tokens, thrown_tokens FROM attempts ORDER BY attempt"
        ).rows == [
            ("sealed", "payload_lost", 0, 30),
            ("sealed", None, 40, 0),
        ]
        assert opened.query("SELECT class, seconds, tokens FROM losses").rows == [("sealed_not_durable", 3, 30)]
        assert all(row["ok"] for row in opened.query("FROM reconcile").dicts())


@pytest.mark.parametrize(
    ("interval", "longest", "most"),
    [(64, 16, 8), (4, 16, 8), (2, 16, 4), (64, None, 128), (None, 16, 8), (None, None, None)],
    ids=["limit", "both", "chunks", "no_limit", "no_interval", "neither"],
)
def test_what_a_kill_hid_fits_into_the_response(tmp_path, interval, longest, most):
    """8 tokens were known: two chunks more at most, and no more than the response's limit leaves room for."""
    ev = stories.ev
    settings = {"journal.progress_interval_tokens": interval, "generation.max_new_tokens": longest}
    settings = {key: value for key, value in settings.items() if value is not None}
    told = [stories.started(0, 1, **settings), stories.reserved(1, 0, 0, 1, 2), stories.admitted(1, 0)]
    told += [stories.dispatched(2, 0, 0), stories.dispatched(2, 0, 1), stories.started(8, 2, **settings)]
    told += [ev.RestoreStarted(stories.us(8), -1, 0, 0, "", stories.us(2))]
    told += [stories.abandoned(9, 0, 0, ev.ABANDON_RESTART, 0, 8, 8), stories.sealed(9, 0, 1, tokens=16, adopted=True)]
    with open_database([write(tmp_path, told)]) as opened:
        hidden = opened.query("SELECT hidden_max FROM attempts ORDER BY sibling").rows
        (loss,) = opened.query("SELECT tokens, tokens_max FROM losses WHERE class = 'in_flight'").rows

    assert hidden == [(most,), (0,)]
    assert loss == (0, most)


def test_a_whole_response_hides_nothing(tmp_path):
    """All 16 of 16 tokens are in the journal: nothing more can be lost but the time until the death."""
    ev = stories.ev
    settings = {"journal.progress_interval_tokens": 4, "generation.max_new_tokens": 16}
    told = [stories.started(0, 1, **settings), stories.reserved(1, 0, 0, 1, 1), stories.admitted(1, 0)]
    told += [stories.dispatched(2, 0, 0), ev.CheckpointSkipped(stories.us(5), ev.CHECKPOINT_ROLLOUT, "no change")]
    told += [stories.started(8, 2, **settings), ev.RestoreStarted(stories.us(8), -1, 0, 0, "", stories.us(5))]
    told += [stories.abandoned(9, 0, 0, ev.ABANDON_RESTART, 0, 16, 16)]
    with open_database([write(tmp_path, told)]) as opened:
        (loss,) = opened.query("SELECT tokens, tokens_max, seconds, seconds_max FROM losses").dicts()[:1]

    assert loss == {"tokens": 0, "tokens_max": 0, "seconds": 0, "seconds_max": 3}
