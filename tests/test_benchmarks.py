"""The benchmarks run, and their page is what their results say. Figures are not judged here: the machine is shared."""

import itertools
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.page import PAGE, load, render
from benchmarks.result import Saved, percentile, sig
from benchmarks.stream import Records, engine_events
from unlost.replay import events as ev
from unlost.replay.fold import fold_events

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_is_written_from_the_results():
    """docs/benchmarks.md holds nothing but what benchmarks/results/ says."""
    assert PAGE.read_text(encoding="utf-8") == render(load())


def test_made_up_events_are_a_legal_run():
    """The stream that sizes and speeds are measured on folds without a refusal, and trains every prompt once."""
    events = list(itertools.islice(engine_events(save_period=3), 12_000))
    state = fold_events(enumerate(events))

    trained = [g for e in events if isinstance(e, ev.StepClaimed) for g in e.groups]
    assert state.trainer_version > 10
    assert len(state.checkpoints) > 0
    assert trained == sorted(set(trained))


def test_writers_are_given_the_same_records():
    """A Struct for the journal and a dict for the others say the same; a dict leaves out only what is a default."""
    records = Records()
    for i in (0, 1, 77, 1234):
        struct, mapping = records.struct(i), dict(records.mapping(i))
        mapping.pop("kind")
        told = msgspec.structs.asdict(struct)
        defaults = {f.name: f.default for f in msgspec.structs.fields(struct)}
        if (receipt := told.pop("receipt", None)) is not None:
            told |= msgspec.structs.asdict(receipt)
            told["weight_spans"] = [list(span) for span in told["weight_spans"]]
        assert mapping == {name: told[name] for name in mapping}
        assert all(told[name] == defaults[name] for name in set(told) - set(mapping))


def test_percentiles_and_figures():
    """Percentiles are values that were measured; figures have three significant digits."""
    assert [percentile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]
    assert [sig(v) for v in (0, 0.0012, 0.123, 1.2345, 12.345, 123.45, 123456.0)] == [
        "0", "0.0012", "0.123", "1.23", "12.3", "123", "123,456"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "name", ["append", "flatout", "journal", "payload", "slow_sync", "ledger", "fold", "checkpoint_sim"]
)
def test_benchmarks_run(name, tmp_path):
    """Each benchmark that needs no Ray runs at small size and leaves a result."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", name, "--inside", "--quick", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=270, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    saved = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=Saved)
    assert saved.result.name == name
    assert all(len(row) == len(table.columns) for table in saved.result.tables for row in table.rows)
