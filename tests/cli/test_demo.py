"""The demo: its figures against a told story, its kill against real processes, its manners with folders."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from unlost.cli.demo import _moment, _packaged_example, _work_folder
from unlost.cli.demo_figures import figures, owned, problems
from unlost.cli.demo_output import print_figures, print_owned, reward_curve
from unlost.cli.errors import UsageFault
from unlost.cli.main import run
from unlost.cli.process_tree import MARKER, kill_tree
from unlost.replay import events as ev
from unlost.replay.database import open_database
from unlost.replay.fold import fold_events

from .story import SIBLINGS, _dispatched, _receipt, story, write_run

COUNTERS = {
    "groups_complete_restored": 2,
    "groups_unfinished_found": 2,
    "siblings_reused": 1,
    "siblings_rerun": 3,
    "groups_rolled_back": 2,
    "prefix_tokens_reused": 5,
    "attempts_adopted": 0,
    "tokens_lost_known": 2,
}

SETTINGS = {"journal.progress_interval_tokens": 8, "generation.max_new_tokens": 20}


def resumed() -> list[ev.Event]:
    """The story goes on: step 0 is rolled back and trained again, then step 1, from one prefix of 5 tokens."""
    told = story()
    told += [
        ev.RunStarted(20_000, "story", 2, 1_700_000_020_000_000, "host", 124, {}, SETTINGS, {}),
        ev.RestoreStarted(20_100, -1, 1, 0),
        ev.TrainerRolledBack(20_200, 1, 0, 1, (0, 1)),
        ev.AttemptAbandoned(20_300, 2, 1, 0, ev.ABANDON_RESTART, tokens=7, durable=5),
        ev.AttemptAbandoned(20_400, 3, 0, 0, ev.ABANDON_RESTART),
        ev.RestoreCompleted(21_000, COUNTERS, 0.9),
        ev.WorkerStarted(21_500, 1, "i00002-w00001"),
        ev.StepClaimed(22_000, 0, (0, 1)),
        ev.StepApplied(22_500, 0, 1, reward_mean=0.3),
        ev.AttemptDispatched(23_000, 2, 1, 1, 1, 1, 1, prefix=5),
        ev.AttemptDispatched(23_000, 3, 0, 1, 1, 1, 1),
        ev.AttemptDispatched(23_000, 3, 1, 0, 1, 1, 1),
    ]
    told += [ev.AttemptSealed(24_000, g, s, a, _receipt(g, s, 1)) for g, s, a in ((2, 1, 1), (3, 0, 1), (3, 1, 0))]
    told += [ev.GroupCommitted(25_000, g, SIBLINGS, 24, 1, 1) for g in (2, 3)]
    told += [
        ev.StepClaimed(26_000, 1, (2, 3)),
        ev.StepApplied(27_000, 1, 2, reward_mean=0.7),
        ev.RunEnded(28_000, "finished"),
    ]
    return told


def at_death():
    return owned(fold_events(enumerate(story())))


def summary(told: list[ev.Event]) -> dict:
    return fold_events(enumerate(told)).summary()


def test_what_was_owned_at_the_kill():
    """Counts and tokens as one reads them off the story by hand."""
    death = at_death()

    assert (death.trained, death.claimed, death.complete, death.unfinished) == (2, 0, 0, 2)
    assert (death.siblings_sealed, death.siblings_running, death.siblings_idle) == (1, 2, 1)
    assert death.tokens_sealed == 12
    assert death.sealed == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}
    assert death.promise_holds


def test_figures_of_a_resumed_run():
    """Restore, rollback, prefixes, cut-off attempts and the rewards of the steps that stand."""
    found = figures(enumerate(resumed()), at_death())

    assert found.counters == COUNTERS
    assert found.rolled_back == (1, 0)
    assert (found.interrupted, found.prefixes) == (2, 1)
    assert found.rewards == [(0, 0.3), (1, 0.7)]
    assert (found.trained_twice, found.sealed_again) == ([], [])
    assert (found.incarnations, found.ended) == (2, "finished")
    assert problems(at_death(), summary(resumed()), found) == []


def test_what_the_kill_hid_is_what_the_report_says(tmp_path):
    """Of 7 known tokens 13 are left to 20, of none two chunks of 8: 29 at most, here and in SQL; else unknown."""
    with open_database([write_run(tmp_path, resumed())]) as database:
        rows = database.query("SELECT sum(tokens_max - tokens) FROM losses WHERE class = 'in_flight'").rows
    untold = [event for event in resumed() if not isinstance(event, ev.RunStarted) or not event.settings]

    assert figures(enumerate(resumed()), at_death()).hidden == 13 + 16
    assert rows == [(29,)]
    assert figures(enumerate(untold), at_death()).hidden is None


def test_a_prompt_trained_twice_is_found():
    """Without the rollback, the same groups in a second step are trained twice; the demo must fail."""
    told = [e for e in resumed() if not isinstance(e, ev.TrainerRolledBack)]
    found = figures(enumerate([*told, ev.StepClaimed(1, 2, (0,)), ev.StepApplied(1, 2, 3)]), at_death())

    assert found.trained_twice == [0]
    assert problems(at_death(), summary(resumed()), found) == ["groups trained twice: [0]"]


def test_a_finished_sibling_generated_again_is_found():
    """A dispatch, after the kill, of a sibling that was sealed before it."""
    told = [*resumed(), _dispatched(1, 2, 0, 1)]
    found = figures(enumerate(told), at_death())

    assert found.sealed_again == [(2, 0)]
    assert problems(at_death(), summary(resumed()), found) == ["finished siblings generated again: [(2, 0)]"]


def test_a_run_that_did_not_finish_or_restore_is_found():
    """No restore after the kill, no end: both are said."""
    found = figures(enumerate(story()), at_death())

    wrong = problems(at_death(), summary(story()), found)

    assert wrong == ["no completed restore is in the journal", "the run did not finish: no end in the journal"]


def test_a_lost_prompt_is_found():
    """If the sets of P1 do not add up at the end, the demo fails whatever else is right."""
    final = summary(resumed())
    final["prompts"]["holds"] = False

    assert problems(at_death(), final, figures(enumerate(resumed()), at_death())) == [
        "at the end a prompt was lost or owned twice"
    ]


def test_the_moment_to_kill():
    """Only with a checkpoint behind the trainer, and a group with siblings both finished and being generated."""
    told = story()
    state = fold_events(enumerate(told))
    assert not _moment(state)  # no checkpoint yet

    started, committed = ev.CheckpointStarted(8_100, 0, "trainer", 1), None
    position = next(i for i, e in enumerate(told) if isinstance(e, ev.StepClaimed))
    early = [*told[:position], ev.CheckpointStarted(6_500, 0, "trainer", 0)]
    committed = ev.CheckpointCommitted(6_600, 0, "trainer", 0, position, "c", "d", 1, 0.1, 0)
    behind = [*early, committed, *told[position:]]
    assert _moment(fold_events(enumerate(behind)))
    assert not _moment(fold_events(enumerate(behind[:-1])))  # nothing sealed in the unfinished groups

    position = next(i for i, e in enumerate(told) if isinstance(e, ev.WeightsSynced))
    committed = ev.CheckpointCommitted(8_200, 0, "trainer", 1, position, "c", "d", 1, 0.1, 0)
    level = [*told[:position], started, committed, *told[position:]]
    assert not _moment(fold_events(enumerate(level)))  # the trainer is not ahead of its checkpoint


def test_output_for_people(capsys):
    """Both tables name the figures; the curve has first and last reward."""
    found = figures(enumerate(resumed()), at_death())
    print_owned(at_death())
    print_figures(found, summary(resumed()))
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}

    assert "siblings finished 1" in lines
    assert "trainer at step 1, its last checkpoint at 0" in lines
    assert "trainer steps rolled back 1 to 0; 2 groups came back from the journal" in lines
    assert "prefix tokens reused 5" in lines
    assert "durable tokens thrown away 2" in lines
    assert "not yet journaled, lost 29 tokens at most" in lines
    assert "run finished at step 2, incarnation 2" in lines
    assert "prompts handed out 4, each in exactly one place: yes" in lines


@pytest.mark.parametrize(
    ("rewards", "curve"),
    [([], "no steps"), ([0.5], "0.500 ▁ 0.500"), ([0.0, 0.5, 1.0], "0.000 ▁▅█ 1.000"), ([1.0, 0.0], "1.000 █▁ 0.000")],
)
def test_reward_curve(rewards, curve):
    """Lowest and highest reward span the bars."""
    assert reward_curve(rewards) == curve


# --- folders -------------------------------------------------------------------------------------------------------


def test_a_foreign_folder_is_not_touched(tmp_path, capsys):
    """A folder with something in it that no demo made is refused: exit code 2, nothing removed."""
    (tmp_path / "thesis.tex").write_text("mine")

    assert run(["demo", "--dir", str(tmp_path)]) == 2
    assert "not of an earlier demo" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(UsageFault), _work_folder(tmp_path, keep=False):
        pass


def test_an_earlier_demo_is_replaced(tmp_path):
    """Its own folder is emptied, and kept at the end."""
    folder = tmp_path / "demo"
    with _work_folder(folder, keep=False) as first:
        (first / ".unlost-demo").touch()
        (first / "old").touch()
    with _work_folder(folder, keep=False) as second:
        assert os.listdir(second) == []
    assert folder.is_dir()


@pytest.mark.parametrize("keep", [False, True])
def test_temporary_folder(keep):
    """Removed at the end, unless it was asked to be kept."""
    with _work_folder(None, keep=keep) as folder:
        assert folder.is_dir()
    assert folder.exists() is keep
    if keep:
        folder.rmdir()


def test_example_must_be_one(tmp_path, capsys):
    """``--example`` of a folder without configuration or model script: said before anything is started."""
    assert run(["demo", "--dir", str(tmp_path / "d"), "--example", str(tmp_path)]) == 2
    assert "expected a folder with config.yaml and make_model.py" in capsys.readouterr().err


# --- the kill ------------------------------------------------------------------------------------------------------

# A parent with a child, and a daemon that has left the tree: its parent is gone, and it has a session of its own.
TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
daemon = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], \
start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(p.pid, flush=True)"
left = subprocess.run([sys.executable, "-c", daemon], capture_output=True, text=True).stdout.strip()
print(child.pid, left, flush=True)
time.sleep(60)
"""


def test_kill_reaches_children_and_those_who_left_the_tree():
    """All of them are gone when it returns, and a process with another mark lives on."""
    environment = os.environ | {MARKER: f"test-{os.getpid()}"}
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {MARKER: "another"}
    )
    process = subprocess.Popen([sys.executable, "-c", TREE], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        pids = [process.pid, *map(int, process.stdout.readline().split())]
        assert len(pids) == 3
        assert all(psutil.pid_exists(pid) for pid in pids)

        killed = kill_tree(process.pid, environment[MARKER])

        assert killed == 3
        assert process.wait(5) == -9
        deadline = time.monotonic() + 5
        while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in pids if _runs(pid)] == []
        assert bystander.poll() is None
    finally:
        process.stdout.close()
        for left in (process, bystander):
            left.kill()
            left.wait()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_quickstart_comes_with_the_package():
    """An installed ``unlost demo`` finds its files without a checkout."""
    names = {entry.name for entry in _packaged_example().iterdir()}

    assert {"config.yaml", "make_model.py", "prompts.jsonl", "reward.py"} <= names


def test_resources_are_declared_as_package_data():
    """… also from a wheel: each kind of file is listed."""
    import tomllib

    root = Path(__file__).resolve().parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    suffixes = {Path(pattern).suffix for pattern in declared["unlost.quickstart"]} | {".py"}

    assert {p.suffix for p in (root / "examples" / "quickstart").iterdir() if p.is_file()} <= suffixes
