"""Prints how many damages the exhaustive matrix tried, by outcome, whichever process ran it."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "damage matrix":
                terminalreporter.write_line(f"journal damage matrix, {value}")
