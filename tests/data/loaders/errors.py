"""Cases of exceptions in datasets, samplers, `collate_fn` and `worker_init_fn`."""

import torch
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset, TensorDataset

MOST_ERRORS = 3

SETTINGS = ((1, 0), (2, 1))


class BadAt(Dataset):
    """Map-style dataset that raises an exception at one index."""

    def __init__(self, error, at=3, size=8):
        self.error, self.at, self.size = error, at, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return index


class BadStream(IterableDataset):
    def __init__(self, error, at=3):
        self.error, self.at = error, at

    def __iter__(self):
        for number in range(8):
            if number == self.at:
                raise self.error
            yield number


class OwnError(Exception):
    pass


class TwoArguments(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class BadSampler:
    def __iter__(self):
        yield 1
        raise ValueError("the sampler is bad")

    def __len__(self):
        return 4


def events(loader):
    """Return a list of the batches and exceptions of an epoch, up to the third exception."""
    seen, batches = [], iter(loader)
    while sum(isinstance(event, Exception) for event in seen) < MOST_ERRORS:
        try:
            seen.append(next(batches))
        except StopIteration:
            break
        except Exception as error:
            seen.append(error)
    return seen


def first_error(loader):
    """Return all batches of an epoch. If the loader raises an exception, return only this.

    With several workers, the number of batches before the exception may vary.
    """
    try:
        return list(loader)
    except Exception as error:
        return error


def at_the_first(loader):
    """Return the first batch, or the exception that it raises."""
    try:
        return next(iter(loader))
    except Exception as error:
        return error


def bad(error, **options):
    return DataLoader(BadAt(error), **{"batch_size": 2, **options})


def value_error():
    return bad(ValueError("three is bad")), events


def value_error_in_a_worker():
    return bad(ValueError("three is bad"), num_workers=1), events


def value_error_in_one_of_two_workers():
    return bad(ValueError("three is bad"), num_workers=2), events


def value_error_single_samples():
    return bad(ValueError("three is bad"), batch_size=None), events


def index_error():
    return bad(IndexError("no such row")), events


def index_error_of_a_list():
    return DataLoader(TensorDataset(torch.arange(3)), batch_size=2, sampler=[0, 1, 7, 2]), events


def key_error():
    return bad(KeyError("blue")), events


def key_error_in_a_worker():
    return bad(KeyError("blue"), num_workers=1), events


def runtime_error():
    return bad(RuntimeError("out of luck")), events


def type_error_of_torch():
    return DataLoader(BadAt(ValueError(), at=99), batch_size=2, sampler=[0, "x"]), events


def os_error():
    return bad(FileNotFoundError(2, "No such file or directory", "a.png")), events


def assertion_error_without_text():
    return bad(AssertionError()), events


def not_implemented():
    return DataLoader(Dataset(), batch_size=2, sampler=[0, 1]), events


def memory_error():
    return bad(MemoryError("too large")), events


def unicode_text():
    return bad(ValueError("größer als 3: „schlecht“")), events


def text_of_several_lines():
    return bad(ValueError("first line\nsecond line")), events


def own_error():
    return bad(OwnError("own text")), events


def recovered_loop():
    """Case in which a second loop, after an exception, begins again with the first batch."""

    def twice(loader):
        return [events(loader), events(loader)]

    return bad(ValueError("three is bad")), twice


def in_bulk():
    class InBulk(BadAt):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    return DataLoader(InBulk(ValueError("three is bad")), batch_size=2), events


def of_default_collate_sizes():
    class Uneven(BadAt):
        def __getitem__(self, index):
            return torch.zeros(1 + index // 3)

    return DataLoader(Uneven(None), batch_size=2), lambda loader: kinds(events(loader))


def of_default_collate_types():
    class Objects(BadAt):
        def __getitem__(self, index):
            return object()

    return DataLoader(Objects(None), batch_size=2), lambda loader: kinds(events(loader))


def of_default_collate_none():
    class Nothing(BadAt):
        def __getitem__(self, index):
            return None

    return DataLoader(Nothing(None), batch_size=2), lambda loader: kinds(events(loader))


def kinds(seen):
    return [type(event).__name__ for event in seen]


def of_collate_fn():
    def collate(samples):
        if 3 in samples:
            raise ValueError(f"cannot collate {samples}")
        return samples

    return DataLoader(BadAt(None, at=99), batch_size=2, collate_fn=collate), events


def of_collate_fn_in_a_worker():
    def collate(samples):
        raise OwnError(f"cannot collate {samples}")

    return DataLoader(BadAt(None, at=99), 2, num_workers=1, collate_fn=collate), events


def of_worker_init_fn():
    def init(worker_id):
        raise ValueError("worker cannot begin")

    return DataLoader(BadAt(None, at=99), 8, num_workers=1, worker_init_fn=init), at_the_first


def of_worker_init_fn_of_a_stream():
    def init(worker_id):
        raise ValueError("worker cannot begin")

    loader = DataLoader(BadStream(None, at=99), 8, num_workers=1, worker_init_fn=init)
    return loader, at_the_first


def of_a_sampler():
    return DataLoader(BadAt(None, at=99), batch_size=4, sampler=BadSampler()), first_error


def of_a_sampler_at_once():
    class Bad(BadSampler):
        def __iter__(self):
            raise OwnError("cannot begin")

    return DataLoader(BadAt(None, at=99), sampler=Bad()), at_the_first


def of_a_stream():
    return DataLoader(BadStream(ValueError("three is bad")), batch_size=2), first_error


def of_a_stream_in_a_worker():
    loader = DataLoader(BadStream(KeyError("three")), batch_size=2, num_workers=1)
    return loader, first_error


def of_a_stream_single_samples():
    return DataLoader(BadStream(ValueError("three is bad")), batch_size=None), first_error


def of_a_stream_at_once():
    class Bad(IterableDataset):
        def __iter__(self):
            raise OwnError("cannot open")

    return DataLoader(Bad(), batch_size=2), at_the_first


def of_a_stream_that_gives_no_iterator():
    class Bad(IterableDataset):
        def __iter__(self):
            return 5

    return DataLoader(Bad(), batch_size=2), lambda loader: kinds([at_the_first(loader)])


def of_a_chain_with_a_map_style_dataset():
    chained = ChainDataset([BadStream(None, at=99), TensorDataset(torch.arange(2))])
    return DataLoader(chained, batch_size=8), first_error


def of_a_sample_by_index():
    def indexed(loader):
        try:
            return loader.dataset[3]
        except ValueError as error:
            return error

    return bad(ValueError("three is bad")), indexed


def with_two_arguments_in_a_worker():
    """Case of an exception class with two arguments, raised in a worker.

    As with torch's DataLoader, it arrives as a RuntimeError.
    """
    loader = DataLoader(Raising(), batch_size=2, num_workers=1)
    return loader, lambda loader: kinds([at_the_first(loader)])


class Raising(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise TwoArguments(5, "odd constructor")


def with_a_cause():
    class Caused(BadAt):
        def __getitem__(self, index):
            try:
                return {}[index]
            except KeyError as error:
                raise RuntimeError("no row") from error

    return DataLoader(Caused(None), batch_size=2), at_the_first
