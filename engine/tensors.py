"""Tensor files of a checkpoint: safetensors, digested while they are written, verified before they are used.

Promise: no pickles, either way; the SHA-256 that is returned is of the bytes handed to the file system, computed on
their way, never by reading the file again; when a call returns, the file's content is on disk (fsync). The folder's
entry is not: call ``sync_folder`` once after the last file.

The format is safetensors' own (8 bytes little-endian header length, JSON header, data); it is written here and not by
the library, which can't digest while writing and would need a second copy of everything in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import safetensors.torch
import torch

from .protocols import CheckpointDamaged

_CHUNK_BYTES: Final = 1 << 24
_DTYPES: Final = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write contiguous CPU tensors as a new safetensors file, fsynced; returns its SHA-256, hexadecimal.

    Raises OSError, FileExistsError included.
    """
    # Wide types first: every tensor then starts at a multiple of its own element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with _DigestingFile(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            file.write(_bytes_of(tensors[name]))
    return file.digest


def write_json(path: str | Path, value: Any) -> str:
    """Write a new JSON file, fsynced; returns its SHA-256, hexadecimal. Raises OSError."""
    with _DigestingFile(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")
    return file.digest


def read_tensors(folder: str | Path, name: str, digests: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of a file, once its bytes match their digest. Raises CheckpointDamaged or OSError."""
    return safetensors.torch.load(_verified(folder, name, digests))


def read_json(folder: str | Path, name: str, digests: Mapping[str, str]) -> Any:
    """The value in a JSON file, once its bytes match their digest. Raises CheckpointDamaged or OSError."""
    return json.loads(_verified(folder, name, digests))


def sync_folder(path: str | Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verified(folder: str | Path, name: str, digests: Mapping[str, str]) -> bytes:
    path = Path(folder) / name
    if name not in digests:
        raise CheckpointDamaged(f"{path}: the manifest has no digest for it; take another checkpoint")
    try:
        data = path.read_bytes()  # the bytes that are verified are the bytes that are used: the file is read once
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path}: missing; take an older checkpoint") from error
    found = hashlib.sha256(data).hexdigest()
    if found != digests[name]:
        raise CheckpointDamaged(
            f"{path}: its SHA-256 is {found}, the manifest says {digests[name]}; the file was changed after it was "
            "written. Take an older checkpoint"
        )
    return data


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")


class _DigestingFile:
    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._sha = hashlib.sha256()
        self.digest = ""

    def __enter__(self) -> Self:
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _CHUNK_BYTES):
            chunk = view[begin : begin + _CHUNK_BYTES]
            self._sha.update(chunk)
            written = 0
            while written < len(chunk):
                written += os.write(self._descriptor, chunk[written:])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
                self.digest = self._sha.hexdigest()
        finally:
            os.close(self._descriptor)
