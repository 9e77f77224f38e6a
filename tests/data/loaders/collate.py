"""Cases of collation: the default `collate_fn`, custom ones, and none."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

SETTINGS = ((1, 0), (2, 1))


class Made(Dataset):
    """Map-style dataset that calls a function to make each sample."""

    def __init__(self, make, size):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)


class Point(NamedTuple):
    x: Any
    y: Any


Pair = collections.namedtuple("Pair", ["left", "right"])


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class OwnTuple(tuple):
    pass


class Attributed(dict):
    """Subclass of dict with the additional attribute `note`."""

    def __init__(self, *items):
        super().__init__(*items)
        self.note = "kept"


class OwnSequence(collections.abc.Sequence):
    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class OwnMapping(collections.abc.Mapping):
    def __init__(self, items):
        self.items_ = dict(items)

    def __len__(self):
        return len(self.items_)

    def __iter__(self):
        return iter(self.items_)

    def __getitem__(self, key):
        return self.items_[key]


class Labelled(torch.Tensor):
    pass


class Stacked:
    """Custom batch type as in torch's documentation of `pin_memory`."""

    def __init__(self, samples):
        self.inputs = torch.stack([sample[0] for sample in samples])
        self.targets = torch.tensor([sample[1] for sample in samples])


@dataclasses.dataclass
class Record:
    name: str
    values: torch.Tensor


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def of(make, size=6, **options):
    return DataLoader(Made(make, size), **{"batch_size": 2, **options})


def single(make):
    """Return a loader without automatic batching."""
    return of(make, batch_size=None)


def listed(make):
    """Return a loader whose batches are lists of samples."""
    return of(make, collate_fn=list)


def ints():
    return of(lambda i: i)


def negative_and_large_ints():
    return of(lambda i: -(2 ** (12 * i)))


def floats():
    return of(lambda i: i / 3)


def special_floats():
    return of(lambda i: [float("inf"), -0.0, 1e-310, 1.5, float("-inf"), 0.1][i])


def bools():
    return of(lambda i: i % 2 == 0)


def strings():
    return of(lambda i: "ä" * i)


def byte_strings():
    return of(lambda i: bytes([i, 255]))


def tuples():
    return of(lambda i: (i, str(i)))


def lists():
    return of(lambda i: [i, float(i)])


def ranges():
    return of(lambda i: range(i, i + 3))


def dicts():
    return of(lambda i: {"a": torch.full((4, 2), i), "b": {"c": i, "d": str(i)}})


def dicts_with_keys_of_all_types():
    return of(lambda i: {1: i, (2, 3): i, None: i, "x": i})


def order_of_keys():
    return of(lambda i: {"z": i, "a": i, "m": i})


def ordered_dicts():
    return of(lambda i: collections.OrderedDict(b=i, a=i))


def default_dicts():
    return single(lambda i: collections.defaultdict(list, {"a": [i]}))


def own_dicts():
    return of(lambda i: OwnDict({"a": i}))


def own_dicts_with_attributes():
    return of(lambda i: Attributed({"a": i}))


def own_mappings():
    return of(lambda i: OwnMapping({"a": i, "b": str(i)}))


def own_lists():
    return of(lambda i: OwnList([i, -i]))


def own_sequences():
    return of(lambda i: OwnSequence([i, -i]))


def own_tuples_single_samples():
    return single(lambda i: OwnTuple((i, "x")))


def named_tuples():
    return of(lambda i: Point(i, torch.tensor([i])))


def named_tuples_nested():
    return of(lambda i: Pair(Point(i, -i), str(i)))


def named_tuples_single_samples():
    return single(lambda i: Pair(Point(i, -i), str(i)))


def deeply_nested():
    return of(lambda i: [{"a": (i, [Point(i, {"b": "s"})])}])


def empty_containers():
    return of(lambda i: {"none": {}, "value": i})


def numpy_scalars_of_all_types():
    names = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool_"]
    return of(lambda i: tuple(getattr(np, name)(i) for name in names))


def numpy_arrays():
    return of(lambda i: np.full((2, 3), i, dtype=np.int16))


def numpy_arrays_in_fortran_order():
    return of(lambda i: np.asfortranarray(np.arange(6).reshape(2, 3) + i))


def numpy_arrays_of_no_dimension():
    return of(lambda i: np.array(i))


def numpy_arrays_empty():
    return of(lambda i: np.zeros((0, 3)))


def numpy_arrays_uncollated():
    return listed(lambda i: np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2] + i)


def numpy_arrays_of_strings():
    return listed(lambda i: np.array(["a", "bc" * i]))


def numpy_arrays_of_objects():
    return listed(lambda i: np.array([i, "x", None], dtype=object))


def numpy_arrays_of_records():
    return listed(lambda i: np.array([(i, 0.5)], dtype=[("n", "i4"), ("x", "f8")]))


def numpy_dates():
    return listed(lambda i: np.datetime64("2020-01-01") + i)


def numpy_big_endian():
    return listed(lambda i: np.arange(3, dtype=">i4") + i)


def tensors():
    return of(lambda i: torch.full((2, 3), float(i)))


def tensors_of_no_dimension():
    return of(lambda i: torch.tensor(i))


def tensors_empty():
    return of(lambda i: torch.empty(0, 4))


def tensors_of_every_type():
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"]
    names += ["uint8", "bool", "complex64", "complex128"]
    return of(lambda i: {name: torch.tensor([i], dtype=getattr(torch, name)) for name in names})


def tensors_unsigned():
    names = ["uint16", "uint32", "uint64"]
    return listed(lambda i: [torch.tensor([i, 7], dtype=getattr(torch, name)) for name in names])


def tensors_of_8_bit_floats():
    return listed(lambda i: torch.tensor([i, 0.5]).to(torch.float8_e4m3fn))


def tensors_that_require_grad():
    return of(lambda i: torch.tensor([float(i)], requires_grad=True), collate_fn=detached)


def detached(samples):
    return torch.stack(samples).detach()


def tensors_leaves_that_require_grad():
    return listed(lambda i: torch.tensor([float(i)], requires_grad=True))


def parameters():
    return listed(lambda i: torch.nn.Parameter(torch.tensor([float(i)])))


def tensors_transposed():
    return single(lambda i: (torch.arange(6).view(2, 3) + i).t())


def tensors_with_gaps():
    return single(lambda i: (torch.arange(12) + i)[::3])


def tensors_expanded():
    return single(lambda i: torch.tensor([[i]]).expand(3, 2))


def tensors_channels_last():
    make = lambda i: torch.full((1, 2, 3, 3), i).to(memory_format=torch.channels_last)  # noqa: E731
    return single(make)


def tensors_that_share_memory():
    def views(i):
        whole = torch.arange(6) + i
        return whole, whole[2:], whole.view(2, 3)

    return single(views)


def tensors_conjugated():
    return single(lambda i: torch.tensor([1 + 2j, i]).conj())


def tensors_sparse():
    return listed(lambda i: torch.eye(3).mul(i + 1).to_sparse())


def tensors_sparse_rows():
    return listed(lambda i: torch.eye(3).mul(i + 1).to_sparse_csr())


def tensors_of_own_class():
    return listed(lambda i: torch.tensor([i]).as_subclass(Labelled))


def tensors_large():
    return of(lambda i: torch.arange(40_000) + i)


def packed_sequences():
    def packed(samples):
        return torch.nn.utils.rnn.pack_sequence(samples, enforce_sorted=False)

    return of(lambda i: torch.arange(i + 1), collate_fn=packed)


def none():
    return listed(lambda i: None)


def none_as_batch():
    return of(lambda i: i, collate_fn=lambda samples: None)


def nothing_single_samples():
    return single(lambda i: None)


def false_values():
    return listed(lambda i: [0, "", [], {}, False, 0.0][i])


def sets():
    return listed(lambda i: ({i, 1}, frozenset([i])))


def data_classes():
    return listed(lambda i: Record(str(i), torch.tensor([i])))


def enums_dates_paths_and_numbers():
    def values(i):
        day = datetime.date(2020, 1, 1 + i)
        path, number = pathlib.PurePosixPath(f"a/{i}"), decimal.Decimal(i) / 7
        return Colour(1 + i % 2), day, path, number, fractions.Fraction(i, 3), complex(i, 1)

    return listed(values)


def functions():
    def called(loader):
        return [[function(10) for function in batch] for batch in loader]

    return listed(lambda i: lambda x: x + i), called


def types():
    return listed(lambda i: [int, torch.Tensor, torch.float32, torch.device("cpu")][i % 4])


def strings_long():
    return of(lambda i: str(i) * 50_000)


def own_batch_type():
    return of(lambda i: (torch.tensor([float(i)]), i), collate_fn=Stacked)


def own_function():
    def summed(samples):
        return sum(samples), len(samples)

    return of(lambda i: i, collate_fn=summed)


def own_lambda():
    return of(lambda i: i, collate_fn=lambda samples: samples[::-1])


def own_callable():
    class Times:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, samples):
            return default_collate(samples) * self.factor

    return of(lambda i: i, collate_fn=Times(3))


def own_for_single_samples():
    return of(lambda i: i, batch_size=None, collate_fn=lambda sample: ("one", sample))


def own_padding():
    def padded(samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)

    return of(lambda i: torch.arange(i + 1), collate_fn=padded)


def own_generator_as_batch():
    return of(lambda i: i, collate_fn=lambda samples: list(reversed(samples)))


def converted_single_samples():
    return single(lambda i: {"a": np.array([i]), "b": [np.float32(i)], "c": "s"})


def converted_by_name():
    return of(lambda i: np.array([i]), collate_fn=default_convert)


def collated_twice():
    return of(lambda i: i, collate_fn=lambda samples: default_collate([samples, samples]))


def in_workers():
    return of(lambda i: {"a": np.array([i]), "b": Point(i, str(i))}, num_workers=2)


def in_workers_single_samples():
    return of(lambda i: (np.array([i]), str(i)), batch_size=None, num_workers=2)


def batches_are_the_ranks_own():
    """Case in which a rank changes each batch in place; the next epoch has the original values."""

    def written(loader):
        seen = []
        for batch in loader:
            batch += 1
            seen.append(batch)
        return seen, list(loader)

    return of(lambda i: torch.full((3,), i)), written


def batches_outlive_the_iterator():
    def kept(loader):
        return [batch for _ in range(3) for batch in loader]

    return of(lambda i: torch.full((300,), i), batch_size=1), kept


def large_batches_outlive_the_iterator():
    def kept(loader):
        return [batch[0, :2] for _ in range(3) for batch in loader]

    return of(lambda i: torch.full((70_000,), i), batch_size=1), kept


def one_object_returned_again():
    """Case in which the dataset returns the same unchanged tensor object for each index."""
    constant = torch.ones(3)
    return of(lambda i: constant, batch_size=None)
