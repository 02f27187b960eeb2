"""Simulated parts with an onlooker at every effect."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tests.fakes import SimDataPlane, SimTrainer, read_verified, write_files
from tests.simulation.world import PAYLOADS, Incarnation, SimFolders
from unlost.engine.protocols import CheckpointDamaged, Row, StepMismatch, StepResult

if TYPE_CHECKING:
    from tests.simulation.watch import Watch


class WatchedWriter:
    """The journal's writer; each append and each flush is looked at."""

    def __init__(self, watch: Watch, life: Incarnation, inner: Any) -> None:
        self._watch, self._life, self._inner = watch, life, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def append(self, event: Any) -> int:
        if self._watch.current(self._life):
            self._watch.before_append(self._life, event)
        offset = self._inner.append(event)
        self._watch.appended(self._life, offset, event)
        return int(offset)

    def rotate(self, image: Any = None) -> int | None:
        if self._watch.current(self._life) and image is not None:
            self._watch.before_append(self._life, image)
        offset = self._inner.rotate(image)
        if offset is not None:
            self._watch.appended(self._life, offset, image)
        return offset

    def pump(self) -> None:
        self._watch.before_pump(self._life)
        self._inner.pump()
        self._watch.pumped(self._life)

    def sync_watermark(self) -> None:
        self._inner.sync_watermark()
        self._watch.pumped(self._life)

    def close(self, timeout_s: float | None = None) -> None:
        self._inner.close(timeout_s)
        self._watch.pumped(self._life)


class WatchedPlane(SimDataPlane):
    def __init__(self, watch: Watch, life: Incarnation, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watch, self.life = watch, life
        self.saving = 0
        self.restarted = False
        self.to_clear: set[str] = set()

    async def put(self, row: Row) -> None:
        self.watch.before_effect(self.life, "put")
        await super().put(row)
        self.watch.after_effect(self.life, "put")

    async def clear(self, keys: Sequence[str]) -> None:
        watch = self.watch
        if watch.current(self.life):
            watch.before_effect(self.life, "clear")
            watch.check(not self.saving, "rule 22", "rows are cleared while a snapshot is being written")
            owned = watch.durable.owned_rows() & set(keys)
            watch.check(not owned, "durable first", f"rows {sorted(owned)} are cleared, what is durable owns them")
            if not watch.settings.full:
                self._covered(set(keys))
        self.to_clear = set(keys)
        await super().clear(keys)
        self.to_clear = set()
        watch.after_effect(self.life, "clear")

    def _covered(self, keys: set[str]) -> None:
        """``payloads: none``: a trained group's rows stay until a durable trainer checkpoint covers its step."""
        model = self.watch.durable
        saved = max((v for k, v, _, done, _ in model.checkpoints.values() if k == "trainer" and done), default=0)
        if model.restoring:
            return
        for group in model.groups.values():
            if group.fate == "trained" and group.rows() & keys:
                self.watch.check(group.trained_in < saved, "rule 22", f"rows of group {group.id} go, saved is {saved}")

    async def restart(self) -> None:
        self.restarted = True
        await super().restart()

    async def save(self, directory: str) -> dict[str, str]:
        self.watch.before_effect(self.life, "plane save")
        if self.watch.current(self.life):
            self.watch.check(not self.to_clear, "rule 22", "a snapshot begins while a clear is under way")
        self.saving += 1
        try:
            files = await super().save(directory)
        finally:
            self.saving -= 1
        self.watch.after_effect(self.life, "plane save")
        return files

    async def load(self, directory: str, digests: Mapping[str, str]) -> None:
        self.watch.before_effect(self.life, "plane load")
        await super().load(directory, digests)
        self.watch.after_effect(self.life, "plane load")


class WatchedTrainer(SimTrainer):
    """Its weights are a hash of tokens, rewards and weight versions alone: the same for the same training."""

    def __init__(self, watch: Watch, life: Incarnation, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watch, self.life = watch, life

    async def start(self) -> None:
        self.watch.before_effect(self.life, "trainer start")
        await super().start()

    async def train(self, step: int, groups: Sequence[Sequence[str]]) -> StepResult:
        self.watch.before_effect(self.life, "train")
        async with self._busy:
            if step != self.applied:
                raise StepMismatch(f"asked for step {step}, the next one is {self.applied}")
            rows = [await self.plane.get(group) for group in groups]
            await self.clock.sleep(self.step_seconds)
            digest = hashlib.sha256(self.weights.encode())
            for row in (row for group in rows for row in group):
                spans = [(first, version) for first, _, version in row.weight_spans]
                merged = [s for i, s in enumerate(spans) if i == 0 or spans[i - 1][1] != s[1]]
                digest.update(repr((row.key.group, row.key.sibling, row.token_ids, row.reward, merged)).encode())
            self.weights = digest.hexdigest()
            self.trained.append(tuple(key for group in groups for key in group))
            self.applied += 1
            if self.watch.current(self.life):
                self.watch.digests[self.applied] = self.weights
                self.watch.trained.append((self.watch.live.incarnation, step, self.trained[-1]))
        self.watch.after_effect(self.life, "train")
        if step in self.lose_reply_of:
            self.lose_reply_of.discard(step)
            raise ConnectionError("the reply was lost")
        rewards = [row.reward for group in rows for row in group]
        tokens = sum(len(row.token_ids) // 4 for group in rows for row in group)
        mean = sum(rewards) / len(rewards)
        return StepResult(step, self.applied, 0.0, mean, tokens, self.step_seconds)

    async def save(self, directory: str) -> dict[str, str]:
        watch = self.watch
        if watch.current(self.life):
            watch.before_effect(self.life, "trainer save")
            checkpoint = int(re.findall(r"-c(\d+)", directory)[0])
            _, version, cut, _, _ = watch.live.checkpoints[checkpoint]
            watch.check(self.applied == version, "rule 11", f"captured {self.applied}, the cut {cut} is of {version}")
        state = msgspec.json.encode({"version": self.applied, "weights": self.weights})
        await self.clock.sleep(self.save_seconds)
        files = write_files(self.storage, directory, {"trainer.json": state})
        watch.after_effect(self.life, "trainer save")
        return files

    async def load(self, directory: str, digests: Mapping[str, str]) -> int:
        self.watch.before_effect(self.life, "trainer load")
        files = read_verified(self.storage, directory, digests)
        if "trainer.json" not in files:
            raise CheckpointDamaged(f"{directory}: no digest of trainer.json")
        state = msgspec.json.decode(files["trainer.json"])
        await self.clock.sleep(self.save_seconds)
        self.applied, self.weights = state["version"], state["weights"]
        expected = self.watch.digests.get(self.applied)
        self.watch.check(expected in (None, self.weights), "rule 13", "weights of an abandoned branch are loaded")
        self.watch.after_effect(self.life, "trainer load")
        return self.applied


class WatchedFolders(SimFolders):
    def __init__(self, watch: Watch, life: Incarnation) -> None:
        super().__init__(watch.world.storage)
        self.watch, self.life = watch, life

    async def make(self, path: str) -> None:
        if self.watch.folder_s:
            await asyncio.sleep(self.watch.folder_s)
        await super().make(path)

    async def publish(self, source: str, target: str) -> int:
        watch = self.watch
        if watch.current(self.life):
            watch.before_effect(self.life, "publish")
            checkpoint = int(target[-6:])
            watch.check(checkpoint in watch.durable.checkpoints, "rule 12", "published before its cut is durable")
        try:
            size = await super().publish(source, target)
            if any(fault.op == "publish done" for fault in self.storage.faults):
                self.storage.call("publish done", target)
        except OSError:
            if watch.current(self.life):
                watch.unpublished.add(int(target[-6:]))
            raise
        watch.after_effect(self.life, "publish")
        return size

    async def remove_tree(self, path: str) -> None:
        watch = self.watch
        if watch.current(self.life):
            watch.before_effect(self.life, "remove")
        name = path.rpartition("/")[2]
        model = watch.durable
        if path.startswith(PAYLOADS + "/"):
            needed = watch.needed_keys(name)
            watch.check(not needed, "rule 14", f"{name} goes, a restore could ask for {needed}")
            mine = {w.journal_name for w in watch.life.workers if w.alive} if watch.life else set()
            watch.check(name not in mine, "rule 14", f"{name} goes, its worker lives")
        elif not name.startswith("tmp_"):
            known = model.checkpoints.get(int(name[-6:]))
            kept = known is not None and known[0] == "trainer" and known[3] and known[1] >= model.floor
            right = known is not None and f"-i{known[4]:05d}-" in name
            watch.check(not (kept and right), "rule 14", f"{name} goes, a restore may fall back to it")
        await super().remove_tree(path)
        watch.after_effect(self.life, "remove")
