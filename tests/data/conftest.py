"""Fixtures for the tests of the data service."""

import resource
from collections.abc import Iterator

import pytest

from taas_magic import registry
from taas_magic.capture import pickling


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    """Remove all registered loaders before and after each test."""
    _forget_loaders()
    yield
    _forget_loaders()


def _forget_loaders() -> None:
    registry._registered.clear()
    pickling.LOADER_REDUCERS.clear()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise this process's limit of open files to 6000, or to the hard limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(6000, limit[1]), limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
