"""``unlost events``: the journal as it is, event by event."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from .output import Format, print_json_line

if TYPE_CHECKING:
    from ..replay.events import Event

_FOLLOW_POLL_S: Final = 0.2


def events(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    kind: Annotated[list[str] | None, typer.Option(help="Only this event; may be given again.", metavar="NAME")] = None,
    group: Annotated[int | None, typer.Option(help="Only what concerns this group.", metavar="ID")] = None,
    first: Annotated[int, typer.Option("--from", help="Begin at this offset.", metavar="OFFSET", min=0)] = 0,
    last: Annotated[int | None, typer.Option("--to", help="End with this offset.", metavar="OFFSET", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new events; Ctrl-C ends.")] = False,
    format: Annotated[Format, typer.Option(help="A line of text or of JSON each.")] = Format.table,
) -> None:
    """List events. Reads only, also beside a running run."""
    kinds = None if not kind else {_kind(name) for name in kind}
    groups = None if group is None else GroupFilter(group)
    for offset, event in _read(run, first, last, follow=follow):
        # The group filter learns from every event, so it comes first.
        if (groups is not None and not groups.concerns(event)) or (kinds is not None and type(event) not in kinds):
            continue
        if format is Format.json:
            print_json_line({"offset": offset, "event": type(event).__name__} | fields(event))
        else:
            print(_line(offset, event))
        if follow:
            sys.stdout.flush()


def _read(run: Path, first: int, last: int | None, *, follow: bool) -> Iterator[tuple[int, Event]]:
    from ..replay.fold import open_events

    reader = open_events(run)
    start = max(first, reader.first_offset)
    if not follow:
        yield from reader.events(start, None if last is None else last + 1)
        return
    for offset, event in reader.follow(start, poll_s=_FOLLOW_POLL_S):
        if last is not None and offset > last:
            return
        yield offset, event


def _kind(name: str) -> type[Event]:
    from ..replay.events import EVENT_TYPES
    from .errors import UsageFault

    by_name = {event.__name__.lower(): event for event in EVENT_TYPES}
    wanted = name.lower().replace("_", "")
    if wanted not in by_name:
        best = max(by_name, key=lambda known: difflib.SequenceMatcher(None, wanted, known).ratio())
        raise UsageFault(f"--kind {name}: no such event; did you mean {by_name[best].__name__}?")
    return by_name[wanted]


class GroupFilter:
    """Picks the events that concern one group, by its id and by the admission that it came in."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._admissions: set[int] = set()

    def concerns(self, event: Event) -> bool:
        """Whether the event names the group, or the batch that it was reserved in."""
        from ..replay.events import BatchAdmitted, BatchReserved, StateImage

        if isinstance(event, BatchReserved):
            first = event.first_group
            if first <= self._group < first + len(event.prompts) or self._group in event.pool_groups:
                self._admissions.add(event.admission_id)
                return True
            return False
        if isinstance(event, BatchAdmitted):
            return event.admission_id in self._admissions
        if isinstance(event, StateImage):
            return False
        named = (getattr(event, name, None) for name in ("group", "spare", "borrowed", "requeued_as"))
        return self._group in named or self._group in getattr(event, "groups", ())


def fields(event: Event) -> dict[str, Any]:
    """An event's fields as plain data, nested structs by name; a state image is only measured."""
    from ..replay.events import StateImage

    if isinstance(event, StateImage):
        return {"t": event.t, "state_bytes": len(event.state)}
    return {name: _plain(value) for name, value in msgspec.structs.asdict(event).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(inner) for name, inner in msgspec.structs.asdict(value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _line(offset: int, event: Event) -> str:
    shown = fields(event)
    t = shown.pop("t") / 1e6
    return f"{offset:>8} {t:>13.6f} {type(event).__name__:<19} " + " ".join(
        f"{name}={_short(value)}" for name, value in shown.items()
    )


def detail(event: Event, group: int) -> str:
    """An event's fields in short, without those that say which group it is."""
    shown = fields(event)
    for name in ("t", "prompts", "groups"):
        shown.pop(name, None)
    if shown.get("group") == group:
        del shown["group"]
    return " ".join(f"{name}={_short(value)}" for name, value in shown.items())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_short(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_short(inner) for inner in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "''"
