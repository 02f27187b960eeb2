"""The repository itself: limits that keep it readable, and nothing in it that belongs elsewhere."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("journal", "replay", "engine", "cli")
MODULE_LINES_MAX = 500
TEST_MODULE_LINES_MAX = 750
FUNCTION_LINES_MAX = 70
# Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of the machine it was written on": re.compile("/wo" + "rk/|/ro" + "ot/"),
    "a home folder": re.compile("/ho" + r"me/\w"),
    "a package registry's host": re.compile(
        "pypi" + r"[\w.-]*\.(?:org|io|internal|local)|artif" + "actory|index" + "-url"
    ),
}


def tracked(*patterns: str) -> list[Path]:
    """Files under version control, or about to be; the symlinked copy of the tree is left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines() if not line.startswith(".typing/")]
    return [path for path in paths if path.is_file()]


def modules(*folders: str) -> list[Path]:
    found = [path for path in tracked("*.py") if not folders or path.relative_to(ROOT).parts[0] in folders]
    assert found
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_module_is_long():
    """A module that fits a few screens is read as a whole; a list of cases may be half as long again."""
    limits = {p: TEST_MODULE_LINES_MAX if name(p).startswith("tests/") else MODULE_LINES_MAX for p in modules()}
    assert {name(p): n for p, most in limits.items() if (n := len(p.read_text().splitlines())) > most} == {}


@functools.cache
def nodes(path):
    """Everything that a module's source says; parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


def test_no_function_is_long():
    """Nor does a function exceed a screen; tests and benchmarks included."""
    long = {}
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long[f"{name(path)}:{node.name}"] = lines
    assert long == {}


def test_no_grab_bag_modules():
    """A name says what a module is for."""
    assert [name(p) for p in modules() if p.stem in ("utils", "util", "helpers", "common", "misc")] == []


def test_no_print_outside_the_command_line():
    """Libraries log; only commands print."""
    printing = []
    for path in modules("journal", "replay", "engine"):
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                printing.append(f"{name(path)}:{node.lineno}")
    assert printing == []


def test_imports_go_only_downward():
    """cli, engine, replay, journal: each imports from itself and from what is below, written relative.

    import-linter checks the layers too; this also sees that no folder is imported as if it were a top-level package.
    """
    order = {package: rank for rank, package in enumerate(PACKAGES)}
    wrong = []
    for path in modules(*PACKAGES):
        package = path.relative_to(ROOT).parts[0]
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.level >= 2:
                target = (node.module or "").split(".")[0]
                if order[target] > order[package]:
                    wrong.append(f"{name(path)}:{node.lineno} imports {target}")
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                if (node.module or "").split(".")[0] in {*PACKAGES, "unlost"}:
                    wrong.append(f"{name(path)}:{node.lineno} imports {node.module}")
            elif isinstance(node, ast.Import):
                wrong += [
                    f"{name(path)}:{node.lineno}" for a in node.names if a.name.split(".")[0] in {*PACKAGES, "unlost"}
                ]
    assert wrong == []


def test_journal_and_replay_are_light():
    """The post-mortem tools import and fold without any training package (their import would raise here)."""
    code = (
        "import sys\n"
        "for heavy in ('ray', 'torch', 'vllm', 'transfer_queue', 'transformers', 'tensordict', 'numpy'):\n"
        "    sys.modules[heavy] = None\n"
        "import importlib, pkgutil, unlost.journal, unlost.replay\n"
        "for package in (unlost.journal, unlost.replay):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert "unlost.replay.fold" in done.stdout


PLAIN_ERRORS = {
    "journal/errors.py:UnlostError": "the root",
    "journal/frames.py:PayloadError": "never leaves its layer: its callers turn it into damage with a place",
    "replay/trace_reading.py:Lacking": "never leaves the reading of traces: the line is left out and told",
    "engine/ray_calls.py:ActorLost": "never leaves the handles: they turn it into WorkerLost or TrainerLost",
    "engine/protocols.py": "signals between the controller and its parts, some of them across processes",
}


def test_one_error_tree():
    """Every error class derives from UnlostError, but for those that are listed here with a reason."""
    plain = []
    for path in modules(*PACKAGES):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                bases = {b.id for b in node.bases if isinstance(b, ast.Name)}
                if bases and bases <= {"Exception", "ValueError", "RuntimeError", "OSError", "KeyError", "TypeError"}:
                    plain.append(f"{name(path)}:{node.name}")
    assert [p for p in plain if p not in PLAIN_ERRORS and p.partition(":")[0] not in PLAIN_ERRORS] == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_of_this_machine_is_in_the_repository(what):
    """Paths and hosts of where it was written mean nothing elsewhere."""
    pattern, found = FORBIDDEN[what], []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name(path)}:{i}" for i, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert found == []


def test_nothing_heavy_is_in_the_repository():
    """No weights, runs, journals (but golden files) or other big files."""
    heavy = [
        name(path)
        for path in tracked()
        if path.suffix in (".safetensors", ".bin", ".pt", ".pkl", ".gguf", ".whl") or path.stat().st_size > 512 << 10
    ]
    assert heavy == []


def test_every_test_says_what_it_shows():
    """One sentence each, as its docstring."""
    silent = []
    for path in modules("tests"):
        for node in nodes(path):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and not ast.get_docstring(node):
                silent.append(f"{name(path)}:{node.name}")
    assert silent == []


def test_generated_pages_are_current():
    """docs/configuration.md and docs/events.md are what their generator writes."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_check_runs_every_check():
    """`make check` runs linter, formatter, types, layers and pages; .ci/run is `make check && make test`."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\ncheck:")[1].split("\n\n")[0]
    for tool in ("ruff check .", "ruff format --check .", "mypy", "lint-imports", "docs/generate.py --check"):
        assert tool in recipe
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make check && make test")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_every_ruff_ignore_is_explained():
    """A rule is switched off only with a reason beside it."""
    text = (ROOT / "pyproject.toml").read_text()
    ignores = text.split("\nignore = [")[1].split("\n]")[0].splitlines()
    bare = [line for line in ignores if re.match(r'\s*"', line) and not re.search(r"#\s*\S.{9,}", line)]
    assert bare == []


def test_every_noqa_names_its_rule():
    """A blanket `noqa` or `type: ignore` would hide the next defect on that line."""
    blanket = re.compile(r"#\s*noqa(?!:)|#\s*type:\s*ignore(?!\[)")
    found = []
    for path in modules():
        if path != Path(__file__).resolve():
            lines = path.read_text().splitlines()
            found += [f"{name(path)}:{i}" for i, line in enumerate(lines, 1) if blanket.search(line)]
    assert found == []


def test_direct_dependencies_are_pinned():
    """constraints.txt pins every package that pyproject.toml asks for by name, so that an install is the same again."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["train"],
        *project["optional-dependencies"]["dev"],
    ]
    names = {re.split(r"[><=\[]", w)[0].lower() for w in wanted} - {"unlost"}
    pinned = {
        line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert names - pinned == set()
