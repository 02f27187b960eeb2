"""Errors of the command line itself. Imported when one is raised, so that ``--help`` does not load the journal."""

from __future__ import annotations

from ..journal.errors import EXIT_USAGE, UnlostError


class UsageFault(UnlostError):
    """What was asked for does not exist or does not fit; exit code 2."""

    exit_code = EXIT_USAGE


class TrainUnavailable(UnlostError):
    """What training needs is not installed."""


class DemoFailed(UnlostError):
    """The demo did not show what it is there to show; the message says which part."""
