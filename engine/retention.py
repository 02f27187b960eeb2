"""Which payload bytes may go: those that no restore to any remaining checkpoint could ask for (protocol rule 14)."""

from __future__ import annotations

import logging

from ..replay.state import SEALED, State
from .checkpoints import Folders, names_or_none, remove_or_leave
from .protocols import WorkerLost
from .workers import WorkerPool, payload_journal_name

log = logging.getLogger(__name__)


def payload_needs(state: State) -> tuple[dict[str, int], set[str]]:
    """What live groups refer to, O(alive).

    Payload journal -> first offset of a sealed payload in it; and the journals that hold the latest attempt of an
    unsealed sibling, of which everything is needed (protocol rules 9, 10).
    """
    sealed: dict[str, int] = {}
    whole: set[str] = set()
    for group in state.groups.values():
        for sibling in group.siblings:
            receipt = sibling.receipt
            if sibling.status == SEALED and receipt is not None:
                sealed[receipt.journal] = min(sealed.get(receipt.journal, receipt.first_offset), receipt.first_offset)
                continue
            for worker in (sibling.worker, sibling.source_worker):
                if worker in state.workers:
                    whole.add(state.workers[worker].journal)
    return sealed, whole


async def prune_payloads(state: State, root: str, folders: Folders, workers: WorkerPool) -> None:
    """Drop payload journals that nothing refers to, and old segments of the live ones.

    Call only after the event that set them free is durable. A live worker drops its own segments, since only it knows
    what its running attempts have written.
    """
    sealed, whole = payload_needs(state)
    kept = {worker.journal for worker in state.workers.values() if worker.alive} | set(sealed) | whole
    known = {worker.journal for worker in state.workers.values()}
    newest = payload_journal_name(state.incarnation, 0)[: -len("00000")]
    for name in await names_or_none(folders, root):
        starting = name >= newest and name not in known  # a replacement that has not joined, or a successor's worker
        if name not in kept and not starting:
            await remove_or_leave(folders, f"{root}/{name}")
    for member in list(workers.members):
        name = member.handle.journal_name
        first = sealed.get(name)
        if first is not None:
            try:
                await member.handle.prune(first)
            except WorkerLost:  # it may die at any call; its journal is pruned once its groups are gone
                await workers.lost(member)
            except OSError as error:
                log.warning("payload journal %s is not pruned this time: %s", name, error)
