"""A run's folder: open it for writing, fold what is in it, and refuse what does not belong together.

``RUN/events/`` event journal, ``RUN/payloads/<worker>/`` payload journals, ``RUN/checkpoints/``, ``RUN/weights/``,
``RUN/config.yaml`` the last resolved configuration, ``RUN/run.log``.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..journal.clock import SystemClock
from ..journal.errors import EXIT_USAGE, JournalMissing, UnlostError
from ..journal.lock import LOCK_NAME, DirectoryLock
from ..journal.reader import JournalReader
from ..journal.storage import RealStorage
from ..journal.writer import JournalWriter
from ..replay.events import EVENT_TYPES, AnyEvent
from ..replay.fold import EVENTS_FOLDER, fold_reader
from ..replay.state import State
from .config import Config, dump_config, recorded_settings, semantic_differences, semantic_fingerprint
from .controller import Identity
from .folders import sync_folder
from .progress import REASON_FINISHED

WEIGHTS_FOLDER = "weights"
LOG_FILE = "run.log"
LOCK_POLL_S = 0.2
CONFIG_FILE = "config.yaml"
CONFIG_TEMPORARY = "config.yaml.tmp"
VERSIONS_OF = ("unlost", "ray", "torch", "transferqueue", "transformers", "msgspec", "zstandard")


class RunMismatch(UnlostError):
    """The folder holds a run that this configuration does not continue."""

    exit_code = EXIT_USAGE


def nothing_to_do(config: Config, state: State) -> str:
    """What to say of a run that has ended with its last step; empty if there is something left to do."""
    if state.ended != REASON_FINISHED or state.trainer_version < config.grpo.max_steps:
        return ""
    return f"nothing to do: step {state.trainer_version} was the last; raise grpo.max_steps to go on"


class RunClock:
    """Time of the run: goes on where the journal's last event and the wall clock say, never backwards."""

    def __init__(self, state: State) -> None:
        now_wall = time.time_ns() // 1000
        since = now_wall - state.anchor_wall_us if state.anchor_wall_us else 0
        self._start = max(state.t, state.anchor_t + since)
        self._zero = time.monotonic_ns()

    def now_us(self) -> int:
        """Microseconds of run time."""
        return self._start + (time.monotonic_ns() - self._zero) // 1000

    def wall_us(self) -> int:
        """Unix time, microseconds."""
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        """asyncio.sleep."""
        import asyncio

        await asyncio.sleep(seconds)


@dataclass(slots=True)
class OpenRun:
    """An opened run: the writer holds the lock; the state is folded up to its next offset."""

    writer: JournalWriter[AnyEvent]
    state: State
    clock: RunClock
    identity: Identity


def check_run(config: Config, fingerprints: Mapping[str, str]) -> State | None:
    """What a start in ``run.dir`` would go on from: the folded state, or None for a new run. Changes nothing.

    Raises RunMismatch if dataset, model or a fixed setting differs, or if the folder holds something else; and what
    the journal raises if it is damaged.
    """
    run = Path(config.run_dir)
    events = run / EVENTS_FOLDER
    if not events.is_dir() or not any(name.endswith(".zst") for name in os.listdir(events)):
        foreign = (
            sorted(set(os.listdir(run)) - {EVENTS_FOLDER, CONFIG_FILE, CONFIG_TEMPORARY, LOG_FILE, WEIGHTS_FOLDER})
            if run.is_dir()
            else []
        )
        checkpoint_dir = Path(config.checkpoint_dir)
        if checkpoint_dir.is_dir() and any(n.startswith(("step_", "rollout_")) for n in os.listdir(checkpoint_dir)):
            raise RunMismatch(
                f"{checkpoint_dir}: holds checkpoints, but {events} has no journal; restore the journal, or set "
                f"run.dir (or checkpointing.checkpoint_dir) to a new folder"
            )
        if foreign and foreign != ["checkpoints"]:
            raise RunMismatch(
                f"{run}: not a run folder and not empty ({', '.join(foreign[:3])}); set run.dir to a new one"
            )
        return None
    try:
        state = fold_reader(JournalReader(events, EVENT_TYPES))
    except JournalMissing:
        return None
    if state.run_id:
        _compare(config, state, fingerprints)
    return state


def _compare(config: Config, state: State, fingerprints: Mapping[str, str]) -> None:
    differences = semantic_differences(state.settings, config)
    if differences:
        told = "; ".join(str(d) for d in differences)
        raise RunMismatch(
            f"{config.run_dir}: the run was started with other settings: {told}. Set them back, or set run.dir "
            f"to a new folder. (What may change on resume: docs/configuration.md)"
        )
    for name in ("dataset", "model"):
        before, now = state.fingerprints.get(name), fingerprints[name]
        if before != now:
            place = config.data.train if name == "dataset" else config.model.path
            raise RunMismatch(
                f"{place}: the {name} is not the one that {config.run_dir} was started with: fingerprint {now[:16]} "
                f"now, {str(before)[:16]} then. Bring the old one back, or set run.dir to a new folder"
            )


def check_free(config: Config, wait_s: float = 0.0) -> None:
    """Raise JournalLocked, naming the holder, if another process has the run. Leaves no trace otherwise.

    ``wait_s``: how long to wait for it to go first. A controller outlives its killed driver by a second or two, and
    whoever restarts a killed command at once should not be told that it still runs.
    """
    folder = Path(config.run_dir) / EVENTS_FOLDER
    storage = RealStorage()
    if not (folder / LOCK_NAME).is_file():
        return
    limit = time.monotonic() + wait_s
    while (lock := storage.try_lock(str(folder / LOCK_NAME))) is None and time.monotonic() < limit:
        time.sleep(LOCK_POLL_S)
    if lock is not None:
        lock.release()
        return
    DirectoryLock.acquire(storage, str(folder), SystemClock(), take_over=False).release()


def open_run(config: Config, fingerprints: Mapping[str, str], *, take_over: bool = False) -> OpenRun:
    """Lock, recover and fold; ready to record RunStarted. Raises JournalLocked (holder named), or as ``check_run``."""
    before = check_run(config, fingerprints)
    run = Path(config.run_dir)
    run_id = before.run_id if before is not None and before.run_id else uuid.uuid4().hex
    folder = run / EVENTS_FOLDER
    known = JournalReader(folder, EVENT_TYPES).journal_id if folder.is_dir() and before is not None else None
    writer = JournalWriter.open(
        folder, EVENT_TYPES, journal_id=known or run_id, options=config.journal.options(), take_over=take_over
    )
    try:
        state = fold_reader(JournalReader(folder, EVENT_TYPES)) if writer.next_offset else State()
        if state.offset != writer.next_offset:
            raise UnlostError(f"{folder}: folded to {state.offset}, the journal goes on at {writer.next_offset}")
        if state.run_id:
            _compare(config, state, fingerprints)
        write_config(run, config)
    except BaseException:
        writer.close()
        raise
    clock = RunClock(state)
    settings = msgspec.to_builtins(recorded_settings(config))
    prints = dict(fingerprints, semantics=semantic_fingerprint(config))
    identity = Identity(
        state.run_id or known or run_id, max(writer.incarnation, state.incarnation + 1), prints, settings, versions()
    )
    return OpenRun(writer, state, clock, identity)


def write_config(run: Path, config: Config) -> None:
    """The resolved configuration beside the journal, replaced atomically and durably: a power cut leaves one whole."""
    temporary = run / CONFIG_TEMPORARY
    try:
        with temporary.open("wb") as file:
            file.write(dump_config(config).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(run / CONFIG_FILE)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(str(run))


def versions() -> dict[str, str]:
    """Versions of what takes part, for the journal."""
    found = {}
    for package in VERSIONS_OF:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
