"""The oracle is tested: each named mutation of the code must make the named test fail (``make mutants``).

A mutation is a diff under ``tests/*/mutants``; its head says what it breaks and which test must notice. It is applied,
exactly, to a copy of the sources. The named tests must pass on the unmutated copy first, and a mutant counts as killed
only by a failing test, never by an error while collecting.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("journal", "replay", "engine", "cli")
KILLED_BY = "# killed by: "
TIMEOUT_S = 300


def copy_sources(target: Path) -> None:
    """The four layers as ``unlost``, and the tests."""
    (target / "unlost").mkdir()
    (target / "unlost" / "__init__.py").touch()
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, target / folder, ignore=ignore)
            (target / "unlost" / folder).symlink_to(target / folder)
    shutil.copytree(ROOT / "tests", target / "tests", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)


def run_tests(copy: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.fspath(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *tests]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def killed(diff: Path, copy: Path) -> tuple[bool, str]:
    """Whether the mutant's own test fails on it, and a word on how."""
    test = next(x.removeprefix(KILLED_BY).strip() for x in diff.read_text().splitlines() if x.startswith(KILLED_BY))
    patch = subprocess.run(
        ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-i", diff], cwd=copy, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    if patch.returncode:
        return False, f"the diff does not apply: {patch.stdout.strip()}"
    done = run_tests(copy, [test])
    if done.returncode == 0:
        return False, f"SURVIVED {test}"
    if done.returncode != 1 or f"FAILED {test}" not in done.stdout or "ImportError" in done.stdout:
        return False, f"no failing assertion: {done.stdout[-1500:]}"
    return True, test


def main(chosen: list[str]) -> int:
    diffs = sorted(d for d in ROOT.glob("tests/*/mutants/*.diff") if not chosen or d.stem in chosen)
    tests = sorted(
        {
            x.removeprefix(KILLED_BY).strip()
            for d in diffs
            for x in d.read_text().splitlines()
            if x.startswith(KILLED_BY)
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        copy_sources(base)
        done = run_tests(base, tests)
        if done.returncode:
            print(f"the named tests do not pass on the unmutated code:\n{done.stdout[-3000:]}")
            return 1
        failures = 0
        for diff in diffs:
            copy = Path(folder) / diff.stem
            copy.mkdir()
            copy_sources(copy)
            ok, how = killed(diff, copy)
            failures += not ok
            print(f"{'killed  ' if ok else 'NOT OK  '} {diff.stem}: {how}", flush=True)
            shutil.rmtree(copy)
    print(f"{len(diffs) - failures} of {len(diffs)} mutants killed")
    return 1 if failures or not diffs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
