"""A journal whose beginning was pruned: what lived there then, told from the state image that it begins with.

The image becomes events that make the same state: the opening, the groups that were alive with their attempts, the
steps that a restore could still undo. They get offsets below 0, so that nothing takes them for events of the journal.
What the image does not hold is not made up: a sealed attempt has no seconds, an attempt that ended otherwise is gone,
and so is what a worker had counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..journal.errors import UnlostError
from . import events as ev
from .columns import EventColumns, TableFiles, table_columns
from .fold import fold_reader, open_events
from .state import CLAIMED, COMMITTED, DISPATCHED, POOL, RESERVED, SEALED, TRAINED, Group, Sibling, State

LAST_OFFSET: Final = -2
"""Of the last event made here: -1 stands for "none" in many events."""
_KIND_REQUEUED: Final = "requeued"


class Opening(NamedTuple):
    """Events made here from ``first_offset`` on are of that incarnation."""

    first_offset: int
    incarnation: int


def load_image(path: str, folder: Path, part: str) -> tuple[list[Opening], list[str]]:
    """Write the tables of what lived at the beginning of the run's journal. Returns whose they are, and notes."""
    try:
        reader = open_events(path)
        state = fold_reader(reader, reader.first_offset)
    except UnlostError as error:
        return [], [
            f"{path}: what lived when its beginning was pruned can't be read from its first state image: {error}"
        ]
    made = list(_events(state))
    first = LAST_OFFSET + 1 - len(made)
    openings: list[Opening] = []
    for offset, (incarnation, _) in enumerate(made, first):
        if not openings or openings[-1].incarnation != incarnation:
            openings.append(Opening(offset, incarnation))
    files = TableFiles(folder, part, table_columns())
    columns = EventColumns(files)
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    columns.add(first, [decode(encode(event)) for _, event in made])
    columns.flush()
    files.close()
    return openings, []


def _events(state: State) -> Iterator[tuple[int, ev.Event]]:
    """(incarnation, event), in an order in which they could have happened."""
    t, now = state.t, state.incarnation
    for branch, cap in enumerate(state.branch_caps, 1):
        yield 0, ev.TrainerRolledBack(t, cap, cap, branch, ())
    groups = sorted(state.groups.values(), key=lambda g: g.id)
    for group in groups:
        for event in _group(state, group):
            yield 0, event
    before: list[tuple[int, list[ev.Event]]] = []
    under_way: list[ev.Event] = []
    for group in groups:
        for index, sibling in enumerate(group.siblings):
            if sibling.status == SEALED and sibling.incarnation < now:
                before.append((sibling.incarnation, list(_attempt(group, index, sibling, sibling.dispatched_t))))
            elif sibling.status in (DISPATCHED, SEALED):  # one of an older incarnation: nobody said yet that it died
                begun = sibling.dispatched_t if sibling.incarnation == now else t
                under_way += _attempt(group, index, sibling, begun)
    for incarnation, told in sorted(before, key=lambda row: row[0]):
        for event in told:
            yield incarnation, event
    wall = state.anchor_wall_us + t - state.anchor_t
    yield now, ev.RunStarted(t, state.run_id, now, wall, "", 0, state.fingerprints, state.settings, {})
    for event in (*under_way, *_training(state, groups)):
        yield now, event
    if state.ended:
        yield now, ev.RunEnded(t, state.ended)


def _training(state: State, groups: list[Group]) -> Iterator[ev.Event]:
    """What the trainer had, has, and what a restore has begun to do about it."""
    t = state.t
    for group in groups:
        if group.status in (COMMITTED, CLAIMED, TRAINED):
            yield ev.GroupCommitted(t, group.id, len(group.siblings), -1, group.version_min, group.version_max)
    for step, trained in sorted(state.applied.items()):
        yield ev.StepClaimed(t, step, tuple(trained))
        yield ev.StepApplied(t, step, step + 1)
    if state.open_step >= 0:
        yield ev.StepClaimed(t, state.open_step, tuple(state.open_groups))
    if (restoring := state.restoring) is not None:
        yield ev.RestoreStarted(t, restoring.checkpoint, restoring.from_version, restoring.to_version)


def _group(state: State, group: Group) -> Iterator[ev.Event]:
    """Its prompt as taken from the loader; admitted, unless it waits for that, under its admission or in the pool."""
    kind = ev.KIND_ORDINARY
    if group.status == POOL:
        kind = _KIND_REQUEUED if group.id in state.requeued else ev.KIND_SPARE
    waits = group.status in (POOL, RESERVED)
    admission = group.admission_id if waits else LAST_OFFSET - group.id  # its own: targets differ within a batch
    yield ev.BatchReserved(
        group.reserved_t, admission, group.id, (group.prompt,), len(group.siblings), state.epoch, state.position, kind
    )
    if not waits:
        yield ev.BatchAdmitted(group.reserved_t, admission, group.target_step, -1, group.start_weight)


def _attempt(group: Group, index: int, s: Sibling, t: int) -> Iterator[ev.Event]:
    yield ev.AttemptDispatched(
        t, group.id, index, s.attempt, s.worker, s.branch, s.version, s.prefix, s.source_attempt
    )  # fmt: skip
    if s.status == SEALED and s.receipt is not None:
        yield ev.AttemptSealed(t, group.id, index, s.attempt, s.receipt)
