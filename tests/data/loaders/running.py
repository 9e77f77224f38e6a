"""Cases of iteration: lengths, epochs, early breaks, iterators, seeds and workers."""

import io
import itertools
import pickle
import random
import warnings

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

SETTINGS = ((1, 0), (2, 3))


class Random(Dataset):
    """Dataset whose samples are random numbers from torch, `random` and NumPy."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return float(torch.rand(())), random.random(), float(np.random.rand())


class ToldWorker(Dataset):
    """Dataset whose samples contain what `get_worker_info()` returns."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        if info is None:
            return None
        return info.num_workers, 0 <= info.id < info.num_workers, info.dataset is self


class Marked(Dataset):
    """Dataset whose samples tell whether `worker_init_fn` was called in the worker."""

    def __init__(self):
        self.mark = "none"

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.mark


class MarkedStream(IterableDataset):
    mark = "none"

    def __iter__(self):
        return iter([(self.mark, number) for number in range(4)])


class SeededStream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter([(info.id, info.num_workers, info.dataset is self, number) for number in "ab"])


class EpochStream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch * 100 + number for number in range(6)])


def mark(worker_id):
    get_worker_info().dataset.mark = "marked"


def numbers(size=11):
    return TensorDataset(torch.arange(size))


def length(loader):
    """Iterate one epoch; return `len(loader)` before, the number of batches, and `len` after."""
    return len(loader), len(list(loader)), len(loader)


def length_of_batches():
    return DataLoader(numbers(), batch_size=3), length


def length_of_even_batches():
    return DataLoader(numbers(12), batch_size=3), length


def length_drop_last():
    return DataLoader(numbers(), batch_size=3, drop_last=True), length


def length_single_samples():
    return DataLoader(numbers(), batch_size=None), length


def length_of_the_sampler():
    return DataLoader(numbers(), batch_size=2, sampler=[1, 2, 3]), length


def length_of_batch_sampler():
    return DataLoader(numbers(), batch_sampler=[[1, 2], [3]]), length


def length_of_empty():
    return DataLoader(numbers(0), batch_size=2), length


def length_with_workers():
    return DataLoader(numbers(), batch_size=2, num_workers=2), length


def length_of_stream_is_unknown():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    def refused(loader):
        try:
            return len(loader)
        except TypeError:
            return "TypeError"

    return DataLoader(Stream()), refused


def batch_size_one():
    return DataLoader(numbers(5))


def batch_size_larger_than_dataset():
    return DataLoader(numbers(5), batch_size=100)


def batch_size_larger_than_dataset_drop_last():
    return DataLoader(numbers(5), batch_size=100, drop_last=True)


def uneven_is_padded():
    return DataLoader(numbers(5)), length, {"uneven": "pad"}


def uneven_is_dropped():
    return DataLoader(numbers(5)), lambda loader: [list(loader), list(loader)], {"uneven": "drop"}


def uneven_is_kept():
    return DataLoader(numbers(5)), lambda loader: [list(loader), list(loader)], {"uneven": "keep"}


def length_when_dropped():
    return DataLoader(numbers(5)), length, {"uneven": "drop"}


def length_when_kept():
    return DataLoader(numbers(5)), length, {"uneven": "keep"}


def fewer_batches_than_ranks():
    return DataLoader(numbers(1))


def shuffled(**options):
    return DataLoader(numbers(), batch_size=2, shuffle=True, **options)


def epochs_differ():
    def compared(loader):
        first, second, third = ([batch[0].tolist() for batch in loader] for _ in range(3))
        return first, second, third, first == second

    return shuffled(), compared


def early_break():
    def broken(loader):
        seen = []
        for batch in loader:
            seen.append(batch)
            if len(seen) == 2:
                break
        return seen, list(loader)

    return shuffled(), broken


def early_break_many_times():
    def broken(loader):
        return [next(iter(loader)) for _ in range(6)], list(loader)

    return shuffled(), broken


def early_break_in_workers():
    def broken(loader):
        return [next(iter(loader)) for _ in range(3)], list(loader)

    return shuffled(num_workers=2), broken


def early_break_of_a_stream():
    def broken(loader):
        return [next(iter(loader)) for _ in range(3)], list(loader)

    return DataLoader(EpochStream(), batch_size=2), broken


def an_iterator_that_is_never_used():
    def unused(loader):
        iter(loader)
        return list(loader)

    return shuffled(), unused


def two_iterators_at_once():
    def zipped(loader):
        return list(zip(loader, loader, strict=True))

    return shuffled(), zipped


def two_iterators_at_different_places():
    def ahead(loader):
        first, second = iter(loader), iter(loader)
        return next(first), next(second), next(first), list(second), list(first)

    return shuffled(), ahead


def two_iterators_of_a_stream():
    def zipped(loader):
        return list(zip(loader, loader, strict=True))

    return DataLoader(EpochStream(), batch_size=2), zipped


def nested_loops():
    def nested(loader):
        return [(outer, inner) for outer in loader for inner in loader]

    return DataLoader(numbers(4), batch_size=2, shuffle=True), nested


def an_iterator_after_its_end():
    def after(loader):
        batches = iter(loader)
        count = len(list(batches))
        return count, next(batches, "over"), next(batches, "over"), list(batches)

    return DataLoader(numbers(4), batch_size=2), after


def an_iterator_is_its_own():
    def own(loader):
        batches = iter(loader)
        return iter(batches) is batches, next(batches), list(batches)

    return DataLoader(numbers(6), batch_size=2), own


def an_iterators_length():
    return DataLoader(numbers(), batch_size=2), lambda loader: len(iter(loader))


def chained_epochs():
    def chained(loader):
        return list(itertools.chain(loader, loader))

    return shuffled(), chained


def enumerated_and_sliced():
    return shuffled(), lambda loader: list(itertools.islice(enumerate(loader), 1, 4))


def set_epoch_goes_back():
    def again(loader):
        first = list(loader)
        loader.set_epoch(0)
        return first, list(loader), list(loader)

    return shuffled(), again


def set_epoch_goes_ahead():
    def ahead(loader):
        loader.set_epoch(5)
        return list(loader), list(loader)

    return shuffled(), ahead


def set_epoch_of_a_stream():
    def ahead(loader):
        loader.set_epoch(3)
        return list(loader), list(loader)

    return DataLoader(EpochStream(), batch_size=2), ahead


def epochs_of_a_stream():
    return DataLoader(EpochStream(), batch_size=4, num_workers=2)


def seed_of_the_ranks_does_not_count():
    def reseeded(loader):
        torch.manual_seed(99)
        first = list(loader)
        torch.manual_seed(99)
        return first, list(loader)

    return shuffled(), reseeded


def ranks_random_numbers_stay():
    """Case that returns random numbers of the rank's process after an iteration.

    The iteration must not use the random generators of this process.
    """

    def drawn(loader):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        count = len(list(loader))
        return count, float(torch.rand(())), random.random(), float(np.random.rand())

    return DataLoader(numbers(), batch_size=2, sampler=SequentialSampler(numbers())), drawn


def generator_with_workers():
    return shuffled(generator=torch.Generator().manual_seed(42), num_workers=1)


def one_worker():
    return DataLoader(numbers(), batch_size=2, num_workers=1)


def two_workers():
    return DataLoader(numbers(), batch_size=2, num_workers=2)


def more_workers_than_batches():
    return DataLoader(numbers(2), batch_size=2, num_workers=3)


def prefetch_factor():
    return shuffled(num_workers=2, prefetch_factor=4)


def out_of_order_workers():
    return DataLoader(numbers(), batch_size=2, num_workers=1, in_order=False)


def workers_with_a_timeout():
    return DataLoader(numbers(), batch_size=2, num_workers=1, timeout=60)


def workers_forked():
    return DataLoader(numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")


def pin_memory_without_an_accelerator():
    def pinned(loader):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [(batch[0], batch[0].is_pinned()) for batch in loader]

    return DataLoader(numbers(), batch_size=2, pin_memory=True), pinned


def worker_info_of_workers():
    return DataLoader(ToldWorker(), batch_size=2, num_workers=2, collate_fn=list)


def worker_info_of_streams():
    return DataLoader(SeededStream(), batch_size=None, num_workers=2)


def worker_info_in_collate_fn():
    def informed(samples):
        return get_worker_info().num_workers, samples

    return DataLoader(ToldWorker(), batch_size=2, num_workers=2, collate_fn=informed)


def worker_info_in_the_rank():
    def informed(loader):
        return [(batch, get_worker_info()) for batch in loader]

    return DataLoader(numbers(4), batch_size=2, num_workers=1), informed


def worker_init_fn():
    return DataLoader(Marked(), batch_size=2, num_workers=2, worker_init_fn=mark)


def worker_init_fn_of_streams():
    return DataLoader(MarkedStream(), batch_size=2, num_workers=2, worker_init_fn=mark)


def worker_init_fn_with_persistent_workers():
    options = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": mark}
    return DataLoader(Marked(), batch_size=2, **options)


def worker_init_fn_that_seeds():
    def seed(worker_id):
        get_worker_info().dataset.mark = worker_id >= 0

    return DataLoader(Marked(), batch_size=2, num_workers=2, worker_init_fn=seed)


def attributes_of_single_samples():
    def attributes(loader):
        return loader.batch_size, loader.drop_last, loader.batch_sampler

    return DataLoader(numbers(), batch_size=None), attributes


def samples_by_index():
    def indexed(loader):
        dataset = loader.dataset
        return dataset[3], dataset[-1], dataset[0]

    return DataLoader(numbers(), batch_size=2), indexed


def attributes_of_the_dataset():
    return DataLoader(Marked()), lambda loader: loader.dataset.mark


def a_pickle_of_a_batch():
    """Case in which a rank saves batches by `torch.save`, pickles them, and loads both again."""

    def saved(loader):
        file = io.BytesIO()
        torch.save(list(loader), file)
        file.seek(0)
        return torch.load(file), pickle.loads(pickle.dumps(list(loader)))

    return DataLoader(numbers(4), batch_size=2), saved


def samplers_with_another_loaders_dataset():
    class Shared(Sampler):
        def __iter__(self):
            return iter([2, 0])

        def __len__(self):
            return 2

    return DataLoader(numbers(4), sampler=Shared())


def many_tiny_batches():
    return DataLoader(numbers(400)), lambda loader: [int(batch[0]) for batch in loader]


def many_samples_a_batch():
    return DataLoader(numbers(5000), batch_size=2000, shuffle=True)


def persistent_workers():
    return DataLoader(numbers(), batch_size=2, num_workers=2, persistent_workers=True)


def attributes_of_the_loader():
    def attributes(loader):
        names = ["batch_size", "drop_last", "num_workers", "pin_memory"]
        return [getattr(loader, name) for name in names], len(loader.dataset)

    return DataLoader(numbers(), batch_size=3, drop_last=True, num_workers=2), attributes
