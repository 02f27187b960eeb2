"""Look into a run without starting it: its checkpoints, and what a restart would do. Reads only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ..replay.events import AttemptKey
from ..replay.fold import fold_run
from ..replay.payload_records import PAYLOAD_DIRECTORY, PayloadDamaged
from ..replay.payloads import PayloadLoss, PayloadStore
from ..replay.plan import RestorePlan, attempts_to_look_for, candidates, plan_restore
from ..replay.state import COMMITTED, COMPLETE, SEALED, UNFINISHED, Checkpoint, State
from ..replay.transitions import returned_groups
from .checkpoints import MANIFEST, Manifest, check_manifest, name_of
from .config import load_config
from .config_keys import Config
from .protocols import CheckpointDamaged
from .runfolder import CONFIG_FILE, nothing_to_do

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint of the history. ``problem`` empty: it can be restored."""

    checkpoint: Checkpoint
    name: str
    bytes: int
    files: int
    problem: str


def config_of(run_dir: str | Path) -> Config:
    """The configuration that the run was last started with. ConfigError if its copy in the run's folder is gone."""
    return load_config(Path(run_dir) / CONFIG_FILE)


def inspect_checkpoints(run_dir: str | Path, *, contents: bool = True) -> list[CheckpointReport]:
    """Every checkpoint of this history, newest first. ``contents``: read all files and compare their digests."""
    state = fold_run(run_dir)
    root = Path(config_of(run_dir).checkpoint_dir)
    known = sorted([*state.checkpoints, *state.started.values()], key=lambda c: c.cut, reverse=True)
    return [_inspect(root, state, checkpoint, contents) for checkpoint in known]


def _inspect(root: Path, state: State, checkpoint: Checkpoint, contents: bool) -> CheckpointReport:
    name = name_of(checkpoint)
    try:
        manifest = load_manifest(root, state, checkpoint)
        size = sum((root / name / path).stat().st_size for path in manifest.files if (root / name / path).is_file())
        problem = _first_problem(root / name, manifest) if contents else ""
    except CheckpointDamaged as error:
        unfinished = not checkpoint.committed and not (root / name).is_dir()
        return CheckpointReport(checkpoint, name, 0, 0, "never finished" if unfinished else str(error))
    return CheckpointReport(checkpoint, name, size, len(manifest.files), problem)


def load_manifest(root: Path, state: State, checkpoint: Checkpoint) -> Manifest:
    """The verified manifest. Raises CheckpointDamaged."""
    place = root / name_of(checkpoint) / MANIFEST
    try:
        data = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointDamaged(f"{place}: missing") from error
    return check_manifest(str(place), data, state, checkpoint)


def _first_problem(folder: Path, manifest: Manifest) -> str:
    for path, digest in sorted(manifest.files.items()):
        try:
            found = file_digest(folder / path)
        except FileNotFoundError:
            return f"{path} is missing"
        if found != digest:
            return f"{path} is damaged: SHA-256 {found[:16]}… instead of {digest[:16]}…"
    return ""


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PlannedRestart:
    """What a restart now would do. ``notes``: nothing to do, checkpoints passed over, payloads lost."""

    plan: RestorePlan
    checkpoint_name: str
    notes: list[str]


def plan_restart(run_dir: str | Path, mode: str = "latest", *, contents: bool = False) -> PlannedRestart:
    """Dry run of a restore: the plan with its counters. ``contents``: verify the checkpoint's files too.

    Row counters stay 0: which rows would come from the snapshot and which from payloads shows only when it is loaded.
    """
    config = config_of(run_dir)
    state = fold_run(run_dir)
    root = Path(config.checkpoint_dir)
    notes: list[str] = []
    if mode == "latest" and (text := nothing_to_do(config, state)):
        notes.append(text)
    chosen = _choose(root, state, mode, contents, notes)
    full = config.data_plane.payloads == "full"
    store = PayloadStore(Path(run_dir) / PAYLOAD_DIRECTORY)
    tails = {}
    lost: list[AttemptKey] = []
    if full:
        found = store.sealed_tails(attempts_to_look_for(state))
        tails = found.attempts
        notes += [_loss_text(loss) for loss in found.losses]
        lost = _unreadable(state, store, chosen, notes)
    plan = plan_restore(
        state,
        tails,
        chosen,
        lost=lost,
        resume_prefixes=config.async_rl.prefix == "resume",
        granularity=config.async_rl.recovery_granularity,
    )
    return PlannedRestart(plan, name_of(chosen) if chosen is not None else "", notes)


def _choose(root: Path, state: State, mode: str, contents: bool, notes: list[str]) -> Checkpoint | None:
    for checkpoint in candidates(state):
        if mode == "none" or (mode != "latest" and str(checkpoint.trainer_version) != mode):
            continue
        report = _inspect(root, state, checkpoint, contents)
        if not report.problem:
            return checkpoint
        notes.append(f"{report.name}: {report.problem}")
    if state.floor > 0 or mode not in ("latest", "none", "0"):
        raise CheckpointDamaged(f"{root}: no usable checkpoint for --restore {mode}; a restart would be refused")
    return None


def _loss_text(loss: PayloadLoss) -> str:
    return f"payload journal {loss.journal}: {loss.reason}"


def _unreadable(state: State, store: PayloadStore, chosen: Checkpoint | None, notes: list[str]) -> list[AttemptKey]:
    """Sealed siblings whose payload can't be read; a snapshot may still have their rows."""
    returning = set(returned_groups(state, chosen.trainer_version if chosen is not None else 0))
    lost: list[AttemptKey] = []
    for group in state.groups.values():
        if group.status not in (UNFINISHED, COMPLETE, COMMITTED) and group.id not in returning:
            continue
        for index, sibling in enumerate(group.siblings):
            if sibling.status == SEALED and sibling.receipt is not None:
                try:
                    store.load(sibling.receipt, group.key(index))
                except PayloadDamaged as error:
                    lost.append(group.key(index))
                    notes.append(f"group {group.id} sibling {index}: {error}")
    return lost
