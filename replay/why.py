"""Why does nothing happen? What a run is waiting for, from its journal (and the configuration beside it), nothing else.

Ages are on the run's clock, up to now if the run's writer is alive, else up to the journal's last event; how long a run
has stood still is up to now.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..journal.lock import boot_id, describe, host_name, process_start
from ..journal.storage import RealStorage
from . import events as ev
from .fold import fold_events, open_events
from .state import CLAIMED, COMMITTED, COMPLETE, DISPATCHED, IDLE, SEALED, UNFINISHED, State

_LISTED_MAX: Final = 20
_HEARTBEAT_S_MAX: Final = 60.0

_COMPONENT: Final[dict[type[ev.Event], str]] = {
    ev.BatchReserved: "loader",
    ev.BatchAdmitted: "sampler",
    ev.AttemptDispatched: "dispatch",
    ev.AttemptSealed: "generation",
    ev.AttemptFailed: "generation",
    ev.AttemptAbandoned: "generation",
    ev.GroupCommitted: "data plane",
    ev.RowsCleared: "clears",
    ev.StepClaimed: "trainer",
    ev.StepApplied: "trainer",
    ev.WeightsSynced: "weight sync",
    ev.CheckpointStarted: "checkpoints",
    ev.CheckpointCommitted: "checkpoints",
    ev.CheckpointFailed: "checkpoints",
    ev.CheckpointSkipped: "checkpoints",
    ev.RestoreStarted: "restore",
    ev.RestoreCompleted: "restore",
    ev.WorkerStarted: "workers",
    ev.WorkerStopped: "workers",
}


class Finding(NamedTuple):
    """Something that is waited for. ``since_s``: age, or None if it has none. ``detail``: names and numbers."""

    what: str
    detail: str
    since_s: float | None = None


class Why(NamedTuple):
    """``components``: name → seconds since its last event. ``alive``: a writer holds the run; None if unknown."""

    offset: int
    t_s: float
    alive: bool | None
    holder: str
    findings: list[Finding]
    components: dict[str, float]
    missing: list[dict[str, Any]]


def why(run: str | Path) -> Why:
    """Look at a run's newest state. Raises what reading a journal raises."""
    reader = open_events(run)
    start = reader.last_image()
    last: dict[str, int] = {}
    in_progress: dict[int, int] = {}

    def watched() -> Any:
        for offset, event in reader.events(reader.first_offset if start is None else start):
            component = _COMPONENT.get(type(event))
            if component is not None:
                last[component] = event.t
            if isinstance(event, ev.CheckpointStarted):
                in_progress[event.checkpoint] = event.t
            yield offset, event

    state = fold_events(watched())
    alive, holder = _writer(reader.directory)
    now = _now(state) if alive else state.t
    for c in set(in_progress) - set(state.started):
        del in_progress[c]
    settings = dict(state.settings) | _config(Path(run))
    findings = list(_findings(state, settings, in_progress, now, alive=alive))
    missing = [] if state.ended == ev.ENDED_FINISHED else _missing(state, now)
    components = {name: (now - t) / 1e6 for name, t in sorted(last.items(), key=lambda item: item[1])}
    return Why(state.offset, state.t / 1e6, alive, holder, findings, components, missing)


def _now(state: State) -> int:
    """The run's clock now, by the wall clock; never before its last event."""
    return max(state.t, state.anchor_t + time.time_ns() // 1000 - state.anchor_wall_us)


def _writer(directory: str) -> tuple[bool | None, str]:
    """Whether someone writes, by the LOCK file: exact on its own machine, else by its heartbeat."""
    try:
        held = describe(RealStorage(), directory)
    except OSError:
        return None, ""
    if held is None:
        return False, ""
    holder = f"process {held['pid']} on {held['host']}"
    if held["released"]:
        return False, f"last: {holder}"
    if held["host"] == host_name() and held["boot"] == boot_id():
        alive = bool(held["process_start"]) and process_start(held["pid"]) == held["process_start"]
        return alive, holder if alive else f"{holder} is dead"
    age_s = (time.time_ns() - held["heartbeat_wall_ns"]) / 1e9
    return age_s < _HEARTBEAT_S_MAX, f"{holder}, last heartbeat {age_s:.0f} s ago"


def _config(run: Path) -> dict[str, Any]:
    """The run's last configuration as ``section.key``; empty if it is not there."""
    import yaml

    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, yaml.YAMLError, AttributeError):
        for section, keys in yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).items():
            if isinstance(keys, dict):
                found |= {f"{section}.{key}": value for key, value in keys.items()}
    return found


def _findings(
    state: State, settings: dict[str, Any], in_progress: dict[int, int], now: int, *, alive: bool | None
) -> Any:
    """In the order in which one would want to know."""
    still_s = (_now(state) - state.t) / 1e6
    if state.ended:
        yield Finding("the run has ended", f"reason: {state.ended}", still_s)
        if state.ended == ev.ENDED_FINISHED:
            return  # what is left over is waited for by no one
    elif alive is False:
        yield Finding(
            "no one runs it",
            f"incarnation {state.incarnation} did not end in order; the same train command restores it",
            still_s,
        )
    if state.restoring is not None:
        yield Finding(
            "a restore is not completed", f"from step {state.restoring.from_version} to {state.restoring.to_version}"
        )
    elif state.needs_restore:
        yield Finding("a restore has not begun", f"incarnation {state.incarnation} has started and nothing more")
    yield from _step(state, settings)
    for checkpoint in state.started.values():
        since = (now - in_progress[checkpoint.id]) / 1e6 if checkpoint.id in in_progress else None
        yield Finding(
            "a checkpoint is being written", f"{checkpoint.kind} {checkpoint.id}, row clears wait for it", since
        )
    for batch in state.reserved.values():
        reserved = min((state.groups[g].reserved_t for g in batch.groups), default=now)
        yield Finding(
            "the sampler's gate is closed, or the run stopped at it",
            f"batch {batch.admission_id} is reserved and not admitted ({len(batch.groups)} groups); dispatch index "
            f"{state.dispatch_index}, trainer version {state.trainer_version}",
            (now - reserved) / 1e6,
        )
    yield from _limits(state, settings)
    if state.zombies:
        yield Finding("aborted attempts have not answered", f"{len(state.zombies)} of groups that are gone")


def _step(state: State, settings: dict[str, Any]) -> Any:
    version, claimed = state.trainer_version, len(state.open_groups)
    wanted = settings.get("grpo.num_prompts_per_step")
    size = f" of {wanted - state.shortfall.get(version, 0)}" if isinstance(wanted, int) else ""
    stamped = [g for g in state.groups.values() if g.target_step in (-1, version)]
    ready = sum(g.status == COMMITTED for g in stamped)
    unfinished = sum(g.status == UNFINISHED for g in stamped)
    complete = sum(g.status == COMPLETE for g in stamped)
    whole = isinstance(wanted, int) and claimed >= wanted - state.shortfall.get(version, 0)
    if state.open_step >= 0 and whole:
        yield Finding(f"step {version} is being trained", f"{claimed} groups claimed")
        return
    yield Finding(
        f"step {version} waits for groups",
        f"{claimed}{size} claimed; ready for it: {ready} committed, {complete} complete but not yet in the data plane, "
        f"{unfinished} unfinished",
    )


def _limits(state: State, settings: dict[str, Any]) -> Any:
    buffered = len(state.committed) + len(state.complete) + len(state.unfinished)
    most = settings.get("async_rl.max_buffered_rollouts")
    if isinstance(most, int) and buffered >= most:
        yield Finding("the buffer is full", f"{buffered} groups, async_rl.max_buffered_rollouts is {most}")
    in_flight = sum(any(s.status == DISPATCHED for s in state.groups[g].siblings) for g in state.unfinished)
    most = settings.get("async_rl.max_inflight_prompts")
    if isinstance(most, int) and in_flight >= most:
        yield Finding("all slots are taken", f"{in_flight} groups, async_rl.max_inflight_prompts is {most}")
    waiting = [g for g in state.unfinished if all(s.status == IDLE for s in state.groups[g].siblings)]
    if waiting:
        yield Finding("admitted groups have no slot yet", f"{len(waiting)} groups: {_some(waiting)}")


def _some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:_LISTED_MAX])) + (", …" if len(ids) > _LISTED_MAX else "")


def _missing(state: State, now: int) -> list[dict[str, Any]]:
    """Siblings that the next step may be waiting for, the longest-running first."""
    rows: list[dict[str, Any]] = []
    for group in state.groups.values():
        if group.status not in (UNFINISHED, CLAIMED) or group.target_step not in (-1, state.trainer_version):
            continue
        for index, sibling in enumerate(group.siblings):
            if sibling.status == SEALED:
                continue
            running = sibling.status == DISPATCHED
            rows.append(
                {
                    "group": group.id,
                    "prompt": group.prompt.sample_id,
                    "sibling": index,
                    "attempt": sibling.attempt,
                    "state": "running" if running else "not running",
                    "worker": sibling.worker if running else None,
                    "worker_alive": state.workers[sibling.worker].alive if sibling.worker in state.workers else None,
                    "since_s": (now - (sibling.dispatched_t if running else group.reserved_t)) / 1e6,
                    "failures": group.infra_failures + group.data_failures + group.worker_losses,
                }
            )
    return sorted(rows, key=lambda row: -float(row["since_s"]))[:_LISTED_MAX]
