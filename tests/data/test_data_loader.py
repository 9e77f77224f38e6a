"""Tests that a remote loader, with real fetchers and sockets, behaves like a local DataLoader."""

import contextlib
import gc
import itertools
import os
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec import structs
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import SequentialSampler as Sequential
from torch.utils.data.datapipes.iter import IterableWrapper

from taas_magic.data import client, other_ranks, sharding
from taas_magic.data.service import Directory
from taas_magic.data.sharding import Uneven, seed_of
from taas_magic.journal.analysis import LoaderCounts
from taas_magic.messages import LoaderAddresses
from tests.data.data_rig import (
    SEED,
    FeedChanges,
    Lines,
    Noise,
    Remembering,
    Rows,
    Service,
    ShapeChanges,
    plain,
    service,
    workers_of,
)
from tests.data.draws import Agreed, draw, exact, make
from tests.data.ledger import audit, missing
from tests.eventually import HUNG_S
from tests.nightly import nightly

pytestmark = pytest.mark.usefixtures("forkserver")


def local(loader: DataLoader[object], epoch: int = 0) -> list[object]:
    torch.manual_seed(seed_of(SEED, epoch))
    return [plain(batch) for batch in loader]


def dealt(batches: Sequence[object], world_size: int, uneven: Uneven = "pad") -> list[list[object]]:
    """Return for each rank the list of batches of an epoch that the rank should receive."""
    count = [
        sharding.count_steps(len(batches), rank, world_size, uneven) for rank in range(world_size)
    ]
    return [
        [batches[(step * world_size + rank) % len(batches)] for step in range(count[rank])]
        for rank in range(world_size)
    ]


def seen(
    running: Service, world_size: int, local: bool = False, shape: ShapeChanges | None = None
) -> list[list[Any]]:
    """Iterate one epoch on all ranks, which make one step each in turn; return their batches."""
    passes = [
        iter(running.loader(rank=r, world_size=world_size, local=local, shape=shape))
        for r in range(world_size)
    ]
    handed: list[list[Any]] = [[] for _ in passes]
    left = list(range(world_size))
    while left:
        for rank in list(left):
            try:
                handed[rank].append(plain(next(passes[rank])))
            except StopIteration:
                left.remove(rank)
    return handed


def test_one_rank_sees_the_local_stream(tmp_path: Path) -> None:
    loader = DataLoader(Rows(50), 4, shuffle=True)
    with service(tmp_path, loader, fetchers=2) as running:
        remote = running.loader()
        assert [plain(batch) for batch in remote] == local(loader, 0)
        assert [plain(batch) for batch in remote] == local(loader, 1)
        assert isinstance(remote.sampler, DistributedSampler)
        remote.sampler.set_epoch(7)
        assert [plain(batch) for batch in remote] == local(loader, 7)


@pytest.mark.parametrize("uneven", sharding.UNEVEN)
@pytest.mark.parametrize("fetchers", [1, 3])
def test_ranks_share_an_epoch(tmp_path: Path, fetchers: int, uneven: Uneven) -> None:
    loader = DataLoader(Rows(43), 2, shuffle=True, drop_last=True)
    with service(tmp_path, loader, fetchers=fetchers) as running:
        for world_size in (2, 4):
            handed = seen(running, world_size, shape={"uneven": uneven})
            assert handed == dealt(local(loader), world_size, uneven)


@pytest.mark.parametrize("uneven", sharding.UNEVEN)
@pytest.mark.parametrize("rows", [Rows(20), Lines(20)], ids=["map-style", "iterable-style"])
def test_repeated_batches_are_counted(tmp_path: Path, rows: Any, uneven: Uneven) -> None:
    with service(tmp_path, DataLoader(rows, 4)) as running:
        loaders = [
            running.loader(rank=rank, world_size=3, shape={"uneven": uneven}) for rank in range(3)
        ]
        for expected in ([0, 0, 1], [0, 0, 2]):  # 5 batches in each epoch
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(list, loaders))
            counted = [loader.current_counts().repeated for loader in loaders]
            assert counted == (expected if uneven == "pad" else [0, 0, 0])
        next(iter(loaders[2]))
        assert loaders[2].current_counts().repeated == (2 if uneven == "pad" else 0)


def test_a_resumed_epoch_counts_its_repeated_batches(tmp_path: Path) -> None:
    for rows in (Rows(20), Lines(20)):
        with service(tmp_path / type(rows).__name__, DataLoader(rows, 4)) as running:
            first, resumed = (running.loader(rank=2, world_size=3) for _ in range(2))
            next(iter(first))
            resumed.load_state_dict(first.state_dict())
            assert len(list(resumed)) == resumed.current_counts().repeated == 1


def test_each_rank_gets_the_batches_that_accelerate_would_give_it(tmp_path: Path) -> None:
    import accelerate.data_loader  # not at the top: each fetcher would import it to unpickle

    loader = DataLoader(Rows(24), 3)
    with service(tmp_path, loader) as running:
        for rank, batches in enumerate(seen(running, 2)):
            oracle = accelerate.data_loader.BatchSamplerShard(
                BatchSampler(Sequential(range(24)), 3, False), 2, rank, even_batches=True
            )
            assert [batch[1] for batch in batches] == list(oracle)


def test_the_stream_is_the_same_for_every_number_of_fetchers_and_none(tmp_path: Path) -> None:
    loader = DataLoader(Noise(40), 4, shuffle=True)
    streams = []
    for fetchers, workers in ((1, 1), (1, 2), (3, 1)):
        folder = tmp_path / f"{fetchers}-{workers}"
        with service(folder, loader, fetchers, workers) as running:
            streams.append(seen(running, 2))
    before = torch.random.get_rng_state()
    with service(tmp_path / "none", loader, fetchers=0) as running:
        streams.append(seen(running, 2, local=True))
        streams.append(seen(running, 2, local=True, shape={"settings": {"num_workers": 2}}))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(stream == streams[0] for stream in streams)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("uneven", sharding.UNEVEN)
def test_iterable_style(tmp_path: Path, workers: int, uneven: Uneven) -> None:
    loader = DataLoader(Lines(27), 2, num_workers=workers)
    with service(tmp_path, loader, fetchers=2) as running:
        want = [plain(batch) for batch in loader]
        assert seen(running, 1)[0] == want
        assert seen(running, 3, shape={"uneven": uneven}) == dealt(want, 3, uneven)
        assert seen(running, 3, shape={"uneven": uneven}, local=True) == dealt(want, 3, uneven)


def of_data_pipes() -> dict[str, DataLoader[object]]:
    """Return loaders of shuffled DataPipes; torch divides the numbers 0 to 26 among the workers."""

    def make(workers: int, keeps: bool, generator: torch.Generator | None) -> DataLoader[object]:
        pipe = IterableWrapper(range(27)).shuffle(buffer_size=9).sharding_filter()
        about = {"num_workers": workers, "persistent_workers": keeps}
        return DataLoader(pipe, 2, generator=generator, **about)  # type: ignore[arg-type]

    return {
        "no workers": make(0, False, None),
        "workers": make(2, False, None),
        "generator": make(2, False, torch.Generator().manual_seed(3)),
        "persistent workers": make(2, True, torch.Generator().manual_seed(3)),
    }


@pytest.mark.parametrize("fetchers", [0, 1])
def test_a_data_pipe_is_seeded_and_divided_as_torch_does(tmp_path: Path, fetchers: int) -> None:
    want: dict[str, list[list[Any]]] = {
        name: [local(loader, epoch) for epoch in range(3)]
        for name, loader in of_data_pipes().items()
    }
    with service(tmp_path, of_data_pipes(), fetchers=fetchers) as running:
        for name, epochs in want.items():
            remote = running.loader(name, local=not fetchers)
            for batches in epochs:
                assert sorted(itertools.chain(*batches)) == list(range(27))
                assert [plain(batch) for batch in remote] == batches, name


class Noted(Lines):
    """Iterable-style dataset that writes its epoch to a file whenever an iteration begins."""

    def __init__(self, size: int, file: Path) -> None:
        super().__init__(size)
        self.file, self.epoch = file, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        with self.file.open("a") as file:
            file.write(f"{self.epoch}\n")
        return super().__iter__()


def test_ranks_in_different_epochs_do_not_restart_streams(tmp_path: Path) -> None:
    dataset = Noted(41, tmp_path / "begun")
    loader = DataLoader(dataset, 2, num_workers=2)
    with service(tmp_path, loader, workers=2, buffer_bytes=1) as running:
        ahead, behind = (
            running.loader(rank=rank, world_size=2, window_bytes=1) for rank in range(2)
        )
        late = iter(behind)
        found = [plain(next(late))], [plain(batch) for batch in ahead]
        # Workers must not reach epoch 2: only two epochs of a stream stay open.
        for other, _ in itertools.islice(zip(late, ahead, strict=False), 10):
            found[0].append(plain(other))
        assert dataset.file.read_text().split().count("1") == 2
    of_ahead, of_behind = dealt(local(loader), 2)
    assert found == (of_behind[:11], of_ahead)


def test_the_pass_after_one_that_was_left_early_reads_each_stream_once(tmp_path: Path) -> None:
    """Another fetcher would read a shuffled stream in another order, without a warning."""
    one = draw(910167)
    assert one.dataset == "ragged" and one.is_unseeded
    with service(tmp_path, make(one), fetchers=2) as running:
        ranks = [running.loader(rank=rank, world_size=2, window_bytes=1) for rank in range(2)]
        for loader in ranks:
            next(iter(loader))
        passes = [iter(loader) for loader in ranks]
        gc.collect()  # frees the first passes, which are part of reference cycles
        read = [str(exact(batch)) for row in zip(*passes, strict=True) for batch in row]
        assert len(set(read)) == len(read) == one.size
        assert [loader.counts.retried for loader in ranks] == [0, 0]


def test_a_rank_without_fetchers_prepares_its_batches_in_its_own_workers(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(30), 2, shuffle=True)) as running:
        children = psutil.Process().children()
        remote = running.loader(
            rank=1, world_size=2, local=True, shape={"settings": {"num_workers": 2}}
        )
        assert [plain(batch) for batch in remote] == dealt(local(running.loaders["train"]), 2)[1]
        [starter] = [child for child in psutil.Process().children() if child not in children]
        [server] = starter.children()
        [parent] = server.children()
        while len(workers := parent.children()) < 2:
            time.sleep(0.01)
        assert len(workers) == 2
    assert psutil.wait_procs([starter, server, parent, *workers], HUNG_S)[1] == []


def test_units_bound_all_ranks_over_epochs(tmp_path: Path) -> None:
    loader = DataLoader(Rows(10), 1)
    with service(tmp_path, loader) as running:
        remotes = [running.loader(rank=rank, world_size=2, units=13) for rank in range(2)]
        counts = [[len(list(remote)) for _ in range(3)] for remote in remotes]
        assert counts == [[5, 1, 0], [5, 1, 0]]


@pytest.mark.parametrize("dataset", [Rows(5), Rows(5, width=1 << 19), Lines(5)])
def test_units_bound_ranks_that_get_unequal_numbers_of_batches(
    tmp_path: Path, dataset: Rows | Lines
) -> None:
    """Rank 1 has no batch in the last step of an epoch. With large batches, a thread receives."""
    with service(tmp_path, DataLoader(dataset, 1), units=13) as running:
        remotes = [
            running.loader(rank=rank, world_size=2, units=13, shape={"uneven": "keep"})
            for rank in range(2)
        ]
        for counts, units in [([3, 2], 5), ([3, 2], 10), ([1, 1], 12), ([0, 0], 12)]:
            assert [len(list(remote)) for remote in remotes] == counts
            assert [remote.state_dict()["units"] for remote in remotes] == [units, units]


class Hinted(Rows):
    def __getitem__(self, index: int) -> int:
        return index


class Bag(list[int]):
    hints: dict[str, int]


def weigh(items: list[int]) -> Bag:
    bag = Bag(items)
    bag.hints = {"units": items[0] + 1}
    return bag


@pytest.mark.parametrize("at_home", [False, True])
def test_hints_count_units(tmp_path: Path, at_home: bool) -> None:
    loader = DataLoader(Hinted(8), 1, collate_fn=weigh)
    with service(tmp_path, loader, fetchers=2, units=12) as running:
        remotes = [running.loader(rank=r, world_size=2, units=12, local=at_home) for r in range(2)]
        # The rows have 1 + 2, 3 + 4 and 5 + 6 units. With the third row, the sum would be 21.
        assert [[plain(batch) for batch in remote] for remote in remotes] == [
            [[0], [2]],
            [[1], [3]],
        ]
        assert [remote.counts.units for remote in remotes] == [4, 6]


def test_a_state_of_the_same_run_adds_no_units(tmp_path: Path) -> None:
    loader = DataLoader(Rows(8), 1)
    with service(tmp_path, loader) as running:
        remotes = [running.loader(rank=rank, world_size=2) for rank in range(2)]
        for remote in remotes:
            batches = iter(remote)
            next(batches)
            next(batches)
            remote.load_state_dict(remote.state_dict())
            assert len(list(remote)) == 2
        counts = {rank: remote.counts for rank, remote in enumerate(remotes)}
        assert LoaderCounts("train", deque(), counts).units == 8


def test_a_remote_loader_is_an_instance_of_data_loader(tmp_path: Path) -> None:
    loader = DataLoader(Rows(43), 4)
    with service(tmp_path, loader) as running:
        remote = running.loader(rank=1, world_size=2, shape={"attributes": {"classes": ["a"]}})
        assert isinstance(remote, DataLoader)
        dataset: Any = remote.dataset
        assert len(remote) == 6
        assert len(dataset) == 43
        assert remote.batch_size == 4
        assert remote.num_workers == 0
        assert dataset.classes == ["a"]
        assert isinstance(remote.sampler, DistributedSampler)
        assert len(remote.sampler) == 22
        assert plain(next(iter(remote)))[1] == [4, 5, 6, 7]
        assert dataset[5][1] == 5
        with pytest.raises(TypeError, match="not 'list'"):
            running.loader(local=True).dataset[[1, 2]]
        assert dataset.width == 8
        with pytest.raises(AttributeError, match="nothing_such"):
            _ = dataset.nothing_such


def test_a_remote_iterable_dataset_is_an_instance_of_iterable_dataset(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Lines(9), 2)) as running:
        remote = running.loader()
        assert isinstance(remote.dataset, IterableDataset)
        with pytest.raises(TypeError, match="does not know its length"):
            len(remote)


def test_several_loaders_iterators_and_early_leave(tmp_path: Path) -> None:
    loaders = {"train": DataLoader(Rows(40), 2, shuffle=True), "val": DataLoader(Rows(9), 3)}
    with service(tmp_path, loaders, fetchers=2) as running:
        train, val = running.loader("train"), running.loader("val")
        for batch, other in zip(train, val, strict=False):
            assert len(batch) == len(other)
        assert train.next_epoch == 1
        one, two = iter(train), iter(train)
        pairs = [(plain(next(one)), plain(next(two))) for _ in range(20)]
        assert [pair[0] for pair in pairs] == local(loaders["train"], 1)
        assert [pair[1] for pair in pairs] == local(loaders["train"], 2)
        for _ in train:
            break
        assert [plain(batch) for batch in train] == local(loaders["train"], 4)


@pytest.mark.parametrize("style", ["map", "iterable"])
@pytest.mark.parametrize("stop", [0, nightly(3), 7, nightly(10)])
def test_a_state_can_be_loaded_with_another_number_of_fetchers(
    tmp_path: Path, stop: int, style: str
) -> None:
    loader: DataLoader[object] = DataLoader(Noise(40), 2, shuffle=True)
    if style == "iterable":
        loader = DataLoader(Lines(41), 2)
    states, heads = list[dict[str, Any]](), list[list[object]]()
    with service(tmp_path / "one", loader, fetchers=1) as running:
        whole = seen(running, 2)
        for rank in range(2):
            remote = running.loader(rank=rank, world_size=2)
            batches = iter(remote)
            heads.append([plain(next(batches)) for _ in range(stop)])
            states.append(remote.state_dict())
    with service(tmp_path / "two", loader, fetchers=3) as running:
        for rank in range(2):
            remote = running.loader(rank=rank, world_size=2)
            remote.load_state_dict(states[rank])
            assert heads[rank] + [plain(batch) for batch in remote] == whole[rank]


@pytest.mark.parametrize("at_home", [False, True], ids=["fetchers", "in the rank"])
def test_a_state_contains_the_datasets_own_state(
    tmp_path: Path, at_home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Remembering(200), 1)
    with service(tmp_path / "one", loader) as running:
        batches = iter(remote := running.loader(local=at_home))
        first = [next(batches)[0, 0].item() for _ in range(140)]
        state = remote.state_dict()
    assert state["streams"] == {0: (128, {"at": 128})}
    # With a small buffer, workers cannot prepare batch 140 from the stream's beginning, before the
    # state is loaded.
    monkeypatch.setattr("taas_magic.data.loader._OWN_BUFFER_BYTES", 4096)
    with service(tmp_path / "two", loader, fetchers=2, buffer_bytes=4096) as running:
        remote = running.loader(local=at_home)
        remote.load_state_dict(state)
        assert remote.state_dict() == state, "before the first batch it is what was loaded"
        rest = [batch[0].tolist() for batch in remote]
        assert first + [number for number, _ in rest] == list(range(200))
        assert rest[0] == [140, 13], "it began at 128, not at 0"
        assert next(iter(remote))[0].tolist() == [0, 1], "the next epoch is a whole one"
        next(iter(remote))
        remote.load_state_dict(state)
        assert next(iter(remote))[0].tolist() == [140, 13], "also after two later epochs have begun"


def test_a_state_of_a_dataset_without_a_state_is_only_a_position(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Lines(20), 1)) as running:
        batches = iter(remote := running.loader())
        next(batches)
        assert "streams" not in remote.state_dict()


def test_a_state_at_the_end_begins_the_next_epoch(tmp_path: Path) -> None:
    loader = DataLoader(Rows(8), 2, shuffle=True)
    with service(tmp_path, loader) as running:
        remote = running.loader()
        list(remote)
        other = running.loader()
        other.load_state_dict(remote.state_dict())
        assert [plain(batch) for batch in other] == local(loader, 1)


def test_a_state_in_the_middle_of_a_step_is_refused(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(8), 1)) as running:
        remote = running.loader(world_size=2)
        next(iter(remote))
        with pytest.raises(ValueError, match="middle of a step of 3 ranks"):
            running.loader(world_size=3).load_state_dict(remote.state_dict())


def test_a_stream_that_continues_with_more_ranks_is_padded_with_its_first_batches(
    tmp_path: Path,
) -> None:
    with service(tmp_path, DataLoader(Lines(9), 1)) as running:
        remote = running.loader()
        for _ in zip(range(4), remote, strict=False):
            pass
        later = [running.loader(rank=rank, world_size=4) for rank in range(4)]
        for one in later:
            one.load_state_dict(remote.state_dict())
        found = [torch.cat(list(one)).flatten().tolist() for one in later]
    assert found == [[4, 8], [5, 0], [6, 1], [7, 2]]


class Bad(Rows):
    def __getitem__(self, index: int) -> object:
        if index == 5:
            raise ValueError("sample five is bad")
        return super().__getitem__(index)


@pytest.mark.parametrize("at_home", [False, True])
def test_a_datasets_exception_reaches_the_cell_and_the_next_batch_too(
    tmp_path: Path, at_home: bool
) -> None:
    with service(tmp_path, DataLoader(Bad(8), 2)) as running:
        batches = iter(running.loader(local=at_home))
        assert [plain(next(batches))[1] for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(ValueError, match="sample five is bad") as raised:
            next(batches)
        assert "index 5" in str(raised.value)
        assert 'raise ValueError("sample five is bad")' in str(raised.value)


def test_large_batches_arrive_ahead_and_are_not_overwritten(tmp_path: Path) -> None:
    loader = DataLoader(Rows(12, width=1 << 19), 1)
    for direct in (True, False):
        with service(tmp_path / str(direct), loader) as running:
            remote = running.loader(direct=direct)
            kept = list(remote)
            assert [batch[0][0, -1].item() for batch in kept] == [float(n) for n in range(12)]
            kept = [batch[0].mean().item() for batch in remote]
            assert kept == [float(n) for n in range(12)]


def test_the_ledger_has_every_batch_once(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(21), 2)) as running:
        ledgers = [running.ledger(rank) for rank in range(2)]
        for rank in range(2):
            remote = running.loader(rank=rank, world_size=2, ledger=ledgers[rank])
            for _ in range(2):
                assert len(list(remote)) == 6
        lines = running.handed()
        assert audit(lines) == []
        first = [line for line in lines if line.pass_number == 0]
        assert missing(first, 11) == []
        assert sum(line.batches for line in lines) == 24
        for ledger in ledgers:
            ledger.close()


class Slow(Rows):
    def __getitem__(self, index: int) -> None:
        time.sleep(30)


def test_a_loaders_timeout(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Slow(4), 2)) as running:
        batches = iter(running.loader(shape={"settings": {"timeout": 1.0}}))
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            next(batches)


class Unseeded(torch.utils.data.Sampler[int]):
    """Sampler with a different order in each process."""

    def __iter__(self) -> Iterator[int]:
        import os

        return iter(sorted(range(20), key=lambda n: hash((n, os.getpid()))))

    def __len__(self) -> int:
        return 20


def test_an_order_that_the_seed_does_not_determine_is_enumerated_once(tmp_path: Path) -> None:
    loader = DataLoader(Rows(20), 2, sampler=Unseeded())
    with service(tmp_path, loader, fetchers=3) as running:
        handed = seen(running, 2)
        indices = [index for batches in handed for batch in batches for index in batch[1]]
        assert sorted(indices) == list(range(20))
        with contextlib.suppress(StopIteration):
            assert seen(running, 2) == handed


class Ragged(torch.utils.data.Sampler[list[int]]):
    """Batch sampler without a length: worker 0 gets 3 batches, and worker 1 gets 8 others."""

    def __iter__(self) -> Iterator[list[int]]:
        info = torch.utils.data.get_worker_info()
        number = info.id if info else 0
        return iter([[batch, number] for batch in range(3 + 5 * number)])


@pytest.mark.parametrize(("fetchers", "ranks"), [(0, 1), (1, 1), (1, 2)])
def test_the_describing_worker_also_decides_where_an_order_ends(
    tmp_path: Path, fetchers: int, ranks: int
) -> None:
    loader = DataLoader(Rows(20), batch_sampler=Ragged(), num_workers=2)
    with service(tmp_path, loader, fetchers=fetchers) as running:
        handed = seen(running, ranks, local=not fetchers, shape={"uneven": "keep"})
    found = [[batch[1] for batch in batches] for batches in handed]
    assert found == [[[slot, 0] for slot in range(rank, 3, ranks)] for rank in range(ranks)]


def test_a_fetcher_that_starts_later_does_not_decide_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CHECK_AGAIN_S", 0.0)
    with service(tmp_path, DataLoader(Rows(20), 2, sampler=Unseeded()), fetchers=2) as running:
        hidden = {0}

        def directory(name: str) -> LoaderAddresses:
            found = running.directory(name)
            shown = {at: where for at, where in found.addresses.items() if at not in hidden}
            return structs.replace(found, addresses=shown)

        batches = iter(running.loader(directory=directory, window_bytes=1))
        found = [next(batches)]
        hidden.clear()
        found += batches
    assert sorted(index for batch in found for index in plain(batch)[1]) == list(range(20))


def both_ranks(running: Service, *changes: FeedChanges) -> list[int]:
    """Return the sorted samples that two ranks together get in one epoch.

    Rank 1 begins when rank 0 has ended.

    Args:
        running: Fetchers.
        changes: For each rank, changes of its feed.
    """
    ranks = [running.loader(rank=at, world_size=2, **it) for at, it in enumerate(changes)]
    return sorted(index for rank in ranks for batch in rank for index in plain(batch)[1])


def only_fetcher(running: Service, number: int) -> Directory:
    """Return a directory of fetchers that names only one of the running fetchers."""

    def directory(name: str) -> LoaderAddresses:
        found = running.directory(name)
        return structs.replace(found, addresses={number: found.addresses[number]}, starting=0)

    return directory


def test_ranks_wait_for_the_fetcher_that_decides_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CHECK_AGAIN_S", 0.0)
    with service(tmp_path, DataLoader(Rows(20), 2, sampler=Unseeded()), fetchers=2) as running:
        looks = itertools.count()

        def directory(name: str) -> LoaderAddresses:
            found = running.directory(name)
            if next(looks) > 5:
                return found
            return structs.replace(found, addresses={1: found.addresses[1]}, starting=1)

        assert both_ranks(running, {"directory": directory}, {}) == list(range(20))


def test_ranks_share_an_order_when_the_fetcher_that_decided_it_is_gone(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Rows(20), 2, sampler=Unseeded()), fetchers=2) as running:
        agreed = Agreed()
        changes: list[FeedChanges] = [
            {"directory": only_fetcher(running, number), "agreement": agreed} for number in range(2)
        ]
        assert both_ranks(running, *changes) == list(range(20))


class SilentStore(Agreed):
    """Key-value store that does not answer, as if its process were stopped."""

    def store_first(self, key: str, value: bytes) -> bytes:
        threading.Event().wait(HUNG_S)
        raise RuntimeError(key)


def test_a_rank_ends_its_epochs_also_if_the_store_of_the_ranks_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_ranks, "_ANSWER_S", 0.1)
    with service(tmp_path, DataLoader(Rows(20), 2, shuffle=True)) as running:
        rank = running.loader(world_size=2, agreement=SilentStore())
        assert [len(list(rank)) for _ in range(2)] == [5, 5]
        assert not rank.other_ranks.can_compare


class Redrawn(Unseeded):
    """Sampler with a different order each time."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(20), 20))


@pytest.mark.parametrize("is_local", [True, False])
def test_ranks_share_each_order_of_epochs_that_they_read_again(
    tmp_path: Path, is_local: bool
) -> None:
    """The sampler draws a new order when an epoch is read again after several other epochs."""
    with service(tmp_path, DataLoader(Rows(20), 2, sampler=Redrawn())) as running:
        agreed, epochs = Agreed(), [*range(5), *range(5), 4]
        ranks = [
            running.loader(rank=rank, world_size=2, local=is_local, agreement=agreed)
            for rank in range(2)
        ]
        for at, number in enumerate(epochs):
            found = []
            for rank in ranks if at < 5 else reversed(ranks):
                rank.set_epoch(number)
                found += [index for batch in rank for index in plain(batch)[1]]
            assert sorted(found) == list(range(20)), number


def test_ranks_that_read_different_epochs_are_reported(tmp_path: Path) -> None:
    shuffled = DataLoader(Rows(20), 2, shuffle=True)
    for loader, is_reported in (shuffled, True), (DataLoader(Rows(20), 2), False):
        with service(tmp_path / f"{is_reported}", loader) as running:
            agreed = Agreed()
            ranks = [running.loader(rank=at, world_size=2, agreement=agreed) for at in range(2)]
            next(iter(ranks[0]))
            list(ranks[0])
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                list(ranks[1])
            assert [str(it.message)[:69] for it in warned] == [
                'loader "train": rank 1 has read epoch 0 to its end, but another rank '
            ] * is_reported
            list(ranks[0])
            list(ranks[1])  # warns only once


class UnseededStream(IterableDataset[int]):
    """Iterable-style dataset of the numbers 0 to 19 in an order that differs in each process."""

    def __iter__(self) -> Iterator[int]:
        return iter(Unseeded())


def test_ranks_wait_for_the_fetcher_of_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CHECK_AGAIN_S", 0.0)
    with service(tmp_path, DataLoader(UnseededStream(), 2), fetchers=2) as running:
        looks = itertools.count()

        def directory(name: str) -> LoaderAddresses:
            found = running.directory(name)
            if next(looks) > 5:
                return found
            shown = {at: where for at, where in found.addresses.items() if at != 0}
            return structs.replace(found, addresses=shown, starting=1)

        batches = list(running.loader(directory=directory, window_bytes=1))
    assert sorted(index for batch in batches for index in batch.tolist()) == list(range(20))


def test_ranks_do_not_wait_for_a_fetcher_that_cannot_start(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(UnseededStream(), 2), fetchers=2) as running:

        def directory(name: str) -> LoaderAddresses:
            found = running.directory(name)
            return structs.replace(found, addresses={1: found.addresses[1]}, starting=0)

        batches = list(running.loader(directory=directory))
    assert sorted(index for batch in batches for index in batch.tolist()) == list(range(20))


class SlowStream(IterableDataset[torch.Tensor]):
    """Iterable-style dataset that slowly yields rows of two numbers.

    The second number counts from 0 to 39. The first number is random, and is the same in all rows
    of one iteration.
    """

    def __iter__(self) -> Iterator[torch.Tensor]:
        token = random.SystemRandom().getrandbits(62)
        for number in range(40):
            time.sleep(0.01 * (number % 3))
            yield torch.tensor([token, number])


def test_a_slow_stream_is_read_once_for_all_ranks(tmp_path: Path) -> None:
    """Ranks request only a few batches early. So requests of several ranks always wait."""
    with service(tmp_path, DataLoader(SlowStream(), 2)) as running, ThreadPoolExecutor(3) as ranks:

        def rows(rank: int) -> torch.Tensor:
            loader = running.loader(
                rank=rank,
                world_size=3,
                window_bytes=1,
                shape={"uneven": "keep"},
                agreement=agreed,
            )
            return torch.cat(list(loader))

        agreed = Agreed()
        found = torch.cat(list(ranks.map(rows, range(3))))
    assert sorted(found[:, 1].tolist()) == list(range(40))
    assert len({*found[:, 0].tolist()}) == 1


@pytest.mark.parametrize("is_fetcher", [False, True])
def test_a_stream_that_yields_other_data_after_a_restart_is_reported(
    tmp_path: Path, is_fetcher: bool
) -> None:
    loader = DataLoader(SlowStream(), 2)
    with service(tmp_path, loader, fetchers=1 + is_fetcher) as running:
        batches = iter(running.loader(window_bytes=1))
        next(batches)
        if is_fetcher:
            running.processes[0][0].kill()
        else:
            workers_of(running)[0].kill()
        with pytest.warns(UserWarning, match="read the dataset again and got other data"):
            list(batches)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("left_after", [1, 2, 5])
def test_a_rank_that_begins_an_epoch_again_gets_one_reading_of_each_stream(
    tmp_path: Path, streams: int, left_after: int
) -> None:
    """Many batches of the first reading are prepared when the second pass begins."""
    dataset = Shuffled((200 // streams,) * streams, tmp_path / "log")
    loader = DataLoader(dataset, 1, num_workers=streams)
    with service(tmp_path, loader) as running:
        rank = running.loader(local=True)  # a data server that serves only this rank
        for number in range(3):
            rank.set_epoch(0)
            list(itertools.islice(rank, left_after + number))
        rank.set_epoch(0)
        found = sorted(batch.item() for batch in rank)
    assert found == sorted(100 * at + n for at in range(streams) for n in range(200 // streams))


def test_a_stream_of_which_an_epoch_begins_again_is_reported_if_other_ranks_may_read_it(
    tmp_path: Path,
) -> None:
    """The fetcher keeps the batches of the first reading, because it serves several ranks."""
    dataset = Shuffled((200,), tmp_path / "log")
    with service(tmp_path, DataLoader(dataset, 1, num_workers=1)) as running:
        rank = running.loader()
        list(itertools.islice(rank, 5))
        rank.set_epoch(0)
        with pytest.warns(UserWarning, match="read the dataset again and got other data"):
            list(rank)


def test_a_stream_that_is_read_again_only_for_its_units_is_not_reported(tmp_path: Path) -> None:
    """Each rank's batches are those of one stream, which is read once for it."""
    loader = DataLoader(Shuffled((20, 20), tmp_path / "log"), 1, num_workers=2)
    with service(tmp_path, loader, fetchers=1) as running:
        agreed = Agreed()
        ranks = [running.loader(rank=at, world_size=2, agreement=agreed) for at in range(2)]
        found = [sorted(batch.item() for batch in rank) for rank in ranks]
        for _ in range(3):
            list(ranks[0])  # so that the fetcher drops the batches of epoch 1
        found += [sorted(batch.item() for batch in ranks[1])]
    assert found == [[*range(20)], [*range(100, 120)], [*range(100, 120)]]


def test_a_stream_that_two_fetchers_read_for_different_ranks_is_reported(tmp_path: Path) -> None:
    """Each rank reaches only one fetcher, so no rank by itself sees that the data differ."""
    with service(tmp_path, DataLoader(SlowStream(), 2), fetchers=2) as running:
        agreed = Agreed()
        ranks = [
            running.loader(
                rank=rank, world_size=2, directory=only_fetcher(running, rank), agreement=agreed
            )
            for rank in range(2)
        ]
        list(ranks[0])
        with pytest.warns(UserWarning, match="read the dataset again and got other data"):
            list(ranks[1])


class Counted(IterableDataset[torch.Tensor]):
    """Iterable-style dataset of 0 to `size` - 1 that writes a line to a file at each iteration."""

    def __init__(self, size: int, log: Path) -> None:
        self.size, self.log = size, log

    def __iter__(self) -> Iterator[torch.Tensor]:
        with self.log.open("a") as log:
            log.write("read\n")
        yield from (torch.tensor([number]) for number in range(self.size))


class Shuffled(IterableDataset[torch.Tensor]):
    """Iterable-style dataset with streams of different lengths.

    Whenever an iteration of a stream begins, the stream gets another order, and the dataset writes
    a line to a file.
    """

    def __init__(self, sizes: Sequence[int], log: Path) -> None:
        self.sizes, self.log = sizes, log

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        with self.log.open("a") as log:
            log.write(f"{info.id}\n")
        numbers = [100 * info.id + at for at in range(self.sizes[info.id])]
        random.Random(os.urandom(8)).shuffle(numbers)
        yield from map(torch.tensor, numbers)


@pytest.mark.parametrize("fetchers", [1, 2])
def test_streams_of_different_lengths_are_read_once(tmp_path: Path, fetchers: int) -> None:
    """Before a stream ends, ranks guess which later batches are theirs. Its end proves them wrong.

    Nevertheless, each epoch reads each stream only once.
    """
    log, sizes = tmp_path / "log", (40, 11)
    loader = DataLoader(Shuffled(sizes, log), 1, num_workers=2)
    with service(tmp_path, loader, fetchers=fetchers) as running:
        loaders = [running.loader(rank=r, world_size=3, shape={"uneven": "keep"}) for r in range(3)]
        with ThreadPoolExecutor(3) as ranks:
            found = [*ranks.map(lambda one: torch.cat([torch.empty(0), *one]).tolist(), loaders)]
    expected = [100 * stream + at for stream in range(2) for at in range(sizes[stream])]
    assert sorted(itertools.chain(*found)) == expected
    # The batches of the next epoch are prepared early.
    assert all(log.read_text().count(str(stream)) <= 2 for stream in range(2))


def test_a_rank_that_begins_later_does_not_restart_a_stream_of_limited_units(
    tmp_path: Path,
) -> None:
    """The description of an epoch with `--units` needs the first batch, and each rank requests it.

    With a small buffer, most batches are prepared after the last rank has begun.
    """
    loader = DataLoader(Shuffled((40,), tmp_path / "log"), 1, num_workers=1)
    with service(tmp_path, loader, units=100, buffer_bytes=4096) as running:
        passes = [iter(running.loader(rank=r, world_size=2, units=100)) for r in range(2)]
        found = [batch.item() for row in zip(*passes, strict=True) for batch in row]
    assert sorted(found) == list(range(40))


@pytest.mark.parametrize("stop", [0, 6])
def test_a_state_that_has_used_up_the_units_gives_no_batch(tmp_path: Path, stop: int) -> None:
    loader = DataLoader(Lines(10), 1)
    with service(tmp_path, loader, units=5) as running:
        before, after = (running.loader(units=units) for units in (100, 5))
        list(before)
        batches = iter(before)
        for _ in range(stop):
            next(batches)
        after.load_state_dict(before.state_dict())
        assert list(after) == []


@pytest.mark.parametrize("fetchers", [0, 1])
def test_padding_does_not_read_a_stream_again(tmp_path: Path, fetchers: int) -> None:
    log = tmp_path / "log"
    with service(tmp_path, DataLoader(Counted(5, log), 1), fetchers=fetchers) as running:
        loaders = [running.loader(rank=rank, world_size=3, local=not fetchers) for rank in range(3)]
        with ThreadPoolExecutor(3) as ranks:
            found = list(
                ranks.map(lambda loader: torch.cat(list(loader)).flatten().tolist(), loaders)
            )
    assert found == [[0, 3], [1, 4], [2, 0]]
    # The batches of the next epoch are prepared early.
    assert log.read_text().count("read") <= (2 if fetchers else 6)
