"""The commands that read a run: what they print is what the journal holds, and they change nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unlost.cli.main import run
from unlost.replay.events import EVENT_TYPES

from .story import story, write_run

STORY = story()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def command(capsys, *args: str) -> tuple[int, str, str]:
    code = run([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- replay --------------------------------------------------------------------------------------------------------


def test_replay_json_holds_the_folded_state(capsys, run_folder):
    """Offset, incarnation, trainer, loader, dispatch index, groups with siblings, and the sets of P1."""
    code, out, err = command(capsys, "replay", run_folder, "--format", "json")
    state = json.loads(out)

    assert (code, err) == (0, "")
    assert (state["offset"], state["incarnation"]) == (len(STORY), 1)
    assert state["trainer"]["version"] == 1
    assert state["loader"] == {"epoch": 0, "position": 4}
    assert state["dispatch_index"] == 1
    assert state["prompts"]["trained"] == [0, 1]
    assert state["prompts"]["unfinished"] == [2, 3]
    assert state["prompts"]["handed_out"] == 4
    assert state["prompts"]["holds"] is True
    statuses = {g["group"]: [s["status"] for s in g["siblings"]] for g in state["groups"]["unfinished"]}
    assert statuses == {2: ["sealed", "dispatched"], 3: ["dispatched", "idle"]}


def test_replay_at_an_offset_is_the_state_right_after_that_event(capsys, run_folder):
    """Time travel: after the claim the groups are the trainer's, not trained yet."""
    claim = next(i for i, e in enumerate(STORY) if type(e).__name__ == "StepClaimed")

    _, out, _ = command(capsys, "replay", run_folder, "--at", claim, "--format", "json")
    state = json.loads(out)

    assert state["offset"] == claim + 1
    assert state["prompts"]["claimed"] == [0, 1]
    assert state["trainer"]["version"] == 0


def test_replay_table_says_the_same_to_people(capsys, run_folder):
    """The default output names where the run stands and marks each sibling."""
    code, out, _ = command(capsys, "replay", run_folder)
    lines = [" ".join(line.split()) for line in out.splitlines()]

    assert code == 0
    assert "run story" in lines
    assert "trainer version 1 (branch 0)" in lines
    assert "unfinished 2 2-3" in lines
    assert "handed out 4 the sum" in lines
    assert any(line.startswith("2 p2 0 unfinished 1 1 #> 12 tokens") for line in lines), out


@pytest.mark.parametrize("offset", [999, 22_000])
def test_replay_past_the_end_says_what_there_is(capsys, run_folder, offset):
    """One line, exit code 1, with the offsets that exist."""
    code, out, err = command(capsys, "replay", run_folder, "--at", offset)

    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"offset {offset}" in err
    assert f"0..{len(STORY) - 1}" in err


# --- events --------------------------------------------------------------------------------------------------------


def test_events_json_has_every_event_in_order(capsys, run_folder):
    """One JSON object a line: offset, name, and the fields by name."""
    _, out, _ = command(capsys, "events", run_folder, "--format", "json")
    lines = [json.loads(line) for line in out.splitlines()]

    assert [line["offset"] for line in lines] == list(range(len(STORY)))
    assert [line["event"] for line in lines] == [type(e).__name__ for e in STORY]
    sealed = lines[-1]
    assert (sealed["group"], sealed["sibling"], sealed["receipt"]["tokens"]) == (2, 0, 12)
    assert lines[2]["prompts"][1]["sample_id"] == "p1"


def test_events_from_to_and_kind(capsys, run_folder):
    """Both ends are inclusive; the kind may be written as people write it."""
    _, out, _ = command(
        capsys, "events", run_folder, "--from", 5, "--to", 9, "--kind", "attempt_sealed", "--format", "json"
    )

    assert [json.loads(line)["offset"] for line in out.splitlines()] == [8, 9]


def test_events_of_a_group_include_its_admission_and_its_step(capsys, run_folder):
    """A group's life: reserved with its batch, admitted with it, dispatched, sealed, committed, claimed."""
    _, out, _ = command(capsys, "events", run_folder, "--group", 1, "--format", "json")
    names = [json.loads(line)["event"] for line in out.splitlines()]

    assert names == [
        "BatchReserved",
        "BatchAdmitted",
        *["AttemptDispatched"] * 2,
        *["AttemptSealed"] * 2,
        "GroupCommitted",
        "StepClaimed",
    ]


def test_events_table_is_a_line_each(capsys, run_folder):
    """Offset, seconds, name, fields."""
    _, out, _ = command(capsys, "events", run_folder, "--kind", "StepApplied")

    assert out.split()[:3] == ["15", "0.008000", "StepApplied"]
    assert "reward_mean=0.25" in out


def test_events_unknown_kind_names_the_nearest(capsys, run_folder):
    """A usage error: exit code 2, one line."""
    code, _, err = command(capsys, "events", run_folder, "--kind", "StepAplied")

    assert code == 2
    assert "did you mean StepApplied?" in err


def test_every_event_can_be_listed(tmp_path, capsys):
    """No kind of event breaks the listing: each is built with empty values and shown in both formats."""
    import msgspec

    from unlost.cli.events import _line, fields
    from unlost.replay.events import StateImage

    for kind in EVENT_TYPES:
        values = {f.name: _empty(f) for f in msgspec.structs.fields(kind)}
        event = kind(**values)
        shown = fields(event)
        assert kind.__name__ in _line(0, event)
        json.dumps(shown)
        assert ("state_bytes" in shown) == (kind is StateImage)


def _empty(field):
    import msgspec

    if field.name == "state":
        return msgspec.Raw(b"\xc0")
    if field.name == "receipt":
        return STORY[-1].receipt
    text = str(field.type)
    for name, value in (("tuple", ()), ("dict", {}), ("str", ""), ("float", 0.0), ("bool", False), ("int", 0)):
        if name in text:
            return value
    raise AssertionError(text)


WITH_CTRL_C = """
import signal
from unlost.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run behind an &
main()
"""


@pytest.mark.slow
def test_events_follow_shows_what_a_running_writer_appends(tmp_path):
    """Events appear while the writer is open; Ctrl-C ends it with 130."""
    from unlost.journal import JournalWriter

    with JournalWriter.open(tmp_path / "events", EVENT_TYPES, journal_id="story") as writer:
        writer.append(STORY[0])
        writer.sync()
        process = subprocess.Popen(
            [sys.executable, "-c", WITH_CTRL_C, "events", str(tmp_path), "--follow", "--format", "json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert json.loads(process.stdout.readline())["event"] == "RunStarted"
            writer.append(STORY[1])
            writer.sync()
            assert json.loads(process.stdout.readline())["event"] == "WorkerStarted"
            process.send_signal(signal.SIGINT)
            process.stdout.close()
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait()


# --- verify --------------------------------------------------------------------------------------------------------


def test_verify_clean_run(capsys, run_folder):
    """All journals of the run are read; nothing is changed; exit code 0."""
    before = bytes_below(run_folder)

    code, out, err = command(capsys, "verify", run_folder, "--format", "json")
    report = json.loads(out)

    assert (code, err, report["ok"]) == (0, "", True)
    assert set(report["journals"]) == {"events", "payloads/i00001-w00000"}
    assert report["journals"]["events"]["events"] == len(STORY)
    assert bytes_below(run_folder) == before


def test_verify_table_and_one_journal_alone(capsys, run_folder):
    """A journal's own folder can be given too."""
    code, out, _ = command(capsys, "verify", run_folder / "events")

    assert code == 0
    assert f"events: clean, {len(STORY)} events, offsets 0 to {len(STORY) - 1}" in out
    assert ", 0 events, " not in out
    assert out.rstrip().endswith("no damage")


def test_verify_names_the_damaged_place(tmp_path, capsys):
    """A flipped byte in a durable frame: exit code 1, with segment, byte and last good offset."""
    folder = write_run(tmp_path)
    segment = next((folder / "events").glob("*.zst"))
    content = bytearray(segment.read_bytes())
    content[-10] ^= 0x40
    segment.write_bytes(content)

    code, out, err = command(capsys, "verify", folder, "--format", "json")
    report = json.loads(out)

    assert (code, err, report["ok"]) == (1, "", False)
    bad = [s for s in report["journals"]["events"]["segments"] if s["state"] == "damaged"]
    assert [s["segment"] for s in bad] == [segment.name]
    assert 0 < bad[0]["byte"] < len(content)
    assert report["journals"]["payloads/i00001-w00000"]["ok"] is True

    code, out, _ = command(capsys, "verify", folder)
    assert code == 1
    assert out.rstrip().endswith("damaged: events")

    for name in ("replay", "events"):
        code, _, err = command(capsys, name, folder)
        assert code == 1
        assert segment.name in err
        assert err.count("\n") == 1


# --- what is not a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["replay", "events", "verify"])
def test_not_a_run(capsys, tmp_path, name):
    """An absent or empty folder is said to be no run, in one line, and is left alone."""
    for folder in (tmp_path, tmp_path / "absent"):
        code, out, err = command(capsys, name, folder)

        assert (code, out) == (2, "")
        assert str(folder) in err
        assert err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_reading_never_writes(capsys, run_folder):
    """replay and events leave every byte of the run as it was."""
    before = bytes_below(run_folder)
    for name in ("replay", "events"):
        assert command(capsys, name, run_folder)[0] == 0
    assert bytes_below(run_folder) == before


def test_a_closed_pipe_ends_quietly(run_folder):
    """``unlost events RUN | head -1`` prints no traceback."""
    shell = f"{sys.executable} -m unlost.cli events {run_folder} | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120, check=True)

    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
