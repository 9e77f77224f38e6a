"""Rules for which files are copied between hosts and the notebook.

Some files are copied neither to a host nor back: version control, caches, secrets, and the files
that `.taasignore` names.

Other files are copied to a host, but the store refuses them from a host: files that shells, ssh,
git, Python or this package would run, and files that they would read as settings.

Some file systems treat two names as equal if the names differ only by case or by invisible
characters. So the rules for secrets and for executed files also ignore such differences.
"""

import re
import unicodedata
from collections.abc import Iterable
from contextlib import suppress

from pathspec import GitIgnoreSpec

from taas_magic.errors import StoreError
from taas_magic.store.tree import ARRIVING, Tree

FILE_NAME = ".taasignore"
"""Name of the file in the store in which the user lists files that are not copied."""

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
"""Patterns of files that are not copied, in gitignore's syntax; `.taasignore` can override them."""

SECRETS = (
    r"\.ssh",
    r"\.aws",
    r"\.azure",
    r"\.gnupg",
    r"\.kube",
    r"\.docker",
    r"\.oci",
    r"\.kaggle",
    r"\.huggingface",
    r"\.password-store",
    r"\.env[^/]*",
    r"[._]netrc",
    r"\.git-credentials",
    r"\.pypirc",
    r"\.npmrc",
    r"\.pgpass",
    r"\.my\.cnf",
    r"\.s3cfg",
    r"\.boto",
    r"\.databrickscfg",
    r"\.vault-token",
    r"id_(?:rsa|dsa|ecdsa|ed25519)[^/]*",
    r"\.config/(?:gcloud|gh|hub|op|rclone|doctl)",
    r"\.cache/huggingface/(?:stored_)?tokens?",
)
"""Patterns of names of files and folders that may hold secret keys. Such files are not copied.

A line of `.taasignore` such as `!.env` makes an exception.
"""

RUN_BY_TOOLS = (
    r"\.git",
    r"git~\d+",
    r"\.git(?:config|modules|attributes)",
    r"\.hg",
    r"\.hgrc",
    r"\.svn",
    r"\.bash(?:rc|_profile|_login|_logout|_aliases)",
    r"\.(?:profile|login|logout|inputrc|[ck]shrc|tcshrc)",
    r"\.z(?:shrc|shenv|profile|login|logout)",
    r"\.x(?:profile|initrc|session|sessionrc|resources)",
    r"\.(?:vimrc|vim|exrc|emacs|emacs\.d|tmux\.conf|screenrc|selected_editor)",
    r"\.(?:config|local|ipython|jupyter|vscode|idea|pip|condarc|pythonrc(?:\.py)?|pdbrc)",
    r"authorized_keys2?",
    r"\.[rs]hosts",
    r"(?:site|dist)-packages",
    r"(?:site|user)customize\.py",
    r"pyvenv\.cfg",
    r"jupyter_[^/]*config\.(?:py|json)",
    r"ipython_config\.py",
    r"taas\.toml",
    r"\.taasignore",
)
"""Patterns of names of files and folders that tools run or read unasked, for example as settings.

The tools are shells, ssh, git, Python and this package. The store accepts no such file from a host.
"""

_TORCH_BEGINS = (b"PK\x03\x04", b"\x80")
"""First bytes of a file from `torch.save`: a zip archive, or a pickle from an old version."""

_IMPORT_LINE = re.compile(rb"[\n\r\v\f\x1c-\x1e\x85\xa8\xa9]import[ \t]")
"""Pattern of a line break and the word `import` after it.

Python executes such a line of a `.pth` file in a folder of installed packages. The line breaks are
all bytes at which some version of Python splits a `.pth` file into lines.
"""

_OVERLAP_BYTES = 16


class IgnoreRules:
    """Patterns of files that are not copied to or from hosts.

    By default, version control, caches and secrets are not copied (`DEFAULTS`, `SECRETS`).

    Args:
        lines: Lines of a `.taasignore`, in gitignore's syntax. A line can make an exception from
            the default: with `!__pycache__/`, folders of this name are copied to hosts; with
            `!.env`, the file `.env` is copied. A line for all folders, such as `!*/`, makes no such
            exception.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        own = list(lines)
        broad = [at for at, line in enumerate(own, 1) if _includes_any_folder(line)]
        at = max(broad, default=0)
        self._spec = GitIgnoreSpec.from_lines([*own[:at], *DEFAULTS, *own[at:]])
        named = (line[1:] for line in own if line.startswith("!") and _is_secret(line[1:]))
        self._named = GitIgnoreSpec.from_lines(named)

    def is_secret(self, path: str) -> bool:
        """Return whether the name of `path` shows that the file may hold secret keys.

        The result is False if a line of `.taasignore` such as `!.env` makes an exception for the
        path.
        """
        return _is_secret(path) and not any(self._named.match_file(it) for it in (path, path + "/"))

    def why_not_accepted(self, path: str) -> str:
        """Return why the store refuses a file at `path` from a host; "" if the store accepts it.

        The store refuses these files:

        - files that may hold keys (`is_secret`)
        - files that tools would run or read unasked (`is_run_by_tools`)
        - files that a pattern of `DEFAULTS` matches, even if `.taasignore` makes an exception
        - files that `.taasignore` names

        Only the path is checked, not the content of the file.
        """
        if self.is_secret(path):
            return "it may hold a secret"
        if is_run_by_tools(path):
            return "shells, ssh, git, Python or taas-magic would trust it"
        if _ALWAYS.leaves_out_file_or_folder(path):
            return "caches and version control are not copied"
        return f"{FILE_NAME} names it" if self.leaves_out_file_or_folder(path) else ""

    def leaves_out(self, path: str, folder: bool = False) -> bool:
        """Return whether an ignore rule for `path` or a parent folder excludes `path` from copying.

        The rules are those in `DEFAULTS` and in `.taasignore`. `is_secret` checks the rules for
        secrets.

        Args:
            path: Path relative to the store.
            folder: Whether the path is a folder.
        """
        if not folder:
            return self._spec.match_file(path)
        # For a folder, the spec's `match_file` lets `*` win over a later `!*/`. In git, the last
        # matching pattern wins, so look for this pattern here.
        matching = (it for it in reversed(self._spec.patterns) if it.match_file(path + "/"))
        return bool(getattr(next(matching, None), "include", False))

    def leaves_out_file_or_folder(self, path: str) -> bool:
        """Return whether an ignore rule excludes `path` as a file, as a folder, or as both.

        Use this method if the caller does not know whether `path` is a file or a folder.
        """
        return self.leaves_out(path) or self.leaves_out(path, folder=True)


def read_ignore_rules(tree: Tree) -> IgnoreRules:
    """Return the ignore rules of a store: the defaults, and the lines of its `.taasignore`.

    If the store has no `.taasignore`, only the defaults apply.

    Raises:
        StoreError: A line of `.taasignore` is not a valid pattern.
    """
    lines: list[str] = []
    with suppress(FileNotFoundError), tree.open_file(FILE_NAME) as file:
        lines = file.read().decode(errors="replace").splitlines()
    try:
        return IgnoreRules(lines)
    except ValueError as error:
        raise StoreError(f"{tree.root}/{FILE_NAME}: {error}") from error


def is_run_by_tools(path: str) -> bool:
    """Return whether tools such as git or Python would run or read a file at `path` unasked.

    The result is True if the name of the file or of a parent folder matches a pattern in
    `RUN_BY_TOOLS`. The store accepts no such file from a host.
    """
    return _RUN_BY_TOOLS.fullmatch(normal_form(path)) is not None


class PathFileCheck:
    """Checker that tells torch's checkpoints from Python's path files: both end with `.pth`.

    In a folder of installed packages, Python executes each line of a path file that begins with
    `import`. So the store refuses a `.pth` file that is not a checkpoint.
    """

    def __init__(self) -> None:
        self._begins = self._end = b""
        self._has_import = False

    def add(self, data: bytes) -> None:
        """Check the next bytes of the file. Call for all bytes, in order."""
        self._begins = self._begins or data[:_OVERLAP_BYTES]
        seen = self._end + data
        self._has_import = self._has_import or _IMPORT_LINE.search(seen) is not None
        self._end = seen[-_OVERLAP_BYTES:]

    @property
    def is_checkpoint(self) -> bool:
        """Whether the file begins as files of `torch.save` do, and no line begins with `import`."""
        return self._begins.startswith(_TORCH_BEGINS) and not self._has_import


def normal_form(path: str) -> str:
    """Return `path` in a form in which names are equal if some file system treats them as equal.

    Some file systems ignore case, invisible characters, or dots and spaces at the end of a name. So
    the result is in lower case, without invisible characters, and without dots and spaces at the
    end of each name. Variants of a letter in Unicode (NFKC) become one letter.
    """
    seen = path.lower()
    if not path.isascii():
        seen = unicodedata.normalize("NFKC", path).casefold()
        seen = "".join(char for char in seen if unicodedata.category(char) != "Cf")
    return "/".join(part.rstrip(". ") for part in seen.split("/"))


def _anywhere(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches a path if any part of the path matches one of `patterns`.

    For a pattern with a slash, such as `a/b`, several consecutive parts of the path must match.
    """
    return re.compile(rf"(?:.*/)?(?:{'|'.join(patterns)})(?:/.*)?", re.DOTALL)


_SECRET, _RUN_BY_TOOLS = _anywhere(SECRETS), _anywhere(RUN_BY_TOOLS)


def _is_secret(path: str) -> bool:
    return _SECRET.fullmatch(normal_form(path)) is not None


def _includes_any_folder(line: str) -> bool:
    """Return whether a line of `.taasignore` makes an exception for all folders, as `!*/` does.

    The result is also True for all hidden folders (`!.*/`).
    """
    spec = GitIgnoreSpec.from_lines([line[1:]] if line.startswith("!") else [])
    return any(map(spec.match_file, ("folder/", ".folder/")))


_ALWAYS = IgnoreRules()
