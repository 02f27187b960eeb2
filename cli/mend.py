"""``unlost repair`` and ``unlost prune``: the two commands that take something away from a journal, never unasked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Format, print_fields, print_json

if TYPE_CHECKING:
    from ..journal import JournalReader, RepairReport
    from ..replay.events import Event

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, or one journal's.", show_default=False)
]


def repair(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    cut: Annotated[
        bool, typer.Option("--cut", help="Cut also where `prune` could drop the damaged part and keep what follows.")
    ] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="The holder on another machine is dead.")] = False,
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """Cut damaged journals back to their last good event. Says first what is given up; every old byte is copied aside.

    A torn tail needs no repair: the next start cuts it. Damage that lies before all that a restart needs is left to
    `unlost prune`, which drops less. Exit code 1 if something stays damaged.
    """
    from ..journal import repair as repair_journal
    from ..journal import verify
    from .verify import journals_of

    damaged = {name: folder for name, folder in journals_of(run).items() if not verify(folder).ok}
    reports: dict[str, RepairReport] = {}
    for name, folder in damaged.items():
        planned = repair_journal(folder, take_over=take_over)
        before = None if cut else _prunable(folder, planned)
        if format is Format.table:
            _show(name, planned, yes and before is None)
        if before is not None:
            print(
                f"{name}: no restart needs the damaged part, so nothing is cut: `unlost prune {run} --before {before}` "
                f"drops it and keeps every event from {before} on (--cut gives those up instead)",
                file=sys.stderr,
            )
            reports[name] = planned
        elif yes or (format is Format.table and sys.stdin.isatty() and typer.confirm("do it?", default=False)):
            reports[name] = repair_journal(folder, apply=True, take_over=take_over)
        else:
            reports[name] = planned
    left = [name for name, report in reports.items() if not report.applied]
    if format is Format.json:
        print_json({"damaged": list(damaged), "repaired": reports, "left": left})
    elif not damaged:
        print("nothing to repair")
    else:
        for name, report in reports.items():
            print(f"{name}: {'cut; old bytes in ' + ', '.join(report.copied) if report.applied else 'left as it is'}")
    if left:
        raise typer.Exit(1)


def _prunable(folder: Path, report: RepairReport) -> int | None:
    """The newest durable image, if it and all that follows can be read and the damage lies before it."""
    from ..journal import JournalDamaged, JournalReader
    from ..replay.events import EVENT_TYPES
    from ..replay.fold import EVENTS_FOLDER

    if folder.name != EVENTS_FOLDER:
        return None
    try:
        reader: JournalReader[Event] = JournalReader(folder, EVENT_TYPES)
        image = _restart_begins_at(reader)
        if image is None or image <= report.keep_until:
            return None
        for _ in reader.frames(image):
            pass
    except JournalDamaged:
        return None
    return image


def _restart_begins_at(reader: JournalReader[Event]) -> int | None:
    """Offset of the newest durable state image: what comes before it no restart needs. None: there is none yet."""
    return reader.last_image(before=reader.watermark - 1) if reader.watermark else None


def _show(name: str, report: RepairReport, certain: bool) -> None:
    lost = "an unknown number of" if report.events_lost is None else str(report.events_lost)
    will = "is" if certain else "would be"
    print_fields(
        [
            ("journal", name),
            ("damage", report.reason),
            (f"{will} lost", f"{lost} events, from event {report.keep_until} on"),
            (f"{will} cut", ", ".join(report.cut) or None),
            (f"{will} removed", ", ".join(report.removed) or None),
        ]
    )
    if name.startswith("payloads"):
        print("what these payloads held is generated again")
    else:
        print("steps trained and checkpoints made from there on are forgotten with it")


def prune(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    before: Annotated[
        int | None, typer.Option(metavar="OFFSET", min=0, help="Default: all that a restart does not need.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would go.")] = False,
    format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
) -> None:
    """Drop old segments of a stopped run's event journal. A dry run unless --yes. Post-mortem of what goes is gone.

    Refused if a restart would need what is asked for: it needs everything from the newest durable state image on.
    """
    from ..journal import prune as prune_journal
    from ..replay.fold import EVENTS_FOLDER, open_events
    from .errors import UsageFault

    reader = open_events(run)
    limit = _restart_begins_at(reader)
    if limit is None:
        raise UsageFault(f"{run}: nothing can go: no state image is durable yet, a restart needs every event")
    wanted = limit if before is None else before
    if wanted > limit:
        raise UsageFault(f"{run}: a restart needs everything from event {limit} on; give --before {limit} or less")
    report = prune_journal(run / EVENTS_FOLDER, wanted, dry_run=not yes)
    if format is Format.json:
        print_json(report)
        return
    verb = "would go" if report.dry_run else "gone"
    print_fields(
        [
            (f"segments {verb}", ", ".join(report.removed) or "none"),
            ("bytes", report.bytes_removed),
            ("first event kept", report.floor),
        ]
    )
    if report.dry_run and report.removed:
        print("nothing was changed; --yes does it")
