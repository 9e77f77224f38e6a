"""Tests of loaders in cells that leave loops early, are interrupted, or use threads and forks."""

import pytest

from tests.cellfiles import cells_of
from tests.harness import Notebook


def run(notebook: Notebook, cell: str, cpus: int) -> list[str]:
    outcome = notebook.run(cell, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    return outcome.lines[0]


LARGE = """
import taas, torch
from torch.utils.data import DataLoader, Dataset

class Large(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((1 << 18,), float(index))

loader = taas.register(DataLoader(Large(), batch_size=1))
"""
LEFT = """
import threading
for epoch in range(4):
    for batch in loader:
        if batch[0, 0] == 3:
            break
iter(loader)  # a new iterator ends the one before it
receiving = [thread for thread in threading.enumerate() if thread.name == "taas-receive"]
for thread in receiving:
    thread.join(20)
print("receive", sum(thread.is_alive() for thread in receiving))
"""


@pytest.mark.parametrize("cpus", [0, 1])
def test_leaving_an_epoch_of_large_batches_leaves_no_thread(notebook: Notebook, cpus: int) -> None:
    notebook.define(LARGE)
    assert run(notebook, LEFT, cpus) == ["receive 0"]


STUCK, INTERRUPTED = cells_of("stuck_batch")


@pytest.mark.parametrize("values", [1, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize(
    ("signal", "raised"), [(2, "KeyboardInterrupt"), (14, "TimeoutError")], ids=["int", "alarm"]
)
def test_an_exception_of_a_signal_handler_does_not_wait_for_the_batch(
    notebook: Notebook, values: int, signal: int, raised: str
) -> None:
    notebook.define(f"values, number = {values}, {signal}")
    notebook.define(STUCK)
    assert run(notebook, INTERRUPTED, 1) == [raised]


GATED, FORKED = cells_of("gated_epochs")


def test_a_forked_child_that_ends_a_loop_cancels_no_request_of_the_rank(notebook: Notebook) -> None:
    notebook.define(GATED)
    assert run(notebook, FORKED, 1) == ["True 0", "retried 0"]


LARGE_NUMBERS = """
import taas, torch
from torch.utils.data import DataLoader

loader = taas.register(DataLoader(torch.arange(24)[:, None].repeat(1, 1 << 19)))
"""
LOOKS_LATER = """
from multiprocessing import get_context

def look(batch, number):
    over.wait()
    found.put(bool((batch == number).all()))

fork = get_context("fork")
over, found = fork.Event(), fork.SimpleQueue()
children = []
for number, batch in enumerate(loader):
    children.append(fork.Process(target=look, args=(batch, number)))
    children[-1].start()
for _ in range(5):  # more batches than the fetcher prepares early
    list(map(len, loader))
over.set()
print([found.get() for _ in children].count(True))
for child in children:
    child.join()
"""


def test_a_forked_child_keeps_its_copy_of_a_batch(notebook: Notebook) -> None:
    notebook.define(LARGE_NUMBERS)
    assert run(notebook, LOOKS_LATER, 1) == ["24"]


NUMBERS = """
import taas, torch
from torch.utils.data import DataLoader

loader = taas.register(DataLoader(torch.arange(20), batch_size=2))
"""
THREAD = """
import threading

def work():
    threading.main_thread().join()
    print("thread has", sum(len(batch) for batch in loader))

threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("cpus", [0, 1])
def test_a_thread_can_iterate_after_the_cells_last_line(notebook: Notebook, cpus: int) -> None:
    notebook.define(NUMBERS)
    outcome = notebook.run(THREAD, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    assert outcome.lines[0] == ["thread has 20"]
    assert outcome.of_kind("data")[-1]["loaders"]["loader"]["batches"] == 10


CHILDREN = """
import multiprocessing
for child in multiprocessing.active_children():
    child.terminate()
    child.join()
print(sum(len(batch) for batch in loader))
"""


def test_a_cell_may_end_all_children_that_multiprocessing_knows(notebook: Notebook) -> None:
    notebook.define(NUMBERS)
    assert run(notebook, CHILDREN, 0) == ["20"]


VIEWS = """
import taas, torch
from torch.utils.data import DataLoader

def collate(samples):
    batch = torch.arange(16.0)
    return {"all": batch, "some": batch[:4], "none": torch.empty(0, 4)}

loader = taas.register(DataLoader([0], collate_fn=collate))
"""
DEVICE = """
torch.set_default_device("meta")
for batch in loader:
    print(*(part.device for part in batch.values()))
"""


def test_a_cells_default_device_is_not_that_of_its_batches(notebook: Notebook) -> None:
    notebook.define(VIEWS)
    assert run(notebook, DEVICE, 1) == ["cpu cpu cpu"]


LIVE = """
import taas, time, torch
from pathlib import Path
from torch.utils.data import DataLoader, IterableDataset

class Live(IterableDataset):
    # The dataset yields the last sample only after the rank has received the other samples.
    def __iter__(self):
        yield from range(50)
        while not Path("seen").exists():
            time.sleep(0.01)
        yield 50

Path("seen").unlink(missing_ok=True)
loader = taas.register(DataLoader(Live(), batch_size=None))
"""
SEEN = """
from pathlib import Path
for number in loader:
    print(number)
    if number == 49:
        Path("seen").touch()
"""


@pytest.mark.parametrize("cpus", [0, 1])
def test_a_live_stream_yields_each_sample_at_once(notebook: Notebook, cpus: int) -> None:
    notebook.define(LIVE)
    assert run(notebook, SEEN, cpus) == [str(number) for number in range(51)]


SPAWNS = """
import multiprocessing, taas, torch
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader

def work(number):
    return 10 * number

def use(number):
    return list(loader)

loader = taas.register(DataLoader(torch.arange(4), batch_size=2))
"""
SPAWNED = """
print("batches", len(list(loader)))
with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    print("worked", list(pool.map(work, range(3))))
    print("refused", pool.submit(use, 0).exception())
"""


def test_a_child_that_is_spawned_finds_all_names_but_the_batches(notebook: Notebook) -> None:
    notebook.define(SPAWNS)
    batches, worked, refused = run(notebook, SPAWNED, 1)
    assert (batches, worked) == ("batches 2", "worked [0, 10, 20]")
    assert refused.startswith('refused loader "loader" works only in ranks, and process ')


POOLED, POOLED_EPOCHS = cells_of("pooled_datasets")


@pytest.mark.parametrize("cpus", [0, 1])
def test_a_dataset_sends_functions_of_the_notebook_to_a_process_pool(
    notebook: Notebook, cpus: int
) -> None:
    notebook.define(POOLED)
    assert run(notebook, POOLED_EPOCHS, cpus) == ["[100, 101] [100, 101]"] * 2
