"""Import the heavy packages once, in one thread, before several threads of a process need them.

Importing torch from two threads at a time can end in Python's import deadlock detection (seen between an optimizer's
``torch._dynamo`` and TransferQueue's ``tensordict``), now and then, on a loaded machine.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Final

HEAVY: Final = ("torch", "torch._dynamo", "tensordict", "transfer_queue", "transformers")


async def preload() -> None:
    """Import them one after the other, off the event loop. Raises ImportError."""
    await asyncio.to_thread(_import_all)


def _import_all() -> None:
    for name in HEAVY:
        importlib.import_module(name)
