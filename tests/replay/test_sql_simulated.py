"""Canned questions on simulated runs, against plain Python over the same events and the simulator's own truth."""

from collections import Counter, defaultdict
from itertools import pairwise
from statistics import mean, quantiles

import pytest

from tests.fakes import SimPlan
from tests.simulation.on_disk import to_disk
from tests.simulation.world import World, sim_config
from tests.synthetic_run import CHUNK, Shape, SyntheticRun, write_journal
from unlost.replay import events as ev
from unlost.replay.database import open_database
from unlost.replay.fold import open_events
from unlost.replay.queries import named
from unlost.replay.summary import prompt_sets

from .naive import Naive

SHAPES = {
    "usual": Shape(seed=3, events=6_000, crashes=3, worker_loss_every=1_500),
    "aborting": Shape(seed=4, events=4_000, crashes=2, ends=False, weight_sync_abort=True, lag=3),
    "regenerating": Shape(seed=5, events=3_000, crashes=2, resume_prefixes=False, lag=0, data_fail_share=0.05),
}


@pytest.fixture(scope="module", params=SHAPES)
def told(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    run = SyntheticRun(SHAPES[request.param])
    write_journal(run, folder)
    events = [event for _, event in open_events(folder).events()]
    with open_database([folder]) as database:
        yield database, Naive(events), run


def ask(database, name):
    return database.query(named(name).sql).dicts()


def test_losses_by_class(told):
    """How many, how many seconds, how many tokens, for every class that occurs."""
    database, naive, _ = told
    rows = {r["class"]: r for r in ask(database, "thrown-away") if r["resource"] != "wall"}
    count, seconds, tokens = naive.losses()

    assert {c: r["losses"] for c, r in rows.items()} == dict(count)
    assert {c: r["tokens"] for c, r in rows.items()} == {c: tokens[c] for c in count}
    assert {c: r["seconds"] for c, r in rows.items()} == pytest.approx({c: seconds[c] for c in count}, abs=1e-6)
    assert len(count) >= 6


def test_bounds_hold_what_really_happened(told):
    """The simulator knows when it died and how many tokens were lost with it; both lie within what SQL says."""
    database, _, run = told
    for row, death in zip(
        database.query("SELECT died_min_s, died_max_s FROM deaths ORDER BY incarnation").rows,
        run.truth.deaths,
        strict=True,
    ):
        assert row[0] <= death <= row[1]
    rows = database.query(
        "SELECT group_id, sibling, attempt, new_tokens, prefix, seconds, ended_max_s - dispatched_s FROM attempts "
        "WHERE killed AND outcome = 'abandoned'"
    ).rows
    assert len(rows) > 20
    hidden = 0
    for group, sibling, attempt, new, _, least, most in rows:
        made, lived = run.truth.tries[group, sibling, attempt]
        assert new <= made < new + CHUNK
        assert least <= lived + 1e-6
        assert lived <= most
        hidden += made - new
    (loss,) = [r for r in ask(database, "thrown-away") if r["class"] == "in_flight"]
    certain = loss["tokens"]
    assert certain + hidden <= loss["tokens_at_most"]


def test_everything_reconciles_with_the_workers(told):
    """No residue; and what the simulator generated in all is what events tell of plus what kills hid."""
    database, naive, run = told
    rows = {r["what"]: r for r in ask(database, "reconcile")}

    assert all(r["ok"] for r in rows.values()), rows
    assert len(rows) == 7
    told_of = sum(max(naive.held(t) - t.prefix, 0) for t in naive.tries.values())
    assert rows["token fates"]["expected"] == told_of
    running = sum(made for key, (made, _) in run.truth.tries.items() if naive.tries[key].how == "open")
    ended = database.value("SELECT sum(hidden_max) FROM attempts WHERE outcome <> 'open'")
    assert 0 <= run.truth.generated - running - told_of <= ended
    unknown = rows["worker counts after a kill"]["unknown_max"]
    some_open = any(t.how == "open" for t in naive.tries.values())
    assert unknown == (None if some_open else ended)  # these runs record no limit of a response


def test_groups_end_as_the_fold_says(told):
    """Status of every group against the state that the journal folds to, which SQL never looks at."""
    database, _, run = told
    sets = prompt_sets(run.state)
    by = defaultdict(set)
    for group, status in database.query("SELECT group_id, status FROM groups").rows:
        by[status].add(group)

    assert by["claimed"] == set(sets["claimed"])
    assert by["complete"] | by["committed"] == set(sets["complete"])
    assert by["unfinished"] | by["reserved"] == set(sets["unfinished"])
    assert by["trained"] >= set(sets["trained"])
    assert len(by["trained"]) == sets["trained_retired"] + len(sets["trained"])
    assert (len(by["discarded"]), len(by["evicted"])) == (sets["discarded"], sets["evicted"])


def test_restores_found_what_they_told(told):
    """The four counters, counted from the events."""
    database, naive, _ = told
    rows = ask(database, "reuse")
    assert len(rows) == len(naive.restores) >= 2
    for row, restore in zip(rows, naive.restores, strict=True):
        for name in ("groups_complete_restored", "groups_unfinished_found", "siblings_reused", "siblings_rerun"):
            assert row[name] == restore["counters"][name], name
        killed = [t for t in naive.tries.values() if t.killed and t.life == restore["life"] - 1]
        assert row["running_at_death"] == len(killed)
        assert row["adopted"] == sum(t.how == "sealed" for t in killed)
        assert row["prefix_tokens_reused"] == sum(t.next.prefix for t in killed if t.next)


def test_batch_age(told):
    """Weighted by tokens, over branches and rollbacks."""
    database, naive, _ = told
    rows = ask(database, "batch-age")
    assert len(rows) == len(naive.steps)
    for row, step in zip(rows, naive.steps, strict=True):
        tokens = sum(n for n, _ in step["ages"])
        assert (row["tokens"], row["branch"], row["rolled_back"]) == (tokens, step["branch"], step["undone"])
        assert row["age_mean"] == pytest.approx(sum(n * age for n, age in step["ages"]) / tokens)
        assert (row["age_min"], row["age_max"]) == (min(a for _, a in step["ages"]), max(a for _, a in step["ages"]))


@pytest.mark.slow
def test_tokens_older_than_the_lookahead_were_made_before_the_weights_came(tmp_path):
    """in_order, one version ahead, nothing killed: age 2 only if dispatched while weights were on their way."""
    for name, seconds_per_token in (("slow", 0.02), ("quick", 0.002)):
        world = World(sim_config(), script=lambda key, seed, s=seconds_per_token: SimPlan(40, s, tokens_per_delta=1))
        world.live()
        events = [event for _, event in world.events()]
        synced = {e.version: e.t for e in events if isinstance(e, ev.WeightsSynced)}
        sent = {(e.group, e.sibling): e.t for e in events if isinstance(e, ev.AttemptDispatched)}
        step_of = {g: e.step for e in events if isinstance(e, ev.StepClaimed) for g in e.groups}
        old = [
            sent[e.group, e.sibling] < synced[version + 1]
            for e in events
            if isinstance(e, ev.AttemptSealed)
            for _, _, version in e.receipt.weight_spans
            if step_of[e.group] - version > 1
        ]
        assert all(old)
        with open_database([to_disk(world, tmp_path / name)]) as database:
            assert database.query("SELECT max(age_max) FROM batch_age").rows == [(2 if name == "quick" else 1,)]
        assert bool(old) == (name == "quick")


def test_trained_groups_and_their_weights(told):
    """Groups by how many sets of weights they mix, and by the age of the oldest."""
    database, naive, _ = told
    mixed, ages = Counter(), Counter()
    for group in naive.groups.values():
        if group.state == "trained":
            weights = {(b, v) for t in group.sealed.values() for _, b, v in t.spans}
            versions = [v for _, v in weights]
            mixed[len(weights), max(versions) - min(versions)] += 1
            ages[group.trained_step - min(versions)] += 1

    assert {(r["weights"], r["width"]): r["groups"] for r in ask(database, "version-spans")} == dict(mixed)
    assert {r["age_of_oldest"]: r["groups"] for r in ask(database, "staleness")} == dict(ages)


def test_prompts(told):
    """Given up, generated again (how often, why, tokens kept and thrown away), trained twice: none."""
    database, naive, _ = told
    gone = sorted((g.gone_at, g.prompt.sample_id, g.reason) for g in naive.groups.values() if g.gone_at >= 0)
    assert [(r["sample_id"], r["reason"]) for r in ask(database, "prompts-skipped")] == [(p, r) for _, p, r in gone]

    expected = {}
    for (group, sibling), tries in naive.by_sibling().items():
        if len(tries) > 1:
            ended_by = [t.reason for t in tries if t.next is not None]
            reused = sum(t.prefix for t in tries[1:])
            expected[group, sibling] = (len(tries), ended_by, reused, sum(naive.held(t) - naive.kept(t) for t in tries))
    rows = ask(database, "prompts-regenerated")
    found = {
        (r["group_id"], r["sibling"]): (r["attempts"], r["ended_by"], r["tokens_reused"], r["tokens_thrown"])
        for r in rows
    }
    assert found == expected
    assert ask(database, "prompts-trained-twice") == []


def test_loss_by_length(told):
    """Ten buckets by length, none shared by two of them, with the siblings that lost anything and what they lost."""
    database, naive, _ = told
    rows = ask(database, "loss-by-length")
    siblings = naive.by_sibling()
    lengths = sorted(max(naive.held(t) for t in tries) for tries in siblings.values())
    tenth, begin = {}, 0  # the last tenth of ten equal ones that a length reaches into
    for i in range(10):
        end = begin + len(lengths) // 10 + (i < len(lengths) % 10)
        tenth |= dict.fromkeys(lengths[begin:end], i + 1)
        begin = end
    sizes = Counter(tenth[length] for length in lengths)
    assert {r["decile"]: r["siblings"] for r in rows} == sizes
    bounds = [bound for r in rows for bound in (r["shortest"], r["longest"])]
    assert bounds == sorted(bounds)
    assert all(earlier["longest"] < later["shortest"] for earlier, later in pairwise(rows))
    assert (bounds[0], bounds[-1]) == (lengths[0], lengths[-1])
    _, seconds, tokens = naive.losses()
    assert sum(r["tokens"] for r in rows) == sum(tokens.values())
    assert sum(r["seconds"] for r in rows) == pytest.approx(sum(seconds.values()) - seconds["rolled_back_training"])


def test_checkpoints(told):
    """Outcomes, and the longest time without a seal while one was written."""
    database, naive, _ = told
    outcomes = Counter((c["kind"], c["how"]) for c in naive.checkpoints.values())
    found = Counter()
    for r in ask(database, "checkpoints"):
        found[r["kind"], r["outcome"]] += r["checkpoints"]
    assert {k: n for k, n in found.items() if k[1] != "skipped"} == outcomes
    assert sum(n for k, n in found.items() if k[1] == "skipped") == naive.skipped

    seals = defaultdict(list)
    for t in naive.tries.values():
        if t.how == "sealed" and not t.killed:
            seals[t.life].append(t.end)
    gaps = [(b, b - a) for life in seals.values() for a, b in zip(sorted(life), sorted(life)[1:], strict=False)]
    for r in ask(database, "checkpoint-stalls"):
        c = naive.checkpoints[r["checkpoint"]]
        during = [gap for end, gap in gaps if c["cut"] < end <= c["end"]]
        assert r["gap_longest"] == pytest.approx(max(during)) if during else r["gap_longest"] is None
        assert r["gap_p99"] == pytest.approx(quantiles([g for _, g in gaps], n=100, method="inclusive")[98])


def test_snapshots_alone(told):
    """What other intervals would have lost, cut by cut."""
    database, naive, _ = told
    for row in ask(database, "snapshot-intervals"):
        seconds = tokens = 0
        for life, (died, _) in naive.deaths.items():
            begin = naive.lives[life - 1][1]
            cut = begin + (died - begin) // row["interval_s"] * row["interval_s"]
            for t in naive.tries.values():
                if t.life == life and t.end > cut and (t.how == "sealed" or t.killed):
                    seconds += t.end - t.began
                    tokens += naive.held(t) - t.prefix
        assert row["seconds_with_snapshots_alone"] == pytest.approx(seconds)
        assert row["tokens_with_snapshots_alone"] == tokens


def test_slow_and_stuck_groups(told):
    """The twenty slowest and the twenty that wait longest."""
    database, naive, _ = told
    done = [g for g in naive.groups.values() if g.complete is not None]
    slow = sorted((g.complete - g.first for g in done), reverse=True)[:20]
    assert [r["seconds"] for r in ask(database, "slowest-groups")] == pytest.approx(slow)
    waiting = [
        naive.t - (g.first if g.first is not None else g.admitted or g.reserved)
        for g in naive.groups.values()
        if g.state in ("reserved", "unfinished", "complete", "claimed")
    ]
    assert [r["waiting_s"] for r in ask(database, "stuck-groups")] == pytest.approx(sorted(waiting, reverse=True)[:20])


def test_workers_and_tasks(told):
    """Attempts, tokens and seconds by worker and by task; rewards by task."""
    database, naive, _ = told
    per = defaultdict(lambda: [0, 0, 0.0])
    task = defaultdict(lambda: [0, 0, 0.0])
    for t in naive.tries.values():
        for row in (per[t.worker], task[naive.groups[t.group].prompt.task]):
            row[0] += 1
            row[1] += max(naive.held(t) - t.prefix, 0)
            row[2] += t.end - t.began
    rows = ask(database, "worker-throughput")
    assert {r["worker"]: [r["attempts"], r["new_tokens"]] for r in rows if r["attempts"]} == {
        w: v[:2] for w, v in per.items()
    }
    assert {r["worker"]: r["busy_s"] for r in rows if r["attempts"]} == pytest.approx({w: v[2] for w, v in per.items()})
    for r in ask(database, "task-throughput"):
        assert [r["attempts"], r["tokens"]] == task[r["task"]][:2]
        assert r["seconds"] == pytest.approx(task[r["task"]][2])
        rewards = [
            mean(t.reward for t in g.sealed.values())
            for g in naive.groups.values()
            if g.prompt.task == r["task"] and g.sealed
        ]
        assert r["reward_mean"] == pytest.approx(mean(rewards))


def test_waste_and_time_lost_to_restarts(told):
    """Idle from the latest moment of death to the first attempt after it, at least; from the earliest, at most."""
    database, naive, _ = told
    idle_min = idle_max = 0.0
    for restore, (low, high) in zip(naive.restores, naive.deaths.values(), strict=True):
        idle_min += restore["dispatch"] - high
        idle_max += restore["dispatch"] - low
    rows = {(r["resource"], r["waste"]): r for r in ask(database, "waste")}
    assert rows["wall", "crash"]["seconds"] == pytest.approx(idle_min)
    assert rows["wall", "crash"]["seconds_at_most"] == pytest.approx(idle_max)
    assert rows["wall", "weight sync"]["seconds"] == pytest.approx(naive.pauses)
