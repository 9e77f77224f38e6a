"""Random loaders give what local ones give; benchmarks/loader_fuzz.py plays more of them."""

from pathlib import Path

import pytest

from tests.data.draws import SAMPLERS, differences, draw

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.mark.filterwarnings("ignore")  # a dataset with its own generator, more workers than cores
@pytest.mark.parametrize("seed", range(20))
def test_a_random_loader_gives_what_a_local_one_gives(seed: int, tmp_path: Path) -> None:
    assert differences(draw(seed), tmp_path) == []


def test_draws_are_of_all_kinds() -> None:
    draws = [draw(seed) for seed in range(500)]
    assert {one.sampler for one in draws} == {"", *SAMPLERS}
    assert {(one.cpus, one.fault) for one in draws} >= {(0, ""), (3, "kill fetcher")}
    assert draws == [draw(seed) for seed in range(500)]
