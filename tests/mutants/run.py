"""Apply each named diff to a copy of the code, and see that the test named in it fails by an assertion.

A mutant is a ``.diff`` in a folder here, its family. Its first lines say what it breaks and what must notice::

    # Rule 5: the receipt is returned before the payload is durable
    # killed by: tests/simulation/test_places.py::test_place[rule05_seal_before_payload]

The killing tests must pass on the unchanged copy, each once. A diff that does not apply is an error, so that mutants
follow the code. Nothing is changed outside the copies, of which each job has one.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.judge import NOTES

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
COPIED = ("journal", "replay", "engine", "cli", "examples", "tests", "docs", ".typing", "pyproject.toml", "Makefile")
TEST_TIMEOUT_S = 120
MUTANT_TIMEOUT_S = 300
UNCHANGED_TIMEOUT_S = 1200
# What the tests need. Others that happen to be installed would double the time of a short test.
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin", "tests.mutants.judge")


class MutantError(Exception):
    """A mutant that says nothing: it does not apply, names no test, or its test fails without it."""


@dataclass(frozen=True)
class Mutant:
    path: Path
    title: str
    test: str

    @property
    def family(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Failure:
    """A failing test: its node id, whether by an assertion, and what it said."""

    test: str
    assertion: bool
    error: str


@dataclass(frozen=True)
class Result:
    """What became of a mutant; ``problem`` is empty if it was killed as it should be."""

    mutant: Mutant
    seconds: float
    problem: str


def load(path: Path) -> Mutant:
    """The mutant in a file. Raises MutantError if its head is not as described."""
    head = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("# ")]
    tests = [line.removeprefix("killed by:").strip() for line in head if line.startswith("killed by:")]
    if len(head) < 2 or len(tests) != 1 or "::" not in tests[0]:
        raise MutantError(f"{path}: two lines are expected at its top: '# what it breaks', '# killed by: FILE::TEST'")
    return Mutant(path, head[0], tests[0])


def all_mutants() -> list[Mutant]:
    return [load(path) for path in sorted(HERE.rglob("*.diff"))]


def choose(wanted: Sequence[str]) -> list[Mutant]:
    """Those of whose ``family/name`` one of ``wanted`` is a part; all if none is given.

    Raises MutantError for one that fits nothing: a mistyped name must not look like a success.
    """
    mutants = all_mutants()
    for part in wanted:
        if not any(part in f"{m.family}/{m.name}" for m in mutants):
            raise MutantError(f"no mutant's FAMILY/NAME contains {part!r}")
    return [m for m in mutants if not wanted or any(part in f"{m.family}/{m.name}" for part in wanted)]


@contextmanager
def copy_of_the_code() -> Iterator[Path]:
    """A copy of the sources and tests, without what is generated."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
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
    path = f"{copy / '.typing'}{os.pathsep}{copy}"
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **own, NOTES: str(copy / "notes.jsonl")}


def compile_the_code(copy: Path) -> None:
    """Once, instead of in each run. By hash: a time stamp of whole seconds would miss a change that keeps the size."""
    command = [sys.executable, "-m", "compileall", "-qq", "--invalidation-mode", "checked-hash"]
    subprocess.run([*command, "journal", "replay", "engine", "cli", "tests"], cwd=copy, check=False)


def check_that_the_copy_is_imported(copy: Path) -> None:
    """Else every mutant would survive, or be killed, for no reason."""
    command = [sys.executable, "-c", "import unlost.engine.rollout as m; print(m.__file__)"]
    done = subprocess.run(command, cwd=copy, env=environment_of(copy), capture_output=True, text=True, check=False)
    if not os.path.realpath(done.stdout.strip()).startswith(os.path.realpath(copy)):
        raise MutantError(f"the copy in {copy} is not what is imported: {done.stdout}{done.stderr}")


def run_tests(copy: Path, tests: Sequence[str], timeout_s: float) -> tuple[int, str, list[Failure]]:
    """pytest in the copy, importing the copy's packages. Returns its exit code (-1: not done), output and failures."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [word for plugin in PLUGINS for word in ("-p", plugin)]
    command += ["--tb=short", f"--timeout={TEST_TIMEOUT_S}", *tests]
    notes = copy / "notes.jsonl"
    notes.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=copy, env=environment_of(copy), stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if process.poll() is None:  # with what it started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        output = said.read()
    lines = notes.read_text().splitlines() if notes.exists() else []
    return code, output, [Failure(**json.loads(line)) for line in lines]


def verdict(code: int, output: str, failures: Sequence[Failure], mutant: Mutant) -> str:
    """Empty if the mutant was killed as it should be, else why not."""
    if code == 0:
        return "survived"
    if code == -1:
        return f"not done after {MUTANT_TIMEOUT_S} s"
    if code != 1:
        return f"pytest ended with {code}, not by a failing test: {output[-800:]}"
    named = [f for f in failures if f.test == mutant.test or f.test.startswith(f"{mutant.test}[")]
    if not named:
        return f"another test failed: {[f.test for f in failures]}"
    if not any(f.assertion for f in named):
        return f"no assertion failed: {named[0].error[:800]}"
    return ""


def check_unchanged(copies: Sequence[Path], tests: Sequence[str]) -> None:
    """The killing tests must pass on the code as it is; each copy runs a share. Raises MutantError if one fails."""
    shares = [(copy, tests[i :: len(copies)]) for i, copy in enumerate(copies)]
    with ThreadPoolExecutor(len(copies)) as pool:
        done = pool.map(lambda x: run_tests(x[0], x[1], UNCHANGED_TIMEOUT_S) if x[1] else (0, "", []), shares)
    for code, output, _ in done:
        if code:
            raise MutantError(f"the killing tests must pass on the unchanged code:\n{output[-3000:]}")


def try_one(copy: Path, mutant: Mutant) -> Result:
    began = time.monotonic()
    patch(copy, mutant)
    try:
        problem = verdict(*run_tests(copy, [mutant.test], MUTANT_TIMEOUT_S), mutant)
    finally:
        patch(copy, mutant, undo=True)
    return Result(mutant, time.monotonic() - began, problem)


def table(results: Sequence[Result]) -> str:
    """A line for each mutant, then one for each family."""
    width = max(len(r.mutant.name) for r in results)
    lines = []
    for r in sorted(results, key=lambda r: (r.mutant.family, r.mutant.name)):
        word = "SURVIVED" if r.problem else "killed"
        lines.append(f"{word:8} {r.seconds:5.1f} s  {r.mutant.family:10}  {r.mutant.name:{width}}  {r.mutant.test}")
    lines.append("")
    for family in sorted({r.mutant.family for r in results}):
        own = [r for r in results if r.mutant.family == family]
        killed = sum(not r.problem for r in own)
        lines.append(f"{family:10}  {killed:3} of {len(own):3} killed  {sum(r.seconds for r in own):6.1f} s")
    return "\n".join(lines)


def page_rows() -> list[str]:
    """Of docs/protocol.md: the mutants of its rules, in their order, then the slips."""
    rows: list[tuple[int, str]] = []
    for mutant in all_mutants():
        rule = re.match(r"Rule (\d+): (.*)", mutant.title)
        if rule is None and mutant.family != "recovery":
            continue
        number, what = (int(rule[1]), rule[2]) if rule is not None else (99, mutant.title)
        what = what[0].upper() + what[1:]
        test = mutant.test.replace(f"[{mutant.name}]", "[…]")
        shown = number if rule is not None else ""
        rows.append((number, f"| {shown} | `{mutant.family}/{mutant.name}` | {what} | `{test}` |"))
    return [row for _, row in sorted(rows)]


def run(wanted: Sequence[str], jobs: int) -> int:
    """Try the mutants that ``choose`` finds, ``jobs`` at a time. Returns how many were not killed as they should be."""
    began = time.monotonic()
    mutants = choose(wanted)
    results: list[Result] = []
    with ExitStack() as stack:
        copies = [stack.enter_context(copy_of_the_code()) for _ in range(max(1, min(jobs, len(mutants))))]
        for mutant in mutants:  # before anything slow
            patch(copies[0], mutant)
            patch(copies[0], mutant, undo=True)
        for copy in copies:
            compile_the_code(copy)
        check_that_the_copy_is_imported(copies[0])
        killers = sorted({m.test for m in mutants})
        check_unchanged(copies, killers)
        seconds = time.monotonic() - began
        print(f"{len(killers)} tests pass on the unchanged code ({seconds:.0f} s); {len(mutants)} mutants", flush=True)
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)

        def work(mutant: Mutant) -> Result:
            copy = free.get()
            result = try_one(copy, mutant)
            free.put(copy)
            return result

        with ThreadPoolExecutor(len(copies)) as pool:
            for result in pool.map(work, mutants):
                results.append(result)
                word = "SURVIVED" if result.problem else "killed"
                name = f"{result.mutant.family}/{result.mutant.name}"
                print(f"{word:8} {result.seconds:5.1f} s  {name}: {result.mutant.title}", flush=True)
                if result.problem:
                    print(f"           {result.problem}", flush=True)
    not_killed = sum(bool(r.problem) for r in results)
    print(f"\n{table(results)}\n")
    seconds = time.monotonic() - began
    print(f"{len(results) - not_killed} of {len(results)} killed in {seconds:.0f} s, {len(copies)} at a time")
    return not_killed
