"""Heavy packages are imported before threads need them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_nothing_heavy_is_left_to_import_for_the_data_plane_after_the_preload() -> None:
    """Then only the thread that loads the model imports parts of torch, and nothing can lock against it."""
    code = """
import asyncio, sys
from unlost.engine.imports import HEAVY, preload
asyncio.run(preload())
before = set(sys.modules)
import torch
import transfer_queue as tq
from tensordict import TensorDict
TensorDict({"a": torch.zeros(1, 2)}, batch_size=[1])
new = {n.partition(".")[0] for n in set(sys.modules) - before}
assert not new & {"torch", "tensordict", "transfer_queue"}, new
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
