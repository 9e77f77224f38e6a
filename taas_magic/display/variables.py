"""The table of `%taas vars`: a session's variables, and whether ranks have equal values."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
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
    says whether all ranks have the same value, and what differs if not.

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
    - Type, shape or dtype differ: the text says which of these differ, and how, as in "rank 2
      differs: shape (3,)". If no value is the most frequent, the text is like "shapes differ: (2,),
      (3,)", in the order of ranks.
    - A rank has no digest of its value: "equal shapes" for arrays, else "not compared".
    - The digests differ: the text names the ranks that differ, as in "rank 2 differs: value", or is
      "values differ". For arrays, the text begins with "equal shapes, ".
    - All digests are equal: "equal".

    Args:
        found: The variable on each rank that has it, by rank.
        world_size: Number of ranks of the session.
    """
    if len(found) < world_size:
        return f"only on {_ranks(list(found))}"
    if odd := _odd_ranks({rank: (one.kind, one.shape, one.dtype) for rank, one in found.items()}):
        return _describe_difference(found, odd)
    digests = {rank: one.digest for rank, one in found.items()}
    is_array = bool(next(iter(found.values())).dtype)
    if "" in digests.values():
        return "equal shapes" if is_array else "not compared"
    odd = _odd_ranks(digests)
    if not odd:
        return "equal"
    text = "values differ" if len(odd) == world_size else f"{_differ(odd)}: value"
    return f"equal shapes, {text}" if is_array else text


def _odd_ranks(values: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks whose value differs from the most frequent value.

    Return no ranks if all values are equal, and all ranks if no value is the most frequent.

    Args:
        values: Description or digest of the value on each rank, by rank.
    """
    counts = Counter(values.values()).most_common(2)
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return list(values)
    return [rank for rank, value in values.items() if value != counts[0][0]]


def _describe_difference(found: "Mapping[int, Variable]", odd: Sequence[int]) -> str:
    """Return text that says how type, shape or dtype differ, as `agreement` describes.

    If the types differ, the text says nothing about shapes and dtypes.

    Args:
        odd: The ranks that differ from the others; all ranks if no value is the most frequent.
    """
    fields = {
        "type": {rank: one.kind for rank, one in found.items()},
        "shape": {rank: one.shape for rank, one in found.items()},
        "dtype": {rank: one.dtype for rank, one in found.items()},
    }
    differing = [field for field, texts in fields.items() if len(set(texts.values())) > 1]
    shown = {
        field: listed(list(dict.fromkeys(fields[field][rank] for rank in odd)), _MAX_LISTED)
        for field in (differing[:1] if "type" in differing else differing)
    }
    if len(odd) == len(found):
        return "; ".join(f"{field}s differ: {texts}" for field, texts in shown.items())
    return f"{_differ(odd)}: " + ", ".join(f"{field} {texts}" for field, texts in shown.items())


def _differ(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} differ{'s' * (len(ranks) == 1)}"


def _ranks(ranks: Sequence[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(ranks) > 1)} {listed(numbers, _MAX_LISTED)}"
