"""The tests without the mark `nightly`, which `make test` runs, cause each fault of faults.md."""

import ast
from pathlib import Path

from tests.package.test_docs import FAULTS, ROOT, faults_of

NIGHTLY = "pytest.mark.nightly"


def test_the_daily_tests_cause_each_fault() -> None:
    caused = {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        for function in daily_tests(path)
        for number in faults_of(function)
    }
    assert sorted(FAULTS - caused) == [], "only tests with the mark `nightly` cause these faults"


def daily_tests(path: Path) -> list[ast.FunctionDef]:
    """Return the test functions of a file of which `make test` runs at least one case."""
    module = ast.parse(path.read_text())
    marks = [node for node in module.body if isinstance(node, ast.Assign)]
    if any(NIGHTLY in ast.unparse(mark) for mark in marks if is_pytestmark(mark)):
        return []
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    return [it for it in functions if not any(map(leaves_nothing, it.decorator_list))]


def is_pytestmark(node: ast.Assign) -> bool:
    return any(ast.unparse(target) == "pytestmark" for target in node.targets)


def leaves_nothing(decorator: ast.expr) -> bool:
    """Return whether a decorator leaves nothing of a test for `make test`.

    This is so if the decorator is the mark `nightly`, or if each parameter in a list of the
    decorator has this mark.
    """
    if ast.unparse(decorator) == NIGHTLY:
        return True
    if not isinstance(decorator, ast.Call):
        return False
    lists = [node for node in decorator.args[1:] if isinstance(node, ast.List | ast.Tuple)]
    return any(all("nightly" in ast.unparse(one) for one in values.elts) for values in lists)
