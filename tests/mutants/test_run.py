"""The runner of the mutants: what counts as killed, and that every mutant still applies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.run import FOLDERS, Mutant, MutantError, copy_of_the_code, load, patch, verdict

MUTANT = Mutant(Path("m.diff"), "t", "tests/a.py::test_b[c]")
ALL = sorted(path for folder in FOLDERS for path in folder.rglob("*.diff"))


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (0, "1 passed", "survived"),
        (1, "E   AssertionError: no\nFAILED tests/a.py::test_b[c] - x", ""),
        (1, "E   Broken: rule 3: no\nFAILED tests/a.py::test_b[c] - x", ""),
        (1, "E   Failed: DID NOT RAISE\nFAILED tests/a.py::test_b[c]", ""),
        (1, "E   NameError: x\nFAILED tests/a.py::test_b[c] - x", "no assertion failed"),
        (1, "E   AssertionError\nFAILED tests/z.py::test_other", "another test failed"),
        (2, "error while collecting", "pytest ended with 2"),
        (-1, "not done", "pytest ended with -1"),
    ],
)
def test_only_a_failing_assertion_of_the_named_test_kills(code: int, output: str, expected: str) -> None:
    """An error that is no assertion, another test, a collection error or a time-out kill nothing."""
    found = verdict(code, output, MUTANT)
    assert found.startswith(expected) if expected else found == ""


def test_a_mutant_without_its_two_lines_is_refused(tmp_path: Path) -> None:
    """What it breaks and what must notice stand at its top."""
    path = tmp_path / "m.diff"
    path.write_text("# only a title\n--- a/x\n+++ b/x\n")
    with pytest.raises(MutantError, match="two lines are expected"):
        load(path)


def test_every_mutant_applies_to_the_code_and_comes_off_again() -> None:
    """A diff that the code has moved away from is an error, not a survivor."""
    assert len(ALL) >= 40
    with copy_of_the_code() as copy:
        layers = ("journal", "replay", "engine", "cli")
        before = {p: p.read_bytes() for name in layers for p in (copy / name).rglob("*") if p.is_file()}
        for path in ALL:
            mutant = load(path)
            patch(copy, mutant)
            assert any(p.read_bytes() != body for p, body in before.items()), mutant.name
            patch(copy, mutant, undo=True)
            assert all(p.read_bytes() == body for p, body in before.items()), mutant.name


def test_a_diff_that_does_not_apply_is_an_error(tmp_path: Path) -> None:
    """Named, with what patch said."""
    diff = tmp_path / "m.diff"
    diff.write_text(
        "# t\n# killed by: x\n--- a/engine/train.py\n+++ b/engine/train.py\n@@ -1 +1 @@\n-no such line\n+x\n"
    )
    with copy_of_the_code() as copy, pytest.raises(MutantError, match="does not apply"):
        patch(copy, load(diff))


def test_every_rule_of_the_protocol_has_a_mutant() -> None:
    """Rules 1 to 23, each removed at least once."""
    titles = [load(path).title for path in ALL]
    missing = [rule for rule in range(1, 24) if not any(title.startswith(f"Rule {rule}:") for title in titles)]
    assert missing == []
