"""``unlost report``: what happened in a run and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from .output import Format, console, print_json, print_table
from .target import Overwrite, check_target, whole_file


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, or a trace.", show_default=False)],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with a timeline.")] = None,
    overwrite: Overwrite = False,
    format: Annotated[Format, typer.Option(help="In the terminal.")] = Format.table,
    cache: Annotated[bool, typer.Option(help="Keep big journals as a database in the cache folder.")] = True,
) -> None:
    """Say what a run lost and why. Reads only, also beside a running run."""
    from ..replay.database import open_database
    from ..replay.report import gather

    if html is not None:
        check_target(html, [run], overwrite=overwrite)
    with open_database([run], cache=cache) as database:
        data = gather(database, database.sources[0].run)
    if html is not None:
        from ..replay.report_page import page

        with whole_file(html) as part:
            part.write_text(page(data), encoding="utf-8")
        typer.echo(f"{html}: {html.stat().st_size / 1e6:.1f} MB", err=True)
    elif format is Format.json:
        print_json(data)
    else:
        _show(data)


_RESTORE_COLUMNS: Final = [
    "incarnation", "after", "before", "starts", "kills", "checkpoint", "from_version", "to_version", "seconds",
    "died_min_s", "died_max_s", "first_dispatch_s",
]  # fmt: skip
_KEPT_COLUMNS: Final = [
    "restarted_as", "running_at_death", "adopted", "resumed", "prefix_tokens_reused", "siblings_reused",
    "siblings_rerun",
]  # fmt: skip


def _show(data: dict[str, Any]) -> None:
    for note in data["notes"]:
        console().print(f"note: {note}")
    for sentence in data["summary"]:
        console().print(sentence)
    _rows(
        "Losses",
        data["losses"],
        ["resource", "class", "losses", "seconds", "seconds_at_most", "tokens", "tokens_at_most"],
    )
    _rows("Restores", data["restores"], _RESTORE_COLUMNS)
    _rows("Kept by restores", data["reuse"], _KEPT_COLUMNS)
    _rows("Groups", data["statuses"], ["status", "reason", "groups", "tokens"])
    _rows(
        "Checkpoints", data["checkpoints"], ["kind", "outcome", "reason", "checkpoints", "seconds_mean", "seconds_max"]
    )
    _rows("Sums", data["reconcile"], ["what", "ok", "residue", "unknown_min", "unknown_max", "rule"])


def _rows(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    if not rows:
        return
    console().print()
    numbers = [
        c for c in columns if any(isinstance(row[c], int | float) and not isinstance(row[c], bool) for row in rows)
    ]
    print_table(title, columns, [[_cell(row[c]) for c in columns] for row in rows], right=numbers)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{round(value, 1) + 0.0:,.1f}" if isinstance(value, float) else str(value)  # no "-0.0"
