"""``unlost why``: what a run is waiting for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import Format, console, print_fields, print_json, print_table


def why(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """Show what waits for what: missing attempts, closed gates, full buffers, silent parts. Reads only."""
    from ..replay import why as reasons

    found = reasons.why(run)
    if format is Format.json:
        print_json(found._asdict() | {"findings": [finding._asdict() for finding in found.findings]})
        return
    running = {True: "yes", False: "no", None: "unknown"}[found.alive]
    if found.holder:
        running += f" ({found.holder})"
    print_fields([("events", found.offset), ("last event", f"{found.t_s:.3f} s"), ("running", running)])
    console().print()
    rows = [(f.what, "" if f.since_s is None else f"{f.since_s:.1f}", f.detail) for f in found.findings]
    print_table("Waiting", ["what", "for s", "detail"], rows, right=["for s"])
    if found.components:
        console().print()
        ages = [(name, f"{age:.1f}") for name, age in found.components.items()]
        print_table("Since the last event of", ["part", "seconds"], ages, right=["seconds"])
    if found.missing:
        console().print()
        columns = ["group", "prompt", "sibling", "attempt", "state", "worker", "since_s", "failures"]
        cells = [[f"{row[c]:.1f}" if c == "since_s" else row[c] for c in columns] for row in found.missing]
        right = ["group", "sibling", "attempt", "worker", "since_s", "failures"]
        print_table("Siblings that the next step may wait for", columns, cells, right=right)
