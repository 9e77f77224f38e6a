"""Print random docstrings of the package, for a reader who checks that they are clear."""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "taas_magic"


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                line, name = getattr(node, "lineno", 1), getattr(node, "name", path.stem)
                if text:
                    yield f"{path.relative_to(PACKAGE.parent)}:{line} {name}", text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    for place, text in random.Random(options.seed).sample(list(docstrings()), options.count):
        print(f"--- {place}\n{text}\n")


if __name__ == "__main__":
    main()
