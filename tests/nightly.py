"""Parameters of tests that only `make nightly` runs: further variants of a case of `make test`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def nightly(*values: object) -> Any:
    """Return one set of a test's parameters, with the mark `nightly`."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def all_nightly_but(daily: Container[str], values: Iterable[str]) -> list[Any]:
    """Return parameters of a test. Those that are not in `daily` have the mark `nightly`."""
    return [value if value in daily else nightly(value) for value in values]
