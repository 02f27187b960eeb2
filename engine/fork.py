"""``unlost fork``: a new run that begins where another one was at a checkpoint. The old run is only read.

The new journal begins with the state folded up to the checkpoint's cut; payloads are hard-linked where that works,
so that nothing of what was buffered or under way then has to be generated again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

import msgspec
import yaml

from ..journal.errors import EXIT_USAGE, UnlostError
from ..journal.writer import JournalWriter
from ..replay.events import CHECKPOINT_TRAINER, EVENT_TYPES, StateImage
from ..replay.fold import EVENTS_FOLDER, fold_run
from ..replay.payload_records import PAYLOAD_DIRECTORY
from ..replay.state import Checkpoint, State
from .checkpoints import MANIFEST, manifest_bytes, name_of
from .inspect import config_of, load_manifest
from .retention import payload_needs
from .runfolder import CONFIG_FILE


class ForkRefused(UnlostError):
    """The fork can't be made; nothing was written."""

    exit_code = EXIT_USAGE


def fork_run(run_dir: str | Path, step: int, new_dir: str | Path) -> State:
    """Make ``new_dir`` from the newest usable trainer checkpoint of ``step``. Returns the new run's state.

    Raises ForkRefused if the target is not empty or there is no such checkpoint; CheckpointDamaged if it is damaged.
    """
    source, target = Path(run_dir), Path(new_dir)
    if target.exists() and any(target.iterdir()):
        raise ForkRefused(f"{target}: not empty; name a new folder")
    config = config_of(source)
    checkpoint = _find(fold_run(source), step, source)
    root = Path(config.checkpoint_dir)
    manifest = load_manifest(root, fold_run(source), checkpoint)
    state = fold_run(source, at=checkpoint.cut)
    run_id = uuid.uuid4().hex
    temporary = target.with_name(f".{target.name}.fork-{run_id[:8]}")
    try:
        temporary.mkdir(parents=True)
        _copy_payloads(source, temporary, state)
        _copy_checkpoint(root, temporary, checkpoint, manifest_bytes(msgspec.structs.replace(manifest, run_id=run_id)))
        _write_journal(temporary, state, checkpoint, run_id)
        _write_config(source, temporary, target)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise
    return fold_run(target)


def _find(state: State, step: int, source: Path) -> Checkpoint:
    known = [c for c in state.checkpoints if c.kind == CHECKPOINT_TRAINER and c.committed]
    matching = [c for c in known if c.trainer_version == step]
    if not matching:
        have = ", ".join(str(c.trainer_version) for c in known) or "none"
        raise ForkRefused(f"{source}: no checkpoint of step {step}; there are: {have}")
    return matching[-1]


def _copy_payloads(source: Path, target: Path, state: State) -> None:
    sealed, whole = payload_needs(state)
    (target / PAYLOAD_DIRECTORY).mkdir()
    for name in sorted(set(sealed) | whole):
        if name and (source / PAYLOAD_DIRECTORY / name).is_dir():
            # Linked segments are never written again: a payload journal has one opening (protocol rule 6) …
            shutil.copytree(source / PAYLOAD_DIRECTORY / name, target / PAYLOAD_DIRECTORY / name, copy_function=_link)


def _link(source: str, target: str) -> None:
    """Link sealed segments; copy what a running worker of the old run may still change."""
    if source.endswith(".zst"):
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


def _copy_checkpoint(root: Path, target: Path, checkpoint: Checkpoint, manifest: bytes) -> None:
    name = name_of(checkpoint)
    folder = target / "checkpoints" / name
    shutil.copytree(root / name, folder, copy_function=shutil.copy2)
    (folder / MANIFEST).write_bytes(manifest)


def _write_journal(target: Path, state: State, checkpoint: Checkpoint, run_id: str) -> None:
    """One event: the state as it was, under a new run id, with this checkpoint as the only one to go back to."""
    state.run_id = run_id
    state.started = {checkpoint.id: state.started[checkpoint.id]}
    _begin_branch(state, checkpoint.trainer_version)
    state.checkpoints = []
    state.floor = checkpoint.trainer_version
    state.ended = "forked"
    writer = JournalWriter.open(target / EVENTS_FOLDER, EVENT_TYPES, journal_id=run_id, incarnation=state.incarnation)
    with writer:
        writer.rotate(StateImage(state.t, msgspec.Raw(state.image())))
        writer.sync()


def _begin_branch(state: State, version: int) -> None:
    """As a rollback to ``version`` would: the old run went on, and what it did with later weights can be adopted.

    Under its own branch the new run would call other weights by the same names (protocol rule 18).
    """
    state.branch_caps = [min(cap, version) for cap in state.branch_caps] + [version]
    state.branch += 1


def _write_config(source: Path, temporary: Path, target: Path) -> None:
    tree = yaml.safe_load((source / CONFIG_FILE).read_text(encoding="utf-8"))
    tree["run"]["dir"] = str(target.resolve())
    tree["checkpointing"]["checkpoint_dir"] = str(target.resolve() / "checkpoints")
    (temporary / CONFIG_FILE).write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
