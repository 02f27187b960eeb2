"""Loaded into pytest while a mutant is tried: notes each failure, and whether it was an assertion that failed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

NOTES = "MUTANT_NOTES"


def is_assertion(error: BaseException) -> bool:
    """An assertion, or a pytest.raises that saw nothing; no other error, and no test that took too long."""
    if isinstance(error, pytest.fail.Exception):
        return not str(error).startswith("Timeout")
    return isinstance(error, AssertionError)


def pytest_exception_interact(node: Any, call: Any, report: Any) -> None:
    """Also called for errors while collecting: those name no test."""
    error = call.excinfo.value
    note = {"test": report.nodeid, "assertion": is_assertion(error), "error": f"{type(error).__name__}: {error}"}
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.write(json.dumps(note) + "\n")
