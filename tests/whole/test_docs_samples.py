"""Tests that the Python samples of README.md and docs/ run as cells, in the order of their page.

A sample that cannot run here has the comment `<!-- not run: why -->` above it in the page.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend import ROOT, Frontend

SAMPLE = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n\n?)?^```python\n(?P<code>.*?)^```", re.M | re.S
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def samples(page: Path) -> Iterator[str]:
    """Yield the samples of a page that can run here."""
    for found in SAMPLE.finditer(page.read_text()):
        if not found["why"]:
            yield found["code"]


RUNNABLE = [page for page in PAGES if any(samples(page))]


@pytest.fixture(scope="module")
def kernel(frontend_of_module: Frontend) -> Frontend:
    return frontend_of_module


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_the_samples_of_a_page_run(kernel: Frontend, page: Path) -> None:
    kernel.run("%reset -f")
    for code in samples(page):
        request = kernel.send(code)
        reply = kernel.finish(request, 200)
        assert reply["status"] == "ok", f"{page.name}:\n{code}\n{kernel.text(request)}\n{reply}"


def test_most_pages_with_samples_have_some_that_run() -> None:
    assert {"README", "index", "resume", "keep_gpus_fed", "model_parallel"} <= {
        page.stem for page in RUNNABLE
    }
