"""What README and the other pages show is true: code runs, commands exist, links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from unlost.cli.main import run
from unlost.engine.config import load_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")] if p.is_file()]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_library_example_runs_as_it_stands(tmp_path):
    """The ten lines open a journal with events of one's own, append, and fold them again."""
    example = next(block for block in blocks("python") if "JournalWriter" in block)

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "my-journal").glob("*.zst"))


def test_library_example_folds_after_a_crash_too(tmp_path):
    """The same with the process killed right after ``sync``: what was synced is there."""
    example = next(block for block in blocks("python") if "JournalWriter" in block)
    write, fold = example.split("owned = set()")
    killed = write.replace("journal.sync()", "journal.sync(); import os; os.kill(os.getpid(), 9)")
    assert killed != write

    done = subprocess.run([sys.executable, "-c", killed], cwd=tmp_path, timeout=30, check=False)
    assert done.returncode == -9
    reading = write.split("with JournalWriter")[0] + "owned = set()" + fold
    subprocess.run([sys.executable, "-W", "error", "-c", reading], cwd=tmp_path, timeout=30, check=True)


def test_configuration_example_is_valid(tmp_path):
    """The user's configuration in README is accepted as it stands."""
    (block,) = blocks("yaml")
    (tmp_path / "config.yaml").write_text(block)
    config = load_config(tmp_path / "config.yaml")

    assert config.data.train == str(tmp_path / "prompts.jsonl")
    assert config.run_dir.endswith(f"/runs/{tmp_path.name}")


def test_reward_example_has_the_signature_that_is_called():
    """The reward in README scores a right and a wrong answer."""
    source = next(block for block in blocks("python") if "def score" in block)
    scope: dict = {}
    exec(source, scope)

    assert scope["score"]("What is 7 plus 5?", "It is 12.", "12", {}) == 1.0
    assert scope["score"]("What is 7 plus 5?", "It is 13.", "12", {}) == 0.0


def test_commands_in_readme_exist(capsys):
    """Every ``unlost …`` command that README names answers ``--help`` and knows the options shown."""
    shown = set(re.findall(r"^unlost (\w+)", README, re.MULTILINE))
    assert {"train", "replay", "events", "verify", "config"} <= shown
    for command in shown:
        assert run([command, "--help"]) == 0
        text = capsys.readouterr().out
        for line in re.findall(rf"^unlost {command} .*$", README, re.MULTILINE):
            for option in re.findall(r"--\w+", line):
                assert option in text, (line, option)


def test_make_targets_in_pages_exist():
    """Every ``make target`` in README and CONTRIBUTING is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\bmake ([a-z][a-z-]+)", (ROOT / page).read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Relative links name files of the repository, and their anchors headings in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, target
