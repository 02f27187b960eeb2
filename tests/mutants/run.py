"""Apply each named diff to a copy of the code, and see that the test named in it fails by an assertion.

A mutant is a ``.diff`` below this folder. Its first lines say what it breaks and what must notice::

    # Rule 5: the receipt is returned before the payload is durable
    # killed by: tests/simulation/test_places.py::test_place[rule05_seal_before_payload]

The suite that kills must pass on the unchanged copy; a diff that does not apply is an error, so that mutants follow
the code. Nothing is changed outside the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FOLDERS = [HERE, ROOT / "tests" / "journal" / "mutants"]
COPIED = ("journal", "replay", "engine", "cli", "examples", "tests", "docs", ".typing", "pyproject.toml", "Makefile")
ASSERTIONS = ("AssertionError", "assert ", "Broken", "Stuck", "DID NOT RAISE", "Failed:")
TEST_TIMEOUT_S = 300


class MutantError(Exception):
    """A mutant that says nothing: it does not apply, names no test, or its test fails without it."""


@dataclass(frozen=True)
class Mutant:
    path: Path
    title: str
    test: str

    @property
    def name(self) -> str:
        return self.path.stem


def load(path: Path) -> Mutant:
    """The mutant in a file. Raises MutantError if its head is not as described."""
    head = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("# ")]
    tests = [line.removeprefix("killed by:").strip() for line in head if line.startswith("killed by:")]
    if len(head) < 2 or len(tests) != 1:
        raise MutantError(f"{path}: two lines are expected at its top: '# what it breaks', '# killed by: TEST'")
    return Mutant(path, head[0], tests[0])


@contextmanager
def copy_of_the_code() -> Iterator[Path]:
    """A copy of the sources and tests, without what is generated."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "node_modules", "runs")
                shutil.copytree(source, copy / name, symlinks=True, ignore=ignore)
            elif source.exists():
                shutil.copy(source, copy / name)
        yield copy


def patch(copy: Path, mutant: Mutant, *, undo: bool = False) -> None:
    """Apply (or undo) the diff. Raises MutantError if it does not fit exactly."""
    command = ["patch", "-p1", "--fuzz=0", "--forward", "--silent", "--no-backup-if-mismatch", "-i", str(mutant.path)]
    if undo:
        command = ["patch", "-p1", "--reverse", "--silent", "-i", str(mutant.path)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MutantError(f"{mutant.name}: the diff does not apply: {(done.stdout + done.stderr).strip()}")


def environment_of(copy: Path) -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=f"{copy / '.typing'}{os.pathsep}{copy}", PYTHONDONTWRITEBYTECODE="1")


def check_that_the_copy_is_imported(copy: Path) -> None:
    """Else every mutant would survive, or be killed, for no reason."""
    command = [sys.executable, "-c", "import unlost.engine.rollout as m; print(m.__file__)"]
    done = subprocess.run(command, cwd=copy, env=environment_of(copy), capture_output=True, text=True, check=False)
    if not os.path.realpath(done.stdout.strip()).startswith(os.path.realpath(copy)):
        raise MutantError(f"the copy in {copy} is not what is imported: {done.stdout}{done.stderr}")


def run_tests(copy: Path, tests: Iterable[str]) -> tuple[int, str]:
    """pytest in the copy, importing the copy's packages. Returns its exit code and output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment_of(copy),
            capture_output=True,
            text=True,
            check=False,
            timeout=TEST_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {TEST_TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def verdict(code: int, output: str, mutant: Mutant) -> str:
    """Empty if the mutant was killed as it should be, else why not."""
    if code == 0:
        return "survived"
    if code != 1:
        return f"pytest ended with {code}, not by a failing test: {output[-800:]}"
    failed = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    if not any(name.startswith(mutant.test) or mutant.test.startswith(name.split("[")[0]) for name in failed):
        return f"another test failed: {failed}"
    if not any(word in line for line in output.splitlines() if line.startswith("E ") for word in ASSERTIONS):
        return f"no assertion failed: {output[-800:]}"
    return ""


def run(folder: Path, only: Sequence[str] = ()) -> int:
    """Run all mutants below ``folder`` (or those whose names contain one of ``only``). Returns how many survived."""
    mutants = [load(path) for path in sorted(folder.rglob("*.diff"))]
    if only:
        mutants = [m for m in mutants if any(part in m.name for part in only)]
    if not mutants:
        print(f"{folder}: no mutants match")
        return 0
    survived = 0
    with copy_of_the_code() as copy:
        check_that_the_copy_is_imported(copy)
        killers = sorted({m.test for m in mutants})
        code, output = run_tests(copy, killers)
        if code:
            raise MutantError(f"the killing tests must pass on the unchanged code:\n{output[-3000:]}")
        print(f"{len(killers)} tests pass on the unchanged code; {len(mutants)} mutants", flush=True)
        for mutant in mutants:
            began = time.monotonic()
            patch(copy, mutant)
            try:
                problem = verdict(*run_tests(copy, [mutant.test]), mutant)
            finally:
                patch(copy, mutant, undo=True)
            survived += bool(problem)
            seconds = time.monotonic() - began
            word = "SURVIVED" if problem else "killed"
            print(f"{word:8} {seconds:5.1f} s  {mutant.name}: {mutant.title}", flush=True)
            if problem:
                print(f"           {problem}", flush=True)
    print(f"{len(mutants) - survived} of {len(mutants)} killed")
    return survived
