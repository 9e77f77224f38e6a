"""The table of `%taas vars`: a session's variables, and whether ranks have equal values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from taas_magic.config import size_text
from taas_magic.errors import listed

if TYPE_CHECKING:
    from taas_magic.host.variables import Variable

_LISTED = 6

Row = tuple[str, ...]


def variable_rows(ranks: "Sequence[Mapping[str, Variable]]") -> list[Row]:
    """Return the rows of the table; the first row has the column titles.

    The other rows are sorted by variable name. Each has the variable's type, shape, dtype, device
    and size on the first rank that has the variable, and the result of `agreement`.

    Args:
        ranks: The variables of each rank, by name.
    """
    names = sorted({name for variables in ranks for name in variables})
    rows: list[Row] = [("variable", "type", "shape", "dtype", "device", "size", "ranks")]
    for name in names:
        found = {rank: one[name] for rank, one in enumerate(ranks) if name in one}
        first = next(iter(found.values()))
        shown = (first.kind, first.shape, first.dtype, first.device, size_text(first.size_bytes))
        rows.append((name, *shown, agreement(found, len(ranks))))
    return rows


def agreement(found: "Mapping[int, Variable]", world_size: int) -> str:
    """Return a short text on whether the ranks have the same value.

    The first case that applies decides:

    - Some ranks lack the variable: the text names the ranks that have it, as in "only on rank 0".
    - Type, shape or dtype differ: the text names the ranks that differ from the most frequent
      value, as in "rank 2 differs". If no value is the most frequent, it is "values differ".
    - A rank has no digest of its value: "equal shapes" for arrays, else "not compared".
    - The digests differ: a text as for different types; for arrays, after "equal shapes, ".
    - All digests are equal: "equal".

    Args:
        found: The variable on each rank that has it, by rank.
        world_size: Number of ranks of the session.
    """
    if len(found) < world_size:
        return f"only on {_ranks(list(found))}"
    if odd := _describe_odd_ranks(
        {rank: f"{one.kind} {one.shape} {one.dtype}" for rank, one in found.items()}
    ):
        return odd
    digests = {rank: one.digest for rank, one in found.items()}
    if "" in digests.values():
        return "equal shapes" if next(iter(found.values())).dtype else "not compared"
    if odd := _describe_odd_ranks(digests):
        is_array = bool(next(iter(found.values())).dtype)
        return f"equal shapes, {odd}" if is_array else odd
    return "equal"


def _describe_odd_ranks(texts: Mapping[int, str]) -> str:
    """Return text that names the ranks whose value differs from the most frequent value.

    Returns "" if all values are equal, and "values differ" if no value is the most frequent one.
    """
    counts = Counter(texts.values()).most_common(2)
    if len(counts) == 1:
        return ""
    if counts[0][1] == counts[1][1]:
        return "values differ"
    others = [rank for rank, text in texts.items() if text != counts[0][0]]
    return f"{_ranks(others)} differ{'s' * (len(others) == 1)}"


def _ranks(ranks: Sequence[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(ranks) > 1)} {listed(numbers, _LISTED)}"
