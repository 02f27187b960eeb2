"""What the commands share in printing: formats, JSON, tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from rich.console import Console


PIPE_COLUMNS: Final = 1000


class Format(StrEnum):
    """How a command prints its result. JSON goes to stdout alone: nothing else is mixed in."""

    table = "table"
    json = "json"


def console() -> Console:
    """Standard output with styles when it is a terminal; lines and columns are never cut when it is not."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, soft_wrap=True, width=PIPE_COLUMNS)


class WarningLines(logging.Handler):
    """Log records as lines on the stderr of the moment, which a live display may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line; exceptions are left to the log file."""
        sys.stderr.write(f"unlost: {record.levelname.lower()}: {' '.join(record.getMessage().split())}\n")


def show_warnings() -> None:
    """Let warnings of unlost reach the terminal, once however often it is called."""
    logger = logging.getLogger("unlost")
    if not any(isinstance(handler, WarningLines) for handler in logger.handlers):
        logger.addHandler(WarningLines(logging.WARNING))


def print_json(value: Any) -> None:
    """Indented JSON and a newline on stdout."""
    encoded = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(encoded.decode() + "\n")


def print_json_line(value: Any) -> None:
    """One JSON value on one line, for streams."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()
) -> None:
    """A table of plain text cells; ``right``: columns that are aligned to the right (numbers)."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console().print(table)


def print_fields(pairs: Iterable[tuple[str, Any]]) -> None:
    """Name and value, one a line, values in one column."""
    shown = [(name, "-" if value is None else str(value)) for name, value in pairs]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        sys.stdout.write(f"{name:<{width}}  {value}\n")


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7, 9-10`` for sorted or unsorted whole numbers; ``-`` for none."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "-"
