"""Datasets and batches of many kinds."""

# %%
import asyncio
import functools
import queue
import threading
import warnings
from collections import OrderedDict, UserDict

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

warnings.simplefilter("ignore")


class Rows(Dataset):
    def __init__(self, size=11):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Encoding(UserDict):
    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class Tokens(Rows):
    def __getitem__(self, index):
        return torch.arange(index % 4 + 1)

    def collate(self, items):
        assert self.size == 11
        return Encoding({"ids": pad_sequence(items, True), "lengths": [len(i) for i in items]})


class Graph:
    __slots__ = ("edges", "view", "x")

    def __init__(self, x, edges):
        self.x, self.edges, self.view = x, edges, x[:, :1]


class Graphs(Rows):
    def __getitem__(self, index):
        return Graph(torch.full((3, 2), float(index)), {("a", "to", "b"): torch.tensor([index])})


class Arrays(Rows):
    def __getitem__(self, index):
        pairs = np.array([(index, 0.5)], dtype=[("a", "i4"), ("b", "f8")])
        return {
            "pairs": pairs,
            "when": np.array([index], "datetime64[s]"),
            "big": np.arange(index, index + 3, dtype=">i4"),
            "back": np.arange(4)[::-1] * index,
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3) + index),
            "masked": np.ma.array([index, 2], mask=[False, True]),
            "objects": np.array([index, "x", None], dtype=object),
            "scalar": np.float32(index),
            "empty": np.empty((0, 3)),
            "frozen": np.broadcast_to(np.float64(index), (2, 2)),
        }


class Tensors(Rows):
    def __getitem__(self, index):
        base = torch.arange(8.0) + index
        return [
            base.unfold(0, 4, 2),
            base[:1].expand(3),
            base.view(2, 4).t(),
            base[::3],
            torch.complex(base, -base).conj(),
            base.to(torch.bfloat16),
            base > index,
            torch.empty(0, 2),
            base.reshape(2, 4).to_sparse(),
            torch.tensor(index),
            base.clone().requires_grad_(),
            torch.nn.Parameter(base.clone()),
            torch.nested.as_nested_tensor([base[:2], base[2:5]]),
            torch.nested.as_nested_tensor([base[:2].reshape(1, 2), base[2:8].reshape(2, 3).t()]),
            torch.nested.nested_tensor([base[:2], base[2:5]], layout=torch.jagged),
        ]


class InThread(IterableDataset):
    """A generator whose items come from a thread that it starts."""

    def __iter__(self):
        items = queue.Queue(2)

        def fill():
            for number in range(9):
                items.put(torch.tensor([number]))
            items.put(None)

        threading.Thread(target=fill, daemon=True).start()
        yield from iter(items.get, None)


class Buffered(IterableDataset):
    """A stream that yields its first three samples last; each worker reads its own part."""

    def __iter__(self):
        info = get_worker_info()
        numbers = list(range(20))[info.id :: info.num_workers] if info else list(range(20))
        buffer = []
        for number in numbers:
            buffer.append(number)
            if len(buffer) == 4:
                yield buffer.pop(3)
        yield from buffer


class Loading(IterableDataset):
    """A dataset that reads another loader."""

    def __iter__(self):
        for batch in DataLoader(Rows(6), 2):
            yield from batch


class Awaited(Rows):
    async def read(self, index):
        await asyncio.sleep(0)
        return index * 10

    def __getitem__(self, index):
        return asyncio.run(self.read(index))


class Cached(Rows):
    @functools.lru_cache  # noqa: B019
    def read(self, index):
        return torch.tensor([index])

    def __getitem__(self, index):
        return self.read(index)


class Worker(Rows):
    def __getitem__(self, index):
        info = get_worker_info()
        return index if info is None else -1


class Sequence:
    """A sequence that is not a Dataset and raises IndexError at its end."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index >= 5:
            raise IndexError(index)
        return {"index": index, "name": f"n{index}", "none": [b"raw", 1.5, True]}


def bare(items):
    return items


def split():
    return random_split(Rows(10), [7, 3], torch.Generator().manual_seed(1))[0]


def make():
    path = "mapped.npy"  # in the notebook's folder, so other tests use another file
    np.save(path, np.arange(12.0).reshape(6, 2))
    tokens = Tokens()
    ordered = [OrderedDict(b=1, a=(2, "x")) for _ in range(3)]
    return {
        "method": DataLoader(tokens, 3, collate_fn=tokens.collate),
        "packed": DataLoader(
            Tokens(), 3, collate_fn=functools.partial(pack_sequence, enforce_sorted=False)
        ),
        "graphs": DataLoader(Graphs(), 2, collate_fn=bare),
        "arrays": DataLoader(Arrays(4), 2, collate_fn=bare),
        "arrays_alone": DataLoader(Arrays(3), batch_size=None, collate_fn=bare),
        "tensors": DataLoader(Tensors(4), 2, collate_fn=bare),
        "mapped": DataLoader(np.load(path, mmap_mode="r"), 2),
        "mapped_alone": DataLoader(np.load(path, mmap_mode="r+"), batch_size=None),
        "in_thread": DataLoader(InThread(), 2),
        "buffered": DataLoader(Buffered(), 3, num_workers=2),
        "chain": DataLoader(ChainDataset([Buffered(), InThread()]), 4),
        "loading": DataLoader(Loading(), 3),
        "concat": DataLoader(ConcatDataset([Rows(3), Subset(Rows(9), [8, 1])]), 2),
        "stacked": DataLoader(StackDataset(x=Rows(5), y=[1, 2, 3, 4, 5]), 2),  # type: ignore[arg-type]
        "split": DataLoader(split(), 2, shuffle=True),
        "table": DataLoader(TensorDataset(torch.arange(7), -torch.arange(7.0)), 3, shuffle=True),
        "awaited": DataLoader(Awaited(5), 2),
        "cached": DataLoader(Cached(5), batch_size=None),
        "worker": DataLoader(Worker(5), 2),
        "sequence": DataLoader(Sequence(), 2, shuffle=True),  # type: ignore[arg-type]
        "text": DataLoader("some text", 4),  # type: ignore[arg-type]
        "ordered": DataLoader(ordered, 2),  # type: ignore[arg-type]
    }
