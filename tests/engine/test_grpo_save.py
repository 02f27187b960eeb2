"""Saving, loading and publishing: bit-exact, verified, without pickles; and several ranks."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
import torch.multiprocessing

from tests.engine import tiny_models
from tests.engine.test_grpo import make_groups, same, weights_of
from unlost.engine import models, tensors
from unlost.engine.generator import EmbeddedGenerator
from unlost.engine.grpo import CheckpointMismatch, GrpoSettings, GrpoTrainer
from unlost.engine.grpo_batch import RowRefused
from unlost.engine.protocols import CheckpointDamaged

SETTINGS = GrpoSettings(learning_rate=1e-3, weight_decay=0.01, micro_batch_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("llama"), initializer_range=0.05)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def train(trainer: GrpoTrainer, steps: int) -> list[float]:
    return [trainer.train(step, make_groups(step)).loss for step in range(trainer.version, trainer.version + steps)]


def everything(trainer: GrpoTrainer) -> dict[str, torch.Tensor]:
    captured = trainer.capture()
    return {**captured.weights, **captured.optimizer, **captured.random}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_restored_trainer_goes_on_bit_for_bit(llama: Path, tmp_path: Path, deterministic: bool) -> None:
    """Train 3, save, train 2 equals load in a fresh trainer, train 2: weights, optimizer, random state, losses."""
    first = GrpoTrainer(llama, SETTINGS, device="cpu", deterministic=deterministic)
    train(first, 3)
    digests = first.capture().write(tmp_path)
    torch.rand(5)
    expected_losses = train(first, 2)
    expected = everything(first)  # before the other trainer sets the process's random state
    second = GrpoTrainer(llama, SETTINGS, device="cpu", deterministic=deterministic)
    torch.rand(99)
    train(second, 1)  # whatever it did before, a load forgets it
    assert second.load(tmp_path, digests) == 3
    torch.rand(5)
    assert train(second, 2) == expected_losses
    assert second.version == 5
    assert same(expected, everything(second))


def test_what_was_captured_is_written_whatever_happens_meanwhile(llama: Path, tmp_path: Path) -> None:
    """Training goes on between capture and write, and during the write: the files hold the captured version."""
    trainer = GrpoTrainer(llama, SETTINGS, device="cpu")
    train(trainer, 2)
    before = everything(trainer)
    captured = trainer.capture()
    train(trainer, 1)
    digests: dict[str, str] = {}
    writing = threading.Thread(target=lambda: digests.update(captured.write(tmp_path)))
    writing.start()
    train(trainer, 2)
    writing.join()
    other = GrpoTrainer(llama, SETTINGS, device="cpu")
    assert other.load(tmp_path, digests) == 2
    assert same(before, everything(other))


def test_the_files_are_plain_safetensors_and_json_with_true_digests(llama: Path, tmp_path: Path) -> None:
    """The official library reads them, each digest is the file's SHA-256, and nothing else is in the folder."""
    trainer = GrpoTrainer(llama, SETTINGS, device="cpu")
    train(trainer, 1)
    digests = trainer.capture().write(tmp_path)
    assert set(os.listdir(tmp_path)) == set(digests)
    assert set(digests) == {
        "weights.safetensors", "optimizer.safetensors", "trainer.json", "random-00000.safetensors",
    }  # fmt: skip
    for name, digest in digests.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    read = safetensors.torch.load_file(str(tmp_path / "weights.safetensors"))
    assert same(read, {name: tensor.detach() for name, tensor in models.named_tensors(trainer.model).items()})
    assert json.loads((tmp_path / "trainer.json").read_text())["version"] == 1


def test_tensor_files_hold_every_kind_of_tensor(tmp_path: Path) -> None:
    """All dtypes, scalars, empty ones, odd names and sizes come back bit for bit, aligned."""
    made = {
        "a": torch.arange(7, dtype=torch.uint8),
        "b/ü": torch.randn(3, 5),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(9).half(),
        "brain": torch.randn(2, 3).bfloat16(),
        "long": torch.tensor([-(2**60), 5]),
        "double": torch.randn(3).double(),
        "flag": torch.tensor([True, False, True]),
    }
    digest = tensors.write_tensors(tmp_path / "t", made)
    assert same(tensors.read_tensors(tmp_path, "t", {"t": digest}), made)
    header_bytes = int.from_bytes((tmp_path / "t").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "t").read_bytes()[8 : 8 + header_bytes])
    for name, entry in header.items():
        assert (8 + header_bytes + entry["data_offsets"][0]) % made[name].element_size() == 0
    with pytest.raises(FileExistsError):
        tensors.write_tensors(tmp_path / "t", made)


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "trainer.json", "random-00000.safetensors"]
)
def test_a_damaged_file_is_refused_and_nothing_is_loaded(llama: Path, tmp_path: Path, name: str) -> None:
    """One flipped bit, a cut file, a missing file, a missing digest: named, and the trainer is as before."""
    trainer = GrpoTrainer(llama, SETTINGS, device="cpu")
    train(trainer, 2)
    digests = trainer.capture().write(tmp_path)
    train(trainer, 1)
    before = everything(trainer)
    data = (tmp_path / name).read_bytes()
    flipped = bytearray(data)
    flipped[len(data) * 2 // 3] ^= 0x10
    for content in (bytes(flipped), data[:-1], b""):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointDamaged, match=f"{name}: its SHA-256 is"):
            trainer.load(tmp_path, digests)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointDamaged, match=f"{name}: missing"):
        trainer.load(tmp_path, digests)
    if not name.startswith("random"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointDamaged, match="the manifest has no digest"):
            trainer.load(tmp_path, {key: value for key, value in digests.items() if key != name})
    assert trainer.version == 3
    assert same(before, everything(trainer))


def test_a_checkpoint_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    """Sound files that don't fit: the first tensor that differs is named, nothing is loaded."""
    other = tiny_models.save("llama", tmp_path / "m", hidden_size=64)
    (tmp_path / "c").mkdir()
    digests = GrpoTrainer(other, SETTINGS, device="cpu").capture().write(tmp_path / "c")
    trainer = GrpoTrainer(llama, SETTINGS, device="cpu")
    before = everything(trainer)
    with pytest.raises(CheckpointMismatch, match=r"model\.embed_tokens\.weight does not fit"):
        trainer.load(tmp_path / "c", digests)
    assert same(before, everything(trainer))


def test_a_save_before_the_first_step_can_be_loaded(llama: Path, tmp_path: Path) -> None:
    """Version 0 has no optimizer state; what follows is as from the start."""
    first, second = (GrpoTrainer(llama, SETTINGS, device="cpu") for _ in range(2))
    digests = first.capture().write(tmp_path)
    train(second, 2)
    assert second.load(tmp_path, digests) == 0
    assert train(first, 2) == train(second, 2)
    assert same(everything(first), everything(second))


def test_settings_may_change_on_resume(llama: Path, tmp_path: Path) -> None:
    """The configuration's learning rate holds, not the saved one."""
    trainer = GrpoTrainer(llama, SETTINGS, device="cpu")
    train(trainer, 1)
    digests = trainer.capture().write(tmp_path)
    other = GrpoTrainer(llama, GrpoSettings(learning_rate=0.5), device="cpu")
    other.load(tmp_path, digests)
    assert other.train(1, make_groups(1)).metrics["learning_rate"] == 0.5


def test_published_weights_are_what_the_generator_generates_with(llama: Path, tmp_path: Path) -> None:
    """A complete model folder with tokenizer; nothing unfinished beside it; publishing again replaces it."""
    trainer = GrpoTrainer(llama, SETTINGS, device="cpu")
    target = tmp_path / "weights" / "b000-v000003"
    for _ in range(2):
        train(trainer, 2)
        trainer.publish(target)
        assert os.listdir(target.parent) == [target.name]
        assert models.check_model_folder(target) == target
        generator = EmbeddedGenerator(llama, device="cpu")
        generator.load_weights(target, 0, trainer.version)
        assert same(weights_of(trainer), dict(generator.model.state_dict()))
        reloaded = models.load_model(target, device="cpu", dtype=torch.float32)
        assert same(weights_of(trainer), dict(reloaded.state_dict()))


def test_published_weights_keep_their_precision_and_the_folder_its_format(tmp_path: Path) -> None:
    """A model stored in bfloat16 is trained and published in float32; ``auto`` still means bfloat16 afterwards."""
    tiny_models.build("llama").to(torch.bfloat16).save_pretrained(str(tmp_path / "half"))
    trainer = GrpoTrainer(tmp_path / "half", SETTINGS, device="cpu", dtype="auto")
    train(trainer, 1)
    trainer.publish(tmp_path / "w")
    assert models.resolve_dtype("auto", tmp_path / "w") == torch.bfloat16
    assert same(
        dict(models.load_model(tmp_path / "w", device="cpu", dtype=torch.float32).state_dict()), weights_of(trainer)
    )
    generator = EmbeddedGenerator(tmp_path / "w", device="cpu", dtype="auto")
    assert same(dict(generator.model.state_dict()), {k: v.to(torch.bfloat16) for k, v in weights_of(trainer).items()})


def test_a_failed_publication_leaves_the_old_folder(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space: an error that names the folder, the earlier weights whole, no leftovers."""
    trainer = GrpoTrainer(llama, SETTINGS, device="cpu")
    trainer.publish(tmp_path / "w")
    digest = hashlib.sha256((tmp_path / "w" / "model.safetensors").read_bytes()).hexdigest()

    def full(path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    train(trainer, 1)
    monkeypatch.setattr(trainer.model, "save_pretrained", full)
    with pytest.raises(models.PublishError, match="No space left"):
        trainer.publish(tmp_path / "w")
    assert os.listdir(tmp_path) == ["w"]
    assert hashlib.sha256((tmp_path / "w" / "model.safetensors").read_bytes()).hexdigest() == digest


# --- several ranks ------------------------------------------------------------------------------------------------


def _weights(trainer: GrpoTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in models.named_tensors(trainer.model).items()}


def _rank(rank: int, world_size: int, model: str, folder: str) -> None:
    torch.set_num_threads(1)
    trainer = GrpoTrainer(
        model, SETTINGS, device="cpu", rank=rank, world_size=world_size, init_method=f"file://{folder}/meet",
        rank_timeout_s=60,
    )  # fmt: skip
    results = []
    for step in range(3):
        groups = make_groups(step, groups=3)
        results.append(trainer.train(step, trainer.share(groups)))
    bad = [[msgspec.structs.replace(row, prompt_ids=b"") for row in group] for group in make_groups(3, groups=1)]
    try:
        trainer.train(3, bad if rank == 0 else [])
    except RowRefused as error:
        refusal = str(error)
    else:
        refusal = ""
    digests = trainer.capture().write(f"{folder}/save")
    torch.rand(1)
    tail = trainer.train(3, trainer.share(make_groups(3, groups=1)))  # rank 1 has no rows in this one
    assert trainer.load(f"{folder}/save", _all_digests(folder, rank, digests)) == 3
    torch.rand(1)
    again = trainer.train(3, trainer.share(make_groups(3, groups=1)))
    report = {
        "results": [
            [r.loss, r.reward_mean, r.tokens, r.metrics["grad_norm"], r.metrics["kl_behaviour"]] for r in results
        ],
        "refusal": refusal,
        "files": sorted(digests),
        "repeatable": tail.loss == again.loss,
        "sums": {name: float(tensor.double().sum()) for name, tensor in trainer.model.state_dict().items()},
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report))
    tensors.write_tensors(f"{folder}/rank{rank}.safetensors", _weights(trainer))
    trainer.close()


def _all_digests(folder: str, rank: int, digests: dict[str, str]) -> dict[str, str]:
    """As the checkpoint's manifest would collect them."""
    Path(folder, f"digests{rank}.json.tmp").write_text(json.dumps(digests))
    os.rename(f"{folder}/digests{rank}.json.tmp", f"{folder}/digests{rank}.json")
    torch.distributed.barrier()
    return {k: v for r in (0, 1) for k, v in json.loads(Path(folder, f"digests{r}.json").read_text()).items()}


@pytest.mark.slow
def test_two_ranks_train_as_one_does(llama: Path, tmp_path: Path) -> None:
    """Same losses, metrics and weights within rounding; ranks agree exactly; a bad row on one rank stops both."""
    (tmp_path / "save").mkdir()
    context: Any = torch.multiprocessing.spawn(_rank, (2, str(llama), str(tmp_path)), nprocs=2, join=False)
    while not context.join(timeout=120):  # False as long as another process is left; raises what one has raised
        pass
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert reports[0]["results"] == reports[1]["results"]
    assert "no prompt tokens" in reports[0]["refusal"]
    assert reports[1]["refusal"] == "1 other rank(s) refused their rows"
    assert reports[1]["files"] == ["random-00001.safetensors"]
    assert len(reports[0]["files"]) == 4
    assert reports[0]["repeatable"]
    assert reports[1]["repeatable"]
    single = GrpoTrainer(llama, SETTINGS, device="cpu")
    results = [single.train(step, make_groups(step, groups=3)) for step in range(3)]
    for result, (loss, reward_mean, tokens, norm, divergence) in zip(results, reports[0]["results"], strict=True):
        assert (result.reward_mean, result.tokens) == (pytest.approx(reward_mean), tokens)
        assert result.loss == pytest.approx(loss, abs=1e-4)
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-2)
        assert result.metrics["kl_behaviour"] == pytest.approx(divergence, rel=1e-2)
    single.train(3, make_groups(3, groups=1))
    weights = [safetensors.torch.load_file(str(tmp_path / f"rank{rank}.safetensors")) for rank in (0, 1)]
    assert same(weights[0], weights[1])
    for name, tensor in _weights(single).items():
        assert torch.allclose(tensor, weights[0][name], atol=2e-4), name
