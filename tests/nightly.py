"""Functions that mark parameters of tests as nightly: only `make nightly` runs these variants."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def nightly(*values: object) -> Any:
    """Return the values as one parameter set of a test, with the mark `nightly`."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def all_nightly_but(daily: Container[str], values: Iterable[str]) -> list[Any]:
    """Return all values as parameters of a test. Values outside `daily` have the mark `nightly`."""
    return [value if value in daily else nightly(value) for value in values]
