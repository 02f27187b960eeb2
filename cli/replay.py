"""``unlost replay``: fold a run's journal to the state that a restart would begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import Format, console, print_fields, print_json, print_table, ranges


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    at: Annotated[int | None, typer.Option(metavar="OFFSET", help="After this event, not the last.", min=0)] = None,
    at_time: Annotated[
        str | None,
        typer.Option(metavar="T", help="At this moment: seconds on the run's clock, or a date and time (ISO 8601)."),
    ] = None,
    before_incarnation: Annotated[
        int | None, typer.Option(metavar="N", help="Right before this incarnation: what its restore found.", min=1)
    ] = None,
    group: Annotated[
        int | None, typer.Option(metavar="ID", help="The whole life of this group instead.", min=0)
    ] = None,
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """Show who owned what: fold the journal up to an event. Reads only, also beside a running run."""
    from ..replay.fold import fold_run

    if sum(option is not None for option in (at, at_time, before_incarnation, group)) > 1:
        from .errors import UsageFault

        raise UsageFault("give one of --at, --at-time, --before-incarnation and --group")
    if group is not None:
        _show_life(run, group, format)
        return
    if at_time is not None or before_incarnation is not None:
        from ..replay.fold import open_events
        from ..replay.travel import offset_at_time, offset_before_incarnation

        reader = open_events(run)
        if at_time is not None:
            at = offset_at_time(reader, at_time)
        elif before_incarnation is not None:
            at = offset_before_incarnation(reader, before_incarnation)
    summary = fold_run(run, at).summary()
    if format is Format.json:
        print_json(summary)
    else:
        show_summary(summary)


def _show_life(run: Path, group: int, format: Format) -> None:
    """Every event that concerns a group, in order."""
    from ..replay.fold import open_events
    from ..replay.travel import NoSuchMoment
    from .events import GroupFilter, detail, fields

    reader = open_events(run)
    chosen = GroupFilter(group)
    life = [(o, e) for o, e in reader.events(reader.first_offset) if chosen.concerns(e)]
    if not life:
        raise NoSuchMoment(f'{run}: no event concerns group {group}; `unlost sql {run} "from groups"` lists groups')
    if format is Format.json:
        print_json([{"offset": o, "event": type(e).__name__} | fields(e) for o, e in life])
        return
    began = life[0][1].t
    rows = [(o, f"{e.t / 1e6:.3f}", f"{(e.t - began) / 1e6:+.3f}", type(e).__name__, detail(e, group)) for o, e in life]
    columns = ["offset", "time s", "age s", "event", "detail"]
    print_table(f"Group {group}", columns, rows, right=["offset", "time s", "age s"])


def show_summary(summary: dict[str, Any]) -> None:
    """A folded state for people: where it stands, the sets of promise P1, then the groups still alive."""
    trainer, loader, prompts = summary["trainer"], summary["loader"], summary["prompts"]
    print_fields(
        [
            ("run", summary["run_id"]),
            ("next offset", summary["offset"]),
            ("time", f"{summary['t_us'] / 1e6:.3f} s"),
            ("incarnation", summary["incarnation"]),
            ("ended", summary["ended"] or ("no (needs a restore)" if summary["needs_restore"] else "no")),
            ("trainer version", f"{trainer['version']} (branch {trainer['branch']})"),
            ("open step", trainer["step"]),
            ("weights synced", trainer["synced_version"]),
            ("loader", f"epoch {loader['epoch']}, position {loader['position']}"),
            ("dispatch index", summary["dispatch_index"]),
            ("open attempts", summary["open_attempts"]),
        ]
    )
    console().print()
    rows = [
        (name, len(owned) if isinstance(owned, list) else owned, ranges(owned) if isinstance(owned, list) else "")
        for name, owned in prompts.items()
        if name not in ("handed_out", "holds")
    ]
    rows.append(("handed out", prompts["handed_out"], "the sum" if prompts["holds"] else "NOT THE SUM: P1 is broken"))
    print_table("Prompts", ["set", "count", "groups"], rows, right=["count"])
    groups = [group for owned in summary["groups"].values() for group in owned]
    if groups:
        console().print()
        columns = ["group", "prompt", "epoch", "status", "step", "weights", "siblings"]
        print_table("Groups alive", columns, map(_group_row, groups), right=["group", "epoch", "step", "weights"])
    if summary["checkpoints"]:
        console().print()
        columns = ["id", "kind", "version", "cut", "name"]
        rows = [tuple(checkpoint[column] for column in columns) for checkpoint in summary["checkpoints"]]
        print_table("Checkpoints", columns, rows, right=["id", "version", "cut"])
    if summary["counters"]:
        console().print()
        print_table("Counters", ["counter", "value"], summary["counters"].items(), right=["value"])


_SIBLING_MARKS = {"idle": ".", "dispatched": ">", "sealed": "#"}


def _group_row(group: dict[str, Any]) -> tuple[Any, ...]:
    """Siblings as marks: ``.`` idle, ``>`` being generated, ``#`` sealed, then the tokens sealed."""
    marks = "".join(_SIBLING_MARKS.get(sibling["status"], "?") for sibling in group["siblings"])
    tokens = sum(sibling["tokens"] or 0 for sibling in group["siblings"])
    siblings = f"{marks} {tokens} tokens" if tokens else marks
    return (
        group["group"],
        group["prompt"],
        group["epoch"],
        group["status"],
        group["target_step"],
        group["start_weight"],
        siblings,
    )
