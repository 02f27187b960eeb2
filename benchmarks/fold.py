"""How fast events are folded, decoding included and not."""

from __future__ import annotations

import gc
import itertools
from time import thread_time

import msgspec

from unlost.journal.frames import EventTypes
from unlost.replay.events import EVENT_TYPES, Event
from unlost.replay.fold import fold_events

from .result import Result, Table, Target, median, spread
from .stream import engine_events

FRAME = 400


def run(quick: bool) -> Result:
    """The made-up training, folded from its first event on; images do not matter to a fold that is under way."""
    events, repeats = (20_000, 1) if quick else (200_000, 5)
    told: list[Event] = list(itertools.islice(engine_events(), events))
    encode = msgspec.msgpack.Encoder().encode
    frames = [encode(told[at : at + FRAME]) for at in range(0, events, FRAME)]
    decode = EventTypes(EVENT_TYPES).decode_frame
    decoding, folding, both = [], [], []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        began = thread_time()
        for frame in frames:
            decode(frame)
        decoding.append((thread_time() - began) / events * 1e6)
        began = thread_time()
        state = fold_events(enumerate(told))
        folding.append((thread_time() - began) / events * 1e6)
        began = thread_time()
        fold_events(enumerate(event for frame in frames for event in decode(frame)))
        both.append((thread_time() - began) / events * 1e6)
    gc.unfreeze()
    speed = 1e6 / median(folding)
    return Result(
        name="fold",
        title="Fold",
        order=80,
        method=(
            f"{events:,} events of a made-up training ({state.trainer_version} steps, {len(state.groups)} groups alive "
            f"at the end) in frames of {FRAME}, from memory; CPU time of the one thread, {repeats} repeats."
        ),
        tables=[
            Table(
                "",
                ["", "µs per event: median (lowest to highest)", "events/s"],
                [
                    ["decode", spread(decoding), 1e6 / median(decoding)],
                    ["fold of decoded events, all checks", spread(folding), speed],
                    ["decode and fold", spread(both), 1e6 / median(both)],
                ],
            )
        ],
        targets=[
            Target(
                "fold", "≥ 700k events/s", f"{speed:,.0f}/s, {1e6 / median(both):,.0f}/s with decoding", speed >= 7e5
            )
        ],
        limits="Time of a whole restore, and how it follows history: see the section on ten million events.",
    )
