"""Which payload journals may go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.fakes import run_virtual
from tests.sim_storage import SimStorage
from tests.simulation.world import SimFolders
from unlost.engine.retention import prune_payloads
from unlost.replay.events import PromptRef, Receipt
from unlost.replay.state import COMMITTED, SEALED, TRAINED, UNFINISHED, Group, Sibling, State, Worker


def state_of_the_third_incarnation() -> State:
    """Group 0 trained and kept for a fallback, group 1 waiting, group 2 resumed from a dead worker's tokens."""
    state = State()
    state.incarnation = 3
    names = ((0, 1, False), (1, 1, False), (2, 2, False), (3, 2, False), (4, 3, True), (5, 3, False))
    for number, incarnation, alive in names:
        state.workers[number] = Worker(number, f"i{incarnation:05d}-w{number:05d}", incarnation, alive)

    def sealed(worker: int, offset: int) -> Sibling:
        receipt = Receipt(1.0, 4, 0, 0, state.workers[worker].journal, offset, 7, first_offset=offset)
        return Sibling(SEALED, 0, 1, worker, receipt=receipt)

    prompt = PromptRef("p", 0, 0, 0)
    state.groups[0] = Group(0, prompt, TRAINED, 0, [sealed(0, 5)], 0)
    state.groups[1] = Group(1, prompt, COMMITTED, 0, [sealed(4, 40), sealed(4, 30)], 0)
    resumed = Sibling(0, 1, 2, 3, source_attempt=0, source_incarnation=2, source_worker=2)
    state.groups[2] = Group(2, prompt, UNFINISHED, 0, [resumed], 0)
    return state


def test_what_a_restore_could_ask_for_stays_and_so_does_what_is_just_starting() -> None:
    """Gone: journals that no live or trained group refers to. Kept: a replacement that has not joined yet (it has no
    event so far), a successor's worker, and whoever holds the prefix of a resumed attempt."""
    storage, pruned = SimStorage(), []
    names = ["i00001-w00000", "i00001-w00001", "i00002-w00002", "i00002-w00003", "i00003-w00004", "i00003-w00005"]
    for name in [*names, "i00003-w00006", "i00004-w00000"]:
        storage.make_directory(f"payloads/{name}")

    async def prune(first: int) -> None:
        pruned.append(first)

    handle = SimpleNamespace(journal_name="i00003-w00004", prune=prune)
    workers: Any = SimpleNamespace(members=[SimpleNamespace(handle=handle)])

    async def main() -> None:
        await prune_payloads(state_of_the_third_incarnation(), "payloads", SimFolders(storage), workers)

    run_virtual(main)
    left = {name.removeprefix("payloads/") for name in storage.directories}
    assert left == {*names, "i00003-w00006", "i00004-w00000"} - {"i00001-w00001", "i00003-w00005"}
    assert pruned == [30], "a live worker drops its own segments, up to the first payload that is still asked for"
