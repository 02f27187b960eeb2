"""Prompts from a JSON Lines file: a map-style dataset in file order, or a seeded permutation per epoch.

Promise: every fault of the file is found when it is opened, and named with its line; the order is a function of
(number of rows, seed, epoch) alone, the same on every platform and Python version; a row is handed out only if it is
the row that was there when the file was opened.

A line is an object with ``prompt`` (text, or a list of chat messages) and optionally ``answer`` (anything), ``id``
(text or whole number), ``task`` (text); other keys are kept for the reward. Blank lines are skipped. Only offsets and
hashes are held in memory, about 16 bytes a row; rows are read when asked for.

The permutation sorts the row numbers by ``random.Random.random()``: seeding with a string and that method are what
Python promises never to change, ``shuffle`` is not.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from array import array
from pathlib import Path
from typing import Any

from ..journal.errors import EXIT_USAGE, UnlostError
from ..replay.events import PromptRef
from .protocols import Prompt


class PromptFileError(UnlostError):
    """The prompt file can't be used; the message names file, line and remedy."""

    exit_code = EXIT_USAGE


class PromptChanged(UnlostError):
    """A prompt is not what it was: the file was edited since its prompts were handed out."""


def content_hash(row: dict[str, Any]) -> int:
    """The first 8 bytes of SHA-256 over the row's canonical JSON, as a big-endian unsigned integer.

    Canonical: keys sorted, no spaces, no escapes beyond JSON's own, UTF-8. So it survives reordered keys and changed
    spacing, and nothing else.
    """
    text = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


class JsonlPrompts:
    """Implements ``PromptSource`` over a file. Raises PromptFileError.

    ``fingerprint`` is a SHA-256 over the rows' content hashes in file order, the shuffle switch and, if that is on, the
    seed: the same for a copy of the file elsewhere, another for any change of what is handed out when.
    """

    def __init__(self, path: str | Path, *, shuffle: bool = False, seed: int = 0) -> None:
        self.path = Path(path)
        self._shuffle = shuffle
        self._seed = seed
        self._offsets = array("Q")
        self._hashes = array("Q")
        self._order: tuple[int, array[int]] | None = None
        self._index()
        digest = hashlib.sha256(f"rows {len(self._hashes)} shuffle {shuffle} seed {seed if shuffle else 0}\n".encode())
        portable = array("Q", self._hashes)
        if sys.byteorder == "big":
            portable.byteswap()
        digest.update(portable.tobytes())
        self.fingerprint = digest.hexdigest()

    def _index(self) -> None:
        lines_by_id: dict[str, int] = {}
        try:
            with self.path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    skipped = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
                    if line[skipped:].strip():
                        self._add(number, offset + skipped, line[skipped:], lines_by_id)
                    offset += len(line)
        except OSError as error:
            raise PromptFileError(f"can't read prompt file {self.path}: {error.strerror}; set data.train") from error
        if not self._offsets:
            raise PromptFileError(
                f'prompt file {self.path} has no prompts; write one object a line, such as {{"prompt": "2+2="}}'
            )

    def _add(self, number: int, offset: int, line: bytes, lines_by_id: dict[str, int]) -> None:
        where = f"prompt file {self.path}, line {number}"
        row = _parse(where, line)
        sample_id = _sample_id(row, len(self._offsets))
        if sample_id in lines_by_id:
            raise PromptFileError(
                f"{where}: id {sample_id!r} is that of line {lines_by_id[sample_id]} too; make ids unique or leave "
                "them out (the row number, from 0, is taken then)"
            )
        try:
            row_hash = content_hash(row)
        except ValueError as error:  # half a surrogate pair, or a number beyond a double
            raise PromptFileError(f"{where}: a value that JSON can't carry ({error}); correct or drop it") from error
        lines_by_id[sample_id] = number
        self._offsets.append(offset)
        self._hashes.append(row_hash)

    def __len__(self) -> int:
        return len(self._offsets)

    def fetch(self, epoch: int, position: int, count: int) -> tuple[list[Prompt], int, int]:
        """``count`` prompts from there on, over the end of the epoch if need be; and where the next fetch begins.

        Positions go from 0 to ``len - 1``; the end of an epoch is position 0 of the next. Raises PromptChanged.
        """
        epoch, position = epoch + position // len(self), position % len(self)
        prompts: list[Prompt] = []
        while len(prompts) < count:
            prompts.append(self._prompt(epoch, self._row_at(epoch, position)))
            position += 1
            if position == len(self):
                epoch, position = epoch + 1, 0
        return prompts, epoch, position

    def reread(self, ref: PromptRef) -> Prompt:
        """The prompt behind a reference. Raises PromptChanged if its content hash differs or the row is gone."""
        if not 0 <= ref.index < len(self) or self._hashes[ref.index] != ref.content_hash:
            raise PromptChanged(
                f"prompt file {self.path}: row {ref.index} (id {ref.sample_id!r}) is not the prompt that the run was "
                "given; put the old file back, or start a new run"
            )
        return self._prompt(ref.epoch, ref.index)

    def _row_at(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(len(self), self._seed, epoch))
        return self._order[1][position]

    def _prompt(self, epoch: int, index: int) -> Prompt:
        row = self._read(index)
        task = str(row.get("task") or "")
        ref = PromptRef(_sample_id(row, index), epoch, index, self._hashes[index], task)
        return Prompt(ref, row)

    def _read(self, index: int) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offsets[index])
                row = _parse(f"prompt file {self.path}, row {index}", file.readline())
            if content_hash(row) == self._hashes[index]:
                return row
        except (OSError, PromptFileError) as error:
            raise PromptChanged(f"prompt file {self.path}: row {index} can't be read any more: {error}") from error
        raise PromptChanged(
            f"prompt file {self.path} was changed while the run uses it (row {index}); put the old file back"
        )


def permutation(rows: int, seed: int, epoch: int) -> array[int]:
    """The order of an epoch: row numbers, each once."""
    numbers = random.Random()  # noqa: S311  an order, not a secret
    numbers.seed(f"{seed}:{epoch}", version=2)
    keys = [numbers.random() for _ in range(rows)]
    return array("Q", sorted(range(rows), key=keys.__getitem__))


def _sample_id(row: dict[str, Any], index: int) -> str:
    value = row.get("id")
    return str(index) if value is None else str(value)


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise PromptFileError(
            f"{where}: not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x}); convert the file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise PromptFileError(f'{where}: a JSON {type(row).__name__}, not an object such as {{"prompt": "2+2="}}')
    problem = _problem(row)
    if problem:
        raise PromptFileError(f"{where}: {problem}")
    return row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _problem(row: dict[str, Any]) -> str:
    if "prompt" not in row:
        near = next((name for name in row if name.lower() in {"prompts", "question", "input", "text", "problem"}), "")
        return 'no "prompt"' + (f'; rename "{near}" to "prompt"' if near else "; every line needs one")
    if not _is_prompt(row["prompt"]):
        return '"prompt" must be non-empty text, or a list of messages such as {"role": "user", "content": "Hi"}'
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id"), str | int | None):
        return f'"id" must be text or a whole number, not {json.dumps(row["id"])}'
    if not isinstance(row.get("task"), str | None):
        return f'"task" must be text, not {json.dumps(row["task"])}'
    return ""


def _is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
            for message in value
        )
    return isinstance(value, str) and bool(value)


def render(row: dict[str, Any], tokenizer: Any, *, chat_template: str = "auto") -> list[int]:
    """Token ids of a row's prompt, as the policy is to see it.

    ``chat_template``: ``auto`` applies the tokenizer's chat template, with the generation prompt, if it has one;
    ``none`` takes the text as it is. Messages without a template are joined as ``role: content`` lines.
    """
    prompt = row["prompt"]
    if chat_template == "auto" and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes its own special tokens; adding them again would double the first one.
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    return [int(token) for token in tokenizer.encode(text)]
