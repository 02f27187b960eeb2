"""What a destructive effect waits for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import VirtualClock
from tests.journal.kinds import KINDS, Event, Note
from tests.sim_storage import SimStorage
from unlost.engine.ledger import Ledger
from unlost.journal import JournalDamaged, JournalReader, JournalWriter
from unlost.replay.state import State


async def at_once(work: Callable[..., Any], *values: Any) -> Any:
    return work(*values)


def test_what_precedes_a_destructive_effect_can_only_be_damaged_not_torn() -> None:
    """A power cut that spoils its frame makes the journal refuse to open; cut silently, it would own what is gone."""
    storage = SimStorage()
    writer: JournalWriter[Event] = JournalWriter.open("/j", KINDS, journal_id="run", storage=storage, threaded=False)
    writer.append(Note(0))
    writer.sync()
    offset = writer.append(Note(1))
    writer.sync()
    asyncio.run(Ledger(State(), writer, VirtualClock(), at_once).before_destructive(offset))
    storage.power_cut(random.Random(1), "drop")
    (segment,) = [name for name in storage.list_names("/j") if name.endswith(".zst")]
    storage.put(f"/j/{segment}", storage.content(f"/j/{segment}")[:-1])
    with pytest.raises(JournalDamaged):
        list(JournalReader("/j", KINDS, storage=storage).events())
