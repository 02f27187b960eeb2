"""Model folders in Hugging Face layout: check, load, publish, fingerprint.

Promise: a folder that can't work is refused before anything starts, with the file that is missing and what to do; a
published folder appears whole or not at all (written aside, then renamed); no pickled weights are ever read or written
(safetensors only).

torch and transformers are imported inside the functions, so that checking a folder costs nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..journal.errors import EXIT_USAGE, UnlostError

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""Any one of these makes a folder a tokenizer."""

TOKENIZER_COMPANIONS: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

_FINGERPRINT_SAMPLES = 16
_FINGERPRINT_SAMPLE_BYTES = 65536


class ModelFolderError(UnlostError):
    """The model folder can't be used; the message names the folder, what is missing and the remedy."""

    exit_code = EXIT_USAGE


class PublishError(UnlostError):
    """Weights could not be published, or the published folder does not fit the model that should load it."""


def check_model_folder(path: str | Path) -> Path:
    """The folder, if it has a configuration, safetensors weights and a tokenizer. Raises ModelFolderError."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"model folder {folder} does not exist; set model.path to one in Hugging Face format")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model folder {folder} has no config.json; save the model there with save_pretrained()")
    if not weight_files(folder):
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        found = f" (found {pickled.name}, which is a pickle and is not read)" if pickled else ""
        raise ModelFolderError(
            f"model folder {folder} has no *.safetensors file{found}; save it with save_pretrained(), "
            "which writes safetensors"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFolderError(
            f"model folder {folder} has no tokenizer (looked for {', '.join(TOKENIZER_FILES[:3])}, …); "
            "save the tokenizer there with tokenizer.save_pretrained()"
        )
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted by name."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def model_fingerprint(path: str | Path) -> str:
    """A digest that tells two models apart in milliseconds, hexadecimal SHA-256.

    Covers config.json and the tokenizer files whole, and of each weight file its name, size, and 16 evenly spaced
    samples of 64 KiB (the header, which names every tensor, is in the first). Sampled on purpose: reading all weights
    of a large model at each start would cost minutes. An edit that misses every sample is not noticed.
    """
    folder = check_model_folder(path)
    digest = hashlib.sha256()
    for name in ("config.json", *TOKENIZER_FILES, *TOKENIZER_COMPANIONS):
        file = folder / name
        if file.is_file():
            digest.update(f"{name}:{file.stat().st_size}:".encode())
            digest.update(file.read_bytes())
    for file in weight_files(folder):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    last = max(file.stat().st_size - _FINGERPRINT_SAMPLE_BYTES, 0)
    with file.open("rb") as handle:
        for position in sorted({last * i // (_FINGERPRINT_SAMPLES - 1) for i in range(_FINGERPRINT_SAMPLES)}):
            handle.seek(position)
            yield handle.read(_FINGERPRINT_SAMPLE_BYTES)


def resolve_device(device: str) -> str:
    """``auto`` becomes ``cuda`` if there is one, else ``cpu``; anything else is taken as it is."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(dtype: str, path: str | Path) -> torch.dtype:
    """A torch dtype by name; ``auto`` is the one that the folder's config.json says the weights are stored in.

    Raises ModelFolderError for a name that is none of float32, bfloat16, float16, auto.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        return known.get(config.get("dtype") or config.get("torch_dtype") or "float32", torch.float32)
    if dtype not in known:
        raise ModelFolderError(f"unknown dtype {dtype!r}; use one of auto, {', '.join(known)}")
    return known[dtype]


def make_deterministic(threads: int = 1) -> None:
    """Make this process compute the same bits for the same calls: deterministic kernels, a fixed number of threads.

    Process-wide, and to be called before the first CUDA call (cuBLAS reads its workspace setting once). Threads of
    this process that have already run a torch operation keep their own number of threads until they call this too.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder. Raises ModelFolderError, naming the folder."""
    folder = check_model_folder(path)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever a foreign folder provokes: one line that names it
        raise ModelFolderError(f"tokenizer in {folder} can't be loaded: {error}") from error


def load_model(path: str | Path, *, device: str, dtype: torch.dtype) -> Any:
    """A causal language model in evaluation mode on ``device``, weights in ``dtype``.

    Evaluation mode on purpose, for the trainer too: dropout would make the policy's log-probabilities differ from the
    generator's by chance. Raises ModelFolderError.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file() or not weight_files(folder):
        check_model_folder(folder)  # raises, and says what is missing
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # whatever a foreign folder provokes: one line that names it
        raise ModelFolderError(f"model in {folder} can't be loaded: {error}") from error
    return model.to(device).eval()


def eos_token_ids(model: Any, tokenizer: Any = None) -> frozenset[int]:
    """Every token id that ends a response: of the generation settings, the configuration and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


def forward_arguments(model: Any) -> frozenset[str]:
    """Names that the model's ``forward`` takes; they differ by architecture and by transformers release."""
    return frozenset(inspect.signature(model.forward).parameters)


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, each tied tensor once, in the model's own order. Not copies."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and name not in tied:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def publish_model(model: Any, path: str | Path, *, like: str | Path | None = None) -> None:
    """Write a model folder at ``path``: config and safetensors. It appears whole or not at all.

    ``like``: the folder that the model came from; its tokenizer is copied, and its number format stays the one that
    ``dtype: auto`` means, though the weights written are as precise as the trainer's.

    An existing folder of that name is replaced (and absent for an instant). Not fsynced: published weights are made
    again from the trainer after a crash, and waiting for the disk here would stop generation. Raises PublishError.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    target = Path(path)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(str(aside))
        if like is not None:
            copy_tokenizer(like, aside)
            _keep_dtype(Path(like), aside)
        _replace_folder(aside, target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise PublishError(f"can't publish weights to {target}: {error}") from error


def _keep_dtype(source: Path, target: Path) -> None:
    stored = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    dtype = stored.get("dtype") or stored.get("torch_dtype")
    if dtype is not None and config.get("dtype") != dtype:
        (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _replace_folder(aside: Path, target: Path) -> None:
    try:
        os.rename(aside, target)
    except OSError:
        if not target.is_dir():
            raise
        old = target.with_name(f"{aside.name}.old")
        os.rename(target, old)
        os.rename(aside, target)
        shutil.rmtree(old, ignore_errors=True)


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer's files from one model folder to another."""
    for name in (*TOKENIZER_FILES, *TOKENIZER_COMPANIONS):
        file = Path(source) / name
        if file.is_file():
            shutil.copyfile(file, Path(target) / name)


def read_weights(path: str | Path, like: Any) -> dict[str, torch.Tensor]:
    """The tensors of a published folder on the CPU, by the names of ``like`` (a model), ready to be copied into it.

    Usually the files' names are the model's. Where an architecture is saved under other names than it has in memory,
    the folder is loaded as a model of its own. Raises PublishError if a tensor is missing or has another shape:
    nothing has been changed then.
    """
    from safetensors.torch import load_file

    folder = Path(path)
    wanted = named_tensors(like)
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in weight_files(folder):
            tensors.update(load_file(str(file)))
    except OSError as error:
        raise PublishError(f"can't read published weights in {folder}: {error}") from error
    if not tensors:
        raise PublishError(f"no published weights in {folder}: it holds no *.safetensors file")
    if not wanted.keys() <= tensors.keys():
        tensors = {name: tensor.detach() for name, tensor in named_tensors(_load_like(folder, like)).items()}
    for name, tensor in wanted.items():
        if name not in tensors:
            raise PublishError(f"published weights in {folder} lack {name}; they belong to another model")
        if tensors[name].shape != tensor.shape:
            raise PublishError(
                f"published weights in {folder}: {name} has shape {tuple(tensors[name].shape)}, "
                f"the model has {tuple(tensor.shape)}; they belong to another model"
            )
    return {name: tensors[name] for name in wanted}


def _load_like(folder: Path, like: Any) -> Any:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architectures = config.get("architectures") or [type(like).__name__]
    if type(like).__name__ not in architectures:
        raise PublishError(f"weights in {folder} are of {architectures[0]}, the model is {type(like).__name__}")
    return load_model(folder, device="cpu", dtype=next(like.parameters()).dtype)
