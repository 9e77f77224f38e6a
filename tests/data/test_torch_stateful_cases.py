"""Tests that a registered loader continues from a saved state as a local DataLoader does."""

from types import ModuleType

import pytest

from tests.data.loaders import resumed, state
from tests.data.loaders.rig import Part, Seen, all_parts, differences, parameters
from tests.harness import Notebook

"""Timeout in seconds. One cell iterates up to 16 loaders, and each may have own workers."""


@pytest.fixture(scope="module")
def seen(warm_notebook: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(warm_notebook, tmp_path_factory.mktemp("config"))


@pytest.mark.parametrize("part", all_parts(state, resumed))
def test_the_ranks_run_a_part_of_the_cases(seen: Seen, part: Part) -> None:
    assert len(seen.of_part(part)) == part.setting.ranks


@pytest.mark.parametrize("module, name", parameters(state, resumed))
def test_a_rank_continues_at_the_same_batch_as_a_local_loader(
    seen: Seen, module: ModuleType, name: str
) -> None:
    found = differences(seen, module, name)
    assert not found, "\n".join(found)
