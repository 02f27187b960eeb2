"""The event union that the journal's tests use: a small one, a large one, an image."""

from __future__ import annotations

import msgspec


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    text: str = ""


class Blob(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int
    data: bytes
    values: list[float] = []


class Image(msgspec.Struct, frozen=True, array_like=True, tag=3):
    number: int
    state: dict[str, int]


class Odd(msgspec.Struct, frozen=True, array_like=True, tag=300):
    flag: bool | None
    nested: tuple[Note, ...] = ()


KINDS = (Note, Blob, Image, Odd)
Event = Note | Blob | Image | Odd
