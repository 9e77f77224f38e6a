"""The words after `%%taas` -> `Flags`, or one line that says what is possible.

One table, `FLAGS`, is the source of the parser, of `%%taas?`, of Tab completion and of the errors.
"""

import difflib
import re
import shlex
from typing import Any

from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.magic_arguments import magic_arguments

from taas_magic.config import Config
from taas_magic.errors import UsageError
from taas_magic.flag_table import BY_NAME, FLAGS, REPEATED, Flag
from taas_magic.plan import Flags

_NOT_EXPANDED = re.compile(r"\$\w+|\{.+\}")


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
    if "data_pool" in found:
        config.pool(found["data_pool"])
    if "gpus" not in found:
        raise UsageError(
            "--gpus N is missing: say how many ranks the cell runs as, "
            "such as `%%taas --gpus 2` or, in the comment form, `#pragma taas --gpus 2`"
        )
    least, most = found.pop("gpus")
    flags = Flags(gpus=least, max_gpus=most if most > least else 0, **found)
    if flags.prefill is not None and flags.prefill.unit == "all" and flags.units is None:
        raise UsageError("--prefill all needs --units K: without it there is no end to prefill to")
    beyond = sorted(rank for rank in flags.log_ranks or () if rank >= most)
    if beyond:
        raise UsageError(
            f"--logs {beyond[0]}: with --gpus {most} possible is all, or ranks from 0 to {most - 1}"
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
