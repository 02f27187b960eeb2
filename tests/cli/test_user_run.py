"""What README tells a user to do, word for word, on real parts; and the demo, as an installed command runs it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
UNLOST = Path(sys.executable).with_name("unlost")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.slow


def block(language: str, having: str) -> str:
    found = [b for b in re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if having in b]
    assert len(found) == 1, (language, having)
    return found[0]


def unlost(folder: Path, *args: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(UNLOST), *args], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """README's three files and a model folder of one's own, in an otherwise empty folder."""
    folder = tmp_path_factory.mktemp("mine")
    model = folder.parent / "some-model"
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart" / "make_model.py"), str(model)],
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (folder / "prompts.jsonl").write_text(block("json", '"prompt"'))
    (folder / "score.py").write_text(block("python", "def score"))
    config = block("yaml", "model:")
    assert "/path/to/model" in config
    (folder / "config.yaml").write_text(config.replace("/path/to/model", str(model)))
    return folder


@pytest.mark.timeout(400)
def test_readme_run_trains_and_can_be_looked_at(mine):
    """Own prompts, own model, own reward: the commands of README, in its order, and the figures they give."""
    assert unlost(mine, "config", "config.yaml").returncode == 0

    done = unlost(mine, "train", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    run = f"runs/{mine.name}"
    state = json.loads(unlost(mine, "replay", run, "--format", "json").stdout)
    assert state["trainer"]["version"] == 20
    assert state["prompts"]["holds"] is True
    assert state["ended"] == "finished"
    assert "BatchReserved" in unlost(mine, "events", run, "--group", "3").stdout
    assert unlost(mine, "verify", run).returncode == 0

    again = unlost(mine, "train", "config.yaml")
    assert again.returncode == 0, again.stderr
    assert json.loads(unlost(mine, "replay", run, "--format", "json").stdout)["trainer"]["version"] == 20

    more = unlost(mine, "train", "config.yaml", "-o", "grpo.max_steps=22", "-o", "grpo.learning_rate=1e-4")
    assert more.returncode == 0, more.stderr
    assert json.loads(unlost(mine, "replay", run, "--format", "json").stdout)["trainer"]["version"] == 22

    other = unlost(mine, "train", "config.yaml", "-o", "generation.temperature=0.5")
    assert other.returncode in (1, 2)
    assert "generation.temperature" in other.stderr
    assert "0.5" in other.stderr
    assert "1.0" in other.stderr
    assert other.stderr.count("\n") == 1


@pytest.mark.timeout(400)
def test_sigterm_of_a_real_run_is_an_orderly_end(mine):
    """With Ray's own handlers in the process: exit code 75, a durable RunEnded, a checkpoint, and nothing left behind.

    Ray's core would print a stack and abort the process three seconds after a SIGTERM: its handler must not run.
    """
    environment = ENVIRONMENT | {"UNLOST_TEST_MARK": str(os.getpid())}
    command = [str(UNLOST), "train", "config.yaml", "-o", "run.dir=stopped", "-o", "grpo.max_steps=1000"]
    process = subprocess.Popen(
        command, cwd=mine, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        step = next(
            int(m[1]) for line in process.stdout if (m := re.match(r"step (\d+)/\d+ .*(?<!\])$", line)) and m[1] != "0"
        )
        process.send_signal(signal.SIGTERM)
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 75, rest + errors
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
    assert errors == "stopping; once more: without a checkpoint\n"
    assert "signal: SIGTERM; the same command goes on from here" in rest
    state = json.loads(unlost(mine, "replay", "stopped", "--format", "json").stdout)
    assert state["ended"] == "signal"
    assert state["trainer"]["version"] >= step
    assert state["checkpoints"][-1]["version"] == state["trainer"]["version"]
    assert [p.pid for p in psutil.process_iter() if _has_mark(p, environment["UNLOST_TEST_MARK"])] == []


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("UNLOST_TEST_MARK") == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


@pytest.mark.timeout(400)
def test_demo_shows_a_kill_and_a_resume(tmp_path):
    """`unlost demo` from an empty folder: exit code 0, the kill and the figures in its output, no process left."""
    done = unlost(tmp_path, "demo", "--dir", "demo", timeout=360)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any(re.match(r"\[2\] kill -9 of \d+ processes", line) for line in lines)
    assert "finished siblings generated again 0" in lines
    assert "groups trained twice 0" in lines
    assert any(line.startswith("run finished at step") for line in lines)
    run = next((tmp_path / "demo" / "runs").iterdir())
    assert unlost(tmp_path, "verify", str(run)).returncode == 0
