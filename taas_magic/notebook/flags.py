"""Parse the words after `%%taas` and `#pragma taas` into `Flags`.

The parser, `%%taas?`, Tab completion and the error messages are all made from the table `FLAGS`. An
error message is one line that says what to write.

IPython calls `transform_pragma` even for half-typed cells. So this function depends only on the
text and reports no errors.
"""

import io
import math
import re
import shlex
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache, partial
from itertools import takewhile
from typing import Any, NoReturn

from IPython.core.magic_arguments import MagicArgumentParser

from taas_magic.capture.work import VALUE
from taas_magic.config import LOCAL, Config, DataConfig, did_you_mean, parse_size
from taas_magic.errors import UsageError
from taas_magic.plan import ALL, FIRST, LAST, Flags, Prefill, split_name, variable_name
from taas_magic.store.rule import WRITES

# Matches `#!` and the name of a pool. It does not match names of interpreters, as in
# `#!/usr/bin/env python` and `#!python3`.
_POOL = re.compile(r"#!\s*(?!python|i?pypy|sh$|bash$)([A-Za-z][\w.-]*)\s*")
_PRAGMA = re.compile(r"#\s?pragma\s+taas(?:\s+(.*))?")


def parse_top_comments(lines: list[str]) -> tuple[str, int] | None:
    """Parse the taas comments at the top of a cell: `#!POOL` and `#pragma taas`.

    The flags of all pragmas are joined, without comments at their ends. Only the first `#!POOL`
    counts, as `--pool POOL`. In a cell without a pragma, `#!POOL` must be the first line with text.
    The search ends at the first line of code.

    Returns:
        The flags as one string, and the number of lines up to and including the last taas comment.
        None for a cell without taas comments.
    """
    stripped = (line.strip() for line in lines)
    top = list(takewhile(lambda line: not line or line.startswith("#"), stripped))
    pools = [(i, found[1]) for i, line in enumerate(top) if (found := _POOL.fullmatch(line))]
    pragmas = [(i, found[1]) for i, line in enumerate(top) if (found := _PRAGMA.fullmatch(line))]
    if not pragmas and not (pools and not any(top[: pools[0][0]])):
        return None
    flags = [f"--pool {name}" for _, name in pools[:1]]
    flags += [_uncommented(text).strip() for _, text in pragmas if text]
    return " ".join(flags), max(i for i, _ in (*pools[:1], *pragmas)) + 1


def transform_pragma(lines: list[str]) -> list[str]:
    """Replace the taas comments at the top of a cell by a `%%taas` line with the same flags.

    IPython calls this function, an input transformer, with the lines of each cell. A cell without
    taas comments stays unchanged.
    """
    found = parse_top_comments(lines)
    if found is None:
        return lines
    flags, used = found
    return [f"%%taas {flags}\n", *(lines[used:] or ["\n"])]


def empty_cell_message(raw_cell: str) -> str:
    """Return the error message for a cell without code below its `%%taas` line or taas comments.

    If the cell has a comment `#!POOL`, the message says that the code must be in the same cell.
    """
    found = parse_top_comments(raw_cell.splitlines())
    pool = re.search(r"--pool (\S+)", found[0]) if found else None
    if pool is None:
        return "The cell has only its first line: there is nothing to run."
    return (
        f'"#!{pool[1]}" applies only to its own cell, and this cell has nothing below it. Make it '
        'the first line of the cell to run, with "#pragma taas --gpus 2" as the second line.'
    )


def misplaced_pragma_warnings(raw_cell: str) -> Iterator[str]:
    """Yield a warning for each `#pragma taas` below code; such a pragma has no effect.

    The warning says whether the cell runs on ranks or in the notebook. Stop at the first line that
    is not valid Python. A cell that begins with `%%` gets no warning.
    """
    if "pragma" not in raw_cell or raw_cell.lstrip().startswith("%%"):
        return
    lines = raw_cell.splitlines()
    used = (parse_top_comments(lines) or ("", 0))[1]
    how = "uses only its first lines" if used else "runs in the notebook itself, not as ranks"
    with suppress(tokenize.TokenError, SyntaxError):  # read up to the first invalid line
        for token in tokenize.generate_tokens(io.StringIO(raw_cell).readline):
            number = token.start[0]
            text = lines[number - 1].strip() if token.type == tokenize.COMMENT else ""
            if number > used and _PRAGMA.fullmatch(text):
                yield (
                    f'taas: "{text}" in line {number} is below code, so it is only a comment: the '
                    f"cell {how}. Move it to the top of the cell."
                )


MAX_RANKS = 1_000_000
"""Maximum value of `--gpus`, the number of ranks. A pool may have a lower limit of its own."""

MAX_COUNT = 1 << 60

REHEARSED_BATCHES = 3
"""Value of `--rehearse` without a number: batches after which a rehearsal ends a loader's pass."""

_NOT_REHEARSED = (
    *("--session", "--ranks", "--send"),
    *("--detach", "--max-restarts", "--profile", "--dry-run"),
)
"""Flags that cannot be combined with `--rehearse`."""

MAX_PROFILED_STEPS = 100
"""Maximum number of steps that `--profile` records.

A step of a small model adds about 100 kB to the trace.
"""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def whole_number_parser(least: int, most: int = MAX_RANKS) -> Callable[[str], int]:
    """Return a function that parses a whole number from `least` to `most`, both included.

    The returned function raises ValueError for any other text.
    """

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text, re.ASCII) or not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return read


def parse_count(text: str) -> int:
    """Parse a count such as `20480000`, `20_480_000`, `20M` or `1.5G`.

    The suffixes K, M, G and T, also in lower case, are powers of 1000.

    Raises:
        ValueError: The text has none of these forms, the number is not whole, or the number is not
            between 1 and `MAX_COUNT`.
    """
    match = _COUNT.fullmatch(re.sub(r"(?<=\d)_(?=\d)", "", text))
    if match is None:
        raise ValueError(text)
    number = Fraction(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")
    if not 1 <= number <= MAX_COUNT or number.denominator > 1:
        raise ValueError(text)
    return int(number)


def parse_prefill(text: str) -> Prefill:
    """Parse the value of `--prefill`, such as `all`, `500MB` or `200`.

    A text that ends in `B` is a size in bytes. Any other number, such as `2K`, counts batches.

    Raises:
        ValueError: The text has none of these forms.
    """
    if text == "all":
        return Prefill(0, "all")
    if text.upper().endswith("B"):
        return Prefill(parse_size(text), "bytes")
    return Prefill(parse_count(text), "batches")


def parse_duration_s(text: str) -> float:
    """Parse a duration such as `90s`, `5m`, `2h`, `1d` or `90` (seconds), and return its seconds.

    Raises:
        ValueError: The text has none of these forms, or the duration is 0.
    """
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def parse_hang_s(text: str) -> float:
    """Parse the value of `--hang` into seconds: a duration such as `90s`, or `0`.

    The value `0` switches the detection of hangs off.

    Raises:
        ValueError: The text is no duration.
    """
    return 0.0 if text == "0" else parse_duration_s(text)


def parse_out(text: str) -> tuple[str, ...]:
    """Split the value of `--out`, such as `a,b@last,c@all`, into its parts, such as `b@last`.

    Raises:
        ValueError: A name is not valid, or two names stand for the same variable.
    """
    listed = tuple(name.strip() for name in text.split(","))
    variables = {variable_name(name) for name in listed}
    if len(variables) < len(listed) or VALUE in variables:
        raise ValueError(text)
    return listed


def parse_ranks(text: str) -> frozenset[int]:
    """Parse the value of `--logs` or `--ranks`, such as `0,2-5` or `all`.

    Returns:
        The numbers of the ranks; the empty set stands for all ranks.

    Raises:
        ValueError: A part is not a number or an ascending range.
    """
    if text == "all":
        return frozenset()
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = whole_number_parser(0)(first), whole_number_parser(0)(last if dash else first)
        if bounds[0] > bounds[1]:
            raise ValueError(text)
        found.update(range(bounds[0], bounds[1] + 1))
    return frozenset(found)


def parse_send(text: str) -> tuple[str, ...]:
    """Parse the value of `--send`, such as `x,y`, into names of variables; remove duplicates.

    Raises:
        ValueError: A part is not a name.
    """
    listed = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(name.isidentifier() for name in listed):
        raise ValueError(text)
    return listed


def parse_session(text: str) -> str:
    """Return a session's name.

    Raises:
        ValueError: It is not a letter or `_`, followed by at most 63 letters, digits, `_`, `.` and
            `-`.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.-]{0,63}", text):
        raise ValueError(text)
    return text


def parse_variable(text: str) -> tuple[str, str]:
    """Parse the value of `--env`, such as `KEY=VALUE`, into the variable's name and its value.

    Raises:
        ValueError: The text has no `=`, or the name or the value is not valid.
    """
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII) or "\0" in value:
        raise ValueError(text)
    return key, value


def parse_store_writes(text: str) -> str:
    """Return the value of `--store-writes`; raise ValueError if it is not in `WRITES`."""
    return WRITES[WRITES.index(text)]


class Spelling(Enum):
    """The way in which the user writes options: in a cell, in a terminal, or in a Python call.

    Error messages name options in the same way. The value of each member is an example. The error
    message for a missing `--gpus` quotes this example.
    """

    CELL = "--gpus 2 (as a comment: #pragma taas --gpus 2)"
    TERMINAL = "--gpus 2"
    CALL = "gpus=2"

    def spell(self, flag: str) -> str:
        """Return a flag's name as the user writes it: `--max-restarts`, or `max_restarts`."""
        return flag.removeprefix("--").replace("-", "_") if self is Spelling.CALL else flag


@dataclass(frozen=True)
class Flag:
    """One flag of `%%taas` or `%taas logs`.

    Attributes:
        name: Name of the flag, such as "--gpus".
        metavar: Placeholder for the value in the help; "" for a flag without a value.
        read: Function that parses the value's text, and raises ValueError for a wrong value.
        possible: Description of allowed values, for the error message "the flag needs …".
        help: Description of the flag in the help text.
        examples: Values that Tab completion offers. The help text shows the first example.
        if_alone: Value of the flag if no value follows it; None if a value must follow.
    """

    name: str
    metavar: str = ""
    read: Callable[[str], Any] = str
    possible: str = ""
    help: str = ""
    examples: tuple[str, ...] = ()
    if_alone: Any = None

    @property
    def field(self) -> str:
        """Name of the flag's attribute in `Flags`."""
        return _FIELDS.get(self.name, self.name.removeprefix("--").replace("-", "_"))

    def add_to(self, parser: MagicArgumentParser, spelling: Spelling) -> None:
        """Add the flag, with its help text and its `read` function, to an argparse parser.

        Without a `metavar`, the flag takes no value. With `if_alone`, the value may be missing. A
        flag in `REPEATED` collects its values in a list. The help text ends with the first of the
        flag's examples.
        """
        example = f" Example: {self.name} {self.examples[0]}" if self.examples else ""
        settings: dict[str, Any] = {"help": (self.help + example).replace("%", "%%")}
        if self.metavar:
            action = "append" if self.name in REPEATED else "store"
            read = partial(self._value, spelling)
            settings |= {"metavar": self.metavar, "action": action, "type": read}
            if self.if_alone is not None:
                settings |= {"nargs": "?", "const": self.if_alone}
        else:
            settings["action"] = "store_true"
        parser.add_argument(self.name, dest=self.field, **settings)

    def _value(self, spelling: Spelling, text: str) -> Any:
        """Parse the flag's value for argparse; raise a UsageError that says what is allowed.

        IPython replaces `$name` and `{expression}` in the flags before this call, unless a name in
        them is missing in the notebook. If the text still has one of them, the error says so. If
        the value of `--out` is an expression, the error says to assign it to a variable.
        """
        try:
            return self.read(text)
        except ValueError:
            name = spelling.spell(self.name)
            hint = ", a name that the notebook does not have" if _NOT_EXPANDED.search(text) else ""
            if self.name == "--out" and not hint and re.search(r"[.(\[]", text):
                hint = f". Assign the value to a variable, and give its name to {name}"
            raise UsageError(f'{name} needs {self.possible}; got "{text}"{hint}') from None


_NOT_EXPANDED = re.compile(r"\$\w+|\{.+\}")
_FIELDS = {"--timeout": "timeout_s", "--logs": "log_ranks", "--hang": "hang_s"}


OF_EACH_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"}
    | {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
    | {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}
)
"""Environment variables that taas-magic sets on each rank, and that `--env` must not set."""

REPEATED = ("--env", "--shared-writes")
"""Flags that may be given more than once."""

FLAGS = (
    Flag(
        "--gpus",
        "N",
        whole_number_parser(1),
        "a number above 0, such as 2",
        "Number of ranks, one per GPU; without GPUs, CPU ranks.",
        ("8", "1", "2", "4", "16"),
    ),
    Flag(
        "--cpus",
        "M",
        whole_number_parser(0),
        "a number such as 4",
        "Number of processes that prepare batches (fetchers) for each registered loader; "
        "0 (default): child processes of the ranks do.",
        ("4", "0", "1", "2", "8"),
    ),
    Flag(
        "--units",
        "K",
        parse_count,
        "a number such as 20480000, 20_480_000, 20M or 1.5G",
        "Limit on the units (batches) of each registered loader that all ranks together get.",
        ("20M", "10K", "1_000_000"),
    ),
    Flag(
        "--pool",
        "NAME",
        str,
        "a pool's name, such as g2.8",
        "Pool of the ranks; default: local, this machine; see %taas pools.",
        ("g2.8",),
    ),
    Flag(
        "--data-pool",
        "NAME",
        str,
        "a pool's name, such as c1.4",
        'Pool of the fetchers; default: the pool with role = "data", else the pool of the ranks.',
        ("c1.4",),
    ),
    Flag(
        "--prefill",
        "SIZE",
        parse_prefill,
        "a size such as 500MB, a number of batches such as 200, or all",
        "Data that fetchers prepare before ranks start; default: both start together.",
        ("500MB", "200", "all"),
    ),
    Flag(
        "--uneven-hosts",
        help="Allow hosts to have different numbers of ranks if they do not divide evenly.",
    ),
    Flag(
        "--out",
        "NAMES",
        parse_out,
        "names of variables, each once, such as model,history,losses@last",
        "Variables to return: NAME: the first rank's; NAME@3, NAME@last: that rank's; "
        "NAME@all: a list.",
        ("model,history", "model,losses@last", "loss@all"),
    ),
    Flag(
        "--session",
        "NAME",
        parse_session,
        "a name such as exp: a letter or _, then up to 63 letters, digits, _, . or -",
        "Run the cell on ranks that stay and keep their variables; with --gpus, start them.",
        ("exp",),
    ),
    Flag(
        "--ranks",
        "RANKS",
        lambda text: tuple(sorted(parse_ranks(text))),
        "ranks such as 0 or 1,3",
        "Ranks of the session that run the cell; default: all.",
        ("0", "1,3"),
    ),
    Flag(
        "--send",
        "NAMES",
        parse_send,
        "names of variables such as lr,data",
        "Variables to send from the notebook although the session's ranks have their own.",
        ("lr",),
    ),
    Flag(
        "--name",
        "TEXT",
        str,
        "a text, in quotes if it has spaces, such as 'first try'",
        "Name of the run in lists.",
        ('"first try"',),
    ),
    Flag(
        "--max-restarts",
        "R",
        whole_number_parser(0),
        "a number such as 2",
        "Number of times that all ranks start again after one failed; default 0.",
        ("2", "1", "5"),
    ),
    Flag(
        "--timeout",
        "T",
        parse_duration_s,
        "a time above 0, such as 90s, 5m or 2h",
        "Limit on the time of the run, which then ends.",
        ("2h", "90s", "30m"),
    ),
    Flag(
        "--hang",
        "T",
        parse_hang_s,
        "a time such as 90, 90s, 5m or 2h, or 0 for never",
        "Time without progress of any rank after which the status header shows the line "
        "that each rank runs; default 60s.",
        ("5m", "0", "20s"),
    ),
    Flag(
        "--profile",
        "N",
        whole_number_parser(1, MAX_PROFILED_STEPS),
        f"a number of steps from 1 to {MAX_PROFILED_STEPS}, such as 5",
        "Record N steps of every rank by torch.profiler; taas.last_run.timeline() shows them.",
        ("5", "3", "10"),
    ),
    Flag(
        "--env",
        "KEY=VALUE",
        parse_variable,
        "KEY=VALUE, in quotes if it has spaces, such as NCCL_DEBUG=INFO",
        "Environment variable of the ranks; may be repeated.",
        ("OMP_NUM_THREADS=2", "NCCL_DEBUG=INFO"),
    ),
    Flag(
        "--logs",
        "RANKS",
        parse_ranks,
        "ranks such as 0,2-5, or all",
        "Ranks whose lines and displays to show; default: all lines, and rank 0's displays.",
        ("0,2-5", "all", "0"),
    ),
    Flag(
        "--store",
        "PATH",
        str,
        "a folder such as results",
        "Project store, where rank 0 writes; default: taas.toml's, else the notebook's folder.",
        ("results",),
    ),
    Flag(
        "--store-writes",
        "RULE",
        parse_store_writes,
        " or ".join(WRITES),
        "Other ranks' writes to the store: ignored (discard, default) or an error (refuse).",
        WRITES[::-1],
    ),
    Flag(
        "--shared-writes",
        "PATH",
        str,
        "a folder in the project store, such as checkpoints",
        "Folder of the store that all ranks write, for sharded checkpoints; may be repeated.",
        ("checkpoints",),
    ),
    Flag(
        "--detach",
        help="End the cell when the ranks have started; the run continues even without the kernel.",
    ),
    Flag("--dry-run", help="Print the plan and the objects that would be sent; start nothing."),
    Flag(
        "--rehearse",
        "K",
        whole_number_parser(1),
        "a number of batches such as 3",
        "Run the cell here on two CPU ranks with K batches (default 3) of each registered loader, "
        "and report what the pool would need; write nothing to the project store.",
        ("3", "1", "10"),
        if_alone=REHEARSED_BATCHES,
    ),
)

BY_NAME = {flag.name: flag for flag in FLAGS}

_TEXTS = {"--name", "--store"}
"""Flags whose values may have spaces, in quotes."""

_WITHOUT_SPACES = {"--out": ",", "--send": ",", "--logs": ",", "--ranks": ",", "--session": "_"}
"""Flags whose values must not have spaces, each with the separator to write in place of a space."""

_OF_OTHERS = {
    **dict.fromkeys(("-n", "-np", "--np", "--nproc", "--nproc-per-node", "--num-gpus"), "--gpus"),
    **dict.fromkeys(("--num-processes", "--world-size"), "--gpus"),
    **dict.fromkeys(("-o", "--output", "--outputs", "--return", "--returns"), "--out"),
}
"""Flags of other programs, with `-` in place of `_`, each with the flag that does the same here."""

_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""The hyphen, and the dashes of Unicode that an editor may put in its place."""


class FlagParser(MagicArgumentParser):
    """Parser of flags. Its errors are UsageErrors that name the flag and the allowed values."""

    def __init__(
        self,
        flags: Sequence[Flag],
        description: str = "",
        spelling: Spelling = Spelling.CELL,
    ) -> None:
        super().__init__("%taas", description=description)
        # Without this line, "--gpu" would be accepted as an abbreviation of "--gpus".
        self.allow_abbrev = False
        self._flags, self._spelling = flags, spelling
        for flag in flags:
            flag.add_to(self, spelling)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with a clearer text than argparse's "argument --gpus: expected …".

        The text names the flag, and says what values the flag needs or that it takes no value. If
        argparse's message names no known flag, raise UsageError with argparse's message.
        """
        flag = next((flag for flag in self._flags if f" {flag.name}:" in message), None)
        if flag is not None:
            says = f"needs {flag.possible}" if flag.metavar else "takes no value"
            message = f"{self._spelling.spell(flag.name)} {says}"
        raise UsageError(message) from None


_PARSER = FlagParser(
    FLAGS,
    """Run this cell as N torch.distributed ranks.

Every rank runs the cell with the notebook's functions, classes and variables that the cell
uses, under torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). Logs appear
below the cell; the first failure becomes the cell's exception; --out returns values.
IPython fills in {expressions} and $variables of the notebook.

Examples::

    %%taas --gpus 2
    %%taas --gpus 8 --cpus 4 --units 20M --out model,history
    %%taas --gpus {n} --pool g2.8 --timeout 2h --max-restarts 2 --name "first try"

The same as a comment, so that the cell stays plain Python::

    #!g2.8
    #pragma taas --gpus 8 --out model

`%taas?` describes status, logs, stacks, stop, pools, warm and down.
""",
)
HELP: str = _PARSER.format_help().replace("[--gpus N]", "--gpus N", 1)  # no other flag is required
"""Help text that `%%taas?` shows."""


def parse(line: str, config: Config, spelling: Spelling = Spelling.CELL) -> Flags:
    """Parse the words after `%%taas`, in which IPython has replaced `{expression}` and `$variable`.

    Then check that taas.toml has the pools, that `--rehearse` and `--prefill` fit the other flags,
    and that the run has the ranks in `--out`, `--logs` and `--ranks`.

    With `--session`, `--gpus` may be missing. In this case, the result has `gpus=0`, and the
    numbers of ranks in `--out`, `--logs` and `--ranks` are not checked.

    Args:
        line: The flags and their values, as one line.
        config: Settings of taas.toml.
        spelling: Form in which error messages name the options.

    Raises:
        UsageError: A flag or value is wrong, `--gpus` is missing, taas.toml has no such pool, or
            flags contradict each other. The message is one line that says what to write.
    """
    found = _parse_words(_words(line), spelling)
    for name in (found.get("pool", LOCAL), found.get("data_pool", LOCAL)):
        config.pool(name)
    if "gpus" not in found and "session" in found:
        found["gpus"] = 0  # 0 means: as many ranks as the session has
    if "gpus" not in found:
        raise UsageError(
            f"{spelling.spell('--gpus')} is missing: give the number of ranks, such as "
            f"{spelling.value}"
        )
    flags = Flags(**found)
    if flags.rehearse:
        _check_rehearsal(flags)
    if flags.prefill is not None:
        _check_prefill(flags.prefill, flags, config.data, spelling)
    if flags.gpus:
        check_ranks(flags, spelling)
    return flags


def _check_rehearsal(flags: Flags) -> None:
    """Raise UsageError if a flag cannot be combined with `--rehearse`."""
    for name in _NOT_REHEARSED:
        if getattr(flags, BY_NAME[name].field):
            raise UsageError(
                f"--rehearse cannot be combined with {name}: a rehearsal runs the cell once, on "
                f"new processes of this machine, and stops. Leave out {name}"
            )


def check_ranks(flags: Flags, spelling: Spelling = Spelling.CELL) -> None:
    """Raise UsageError if `--out`, `--logs` or `--ranks` names a rank number that is too large.

    Also raise UsageError if `--out` names a rank that is not in `--ranks`.

    The ranks of the run, or of the session, have the numbers 0 to `flags.gpus - 1`.
    """
    gpus, spell = flags.gpus, spelling.spell
    run = f'session "{flags.session}"' if flags.session else f"{spell('--gpus')} {gpus}"
    nobody = [name for name in flags.out if split_name(name)[1] >= gpus]
    if nobody:
        raise UsageError(
            f"{spell('--out')} {nobody[0]}: {run} has ranks @0 to @{gpus - 1}, @last and @all"
        )
    for flag, ranks in (("--logs", flags.log_ranks or ()), ("--ranks", flags.ranks)):
        if beyond := sorted(rank for rank in ranks if rank >= gpus):
            raise UsageError(f"{spell(flag)} {beyond[0]}: {run} has ranks 0 to {gpus - 1}")
    working = {*flags.ranks, FIRST, LAST, ALL}
    idle = [name for name in flags.out if flags.ranks and split_name(name)[1] not in working]
    if idle:
        rank = split_name(idle[0])[1]
        raise UsageError(
            f"--out {idle[0]}: rank {rank} does not run the cell. Add {rank} to --ranks, or use "
            f"--out {idle[0]} in a cell without --ranks"
        )


def _check_prefill(prefill: Prefill, flags: Flags, memory: DataConfig, spelling: Spelling) -> None:
    """Raise UsageError if fetchers could never prepare the amount of `--prefill`.

    `--prefill all` needs `--units`, and every `--prefill` needs `--cpus`. An amount in bytes must
    fit into the prefetch buffers of all fetchers together.

    Args:
        prefill: The amount of `--prefill`.
        flags: All flags of the cell.
        memory: The table `[data]` of taas.toml, with the size of a prefetch buffer.
        spelling: Form in which the error message names the options.
    """
    name, cpus, units = (spelling.spell(flag) for flag in ("--prefill", "--cpus", "--units"))
    if prefill.unit == "all" and flags.units is None:
        raise UsageError(f"{name} all needs a limit on the data: add {units}, such as 20M")
    if not flags.cpus:
        raise UsageError(f"{name} needs processes that prepare the data: add {cpus}, such as 2")
    most = flags.cpus * memory.buffer_bytes
    if prefill.unit == "bytes" and prefill.amount > most:
        raise UsageError(
            f"{name}: {flags.cpus} fetcher{'s' * (flags.cpus > 1)} can hold {most:,} bytes; "
            f"you requested {prefill.amount:,}. Request less, use more {cpus}, or set a larger "
            "buffer in [data] of taas.toml"
        )


def _words(line: str) -> list[str]:
    try:
        return shlex.split(_uncommented(line))
    except ValueError:
        if line.rstrip().endswith("\\"):
            raise UsageError(
                f"%%taas {line.strip()}: flags cannot continue on the next line; write them on one "
                "line, or use several lines of `#pragma taas`"
            ) from None
        raise UsageError(
            f"%%taas {line.strip()}: a quote is not closed (--name 'two words')"
        ) from None


def _uncommented(line: str) -> str:
    """Remove the comment at the end of `line`: the first word that begins with `#`, and the rest.

    A `#` in quotes begins no comment. If a quote is not closed, return all of `line`.
    """
    text = io.StringIO(line)
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    with suppress(ValueError):  # a quote is not closed
        while not line[text.tell() :].lstrip().startswith("#"):
            if lexer.get_token() is None:
                return line
        return line[: text.tell()]
    return line


@cache
def _parser(spelling: Spelling) -> FlagParser:
    return FlagParser(FLAGS, spelling=spelling)


def _parse_words(words: list[str], spelling: Spelling) -> dict[str, Any]:
    """Parse flags, and return the given values as a dict by field of `Flags`.

    A flag that the user did not give has no entry in the dict, with two exceptions: the fields
    `env` and `shared_writes` are always in the dict, and are empty without their flags.

    Raises:
        UsageError: A flag is unknown, has a wrong value or a value with spaces, or was given twice
            although it is not in `REPEATED`. Or `--env` sets a variable that taas-magic sets.
    """
    _raise_if_spaces(words)
    answer, rest = _parser(spelling).parse_known_args(words)
    if rest:
        raise UsageError(_unknown(rest[0]))
    given = [word.partition("=")[0] for word in words]
    for name in BY_NAME:
        if given.count(name) > 1 and name not in REPEATED:
            raise UsageError(f"{name} was given twice; give it once")
    settings = {name: value for name, value in vars(answer).items() if value is not None}
    settings["env"] = dict(settings.get("env", ()))
    for key, text in settings["env"].items():
        if key in OF_EACH_RANK:
            raise UsageError(
                f"{spelling.spell('--env')} {key}={text}: taas-magic sets {key} for each rank; "
                "choose another name"
            )
    settings["shared_writes"] = tuple(settings.get("shared_writes", ()))
    return settings


def _raise_if_spaces(words: Sequence[str]) -> None:
    """Raise UsageError if several words follow a flag that takes one word, as in `--out a, b`.

    The message has the correct value: in quotes for `_TEXTS`, without spaces for `_WITHOUT_SPACES`.
    If even the value without spaces is not valid, raise nothing.
    """
    for i, given in enumerate(words):
        name, equals, value = given.partition("=")
        values = [value] if equals else []
        values += takewhile(lambda word: not _begins_flag(word), words[i + 1 :])
        if len(values) < 2:
            continue
        if name in _TEXTS:
            quoted = shlex.quote(" ".join(values))
            raise UsageError(f"A value with spaces needs quotes: {name} {quoted}")
        if separator := _WITHOUT_SPACES.get(name):
            joined = re.sub(r"[\s,]+", separator, " ".join(values))
            try:
                BY_NAME[name].read(joined)
            except ValueError:
                continue
            raise UsageError(f"The value of {name} must have no spaces: write {name} {joined}")


def _begins_flag(word: str) -> bool:
    """Return whether a word looks like a flag: `--gpus`, `—gpus` or `gpus=2`, but not `gpus`."""
    is_flag = word[:1] in _DASHES or "=" in word
    return word.startswith("-") or (is_flag and _without_hyphens(word) != "")


def _without_hyphens(word: str) -> str:
    """Return the flag that the user wrote without its two hyphens; "" if there is none.

    For `gpus=2` and `—gpus=2`, return `--gpus 2`. Editors replace two hyphens by a long dash.
    """
    name, equals, value = word.lstrip(_DASHES).partition("=")
    flag = f"--{name.replace('_', '-')}"
    if flag not in BY_NAME or word.startswith("--"):
        return ""
    return f"{flag} {shlex.quote(value)}" if equals else flag


def _unknown(word: str) -> str:
    """Return the error message for a word that is neither a flag nor a flag's value."""
    listed = " ".join(flag.name for flag in FLAGS)
    if flag := _without_hyphens(word):
        return f'"{word}" is not a flag. Write it with two hyphens: {flag}. The flags are: {listed}'
    if not word.startswith("-"):
        return f'"{word}" is not a flag. The flags are: {listed}'
    word = word.partition("=")[0]
    hint = did_you_mean(_OF_OTHERS.get(word.replace("_", "-"), word), BY_NAME)
    return f"No flag {word}{hint}. The flags are: {listed}"
