"""Starts that were stopped or killed before their restore was complete: what the post-mortem makes of them.

The simulated engine writes the journals; a plain pass over the events, which shares nothing with the SQL, says what has
to come out.
"""

import random
from collections import Counter

import pytest

from tests.simulation.on_disk import to_disk
from tests.simulation.world import World, sim_config
from unlost.replay import events as ev
from unlost.replay.database import open_database
from unlost.replay.fold import open_events
from unlost.replay.queries import named
from unlost.replay.report import gather

pytestmark = pytest.mark.slow  # in sum more than a fast suite should take

SEEDS = range(14)


def lived(seed: int) -> World:
    """A run whose starts end at any moment: of a second opening on, often before anything was restored."""
    r = random.Random(seed)
    world = World(sim_config(), seed=seed)
    world.live(kill_at_s=r.uniform(0.5, 5.0))
    for _ in range(r.randint(1, 5)):
        world.now_us += r.randint(1, 9) * 1_000_000
        moment = r.choice((0.0001, r.uniform(0.0, 0.12), r.uniform(0.12, 0.3), r.uniform(0.3, 3.0)))
        world.live(**{r.choice(("kill_at_s", "stop_at_s")): moment})
    world.now_us += 1_000_000
    world.live()
    return world


class Walk:
    """What one reads off the events in one pass: who ran when a process went, and until when nothing was generated."""

    def __init__(self, events):
        self.kept, self.kills, self.vain = [], 0, 0
        self.lives = []  # [begin, last event, killed, restored, first attempt, first claim]
        running, resumable, cut = set(), {}, None
        restored, ended, last, kills = True, True, 0.0, 0
        for event in events:
            now = event.t / 1e6
            match event:
                case ev.RunStarted():
                    if event.incarnation > 1:
                        kills += not ended
                        self.kills += not ended
                        self.vain += not restored
                        self.lives[-1][1:3] = [last, not ended]
                        if cut is None:
                            cut = Counter(running=len(running))
                    restored, ended = event.incarnation == 1, False
                    self.lives.append([now, now, False, restored, None, None])
                case ev.RunEnded():
                    ended = True
                case ev.AttemptDispatched():
                    running.add((event.group, event.sibling, event.attempt))
                    if event.prefix and (event.group, event.sibling) in resumable:
                        resumable.pop((event.group, event.sibling))["tokens"] += event.prefix
                    self.lives[-1][4] = self.lives[-1][4] or now
                case ev.StepClaimed():
                    self.lives[-1][5] = self.lives[-1][5] or now
                case ev.AttemptSealed():
                    running.discard((event.group, event.sibling, event.attempt))
                    if cut is not None:
                        cut["adopted"] += event.adopted
                case ev.AttemptAbandoned():
                    running.discard((event.group, event.sibling, event.attempt))
                    if cut is not None and event.reason == ev.ABANDON_RESTART:
                        resumable[event.group, event.sibling] = cut
                case ev.RestoreCompleted():
                    self.kept.append((cut, kills))
                    restored, cut, kills = True, None, 0
                    self.lives[-1][3] = True
            last = now
        self.lives[-1][1] = last

    def idle(self):
        """(least, most) seconds: from each opening that worked to the next one's first attempt, claim or end."""
        least = most = 0.0
        gone = None
        for number, (_, end, killed, restored, attempt, claim) in enumerate(self.lives):
            if not restored:
                continue
            if gone is not None:
                until = attempt or claim or end
                least, most = least + max(until - gone[1], 0), most + until - gone[0]
            if number + 1 < len(self.lives):
                gone = (end, self.lives[number + 1][0] if killed else end)
        return least, most


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vain")
    runs = {f"s{seed}": to_disk(lived(seed), folder / f"s{seed}") for seed in SEEDS}
    walks = {name: Walk(e for _, e in open_events(run).events()) for name, run in runs.items()}
    with open_database(list(runs.values())) as database:
        yield database, walks


def by_run(database, sql):
    found = {f"s{seed}": [] for seed in SEEDS}
    for row in database.query(sql).dicts():
        found[row["run"]].append(row)
    return found


def test_the_lives_are_of_every_kind(told):
    """Without starts in vain, kills among them and reused prefixes the other tests would show nothing."""
    _, walks = told
    assert sum(walk.vain > 0 for walk in walks.values()) >= 5
    assert sum(kills > 1 for walk in walks.values() for _, kills in walk.kept) >= 2
    assert sum(cut["tokens"] for walk in walks.values() for cut, _ in walk.kept) > 50


def test_what_a_kill_cut_off_is_charged_to_the_restore_that_takes_it_over(told):
    """Running, adopted and reused tokens of every restore; starts between change nothing."""
    database, walks = told
    rows = by_run(database, named("reuse").sql)
    for name, walk in walks.items():
        assert len(rows[name]) == len(walk.kept)
        for row, (cut, _) in zip(rows[name], walk.kept, strict=True):
            before = database.query(
                "SELECT before FROM restores WHERE run = ? AND incarnation = ? AND completed_offset IS NOT NULL",
                [name, row["restarted_as"]],
            ).rows
            assert before in ([("killed",)], [("ended",)])
            if before == [("killed",)]:
                assert row["running_at_death"] == cut["running"], name
                assert row["adopted"] == cut["adopted"], name
                assert row["prefix_tokens_reused"] == cut["tokens"], name


def test_every_kill_is_in_the_table_of_restores(told):
    """The header's number of kills is what the restores' rows add up to, and starts in vain are counted."""
    database, walks = told
    rows = by_run(database, "SELECT run, kills, starts FROM restores WHERE kills IS NOT NULL ORDER BY started_offset")
    header = by_run(database, "SELECT run, kills, incarnations FROM runs")
    for name, walk in walks.items():
        assert [row["kills"] for row in rows[name]] == [kills for _, kills in walk.kept]
        assert sum(row["kills"] for row in rows[name]) == header[name][0]["kills"] == walk.kills
        assert sum(row["starts"] for row in rows[name]) == header[name][0]["incarnations"] - 1
        assert sum(row["starts"] - 1 for row in rows[name]) == walk.vain


def test_idle_from_a_death_to_the_next_attempt_counts_once(told):
    """Through all the starts between; the least from when it was dead, the most from when it last lived."""
    database, walks = told
    rows = by_run(
        database,
        "SELECT run, sum(seconds) AS least, sum(seconds_max) AS most FROM losses WHERE class = 'restart_idle' "
        "GROUP BY run",
    )
    for name, walk in walks.items():
        (row,) = rows[name]
        assert (row["least"], row["most"]) == pytest.approx(walk.idle()), name


def test_everything_reconciles_and_the_report_says_it(told):
    """No residue in any of the runs; the summary counts the starts that came to nothing."""
    database, walks = told
    assert [row for row in database.query("FROM reconcile").dicts() if not row["ok"]] == []
    most, none = (pick(walks, key=lambda name: walks[name].vain) for pick in (max, min))
    for name, walk in ((most, walks[most]), (none, walks[none])):
        said = " ".join(gather(database, name)["summary"])
        assert f"{walk.kills} kill" in said
        assert ("before its restore was complete" in said or "before their restores were complete" in said) == (
            walk.vain > 0
        )
