"""Every buffer of the matrix with every sampler: saved, lost, restored; what comes back, stamped and counted how."""

from __future__ import annotations

import pytest

from tests.fakes import run_virtual
from tests.scenarios.checks import CASES, run_case
from tests.scenarios.places import in_memory


@pytest.mark.parametrize(("scenario", "sampler"), CASES)
def test_what_was_handed_out_and_not_used_comes_back(scenario: str, sampler: str) -> None:
    """Through the real journal, a real checkpoint and a fresh restore, over a simulated data plane."""

    async def main() -> None:
        await run_case(await in_memory(), scenario, sampler)

    run_virtual(main)


def test_all_of_the_matrix_is_run() -> None:
    """Nine buffers, four samplers."""
    assert len(CASES) == 36
    assert len(set(CASES)) == 36
