"""Random faults change neither the stream nor the weights nor the ledger."""

import os
from pathlib import Path

import pytest

from tests.chaos.harm import play

pytestmark = pytest.mark.usefixtures("forkserver")

FAULTS = int(os.environ.get("TAAS_CHAOS_FAULTS", "20"))
SEED = int(os.environ.get("TAAS_CHAOS_SEED", "1"))


def test_the_result_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    assert len(play(tmp_path, SEED, FAULTS)) >= FAULTS
