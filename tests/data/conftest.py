"""What the tests of the data service share: nothing stays registered, and room for connections."""

import resource
from collections.abc import Iterator

import pytest

from taas_magic import registry
from taas_magic.capture import pickling


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    """Forget registered loaders, whatever module was tested before, too."""
    _forget_loaders()
    yield
    _forget_loaders()


def _forget_loaders() -> None:
    registry._registered.clear()
    pickling.STAND_INS.clear()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open thousands of files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(6000, limit[1]), limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
