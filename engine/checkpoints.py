"""Checkpoints: cut, trainer state, data plane snapshot, manifest, publication by rename, retention.

Nothing waits for a checkpoint but the clears of rows: the cut is an event's offset, so a consistent state needs no
pause. Order of effects: CheckpointStarted (the cut) → saves → the cut durable → manifest → fsync, rename, fsync of the
folder → CheckpointCommitted durable → rotate, retire, remove, prune (protocol rules 11 to 14, 22).

A checkpoint's folder is named by trainer version, incarnation and id, so a rename never meets an existing one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from ..journal.errors import UnlostError
from ..replay import events as ev
from ..replay.state import Checkpoint, State
from .ledger import Ledger
from .protocols import CheckpointDamaged, Clock, DataPlane, Trainer

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TRAINER_FOLDER = "trainer"
DATA_PLANE_FOLDER = "data_plane"
MANIFEST_FORMAT = 1
TEMPORARY = "tmp_"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a published checkpoint says of itself. ``files``: path in the folder -> SHA-256, taken while writing."""

    format: int
    run_id: str
    checkpoint: int
    kind: str
    incarnation: int
    branch: int
    trainer_version: int
    cut: int
    has_data_plane: bool
    rows: int
    files: dict[str, str]

    def digests(self, folder: str) -> dict[str, str]:
        """The part of ``files`` below ``folder``, with paths relative to it."""
        return {path[len(folder) + 1 :]: d for path, d in self.files.items() if path.startswith(folder + "/")}


class Folders(Protocol):
    """File operations on checkpoint folders; every coroutine returns only when its effect is durable."""

    async def names(self, path: str) -> list[str]:
        """Entries; empty if the folder is absent."""
        ...

    async def make(self, path: str) -> None:
        """Make a folder and its parents."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a new file and sync it."""
        ...

    async def read(self, path: str) -> bytes:
        """A whole file; FileNotFoundError if absent."""
        ...

    async def publish(self, source: str, target: str) -> int:
        """Sync every folder below ``source``, rename, sync the parent. Returns the bytes below. Fails if it exists."""
        ...

    async def remove_tree(self, path: str) -> None:
        """Remove a folder and all below; absent is fine."""
        ...


async def remove_or_leave(folders: Folders, path: str) -> None:
    """Remove what nobody needs any more; where that fails, the run goes on, and the next time it is tried again."""
    try:
        await folders.remove_tree(path)
    except OSError as error:
        log.warning("%s stays behind: %s", path, error)


async def names_or_none(folders: Folders, path: str) -> list[str]:
    """Entries of a folder to be tidied up; where they can't be listed, none, and the next time it is tried again."""
    try:
        return await folders.names(path)
    except OSError as error:
        log.warning("%s can't be listed, what is in it stays: %s", path, error)
        return []


class CheckpointLimit(UnlostError):
    """Too many checkpoints failed in a row."""


def checkpoint_name(kind: str, trainer_version: int, incarnation: int, checkpoint: int) -> str:
    """Folder name; sorts by version."""
    prefix = "step" if kind == ev.CHECKPOINT_TRAINER else "rollout"
    return f"{prefix}_{trainer_version:07d}-i{incarnation:05d}-c{checkpoint:06d}"


def name_of(checkpoint: Checkpoint) -> str:
    """Folder name of a checkpoint of this history."""
    return checkpoint_name(checkpoint.kind, checkpoint.trainer_version, checkpoint.incarnation, checkpoint.id)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


async def read_manifest(folders: Folders, root: str, state: State, checkpoint: Checkpoint) -> Manifest:
    """The verified manifest of a checkpoint of this history. Raises CheckpointDamaged, also if it is missing."""
    place = f"{root}/{name_of(checkpoint)}/{MANIFEST}"
    try:
        data = await folders.read(place)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointDamaged(f"{place}: missing") from error
    return check_manifest(place, data, state, checkpoint)


def check_manifest(place: str, data: bytes, state: State, checkpoint: Checkpoint) -> Manifest:
    """Whether these bytes are the manifest of that checkpoint of this history (protocol rule 13).

    Raises CheckpointDamaged if they are unreadable, changed, or another checkpoint's.
    """
    if checkpoint.digest and hashlib.sha256(data).hexdigest() != checkpoint.digest:
        raise CheckpointDamaged(f"{place}: its digest is not the one in the journal")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"{place}: {error}") from error
    said = (manifest.run_id, manifest.checkpoint, manifest.trainer_version, manifest.cut, manifest.incarnation)
    known = (state.run_id, checkpoint.id, checkpoint.trainer_version, checkpoint.cut, checkpoint.incarnation)
    if said != known or manifest.format != MANIFEST_FORMAT:
        raise CheckpointDamaged(f"{place}: belongs to {said}, this history has {known}")
    return manifest


class Checkpointer:
    """Takes checkpoints, one at a time. ``begin`` returns once the next train step may start.

    ``failures_max``: retryable failures in a row before CheckpointLimit. ``payloads_full``: a row missing from the data
    plane is counted, not fatal, since its payload is journaled. ``after_commit`` prunes what the new floor sets free;
    ``spawn`` starts a task whose failure ends the run.
    """

    def __init__(
        self,
        ledger: Ledger,
        folders: Folders,
        root: str,
        trainer: Trainer,
        data_plane: DataPlane,
        clock: Clock,
        *,
        keep_latest_k: int,
        failures_max: int,
        save_data_plane: bool,
        payloads_full: bool,
        after_commit: Callable[[], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, bool]], asyncio.Task[bool]],
    ) -> None:
        self.ledger = ledger
        self.folders = folders
        self.root = root
        self.trainer = trainer
        self.data_plane = data_plane
        self.clock = clock
        self.keep_latest_k = keep_latest_k
        self.failures_max = failures_max
        self.save_data_plane = save_data_plane
        self.payloads_full = payloads_full
        self.after_commit = after_commit
        self.spawn = spawn
        self.clears_may_run = asyncio.Event()
        self.clears_may_run.set()
        self.no_clear_runs = asyncio.Event()
        self.no_clear_runs.set()
        self.clears_deferred = 0
        self.failures_in_a_row = 0
        self.running: asyncio.Task[bool] | None = None
        self._captured = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self.running is not None and not self.running.done()

    async def begin(self, kind: str) -> asyncio.Task[bool] | None:
        """Start a checkpoint; its task's result says whether it was published. None: skipped, one is in progress.

        For a trainer checkpoint call this at a step boundary: trainer state is asked for, and belongs to exactly the
        cut, before this returns (protocol rule 11).
        """
        state, t = self.ledger.state, self.clock.now_us
        if self.busy:
            self.ledger.record(ev.CheckpointSkipped(t(), kind, "another checkpoint is still being written"))
            return None
        checkpoint, version = state.next_checkpoint, state.trainer_version
        name = checkpoint_name(kind, version, state.incarnation, checkpoint)
        temporary = f"{self.root}/{TEMPORARY}{name}"
        cut = self.ledger.record(ev.CheckpointStarted(t(), checkpoint, kind, version))
        expected = [key for g in state.committed for key in state.groups[g].sealed_row_keys()]
        self.clears_may_run.clear()
        self._captured.clear()
        work = self._save(kind, checkpoint, version, cut, name, temporary, expected)
        self.running = self.spawn(work)
        if kind == ev.CHECKPOINT_TRAINER:
            await self._captured.wait()
        return self.running

    async def _save(
        self, kind: str, checkpoint: int, version: int, cut: int, name: str, temporary: str, expected: list[str]
    ) -> bool:
        began = self.clock.now_us()
        try:
            files = await self._write_files(kind, temporary, cut)
            missing = await self._missing(expected)
            if missing and not self.payloads_full:
                raise OSError(f"{missing} rows that the ledger counts on are missing from the data plane")
            manifest = self._manifest(kind, checkpoint, version, cut, files, len(expected))
            data = manifest_bytes(manifest)
            await self.folders.write(f"{temporary}/{MANIFEST}", data)
            await self.ledger.before_destructive(cut)  # rule 12; and a newer incarnation would show here
            size = await self.folders.publish(temporary, f"{self.root}/{name}")
        except Exception as error:  # noqa: BLE001 - sorted into retryable and fatal there
            await self._failed(kind, checkpoint, temporary, error, began)
            return False
        finally:
            self.clears_may_run.set()
        floor = self._floor(kind, version)
        digest = hashlib.sha256(data).hexdigest()
        seconds = (self.clock.now_us() - began) / 1e6
        deferred, self.clears_deferred = self.clears_deferred, 0
        offset = self.ledger.record(
            ev.CheckpointCommitted(
                self.clock.now_us(),
                checkpoint,
                kind,
                version,
                cut,
                name,
                digest,
                size,
                seconds,
                floor,
                len(expected),
                missing,
                deferred,
            )
        )
        self.failures_in_a_row = 0
        await self.ledger.before_destructive(offset)
        if kind == ev.CHECKPOINT_TRAINER:
            self.ledger.image()
        await self.remove_leftovers()
        await self.after_commit()
        return True

    async def _write_files(self, kind: str, temporary: str, cut: int) -> dict[str, str]:
        """Trainer state and snapshot side by side; returns path -> digest."""
        files: dict[str, str] = {}
        parts: list[tuple[str, asyncio.Task[dict[str, str]]]] = []
        try:
            if kind == ev.CHECKPOINT_TRAINER:
                await self.folders.make(f"{temporary}/{TRAINER_FOLDER}")
                parts.append((TRAINER_FOLDER, asyncio.create_task(self.trainer.save(f"{temporary}/{TRAINER_FOLDER}"))))
                await asyncio.sleep(0)  # the request is with the trainer before any later train call
            else:
                await self.folders.make(temporary)
        finally:
            self._captured.set()
        await self.ledger.durable(cut)
        if self.save_data_plane:
            await self.no_clear_runs.wait()  # else the index could name rows that are on their way out
            save = self.data_plane.save(f"{temporary}/{DATA_PLANE_FOLDER}")
            parts.append((DATA_PLANE_FOLDER, asyncio.create_task(save)))
        results = await asyncio.gather(*(task for _, task in parts), return_exceptions=True)
        for (folder, _), result in zip(parts, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            files |= {f"{folder}/{path}": digest for path, digest in result.items()}
        return files

    async def _missing(self, expected: list[str]) -> int:
        """How many rows of the cut the data plane does not have."""
        inventory: Mapping[str, int] = await self.data_plane.inventory()
        return sum(key not in inventory for key in expected)

    def _manifest(
        self, kind: str, checkpoint: int, version: int, cut: int, files: dict[str, str], rows: int
    ) -> Manifest:
        state = self.ledger.state
        return Manifest(
            format=MANIFEST_FORMAT,
            run_id=state.run_id,
            checkpoint=checkpoint,
            kind=kind,
            incarnation=state.incarnation,
            branch=state.branch,
            trainer_version=version,
            cut=cut,
            has_data_plane=self.save_data_plane,
            rows=rows,
            files=files,
        )

    def _floor(self, kind: str, version: int) -> int:
        """The oldest version that a restore may still need: step 0 until ``keep_latest_k`` checkpoints are there."""
        state = self.ledger.state
        if kind != ev.CHECKPOINT_TRAINER:
            return state.floor
        versions = [c.trainer_version for c in state.checkpoints if c.kind == ev.CHECKPOINT_TRAINER] + [version]
        kept = sorted(set(versions))[-self.keep_latest_k :]
        return max(state.floor, kept[0]) if len(kept) == self.keep_latest_k else state.floor

    async def _failed(self, kind: str, checkpoint: int, temporary: str, error: Exception, began: int) -> None:
        """Count it, clean up; a retryable one is an OSError or a time-out, anything else stops the run."""
        retryable = isinstance(error, OSError | TimeoutError)
        seconds = (self.clock.now_us() - began) / 1e6
        reason = f"{type(error).__name__}: {error}"
        log.error("%s checkpoint %d failed: %s", kind, checkpoint, reason)
        self.ledger.record(ev.CheckpointFailed(self.clock.now_us(), checkpoint, kind, reason[:500], retryable, seconds))
        if not retryable:
            raise error
        self.failures_in_a_row += 1
        await remove_or_leave(self.folders, temporary)
        if self.failures_in_a_row >= self.failures_max:
            raise CheckpointLimit(
                f"{self.failures_in_a_row} checkpoints failed in a row, the last: {reason} "
                f"(rollout_checkpointing.max_consecutive_failures)"
            ) from error

    async def remove_leftovers(self) -> None:
        """Remove folders of killed or retired checkpoints, once what retired them is durable.

        To a run that was taken over those of its successor look like leftovers: it is fenced here (protocol rule 1).
        """
        state = self.ledger.state
        keep = {name_of(c) for c in state.checkpoints} | {name_of(c) for c in state.started.values()}
        names = await names_or_none(self.folders, self.root)
        ours = [name for name in names if name.startswith(("step_", "rollout_", TEMPORARY))]
        left = [name for name in ours if name.removeprefix(TEMPORARY) not in keep]
        if left:
            await self.ledger.before_destructive(state.offset - 1)
        for name in left:
            await remove_or_leave(self.folders, f"{self.root}/{name}")

    async def wait(self) -> None:
        """Until no checkpoint is in progress; raises what stopped it."""
        if self.running is not None:
            await self.running
