"""The machine that simulated lives run on: each of them records it, so a seed must find the same one everywhere."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import unlost.journal.lock


@contextmanager
def one_machine() -> Iterator[None]:
    """Host, process and Python as in any other run. What they are called changes the length of what is written,
    and so where a power cut tears it."""
    with ExitStack() as stack:
        for place, name, value in (
            (os, "getpid", 4321),
            (socket, "gethostname", "sim"),
            (platform, "python_version", "3"),
            (unlost.journal.lock, "host_name", "sim"),
            (unlost.journal.lock, "boot_id", "boot"),
            (unlost.journal.lock, "process_start", "1"),
        ):
            stack.enter_context(patch.object(place, name, lambda *_, value=value: value))
        yield
