"""Prints how many damages the exhaustive matrix tried, by outcome."""

from __future__ import annotations

import sys

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    matrix = sys.modules.get("tests.journal.test_matrix")
    for line in getattr(matrix, "SUMMARIES", []):
        terminalreporter.write_line(f"journal damage matrix, {line}")
