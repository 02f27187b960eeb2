"""``unlost train`` around the engine: arguments, signals, deadline, exit codes, one-line errors.

The engine itself is replaced by a few lines here, in a process of its own; real runs are tested with the engine.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from unlost.cli.main import run
from unlost.cli.progress_view import PlainView, describe
from unlost.engine.progress import EXIT_CODES, Progress, StopRequest

CONFIG = "model: {path: m}\ndata: {train: p.jsonl}\nreward: {function: 'r:f'}\nstop: {grace_s: 30}\n"

# What stands in for the engine: it reports, waits until asked to stop (twice, if so told), and says what it was asked.
ENGINE = """
import sys, threading, time, types
from unlost.engine.progress import EXIT_CODES, Outcome, Progress
from unlost.journal.errors import UnlostError

def run_training(config, *, restore, on_progress, stop, take_over):
    # This stands in for the engine.
    assert threading.current_thread() is not threading.main_thread()
    {body}

def wait(stop, on_progress, level):
    heard = threading.Event()
    stop.listen(heard.set)
    on_progress(Progress(step=1, max_steps=2, reward_mean=0.5, phase="running"))
    deadline = time.monotonic() + 20
    while stop.level < level and time.monotonic() < deadline:
        heard.wait(0.01)
        if heard.is_set() and stop.level == 1:
            print("LEVEL 1", flush=True)
            heard.clear()
    return Outcome(reason=stop.reason or "finished", exit_code=EXIT_CODES[stop.reason or "finished"],
                   detail=f"{{stop.detail}} level {{stop.level}}", run_dir='the run')

module = types.ModuleType("unlost.engine.launch")
module.run_training = run_training
sys.modules["unlost.engine.launch"] = module
from unlost.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts ``unlost`` with a given engine; kills what is left."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    started = []

    def begin(body: str, *args: str, wait_for: str = "step 1/2"):
        code = ENGINE.format(body=textwrap.indent(body, "    ").strip())
        process = subprocess.Popen(
            [sys.executable, "-c", code, *(args or ("train", "c.yaml"))],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        while wait_for:
            line = process.stdout.readline()
            if wait_for in line:
                break
            assert line, process.stderr.read()
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def finish(process) -> tuple[int, str, str]:
    # Not communicate(): it would miss what readline has read ahead. A process that hangs is ended by the test's limit.
    out, err = process.stdout.read(), process.stderr.read()
    return process.wait(30), out, err


def test_finished(start):
    """Exit code 0, the run's folder is named."""
    code, out, err = finish(start("return wait(stop, on_progress, 0)"))

    assert (code, err) == (0, "")
    assert "finished:  level 0" in out
    assert "run folder: the run" in out


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 75, "signal"), (signal.SIGUSR1, 75, "signal")],
)
def test_a_signal_ends_the_run_in_good_order(start, number, code, reason):
    """Ctrl-C, SIGTERM and the configured signal each reach the engine once, at the first level."""
    process = start("return wait(stop, on_progress, 1)")
    process.send_signal(number)
    got, out, err = finish(process)

    assert got == code
    assert f"{reason}: {signal.Signals(number).name} level 1; the same command goes on from here" in out
    assert err == "stopping; once more: without a checkpoint\n"


@pytest.mark.slow
def test_a_second_interrupt_is_harsher_and_a_third_ends_at_once(start):
    """Level 2 skips the checkpoint; the third Ctrl-C does not wait for anything."""
    process = start("return wait(stop, on_progress, 2)")
    process.send_signal(signal.SIGINT)
    while "LEVEL 1" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert code == 130
    assert "SIGINT level 2" in out

    stuck = start("return wait(stop, on_progress, 3)")
    for _ in range(3):
        stuck.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert stuck.wait(5) == 130


@pytest.mark.slow
def test_grace_ends_the_wait_for_a_checkpoint(start):
    """After ``stop.grace_s`` the engine is asked again, so that an orderly end comes in time."""
    process = start("return wait(stop, on_progress, 2)", "train", "c.yaml", "-o", "stop.grace_s=0.5")
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)

    assert code == 75
    assert "SIGTERM level 2" in out
    assert time.monotonic() - before > 0.4


@pytest.mark.slow
def test_deadline_less_grace_asks_to_stop(start):
    """The stop begins early enough that the command can be gone by its deadline."""
    args = ("train", "c.yaml", "-o", "stop.grace_s=5", "-o", "stop.deadline_s=6")
    code, out, _ = finish(start("return wait(stop, on_progress, 1)", *args))

    assert code == 75
    assert "deadline: deadline of 6 s level 1" in out


def test_an_expected_error_is_one_line(start):
    """An UnlostError from the engine: exit code 1, no traceback."""
    code, out, err = finish(start("raise UnlostError('run: the dataset differs\\n a from b')", wait_for=""))

    assert (code, out) == (1, "")
    assert err == "unlost: run: the dataset differs a from b\n"


def test_debug_shows_the_traceback(start):
    """``--debug`` may stand anywhere."""
    args = ("train", "c.yaml", "--debug")
    code, _, err = finish(start("raise UnlostError('so it was')", *args, wait_for=""))

    assert code == 1
    assert "Traceback" in err
    assert "run_training" in err


def test_a_defect_is_not_hidden(start):
    """What nobody expected keeps its traceback."""
    code, _, err = finish(start("raise ZeroDivisionError", wait_for=""))

    assert code == 1
    assert "Traceback" in err
    assert "ZeroDivisionError" in err


def test_a_failed_run_says_why_on_stderr(start):
    """The engine's own verdict, one line, exit code 1."""
    body = "return Outcome(reason='failed', exit_code=1, detail='disk full:\\n no', run_dir='.')"
    code, _, err = finish(start(body, wait_for=""))

    assert (code, err) == (1, "unlost: failed: disk full: no\n")


def test_configuration_and_restore_reach_the_engine(start):
    """Overrides and ``--restore`` are handed on as given."""
    body = "print(config.grpo.max_steps, restore, take_over, flush=True); return wait(stop, on_progress, 0)"
    args = ("train", "c.yaml", "-o", "grpo.max_steps=7", "--restore", "12", "--take-over")

    code, _, _ = finish(start(body, *args, wait_for="7 12 True"))

    assert code == 0


# --- usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["train", "absent.yaml"], "absent.yaml: cannot be read"),
        (["train", "c.yaml", "-o", "grpo.max_step=1"], "did you mean 'grpo.max_steps'?"),
        (["train", "c.yaml", "--restore", "newest"], "expected latest, none or a step number, got 'newest'"),
        (["train", "c.yaml", "--restor", "1"], "--restor"),
        (["train", "c.yaml", "d.yaml"], "d.yaml"),
        (["trian", "c.yaml"], "trian"),
        (["replay", "x", "--at", "minus"], "--at"),
        (["replay", "x", "--format", "xml"], "xml"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(tmp_path, monkeypatch, capsys, args, part):
    """Typing errors and configuration errors alike; nothing is started, nothing written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)

    code = run(args)
    captured = capsys.readouterr()

    assert (code, captured.out) == (2, "")
    assert part in captured.err
    assert captured.err.startswith("unlost: ")
    assert captured.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["c.yaml"]


@pytest.mark.parametrize("command", ["train", "replay", "plan", "export", "repair", "prune", "fork", "diff", "report"])
def test_a_command_without_its_arguments_says_so(capsys, command):
    """After its help: a reason, not an empty message."""
    assert run([command]) == 2
    err = capsys.readouterr().err
    assert err == f"unlost: its arguments are missing (see `unlost {command} --help`)\n"


def test_config_prints_what_a_file_comes_to(tmp_path, capsys):
    """As YAML that reads back, or as JSON."""
    (tmp_path / "c.yaml").write_text(CONFIG)

    assert run(["config", str(tmp_path / "c.yaml"), "-o", "grpo.max_steps=7", "--format", "json"]) == 0
    resolved = json.loads(capsys.readouterr().out)

    assert resolved["grpo"]["max_steps"] == 7
    assert resolved["model"]["path"] == str(tmp_path / "m")
    assert run(["config", str(tmp_path / "c.yaml")]) == 0
    assert f"  train: {tmp_path / 'p.jsonl'}\n" in capsys.readouterr().out


def test_warnings_are_lines_on_stderr(tmp_path, capsys):
    """What is odd but harmless is said once, beside the output and not in it."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    args = ["config", str(tmp_path / "c.yaml"), "-o", "checkpointing.enabled=false", "--format", "json"]

    assert run(args) == 0
    captured = capsys.readouterr()

    json.loads(captured.out)
    assert captured.err.startswith("unlost: warning: ")
    assert captured.err.count("\n") == 1
    assert "checkpointing.enabled is false" in captured.err


def test_version(capsys):
    """``unlost --version`` names the installed version."""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("unlost 0.")


def test_help_loads_nothing_heavy():
    """``--help`` imports no training package, no journal and no DuckDB: that is what keeps it fast."""
    code = (
        "import sys\n"
        "from unlost.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = {'ray', 'torch', 'transformers', 'duckdb', 'numpy', 'unlost.engine', 'unlost.journal'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


# --- progress ------------------------------------------------------------------------------------------------------


def test_plain_progress_is_a_line_per_step_and_message(capsys):
    """Not on a terminal: a line when step or phase change, messages once, nothing in between."""
    view = PlainView()
    for progress in (
        Progress(step=1, max_steps=9, phase="running"),
        Progress(step=1, max_steps=9, phase="running", in_flight=3),
        Progress(step=1, max_steps=9, phase="running", message="worker 2 replaced"),
        Progress(step=2, max_steps=9, phase="running", reward_mean=0.25),
    ):
        view.update(progress)
    lines = capsys.readouterr().out.splitlines()

    assert [line.split("  ")[0] for line in lines] == ["step 1/9", "worker 2 replaced", "step 2/9"]
    assert "reward 0.250" in lines[-1]


def test_description_has_what_a_person_watches():
    """Step, reward, in flight, buffer, tokens/s, durable lag; the phase unless it just runs."""
    line = describe(
        Progress(
            step=3, max_steps=9, in_flight=4, buffered=5, tokens_per_s=1234.5, durable_lag_s=0.02, phase="stopping"
        )
    )

    assert line == (
        "step 3/9  reward -  in flight 4  buffer 5  unfinished 0  1,234 tokens/s  durable lag 20 ms  [stopping]"
    )


# --- the stop request ----------------------------------------------------------------------------------------------


def test_stop_request_levels_and_reason():
    """The first reason stays; further calls only raise the level, up to two."""
    stop = StopRequest()
    assert (stop.level, stop.reason, stop.detail) == (0, None, "")
    for _ in range(3):
        stop.set("signal", "SIGTERM")
        stop.set("deadline", "late")

    assert (stop.level, stop.reason, stop.detail) == (2, "signal", "SIGTERM")


def test_stop_request_tells_late_listeners_too():
    """Whoever listens after the request is told at once: none is missed."""
    stop = StopRequest()
    heard = []
    stop.listen(lambda: heard.append("early"))
    stop.set("signal")
    stop.listen(lambda: heard.append("late"))
    stop.set("signal")

    assert heard == ["early", "late", "early", "late"]


def test_stop_request_from_many_threads():
    """Concurrent calls lose no request: each listener is told each time."""
    stop = StopRequest()
    heard = []
    stop.listen(lambda: heard.append(1))
    threads = [threading.Thread(target=stop.set, args=("signal",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (len(heard), stop.level) == (16, 2)


def test_exit_codes():
    """What scripts around the command rely on."""
    assert EXIT_CODES == {"finished": 0, "failed": 1, "interrupted": 130, "signal": 75, "deadline": 75}
