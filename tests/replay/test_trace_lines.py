"""Trace lines follow from the events and the state alone: begun anywhere, a projection says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.replay.walk import Walk
from unlost.journal import JournalWriter
from unlost.replay import events as ev
from unlost.replay.fold import fold_events, open_events
from unlost.replay.state import State
from unlost.replay.trace import TraceProjection, projection_at


def walked(seed: int, *, images: bool = False) -> Walk:
    walk = Walk(seed)
    for number in range(900):
        walk.step()
        if images and number % 40 == 39:
            walk.try_event(ev.StateImage(walk.t, msgspec.Raw(walk.state.image())))
        if number % 250 == 249:
            walk.crash_and_restore()
    return walk


@pytest.mark.parametrize("seed", range(4))
def test_a_projection_begun_anywhere_says_the_same(seed: int) -> None:
    """At every offset of random legal runs; but for prompts of given-up groups, which the state does not keep."""
    events = list(enumerate(walked(seed).events))
    whole = TraceProjection()
    lines = [whole.feed(offset, event) for offset, event in events]
    times = {offset: event.t for offset, event in events}
    state, without_prompt = State(), 0
    for offset, event in events:
        if offset % 3 == 0:
            begun = TraceProjection()
            begun.begin_at(State.from_image(state.image(), offset), times.get)
            gone = {key.group for key in state.zombies}
            for at, later in events[offset : offset + 150]:
                found: list[dict[str, Any]] = begun.feed(at, later)
                for line, expected in zip(found, lines[at], strict=True):
                    if line != expected:
                        assert line == expected | {"prompt_id": ""}
                        assert expected["group_id"] in gone
                        without_prompt += 1
        fold_events([(offset, event)], state)
    assert seed or without_prompt > 0, "no walk had attempts of given-up groups running"


@pytest.mark.parametrize("seed", range(4))
def test_it_remembers_what_is_alive(seed: int) -> None:
    """At every offset: the groups of the state and those with attempts that still run; nothing that the state lacks."""
    projection, state = TraceProjection(), State()
    events = walked(seed).events
    for offset, event in enumerate(events):
        projection.feed(offset, event)
        fold_events([(offset, event)], state)
        assert set(projection._groups) == set(state.groups) | {key.group for key in state.zombies}
        begun = TraceProjection()
        begun.begin_at(state, lambda at: events[at].t)
        assert remembered(projection) == remembered(begun)


def remembered(projection: TraceProjection) -> dict[str, Any]:
    """All that it knows, without given-up groups."""
    groups = {i: (g.prompt, g.siblings, g.sealed, g.running) for i, g in projection._groups.items() if not g.gone}
    return vars(projection) | {"_groups": groups}


def test_a_projection_in_a_journal_begins_at_an_image(tmp_path: Path) -> None:
    """One before which no given-up group had attempts running: it says all that one fed everything does."""
    with JournalWriter.open(tmp_path / "events", ev.EVENT_TYPES, journal_id="run") as writer:
        for event in walked(0, images=True).events:
            if isinstance(event, ev.StateImage):
                writer.rotate(event)
            else:
                writer.append(event)
    reader = open_events(tmp_path)
    whole = TraceProjection()
    lines = [whole.feed(offset, event) for offset, event in reader.events()]
    doubtful = [State.from_image(bytes(e.state), 0).zombies for _, e in reader.events() if isinstance(e, ev.StateImage)]
    assert any(doubtful)
    assert not all(doubtful)
    for offset in range(0, len(lines), 7):
        begun = projection_at(reader, offset)
        assert [begun.feed(at, e) for at, e in reader.events(offset, offset + 200)] == lines[offset : offset + 200]
