"""The words after `%%taas` -> `Flags`, or one line that says what is possible.

One table, `FLAGS`, is the source of the parser, of `%%taas?`, of Tab completion and of the errors.
"""

import difflib
import keyword
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.magic_arguments import argument, magic_arguments

from taas_magic.config import Config
from taas_magic.errors import UsageError
from taas_magic.plan import Flags
from taas_magic.store import WRITES

MAX_RANKS = 1_000_000
"""More than any pool has; the bound of the pool itself is the plan's to check."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_NOT_EXPANDED = re.compile(r"\$\w+|\{.+\}")


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: With its dashes.
        metavar: What stands for the value in the help; "" for a switch.
        read: Text -> value; raises ValueError.
        possible: Completes "possible is …".
        help: What it does.
        examples: Values that Tab offers; the first is in the help.
    """

    name: str
    metavar: str
    read: Callable[[str], Any]
    possible: str
    help: str
    examples: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """The name in the parser's answer."""
        return self.name.removeprefix("--").replace("-", "_")

    def decorator(self) -> Callable[..., Any]:
        """The flag as IPython's `@argument`."""
        example = f" Example: {self.name} {self.examples[0]}" if self.examples else ""
        settings = {"help": (self.help + example).replace("%", "%%")}
        if self.metavar:
            settings["metavar"] = self.metavar
            settings["action"] = "append" if self.name in REPEATED else "store"
        else:
            settings["action"] = "store_true"
        decorated: Callable[..., Any] = argument(self.name, **settings)
        return decorated


def whole(least: int, most: int = MAX_RANKS) -> Callable[[str], int]:
    """A reader of whole numbers between two bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text, re.ASCII) or not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return read


def count(text: str) -> int:
    """`20480000`, `20_480_000`, `20M` or `1.5G` (K, M, G, T are powers of 1000)."""
    match = _COUNT.fullmatch(re.sub(r"(?<=\d)_(?=\d)", "", text))
    if match is None:
        raise ValueError(text)
    number = float(match[1]) * 1000.0 ** " KMGT".index(match[2].upper() or " ")
    if number != int(number) or number < 1:
        raise ValueError(text)
    return int(match[1]) if not match[2] and match[1].isdigit() else int(number)


def duration_s(text: str) -> float:
    """`90`, `90s`, `5m`, `2h` or `1d` in seconds."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def names(text: str) -> tuple[str, ...]:
    """`a,b` as names of variables, each once."""
    listed = [name.strip() for name in text.split(",")]
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in listed):
        raise ValueError(text)
    return tuple(dict.fromkeys(listed))


def ranks(text: str) -> frozenset[int] | None:
    """`0,2-5` as ranks; `all` as None."""
    if text == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = whole(0)(first), whole(0)(last if dash else first)
        if bounds[0] > bounds[1]:
            raise ValueError(text)
        found.update(range(bounds[0], bounds[1] + 1))
    return frozenset(found)


def variable(text: str) -> tuple[str, str]:
    """`KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII) or "\0" in value:
        raise ValueError(text)
    return key, value


def one_of(*possible: str) -> Callable[[str], str]:
    """A reader of one of a few words."""

    def read(text: str) -> str:
        if text not in possible:
            raise ValueError(text)
        return text

    return read


REPEATED = ("--env", "--shared-writes")
"""Flags that may be given more than once."""

FLAGS = (
    Flag(
        "--gpus",
        "N",
        whole(1),
        f"a whole number from 1 to {MAX_RANKS}",
        "Ranks in all, one a GPU; without GPUs, CPU ranks. Required.",
        ("8", "1", "2", "4", "16"),
    ),
    Flag(
        "--cpus",
        "M",
        whole(0),
        "a whole number from 0",
        "CPU hosts that run the registered loaders; 0 (default): the ranks do.",
        ("4", "0", "1", "2", "8"),
    ),
    Flag(
        "--units",
        "K",
        count,
        "a whole number from 1, such as 20480000, 20_480_000, 20M or 1.5G",
        "Bound on the units (batches) that all ranks together are given.",
        ("20M", "10K", "1_000_000"),
    ),
    Flag(
        "--pool",
        "NAME",
        str,
        "the name of a pool",
        "Where the ranks run; default local: this machine; see %taas pools.",
        ("g2.8",),
    ),
    Flag(
        "--out",
        "NAMES",
        names,
        "names of variables with commas between, such as model,history",
        "Variables that rank 0 sends back into the notebook.",
        ("model,history",),
    ),
    Flag(
        "--name",
        "TEXT",
        str,
        "a text; in quotes where it has spaces",
        "What the run is called in lists.",
        ('"first try"',),
    ),
    Flag(
        "--max-restarts",
        "R",
        whole(0),
        "a whole number from 0",
        "How often all ranks may start again after one died; default 0.",
        ("2", "1", "5"),
    ),
    Flag(
        "--timeout",
        "T",
        duration_s,
        "a time above 0, such as 90, 90s, 5m or 2h",
        "Ends the run after so long.",
        ("2h", "90s", "30m"),
    ),
    Flag(
        "--env",
        "KEY=VALUE",
        variable,
        "KEY=VALUE, in quotes where it has spaces",
        "An environment variable of the ranks; may be repeated.",
        ("OMP_NUM_THREADS=2", "NCCL_DEBUG=INFO"),
    ),
    Flag(
        "--logs",
        "RANKS",
        ranks,
        "all, or ranks such as 0,2-5",
        "Whose lines the notebook shows; all (default) or some.",
        ("0,2-5", "all", "0"),
    ),
    Flag(
        "--store",
        "PATH",
        str,
        "a folder",
        "The project store, where rank 0 writes; default: taas.toml's, else the notebook's folder.",
        ("results",),
    ),
    Flag(
        "--store-writes",
        "RULE",
        one_of(*WRITES),
        " or ".join(WRITES),
        "Other ranks' writes to the store: kept from it in silence (discard, default) or an error.",
        WRITES[::-1],
    ),
    Flag(
        "--shared-writes",
        "PATH",
        str,
        "a folder in the project store",
        "A folder of the store that all ranks write, for sharded checkpoints; may be repeated.",
        ("checkpoints",),
    ),
    Flag(
        "--dry-run",
        "",
        bool,
        "",
        "Print what would run and what would travel, and start nothing.",
    ),
)

BY_NAME = {flag.name: flag for flag in FLAGS}


def _cell_flags() -> None:
    """Run this cell as N torch.distributed ranks.

    Every rank runs the cell with the notebook's functions, classes and variables that the cell
    uses, under torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). Logs appear
    below the cell; the first failure becomes the cell's exception; --out brings values back.
    {expressions} and $variables of the notebook are filled in.

    Examples::

        %%taas --gpus 2
        %%taas --gpus 8 --cpus 4 --units 20M --out model,history
        %%taas --gpus {n} --pool g2.8 --timeout 2h --max-restarts 2 --name "first try"

    The same as a comment, so that the cell stays plain Python::

        #!g2.8
        #pragma taas --gpus 8 --out model

    `%taas?` tells of status, logs, stop, pools, warm and down.
    """


def _parser() -> Any:
    function: Any = _cell_flags
    for flag in reversed(FLAGS):
        function = flag.decorator()(function)
    parser = magic_arguments("%taas")(function).parser
    # "--gpu" is told from "--gpus" rather than taken for it.
    parser.allow_abbrev = False
    return parser


_PARSER = _parser()
HELP: str = _cell_flags.__doc__ or ""
"""What `%%taas?` shows."""


def parse(line: str, config: Config) -> Flags:
    """The words after `%%taas`, once IPython has filled in `{…}` and `$…`.

    Raises:
        UsageError: In one line: which word is wrong, and what is possible.
    """
    found = _parse_words(_words(line))
    config.pool(found.get("pool", Flags.pool))
    if "gpus" not in found:
        raise UsageError(
            "--gpus N is missing: say how many ranks the cell runs as, "
            "such as `%%taas --gpus 2` or, in the comment form, `#pragma taas --gpus 2`"
        )
    flags = Flags(**found)
    beyond = sorted(rank for rank in flags.log_ranks or () if rank >= flags.gpus)
    if beyond:
        raise UsageError(
            f"--logs {beyond[0]}: with --gpus {flags.gpus} possible is all, or ranks from 0 "
            f"to {flags.gpus - 1}"
        )
    return flags


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:
        raise UsageError(
            f"%%taas {line.strip()}: a quote is left open; possible is --name 'two words'"
        ) from None
    comment = next((i for i, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:comment]


def _parse_words(words: list[str]) -> dict[str, Any]:
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    for name in given:
        if name not in BY_NAME:
            raise UsageError(_unknown(name))
        if given.count(name) > 1 and name not in REPEATED:
            raise UsageError(f"{name} is given twice; give it once")
    try:
        answer, rest = _PARSER.parse_known_args(words)
    except IPythonUsageError as error:
        raise UsageError(_missing(str(error))) from None
    if rest:
        raise UsageError(_unknown(rest[0]))
    read = {flag.field: _read(flag, getattr(answer, flag.field)) for flag in FLAGS}
    read["timeout_s"], read["log_ranks"] = read.pop("timeout"), read.pop("logs")
    return {name: value for name, value in read.items() if value is not None}


def _read(flag: Flag, text: Any) -> Any:
    if text is None or not flag.metavar:
        return text
    if flag.name == "--env":
        return dict(_read_one(flag, item) for item in text)
    if flag.name in REPEATED:
        return tuple(_read_one(flag, item) for item in text)
    return _read_one(flag, text)


def _read_one(flag: Flag, text: str) -> Any:
    try:
        return flag.read(text)
    except ValueError:
        hint = "; the notebook has no such name to fill in" if _NOT_EXPANDED.search(text) else ""
        raise UsageError(f"{flag.name} {text}: possible is {flag.possible}{hint}") from None


def _missing(message: str) -> str:
    """argparse's "argument --gpus: expected one argument", in our words."""
    flag = next((flag for flag in FLAGS if f" {flag.name}:" in message), None)
    if flag is None:
        return message
    if not flag.metavar:
        return f"{flag.name} takes no value"
    return f"{flag.name} needs a value: possible is {flag.possible}"


def _unknown(word: str) -> str:
    listed = " ".join(flag.name for flag in FLAGS)
    if not word.startswith("-"):
        return f"{word!r} is not a flag and follows none; the flags are: {listed}"
    near = difflib.get_close_matches(word, BY_NAME, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"no flag {word}{hint}; the flags are: {listed}"
