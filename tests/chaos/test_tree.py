"""Kill or stop a random process of the tree at a random moment. The next cell must run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.tree import CELLS, DETACHED, Chaos, Program
from tests.eventually import HUNG_S
from tests.frontend import Scene

ROUNDS = int(os.environ.get("TAAS_CHAOS_ROUNDS", "3"))
SEED = int(os.environ.get("TAAS_CHAOS_SEED", "1"))
END_S = 120.0
PROGRAMS = {"cells": CELLS, "detached session": DETACHED}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_harm_to_a_process_does_not_reach_the_next_cell(scene: Scene, program: Program) -> None:
    harmed = Chaos(scene, SEED, program, program.harms, END_S, HUNG_S)
    result = harmed.play(ROUNDS, print)
    print(result)
    assert not result.late + result.broken + result.left, str(result)
