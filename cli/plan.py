"""``unlost plan``, ``unlost checkpoints``, ``unlost fork``: what a restart would do, and from what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import Format, print_fields, print_json, print_table

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)]


def plan(
    run: RunArgument,
    restore: Annotated[str, typer.Option(metavar="latest|STEP|none", help="As for train.")] = "latest",
    deep: Annotated[bool, typer.Option("--deep", help="Verify the checkpoint's files too.")] = False,
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """Show what starting the run again would do, group by group. Changes nothing."""
    from ..engine.inspect import plan_restart

    found = plan_restart(run, restore, contents=deep)
    it = found.plan
    if format is Format.json:
        print_json(
            {
                "checkpoint": found.checkpoint_name or None,
                "from_version": it.from_version,
                "to_version": it.to_version,
                "rolled_back": it.rolled_back,
                "groups": [
                    {
                        "group": g.group,
                        "action": g.action,
                        "target_step": g.target_step if g.target_step >= 0 else None,
                        "siblings": [
                            {"sibling": s.sibling, "action": s.action, "prefix": s.prefix} for s in g.siblings
                        ],
                    }
                    for g in it.groups
                ],
                "counters": it.counters,
                "notes": found.notes,
            }
        )
        return
    print_fields(
        [
            ("checkpoint", found.checkpoint_name or "none: from step 0"),
            ("trainer version", f"{it.from_version} -> {it.to_version}"),
            ("groups trained again", len(it.rolled_back)),
            *it.counters.items(),
        ]
    )
    rows = [(g.group, g.action, g.target_step if g.target_step >= 0 else None, _siblings(g)) for g in it.groups]
    if rows:
        print()
        print_table("Groups", ["group", "action", "step", "siblings"], rows, right=["group", "step"])
    for note in found.notes:
        print(f"note: {note}")


def _siblings(group: object) -> str:
    counts: dict[str, int] = {}
    prefix = 0
    for sibling in group.siblings:  # type: ignore[attr-defined]
        counts[sibling.action] = counts.get(sibling.action, 0) + 1
        prefix += sibling.prefix
    text = ", ".join(f"{n} {action}" for action, n in counts.items())
    return f"{text} (from {prefix} tokens)" if prefix else text


def checkpoints(
    run: RunArgument,
    quick: Annotated[bool, typer.Option("--quick", help="Look at manifests only, not at every byte.")] = False,
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """List the run's checkpoints and verify them. Exit code 1 if a finished one can't be restored."""
    from ..engine.inspect import inspect_checkpoints

    reports = inspect_checkpoints(run, contents=not quick)
    rows = [
        {
            "name": r.name,
            "kind": r.checkpoint.kind,
            "version": r.checkpoint.trainer_version,
            "cut": r.checkpoint.cut,
            "incarnation": r.checkpoint.incarnation,
            "bytes": r.bytes,
            "files": r.files,
            "problem": r.problem or None,
        }
        for r in reports
    ]
    if format is Format.json:
        print_json(rows)
    else:
        columns = ["name", "kind", "version", "cut", "bytes", "files", "problem"]
        table = [[row[c] if c != "problem" else row[c] or "ok" for c in columns] for row in rows]
        print_table("Checkpoints", columns, table, right=["version", "cut", "bytes", "files"])
    if any(r.problem and r.checkpoint.committed for r in reports):
        raise typer.Exit(1)


def fork(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder to make.", show_default=False)],
    at_step: Annotated[int, typer.Option(metavar="N", min=1, help="Checkpoint to begin from.")],
) -> None:
    """Make a new run that begins where RUN was at checkpoint N. RUN stays as it is."""
    from ..engine.fork import fork_run

    state = fork_run(run, at_step, new)
    print(f"{new}: run {state.run_id[:12]} at step {state.trainer_version}, {len(state.groups)} groups alive")
    print(f"go on with it: unlost train {new}/config.yaml")
