"""Further draws of a seed, from a third stream: storage that is out for a while, and stop requests that come twice.

An outage is a time in which every call of a kind on a kind of file fails. With it go the settings that decide what is
then done: stop or degrade, after how many failures, and how much may wait in memory. About one seed in eight has one.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sim_storage import Fault

if TYPE_CHECKING:
    from tests.simulation.watch import Watch
    from tests.simulation.world import Incarnation

SHARE = 0.13
OVERRUN = "bytes wait for the storage"
CALLS = ("sync", "sync", "write", "write", "create", "sync_directory")
PLACES = ("events", "events", "payloads", "payloads", "", "LOCK", "WATERMARK")


@dataclass
class Outage:
    """From ``at_s`` of a life on, ``op`` fails with ``code`` on paths that hold ``name``, for ``seconds``."""

    life: int
    op: str
    name: str
    code: int
    at_s: float
    seconds: float


@dataclass
class Storage:
    """What was drawn. ``stops``: (life, first request, second request), in seconds of that life.

    ``now``: the outages that there are at present.
    """

    outages: list[Outage] = field(default_factory=list)
    stops: list[tuple[int, float, float]] = field(default_factory=list)
    lives: list[dict[str, Any]] = field(default_factory=list)
    now: list[Fault] = field(default_factory=list)


def draw_storage(seed: int, lives: int) -> Storage:
    """What happens to the storage of this seed's run; most often nothing."""
    r, drawn = random.Random(f"{seed} storage"), Storage()
    if r.random() >= SHARE:
        return drawn
    drawn.lives = [{} for _ in range(lives)]
    if r.random() < 0.25:
        for _ in range(r.choice((1, 2))):
            first = r.uniform(0.0, 1.5) if r.random() < 0.4 else r.uniform(0.0, 8.0)
            drawn.stops.append((r.randrange(lives), first, first + r.choice((0.0, 0.001, 0.05, r.uniform(0, 1)))))
        for keys in drawn.lives:
            keys["stop__grace_s"] = r.choice((0.0, 0.1, 1.0, 60.0))
        if r.random() < 0.5:
            return drawn
    for _ in range(r.choice((1, 1, 2, 3))):
        name = r.choice(PLACES)
        op = r.choice(CALLS) if name not in ("LOCK", "WATERMARK") else "write"
        at_s = r.choice((0.0, r.uniform(0.0, 1.0), r.uniform(0.3, 6.0)))
        drawn.outages.append(
            Outage(
                r.choice((0, r.randrange(lives - 1))),
                op,
                name,
                r.choice((5, 28)),
                at_s,
                r.choice((0.02, 0.1, 0.5, 2.0, 10.0)),
            )
        )
    for keys in drawn.lives:
        keys["journal__on_failure"] = r.choice(("degrade", "degrade", "stop"))
        keys["journal__max_write_failures"] = r.choice((1, 3, 10, 1000))
        high = r.choice((1, 500, 5_000, 16 << 20))
        keys["journal__backlog_high_bytes"] = high
        keys["journal__backlog_max_bytes"] = max(high, r.choice((2_000, 10_000, 50_000, 256 << 20, 256 << 20)))
        keys["journal__heartbeat_s"] = r.choice((0.05, 1.0, 5.0))
    drawn.lives[-1]["journal__backlog_max_bytes"] = 256 << 20  # so that it ends some time
    return drawn


def arrange_storage(watch: Watch, life: Incarnation, number: int, drawn: Storage) -> None:
    """Set up what is to happen in the life of that number."""
    assert life.loop is not None
    faults = watch.world.storage.faults
    while drawn.now:  # none outlasts the life that it began in
        end_of(drawn, faults, drawn.now[0])

    def begin(outage: Outage) -> None:
        if life.dead:
            return
        fault = Fault(outage.op, OSError(outage.code, os.strerror(outage.code)), 10**9, name=outage.name)
        faults.append(fault)
        drawn.now.append(fault)
        assert life.loop is not None
        life.loop.call_later(outage.seconds, end, outage, fault)

    def end(outage: Outage, fault: Fault) -> None:
        end_of(drawn, faults, fault)
        failed = 10**9 - fault.times
        degraded = life.writer is not None and life.writer.metrics().degraded
        if failed and not life.dead:
            watch.coverage[f"storage: {outage.op} {outage.name or 'anywhere'} out and back"] += 1
            watch.coverage["storage: event journal was degraded"] += degraded

    for outage in drawn.outages:
        if outage.life == number:
            if outage.at_s:
                life.loop.call_later(outage.at_s, begin, outage)
            else:
                begin(outage)  # it opens into it
    for at, first, second in drawn.stops:
        if at == number:
            for moment in (first, second):
                life.loop.call_later(moment, lambda: None if life.dead else life.stop.set("signal", "test"))
            watch.coverage["storage: asked twice to stop"] += 1


def end_of(drawn: Storage, faults: list[Fault], fault: Fault) -> None:
    """This storage works again."""
    drawn.now[:] = [other for other in drawn.now if other is not fault]
    faults[:] = [other for other in faults if other is not fault]
