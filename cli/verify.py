"""``unlost verify``: read every byte of a run's journals and say what each segment is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from .output import Format, console, print_json, print_table

if TYPE_CHECKING:
    from ..journal import VerifyReport

EXIT_DAMAGED: Final = 1


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one journal's.", show_default=False)],
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """Check a run's event journal and payload journals. Changes nothing; exit code 1 if anything is damaged.

    A torn tail is no damage: bytes that were never durable when the process died; the next start cuts it.
    """
    reports = {name: _verify(folder, name) for name, folder in journals_of(run).items()}
    damaged = [name for name, report in reports.items() if not report.ok]
    if format is Format.json:
        print_json({"ok": not damaged, "journals": {name: _plain(report) for name, report in reports.items()}})
    else:
        for name, report in reports.items():
            _show(name, report)
        print("damaged: " + ", ".join(damaged) if damaged else "no damage")
    if damaged:
        raise typer.Exit(EXIT_DAMAGED)


def journals_of(run: Path) -> dict[str, Path]:
    """Name -> folder of every journal in a run's folder; a journal's own folder stands for itself.

    Raises JournalMissing if there is none.
    """
    from ..journal.errors import JournalMissing

    if (run / "events").is_dir():
        found = {"events": run / "events"}
        payloads = run / "payloads"
        if payloads.is_dir():
            found |= {f"payloads/{folder.name}": folder for folder in sorted(payloads.iterdir()) if folder.is_dir()}
        return found
    if not run.is_dir():
        raise JournalMissing(f"{run}: no such folder")
    if not any(run.glob("*.zst")):
        raise JournalMissing(f"{run}: neither a run's folder (no events/ in it) nor a journal's (no segments in it)")
    return {run.name: run}


def _verify(folder: Path, name: str) -> VerifyReport:
    from ..journal import verify as verify_journal

    if not sys.stderr.isatty():
        return verify_journal(folder)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=Console(stderr=True), transient=True
    )
    with bar:
        task = bar.add_task(name, total=None)
        return verify_journal(folder, progress=lambda done, total: bar.update(task, completed=done, total=total))


def _plain(report: VerifyReport) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return {"ok": report.ok} | plain


def _show(name: str, report: VerifyReport) -> None:
    offsets = f", offsets {report.floor} to {report.end_offset - 1}" if report.events else ""
    print(f"{name}: {report.state}, {report.events} events{offsets}")
    for note in report.notes:
        print(f"  {note}")
    columns = ["segment", "state", "bytes", "frames", "offsets", "where and why"]
    rows = []
    for segment in report.segments:
        where = segment.reason
        if segment.state == "torn":
            where = (
                f"bytes {segment.byte} to {(segment.byte or 0) + segment.tail_bytes - 1} were never durable: {where}"
            )
        elif segment.state == "damaged":
            where = f"byte {segment.byte}, last good offset {segment.last_good_offset}: {where}"
        span = (
            f"{segment.first_offset}-{segment.next_offset - 1}" if segment.next_offset > segment.first_offset else "-"
        )
        rows.append((segment.segment, segment.state, segment.size, segment.frames, span, where))
    if rows:
        print_table("", columns, rows, right=["bytes", "frames"])
    console().print()
