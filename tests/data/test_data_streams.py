"""What a cell is handed is what a local DataLoader gives: streams, states, values, failures.

The loaders of a group are registered in one notebook and iterated in one cell for each way of
feeding it, and the same source makes the loaders that are iterated here.
"""

import json
import sys
import types
import warnings
from typing import Any

import pytest
import torch

from taas_magic.data.sharding import seed_of
from tests.harness import Notebook, Outcome

SEED = 5
HAS_NOTES = HAS_GROUPS = sys.version_info >= (3, 11)
WAYS = [(0, 3), (1, 2), (3, 1)]
"""Numbers of fetchers and of ranks."""

SHOW = """
import dataclasses
from collections import UserDict

import numpy as np
import torch

def show(value):
    if isinstance(value, torch.Tensor) and value.is_nested:
        return ["nested", str(value.dtype), [show(part) for part in value.unbind()]]
    if isinstance(value, torch.Tensor):
        plain = value.to_dense() if value.layout is not torch.strided else value
        parts = [str(value.dtype), list(value.shape), value.requires_grad, str(value.layout)]
        return [*parts, str(plain.tolist())]
    if isinstance(value, np.ndarray):
        texts = [str(one) for one in np.ma.getdata(value).ravel().tolist()]
        mask = str(getattr(value, "mask", ""))
        return [type(value).__name__, str(value.dtype), list(value.shape), texts, mask]
    if hasattr(value, "__slots__") and not isinstance(value, tuple):
        return [type(value).__name__, [show(getattr(value, name)) for name in value.__slots__]]
    if isinstance(value, UserDict):
        return [type(value).__name__, show(value.data)]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, show(vars(value))]
    if isinstance(value, dict):
        return {str(key): show(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[show(one) for one in value]]
    return [type(value).__name__, str(value)]
"""

CELL = """
import json, os
for name, loader in sorted(loaders.items()):
    for epoch in range(EPOCHS):
        for batch in loader:
            print(json.dumps([name, epoch, show(batch)]))
"""


def register(notebook: Notebook, source: str) -> None:
    """Define `loaders`, a dict, in the notebook, and register each of them by its name."""
    notebook.define(SHOW + source)
    notebook.define(
        f"import taas, torch; torch.manual_seed({SEED})\n"
        "loaders = {k: taas.register(v, name=k) for k, v in make().items()}"
    )


def remote(
    notebook: Notebook, cpus: int, ranks: int, epochs: int = 1
) -> dict[str, list[list[object]]]:
    """Return what the ranks were handed, put together in the loaders' order, by loader."""
    outcome = notebook.run(CELL.replace("EPOCHS", str(epochs)), f"--cpus {cpus}", gpus=ranks)
    assert outcome.error is None, outcome.shown
    lines = handed(outcome)
    found: dict[str, list[tuple[int, list[object]]]] = {}
    for (name, epoch), by_rank in lines.items():
        most = max(map(len, by_rank.values()))
        steps = [by_rank[rank][step] for step in range(most) for rank in sorted(by_rank)]
        found.setdefault(name, []).append((epoch, steps))
    return {name: [steps for _, steps in sorted(found[name])] for name in found}


def handed(outcome: Outcome) -> dict[tuple[str, int], dict[int, list[object]]]:
    found: dict[tuple[str, int], dict[int, list[object]]] = {}
    for rank, lines in outcome.lines.items():
        for name, epoch, batch in map(json.loads, lines):
            found.setdefault((name, epoch), {}).setdefault(rank, []).append(batch)
    return found


def defined(source: str) -> dict[str, Any]:
    """Run a source in a module that a worker's pickles find; return what it defines."""
    module = sys.modules["taas_tests_local"] = types.ModuleType("taas_tests_local")
    exec(SHOW + source, vars(module))
    return vars(module)


def local(source: str, epochs: int = 1) -> dict[str, list[list[object]]]:
    """Return what local loaders of the same source give, seeded as each epoch is."""
    space = defined(source)
    given: dict[str, list[list[object]]] = {}
    for name, loader in space["make"]().items():
        for epoch in range(epochs):
            for part in (loader.sampler, loader.dataset):
                getattr(part, "set_epoch", int)(epoch)
            torch.manual_seed(seed_of(SEED, epoch))
            batches = [space["show"](batch) for batch in loader]
            given.setdefault(name, []).append(json.loads(json.dumps(batches)))
    return given


def compare(notebook: Notebook, source: str, cpus: int, ranks: int, epochs: int = 1) -> None:
    """Assert that a cell gets what local loaders give, padded to whole steps by first batches."""
    register(notebook, source)
    found, expected = remote(notebook, cpus, ranks, epochs), local(source, epochs)
    for name in expected:
        for epoch, steps in enumerate(expected[name]):
            padding = steps[: -len(steps) % ranks]
            assert found.get(name, [[]] * epochs)[epoch] == steps + padding, (name, epoch)


REUSED = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class OneArray(Dataset):
    def __init__(self):
        self.array = np.zeros(4, dtype=np.float32)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.array[:] = index
        return self.array

class OneTensor(IterableDataset):
    def __init__(self, item=None):
        self.item = torch.zeros(3)

    def __iter__(self):
        for number in range(11):
            self.item.fill_(number)
            yield self.item

class Fields(OneTensor):
    def __iter__(self):
        fields = {"x": self.item, "names": []}
        for number in range(11):
            fields["x"].fill_(number)
            fields["names"][:] = [f"n{number}"]
            yield fields

class Rows(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((2,), float(index))

class IntoOne:
    def __init__(self):
        self.out = torch.zeros(2, 2)

    def __call__(self, rows):
        return torch.stack(rows, out=self.out)

class OneList:
    def __iter__(self):
        batch = []
        for start in range(0, 10, 2):
            batch[:] = [start + 1, start]
            yield batch

    def __len__(self):
        return 5

def make():
    return {
        "unbatched": DataLoader(OneArray(), batch_size=None),
        "unbatched_stream": DataLoader(OneTensor(), batch_size=None),
        "fields": DataLoader(Fields(), batch_size=None),
        "collated_into": DataLoader(Rows(), 2, collate_fn=IntoOne()),
        "first_of_batch": DataLoader(OneTensor(), 1, collate_fn=lambda items: items[0]),
        "sampler": DataLoader(Rows(), batch_sampler=OneList()),
    }
"""


@pytest.mark.parametrize(("cpus", "ranks"), WAYS)
def test_memory_that_is_used_again(notebook: Notebook, cpus: int, ranks: int) -> None:
    compare(notebook, REUSED, cpus, ranks)


INDICES = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

class Echo(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return [type(index).__name__, str(index), repr(getattr(index, "dtype", ""))]

class Together(Echo):
    def __getitems__(self, indices):
        return [[type(indices).__name__, str(indices)], *map(self.__getitem__, indices)]

class Given:
    def __init__(self, *given):
        self.given = given

    def __iter__(self):
        return iter(self.given)

    def __len__(self):
        return len(self.given)

class Drawn:
    def __iter__(self):
        return iter(np.random.default_rng(3).permutation(8))

    def __len__(self):
        return 8

def plain(items):
    return items

def batches(*given):
    return DataLoader(Echo(), batch_sampler=Given(*given), collate_fn=plain)

def make():
    mask = np.array([True, False, True])
    return {
        "tuples": batches((0, 1), (2, 3)),
        "tuples_within": batches([(0, 1), (2, 3)], [(4, 5)]),
        "bools": batches([True, False], [False]),
        "mixed": batches([1, 2], [True], [3, "x"], [np.int64(4), 5]),
        "keys": batches(b"ab", b"cd"),
        "texts": batches(["a", "b"], ["c"]),
        "tensors": batches(torch.tensor([3, 4]), torch.tensor([5, 6])),
        "numpy": batches([np.int64(1), np.int64(2)], [np.int32(3)]),
        "all_numpy": batches([np.int64(1), np.int64(2)], [], [np.int64(3)]),
        "large": batches([1 << 70, 2], [3]),
        "drawn": DataLoader(Echo(), 3, sampler=Drawn(), collate_fn=plain),
        "together": DataLoader(Together(), batch_sampler=Given((0, 1), [2]), collate_fn=plain),
        "masks": DataLoader(Echo(), sampler=Given(mask, ~mask), batch_size=None),
        "slices": DataLoader(Echo(), sampler=Given(slice(0, 2), ...), batch_size=None),
    }
"""


@pytest.mark.parametrize(("cpus", "ranks"), WAYS)
def test_indices_arrive_as_the_sampler_gave_them(notebook: Notebook, cpus: int, ranks: int) -> None:
    compare(notebook, INDICES, cpus, ranks)


STATEFUL = """
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Generated(IterableDataset):
    '''torchdata's pattern: a generator that looks at what was loaded when it begins.'''

    def __init__(self, size):
        self.size, self.i, self.resume = size, 0, None

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        self.i = first
        if self.resume is not None:
            self.i, self.resume = self.resume, None
        while self.i < self.size:
            self.i += step
            yield torch.tensor([self.i - step])

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.resume = state["i"]

class Large(Generated):
    def state_dict(self):
        return {"i": self.i, "buffer": torch.full((6 << 20,), float(self.i))}

    def load_state_dict(self, state):
        assert (state["buffer"] == state["i"]).all()
        super().load_state_dict(state)

def make():
    return {
        "one": DataLoader(Generated(400), 1),
        "two": DataLoader(Generated(401), 1, num_workers=2),
        "large": DataLoader(Large(200), 1),
    }
"""
TAKE = """
import itertools, json, os
for name, count in counts.items():
    path = f"{name}-{cpus}-{os.environ['RANK']}.pt"
    loader = loaders[name]
    if os.path.exists(path):
        loader.load_state_dict(torch.load(path, weights_only=False))
    batches = iter(loader)
    for batch in itertools.islice(batches, count):
        print(json.dumps([name, 0, show(batch)]))
    if again:
        loader.load_state_dict(loader.state_dict())
        for batch in itertools.islice(iter(loader), again):
            print(json.dumps([name, 0, show(batch)]))
    taas.save(loader.state_dict(), path)
"""
TAKEN = (
    {"one": 70, "two": 70, "large": 70},
    {"one": 10, "two": 150, "large": 3},
    {"one": 5, "two": 9},
    {"one": 200, "two": 9},
)
"""How many batches each run takes of each stream, before it takes 7 more for each run before it."""


@pytest.mark.parametrize("cpus", [0, 1, 3])
def test_a_stream_goes_on_after_every_resume(notebook: Notebook, cpus: int) -> None:
    register(notebook, STATEFUL)
    expected = local(STATEFUL)
    found: dict[str, list[object]] = {name: [] for name in expected}
    for number, counts in enumerate(TAKEN):
        notebook.define(f"counts, again, cpus = {counts}, {7 * number}, {cpus}")
        outcome = notebook.run(TAKE, f"--cpus {cpus}", gpus=1)
        assert outcome.error is None, outcome.shown
        lines = handed(outcome)
        for name, count in counts.items():
            assert len(lines[name, 0][0]) == count + 7 * number
            found[name] += lines[name, 0][0]
    for name, batches in found.items():
        assert batches == expected[name][0][: len(batches)], name


FAILING = """
import json
import torch
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
        raise ExceptionGroup("several", [error, ValueError("another")])

def leave():
    import sys
    sys.exit(3)

def throw(error):
    raise error

FAILURES = {
    "key": lambda: {}["missing"],
    "value": lambda: throw(ValueError("sample five is bad")),
    "odd": lambda: throw(Odd(4, where="here")),
    "silent": lambda: throw(Silent("x")),
    "told": lambda: throw(Told("told")),
    "json": lambda: json.loads("{"),
    "text": lambda: b"\\xff".decode(),
    "file": lambda: open("/nowhere/at/all"),
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
    '''An iterator of a class of its own: it lives on after what it raised.'''

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
        "sampling": DataLoader(range(8), 2, sampler=Sampling(), num_workers=1),
        "collate": DataLoader(range(8), 2, collate_fn=collate, num_workers=1),
        "init": DataLoader(range(2), 2, worker_init_fn=init, num_workers=1),
    }
"""
CATCH = """
import json
for name, loader in loaders.items():
    batches, outcome = iter(loader), []
    for _ in range(20):
        try:
            outcome.append(show(next(batches)))
        except StopIteration:
            break
        except Exception as error:
            notes = "\\n".join(getattr(error, "__notes__", []))
            text = str(error) + notes
            inner = [type(one).__name__ for one in getattr(error, "exceptions", [])]
            is_told = "Original Traceback" in text and "Caught" in text
            outcome.append([type(error).__name__, inner, is_told, text])
    print(json.dumps([name, 0, outcome]))
"""


AT_THE_BEGINNING = {"begins": "LookupError", "init": "OSError", "sampling": "ArithmeticError"}
"""What these raise first; torch's own worker does not outlive the first two."""


def caught(notebook: Notebook, cpus: int) -> dict[str, Any]:
    outcome = notebook.run(CATCH, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    return {name: by_rank[0][0] for (name, _), by_rank in handed(outcome).items()}


def caught_here() -> dict[str, Any]:
    """Return what local loaders with one worker raise; torch itself makes nothing of a group."""
    space = defined(FAILING)
    lines: list[str] = []
    made = space["make"]()
    left_out = {"group", "exit", *AT_THE_BEGINNING}
    space["loaders"] = {name: made[name] for name in made if name not in left_out}
    exec(CATCH, space | {"print": lines.append})
    return {name: outcome for name, _, outcome in map(json.loads, lines)}


@pytest.mark.parametrize("cpus", [0, 1, 3])
def test_a_datasets_exceptions_are_raised_as_a_local_loader_raises_them(
    notebook: Notebook, cpus: int
) -> None:
    register(notebook, FAILING)
    found, expected = caught(notebook, cpus), caught_here()

    def kinds(outcome: list[Any]) -> list[Any]:
        return [one[0] if len(one) == 4 else one for one in outcome]

    for name in expected:
        assert kinds(found[name]) == kinds(expected[name]), name
        # one that takes no message is told where it happened by a note, from Python 3.11 on
        told = [one[2] for one in found[name] if len(one) == 4]
        assert all(told) or (name == "silent" and not HAS_NOTES), name
    first = {name: found[name][0][0] for name in AT_THE_BEGINNING}
    assert first == AT_THE_BEGINNING
    if HAS_GROUPS:
        kind, inner, is_told, _ = found["group"][2]
        assert (kind, inner, is_told) == ("ExceptionGroup", ["KeyError", "ValueError"], True)
    kind, _, is_told, text = found["exit"][2]
    assert (kind, is_told) == ("RuntimeError", True)
    assert "SystemExit: 3" in text
    assert "index 5" in text
    assert [len(found[name]) for name in ("group", "exit")] == [4, 4], "the next batches come"


def test_a_failed_cell_shows_the_datasets_traceback(notebook: Notebook) -> None:
    register(notebook, FAILING)
    for name, words in {"value": "five is bad", "group": "inner", "exit": "SystemExit: 3"}.items():
        outcome = notebook.run(f"for batch in loaders[{name!r}]:\n    pass", "--cpus 1", gpus=1)
        assert "Original" in outcome.shown, name
        assert "index 5" in outcome.shown, name
        assert words in outcome.shown, name
        assert "in __getitem__" in outcome.shown, name


THREADS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Noise(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.rand(2) + index

def make():
    return {name: DataLoader(Noise(), 2, shuffle=True) for name in ("one", "two")}
"""
IN_THREADS = """
import threading
import torch

def take(name):
    taken[name] = [show(batch) for batch in loaders[name]]

taken = {}
torch.manual_seed(3)
threads = [threading.Thread(target=take, args=(name,)) for name in loaders]
for thread in threads:
    thread.start()
drawn = []
while len(drawn) < 1000 or any(thread.is_alive() for thread in threads):
    drawn.append(torch.rand(()).item())
for thread in threads:
    thread.join()
import json
for name in taken:
    print(json.dumps([name, 0, taken[name]]))
torch.manual_seed(3)
print(json.dumps(["same", 0, drawn == [torch.rand(()).item() for _ in drawn]]))
"""


@pytest.mark.parametrize("cpus", [0, 1])
def test_loaders_in_threads_leave_each_other_and_the_main_thread_alone(
    notebook: Notebook, cpus: int
) -> None:
    register(notebook, THREADS)
    whole = remote(notebook, cpus, 1)
    outcome = notebook.run(IN_THREADS, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    found = {name: by_rank[0][0] for (name, _), by_rank in handed(outcome).items()}
    assert found.pop("same"), "the main thread's random numbers are its own"
    assert found == {name: whole[name][0] for name in whole}


BESIDE_A_DRAW = """
import threading
import torch

def draw():
    while not over.is_set():
        torch.randn(1_000_000)  # without the interpreter's lock, with that of torch's generator

over = threading.Event()
thread = threading.Thread(target=draw)
thread.start()
for name, loader in loaders.items():
    for batch in loader:
        print(json.dumps([name, 0, show(batch)]))
over.set()
thread.join()
"""


def test_a_lock_that_a_thread_of_the_cell_holds_stops_no_loader(notebook: Notebook) -> None:
    register(notebook, THREADS)
    notebook.define("import json")
    whole = remote(notebook, 0, 1)
    outcome = notebook.run(BESIDE_A_DRAW, "--cpus 0", gpus=1)
    assert outcome.error is None, outcome.shown
    found = {name: by_rank[0] for (name, _), by_rank in handed(outcome).items()}
    assert found == {name: whole[name][0] for name in whole}


BESIDE_A_FORK = """
import os
import tempfile

for name, loader in loaders.items():
    for batch in loader:  # connections are open when the cell forks
        pass
file = tempfile.mktemp()
child = os.fork()
who = "the rank's" if child else "the fork's"
lines = [
    json.dumps([f"{who} {name}", 1, show(batch)])
    for name, loader in loaders.items()
    for batch in loader
]
if not child:
    with open(file, "w") as said:
        print(*lines, sep="\\n", file=said)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(*lines, open(file).read(), sep="\\n", end="")
"""


@pytest.mark.parametrize("cpus", [0, 1])
def test_a_fork_of_the_rank_has_connections_of_its_own(notebook: Notebook, cpus: int) -> None:
    register(notebook, THREADS)
    notebook.define("import json")
    whole = remote(notebook, cpus, 1, epochs=2)
    outcome = notebook.run(BESIDE_A_FORK, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    found = {name: by_rank[0] for (name, _), by_rank in handed(outcome).items()}
    both = ("the rank's", "the fork's")
    assert found == {f"{who} {name}": whole[name][1] for name in whole for who in both}


OWN_RANDOMNESS = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Augment:
    def __init__(self):
        self.rng = np.random.default_rng(3)

class Noisy(Dataset):
    def __init__(self):
        self.transforms = [Augment()]

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index

class Counting(IterableDataset):
    def __init__(self):
        self.epoch, self.position = 0, 0

    def __iter__(self):
        self.position = 0
        for number in range(6):
            self.position += 1
            yield torch.tensor([number + 100 * self.epoch])
        self.epoch += 1

class Shuffled(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        yield from torch.randperm(6, generator=self.generator)

class Told(Counting):
    def set_epoch(self, epoch):
        self.epoch = epoch

def make():
    return {
        "noisy": DataLoader(Noisy(), 2),
        "counting": DataLoader(Counting(), 1),
        "shuffled": DataLoader(Shuffled(), 1),
        "told": DataLoader(Told(), 1),
        "workers": DataLoader(Counting(), 1, num_workers=1),
    }
"""


WITH_ALL = """
import glob, time
run = f"{os.environ['TAAS_STATE_DIR']}/runs/{os.environ['TORCHELASTIC_RUN_ID']}"
while len(glob.glob(f"{run}/data/fetchers/*.json")) < CPUS:
    time.sleep(0.05)
"""
"""Who prepares a stream while others have not started does not see how it goes on."""


@pytest.mark.parametrize("cpus", [0, 1, 3])
def test_randomness_and_epochs_of_a_datasets_own_are_told(notebook: Notebook, cpus: int) -> None:
    with pytest.warns(UserWarning) as told:
        register(notebook, OWN_RANDOMNESS)
    said = [str(one.message) for one in told if "random generator of its own" in str(one.message)]
    assert len(said) == 2
    assert '"noisy"' in said[0]
    assert "(transforms[0].rng)" in said[0]
    assert "--cpus" in said[0]
    assert '"shuffled"' in said[1]
    assert "set_epoch" in said[1]
    found, expected = dict[str, dict[int, list[object]]](), local(OWN_RANDOMNESS, epochs=3)
    cell = "import os" + WITH_ALL.replace("CPUS", str(cpus)) + CELL.replace("EPOCHS", "3")
    outcome = notebook.run(cell, f"--cpus {cpus}", gpus=1)
    assert outcome.error is None, outcome.shown
    lines = outcome.lines[0]
    warned = [line for line in lines if "counts its epochs in its attribute 'epoch'" in line]
    assert [line for line in warned if '"counting"' not in line] == []
    assert len(warned) == 1
    for name, epoch, batch in map(json.loads, (line for line in lines if line.startswith("["))):
        found.setdefault(name, {}).setdefault(epoch, []).append(batch)
    for name in ("told", "workers"):
        assert [found[name][epoch] for epoch in range(3)] == expected[name], name
    assert found["counting"] == dict.fromkeys(range(3), expected["counting"][0])


UNSEEDED = """
import os, random, torch
import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index

class Unseeded(Sampler):
    def __iter__(self):
        order = list(range(40))
        random.Random(os.urandom(8)).shuffle(order)
        return iter(order)

    def __len__(self):
        return 40

class Endless(Unseeded):
    __len__ = None

class Bunches(Sampler):
    def __iter__(self):
        order, rng = list(Unseeded()), random.Random(os.urandom(8))
        while order:
            yield [order.pop() for _ in range(min(len(order), rng.randint(1, 5)))]

    def __len__(self):
        return sum(1 for _ in self)

class Stream(IterableDataset):
    def __init__(self, is_seeded):
        self.is_seeded = is_seeded

    def __iter__(self):
        rng = np.random.default_rng(3 if self.is_seeded else None)
        yield from rng.permutation(40).tolist()

def set_generator(worker):
    torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(worker)

def make():
    return {
        "bunches": DataLoader(Numbers(), batch_sampler=Bunches()),
        "endless": DataLoader(Numbers(), 4, sampler=Endless()),
        "sampler": DataLoader(Numbers(), batch_sampler=BatchSampler(Unseeded(), 4, False)),
        "seeded": DataLoader(Stream(True), 4),
        "stream": DataLoader(Stream(False), 4),
        "worker": DataLoader(Numbers(), 4, num_workers=1, worker_init_fn=set_generator),
    }
"""
SEEN = """
import taas_magic, torch.distributed as dist
dist.init_process_group("gloo")
seen = {}
for name, loader in loaders.items():
    for epoch in range(2):
        try:
            mine = [n for batch in loader for n in batch.tolist()]
        except Exception as error:
            mine = f"{type(error).__name__}: {error}"
        both = [None, None]
        dist.all_gather_object(both, mine)
        seen.setdefault(name, []).append(both)
seen
"""


@pytest.mark.parametrize("cpus", [0, 2])
def test_ranks_share_an_order_that_is_not_seeded_or_are_told(notebook: Notebook, cpus: int) -> None:
    register(notebook, UNSEEDED)
    outcome = notebook.run(SEEN, f"--cpus {cpus}")
    assert outcome.error is None and outcome.run is not None, outcome.shown
    seen = outcome.run.result
    said = "\n".join(line for lines in outcome.lines.values() for line in lines)
    assert '"worker" gives the dataset a random generator of its own (rng)' in said
    of_all = ["sampler", "seeded", "worker", *([] if not cpus else ["endless", "stream"])]
    for name in of_all:
        for mine, other in seen[name]:
            assert sorted(mine + other) == list(range(40)), name
    for mine, other in seen["bunches"]:
        assert {*mine, *other} == set(range(40))
    assert ("batch 0 of epoch 0 differs between rank" in said) is (not cpus)
    assert 'loader "seeded": batch' not in said
    if not cpus:
        for both in seen["endless"]:  # the rank that came first has its order, the other is told
            assert [type(mine) for mine in sorted(both, key=repr)] == [str, list]
            assert any("use --cpus 1" in mine for mine in both if isinstance(mine, str))


KINDS = r"""
import asyncio
import collections
import functools
import random
import threading
import warnings
import queue
import numpy as np
import torch
from collections import UserDict, OrderedDict
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import (
    ChainDataset, ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset,
    TensorDataset, get_worker_info, random_split,
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
    __slots__ = ("x", "edges", "view")

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
            base.unfold(0, 4, 2), base[:1].expand(3), base.view(2, 4).t(), base[::3],
            torch.complex(base, -base).conj(), base.to(torch.bfloat16), base > index,
            torch.empty(0, 2), base.reshape(2, 4).to_sparse(), torch.tensor(index),
            base.clone().requires_grad_(), torch.nn.Parameter(base.clone()),
            torch.nested.as_nested_tensor([base[:2], base[2:5]]),
            torch.nested.as_nested_tensor([base[:2].reshape(1, 2), base[2:8].reshape(2, 3).t()]),
            torch.nested.nested_tensor([base[:2], base[2:5]], layout=torch.jagged),
        ]

class InThread(IterableDataset):
    '''A generator that is fed by a thread of its own.'''

    def __iter__(self):
        items = queue.Queue(2)

        def fill():
            for number in range(9):
                items.put(torch.tensor([number]))
            items.put(None)

        threading.Thread(target=fill, daemon=True).start()
        yield from iter(items.get, None)

class Buffered(IterableDataset):
    '''A shuffle buffer that draws from the module random.'''

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
    '''A dataset around another loader.'''

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
    @functools.lru_cache
    def read(self, index):
        return torch.tensor([index])

    def __getitem__(self, index):
        return self.read(index)

class Worker(Rows):
    def __getitem__(self, index):
        info = get_worker_info()
        return index if info is None else -1

class Sequence:
    '''No Dataset at all: the old protocol of a sequence that ends by IndexError.'''

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
    path = "mapped.npy"  # in the notebook's folder: other tests have one of their own
    np.save(path, np.arange(12.0).reshape(6, 2))
    tokens = Tokens()
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
        "stacked": DataLoader(StackDataset(x=Rows(5), y=[1, 2, 3, 4, 5]), 2),
        "split": DataLoader(split(), 2, shuffle=True),
        "table": DataLoader(TensorDataset(torch.arange(7), -torch.arange(7.0)), 3, shuffle=True),
        "awaited": DataLoader(Awaited(5), 2),
        "cached": DataLoader(Cached(5), batch_size=None),
        "worker": DataLoader(Worker(5), 2),
        "sequence": DataLoader(Sequence(), 2, shuffle=True),
        "text": DataLoader("some text", 4),
        "ordered": DataLoader([OrderedDict(b=1, a=(2, "x")) for _ in range(3)], 2),
    }
"""


@pytest.mark.parametrize(("cpus", "ranks"), [(0, 1), (1, 2)])
def test_datasets_and_batches_of_many_kinds(notebook: Notebook, cpus: int, ranks: int) -> None:
    with warnings.catch_warnings():  # of torch's, about nested tensors and arrays it may not write
        compare(notebook, KINDS, cpus, ranks)


HABITS = r"""
import os
import pathlib
import warnings
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

class Rows(Dataset):
    def __init__(self, size=9):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index)), "index": index}

class Curriculum(Rows):
    '''Its sampler asks it how hard samples may be, and it is told the epoch.'''

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor([index, self.epoch])

class Easier(Sampler):
    def __init__(self, dataset):
        self.dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(3 + 2 * self.epoch))

class Holes(Rows):
    def __getitem__(self, index):
        return None if index % 3 else super().__getitem__(index)

class Shared(Rows):
    def __getitem__(self, index):
        x = torch.arange(4.0) + index
        return {"x": x, "same": x, "part": x[1:3]}

class Relative(Rows):
    '''Reads what lies beside the notebook, and what the notebook has set.'''

    def __getitem__(self, index):
        text = pathlib.Path("habits.txt").read_text()
        return [text, os.environ.get("HABITS", ""), torch.zeros(1), torch.tensor(0.5)]

class Liar(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(7))

class Restless(IterableDataset):
    '''Not a generator: hands itself out, and begins again.'''

    def __init__(self):
        self.left = []

    def __iter__(self):
        self.left = list("abcdefg")
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)

class Parts(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(info.id, 17, info.num_workers)

class Uneven:
    def __iter__(self):
        yield from ([], [1], [2, 3, 4], [5])

class Mixed:
    '''A collate_fn that draws.'''

    def __call__(self, items):
        batch = default_collate(items)
        return batch | {"order": torch.randperm(len(items)).shape}

def without_holes(items):
    kept = [item for item in items if item is not None]
    return default_collate(kept) if kept else None

def share(items):
    item = items[0]
    item["x"].add_(100)
    return [item, item["same"] is item["x"], item]

def bare(items):
    return items

def generator():
    return torch.Generator().manual_seed(4)

def make():
    curriculum = Curriculum()
    return {
        "curriculum": DataLoader(curriculum, 2, sampler=Easier(curriculum)),
        "holes": DataLoader(Holes(), 2, collate_fn=without_holes),
        "shared": DataLoader(Shared(4), 1, collate_fn=share),
        "relative": DataLoader(Relative(2), 1),
        "liar": DataLoader(Liar(), 2),
        "restless": DataLoader(Restless(), 2),
        "dropped": DataLoader(Parts(), 3, num_workers=2, drop_last=True),
        "uneven": DataLoader(Rows(), batch_sampler=Uneven(), collate_fn=bare),
        "mixed": DataLoader(Rows(), 4, collate_fn=Mixed(), drop_last=True),
        "drawn": DataLoader(Rows(), 2, shuffle=True, generator=generator()),
        "empty": DataLoader(Rows(0), 2, collate_fn=bare),
        "epochs": DataLoader(Rows(5), 2, shuffle=True),
    }
"""


@pytest.mark.parametrize(("cpus", "ranks"), [(0, 2), (1, 1)])
def test_habits_of_datasets_over_two_epochs(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int
) -> None:
    (notebook.project / "habits.txt").write_text("beside the notebook")
    monkeypatch.setenv("HABITS", "set in the notebook")
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():  # of a dataset that gives more than its length says
            compare(notebook, HABITS, cpus, ranks, epochs=2)
    finally:
        torch.set_default_dtype(torch.float32)


OWN_ITER = """
import taas
from torch.utils.data import DataLoader

class Doubling(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch
"""


def test_a_loader_that_is_iterated_by_code_of_its_own_is_refused(notebook: Notebook) -> None:
    notebook.define(OWN_ITER)
    with pytest.raises(TypeError, match="Doubling is a DataLoader with an `__iter__` of its own"):
        notebook.define("loader = taas.register(Doubling(list(range(4))))")
