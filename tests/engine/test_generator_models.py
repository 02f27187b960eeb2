"""Model folders: what is missing is named, fingerprints notice changes, odd models are refused."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from tests.engine import tiny_models
from unlost.engine import kv_cache, models
from unlost.engine.generator import EmbeddedGenerator, GeneratorError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tiny_models.save("llama", tmp_path / "model")
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", r"has no \*.safetensors file; save it with save_pretrained"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(folder: Path, missing: str, message: str) -> None:
    """In one line, with the folder, before anything is loaded."""
    assert models.check_model_folder(folder) == folder
    (folder / missing).unlink()
    with pytest.raises(models.ModelFolderError, match=message) as caught:
        models.check_model_folder(folder)
    assert str(folder) in str(caught.value)


def test_absent_folders_and_pickled_weights_are_refused(folder: Path) -> None:
    """A pickle is never read, even where transformers could."""
    with pytest.raises(models.ModelFolderError, match="does not exist"):
        models.check_model_folder(folder / "nothing")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(models.ModelFolderError, match=r"found pytorch_model\.bin, which is a pickle"):
        models.load_model(folder, device="cpu", dtype=torch.float32)


def test_broken_folders_give_one_line(folder: Path) -> None:
    """Damaged weights, damaged configuration, damaged tokenizer: the folder is named."""
    with pytest.raises(models.ModelFolderError, match=f"tokenizer in {folder} can't be loaded"):
        models.load_tokenizer(folder)
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(models.ModelFolderError, match=f"model in {folder} can't be loaded"):
        EmbeddedGenerator(folder, device="cpu")
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(models.ModelFolderError, match="can't be loaded"):
        EmbeddedGenerator(folder, device="cpu")


def test_fingerprints_notice_what_makes_another_model(folder: Path, tmp_path: Path) -> None:
    """Same for a copy; another for other weights, configuration, tokenizer or a new weight file."""
    base = models.model_fingerprint(folder)
    copy = tiny_models.save("llama", tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{}")
    assert models.model_fingerprint(copy) == base
    seen = {base}
    model = tiny_models.build("llama")
    with torch.no_grad():
        next(iter(model.parameters()))[-1, -1] += 1
    model.save_pretrained(str(copy))
    seen.add(models.model_fingerprint(copy))
    (copy / "tokenizer.json").write_text('{"a": 1}')
    seen.add(models.model_fingerprint(copy))
    (copy / "chat_template.jinja").write_text("x")
    seen.add(models.model_fingerprint(copy))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    seen.add(models.model_fingerprint(copy))
    (copy / "more.safetensors").write_bytes(b"")
    seen.add(models.model_fingerprint(copy))
    assert len(seen) == 6


def test_fingerprints_of_large_files_are_sampled(folder: Path) -> None:
    """Reads a bounded part of a large file, yet both its ends."""
    large = folder / "large.safetensors"
    with large.open("wb") as file:
        file.truncate(200_000_000)
    started = time.perf_counter()
    seen = {models.model_fingerprint(folder)}
    assert time.perf_counter() - started < 20
    for position in (0, 199_999_999):
        with large.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        seen.add(models.model_fingerprint(folder))
    assert len(seen) == 3


def test_dtype_auto_is_what_the_folder_stores(folder: Path, tmp_path: Path) -> None:
    """And other names are refused with the known ones."""
    assert models.resolve_dtype("auto", folder) == torch.float32
    tiny_models.build("llama").to(torch.bfloat16).save_pretrained(str(tmp_path / "half"))
    assert models.resolve_dtype("auto", tmp_path / "half") == torch.bfloat16
    assert EmbeddedGenerator(tmp_path / "half", device="cpu", dtype="auto").model.dtype == torch.bfloat16
    with pytest.raises(models.ModelFolderError, match="unknown dtype 'float8'; use one of auto, float32"):
        models.resolve_dtype("float8", folder)


def test_models_with_other_state_than_keys_and_values_are_refused(tmp_path: Path) -> None:
    """A state-space model has no cache that could be padded and merged: said at start, not as wrong tokens later."""
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(str(tmp_path))
    with pytest.raises(GeneratorError, match="attention-only decoders"):
        EmbeddedGenerator(tmp_path, device="cpu")


def test_weights_of_another_architecture_are_refused(folder: Path, tmp_path: Path) -> None:
    """Named by architecture where tensor names differ."""
    tiny_models.save("gpt_neox", tmp_path / "other")
    model = models.load_model(folder, device="cpu", dtype=torch.float32)
    with pytest.raises(models.PublishError, match="are of GPTNeoXForCausalLM, the model is LlamaForCausalLM"):
        models.read_weights(tmp_path / "other", model)
    with pytest.raises(models.PublishError, match=r"holds no \*.safetensors"):
        models.read_weights(tmp_path / "nothing", model)


def test_end_tokens_come_from_every_place_that_names_them(folder: Path) -> None:
    """Generation settings, configuration and tokenizer: chat models end a turn with another token than a text."""
    model = models.load_model(folder, device="cpu", dtype=torch.float32)
    model.generation_config.eos_token_id = [4, 5]

    class Tokenizer:
        eos_token_id = 9

    assert models.eos_token_ids(model, Tokenizer()) == {tiny_models.EOS, 4, 5, 9}


def test_cache_blocks_grow_without_changing_what_is_in_them() -> None:
    """Columns written one by one, over block borders, equal a concatenation; merging aligns to the right."""
    torch.manual_seed(0)
    caches = []
    for rows, steps in ((2, 70), (1, 3)):
        layer = kv_cache.BlockLayer()
        pieces = [torch.randn(rows, 3, width, 5) for width in [60, *[1] * (steps - 1)]]
        for piece in pieces:
            keys, values = layer.update(piece, piece * 2)
        expected = torch.cat(pieces, dim=2)
        assert torch.equal(keys, expected)
        assert torch.equal(values, expected * 2)
        cache = kv_cache.new_cache()
        cache.layers.append(layer)
        caches.append((cache, expected))
    (first, long), (second, short) = caches
    merged = kv_cache.merge([(first, [1], 100), (second, [0], 62)]).layers[0]
    assert torch.equal(merged.keys[0], long[1][:, -100:])
    assert torch.equal(merged.keys[1][:, -62:], short[0])
    assert not merged.keys[1][:, :-62].any()


def test_new_weights_are_not_starved_by_a_busy_loop(folder: Path) -> None:
    """A loop that takes its lock again at once still lets the swap in within a step or two."""
    generator = EmbeddedGenerator(folder, device="cpu", max_batch=1)
    names: list[tuple[int, int]] = []
    ended = threading.Event()

    def submit(index: int) -> None:
        def done(_reason: str) -> None:
            if not ended.is_set():
                submit(index + 1)

        generator.submit(
            index, [5], seed=index, max_new_tokens=50, temperature=1.0,
            on_delta=lambda *delta: names.append((delta[2], delta[3])), on_done=done,
        )  # fmt: skip

    submit(0)
    generator.start()
    waits: list[float] = []
    for version in range(1, 6):
        started = time.perf_counter()
        generator.load_weights(folder, 0, version)
        waits.append(time.perf_counter() - started)
    ended.set()
    generator.stop()
    assert max(waits) < 60
    assert names == sorted(names), "a token tagged with older weights than its predecessor"


def test_a_loop_stands_aside_for_weights_that_wait(folder: Path) -> None:
    """While somebody waits to swap, no step begins: a lock alone, released and taken again at once, is not fair."""
    generator = EmbeddedGenerator(folder, device="cpu")
    generator.submit(
        0, [5], seed=0, max_new_tokens=200, temperature=1.0, on_delta=lambda *_: None, on_done=lambda _: None
    )
    generator.eos = frozenset()
    with generator._changed:
        generator._swaps_waiting += 1
    generator.start()
    time.sleep(0.3)
    assert generator.generated_tokens == 0
    with generator._changed:
        generator._swaps_waiting -= 1
        generator._changed.notify_all()
    deadline = time.monotonic() + 20
    while generator.generated_tokens < 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    generator.stop()
    assert generator.generated_tokens == 200


def test_a_pause_is_what_decoding_stood_still(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the folder does not count, copying does."""
    generator = EmbeddedGenerator(folder, device="cpu")
    read = models.read_weights

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return read(*arguments)

    monkeypatch.setattr(models, "read_weights", slow)
    started = time.perf_counter()
    pause = generator.load_weights(folder, 0, 1)
    assert pause < 0.2 < 0.3 <= time.perf_counter() - started
