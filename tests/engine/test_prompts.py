"""Prompt files: order, references, fingerprints, and every fault named with its line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unlost.engine.prompts import JsonlPrompts, PromptChanged, PromptFileError, content_hash, permutation, render
from unlost.engine.protocols import PromptSource


def write(folder: Path, rows: list[Any], name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}+1=", "answer": str(i + 1), "id": f"q{i}", "task": "sum", "level": i % 3} for i in range(count)
    ]


def test_rows_come_in_file_order_with_their_references(tmp_path: Path) -> None:
    """Everything of a row is handed out, extra keys too, and its reference says where it came from."""
    source: PromptSource = JsonlPrompts(write(tmp_path, rows(4)))
    prompts, epoch, position = source.fetch(0, 0, 3)
    assert [prompt.row for prompt in prompts] == rows(3)
    assert [(p.ref.sample_id, p.ref.epoch, p.ref.index, p.ref.task) for p in prompts] == [
        ("q0", 0, 0, "sum"),
        ("q1", 0, 1, "sum"),
        ("q2", 0, 2, "sum"),
    ]
    assert (epoch, position, len(source)) == (0, 3, 4)


def test_the_content_hash_is_the_documented_one(tmp_path: Path) -> None:
    """Independent computation over canonical JSON; key order and spacing in the file don't matter."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt" : "größe",\t"answer":[1, 2.5], "id": 7}\n', encoding="utf-8")
    canonical = '{"answer":[1,2.5],"id":7,"prompt":"größe"}'.encode()
    expected = int(hashlib.sha256(canonical).hexdigest()[:16], 16)
    assert JsonlPrompts(path).fetch(0, 0, 1)[0][0].ref.content_hash == expected
    assert content_hash({"id": 7, "prompt": "größe", "answer": [1, 2.5]}) == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_fetch_goes_over_the_end_of_epochs(tmp_path: Path, shuffle: bool) -> None:
    """Any split of the stream into fetches gives the same prompts; each epoch holds every row once."""
    source = JsonlPrompts(write(tmp_path, rows(5)), shuffle=shuffle, seed=3)
    whole, epoch, position = source.fetch(0, 0, 17)
    assert (epoch, position) == (3, 2)
    for size in (1, 2, 3, 5, 7):
        parts, epoch, position = [], 0, 0
        while len(parts) < 17:
            batch, epoch, position = source.fetch(epoch, position, min(size, 17 - len(parts)))
            assert 0 <= position < 5
            parts += batch
        assert parts == whole
    for first in (0, 5, 10):
        assert sorted(prompt.ref.index for prompt in whole[first : first + 5]) == list(range(5))
        assert {prompt.ref.epoch for prompt in whole[first : first + 5]} == {first // 5}


def test_a_position_at_the_end_means_the_next_epoch(tmp_path: Path) -> None:
    """Whoever stored (epoch, length) gets the next epoch's first prompt, not an error."""
    source = JsonlPrompts(write(tmp_path, rows(5)), shuffle=True, seed=3)
    assert source.fetch(0, 5, 2) == source.fetch(1, 0, 2)


@given(st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 9))
@settings(max_examples=50)
def test_a_permutation_holds_each_row_once(count: int, seed: int, epoch: int) -> None:
    """For any size, seed and epoch; and asked again it is the same."""
    order = list(permutation(count, seed, epoch))
    assert sorted(order) == list(range(count))
    assert order == list(permutation(count, seed, epoch))


def test_the_permutation_is_pinned_and_differs_by_epoch_and_seed() -> None:
    """A run resumed on another machine or Python must serve the same order."""
    assert list(permutation(10, 0, 0)) == [3, 8, 5, 7, 1, 2, 0, 9, 4, 6]  # as seen on Python 3.11, 3.12 and 3.13
    assert list(permutation(10, 7, 3)) == [2, 1, 6, 3, 7, 8, 4, 5, 0, 9]
    assert permutation(50, 0, 0) != permutation(50, 0, 1)
    assert permutation(50, 0, 0) != permutation(50, 1, 0)


def test_reread_gives_the_same_prompt(tmp_path: Path) -> None:
    """A reference from an earlier incarnation leads back to the row, whatever the shuffle is."""
    path = write(tmp_path, rows(6))
    prompts, _, _ = JsonlPrompts(path, shuffle=True, seed=1).fetch(2, 0, 6)
    source = JsonlPrompts(path, shuffle=True, seed=1)
    assert [source.reread(prompt.ref) for prompt in prompts] == prompts


def test_an_edited_row_is_noticed(tmp_path: Path) -> None:
    """Edited before opening, edited while open, cut off, gone: PromptChanged, never another prompt in its place."""
    path = write(tmp_path, rows(3))
    source = JsonlPrompts(path)
    ref = source.fetch(0, 1, 1)[0][0].ref
    changed = rows(3)
    changed[1]["answer"] = "9"
    write(tmp_path, changed)
    with pytest.raises(PromptChanged, match=r"changed while the run uses it \(row 1\)"):
        source.reread(ref)
    with pytest.raises(PromptChanged, match="row 1"):
        source.fetch(0, 0, 3)
    with pytest.raises(PromptChanged, match="is not the prompt that the run was given"):
        JsonlPrompts(path).reread(ref)
    with pytest.raises(PromptChanged, match="row 9"):
        source.reread(msgspec.structs.replace(ref, index=9))
    path.write_text("")
    with pytest.raises(PromptChanged, match="row 0"):
        source.fetch(0, 0, 1)
    path.unlink()
    with pytest.raises(PromptChanged, match="row 0"):
        source.fetch(0, 0, 1)


def test_the_fingerprint_tells_what_is_handed_out_when(tmp_path: Path) -> None:
    """Same for a copy elsewhere and for reordered keys; another for other rows, order, shuffle or seed."""
    base = JsonlPrompts(write(tmp_path, rows(4)), shuffle=True, seed=1).fingerprint
    copy = [dict(reversed(row.items())) for row in rows(4)]
    assert JsonlPrompts(write(tmp_path, copy, "copy.jsonl"), shuffle=True, seed=1).fingerprint == base
    others = [
        JsonlPrompts(write(tmp_path, rows(5), "a"), shuffle=True, seed=1),
        JsonlPrompts(write(tmp_path, rows(4)[::-1], "b"), shuffle=True, seed=1),
        JsonlPrompts(write(tmp_path, rows(4), "c"), shuffle=True, seed=2),
        JsonlPrompts(write(tmp_path, rows(4), "d"), shuffle=False, seed=1),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 5
    assert (
        JsonlPrompts(write(tmp_path, rows(4)), seed=1).fingerprint == JsonlPrompts(write(tmp_path, rows(4))).fingerprint
    )


def test_ids_default_to_row_numbers_and_blank_lines_and_a_mark_are_skipped(tmp_path: Path) -> None:
    """Files made on Windows, and files with a trailing blank line, work."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b", "id": 12}\r\n{"prompt": "c"}')
    source = JsonlPrompts(path)
    prompts = source.fetch(0, 0, 3)[0]
    assert [(prompt.row["prompt"], prompt.ref.sample_id) for prompt in prompts] == [("a", "0"), ("b", "12"), ("c", "2")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b"\n \n", "has no prompts"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        (b'{"prompt": "a"}\n\n{"answer": 1}\n', 'line 3: no "prompt"; every line needs one'),
        (b'{"question": "a"}\n', 'line 1: no "prompt"; rename "question"'),
        (b'{"prompt": ""}\n', 'line 1: "prompt" must be'),
        (b'{"prompt": 5}\n', 'line 1: "prompt" must be'),
        (b'{"prompt": []}\n', 'line 1: "prompt" must be'),
        (b'{"prompt": [{"role": "user"}]}\n', 'line 1: "prompt" must be'),
        (b'["prompt"]\n', "line 1: a JSON list"),
        (b'{"prompt": "a", "id": 1.5}\n', 'line 1: "id" must be'),
        (b'{"prompt": "a", "id": true}\n', 'line 1: "id" must be'),
        (b'{"prompt": "a", "task": 3}\n', 'line 1: "task" must be'),
        (b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "line 2: id 'x' is that of line 1"),
        (b'{"prompt": "a"}\n{"prompt": "b", "id": 0}\n', "line 2: id '0' is that of line 1"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8 .byte 13 of the line is 0xff"),
        (b'{"prompt": "a", "weight": NaN}\n', "line 1: not JSON .NaN"),
        (b'{"prompt": "\\ud800"}\n', "line 1: a value that JSON can't carry"),
        (b'{"prompt": "a", "answer": 1e999}\n', "line 1: a value that JSON can't carry"),
        (b'{"prompt": "a", "answer": ' + b"[" * 200000 + b"\n", "line 1: not JSON"),
    ],
)
def test_every_fault_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    """The file, the line, what is wrong with it."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptFileError, match=message) as caught:
        JsonlPrompts(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """And a folder in its place."""
    with pytest.raises(PromptFileError, match=r"nothing\.jsonl: No such file"):
        JsonlPrompts(tmp_path / "nothing.jsonl")
    with pytest.raises(PromptFileError, match="Is a directory"):
        JsonlPrompts(tmp_path)


class Tokenizer:
    """Encodes characters; a start token is added unless told not to."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_render_uses_the_chat_template_if_there_is_one() -> None:
    """With a template its own special tokens, without one the raw text; ``none`` forbids it."""
    plain, chat = Tokenizer(None), Tokenizer("{{ x }}")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert render({"prompt": "hi"}, plain) == [1, *ids("hi")]
    assert render({"prompt": "hi"}, chat) == ids("<user>hi<assistant>")
    assert render({"prompt": messages}, chat) == ids("<system>s<user>hi<assistant>")
    assert render({"prompt": "hi"}, chat, chat_template="none") == [1, *ids("hi")]
    assert render({"prompt": messages}, plain) == [1, *ids("system: s\nuser: hi")]
