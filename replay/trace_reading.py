"""A rollout trace as it lies in a file: lines, plain or compressed, and what they hold, each field by its type.

Reading is lenient: a torn last line, damaged lines and compressed data that break off are told, and the rest is given.
What a line says is not trusted: a value of another type, or a number beyond what sums over many can bear, is as good as
none (``Lacking``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import zstandard


class Line(NamedTuple):
    """A line as an object. ``number`` counts from 1. ``text`` is the line as it stood."""

    number: int
    fields: dict[str, Any]
    text: str


class TraceFile:
    """Lines of one file, ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``; then ``notes`` says what was left out."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Line]:
        bad: list[int] = []
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        last_bad = False
        number = 0
        packed = _Unpacked(self.path) if self.path.endswith((".gz", ".zst")) else None
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file if packed is None else _split(packed.chunks(file)), 1):
                text = raw.strip()
                if not text:
                    continue
                try:
                    fields = decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    bad.append(number)
                    last_bad = not raw.endswith(b"\n")
                    continue
                yield Line(number, fields, text.decode("utf-8", "replace"))
        self.notes = []
        if packed is not None and packed.problem:
            if last_bad:  # cut off there, too
                number = bad.pop() - 1
            self.notes.append(f"{self.path}: the compressed data {packed.problem} {number} line(s) were read")
        elif last_bad:
            self.notes.append(f"{self.path}: the last line, {bad.pop()}, is torn and was left out")
        if bad:
            shown = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
            self.notes.append(f"{self.path}: {len(bad)} line(s) are no JSON objects and were left out: {shown}")
        if number == 0 and not self.notes:
            self.notes.append(f"{self.path}: the trace is empty")


PACKED_BYTES_AT_ONCE: Final = 2_000


class _Unpacked:
    """A compressed file, however many streams it holds one after another, as far as it can be read.

    ``problem``: why it could not be read to the end, in words; empty if it could.
    """

    def __init__(self, path: str) -> None:
        self._gzip = path.endswith(".gz")
        self.problem = ""

    def _begin(self) -> Any:
        return zlib.decompressobj(wbits=31) if self._gzip else zstandard.ZstdDecompressor().decompressobj()

    def chunks(self, file: BinaryIO) -> Iterator[bytes]:
        """Decompressed bytes."""
        stream, begun = self._begin(), False
        try:
            while data := file.read(PACKED_BYTES_AT_ONCE):
                while data:
                    if not begun and self._gzip:
                        data = data.lstrip(b"\0")  # padding between streams
                        if not data:
                            break
                    yield from self._feed(stream, data)
                    begun, data = not stream.eof, stream.unused_data
                    if not begun:
                        stream = self._begin()
        except (zlib.error, zstandard.ZstdError) as error:
            self.problem = f"are damaged ({error}); what precedes may be wrong, what follows is missing:"
            return
        if begun:
            self.problem = "end early; what follows is missing:"

    def _feed(self, stream: Any, data: bytes) -> Iterator[bytes]:
        """What comes of ``data``; of damaged ones, what comes before the damage, as far as the format allows."""
        before = stream.copy() if self._gzip else None
        try:
            yield stream.decompress(data)
        except zlib.error:
            assert before is not None
            for at in range(len(data)):
                yield before.decompress(data[at : at + 1])
            raise


def _split(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines, with their newlines."""
    rest: list[bytes] = []
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        rest.append(last)
    if last := b"".join(rest):
        yield last


# --- fields ---------------------------------------------------------------------------------------------------------

INTEGER_MAX: Final = 2**31 - 1
"""The product of two fits in 64 bits, so queries may multiply them."""
COUNT_MAX: Final = 2**53
NUMBER_MAX: Final = 1e15
SECONDS_MAX: Final = 4e12
"""Beyond any time, also one in milliseconds; in microseconds it leaves room in 64 bits."""


class Lacking(Exception):
    """The line does not hold what its event needs; the text says what."""


class Fields:
    """What a line holds. Every method raises Lacking for a value of another kind; null is the same as no value."""

    __slots__ = ("_of",)

    def __init__(self, of: dict[str, Any]) -> None:
        self._of = of

    def __contains__(self, name: str) -> bool:
        return self._of.get(name) is not None

    def _get(self, name: str, default: Any) -> Any:
        value = self._of.get(name)
        if value is None:
            if default is None:
                raise Lacking(f"no {name}")
            return default
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = -1, most: int = INTEGER_MAX) -> int:
        """A whole number; without ``default`` it must be there. Text of digits will do."""
        return _integer(name, self._get(name, default), least, most)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        if default is not None and name not in self:
            return default
        return _number(name, self._get(name, None))

    def seconds(self, name: str) -> int | None:
        """A moment, in microseconds; None if there is none."""
        return _microseconds(self._of.get(name))

    def text(self, name: str, default: str = "") -> str:
        """Text; a plain value of another kind as text."""
        value = self._get(name, default)
        if isinstance(value, dict | list):
            raise Lacking(f"{name} is no text")
        return str(value)

    def flag(self, name: str) -> bool:
        """True or false, which is what is missing."""
        value = self._get(name, False)
        if not isinstance(value, bool | int):
            raise Lacking(f"{name} is neither true nor false")
        return bool(value)

    def prompt(self) -> str | None:
        """``prompt_id``: text or a whole number. None if there is none, or an empty one."""
        value = self._get("prompt_id", "")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise Lacking("prompt_id is neither text nor a whole number")
        return str(value) or None

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, empty if there is none."""
        return tuple(_integer(name, value, 0, INTEGER_MAX) for value in self._list(name))

    def tuples(self, name: str, width: int, most: int = INTEGER_MAX) -> tuple[tuple[int, ...], ...]:
        """A list of lists of ``width`` whole numbers each, empty if there is none."""
        found = self._list(name)
        if not all(isinstance(item, list) and len(item) == width for item in found):
            raise Lacking(f"{name} is no list of lists of {width}")
        return tuple(tuple(_integer(name, value, -1, most) for value in item) for item in found)

    def texts(self, name: str) -> list[str]:
        """A list of text or whole numbers, as text; empty if there is none."""
        found = self._list(name)
        if not all(isinstance(item, str | int) for item in found):
            raise Lacking(f"{name} is no list of texts")
        return list(map(str, found))

    def _list(self, name: str) -> list[Any]:
        value = self._get(name, [])
        if not isinstance(value, list):
            raise Lacking(f"{name} is no list")
        return value

    def counts(self, name: str) -> dict[str, int]:
        """Name → whole number, empty if there is none."""
        return {key: _integer(name, value, -1, COUNT_MAX) for key, value in self._object(name).items()}

    def numbers(self, name: str) -> dict[str, float]:
        """Name → finite number, empty if there is none; null (a number that JSON can't say) becomes NaN."""
        return {k: math.nan if v is None else _number(name, v) for k, v in self._object(name).items()}

    def settings(self, name: str) -> dict[str, Any]:
        """Name → any value; whole numbers only within bounds, for they are reckoned with."""
        found = self._object(name)
        for key, value in found.items():
            if isinstance(value, int) and not isinstance(value, bool):
                _integer(f"{name}.{key}", value, -INTEGER_MAX, INTEGER_MAX)
        try:
            msgspec.msgpack.encode(found)
        except (OverflowError, RecursionError) as error:
            raise Lacking(f"{name} holds numbers out of range") from error
        return found

    def _object(self, name: str) -> dict[str, Any]:
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise Lacking(f"{name} is no object")
        return value

    def null(self, name: str) -> bool:
        """Whether null is what the line says: a number that JSON can't say."""
        return name in self._of and self._of[name] is None


def _integer(name: str, value: Any, least: int, most: int) -> int:
    digits = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20
    if digits or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Lacking(f"{name} is no whole number")
    if not least <= value <= most:
        raise Lacking(f"{name} is out of range")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Lacking(f"{name} is no number")
    if not abs(value) <= NUMBER_MAX:
        raise Lacking(f"{name} is out of range")
    return float(value)


def _microseconds(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= SECONDS_MAX:
        return None
    return round(value * 1e6)
