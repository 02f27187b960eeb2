"""``unlost demo``: a real training, killed in the middle of rollouts, resumed, and what that cost.

The training is a child process, started exactly as a user would. The moment of the kill is not a sleep: the journal
has to show a checkpoint, finished siblings of unfinished groups, and siblings still being generated.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer

if TYPE_CHECKING:
    from ..replay.state import State

_MARKER_FILE: Final = ".unlost-demo"
_MOMENT_WITHIN_S: Final = 240.0
_POLL_S: Final = 0.1


def demo(
    dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Work here, and keep it; default: a temporary folder.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
    example: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Another example than the quickstart that comes with unlost.")
    ] = None,
) -> None:
    """Train a tiny model, kill -9 everything in the middle, resume, and show what was kept (a few minutes).

    Exit code 0 only if no prompt was lost or trained twice, nothing finished was generated again, and the run finished.
    """
    from .train import require_training_packages

    require_training_packages()
    with _work_folder(dir, keep=keep) as folder:
        _fill(folder, example)
        _show(folder)


@contextmanager
def _work_folder(wanted: Path | None, *, keep: bool) -> Iterator[Path]:
    """An empty folder; one that an earlier demo has made is emptied, any other is refused."""
    from .errors import UsageFault

    if wanted is None:
        made = Path(tempfile.mkdtemp(prefix="unlost-demo-"))
        try:
            yield made
        finally:
            if keep:
                print(f"kept: {made}")
            else:
                shutil.rmtree(made, ignore_errors=True)
        return
    folder = wanted.resolve()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER_FILE).exists():
            raise UsageFault(f"--dir {wanted}: the folder is not empty and not of an earlier demo; name another")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _fill(folder: Path, example: Path | None) -> None:
    """Copy the example and let it make its model."""
    from ..engine.config import load_config
    from .errors import DemoFailed, UsageFault

    (folder / _MARKER_FILE).touch()
    if example is None:
        _copy(_packaged_example(), folder)
    elif (example / "config.yaml").is_file() and (example / "make_model.py").is_file():
        _copy(example, folder)
    else:
        raise UsageFault(f"--example {example}: expected a folder with config.yaml and make_model.py")
    print("making a tiny model", flush=True)
    model = load_config(folder / "config.yaml").model.path
    made = subprocess.run([sys.executable, "make_model.py", model], cwd=folder, check=False)
    if made.returncode:
        raise DemoFailed(f"{folder}/make_model.py failed with exit code {made.returncode}")


def _packaged_example() -> Path:
    """The quickstart's folder: of the checkout, or beside the installed package."""
    import importlib

    # By its path, not importlib.resources: that refuses a namespace package which an editable install has mapped.
    places = importlib.import_module("unlost.quickstart").__path__
    return next(Path(place) for place in places if Path(place).is_dir())


def _copy(source: Path, target: Path) -> None:
    """Plain files only: a checkout's example folder may hold a model and runs of its own."""
    for entry in source.iterdir():
        if entry.is_file():
            shutil.copy(entry, target / entry.name)


def _show(folder: Path) -> None:
    from ..engine.config import load_config
    from ..replay.fold import fold_run
    from .demo_figures import owned, problems, read_figures
    from .demo_output import print_figures, print_owned
    from .errors import DemoFailed

    config_file = folder / "config.yaml"
    config = load_config(config_file)
    run = Path(config.run_dir)
    command = [sys.executable, "-m", "unlost.cli", "train", str(config_file)]

    print("\n[1] unlost train config.yaml", flush=True)
    started = time.monotonic()
    with _Child(command, folder) as first:
        _wait_for_moment(first, run)
        killed = first.kill()
        running_s = time.monotonic() - started
    death = owned(fold_run(run))
    print(
        f"\n[2] kill -9 of {killed} processes after {running_s:.0f} s; the journal says who owned what:\n", flush=True
    )
    print_owned(death)

    print("\n[3] the same command again", flush=True)
    with _Child(command, folder) as second:
        code = second.wait()
    if code:
        raise DemoFailed(f"the resumed run ended with exit code {code}; see {run}/run.log")
    found, final = read_figures(run, death), fold_run(run).summary()

    print("\n[4] what it came to, from the journal\n", flush=True)
    print_figures(found, final)
    program = shutil.which("unlost") or str(Path(sys.executable).parent / "unlost")
    print(f"\nlook closer:\n    {program} replay {run}\n    {program} report {run} --html report.html")
    wrong = problems(death, final, found)
    if wrong:
        raise DemoFailed("; ".join(wrong))


# --- the child -----------------------------------------------------------------------------------------------------


class _Child:
    """The training in a process group of its own, its output shown indented. Leaving the block kills what is left."""

    def __init__(self, command: list[str], folder: Path) -> None:
        from .process_tree import MARKER

        self._mark = uuid.uuid4().hex
        environment = os.environ | {MARKER: self._mark, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._echo = threading.Thread(target=self._copy_output, daemon=True)
        self._echo.start()

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print("    " + line.rstrip(), flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._echo.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def ended(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Until it ends by itself. Ctrl-C here is passed on, since the child has a process group of its own."""
        while True:
            try:
                return self._process.wait()
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)

    def kill(self) -> int:
        """SIGKILL to the whole tree; how many processes that were."""
        from .process_tree import kill_tree

        killed = kill_tree(self._process.pid, self._mark)
        self._process.wait()
        return killed


def _wait_for_moment(child: _Child, run: Path) -> None:
    """Return when the journal shows the moment to kill; raise DemoFailed if it does not come."""
    from ..journal.errors import JournalMissing
    from ..replay.fold import fold_run
    from .errors import DemoFailed

    deadline = time.monotonic() + _MOMENT_WITHIN_S
    while time.monotonic() < deadline:
        code = child.ended()
        if code is not None:
            raise DemoFailed(f"the training ended by itself with exit code {code}, before it could be killed")
        try:
            if _moment(fold_run(run)):
                return
        except JournalMissing:
            pass  # not begun yet
        time.sleep(_POLL_S)
    raise DemoFailed(f"no moment worth a kill within {_MOMENT_WITHIN_S:.0f} s; see {run}/run.log")


def _moment(state: State) -> bool:
    """A trainer checkpoint, trained steps beyond it, and a group with siblings both sealed and being generated."""
    from ..replay.state import DISPATCHED, SEALED

    versions = [c.trainer_version for c in state.checkpoints if c.committed and c.kind == "trainer"]
    if not versions or state.trainer_version <= max(versions):
        return False
    statuses = ({sibling.status for sibling in state.groups[group].siblings} for group in state.unfinished)
    return any({DISPATCHED, SEALED} <= found for found in statuses)
