"""The same scenarios through a real TransferQueue, real folders and its native snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.checks import CASES, run_case
from tests.scenarios.places import on_disk
from tests.scenarios.test_additional import borrow_and_repay, sealed_and_stray, worked_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="package")]


@pytest.mark.parametrize(("scenario", "sampler"), CASES)
async def test_what_was_handed_out_and_not_used_comes_back(
    scenario: str, sampler: str, real_plane: Any, tmp_path: Path
) -> None:
    """Every case of the matrix: rows come back out of TransferQueue's own snapshot, in a service started anew."""
    await run_case(await on_disk(str(tmp_path / "run"), real_plane), scenario, sampler)


@pytest.mark.parametrize("story", [borrow_and_repay, sealed_and_stray, worked_example])
async def test_the_additional_stories(story: Any, real_plane: Any, tmp_path: Path) -> None:
    """Borrow and repayment, the group between seal and commit with a stray row, the worked counters."""
    await story(await on_disk(str(tmp_path / "run"), real_plane))
