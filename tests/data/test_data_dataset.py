"""Tests that `BatchSource` gives the batches of a local DataLoader."""

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

import cloudpickle
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from taas_magic.data.dataset import BatchSource, NoBatch, UserCodeFailed
from taas_magic.data.order import EpochOrders, UnsizedBatches
from taas_magic.data.sharding import seed_of
from taas_magic.registry import RegisteredLoader

SEED = 11


class Squares(Dataset[float]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> float:
        return index * index


class Noise(Squares):
    def __getitem__(self, index: int) -> float:
        return torch.rand(1).item() + random.random()


class Broken(Squares):
    def __getitem__(self, index: int) -> float:
        if index == 5:
            raise ValueError("sample five is bad")
        return index


class Stopping(Squares):
    def __getitem__(self, index: int) -> float:
        if index == 2:
            raise StopIteration
        return index


class Count(IterableDataset[int]):
    """Iterable-style dataset of `size` numbers from 0 on; each worker yields a part of them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, self.size, step)


class Remembering(Sampler[int]):
    """Sampler with its own random generator, which gives another order in each epoch."""

    def __init__(self, size: int) -> None:
        self.rng, self.size = random.Random(3), size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.size


class Stages(Sampler[int]):
    """Sampler with a random order, whose seed is the epoch that `set_epoch` was called with."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))

    def __len__(self) -> int:
        return self.size


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2])


class Endless(Sampler[int]):
    """Sampler that yields random indices without end, drawn from torch's global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(self.size, ()))


def source_of(loader: DataLoader[object], where: str = "test") -> BatchSource:
    return BatchSource(cloudpickle.dumps(loader), "train", SEED, where)


def stream(source: BatchSource, epoch: int = 0) -> list[object]:
    batches = list[object]()
    while True:
        try:
            batches.append(source.prepare(epoch, len(batches)))
        except NoBatch:
            return batches


def flat(batches: Iterable[object]) -> list[object]:
    return [torch.as_tensor(batch).tolist() for batch in batches]


def local(loader: DataLoader[object], epoch: int = 0) -> list[object]:
    torch.manual_seed(seed_of(SEED, epoch))
    return flat(loader)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.integers(0, 40), st.integers(1, 7), st.booleans(), st.booleans())
def test_a_map_style_dataset_gives_the_batches_of_a_local_loader(
    size: int, batch_size: int, shuffle: bool, drop_last: bool
) -> None:
    shuffle = shuffle and size > 0
    loader = DataLoader(Squares(size), batch_size, shuffle=shuffle, drop_last=drop_last)
    source = source_of(loader)
    for epoch in (0, 1, 5):
        assert flat(stream(source, epoch)) == local(loader, epoch)
        assert source.describe_epoch(epoch).batches == len(loader)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Squares(5), sampler=WeightedRandomSampler([1, 2, 3, 4], 9)),
        DataLoader(Squares(5), batch_sampler=BatchSampler([4, 3, 2, 1, 0], 2, False)),
        DataLoader(Squares(5), batch_size=None),
        DataLoader(Squares(5), batch_size=None, shuffle=True),
        DataLoader(Squares(5), batch_size=4, collate_fn=sum),
        DataLoader(Squares(5), sampler=[4, 4, 1]),
    ],
)
def test_samplers_and_collation(loader: DataLoader[object]) -> None:
    assert flat(stream(source_of(loader), 2)) == local(loader, 2)


def test_a_generator_continues_from_epoch_to_epoch() -> None:
    loader = DataLoader(Squares(20), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    source = source_of(loader)
    assert [flat(stream(source, epoch)) for epoch in range(3)] == [flat(loader) for _ in range(3)]
    again = source_of(
        DataLoader(Squares(20), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    )
    assert flat(stream(again, 2)) == flat(stream(source, 2))


def test_epochs_of_a_sampler_with_its_own_generator_are_replayed() -> None:
    loader = DataLoader(Squares(12), 3, sampler=Remembering(12))
    source = source_of(loader)
    assert flat(stream(source, 2)) == [flat(loader) for _ in range(3)][2]
    assert flat(stream(source_of(DataLoader(Squares(12), 3, sampler=Remembering(12)))))


@pytest.mark.parametrize("is_stateful", [True, False])
def test_the_orders_of_many_epochs_take_bounded_memory(is_stateful: bool) -> None:
    generator = torch.Generator().manual_seed(5) if is_stateful else None
    order = EpochOrders(DataLoader(Squares(12), 3, shuffle=True, generator=generator), SEED)
    digests = [order.epoch(number).digest for number in range(40)]
    assert len(set(digests)) == 40
    assert len(order._starts) < 8
    assert [order.epoch(number).digest for number in (3, 39, 0, 20)] == [
        digests[number] for number in (3, 39, 0, 20)
    ], "it begins again"


def test_a_sampler_without_length_is_read_to_its_end() -> None:
    source = source_of(DataLoader(Squares(4), batch_size=2, sampler=Unsized()))
    assert flat(stream(source)) == [[9, 1], [4]]
    assert source.describe_epoch(0).batches is None


class Turning(Remembering):
    """Sampler that has no length and gives another order in each epoch."""

    __len__ = None  # type: ignore[assignment]


class Breaking(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from (3, 1, 2)
        raise OSError("the list of files is gone")


def test_a_sampler_without_length_has_another_order_in_each_epoch() -> None:
    loader = DataLoader(Squares(12), 3, sampler=Turning(12))
    source, again = source_of(loader), source_of(loader)
    orders = [flat(loader) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert [flat(stream(source, epoch)) for epoch in range(3)] == orders
    assert flat(stream(again, 2)) == orders[2]


def test_a_sampler_raises_at_the_same_batch_as_in_a_local_loader() -> None:
    source = source_of(DataLoader(Squares(4), batch_size=None, sampler=Breaking()))
    assert [source.prepare(0, slot) for slot in range(3)] == [9, 1, 4]
    with pytest.raises(UserCodeFailed, match="the list of files is gone"):
        source.prepare(0, 3)
    with pytest.raises(NoBatch):
        source.prepare(0, 4)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_is_iterated_as_often_as_in_a_local_loader(workers: int) -> None:
    loader = DataLoader(Squares(12), None, sampler=Remembering(12), num_workers=workers)
    source = source_of(loader)
    assert [flat(stream(source, epoch)) for epoch in range(3)] == [flat(loader) for _ in range(3)]


@pytest.mark.process
@pytest.mark.parametrize("is_persistent", [True, False])
def test_the_order_is_that_of_a_loader_with_persistent_workers(is_persistent: bool) -> None:
    loader = DataLoader(
        Squares(12), 3, shuffle=True, num_workers=1, persistent_workers=is_persistent
    )
    source, generator = source_of(loader), torch.Generator().manual_seed(5)
    assert [flat(stream(source, at)) for at in range(3)] == [local(loader, at) for at in range(3)]
    own = DataLoader(
        *(Squares(12), 3, True),
        generator=generator,
        num_workers=1,
        persistent_workers=is_persistent,
    )
    source = source_of(own)
    assert [flat(stream(source, at)) for at in range(3)] == [flat(own) for _ in range(3)]


def test_an_endless_sampler_gives_the_same_indices_whatever_else_is_prepared() -> None:
    loader = DataLoader(Noise(100), batch_size=4, sampler=Endless(100))
    one, other = EpochOrders(loader, SEED).epoch(0).indices, source_of(loader)
    for slot in (0, 5000, 4999, 2):
        other.prepare(0, slot)
        assert other.indices(0, slot) == one[slot]
    assert one[0] != one[1]


def test_the_order_of_an_endless_sampler_takes_bounded_memory() -> None:
    loader = DataLoader(Squares(100), batch_size=1, sampler=Endless(100))
    indices = EpochOrders(loader, SEED).epoch(0).indices
    assert isinstance(indices, UnsizedBatches)
    first = [indices[batch] for batch in range(40_000)]
    assert len(indices._recent) < 20_000
    assert [indices[batch] for batch in range(40_000)] == first, "it begins again"


class EndlessWithLength(Endless):
    def __len__(self) -> int:
        return self.size


def test_an_endless_sampler_may_have_a_length() -> None:
    with_length, without = (
        EpochOrders(DataLoader(Squares(100), batch_size=4, sampler=sampler), SEED)
        for sampler in (EndlessWithLength(100), Endless(100))
    )
    for epoch in range(3):
        one, other = with_length.epoch(epoch), without.epoch(epoch)
        assert one.batches is None
        assert [one.indices[n] for n in range(2000)] == [other.indices[n] for n in range(2000)]


def test_set_epoch_reaches_the_sampler() -> None:
    sampler = Stages(10)
    source = source_of(DataLoader(Squares(10), 5, sampler=sampler))
    sampler.set_epoch(3)
    assert flat(stream(source, 3)) == flat(DataLoader(Squares(10), 5, sampler=sampler))
    assert flat(stream(source, 3)) != flat(stream(source, 2))


def test_different_orders_have_different_digests() -> None:
    loader = DataLoader(Squares(20), 4, shuffle=True)
    one, other = EpochOrders(loader, 1), EpochOrders(loader, 2)
    assert one.epoch(0).digest == EpochOrders(loader, 1).epoch(0).digest
    assert one.epoch(0).digest != one.epoch(1).digest != other.epoch(1).digest


def test_a_sampler_is_sent_without_the_dataset() -> None:
    dataset = Squares(10)
    vars(dataset)["large"] = bytes(1_000_000)
    assert len(EpochOrders(DataLoader(dataset, 2, shuffle=True), 0)._starts[0]) < 10_000


def test_random_numbers_depend_only_on_the_batch() -> None:
    loader = DataLoader(Noise(20), 4, shuffle=True)
    forward, source = flat(stream(source_of(loader))), source_of(loader)
    assert [source.prepare(0, slot).tolist() for slot in (4, 2, 2)] == [
        forward[slot] for slot in (4, 2, 2)
    ]


def test_an_exception_names_index_batch_and_line() -> None:
    source = source_of(DataLoader(Broken(8), 2), where="fetcher 1 on host a")
    assert source.prepare(0, 1).tolist() == [2, 3]
    with pytest.raises(UserCodeFailed) as caught:
        source.prepare(0, 2)
    with pytest.raises(ValueError, match="sample five is bad") as raised:
        caught.value.raised.reraise()
    text = str(raised.value)
    assert 'fetcher 1 on host a (loader "train", epoch 0, batch 2, index 5)' in text
    assert 'raise ValueError("sample five is bad")' in text
    assert source.prepare(0, 3).tolist() == [6, 7]


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(st.integers(0, 25), st.integers(1, 4), st.booleans())
def test_one_stream_gives_the_batches_of_a_local_loader(
    size: int, batch_size: int, drop_last: bool
) -> None:
    loader = DataLoader(Count(size), batch_size, drop_last=drop_last)
    assert flat(stream(source_of(loader))) == flat(loader)


@pytest.mark.process
def test_several_streams_give_the_batches_of_local_workers() -> None:
    loader = DataLoader(Count(23), 3, num_workers=2)
    source, batches, voids, slot = source_of(loader), list[object](), 0, 0
    while voids < 2:
        try:
            batches.append(source.prepare(0, slot).tolist())
            voids = 0
        except NoBatch:
            voids += 1
        slot += 1
    assert batches == flat(loader)


def test_a_stream_is_replayed_for_a_request_of_an_earlier_batch() -> None:
    source = source_of(DataLoader(Count(40), 4))
    forward = flat(stream(source))
    assert source.prepare(0, 3).tolist() == forward[3]
    assert source.prepare(0, 9).tolist() == forward[9]


class Stateful(Count):
    replayed = 0

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            Stateful.replayed += 1
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loaded_state_shortens_the_replay_of_a_stream() -> None:
    payload = pickle.dumps(DataLoader(Stateful(400), 2))
    first = BatchSource(payload, "train", SEED, "test")
    forward = flat(stream(first))
    found = first.find_state(0, 130)
    assert found is not None and found == (128, {"at": 256})
    other = BatchSource(payload, "train", SEED, "test")
    assert other.find_state(0, 130) is None
    other.prepare(0, 3)
    other.restore(0, 128, found[1])
    Stateful.replayed = 0
    assert other.prepare(0, 130).tolist() == forward[130]
    assert Stateful.replayed == 2 * 3
    other.restore(0, 128, found[1])
    assert other.prepare(0, 131).tolist() == forward[131]
    assert Stateful.replayed == 2 * 4, "another rank that loads the same state costs nothing"


def test_a_datasets_own_state_shortens_the_replay() -> None:
    source = BatchSource(pickle.dumps(DataLoader(Stateful(400), 2)), "train", SEED, "test")
    forward = flat(stream(source))
    Stateful.replayed = 0
    assert source.prepare(0, 130).tolist() == forward[130]
    assert Stateful.replayed <= 2 * (130 - 128 + 1)


def test_preparing_the_next_epoch_keeps_the_states_of_this_epoch() -> None:
    source = BatchSource(pickle.dumps(DataLoader(Stateful(400), 2)), "train", SEED, "test")
    forward = flat(stream(source))
    source.prepare(1, 0)
    assert source.find_state(0, 130) == (128, {"at": 256})
    Stateful.replayed = 0
    assert source.prepare(0, 130).tolist() == forward[130]
    assert Stateful.replayed <= 2 * (130 - 128 + 1)
    source.forget_before(1)
    assert source.find_state(0, 130) is None
    assert source.find_state(1, 0) is None, "a stream that gave nothing begins at its beginning"


PICKLING = """
import pickle
from torch.utils.data import DataLoader, IterableDataset

def add(number):
    return number + 1

class Pickling(IterableDataset):
    def __init__(self, work):
        self.work = work

    def __iter__(self):
        for number in range(3):
            yield pickle.loads(pickle.dumps(self)).work(number)

loader = DataLoader(Pickling(add), batch_size=None)
"""


def test_each_epochs_copy_of_a_dataset_can_pickle_functions_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook, worker = ModuleType("__main__"), ModuleType("__main__")
    exec(PICKLING, vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    payload = RegisteredLoader("stream", lambda: notebook.loader).pack().payload
    monkeypatch.setitem(sys.modules, "__main__", worker)
    source = BatchSource(payload, "stream", SEED, "test")
    for epoch, slot in (0, 0), (1, 0), (0, 1), (1, 1), (0, 2):
        assert source.prepare(epoch, slot) == slot + 1


def test_a_long_stream_keeps_few_states_that_are_spread_over_its_whole_length() -> None:
    size = 64 * 600
    payload = pickle.dumps(DataLoader(Stateful(size), None))
    source = BatchSource(payload, "train", SEED, "test")
    for slot in range(size):
        source.prepare(0, slot)
    states = {slot: source.find_state(0, slot) for slot in range(64, size, 64)}
    behind = {slot: slot - state[0] for slot, state in states.items() if state is not None}
    assert len(behind) == len(states)
    assert max(behind.values()) < 64 * 4
    assert len({slot - lag for slot, lag in behind.items()}) <= 256


def test_a_dataset_cannot_end_the_loop_of_one_rank() -> None:
    with pytest.raises(UserCodeFailed) as failed:
        source_of(DataLoader(Stopping(4), batch_size=2)).prepare(0, 1)
    with pytest.raises(RuntimeError, match="the epoch of this rank only"):
        failed.value.raised.reraise()
