"""What of a store does not travel: version control, caches, and what `.taasignore` names."""

from collections.abc import Iterable

from pathspec import GitIgnoreSpec

FILE_NAME = ".taasignore"

ARRIVING = ".taas-arriving-"
"""How the name of a file begins that is on its way into a tree."""

DEFAULTS = (
    ".git/",
    ".hg/",
    ".svn/",
    ".venv/",
    ".tox/",
    ".nox/",
    "__pycache__/",
    ".ipynb_checkpoints/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    "node_modules/",
    ".DS_Store",
    ".nfs*",
    "*.taas-saving/",
    f"{ARRIVING}*",
)


class Ignore:
    """Says what stays where it is.

    Args:
        lines: Of a `.taasignore`, in gitignore's language; they come after the defaults, so that
            `!__pycache__/` takes one back.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._spec = GitIgnoreSpec.from_lines([*DEFAULTS, *lines])

    def leaves_out(self, path: str, folder: bool = False) -> bool:
        """Whether a path stays; of a folder that does, nothing in it is looked at."""
        return self._spec.match_file(path + "/" if folder else path)

    def leaves_out_within(self, path: str) -> bool:
        """Whether a path, or a folder that it lies in, stays."""
        return self.leaves_out(path) or self.leaves_out(path, folder=True)
