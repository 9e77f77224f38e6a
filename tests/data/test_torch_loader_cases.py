"""What PyTorch promises of a DataLoader, kept by a registered one: a local one is beside it."""

from types import ModuleType

import pytest

from tests.data.loaders import collate, datasets, details, endless, errors, running, samplers
from tests.data.loaders.rig import Seen, Setting, cells, differences, parameters
from tests.harness import Notebook

pytestmark = pytest.mark.timeout(600)
"""On a slow machine, one cell iterates fifty loaders."""


@pytest.fixture(scope="module")
def seen(warm_notebook: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(warm_notebook, tmp_path_factory.mktemp("config"))


KINDS = (datasets, samplers, collate, running, errors, details, endless)


@pytest.mark.parametrize("module, setting", cells(*KINDS))
def test_the_ranks_run_all_cases(seen: Seen, module: ModuleType, setting: Setting) -> None:
    assert len(seen.in_setting(module, setting)) == setting.ranks


@pytest.mark.parametrize("module, name", parameters(*KINDS))
def test_a_rank_sees_what_a_local_loader_gives(seen: Seen, module: ModuleType, name: str) -> None:
    found = differences(seen, module, name)
    assert not found, "\n".join(found)
