"""The crash test: the real trainer on real Ray and TransferQueue, killed with SIGKILL at five proven moments."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.harness import MOMENTS, Driver, sealed_twice, trained_prompts
from unlost.journal import verify
from unlost.replay.export import trace_of
from unlost.replay.fold import fold_run
from unlost.replay.state import State
from unlost.replay.summary import prompt_sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
STEPS = 8
PROMPTS = 4
OVERRIDES = (
    f"grpo.max_steps={STEPS}",
    f"grpo.num_prompts_per_step={PROMPTS}",
    "grpo.num_generations_per_prompt=4",
    "generation.max_new_tokens=48",
    "generation.deterministic=true",
    "trainer.deterministic=true",
    "async_rl.sampler.max_lookahead_versions=0",
    "checkpointing.save_period=3",
    "journal.progress_interval_tokens=8",
    "workers.count=1",
    "ray.start_timeout_s=300",
)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart with its model made, in a folder of its own."""
    folder = tmp_path_factory.mktemp("quickstart")
    for name in ("config.yaml", "prompts.jsonl", "reward.py", "make_model.py"):
        (folder / name).write_bytes((EXAMPLE / name).read_bytes())
    model = folder / "model"
    subprocess.run([sys.executable, str(folder / "make_model.py"), str(model)], check=True, cwd=folder)
    return folder


def weights_digest(run: Path, state: State) -> str:
    """SHA-256 over the weights of the last checkpoint's trainer folder."""
    name = max(c.name for c in state.checkpoints if c.trainer_version == state.trainer_version)
    manifest = json.loads((run / "checkpoints" / name / "manifest.json").read_text())
    weights = {p: d for p, d in manifest["files"].items() if p.startswith("trainer/") and p.endswith(".safetensors")}
    assert weights, manifest["files"]
    return hashlib.sha256(json.dumps(sorted(weights.items())).encode()).hexdigest()


def check_finished(run: Path) -> State:
    """What holds of every finished run, killed or not: P1, P2, every prompt once, every byte sound."""
    state = fold_run(run)
    assert state.ended == "finished"
    assert state.trainer_version == STEPS
    assert prompt_sets(state)["holds"]
    assert trained_prompts(run) == dict.fromkeys(range(STEPS * PROMPTS), 1)
    assert sealed_twice(run) == []
    for folder in (run / "events", *sorted((run / "payloads").iterdir())):
        assert verify(folder).ok, folder
        for segment in folder.glob("*.zst") if shutil.which("zstd") else ():
            subprocess.run(["zstd", "-dcq", segment], check=True, stdout=subprocess.DEVNULL)
    return state


@pytest.fixture(scope="module")
def uninterrupted(example: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that a run without any kill ends with."""
    run = tmp_path_factory.mktemp("whole") / "run"
    driver = Driver(example / "config.yaml", run, (*OVERRIDES, f"run.dir={run}"))
    assert driver.finish() == 0, driver.output()
    return weights_digest(run, check_finished(run))


@pytest.mark.parametrize("turn", range(int(os.environ.get("UNLOST_CRASH_TURNS", "1"))))
def test_a_run_killed_at_five_moments_ends_as_if_it_had_not_been(
    turn: int, example: Path, uninterrupted: str, tmp_path: Path
) -> None:
    """Kills while generating, putting rows, saving, between claim and apply, and restoring: same steps, same bits.

    The live trace goes on after each, and ends as the export of the journal.
    """
    run = tmp_path / "run"
    driver = Driver(example / "config.yaml", run, (*OVERRIDES, f"run.dir={run}", "rollout_checkpointing.trace=true"))
    for moment in MOMENTS:
        state = driver.kill_at(moment)
        assert prompt_sets(state)["holds"], moment.name
    assert driver.finish() == 0, driver.output()
    state = check_finished(run)
    assert driver.kills == [m.name for m in MOMENTS]
    assert state.incarnation == len(MOMENTS) + driver.missed + 1
    assert weights_digest(run, state) == uninterrupted
    assert (run / "rollout_trace.jsonl").read_bytes() == b"".join(trace_of(run))
    if (record := os.environ.get("UNLOST_CRASH_RECORD")) is not None:
        with open(record, "a", encoding="utf-8") as file:
            file.write(f"{driver.kills} missed {driver.missed} incarnations {state.incarnation}\n")
