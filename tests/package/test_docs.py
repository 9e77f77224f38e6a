"""Tests of the documentation: the files, tests, fields and functions that it names exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import Struct

import taas_magic.api
from taas_magic.messages import Event, Failure, FetcherCounts, RankCounts, leaf_subclasses
from taas_magic.notebook.runs import Run

ROOT = Path(__file__).parents[2]
FAULTS = frozenset(range(1, 77))
"""Numbers of the faults in docs/faults.md."""


def test_the_page_of_faults_names_existing_tests() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)
    assert rows == [str(number) for number in sorted(FAULTS)]
    missing = [name for name in re.findall(r"`(test_\w+::test_\w+)`", page) if not exists(name)]
    assert not missing


def test_each_test_that_the_page_of_faults_names_has_the_faults_mark() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(r"^- Fault (\d+): (.*(?:\n  .*)*)", page, flags=re.MULTILINE)
    named = {(int(n), name) for n, row in rows for name in re.findall(r"`(test_\w+::\w+)`", row)}
    marked = {
        (number, f"{path.stem}::{function.name}")
        for path in (ROOT / "tests").rglob("test_*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for number in faults_of(function)
    }
    assert {number for number, _ in named} == FAULTS
    assert named <= marked
    assert {number for number, _ in marked} <= {number for number, _ in named}


def faults_of(function: ast.FunctionDef) -> list[int]:
    """Return the numbers in a test's `@pytest.mark.fault(…)`."""
    marks = [mark for mark in function.decorator_list if isinstance(mark, ast.Call)]
    faults = [mark for mark in marks if ast.unparse(mark.func) == "pytest.mark.fault"]
    return [ast.literal_eval(number) for mark in faults for number in mark.args]


def test_packages_name_all_their_modules() -> None:
    for init in sorted((ROOT / "taas_magic").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        named = set(re.findall(r"\b\w+\.py\b", text))
        own = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
        above = {path.name for path in init.parent.parent.glob("*.py")}
        assert own <= named <= own | above, init


def test_the_pages_name_existing_files() -> None:
    guides = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
    pages = [*(ROOT / guide for guide in guides), *(ROOT / "docs").glob("*.md")]
    rooms = [path.name for path in (ROOT / "taas_magic").iterdir() if path.is_dir()]
    names = re.compile(
        rf"`((?:{'|'.join([*rooms, 'tests', 'benchmarks', 'notebooks'])})/[\w/]+\.\w+)`"
    )
    named = {name for page in pages for name in names.findall(page.read_text())}
    assert {"farms/farm.py", "benchmarks/farm.py"} <= named
    folders = (ROOT, ROOT / "taas_magic")
    missing = [name for name in named if not any((each / name).exists() for each in folders)]
    assert not missing


def test_the_page_of_events_names_their_fields() -> None:
    page, *tables = (ROOT / "docs" / "events.md").read_text().split("\n| field | meaning |\n")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    known = {str(kind.__struct_config__.tag): fields(kind) for kind in leaf_subclasses(Event)}
    assert {kind: set(re.findall(r"`(\w+)`", listed)) for kind, listed in rows} == known
    records: tuple[type[Struct], ...] = (Failure, RankCounts, FetcherCounts)
    for kind, table in zip(records, tables, strict=True):
        firsts = "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))
        assert set(re.findall(r"`(\w+)`", firsts)) == fields(kind)


@pytest.mark.nightly
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "docs", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "site" / "searchindex.js").exists()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages - {page.stem for page in (tmp_path / "site").glob("*.html")} == set()


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in taas_magic.api.__all__ if f"taas.{name}" not in page] == []


def test_tab_offers_the_attributes_of_a_run_that_the_docs_list() -> None:
    page = (ROOT / "docs" / "magic.md").read_text()
    table = page.partition("| attribute | content |")[2].partition("\n\n")[0]
    listed = re.findall(r"`\.(\w+)", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))
    assert dir(Run(Path("no-run"))) == sorted(listed)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def fields(kind: type[Struct]) -> set[str]:
    """Return the fields of a record in the journal, without those that all events have."""
    every = {"entry", *Event.__struct_fields__} if issubclass(kind, Event) else set()
    return set(kind.__struct_fields__) - every


def exists(name: str) -> bool:
    """Return whether the test `file::test` exists."""
    file, _, test = name.partition("::")
    [path] = (ROOT / "tests").rglob(f"{file}.py")
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == test for node in tree.body)
