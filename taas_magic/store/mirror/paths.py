"""Which paths may travel between a store and its mirrors, and which never do.

A path is relative, its parts are joined by `/`, and it is checked on both sides: a host may be
hostile to the notebook, and the notebook's tree may hold names that a host cannot have. Version
control, caches, secrets and what `.taasignore` names stay; what shells, ssh, git, Python or this
package would believe never comes from a host. Case and invisible characters tell no names apart
here: file systems may not tell them either.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator

from pathspec import GitIgnoreSpec

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 3500
"""Below PATH_MAX (4096), so that a mirror's own folder fits before it."""


def why_unsafe(path: str) -> str:
    """Why a path may not travel; "" when it may."""
    if why := why_astray(path):
        return why
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    too_long = len(encoded) > MAX_PATH_BYTES
    if too_long or any(len(part) > MAX_NAME_BYTES for part in encoded.split(b"/")):
        return "its name is too long"
    return ""


def why_astray(path: str) -> str:
    """Why a path cannot be walked inside a tree; "" when it can."""
    if not path:
        return "it has no name"
    if "\0" in path:
        return "a NUL in its name"
    if path.startswith("/"):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "its path leads elsewhere"
    return ""


def shown(path: str) -> str:
    """A path as it can be printed and sent, whatever bytes its name is made of."""
    return path.encode(errors="backslashreplace").decode()


class Cases:
    """Finds paths that a file system which does not tell upper from lower case would take for one.

    Of two such paths the first one known is kept.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def clash(self, path: str) -> str:
        """The known path that this one differs from by case alone; "", and it is known, if none."""
        prefixes = list(_prefixes(path))
        for prefix in prefixes:
            other = self._known.get(_folded(prefix), prefix)
            if other != prefix:
                return other
        self._known.update((_folded(prefix), prefix) for prefix in prefixes)
        return ""

    def forget(self, path: str) -> None:
        """Forgets a path that is gone; what lies below it must be forgotten on its own."""
        self._known.pop(_folded(path), None)


def _prefixes(path: str) -> Iterator[str]:
    """`a`, `a/b` and `a/b/c` for `a/b/c`."""
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)
    yield path


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


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
"""Names of files and folders that hold keys, as patterns."""

BELIEVED = (
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
"""Names of what runs, or changes what runs, without being asked; as patterns."""

TORCH_BEGINS = (b"PK\x03\x04", b"\x80")
"""First bytes of what `torch.save` writes: a zip archive, or a pickle in its older format."""


def _anywhere(patterns: Iterable[str]) -> re.Pattern[str]:
    """Matches such a name anywhere on a path, and all that lies below it."""
    return re.compile(rf"(?:.*/)?(?:{'|'.join(patterns)})(?:/.*)?", re.DOTALL)


_SECRET, _BELIEVED = _anywhere(SECRETS), _anywhere(BELIEVED)


def is_believed(path: str) -> bool:
    """Whether a shell, ssh, git, Python or this package would believe a file at a path."""
    return _BELIEVED.fullmatch(folded(path)) is not None


def is_path_file(path: str, begins: bytes) -> bool:
    """Whether Python would take a file, in a folder of packages, for one with lines to run.

    Checkpoints have the same suffix; they are told by their first bytes.

    Args:
        path: Of the file.
        begins: Its first bytes.
    """
    return folded(path).endswith(".pth") and not begins.startswith(TORCH_BEGINS)


def folded(path: str) -> str:
    """A path as the file system sees it that tells the fewest names apart."""
    seen = path.lower() if path.isascii() else _visible(path)
    return "/".join(part.rstrip(". ") for part in seen.split("/"))


def _visible(path: str) -> str:
    seen = unicodedata.normalize("NFKC", path).casefold()
    return "".join(char for char in seen if unicodedata.category(char) != "Cf")


class Ignore:
    """Says what stays where it is.

    Args:
        lines: Of a `.taasignore`, in gitignore's language; they come after the defaults, so that
            `!__pycache__/` takes one back, and `!.env` a secret.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        own = list(lines)
        self._spec = GitIgnoreSpec.from_lines([*DEFAULTS, *own])
        named = (line[1:] for line in own if line.startswith("!"))
        self._named = GitIgnoreSpec.from_lines(named)

    def is_secret(self, path: str) -> bool:
        """Whether a path is, or lies in, what holds keys; unless the user named it."""
        if _SECRET.fullmatch(folded(path)) is None:
            return False
        return not any(self._named.match_file(it) for it in (path, path + "/"))

    def why_not_back(self, path: str) -> str:
        """Why what a host wrote does not come into the store; "" when it does."""
        if self.is_secret(path):
            return "it may hold a secret"
        if is_believed(path):
            return "shells, ssh, git, Python or taas-magic would believe it"
        if _ALWAYS.leaves_out_within(path):
            return "caches and version control do not travel"
        return f"{FILE_NAME} names it" if self.leaves_out_within(path) else ""

    def leaves_out(self, path: str, folder: bool = False) -> bool:
        """Whether a path stays; of a folder that does, nothing in it is looked at."""
        return self._spec.match_file(path + "/" if folder else path)

    def leaves_out_within(self, path: str) -> bool:
        """Whether a path, or a folder that it lies in, stays."""
        return self.leaves_out(path) or self.leaves_out(path, folder=True)


_ALWAYS = Ignore()
