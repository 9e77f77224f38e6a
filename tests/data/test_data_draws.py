"""Tests that random registered loaders give the batches of local DataLoaders.

`benchmarks/loader_fuzz.py` runs more such loaders.
"""

from pathlib import Path

import pytest

from tests.data.draws import SAMPLERS, Draw, differences, draw
from tests.nightly import nightly

pytestmark = pytest.mark.usefixtures("forkserver")


def is_quick(one: Draw) -> bool:
    """Return whether a draw needs at most 3 fetchers and workers of local loaders together."""
    fetchers = one.cpus + (one.cpus_after if one.save >= 0 else 0)
    return fetchers + one.num_workers <= 3


QUICK = [one.seed for one in map(draw, range(100)) if is_quick(one)][:20]


@pytest.mark.filterwarnings("ignore")  # torch warns of more workers than cores
@pytest.mark.parametrize("seed", [*QUICK[:8], *map(nightly, QUICK[8:])])
def test_a_random_loader_gives_what_a_local_one_gives(seed: int, tmp_path: Path) -> None:
    assert differences(draw(seed), tmp_path) == []


def test_draws_are_of_all_kinds() -> None:
    draws = [draw(seed) for seed in range(500)]
    assert {one.sampler for one in draws} == {"", *SAMPLERS}
    assert {(one.cpus, one.fault) for one in draws} >= {(0, ""), (3, "kill fetcher")}
    assert draws == [draw(seed) for seed in range(500)]
