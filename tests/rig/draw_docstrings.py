"""Print random docstrings or functions of the package, for a reader who checks their clarity."""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "taas_magic"
FUNCTION_LINES = 8


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """Yield the place and the node of each module, class and function of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file, tree = path.relative_to(PACKAGE.parent), ast.parse(path.read_text())
        yield f"{file}", tree
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    yield f"{file}:{child.lineno} {owner}{child.name}", child


def docstrings() -> Iterator[str]:
    """Yield the place and the text of each docstring of the package."""
    for place, node in definitions():
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if text := ast.get_docstring(node):
            yield f"{place}\n{text}"


def functions() -> Iterator[str]:
    """Yield place, signature and docstring of each function whose body has enough lines."""
    for place, node in definitions():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if (
                text
                and len(ast.unparse(node).splitlines()) - text.count("\n") - 1 >= FUNCTION_LINES
            ):
                node.body = node.body[:1]
                yield f"{place}\n{ast.unparse(node)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--functions", action="store_true", help="functions without their bodies")
    options = parser.parse_args()
    texts = list(functions() if options.functions else docstrings())
    for text in random.Random(options.seed).sample(texts, options.count):
        print(f"--- {text}\n")


if __name__ == "__main__":
    main()
