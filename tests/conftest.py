"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes depends on what else the machine does; that is no test.
settings.register_profile("unlost", deadline=None)
settings.load_profile("unlost")
