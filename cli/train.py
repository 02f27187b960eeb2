"""``unlost train``: start a run, or go on with it; the same command does both."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .output import show_warnings

if TYPE_CHECKING:
    from ..engine.config import Config
    from ..engine.progress import Outcome, StopRequest
    from .progress_view import ProgressView

_LOOK_S: Final = 0.2


def train(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)],
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", metavar="KEY=VALUE", help="Set a key: -o grpo.max_steps=50")
    ] = None,
    restore: Annotated[
        str,
        typer.Option(metavar="latest|STEP|none", help="Checkpoint to go on from; none: step 0, rollouts kept."),
    ] = "latest",
    take_over: Annotated[
        bool, typer.Option("--take-over", help="The run's holder on another machine is known to be dead.")
    ] = False,
) -> None:
    """Train, or go on with a run that was stopped or killed: the same command again.

    Ctrl-C, SIGTERM, `stop.signal` and `stop.deadline_s` end it in good order; Ctrl-C again skips the last checkpoint.
    """
    if restore not in ("latest", "none") and not restore.isdecimal():
        raise typer.BadParameter(f"expected latest, none or a step number, got {restore!r}", param_hint="--restore")
    show_warnings()
    from ..engine.config import load_config

    config = load_config(path, override or ())
    require_training_packages()
    from ..engine.progress import StopRequest
    from .progress_view import progress_view
    from .signals import stopping

    stop = StopRequest()
    with progress_view() as view, stopping(stop, config.stop) as keep_handlers:
        thread, result = _start_engine(config, view, stop, restore=restore, take_over=take_over)
        while thread.is_alive():
            thread.join(_LOOK_S)
            keep_handlers()
        outcome = result()
    _report(outcome)
    raise typer.Exit(outcome.exit_code)


def require_training_packages() -> None:
    """Raise TrainUnavailable, naming the extra to install, if a package of the training extra is missing."""
    from .errors import TrainUnavailable

    for package in ("ray", "torch", "transfer_queue", "transformers"):
        try:
            found = importlib.util.find_spec(package) is not None
        except ValueError:  # a module that another tool has put in place without a spec
            found = True
        if not found:
            raise TrainUnavailable(f"training needs the package {package}: pip install 'unlost[train]'")


def _start_engine(
    config: Config, view: ProgressView, stop: StopRequest, *, restore: str, take_over: bool
) -> tuple[threading.Thread, Callable[[], Outcome]]:
    """Run the engine in a thread of its own; the function gives its result, or raises what it raised.

    Signal handlers run on the main thread between bytecodes: so it must not sit in a blocking call of Ray or torch
    (docs/decisions/0003).
    """
    results: list[Outcome] = []
    errors: list[BaseException] = []

    def engine() -> None:
        try:
            from ..engine.launch import run_training

            outcome = run_training(config, restore=restore, on_progress=view.update, stop=stop, take_over=take_over)
            results.append(outcome)
        except BaseException as error:  # noqa: BLE001 - raised again on the main thread
            errors.append(error)

    def result() -> Outcome:
        if errors:
            raise errors[0]
        return results[0]

    thread = threading.Thread(target=engine, name="engine")
    thread.start()
    return thread, result


def _report(outcome: Outcome) -> None:
    from ..engine.progress import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_RESUMABLE

    line = f"{outcome.reason}: {outcome.detail}" if outcome.detail else outcome.reason
    if outcome.exit_code in (EXIT_RESUMABLE, EXIT_INTERRUPTED):
        line += "; the same command goes on from here"
    if outcome.exit_code == EXIT_FAILED:
        print("unlost: " + " ".join(line.split()), file=sys.stderr)
    else:
        print(line)
    if outcome.exit_code == EXIT_FINISHED:
        print(f"run folder: {outcome.run_dir}")
