"""The runner of the mutants: what counts as killed, that every mutant still applies, and that the page names them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.judge import is_assertion
from tests.mutants.run import (
    HERE,
    ROOT,
    Failure,
    Mutant,
    MutantError,
    all_mutants,
    choose,
    copy_of_the_code,
    load,
    page_rows,
    patch,
    run_tests,
    verdict,
)
from tests.simulation.model import Broken

MUTANT = Mutant(Path("m.diff"), "t", "tests/a.py::test_b[c]")
TEST = MUTANT.test


@pytest.mark.parametrize(
    ("code", "failures", "expected"),
    [
        (0, [], "survived"),
        (1, [Failure(TEST, assertion=True, error="")], ""),
        (1, [Failure(TEST, assertion=False, error="NameError")], "no assertion failed"),
        (1, [Failure("tests/a.py::test_b[cd]", assertion=True, error="")], "another test failed"),
        (1, [Failure("tests/z.py::test_other", assertion=True, error="")], "another test failed"),
        (2, [Failure("tests/a.py", assertion=True, error="")], "pytest ended with 2"),
        (-1, [], "not done"),
    ],
)
def test_only_a_failing_assertion_of_the_named_test_kills(code: int, failures: list[Failure], expected: str) -> None:
    """An error that is no assertion, another test, a collection error or a time-out kill nothing."""
    found = verdict(code, "", failures, MUTANT)
    assert found.startswith(expected) if expected else found == ""


def test_without_a_parameter_any_case_of_the_named_test_kills() -> None:
    """But not a test whose name only begins like it."""
    mutant = Mutant(Path("m.diff"), "t", "tests/a.py::test_b")
    assert verdict(1, "", [Failure("tests/a.py::test_b[c]", assertion=True, error="")], mutant) == ""
    assert verdict(1, "", [Failure("tests/a.py::test_bc", assertion=True, error="")], mutant) != ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AssertionError("1 == 2"), True),
        (Broken("rule 3"), True),
        (pytest.fail.Exception("DID NOT RAISE <class 'KeyError'>"), True),
        (pytest.fail.Exception("Timeout (>1.0s) from pytest-timeout."), False),
        (KeyError("assert"), False),
        (ImportError("AssertionError"), False),
    ],
)
def test_assertions_are_told_from_errors(error: BaseException, expected: bool) -> None:
    """The model's complaints are assertions; a time-out and whatever else is raised are not."""
    assert is_assertion(error) is expected


def test_pytest_tells_the_judge(tmp_path: Path) -> None:
    """In a run as that of a mutant: which test failed, and how."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "mutants").symlink_to(HERE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    (tmp_path / "test_a.py").write_text("def test_b():\n    raise KeyError('assert')\n")
    code, output, failures = run_tests(tmp_path, ["test_a.py"], 60)
    assert code == 1, output
    assert failures == [Failure("test_a.py::test_b", assertion=False, error="KeyError: 'assert'")]


def test_a_mutant_without_its_two_lines_is_refused(tmp_path: Path) -> None:
    """What it breaks and which test (a file is not enough) must notice stand at its top."""
    path = tmp_path / "m.diff"
    path.write_text("# only a title\n--- a/x\n+++ b/x\n")
    with pytest.raises(MutantError, match="two lines are expected"):
        load(path)
    path.write_text("# title\n# killed by: tests/engine/test_payloads.py\n--- a/x\n+++ b/x\n")
    with pytest.raises(MutantError, match="two lines are expected"):
        load(path)


def test_every_mutant_applies_to_the_code_and_comes_off_again() -> None:
    """A diff that the code has moved away from is an error, not a survivor."""
    with copy_of_the_code() as copy:
        layers = ("journal", "replay", "engine", "cli")
        before = {p: p.read_bytes() for name in layers for p in (copy / name).rglob("*") if p.is_file()}
        for mutant in all_mutants():
            patch(copy, mutant)
            assert any(p.read_bytes() != body for p, body in before.items()), mutant.name
            patch(copy, mutant, undo=True)
            assert all(p.read_bytes() == body for p, body in before.items()), mutant.name


def test_a_diff_that_does_not_apply_is_an_error(tmp_path: Path) -> None:
    """Named, with what patch said."""
    diff = tmp_path / "m.diff"
    diff.write_text(
        "# t\n# killed by: x::y\n--- a/engine/train.py\n+++ b/engine/train.py\n@@ -1 +1 @@\n-no such line\n+x\n"
    )
    (tmp_path / "copy" / "engine").mkdir(parents=True)
    (tmp_path / "copy" / "engine" / "train.py").write_text("another line\n")
    with pytest.raises(MutantError, match="does not apply"):
        patch(tmp_path / "copy", load(diff))


@pytest.mark.slow
def test_every_killing_test_exists() -> None:
    """The named function is in the named file, and so is the name of its case."""
    for mutant in all_mutants():
        file, _, test = mutant.test.partition("::")
        function, _, case = test.partition("[")
        tree = ast.parse((ROOT / file).read_text())
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in functions, mutant.name
        words = {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        assert not case or case.removesuffix("]") in words, mutant.name


def test_names_are_unique_and_wanted_ones_are_found() -> None:
    """One can be run by its name, a family by its folder; a name that fits nothing is an error."""
    names = [m.name for m in all_mutants()]
    assert len(names) == len(set(names))
    assert [m.name for m in choose([names[0]])] == [n for n in names if names[0] in n]
    assert {m.family for m in choose(["journal/"])} == {"journal"}
    with pytest.raises(MutantError, match="no mutant"):
        choose([names[0], "no_such_mutant"])


def test_an_unknown_name_ends_with_2() -> None:
    """Not as if everything had been killed."""
    command = [sys.executable, "-m", "tests.mutants", "no_such_mutant"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert (done.returncode, done.stderr.strip()) == (2, "no mutant's FAMILY/NAME contains 'no_such_mutant'")


def test_every_rule_of_the_protocol_has_a_mutant() -> None:
    """Rules 1 to 23, each removed at least once."""
    titles = [m.title for m in all_mutants()]
    missing = [rule for rule in range(1, 24) if not any(title.startswith(f"Rule {rule}:") for title in titles)]
    assert missing == []


def test_the_page_of_the_protocol_names_every_mutant_of_it() -> None:
    """Each with its rule and the test that notices; and none that is not there (``python -m tests.mutants --rows``)."""
    lines = (ROOT / "docs" / "protocol.md").read_text().splitlines()
    head = lines.index("| rule | mutation | what it does | killed by |")
    end = lines.index("", head)
    assert lines[head + 2 : end] == page_rows()
    families = {m.family for m in all_mutants()}
    named = {
        word
        for line in lines
        for word in line.split("`")[1::2]
        if word.partition("/")[0] in families and "." not in word
    }
    assert {f"recovery/{path.stem}" for path in (HERE / "recovery").glob("*.diff")} <= named
    assert named <= {f"{m.family}/{m.name}" for m in all_mutants()}
