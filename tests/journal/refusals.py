"""What a refusal means where nothing may be refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from unlost.journal import UnlostError

P = ParamSpec("P")


def nothing_else_is_refused(test: Callable[P, None]) -> Callable[P, None]:
    """A journal's error that leaves the test is its failure: what the test says is that this journal is good."""

    @functools.wraps(test)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            test(*args, **kwargs)
        except UnlostError as error:
            raise AssertionError(f"refused: {error}") from error

    return checked
