"""What Tab offers after `%%taas`, `%taas`, `#pragma taas` and `#!`.

Deciding (`candidates`) is apart from IPython's matcher around it.
"""

import re
from collections.abc import Callable, Iterable

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from taas_magic.config import Config
from taas_magic.errors import UsageError
from taas_magic.journal import folder as journal
from taas_magic.notebook import commands
from taas_magic.notebook.flags import BY_NAME, FLAGS, REPEATED

_HEAD = re.compile(r"\s*(?:%%taas|#\s?pragma\s+taas)\s(.*)")
_LINE = re.compile(r"\s*%taas\s(.*)")
_PRAGMA = re.compile(r"#\s?pragma\s+(t?a?a?)")
_POOL = re.compile(r"#!\s*([\w.-]*)")
_LISTED_RUNS = 20


def candidates(
    text: str,
    variables: Callable[[], Iterable[str]],
    pools: Callable[[], Iterable[str]],
    runs: Callable[[], Iterable[str]],
) -> tuple[str, list[str]] | None:
    """What may stand at the cursor.

    Args:
        text: The cursor's line up to the cursor.
        variables: Names that the notebook has.
        pools: Names of pools.
        runs: Ids of runs.

    Returns:
        What is already there of the word, and the words that begin so; None where the line is not
        one of ours.
    """
    if match := _POOL.fullmatch(text):
        return _beginning(match[1], pools())
    if match := _PRAGMA.fullmatch(text):
        return _beginning(match[1], ["taas"])
    if match := _HEAD.fullmatch(text):
        return _after_head(match[1], variables, pools)
    if match := _LINE.fullmatch(text):
        return _after_line(match[1], pools, runs)
    return None


def _after_head(
    text: str, variables: Callable[[], Iterable[str]], pools: Callable[[], Iterable[str]]
) -> tuple[str, list[str]]:
    words = text.split(" ")
    flag, equals, word = words[-1].partition("=")
    if not equals:
        flag, word = ([word for word in words[:-1] if word] or [""])[-1], words[-1]
    if flag in ("--pool", "--data-pool"):
        return _beginning(word, pools())
    if flag == "--out":
        return _beginning(word.rpartition(",")[2], variables())
    if flag in BY_NAME and BY_NAME[flag].metavar:
        return _beginning(word, BY_NAME[flag].examples)
    return _beginning(word, [f.name for f in FLAGS if f.name not in words or f.name in REPEATED])


def _after_line(
    text: str, pools: Callable[[], Iterable[str]], runs: Callable[[], Iterable[str]]
) -> tuple[str, list[str]]:
    *before, word = text.split(" ")
    before = [known for known in before if known]
    if not before:
        return _beginning(word, commands.USAGE)
    if before[-1] == "--rank":
        return word, []
    if before[0] in ("warm", "down"):
        return _beginning(word, pools())
    if before[0] == "pools":
        return _beginning(word, pools() if before[-1] == "--check" else ["--check"])
    if before[0] == "logs":
        return _beginning(word, [*runs(), "--rank"])
    return _beginning(word, runs() if before[0] in ("stop", "stacks") else ())


def _beginning(word: str, possible: Iterable[str]) -> tuple[str, list[str]]:
    return word, [name for name in possible if name.startswith(word)]


def matcher(
    variables: Callable[[], Iterable[str]], settings: Callable[[], Config]
) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """IPython's matcher (its API of version 2), for `shell.Completer.custom_matchers`."""

    @context_matcher(identifier="taas_magic")
    def taas(context: CompletionContext) -> SimpleMatcherResult:
        found = candidates(
            context.text_until_cursor,
            variables,
            lambda: _pool_names(settings),
            lambda: [record.run_id for record in journal.runs()[:_LISTED_RUNS]],
        )
        if found is None:
            return {"completions": []}
        word, names = found
        return {
            "completions": [SimpleCompletion(name, type="taas") for name in names],
            "matched_fragment": word,
            "suppress": True,
            "ordered": True,
        }

    matching: Callable[[CompletionContext], SimpleMatcherResult] = taas
    return matching


def _pool_names(settings: Callable[[], Config]) -> list[str]:
    """No names from a broken taas.toml: the cell that runs says what is wrong with it."""
    try:
        return sorted(settings().pools)
    except UsageError:
        return []
