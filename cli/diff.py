"""``unlost diff``: what changed between two offsets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import Format, console, print_fields, print_json, print_table, ranges


def diff(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    a: Annotated[int, typer.Argument(metavar="A", help="Offset: the state right after this event…", min=0)],
    b: Annotated[int, typer.Argument(metavar="B", help="…and after this one.", min=0)],
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """Show what changed between two offsets. Reads only, also beside a running run."""
    if a > b:
        from .errors import UsageFault

        raise UsageFault(f"A comes first: unlost diff {run} {b} {a}")
    from ..replay.fold import fold_run
    from ..replay.travel import difference

    result = difference(fold_run(run, a), fold_run(run, b))
    if format is Format.json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    first, last = result["from"], result["to"]
    print_fields(
        [
            ("from", f"offset {first['offset'] - 1}, {first['t_us'] / 1e6:.3f} s"),
            ("to", f"offset {last['offset'] - 1}, {last['t_us'] / 1e6:.3f} s"),
        ]
    )
    rows = [(name, change["from"], change["to"]) for name, change in result["changed"].items()]
    _table("Changed", ["what", "from", "to"], rows)
    _table("Counters", ["counter", "difference"], [(n, f"{v:+d}") for n, v in result["counters"].items()])
    moves: dict[tuple[str, str], list[int]] = {}
    groups = result["groups"]
    for group in groups["new"]:
        moves.setdefault(("-", group["status"]), []).append(group["group"])
    for group in groups["moved"]:
        moves.setdefault((group["from"], group["to"]), []).append(group["group"])
    for group in groups["gone"]:
        moves.setdefault((group["was"], "-"), []).append(group["group"])
    _table("Groups", ["from", "to", "count", "groups"], [(*key, len(ids), ranges(ids)) for key, ids in moves.items()])
    siblings: dict[tuple[str, str], int] = {}
    for sibling in groups["siblings"]:
        key = (sibling["from"], sibling["to"])
        siblings[key] = siblings.get(key, 0) + 1
    _table("Siblings", ["from", "to", "count"], [(*key, count) for key, count in siblings.items()])
    for name in ("checkpoints", "workers"):
        _table(name.capitalize(), ["what", "ids"], [(k, ranges(v)) for k, v in result[name].items() if v])


def _table(title: str, columns: list[str], rows: list[Any]) -> None:
    if rows:
        console().print()
        print_table(title, columns, rows, right=["count"])
