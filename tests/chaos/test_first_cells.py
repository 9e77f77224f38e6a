"""Kill or end the pool's process during its start and during the first cells of a kernel."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.first_cells import FirstCells
from tests.eventually import HUNG_S
from tests.frontend import Scene

ROUNDS = int(os.environ.get("TAAS_KILL_ROUNDS", "3"))
SEED = int(os.environ.get("TAAS_KILL_SEED", "309"))
"""With this seed, the rounds kill the pool during a launch and while hosts start, and end the pool
when its process has just started.
"""
END_S = 100.0


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.mark.nightly
@pytest.mark.fault(61)
def test_the_first_cells_end_with_the_pools_process(scene: Scene) -> None:
    cells = FirstCells(scene, SEED, ("kill pool", "down"), END_S, HUNG_S)
    result = cells.play(ROUNDS, print)
    assert not result.wrong, f"seed {SEED}: {result}: {result.wrong}"
