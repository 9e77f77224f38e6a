"""Datasets, samplers and functions that raise, and a cell that prints the exceptions."""

from tests.cells.shown_batches import show

loaders = {}

# %%
import json

from torch.utils.data import DataLoader, Dataset, IterableDataset


class Odd(Exception):
    def __init__(self, code, *, where):
        super().__init__(f"odd {code} at {where}")


class Silent(Exception):
    def __str__(self):
        return "it says nothing"


class Told(Exception):
    message = "none"

    def __init__(self, message):
        super().__init__(message)


def group():
    try:
        raise KeyError("inner")
    except KeyError as error:
        errors = [error, ValueError("another")]
        raise ExceptionGroup("several", errors)  # type: ignore[name-defined]  # noqa: B904, F821


def leave():
    import sys

    sys.exit(3)


def throw(error):
    raise error


FAILURES = {
    "key": lambda: {}["missing"],  # type: ignore[index]
    "value": lambda: throw(ValueError("sample five is bad")),
    "odd": lambda: throw(Odd(4, where="here")),
    "silent": lambda: throw(Silent("x")),
    "told": lambda: throw(Told("told")),
    "json": lambda: json.loads("{"),
    "text": lambda: b"\xff".decode(),
    "file": lambda: open("/nowhere/at/all"),  # noqa: SIM115
    "group": group,
    "exit": leave,
}


class Failing(Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            FAILURES[self.name]()
        return index


class GoesOn(IterableDataset):
    """An iterator that yields more items after an exception."""

    def __iter__(self):
        self.at = -1
        return self

    def __next__(self):
        self.at += 1
        if self.at == 9:
            raise StopIteration
        if self.at in (2, 5):
            raise ValueError(f"item {self.at} is bad")
        return self.at


class Begins(IterableDataset):
    def __iter__(self):
        raise LookupError("it cannot begin")


class Sampling:
    def __len__(self):
        return 8

    def __iter__(self):
        yield from range(4)
        raise ArithmeticError("the sampler is at its end")


def collate(items):
    if 4 in items:
        raise BufferError("it cannot be collated")
    return items


def init(worker):
    raise OSError(f"worker {worker} has no file")


def make():
    made = {name: DataLoader(Failing(name), 2, num_workers=1) for name in FAILURES}
    return made | {
        "goes_on": DataLoader(GoesOn(), 1, num_workers=1),
        "begins": DataLoader(Begins(), 1, num_workers=1),
        "sampling": DataLoader(range(8), 2, sampler=Sampling(), num_workers=1),  # type: ignore[arg-type]
        "collate": DataLoader(range(8), 2, collate_fn=collate, num_workers=1),  # type: ignore[arg-type]
        "init": DataLoader(range(2), 2, worker_init_fn=init, num_workers=1),  # type: ignore[arg-type]
    }


# %%
import json

for name, loader in loaders.items():
    batches, outcome = iter(loader), []
    for _ in range(20):
        try:
            outcome.append(show(next(batches)))
        except StopIteration:
            break
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", []))
            text = str(error) + notes
            inner = [type(one).__name__ for one in getattr(error, "exceptions", [])]
            is_told = "Original Traceback" in text and "Caught" in text
            outcome.append([type(error).__name__, inner, is_told, text])
    print(json.dumps([name, 0, outcome]))
