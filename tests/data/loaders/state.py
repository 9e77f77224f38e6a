"""Cases of `state_dict` and `load_state_dict` within one run.

After a state was loaded, the loader yields again the batches that follow the state.
"""

import io
import itertools
import json

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

SETTINGS = ((2, 0), (2, 1))


class Rows(Dataset):
    def __init__(self, size=12):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"id": index, "text": f"row {index}", "list": [index, index + 1]}


class BadAt(Rows):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError("five is bad")
        return index


class Stream(IterableDataset):
    """Iterable dataset without `state_dict`; each worker reads another part."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        info = get_worker_info()
        worker = info.id if info else 0
        return iter([worker * 100 + number for number in range(self.sizes[worker])])


class StatefulStream(Stream):
    """Iterable dataset whose state is its position, as in torchdata's documentation."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.place, self.resumed = 0, None

    def __iter__(self):
        info = get_worker_info()
        worker = info.id if info else 0
        self.place, self.resumed = self.resumed or 0, None
        for number in range(self.place, self.sizes[worker]):
            self.place += 1
            yield worker * 100 + number

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.resumed = state["place"]


class Resumable(Sampler):
    """Sampler that yields the indices from the last to the first."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size


class Drawing(Resumable):
    def __iter__(self):
        for _ in range(self.size):
            yield int(torch.randint(self.size, ()))


def in_the_middle(loader, taken=2):
    """Save a state after `taken` batches, finish the epoch, load the state, and iterate again.

    Return the first batches, the rest, the rest again after loading, and the next epoch.
    """
    batches = iter(loader)
    first = list(itertools.islice(batches, taken))
    state = loader.state_dict()
    rest = list(batches)
    loader.load_state_dict(state)
    return first, rest, list(loader), list(loader)


def at_the_start(loader):
    state = loader.state_dict()
    first = list(loader)
    loader.load_state_dict(state)
    return first, list(loader)


def after_iter(loader):
    batches = iter(loader)
    state = loader.state_dict()
    first = list(batches)
    loader.load_state_dict(state)
    return first, list(loader)


def at_the_end(loader):
    first = list(loader)
    state = loader.state_dict()
    second = list(loader)
    loader.load_state_dict(state)
    return first, second, list(loader)


def after_the_last_batch(loader):
    """Save and load the state after the last batch, before a further call of `next`."""
    count = len(list(loader))
    batches = iter(loader)
    last = list(itertools.islice(batches, count))
    state = loader.state_dict()
    loader.load_state_dict(state)
    return last, list(loader), list(loader)


def twice(loader):
    """Save and load a state in an iteration that itself began from a loaded state."""
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    batches = iter(loader)
    second = next(batches)
    state = loader.state_dict()
    rest = list(batches)
    loader.load_state_dict(state)
    return second, rest, list(loader)


def at_every_step(loader):
    states, seen, batches = [loader.state_dict()], [], iter(loader)
    for batch in batches:
        seen.append(batch)
        states.append(loader.state_dict())
    again = []
    for state in states[: len(seen)]:
        loader.load_state_dict(state)
        again.append(next(iter(loader)))
    return seen, again


def in_a_later_epoch(loader):
    list(loader), list(loader)
    return in_the_middle(loader, taken=1)


def back_and_forth(loader):
    """Save states in two epochs. Then load the earlier state, iterate, and load the later state."""
    next(iter(loader))
    early = loader.state_dict()
    batches = iter(loader)
    next(batches), next(batches)
    late = loader.state_dict()
    loader.load_state_dict(early)
    first = list(loader)
    loader.load_state_dict(late)
    second = list(loader)
    return first, second, list(loader)


def during_another_iterator(loader):
    next(iter(loader))
    state = loader.state_dict()
    other = iter(loader)
    next(other)
    loader.load_state_dict(state)
    return list(loader), list(other)


def unchanged_by_what_comes(loader):
    """Return whether a saved state stays the same while its loader is iterated further.

    Then load the state; return also the batches after it.
    """
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    kept = json.dumps(state)
    list(batches), list(loader)
    is_kept = json.dumps(state) == kept
    loader.load_state_dict(state)
    return is_kept, list(loader)


def through_json(loader):
    next(iter(loader))
    text = json.dumps(loader.state_dict())
    list(loader)
    loader.load_state_dict(json.loads(text))
    return list(loader)


def through_torch_save(loader):
    next(iter(loader))
    file = io.BytesIO()
    torch.save({"loader": loader.state_dict()}, file)
    list(loader)
    file.seek(0)
    loader.load_state_dict(torch.load(file, weights_only=True)["loader"])
    return list(loader)


def loaded_twice(loader):
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    first = list(loader)
    loader.load_state_dict(state)
    loader.load_state_dict(state)
    return first, list(loader)


def loaded_and_asked_again(loader):
    """Save a state directly after loading one, load it again, and return the next batches."""
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    loader.load_state_dict(loader.state_dict())
    return list(loader)


def after_set_epoch(loader):
    loader.set_epoch(4)
    return in_the_middle(loader, taken=1)


def before_set_epoch(loader):
    """Load a state of epoch 0, and call `set_epoch(0)`. The call has no effect."""
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    return list(loader)


def after_an_exception(loader):
    seen, batches = [], iter(loader)
    while not any(isinstance(event, ValueError) for event in seen):
        try:
            seen.append(next(batches))
        except ValueError as error:
            seen.append(error)
        except StopIteration:
            break
    loader.load_state_dict(loader.state_dict())
    return seen, list(loader)


def numbers(size=12):
    return TensorDataset(torch.arange(size))


def generator(seed=13):
    return torch.Generator().manual_seed(seed)


def shuffled(**options):
    return DataLoader(numbers(), batch_size=2, shuffle=True, **options)


def rows_in_the_middle():
    return DataLoader(Rows(), batch_size=2), in_the_middle


def rows_in_workers_in_the_middle():
    return DataLoader(Rows(), batch_size=2, num_workers=2), in_the_middle


def rows_single_samples_in_the_middle():
    return DataLoader(Rows(), batch_size=None), in_the_middle


def rows_drop_last_in_the_middle():
    return DataLoader(Rows(13), batch_size=2, drop_last=True), in_the_middle


def rows_at_the_start():
    return DataLoader(Rows(), batch_size=2), at_the_start


def rows_after_iter():
    return DataLoader(Rows(), batch_size=2), after_iter


def rows_through_json():
    return DataLoader(Rows(), batch_size=2, sampler=Resumable(12)), through_json


def rows_in_workers_through_json():
    return DataLoader(Rows(), 2, sampler=Resumable(12), num_workers=2), through_json


def shuffle_at_the_start():
    return shuffled(), at_the_start


def shuffle_after_iter():
    return shuffled(), after_iter


def shuffle_in_the_middle():
    return shuffled(), in_the_middle


def shuffle_in_workers_in_the_middle():
    return shuffled(num_workers=2), in_the_middle


def shuffle_with_persistent_workers_in_the_middle():
    loader = DataLoader(numbers(), batch_size=2, num_workers=2, persistent_workers=True)
    return loader, in_the_middle


def shuffle_after_the_last_batch():
    return shuffled(), after_the_last_batch


def shuffle_at_the_end():
    return shuffled(), at_the_end


def shuffle_in_workers_at_the_end():
    return shuffled(num_workers=2), at_the_end


def shuffle_twice():
    return shuffled(), twice


def shuffle_at_every_step():
    return shuffled(), at_every_step


def shuffle_in_a_later_epoch():
    return shuffled(), in_a_later_epoch


def shuffle_back_and_forth():
    return shuffled(), back_and_forth


def shuffle_during_another_iterator():
    return shuffled(), during_another_iterator


def shuffle_unchanged_by_what_comes():
    return shuffled(), unchanged_by_what_comes


def shuffle_through_torch_save():
    return shuffled(), through_torch_save


def shuffle_loaded_twice():
    return shuffled(), loaded_twice


def shuffle_loaded_and_asked_again():
    return shuffled(), loaded_and_asked_again


def shuffle_after_set_epoch():
    return shuffled(), after_set_epoch


def shuffle_before_set_epoch():
    return shuffled(), before_set_epoch


def generator_in_the_middle():
    return shuffled(generator=generator()), in_the_middle


def generator_in_a_later_epoch():
    return shuffled(generator=generator()), in_a_later_epoch


def generator_at_the_end():
    return shuffled(generator=generator()), at_the_end


def generator_back_and_forth():
    return shuffled(generator=generator()), back_and_forth


def random_sampler_with_generator_in_the_middle():
    sampler = RandomSampler(numbers(), generator=generator())
    return DataLoader(numbers(), batch_size=2, sampler=sampler), in_the_middle


def random_with_replacement_in_the_middle():
    sampler = RandomSampler(numbers(), replacement=True, num_samples=20)
    return DataLoader(numbers(), batch_size=2, sampler=sampler), in_the_middle


def weighted_in_the_middle():
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 16)
    return DataLoader(numbers(), batch_size=2, sampler=sampler), in_the_middle


def batch_sampler_in_the_middle():
    sampler = BatchSampler(RandomSampler(numbers()), batch_size=2, drop_last=True)
    return DataLoader(numbers(), batch_sampler=sampler), in_the_middle


def batch_sampler_of_lists_in_the_middle():
    batches = [[0, 1], [2], [3, 4, 5], [6], [7, 8], [9]]
    return DataLoader(Rows(), batch_sampler=batches, collate_fn=list), in_the_middle


def custom_sampler_in_the_middle():
    return DataLoader(numbers(), batch_size=2, sampler=Resumable(12)), in_the_middle


def sampler_that_draws_in_the_middle():
    return DataLoader(numbers(), batch_size=2, sampler=Drawing(12)), in_the_middle


def sampler_of_single_samples_at_every_step():
    return DataLoader(
        numbers(), batch_size=None, sampler=SequentialSampler(range(6))
    ), at_every_step


def uneven_batches_at_every_step():
    return DataLoader(numbers(9), batch_size=2, shuffle=True), at_every_step


def uneven_batches_dropped_in_the_middle():
    loader = DataLoader(numbers(9), batch_size=1, shuffle=True)
    return loader, in_the_middle, {"uneven": "drop"}


def uneven_batches_kept_in_the_middle():
    loader = DataLoader(numbers(9), batch_size=1, shuffle=True)
    return loader, in_the_middle, {"uneven": "keep"}


def stream_at_the_start():
    return DataLoader(Stream([9]), batch_size=2), at_the_start


def stream_in_the_middle():
    return DataLoader(Stream([13]), batch_size=2), in_the_middle


def stream_single_samples_in_the_middle():
    return DataLoader(Stream([9]), batch_size=None), in_the_middle


def stream_in_workers_in_the_middle():
    return DataLoader(Stream([9, 7]), batch_size=2, num_workers=2), in_the_middle


def stream_in_uneven_workers_in_the_middle():
    return DataLoader(Stream([1, 0, 23]), batch_size=3, num_workers=3), in_the_middle


def stream_in_workers_at_the_end():
    return DataLoader(Stream([9, 7]), batch_size=2, num_workers=2), at_the_end


def stream_in_workers_at_every_step():
    return DataLoader(Stream([9, 5]), batch_size=2, num_workers=2), at_every_step


def stream_after_the_last_batch():
    return DataLoader(Stream([12]), batch_size=2), after_the_last_batch


def stream_through_json():
    return DataLoader(Stream([12]), batch_size=2), through_json


def stateful_stream_at_the_start():
    return DataLoader(StatefulStream([9]), batch_size=2), at_the_start


def stateful_stream_in_the_middle():
    return DataLoader(StatefulStream([13]), batch_size=2), in_the_middle


def stateful_stream_single_samples_in_the_middle():
    return DataLoader(StatefulStream([9]), batch_size=None), in_the_middle


def stateful_stream_in_workers_in_the_middle():
    return DataLoader(StatefulStream([9, 7]), batch_size=2, num_workers=2), in_the_middle


def stateful_stream_in_uneven_workers_in_the_middle():
    return DataLoader(StatefulStream([1, 0, 23]), batch_size=3, num_workers=3), in_the_middle


def stateful_stream_in_workers_at_the_end():
    return DataLoader(StatefulStream([9, 7]), batch_size=2, num_workers=2), at_the_end


def exception_in_the_middle():
    return DataLoader(BadAt(), batch_size=1), after_an_exception


def torchdata_loader_in_the_middle():
    return StatefulDataLoader(numbers(), batch_size=2), in_the_middle


def torchdata_loader_of_rows_at_the_end():
    return StatefulDataLoader(Rows(), batch_size=2), at_the_end


def torchdata_loader_of_a_stateful_stream():
    return StatefulDataLoader(StatefulStream([13]), batch_size=2), in_the_middle
