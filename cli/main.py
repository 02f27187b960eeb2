"""The ``unlost`` command: parsing, and how errors reach people.

Promise: an expected error (any ``UnlostError``) is one line on stderr and an exit code, never a traceback; ``--debug``
shows the traceback too. Exit codes: 0 finished, 1 failed, 2 usage or configuration, 75 stopped and resumable (run the
same command again), 130 interrupted.

Commands live in one module each and import what they need when they run, so that ``--help`` stays fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, NoReturn

import typer

from . import config, demo, diff, events, export, mend, plan, replay, report, sql, train, verify, why

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

# The base of what typer raises for bad usage; where it lives differs between typer's versions.
_UsageErrorBase: Final[Any] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="unlost",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"unlost {version('unlost')}")
        raise typer.Exit


@app.callback()
def unlost(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also after the command's name).")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Asynchronous RL post-training that survives a kill at any instant.

    Exit codes: 0 finished, 1 failed, 2 usage, 75 stopped and resumable (run the same command again), 130 interrupted.
    """


app.command(no_args_is_help=True)(train.train)
app.command()(demo.demo)
app.command(no_args_is_help=True)(replay.replay)
app.command(no_args_is_help=True)(events.events)
app.command(no_args_is_help=True)(diff.diff)
app.command(no_args_is_help=True)(why.why)
app.command()(sql.sql)
app.command(no_args_is_help=True)(report.report)
app.command(no_args_is_help=True)(export.export)
app.command(no_args_is_help=True)(verify.verify)
app.command(no_args_is_help=True)(plan.plan)
app.command(no_args_is_help=True)(plan.checkpoints)
app.command(no_args_is_help=True)(plan.fork)
app.command(no_args_is_help=True)(mend.repair)
app.command(no_args_is_help=True)(mend.prune)
app.command(no_args_is_help=True)(config.config)


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line (without the program's name) and return its exit code."""
    args = list(arguments)
    debug = bool(os.environ.get("UNLOST_DEBUG"))
    if "--debug" in args:
        args.remove("--debug")
        debug = True
    try:
        result = typer.main.get_command(app).main(args, prog_name="unlost", standalone_mode=False)
    except typer.Abort:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has gone; say nothing, also not at interpreter shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except _UsageErrorBase as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "unlost"
        what = error.format_message() or "its arguments are missing"
        return _complain(f"{what} (see `{command} --help`)", EXIT_USAGE)
    except Exception as error:
        from ..journal.errors import UnlostError

        if debug or not isinstance(error, UnlostError):
            raise
        return _complain(str(error), error.exit_code)
    return result if isinstance(result, int) else 0


def _complain(message: str, code: int) -> int:
    """One line, whatever the message looks like."""
    print("unlost: " + " ".join(message.split()), file=sys.stderr)
    return code


def main() -> NoReturn:
    """Entry point of the installed command."""
    sys.exit(run(sys.argv[1:]))
