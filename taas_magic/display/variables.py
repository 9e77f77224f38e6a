"""The table of `%taas vars`: a session's variables, and whether ranks have equal values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from taas_magic.config import size_text
from taas_magic.errors import listed

if TYPE_CHECKING:
    from taas_magic.host.variables import Variable

_MAX_LISTED = 6

Row = tuple[str, ...]


def variable_rows(ranks: "Sequence[Mapping[str, Variable]]") -> list[Row]:
    """Return the rows of the table of variables; the first row has the column titles.

    All further rows are sorted by the variable's name. Each row has the name, and type, shape,
    dtype, device and size of the variable on the first rank that has it. The last text of a row
    says whether all ranks have the same value.

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
    """Return a short text that says whether all ranks have the same value of a variable.

    The first of these cases that applies decides:

    - Some ranks lack the variable: the text names the ranks that have it, as in "only on rank 0".
    - Type, shape or dtype differ: the text names the ranks that differ from the most frequent
      value, as in "rank 2 differs". If no value is the most frequent, the text is "values differ".
    - A rank has no digest of its value: "equal shapes" for arrays, else "not compared".
    - The digests differ: the text names the ranks that differ, as in "rank 2 differs". For arrays,
      the text begins with "equal shapes, ".
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

    Return "" if all values are equal, and "values differ" if no value is the most frequent.

    Args:
        texts: Description or digest of the value on each rank, by rank.
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
    return f"rank{'s' * (len(ranks) > 1)} {listed(numbers, _MAX_LISTED)}"
