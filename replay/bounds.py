"""How many tokens of an attempt nobody may know of: those that its worker had made and no journal holds yet.

A worker gathers ``journal.progress_interval_tokens`` before it writes them down, and what it writes is durable a flush
later: one chunk being gathered and one being written, as long as the payload journal's storage keeps up
(docs/DURABILITY.md). Under ``payloads: none`` it writes none down. And no response goes beyond
``generation.max_new_tokens``, a reused prefix included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

INTERVAL_KEY: Final = "journal.progress_interval_tokens"
RESPONSE_KEY: Final = "generation.max_new_tokens"
PAYLOADS_KEY: Final = "data_plane.payloads"
KEYS: Final = (INTERVAL_KEY, RESPONSE_KEY, PAYLOADS_KEY)


class Unheard(NamedTuple):
    """Tokens: ``chunks`` that may wait in a worker, ``response`` that an attempt may have at all; None: unknown."""

    chunks: int | None
    response: int | None

    def at_most(self, held: int) -> int | None:
        """Tokens beyond the ``held`` ones (known, prefix included) that an attempt had when it was cut off, at most."""
        room = [self.chunks] if self.chunks is not None else []
        if self.response is not None:
            room.append(max(self.response - held, 0))
        return min(room, default=None)


def unheard(settings: Iterable[Mapping[str, Any]]) -> Unheard:
    """From what each opening of a run recorded (``RunStarted.settings``): the largest values bound them all.

    ``chunks`` is None also where an opening kept no tokens in payload journals: then the response alone bounds.
    """
    chunks: list[int] = []
    responses: list[int] = []
    kept = True
    for recorded in settings:
        kept = kept and recorded.get(PAYLOADS_KEY) != "none"
        for key, found in ((INTERVAL_KEY, chunks), (RESPONSE_KEY, responses)):
            if isinstance(value := recorded.get(key), int):
                found.append(value)
    return Unheard(2 * max(chunks) if chunks and kept else None, max(responses, default=None))


def configured(folder: Path) -> dict[str, Any]:
    """What the run's config.yaml says of KEYS; nothing if there is none that can be read."""
    import yaml

    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, yaml.YAMLError, AttributeError):
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        for key in KEYS:
            section, _, name = key.partition(".")
            found[key] = (tree.get(section) or {}).get(name)
    return {key: value for key, value in found.items() if value is not None}
