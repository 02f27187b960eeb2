"""Reward functions: found where the user keeps them, and their faults named."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unlost.engine.protocols import AttemptError
from unlost.engine.rewards import Reward, RewardError, load_reward


@pytest.fixture(autouse=True)
def _restore_path() -> Any:
    before = list(sys.path)
    yield
    sys.path[:] = before


def write(folder: Path, text: str, name: str = "my_rewards.py") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_a_function_beside_the_configuration_is_found_and_called_with_all_four(tmp_path: Path) -> None:
    """It gets prompt, response, answer and the whole row, by position."""
    write(
        tmp_path, "def score(prompt, response, answer, row):\n    return len(prompt + response + answer) + row['k']\n"
    )
    reward = load_reward("my_rewards:score", tmp_path)
    assert reward("a", "bb", "ccc", {"k": 10}) == 16.0
    assert reward.name == "my_rewards:score"


def test_two_folders_may_have_a_module_of_the_same_name(tmp_path: Path) -> None:
    """Examples all call theirs reward.py; none gets another's."""
    a = write(tmp_path / "a", "def score(p, r, a, row): return 1\n", "reward.py")
    b = write(tmp_path / "b", "def score(p, r, a, row): return 2\n", "reward.py")
    assert [load_reward("reward:score", folder)("", "", None, {}) for folder in (a, b, a)] == [1, 2, 1]


def test_a_reward_module_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    """And what lies on sys.path is found without a folder, packages too."""
    write(tmp_path, "VALUE = 4\n", "beside_reward.py")
    write(tmp_path, "import beside_reward\ndef score(*args): return beside_reward.VALUE\n")
    assert load_reward("my_rewards:score", tmp_path)("", "", None, {}) == 4
    write(tmp_path / "pack_of_rewards", "", "__init__.py")
    write(tmp_path / "pack_of_rewards", "def score(prompt, response, answer, row=None): return True\n", "inner.py")
    assert load_reward("pack_of_rewards.inner:score")("", "", None, {}) == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards", "must be module:function"),
        (":score", "must be module:function"),
        ("my_rewards:", "must be module:function"),
        ("no_such_module:score", "no module 'no_such_module' in .*put no_such_module.py beside"),
        ("no_such.module:score", "no module 'no_such.module'"),
        ("my_rewards:scor", r"my_rewards.py has no 'scor'; did you mean 'score'"),
        ("my_rewards:LIMIT", "is not callable"),
        ("my_rewards:two", r"two\(prompt, response\) can't be called with \(prompt, response, answer, row\)"),
        ("my_rewards:keyword", "can't be called"),
        ("my_rewards:later", "is async"),
        ("needs_more:score", "needs_more.py failed: ModuleNotFoundError: No module named 'not_installed'"),
        ("broken:score", "broken.py failed: SyntaxError"),
    ],
)
def test_what_can_be_known_before_the_run_is(tmp_path: Path, name: str, message: str) -> None:
    """Each fault has its own sentence."""
    write(
        tmp_path,
        "LIMIT = 3\ndef score(p, r, a, row): return 1\ndef two(prompt, response): return 1\n"
        "def keyword(prompt, response, answer, row, *, scale): return 1\nasync def later(p, r, a, row): return 1\n",
    )
    write(tmp_path, "import not_installed\n", "needs_more.py")
    write(tmp_path, "def score(:\n", "broken.py")
    with pytest.raises(RewardError, match=message):
        load_reward(name, tmp_path)


@pytest.mark.parametrize(
    ("result", "expected"), [(True, 1.0), (2, 2.0), (np.float32(0.5), 0.5), (Fraction(1, 4), 0.25)]
)
def test_numbers_of_any_kind_are_rewards(result: Any, expected: float) -> None:
    """Booleans, integers, numpy scalars."""
    reward = Reward("m:f", lambda *_: result)("", "", None, {})
    assert (type(reward), reward) == (float, expected)


@pytest.mark.parametrize("result", [None, "1.0", float("nan"), float("inf"), [1.0], 1j, "x" * 500])
def test_anything_else_fails_the_attempt(result: Any) -> None:
    """As a fault of the data, with the value, shortened."""
    with pytest.raises(AttemptError) as caught:
        Reward("m:f", lambda *_: result)("", "", None, {})
    assert caught.value.kind == "data"
    assert "m:f returned" in caught.value.cause
    assert len(caught.value.cause) < 150


def test_an_exception_fails_the_attempt_with_its_cause() -> None:
    """The run goes on; the cause names function, type and message."""
    with pytest.raises(AttemptError) as caught:
        Reward("m:f", lambda *_: {}["missing"])("", "", None, {})
    assert (caught.value.kind, caught.value.cause) == ("data", "reward m:f raised KeyError: 'missing'")
