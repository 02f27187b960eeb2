"""What every data plane does: the same tests for the simulated one and for TransferQueue."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.engine.payload_samples import row
from tests.fakes import SimDataPlane
from unlost.engine import data_plane_snapshot
from unlost.engine.data_plane import (
    UNIT_NAME,
    AttachedDataPlane,
    DataPlaneError,
    DataPlaneLost,
    RowDamaged,
    TransferQueueDataPlane,
)
from unlost.engine.protocols import CheckpointDamaged, Row, SnapshotMismatch
from unlost.engine.rows import checksum_of, decode_row, encode_row, parse_row_key, partition_of
from unlost.replay.events import AttemptKey

pytestmark = pytest.mark.asyncio(loop_scope="package")

Plane = SimDataPlane | TransferQueueDataPlane


class RealTime:
    """The engine's clock protocol on the running loop."""

    def now_us(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e6)

    def wall_us(self) -> int:
        return self.now_us()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 100)


def sample(group: int, sibling: int = 0, tokens: int = 100, *, incarnation: int = 1, prompt_tokens: int = 7) -> Row:
    return row(AttemptKey(incarnation, group, sibling, 0), tokens, prompt_tokens)


def keys_of(rows: list[Row]) -> list[str]:
    return [each.key.row_key() for each in rows]


async def refuse_damage(plane: Plane, directory: str, digests: dict[str, str], name: str) -> None:
    path = Path(directory) / name
    content = path.read_bytes()
    for damage in (content[:-1], bytes([content[0] ^ 1]) + content[1:], None):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        with pytest.raises(CheckpointDamaged, match=path.name):
            await plane.load(directory, digests)
        path.write_bytes(content)


class Contract:
    """What every data plane does."""

    async def test_rows_come_back_as_they_were_put(self, plane: Plane) -> None:
        """Lengths from zero on, many at once, in the order asked for, duplicates included."""
        rows = [sample(group, tokens=group * 13, prompt_tokens=group % 5) for group in range(40)]
        await asyncio.gather(*map(plane.put, rows))
        backwards = list(reversed(rows))
        assert await plane.get(keys_of(backwards)) == backwards
        assert await plane.get(keys_of([rows[0]])) == [rows[0]]
        assert await plane.get(keys_of([rows[0], rows[1], rows[0]])) == [rows[0], rows[1], rows[0]]
        assert await plane.get([]) == []

    async def test_every_part_of_a_row_is_kept(self, plane: Plane) -> None:
        """Spans, truncation, a reward that is no short decimal, and the extremes of ids and log-probabilities."""
        full = msgspec.structs.replace(
            sample(1, tokens=3), weight_spans=((0, 1, 2), (2, 3, 2**40)), truncated=True, reward=0.1 + 0.2
        )
        full = msgspec.structs.replace(
            full, token_ids=b"\0\0\0\0\xff\xff\xff\x7f\0\0\0\x80", logprobs=b"\0\0\x80\xff\0\0\0\x80\1\0\0\0"
        )
        full = msgspec.structs.replace(full, checksum=checksum_of(full))
        await plane.put(full)
        assert await plane.get(keys_of([full])) == [full]

    async def test_missing_rows_are_named(self, plane: Plane) -> None:
        """KeyError holds the keys that are not there, and none that is."""
        there = sample(1)
        await plane.put(there)
        with pytest.raises(KeyError) as missing:
            await plane.get([there.key.row_key(), "i1.g77.s0.a0", "i9.g1.s0.a0"])
        assert "i1.g77.s0.a0" in str(missing.value)
        assert "i9.g1.s0.a0" in str(missing.value)
        assert there.key.row_key() not in str(missing.value)

    async def test_a_row_with_a_wrong_checksum_is_not_handed_out(self, plane: Plane) -> None:
        """What does not have the checksum it was put with is RowDamaged, naming the row."""
        good, bad = sample(1), msgspec.structs.replace(sample(2), checksum=12345)
        await plane.put(good)
        await plane.put(bad)
        with pytest.raises(RowDamaged) as damaged:
            await plane.get(keys_of([good, bad]))
        assert damaged.value.keys == (bad.key.row_key(),)

    async def test_inventory_lists_every_row_with_its_checksum(self, plane: Plane) -> None:
        """Also after a second put of the same row, and over rows of several incarnations."""
        rows = [sample(group, incarnation=incarnation) for group in range(5) for incarnation in (1, 2, 30)]
        for each in [*rows, rows[0]]:
            await plane.put(each)
        assert await plane.inventory() == {each.key.row_key(): each.checksum for each in rows}
        assert await plane.get(keys_of(rows)) == rows

    async def test_cleared_rows_are_gone_and_others_stay(self, plane: Plane) -> None:
        """Unknown keys and a second clear are harmless, and a cleared key can be put again."""
        rows = [sample(group) for group in range(6)]
        for each in rows:
            await plane.put(each)
        await plane.clear([*keys_of(rows[:3]), "i1.g99.s0.a0", "i8.g1.s0.a0"])
        await plane.clear(keys_of(rows[:3]))
        assert await plane.inventory() == {each.key.row_key(): each.checksum for each in rows[3:]}
        with pytest.raises(KeyError):
            await plane.get(keys_of(rows[:1]))
        again = sample(0, tokens=50)
        await plane.put(again)
        assert await plane.get(keys_of([again])) == [again]

    async def test_a_snapshot_restores_rows_and_index(self, plane: Plane, tmp_path: Path) -> None:
        """Saved, restarted, loaded: the same rows. Damage and missing files are refused before anything is loaded."""
        rows = [sample(group, sibling, incarnation=1 + group % 2) for group in range(10) for sibling in range(3)]
        await asyncio.gather(*map(plane.put, rows))
        directory = str(tmp_path / "snapshot")
        digests = await plane.save(directory)
        written = {
            os.path.relpath(os.path.join(folder, name), directory)
            for folder, _, names in os.walk(directory)
            for name in names
        }
        assert set(digests) == written
        await plane.restart()
        assert await plane.inventory() == {}
        for name in digests:
            await refuse_damage(plane, directory, digests, name)
        with pytest.raises(CheckpointDamaged):
            await plane.load(directory, dict(list(digests.items())[1:]))
        assert await plane.inventory() == {}
        await plane.load(directory, digests)
        assert await plane.inventory() == {each.key.row_key(): each.checksum for each in rows}
        assert await plane.get(keys_of(rows)) == rows
        extra = sample(77)
        await plane.put(extra)
        assert await plane.get(keys_of([extra, rows[0]])) == [extra, rows[0]]

    async def test_puts_during_a_save_are_whole_or_absent(self, plane: Plane, tmp_path: Path) -> None:
        """Puts go on meanwhile, nothing of the live service changes, and the snapshot holds all rows from before."""
        before = [sample(group, tokens=2000) for group in range(50)]
        await asyncio.gather(*map(plane.put, before))
        meanwhile = [sample(group, tokens=2000) for group in range(100, 120)]
        save = asyncio.ensure_future(plane.save(str(tmp_path / "snapshot")))
        for each in meanwhile:
            await plane.put(each)
        digests = await save
        assert await plane.get(keys_of(before + meanwhile)) == before + meanwhile
        await plane.restart()
        await plane.load(str(tmp_path / "snapshot"), digests)
        inventory = await plane.inventory()
        assert set(keys_of(before)) <= set(inventory) <= set(keys_of(before + meanwhile))
        found = [each for each in before + meanwhile if each.key.row_key() in inventory]
        assert await plane.get(keys_of(found)) == found

    async def test_a_save_over_a_restart_is_lost_or_whole(self, plane: Plane, tmp_path: Path) -> None:
        """A snapshot never mixes the index of one service with the rows of the next."""
        rows = [sample(group, tokens=2000) for group in range(50)]
        await asyncio.gather(*map(plane.put, rows))
        save = asyncio.ensure_future(plane.save(str(tmp_path / "snapshot")))
        await asyncio.sleep(0.05)
        await plane.restart()
        await plane.put(sample(99))
        try:
            digests = await save
        except DataPlaneLost:
            assert not (tmp_path / "snapshot").exists()
            return
        await plane.clear(keys_of([sample(99)]))
        await plane.load(str(tmp_path / "snapshot"), digests)
        assert await plane.inventory() == {each.key.row_key(): each.checksum for each in rows}
        assert await plane.get(keys_of(rows)) == rows

    async def test_another_number_of_storage_units_is_a_mismatch(self, plane: Plane, tmp_path: Path) -> None:
        """The rows must then come from payloads; nothing is loaded."""
        await plane.put(sample(1))
        digests = await plane.save(str(tmp_path / "snapshot"))
        await plane.clear(keys_of([sample(1)]))
        before, plane.storage_units = plane.storage_units, 3
        try:
            with pytest.raises(SnapshotMismatch, match="2"):
                await plane.load(str(tmp_path / "snapshot"), digests)
        finally:
            plane.storage_units = before
        assert await plane.inventory() == {}


class TestSimulated(Contract):
    @pytest_asyncio.fixture(loop_scope="package")
    async def plane(self) -> Plane:
        simulated = SimDataPlane(RealTime(), storage_units=2)
        await simulated.start()
        return simulated


@pytest.mark.slow
class TestTransferQueue(Contract):
    @pytest_asyncio.fixture(loop_scope="package")
    async def plane(self, real_plane: TransferQueueDataPlane) -> AsyncIterator[Plane]:
        await real_plane.clear(list(await real_plane.inventory()))
        yield real_plane
        await real_plane.clear(list(await real_plane.inventory()))


# --- the codec of rows (no service needed)


async def test_a_row_survives_its_encoding() -> None:
    """Tensors and tag together hold the row."""
    original = sample(3, tokens=10)
    fields, tag = encode_row(original)
    assert (fields["input_ids"].shape, fields["logprobs"].shape) == ((17,), (10,))
    assert decode_row(tag, fields["input_ids"], fields["logprobs"]) == original


async def test_unequal_arrays_are_refused() -> None:
    """A row with fewer log-probabilities than tokens is not stored."""
    with pytest.raises(ValueError, match="bytes of ids"):
        encode_row(msgspec.structs.replace(sample(3), logprobs=b""))


@pytest.mark.parametrize(
    "key", ["", "x", "i1", "i1.g2.s3", "i1.g2.s3.ax", "g1.i2.s3.a4", "i1.g2.s3.a4.b5", "i-1.g2.s3.a4"]
)
async def test_what_is_no_row_key_is_refused(key: str) -> None:
    """Keys have one form only."""
    with pytest.raises(ValueError, match="no row key"):
        parse_row_key(key)


async def test_keys_name_their_partition() -> None:
    """The partition is that of the incarnation that dispatched the attempt; a key parses back to its attempt."""
    key = AttemptKey(12, 3, 4, 5)
    assert partition_of(key.row_key()) == "rollouts-i00012"
    assert parse_row_key(key.row_key()) == key
    with pytest.raises(ValueError, match="no row key"):
        partition_of("rollout.g1")


# --- TransferQueue only


@pytest.mark.slow
async def test_a_snapshot_that_can_not_be_written_leaves_nothing(
    real_plane: TransferQueueDataPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk fails the save with its own error; the service goes on, and so does the next save."""
    await real_plane.put(sample(1))

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(data_plane_snapshot, "_write_all", full)
        with pytest.raises(OSError, match="No space left"):
            await real_plane.save(str(tmp_path / "snapshot"))
    assert os.listdir(tmp_path) == []
    assert await real_plane.get(keys_of([sample(1)])) == [sample(1)]
    assert await real_plane.save(str(tmp_path / "snapshot"))
    await real_plane.clear(keys_of([sample(1)]))


@pytest.mark.slow
async def test_a_dead_storage_unit_is_noticed_and_replaced(real_plane: TransferQueueDataPlane, tmp_path: Path) -> None:
    """Calls raise DataPlaneLost within seconds; after a restart both the owner and an attached client work again.

    The snapshot taken before is TransferQueue's own: its own loader takes it into the new service.
    """
    import ray
    import transfer_queue as tq  # takes seconds to import: not for the fast tests

    attached = AttachedDataPlane()
    await attached.start()
    rows = [sample(group, tokens=1024, prompt_tokens=64) for group in range(100)]
    await asyncio.gather(*map(attached.put, rows))
    directory = tmp_path / "snapshot"
    digests = await real_plane.save(str(directory))
    check_files(directory, digests, rows)
    await real_plane.check()
    ray.kill(ray.get_actor(UNIT_NAME.format(1)), no_restart=True)
    loop = asyncio.get_running_loop()
    with pytest.raises(DataPlaneLost):  # a kill is only asked for: until it is done, calls may still be answered
        for _ in range(300):
            await real_plane.check()
            await asyncio.sleep(0.1)
    began = loop.time()
    calls = [*map(real_plane.put, rows[:4]), attached.get(keys_of(rows))]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(outcome, DataPlaneLost) for outcome in outcomes[:4])
    assert isinstance(outcomes[4], DataPlaneLost)
    assert loop.time() - began < 60
    waiting: asyncio.Future[Any] = asyncio.ensure_future(real_plane.get(keys_of(rows)))
    await asyncio.sleep(0.1)
    await real_plane.restart()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], DataPlaneLost)
    assert await real_plane.inventory() == {}
    await asyncio.to_thread(tq.load_checkpoint, directory)
    assert await real_plane.get(keys_of(rows)) == rows
    extra = sample(200)
    await attached.put(extra)
    assert await real_plane.get(keys_of([extra])) == [extra]
    await real_plane.clear(keys_of([*rows, extra]))
    await attached.stop()


def check_files(directory: Path, digests: dict[str, str], rows: list[Row]) -> None:
    """TransferQueue's names, the bytes that were digested, and no multiple of the rows (they were put singly)."""
    for name, digest in digests.items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest
    assert {name.split("_TQ")[0] for name in digests} == {
        "controller_state.pkl",
        "metadata.json",
        "simple_storage/storage_unit_info.json",
        "simple_storage/su_0",
        "simple_storage/su_1",
    }
    size = sum((directory / name).stat().st_size for name in digests)
    ratio = size / sum(len(r.prompt_ids + r.token_ids + r.logprobs) for r in rows)
    print(f"snapshot: {ratio:.3f} bytes per payload byte")
    assert ratio < 1.15


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_too_few_cpus_is_an_error_that_says_so() -> None:
    """Asking for more storage units than Ray has CPUs fails at once, naming both figures."""
    with pytest.raises(DataPlaneError, match=r"needs 101 Ray CPUs .* the cluster has 12: raise ray\.num_cpus"):
        await TransferQueueDataPlane(storage_units=100).start()


@pytest.mark.slow
async def test_a_second_service_in_the_same_cluster_is_refused(real_plane: TransferQueueDataPlane) -> None:
    """TransferQueue would silently share the first run's rows."""
    with pytest.raises(DataPlaneError, match="another run uses TransferQueue"):
        await TransferQueueDataPlane(storage_units=1, start_timeout_s=2).start()
    assert await real_plane.inventory() == {}
