"""No sum is said not to come out where it does, and no bound is below what happened: live, ended, killed and pruned."""

import logging
import random
from collections import Counter

import msgspec
import pytest

from tests.fakes import SimPlan
from tests.simulation import run as simulation
from tests.simulation.draw import draw
from tests.simulation.on_disk import from_disk, to_disk
from tests.simulation.world import World, sim_config
from unlost.engine.fork import fork_run
from unlost.journal import JournalOptions, JournalWriter, prune
from unlost.replay import events as ev
from unlost.replay.bounds import unheard
from unlost.replay.database import open_database
from unlost.replay.fold import fold_events, fold_run
from unlost.replay.queries import QUERIES, named
from unlost.replay.report import gather
from unlost.replay.state import DISPATCHED

from . import postmortem_stories as stories
from .postmortem_stories import us, write

LIMITS = {"journal.progress_interval_tokens": 64, "generation.max_new_tokens": 4096}


def under_way(counted, *, limits=LIMITS, end=True):
    """One group trained, two more under way; worker 0 has counted ``counted`` tokens besides the 20 that are sealed."""
    told = [stories.started(0, 1, **limits), ev.WorkerStarted(us(0), 0, "w0"), stories.reserved(1, 0, 0, 3, 1)]
    told += [stories.admitted(1, 0), stories.dispatched(2, 0, 0), stories.dispatched(2, 1, 0)]
    told += [stories.sealed(4, 0, 0, tokens=20), stories.committed(4, 0, 1, 20), ev.StepClaimed(us(4), 0, (0,))]
    told += [ev.StepApplied(us(60), 0, 1, 0.5, 0.5, 20, 3.0, ((0, 20 + counted),))]
    return [*told, ev.RunEnded(us(61), "finished", "", ((0, 20 + counted),))] if end else told


def killed(told, reason, *, durable=0):
    return [
        *told,
        stories.started(90, 2, **told[0].settings),
        ev.RestoreStarted(us(90), -1, 1, 1, "", us(60)),
        stories.abandoned(91, 1, 0, reason, 0, durable, durable),
        ev.RestoreCompleted(us(92), stories.counters(0, 2, 0, 2), 1.0),
    ]


def given_up_twice():
    """Sealed (2 s, 20 tokens), given up with its siblings by the restore, then its group discarded."""
    told = [stories.started(0, 1), stories.reserved(1, 0, 0, 1, 2), stories.admitted(1, 0)]
    told += [stories.dispatched(2, 0, 0), stories.dispatched(2, 0, 1), stories.sealed(4, 0, 0, tokens=20)]
    told += [stories.started(30, 2), ev.RestoreStarted(us(30), -1, 0, 0, "", us(4))]
    told += [
        stories.abandoned(31, 0, 1, ev.ABANDON_RESTART),
        stories.abandoned(31, 0, 0, ev.ABANDON_GRANULARITY, 0, 20),
    ]
    told += [ev.RestoreCompleted(us(32), stories.counters(0, 1, 0, 2), 1.0)]
    return [*told, ev.GroupDiscarded(us(33), 0, ev.DISCARD_STALE_IN_FLIGHT)]


def out_of_the_pool():
    """Spares 3 and 4 and the requeued prompts 5 and 6: 3 and 5 are reserved, not admitted; the others wait."""
    prompts = tuple(ev.PromptRef(f"s{i}", 0, 10 + i, 9) for i in range(2))
    told = [stories.started(0, 1), stories.reserved(1, 0, 0, 3, 2), stories.admitted(1, 0)]
    told += [ev.BatchReserved(us(2), 1, 3, prompts, 2, 0, 5, ev.KIND_SPARE)]
    told += [ev.GroupDiscarded(us(2), 0, ev.DISCARD_STALE_IN_FLIGHT, "", 5)]
    told += [ev.GroupDiscarded(us(2), 1, ev.DISCARD_STALE_IN_FLIGHT, "", 6)]
    told += [ev.BatchReserved(us(3), 2, 7, (), 2, 0, 5, ev.KIND_POOL, (3, 5))]
    told += [stories.started(9, 2), ev.RestoreStarted(us(9), -1, 0, 0, "", us(3))]
    return [*told, ev.RestoreCompleted(us(10), stories.counters(0, 3, 0, 6), 1.0)]


ROOM = {  # counted beyond what events tell, limits, residue, hidden_max
    "within": (3000, LIMITS, 0, 4096),
    "at_the_limit": (4096, LIMITS, 0, 4096),
    "beyond": (4099, LIMITS, 3, 4096),
    "below": (-5, LIMITS, 5, 4096),
    "no_limit": (9999, {}, 0, None),
    "no_limit_below": (-5, {}, 5, None),
}
CUT_OFF = {  # data_plane.payloads, durable, reason, hidden_max
    "read_back": ("full", 2944, ev.ABANDON_RESTART, 128),
    "nothing_left": ("full", 0, ev.ABANDON_RESTART, 4096),
    "payloads_none": ("none", 0, ev.ABANDON_RESTART, 4096),
    "given_up": ("full", 0, ev.ABANDON_GROUP_DISCARDED, 4096),
    "nearly_whole": ("full", 4090, ev.ABANDON_RESTART, 6),
}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """All stories told here, each under its name."""
    root = tmp_path_factory.mktemp("told")
    told = {"given_up_twice": given_up_twice(), "out_of_the_pool": out_of_the_pool(), "a_step_alone": under_way(0)}
    for name, (counted, limits, _, _) in ROOM.items():
        told |= {f"{name}_{end}": under_way(counted, limits=limits, end=end == "ended") for end in ("ended", "live")}
    for name, (mode, durable, reason, _) in CUT_OFF.items():
        begun = under_way(3000, limits=LIMITS | {"data_plane.payloads": mode}, end=False)
        told[name] = killed(begun, reason, durable=durable)
    with open_database(
        [write(root / name, events, legal=name != "given_up") for name, events in told.items()]
    ) as opened:
        yield opened


def ask(database, sql, run):
    return database.query(f"SELECT * EXCLUDE (run) FROM ({sql}) WHERE run = ? ORDER BY ALL", [run]).rows


@pytest.mark.parametrize("name", ROOM)
@pytest.mark.parametrize("end", ["ended", "live"])
def test_an_open_attempt_has_room_for_a_response_and_no_more(database, name, end):
    """Attempt 1.0 has no end: up to 4096 tokens of the worker's count are its own, 3 more or 5 less are a residue."""
    _, _, residue, hidden = ROOM[name]
    if end == "live" and "below" in name:  # a count that was not the last may be behind the events
        residue = 0
    what = "worker counts" if end == "ended" else "worker counts after a kill"

    assert ask(database, "SELECT run, hidden_max FROM workers", f"{name}_{end}") == [(hidden,)]
    found = ask(database, f"SELECT run, residue, ok FROM reconcile WHERE what = '{what}'", f"{name}_{end}")
    assert found == [(residue, residue == 0)]


@pytest.mark.parametrize("name", CUT_OFF)
def test_what_a_kill_hid_is_bound_by_what_was_looked_up(database, name):
    """Two chunks only if a payload journal told of the attempt; else all that is left of a response."""
    assert ask(database, "SELECT run, hidden_max FROM workers", name) == [(CUT_OFF[name][3],)]
    assert ask(database, "SELECT run, ok FROM reconcile WHERE what = 'worker counts after a kill'", name) == [(True,)]


def test_a_sibling_given_up_twice_is_lost_once(database):
    """By the restore, and then with its group: one row."""
    rows = ask(database, "SELECT run, class, seconds, tokens FROM losses WHERE resource <> 'wall'", "given_up_twice")

    assert rows == [("granularity", 2, 20), ("in_flight", 2, 0)]


def test_a_prompt_taken_out_of_the_pool_is_unfinished_before_it_is_admitted(database):
    """The two that are reserved, and group 2; not those that wait."""
    found = "SELECT run, groups_unfinished_found, siblings_rerun FROM restore_finds"

    assert ask(database, found, "out_of_the_pool") == [(3, 6)]
    assert {row[-1] for row in ask(database, "FROM reconcile", "out_of_the_pool")} == {True}


def test_steps_count_where_no_attempt_ended(database):
    """The step at 60 s has a second of its own in the view; its 20 tokens trained are in it."""
    sql = "SELECT run, bin_s, sealed, sealed_tokens, steps, trained_tokens FROM throughput"

    assert ask(database, sql, "a_step_alone") == [(4, 1, 20, 0, 0), (60, 0, 0, 1, 20)]


# --- simulated runs -------------------------------------------------------------------------------------------------

FAST = (10, 53, 122, 167)
"""payloads: none; a payload disk lost; restores by whole groups; a prompt reserved out of the pool, a zombie killed."""
MANY = (0, 9, 13, 69, 97, 99, 132, 133, 137, 207, 247, 252, 267, 300, 317, 387, *range(20, 24), 74013720)
"""The last lets go of a claim whose rows and payloads are lost."""


def simulate(seed, monkeypatch):
    """The journal of a drawn run, and how many tokens its workers made by their own count."""
    watches = []
    prepare = simulation.prepare
    monkeypatch.setattr(simulation, "prepare", lambda case: watches.append(prepare(case)) or watches[-1])
    logging.disable(logging.CRITICAL)
    try:
        simulation.run_case(draw(seed))
    finally:
        logging.disable(logging.NOTSET)
    world = watches[0].world
    made = Counter()
    for life in world.generated:
        made.update(life)
    return [event for _, event in world.events()], made


def put(folder, told, image_at=0):
    """A run folder of these events; with an image at ``image_at``, what was before it is pruned."""
    options = JournalOptions(segment_bytes_max=1 << 30)
    with JournalWriter.open(folder / "events", ev.EVENT_TYPES, journal_id="sim", options=options) as writer:
        for offset, event in enumerate(told):
            if image_at and offset == image_at:
                state = fold_events(enumerate(told[:image_at]))
                writer.rotate(ev.StateImage(state.t, msgspec.Raw(state.image())))
            if not isinstance(event, ev.StateImage):
                writer.append(event)
            else:
                writer.append(ev.CheckpointSkipped(event.t, ev.CHECKPOINT_ROLLOUT, "an image"))
    if image_at:
        prune(folder / "events", image_at, dry_run=False)
    return folder


def bounded(database, made):
    """Worker → what is wrong with its bound. Only workers that some attempt in the journal ran on are known of."""
    wrong = {}
    for worker, new, hidden in database.query(
        "SELECT worker, new_tokens, hidden_max FROM workers WHERE attempts > 0"
    ).rows:
        if worker in made and not new <= made[worker] <= new + hidden:
            wrong[worker] = (new, made[worker], hidden)
    return wrong


def without_residue(database):
    return database.query("FROM reconcile WHERE ok IS NOT TRUE").dicts()


def naive_throughput(told):
    """Steps and their tokens, over the whole run."""
    applied = [event for event in told if isinstance(event, ev.StepApplied)]
    return len(applied), sum(event.tokens for event in applied)


def naive_given_up(told):
    """Attempts lost with their group, as (group, sibling, attempt): a seal that stood, or one without an end."""
    stands, ended, gone, last = {}, {}, set(), {}
    for event in told:
        kind = type(event)
        if kind is ev.AttemptDispatched:
            last[event.group, event.sibling] = key = (event.group, event.sibling, event.attempt)
            ended[key] = False
        elif kind in (ev.AttemptSealed, ev.AttemptFailed, ev.AttemptAbandoned):
            key = (event.group, event.sibling, event.attempt)
            stands[key] = kind is ev.AttemptSealed
            ended[key] = True
        elif kind in (ev.GroupDiscarded, ev.GroupEvicted, ev.PromptReplaced, ev.StepShortened):
            gone.add(event.group)
    return {key for key in last.values() if key[0] in gone and (stands.get(key, False) or not ended[key])}


KEPT_BY_RESTARTS = f"""
    SELECT k.restarted_as, k.adopted, k.prefix_tokens_reused AS reused,
           (r.counters->>'$.attempts_adopted')::BIGINT AS told_adopted,
           (r.counters->>'$.prefix_tokens_reused')::BIGINT AS told_reused
    FROM ({named("reuse").sql}) k JOIN restores r ON r.run = k.run AND r.incarnation = k.restarted_as
    JOIN outages o ON o.run = k.run AND o.restarted_as = k.restarted_as
    WHERE o.starts = 1 AND r.completed_offset IS NOT NULL"""


def as_told(row):
    """What a restart kept by the attempts, and by what its restore told."""
    return (row["adopted"], row["reused"]) == (row["told_adopted"], row["told_reused"])


def check_whole(folder, told, made):
    with open_database([put(folder, told)], processes=1) as database:
        assert without_residue(database) == []
        assert bounded(database, made) == {}
        assert database.query("SELECT sum(steps), sum(trained_tokens) FROM throughput").rows == [naive_throughput(told)]
        kept = database.query(KEPT_BY_RESTARTS).dicts()
        assert [row for row in kept if not as_told(row)] == []
        classes = (
            "('in_flight', 'sealed_not_durable', 'granularity', 'failed', 'worker_lost', 'weight_sync', 'stopped')"
        )
        listed = database.query(
            "SELECT l.group_id, l.sibling, l.attempt FROM losses l JOIN attempts a USING (group_id, sibling, attempt) "
            f"WHERE l.class NOT IN {classes} AND l.resource = 'generation' AND a.outcome IN ('sealed', 'open')"
        ).rows
        assert Counter(listed) == Counter(naive_given_up(told))


def check_prefixes(folder, told, count):
    """A run that is looked at while it runs: after a step, and anywhere."""
    chance = random.Random(len(told))
    ends = [i + 1 for i, e in enumerate(told) if isinstance(e, ev.StepApplied | ev.RestoreCompleted | ev.RunStarted)]
    for end in chance.sample(ends, min(count, len(ends))):
        with open_database([put(folder / f"upto{end}", told[:end])], processes=1) as database:
            assert without_residue(database) == [], end


GROUPS = """SELECT group_id, sample_id, epoch, generations, status, sealed, tokens, round(reward_mean, 9) AS reward,
    trained_step FROM groups"""
FINDS = "SELECT * EXCLUDE (run) FROM restore_finds"


def check_pruned(folder, told, cuts):
    """Pruned at these events: nothing fails, nothing is said not to come out, and whose figures they are is said.

    Every group that was alive then or came later, and every restore that was over later, is as it is in the whole.
    """
    with open_database([folder / "whole"], processes=1) as database:
        groups = {row[0]: row for row in database.query(GROUPS).rows}
        finds = {row[0]: row for row in database.query(FINDS).rows}
        over = dict(database.query("SELECT incarnation, completed_offset FROM restores ORDER BY started_offset").rows)
        gone = dict(database.query("SELECT group_id, gone_offset FROM groups WHERE gone_offset IS NOT NULL").rows)
        claimed = dict(database.query("SELECT group_id, max(claim_offset) FROM step_groups GROUP BY ALL").rows)
    for at in cuts:
        run = put(folder / f"from{at}", told, at)
        with open_database([run], processes=1) as database:
            assert without_residue(database) == [], at
            for query in QUERIES:
                database.query(query.sql)
            kept = {row[0]: row for row in database.query(GROUPS).rows}
            assert kept == {group: groups[group] for group in kept}, at
            alive = {group for group in groups if gone.get(group, at) >= at and claimed.get(group, at) >= at}
            assert alive <= set(kept)
            found = {row[0]: row for row in database.query(FINDS).rows}
            assert found == {life: row for life, row in finds.items() if (over[life] or -1) >= at}, at
            about = database.query("FROM runs").dicts()[0]
            assert (about["first_offset"], about["events"]) == (at, len(told) + 1 - at)
            assert database.value("SELECT count(*) FROM attempts a ANTI JOIN groups g USING (run, group_id)") == 0
            assert database.value("SELECT count(*) FROM attempts WHERE incarnation IS NULL") == 0
            assert database.value("SELECT count(*) FROM events") == len(told) + 1 - at
            applied = sum(isinstance(event, ev.StepApplied) for event in told[at:])
            assert database.value("SELECT count(*) FROM steps") == applied
            trained = database.value("SELECT count(*) FROM groups WHERE status = 'trained' AND applied_s IS NOT NULL")
            assert trained == len(naive_trained(told, at))
            said = gather(database, database.sources[0].run)["summary"]
            assert said[0].startswith(f"The events before {at:,} were pruned")
            assert said[-1].startswith("In what is kept, everything adds up")


def naive_trained(told, start):
    """Groups whose training in a step applied at ``start`` or later stands."""
    claimed, stands = [], {}
    for offset, event in enumerate(told):
        if isinstance(event, ev.StepClaimed):
            claimed += event.groups
        elif isinstance(event, ev.StepApplied):
            stands |= dict.fromkeys(claimed, (event.step, offset))
            claimed = []
        elif isinstance(event, ev.TrainerRolledBack):
            stands = {group: at for group, at in stands.items() if at[0] < event.to_version}
            claimed = []
    return {group for group, (_, offset) in stands.items() if offset >= start}


@pytest.mark.slow
@pytest.mark.parametrize("seed", FAST + MANY)
def test_simulated_runs_add_up(tmp_path, monkeypatch, seed):
    """Whole, as they ran, and pruned anywhere: no residue, and no bound below what the workers made."""
    told, made = simulate(seed, monkeypatch)
    check_whole(tmp_path / "whole", told, made)
    check_prefixes(tmp_path, told, 2)
    check_pruned(tmp_path, told, random.Random(seed).sample(range(2, len(told) - 2), 3))


@pytest.mark.slow
def test_a_run_that_was_pruned_adds_up(tmp_path, monkeypatch):
    """Once in the fast suite: a run of several lives, pruned in its middle."""
    told, made = simulate(167, monkeypatch)
    check_whole(tmp_path / "whole", told, made)
    check_pruned(tmp_path, told, [len(told) // 2])


def test_without_payload_journals_the_response_is_the_bound():
    """Also where the mode is known from one opening alone; 20 tokens are held."""
    full = LIMITS | {"data_plane.payloads": "full"}
    assert unheard([full]).at_most(20) == 128
    assert unheard([full, LIMITS | {"data_plane.payloads": "none"}]).at_most(20) == 4076


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_fork_adds_up_and_says_that_it_is_one(tmp_path, how):
    """Before its first start and after its end: attempts that ran at the fork are in its image, not in its events."""
    keys = {"checkpointing__save_period": 1, "checkpointing__keep_latest_k": 9, "grpo__max_steps": 8}
    config = sim_config(**keys)
    old = World(config, script=lambda key, _: SimPlan(tokens=12, seconds_per_token=0.1 if key.group % 3 else 0.01))
    old.live(**({"kill_at_s": 6.0} if how == "killed" else {"stop_at_s": 6.0}))
    checkpoint = fold_run(to_disk(old, tmp_path / "run")).checkpoints[-1]
    fork = tmp_path / "fork"
    state = fork_run(tmp_path / "run", checkpoint.trainer_version, fork)
    assert any(s.status == DISPATCHED for g in state.groups.values() for s in g.siblings)
    begun = judged(fork)
    world = from_disk(fork, config, state.run_id)
    world.now_us = old.now_us
    life = world.live(limit_s=600)
    assert life.outcome is not None
    assert life.outcome.exit_code == 0, life.outcome
    ended = judged(to_disk(world, tmp_path / "ended"))
    assert ended["run"]["incarnations"] == begun["run"]["incarnations"] + 1
    with open_database([tmp_path / "ended"], processes=1) as database:
        kept = database.query(KEPT_BY_RESTARTS).dicts()
        assert len(kept) >= 1
        assert all(map(as_told, kept))


def judged(run):
    """The report's data of a run that is a fork and adds up."""
    with open_database([run], processes=1) as database:
        assert without_residue(database) == []
        for query in QUERIES:
            database.query(query.sql)
        data = gather(database, database.sources[0].run)
    assert any("is a fork" in line for line in data["summary"])
    assert not any("does not add up" in line for line in data["summary"])
    return data
