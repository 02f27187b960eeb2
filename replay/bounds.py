"""How many tokens of an attempt nobody may know of: those that its worker had made and no journal holds yet.

A worker gathers ``journal.progress_interval_tokens`` before it writes them down, and what it writes is durable a flush
later: one chunk being gathered and one being written, as long as the payload journal's storage keeps up
(docs/DURABILITY.md). And no response goes beyond ``generation.max_new_tokens``, a reused prefix included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

INTERVAL_KEY: Final = "journal.progress_interval_tokens"
RESPONSE_KEY: Final = "generation.max_new_tokens"


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
    """From what each opening of a run recorded (``RunStarted.settings``): the largest values bound them all."""
    chunks: list[int] = []
    responses: list[int] = []
    for recorded in settings:
        for key, found in ((INTERVAL_KEY, chunks), (RESPONSE_KEY, responses)):
            if isinstance(value := recorded.get(key), int):
                found.append(value)
    return Unheard(2 * max(chunks) if chunks else None, max(responses, default=None))
