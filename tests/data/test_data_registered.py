"""Tests of registered loaders in the notebook and in cells, compared with local DataLoaders."""

from typing import Any

import pytest
import torch

from taas_magic import registry
from taas_magic.data.sharding import seed_of
from tests.cellfiles import cells_of
from tests.frontend import Frontend
from tests.harness import ANSI, Notebook, Outcome

SEED = 5

DEFINE, SURFACE = cells_of("registered_loaders")


@pytest.fixture
def defined(notebook: Notebook) -> Notebook:
    """Return a notebook that has defined a dataset."""
    notebook.define(DEFINE)
    return notebook


def result(outcome: Outcome) -> Any:
    assert outcome.error is None, outcome.shown
    assert outcome.run is not None
    return outcome.run.result


def refusal(notebook: Notebook, source: str) -> str:
    """Run a cell that must fail in the notebook, and return the error message."""
    ran = notebook.shell.run_cell(source, store_history=True)
    assert ran.error_in_exec is not None
    return str(ran.error_in_exec)


def local(notebook: Notebook, expression: str) -> list[list[int]]:
    """Evaluate an expression for a local DataLoader in this process, and return its batches."""
    torch.manual_seed(seed_of(SEED, 0))
    return [torch.as_tensor(batch).tolist() for batch in eval(expression, notebook.shell.user_ns)]


FIRST = "[batch.tolist() for batch in loader]"
CPUS = ("--cpus 0", "--cpus 1", "--cpus 3")


def test_iterating_a_loader_in_the_notebook_does_not_change_a_saved_state(
    defined: Notebook,
) -> None:
    defined.define(
        "def made():\n"
        "    generator = torch.Generator().manual_seed(3)\n"
        "    return DataLoader(Numbers(24), 2, shuffle=True, generator=generator)\n"
        "loader = taas.register(made(), seed=5)"
    )
    whole = local(defined, "made()")
    state = result(defined.run("for _ in zip(range(4), loader): pass\nloader.state_dict()", gpus=1))
    defined.define("looked = [list(loader), next(iter(loader))]")
    defined.shell.user_ns["state"] = state
    for flags in CPUS:
        rest = result(defined.run(f"loader.load_state_dict(state)\n{FIRST}", flags, gpus=1))
        assert rest == whole[4:]


SAMPLERS = [
    ("SubsetRandomSampler(chosen, drawn())", "chosen.extend([4, 5, 6, 7])"),
    ("WeightedRandomSampler([1.0] * 8, 6, generator=drawn())", "sampler.weights[2:] = 0"),
    ("SequentialSampler(chosen)", "chosen.extend([4, 5, 6, 7])"),
    ("OwnSampler()", "sampler.limit = 9"),
    ("Numbered(numpy.random.default_rng(4))", "sampler.limit = 9"),
]
"""Samplers, each with a change that the notebook makes after the registration."""


@pytest.mark.parametrize(("sampler", "change"), SAMPLERS)
def test_a_run_uses_a_changed_sampler_with_generators_as_registered(
    defined: Notebook, sampler: str, change: str
) -> None:
    defined.define(
        "import numpy, random\n"
        "from torch.utils.data import *\n"
        "def drawn():\n"
        "    return torch.Generator().manual_seed(3)\n"
        "class OwnSampler(Sampler):\n"
        "    def __init__(self):\n"
        "        self.limit, self.own = 6, random.Random(2)\n"
        "    def __len__(self):\n"
        "        return self.limit\n"
        "    def __iter__(self):\n"
        "        return iter(self.own.sample(range(self.limit), self.limit))\n"
        "class Numbered(Sampler):\n"
        "    def __init__(self, rng):\n"
        "        self.limit, self.rng, self.bits = 6, rng, rng.bit_generator\n"
        "    def __len__(self):\n"
        "        return self.limit\n"
        "    def __iter__(self):\n"
        "        self.bits.random_raw(3)\n"
        "        return iter(self.rng.permutation(self.limit).tolist())\n"
        "def made():\n"
        "    global chosen, sampler\n"
        "    chosen = [0, 1, 2, 3]\n"
        f"    sampler = {sampler}\n"
        "    return DataLoader(Numbers(24), 2, sampler=sampler)\n"
        "def changed():\n"
        f"    loader = made(); {change}\n"
        "    return loader\n"
    )
    whole = local(defined, "changed()")
    defined.define(f"loader = taas.register(made(), seed={SEED})\nlist(loader)\n{change}")
    for flags in CPUS[:2]:
        assert result(defined.run(FIRST, flags, gpus=1)) == whole


STATE = "for _ in zip(range(3), loader): pass\nloader.state_dict()"


OTHERS = [
    (
        0,
        "DataLoader(Numbers(24), 2, shuffle=True), seed=6",
        "was saved with seed 5, but this run has seed 6",
    ),
    (
        1,
        "DataLoader(Numbers(24), 2, shuffle=True), seed=6",
        "was saved with seed 5, but this run has seed 6",
    ),
    (0, "DataLoader(Numbers(26), 2, shuffle=True), seed=5", "of 24 samples, the loader has"),
    (
        1,
        "DataLoader(Numbers(24), 3, shuffle=True), seed=5",
        "the order of this epoch is different now",
    ),
    (0, "DataLoader(Numbers(24), 2), seed=5", "the order of this epoch is different now"),
]
"""Cases: number of fetchers, another loader, and the error when it loads the first one's state."""


@pytest.mark.parametrize(("cpus", "now", "says"), OTHERS)
def test_a_state_of_another_loader_is_refused(
    defined: Notebook, cpus: int, now: str, says: str
) -> None:
    flags = f"--cpus {cpus}"
    defined.define(
        "loader = taas.register(DataLoader(Numbers(24), 2, shuffle=True), name='x', seed=5)"
    )
    defined.shell.user_ns["state"] = result(defined.run(STATE, flags, gpus=1))
    defined.define(f"loader = taas.register({now}, name='x')")
    outcome = defined.run("loader.load_state_dict(state)\nlist(loader)", flags, gpus=1)
    assert says in outcome.shown


def test_a_state_of_other_streams_is_refused(defined: Notebook) -> None:
    defined.define(
        "class Count(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter(range(20))\n"
        "loader = taas.register(DataLoader(Count(), 2, num_workers=1))"
    )
    defined.shell.user_ns["state"] = result(defined.run(STATE, gpus=1))
    defined.define("loader = taas.register(DataLoader(Count(), 2, num_workers=2))")
    outcome = defined.run("loader.load_state_dict(state)", gpus=1)
    assert "with num_workers=1 and batch_size=2, the loader has" in outcome.shown
    outcome = defined.run("loader.load_state_dict({'_num_yielded': 3})", gpus=1)
    assert "this is not the state of a registered loader" in outcome.shown


@pytest.mark.parametrize("flags", CPUS)
def test_built_in_sequences_can_be_datasets(defined: Notebook, flags: str) -> None:
    defined.define(
        "datasets = [[10, 11, 12, 13], (10, 11, 12, 13), {n: 10 + n for n in range(4)}, 'abcd']\n"
        "loaders = [taas.register(DataLoader(data, 1, shuffle=False)) for data in datasets]"
    )
    cell = "print([[list(batch) for batch in loader] for loader in loaders])"
    outcome = defined.run(cell, flags)
    assert outcome.error is None, outcome.shown
    numbers = [[[[10], [12]]] * 3, [[[11], [13]]] * 3]
    letters = [[["a"], ["c"]], [["b"], ["d"]]]
    for rank in (0, 1):
        seen = eval(outcome.lines[rank][0].replace("tensor(", "int("))
        assert seen == [*numbers[rank], letters[rank]]


def test_a_built_in_value_cannot_be_registered_as_a_loader(defined: Notebook) -> None:
    for value in ("[1, 2]", "(1, 2)", "{1: 2}", "'ab'", "{1}", "b'ab'"):
        assert "register a DataLoader of it" in refusal(defined, f"taas.register({value})")


SHARDS = [
    (
        "torch.utils.data.DataLoader(Numbers(8), sampler="
        "torch.utils.data.DistributedSampler(Numbers(8), num_replicas=2, rank=0))",
        "`loader.sampler` is a torch.utils.data.distributed.DistributedSampler",
    ),
    (
        "DataLoader(Numbers(8), batch_sampler=accelerate.data_loader.BatchSamplerShard("
        "BatchSampler(range(8), 2, False), 2, 0))",
        "`loader.batch_sampler` is an accelerate.data_loader.BatchSamplerShard",
    ),
    (
        "DataLoader(accelerate.data_loader.IterableDatasetShard(Stream(), 2, False, 2, 0))",
        "`loader.dataset` is an accelerate.data_loader.IterableDatasetShard",
    ),
    (
        "accelerate.data_loader.DataLoaderShard(Numbers(8))",
        "`loader` is an accelerate.data_loader.DataLoaderShard",
    ),
    (
        "DataLoader(datasets.distributed.split_dataset_by_node("
        "datasets.IterableDataset.from_generator(count), rank=0, world_size=2))",
        "is a datasets.iterable_dataset.DistributedConfig",
    ),
]


@pytest.mark.parametrize(("made", "says"), SHARDS)
def test_a_loader_that_already_splits_its_data_by_rank_is_refused(
    defined: Notebook, made: str, says: str
) -> None:
    defined.define(
        "import accelerate.data_loader, datasets.distributed\n"
        "class Stream(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter(range(4))\n"
        "def count():\n"
        "    yield from ({'n': n} for n in range(4))\n"
        f"loader = {made}"
    )
    said = refusal(defined, "taas.register(loader)")
    assert says in said
    assert "among the ranks: remove it" in said


def test_a_refusal_is_one_line_with_none_of_the_pickling(
    defined: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    defined.define("import threading\ndataset = Numbers(8)\ndataset.lock = threading.Lock()")
    said = refusal(defined, "taas.register(DataLoader(dataset, batch_size=2))")
    shown = capsys.readouterr().out
    assert "dataset.lock` is a _thread.lock" in said and said in shown
    assert len(ANSI.sub("", shown).strip().splitlines()) == 1
    assert "pickling.py" not in shown and "another exception" not in shown


DEALING = """
import torch.distributed as dist

class Dealing(IterableDataset):
    def __iter__(self):
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
        return iter(range(rank, 12, ranks))

loader = taas.register(DataLoader(Dealing(), 2, num_workers=WORKERS))
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("flags", CPUS[:2])
def test_a_dataset_that_splits_by_rank_gives_each_sample_once(
    defined: Notebook, flags: str, workers: int
) -> None:
    defined.define(DEALING.replace("WORKERS", str(workers)))
    cell = (
        "dist.init_process_group('gloo')\n"
        "print([batch.tolist() for batch in loader], dist.get_rank(), os.environ['RANK'])"
    )
    outcome = defined.run(cell, flags)
    assert outcome.error is None, outcome.shown
    assert outcome.lines == {
        0: ["[[0, 1], [4, 5], [8, 9]] 0 0"],
        1: ["[[2, 3], [6, 7], [10, 11]] 1 1"],
    }


def test_webdatasets_split_by_node_gives_each_sample_once(defined: Notebook) -> None:
    defined.define(
        "import io, tarfile, webdataset as wds\n"
        "for shard in range(4):\n"
        "    with tarfile.open(f'shard-{shard}.tar', 'w') as archive:\n"
        "        info = tarfile.TarInfo(f'{shard}.cls')\n"
        "        info.size = 1\n"
        "        archive.addfile(info, io.BytesIO(str(shard).encode()))\n"
        "data = wds.WebDataset('shard-{0..3}.tar', shardshuffle=False,\n"
        "                      nodesplitter=wds.split_by_node).decode().to_tuple('cls')\n"
        "loader = taas.register(DataLoader(data, batch_size=None))"
    )
    for flags in CPUS[:2]:
        outcome = defined.run("print([label for (label,) in loader])", flags)
        assert outcome.error is None, outcome.shown
        assert outcome.lines == {0: ["[0, 2]"], 1: ["[1, 3]"]}


def test_register_in_a_rank_raises(defined: Notebook) -> None:
    outcome = defined.run("taas.register(DataLoader(Numbers(4)))")
    assert "Register the loader in the notebook, in a cell without %%taas" in outcome.shown


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_the_datasets_set_epoch_has_its_effect(defined: Notebook, kind: str) -> None:
    defined.define(
        "class Staged(Numbers):\n"
        "    epoch = 0\n"
        "    def set_epoch(self, epoch):\n"
        "        self.epoch = epoch\n"
        "    def __getitem__(self, index):\n"
        "        return 100 * self.epoch + index\n"
        "class Stages(Staged, IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return (self[n] for n in range(self.size))\n"
        f"def made():\n    return DataLoader({'Staged' if kind == 'map' else 'Stages'}(8), 2)\n"
        "loader = taas.register(made())\n"
        "def train(loader):\n"
        "    seen = []\n"
        "    for epoch in (0, 1, 4):\n"
        "        loader.dataset.set_epoch(epoch)\n"
        "        seen += [batch.tolist() for batch in loader]\n"
        "    return seen"
    )
    here = eval("train(made())", defined.shell.user_ns)
    for flags, ranks in zip(CPUS, (2, 1, 2), strict=True):
        outcome = defined.run("print(train(loader))", flags, gpus=ranks)
        assert outcome.error is None, outcome.shown
        seen = [eval(outcome.lines[rank][0]) for rank in range(ranks)]
        assert seen == [here[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("flags", CPUS[:2])
def test_an_assignment_to_the_dataset_is_refused(defined: Notebook, flags: str) -> None:
    defined.define(
        "from torch.utils.data import Subset\n"
        "loader = taas.register(DataLoader(Subset(Numbers(4), [3, 1])))"
    )
    outcome = defined.run("loader.dataset.train = False", flags)
    assert "Set it in the notebook, before the cell (loader.dataset.train = …)" in (outcome.shown)
    outcome = defined.run("loader.dataset.dataset.train = False", flags)
    assert "(loader.dataset.dataset.train = …)" in outcome.shown
    outcome = defined.run("loader.collate_fn = list", flags)
    assert 'cannot set collate_fn of loader "loader" in a rank' in outcome.shown
    assert "Set it in the notebook, before the cell" in outcome.shown
    outcome = defined.run("loader.batch_size = 3", flags)
    assert 'ValueError: cannot set batch_size of loader "loader" in a rank' in outcome.shown
    assert "In the notebook, make a new DataLoader with another batch_size" in outcome.shown


def test_a_method_that_changes_only_the_ranks_copy_of_the_dataset_is_reported(
    defined: Notebook,
) -> None:
    defined.define(
        "class Modes(Numbers):\n"
        "    mode = 'train'\n"
        "    def evaluate(self):\n"
        "        self.mode = 'evaluate'\n"
        "    def half(self):\n"
        "        return self.size // 2\n"
        "loader = taas.register(DataLoader(Modes(8)))"
    )
    outcome = defined.run("loader.dataset.evaluate()\nprint(loader.dataset.half())", gpus=1)
    assert outcome.error is None, outcome.shown
    said = " ".join(outcome.lines[0])
    assert "loader.dataset.evaluate() changed 'mode' only in this rank's copy" in said
    assert outcome.lines[0][-1] == "4"


@pytest.mark.parametrize("flags", CPUS[:2])
def test_changes_in_place_that_have_no_effect_on_the_batches_are_reported(
    defined: Notebook, flags: str
) -> None:
    defined.define(
        "from torch.utils.data import Subset\n"
        "class Flip:\n"
        "    def __init__(self):\n"
        "        self.p = 1\n"
        "class Staged(Numbers):\n"
        "    def __init__(self, size):\n"
        "        super().__init__(size)\n"
        "        self.cfg, self.tf, self.w = {'stage': 0}, Flip(), torch.ones(4)\n"
        "    def __getitem__(self, index):\n"
        "        return self.cfg['stage'], self.tf.p, self.w[0]\n"
        "    def close_mosaic(self):\n"
        "        self.tf.p = 0\n"
        "loader = taas.register(DataLoader(Staged(2), 2))\n"
        "inner = taas.register(DataLoader(Subset(Staged(2), [0, 1]), 2))\n"
        "closed = taas.register(DataLoader(Staged(2), 2))\n"
        "late = taas.register(DataLoader(Staged(2), 2))"
    )
    cell = (
        "for stage in range(2):\n"
        "    loader.dataset.cfg['stage'] = stage\n"
        "    loader.dataset.w[:] = 1 - stage\n"
        "    seen = [[part.tolist() for part in batch] for batch in loader]\n"
        "inner.dataset.dataset.tf.p = 0\n"
        "list(inner)\n"
        "closed.dataset.close_mosaic()\n"
        "list(closed)\n"
        "for batch in late:\n"
        "    late.dataset.tf.p = 0\n"
        "print(seen)"
    )
    outcome = defined.run(cell, flags, gpus=1)
    assert outcome.error is None, outcome.shown
    assert outcome.lines[0][-1] == "[[[0, 0], [1, 1], [1.0, 1.0]]]"
    shown = " ".join([*outcome.lines[0], *(note["text"] for note in outcome.of_kind("note"))])
    for names in ("loader.dataset.cfg, loader.dataset.w", "inner.dataset.dataset.tf"):
        assert f"the cell has changed {names} only in this rank" in shown
    assert "closed.dataset.close_mosaic() changed 'tf' only in this rank's copy" in shown
    assert "the cell has changed late.dataset.tf only in this rank" in shown


def test_a_rank_shows_what_the_loader_has(defined: Notebook) -> None:
    defined.define(SURFACE)
    here = eval("looked_at(made())", defined.shell.user_ns)
    here[1][1] = [batch[:] for batch in local(defined, "made()[1]")]
    for flags in CPUS:
        shown, batches, epochs = result(defined.run("looked_at(loaders)", flags, gpus=1))
        assert shown == here[0]
        assert batches == here[1]
        assert epochs == here[2]


def test_two_ranks_of_an_endless_sampler(defined: Notebook) -> None:
    defined.define(SURFACE)
    torch.manual_seed(seed_of(SEED, 0))
    endless = iter(defined.shell.user_ns["made"]()[6])
    here = [next(endless).tolist() for _ in range(6)]
    for flags in CPUS[:2]:
        cell = "print([batch.tolist() for batch, _ in zip(loaders[6], range(3))])"
        outcome = defined.run(cell, flags)
        assert outcome.error is None, outcome.shown
        assert [eval(outcome.lines[rank][0]) for rank in (0, 1)] == [here[::2], here[1::2]]


def test_spawned_workers(defined: Notebook) -> None:
    defined.define(
        "loader = taas.register("
        "DataLoader(Numbers(6), 2, num_workers=1, multiprocessing_context='spawn'))"
    )
    for flags in CPUS[:2]:
        assert result(defined.run(FIRST, flags, gpus=1)) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_are_like_those_of_a_local_loader(defined: Notebook, workers: int) -> None:
    defined.define(
        "def begin(worker):\n"
        "    os.environ['BEGUN'] = str(worker)\n"
        "class Seeing(Numbers):\n"
        "    def __getitem__(self, index):\n"
        "        info = get_worker_info()\n"
        "        ours = taas.get_worker_info()\n"
        "        told = (ours.id, ours.num_workers), os.environ.get('BEGUN')\n"
        "        return (info.id, info.num_workers) if info else None, told\n"
        f"loader = DataLoader(Seeing(6), batch_size=None, num_workers={workers},\n"
        "                    collate_fn=list, worker_init_fn=begin)\n"
        "here = list(loader)\n"
        "taas.register(loader)"
    )
    for flags in CPUS[:2]:
        assert result(defined.run("list(loader)", flags, gpus=1)) == defined.shell.user_ns["here"]
    told = "info = taas.get_worker_info(); (info.id, info.num_workers)"
    assert result(defined.run(told)) == (0, 2)


def test_a_handle_opened_after_register_is_named(
    defined: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    defined.define(
        "loader = taas.register(DataLoader(Numbers(4)))\n"
        "loader.dataset.handle = open('handle.txt', 'w')"
    )
    for flags in (*CPUS[:2], "--dry-run"):
        outcome = defined.run("for batch in loader: pass", flags)
        shown = outcome.shown + capsys.readouterr().out
        assert "`loader.dataset.handle` is a _io.TextIOWrapper" in shown
        assert "set it to None here" in shown
        assert "inside the cell" not in shown
    defined.define("loader.dataset.handle.close(); del loader.dataset.handle")


def test_the_same_cell_five_times_leaves_one_loader(defined: Notebook) -> None:
    for size in range(1, 6):
        defined.define(f"loader = taas.register(DataLoader(Numbers({size})))")
    assert {name: len(one.loader) for name, one in registry.registered().items()} == {"loader": 5}
    defined.define("other = taas.register(DataLoader(Numbers(7)), name='named')\nalias = loader")
    defined.define("loader = taas.register(DataLoader(Numbers(6)))")
    assert sorted(registry.registered()) == ["alias", "loader", "named"]
    defined.define("taas.unregister('loader'); taas.unregister(alias); taas.unregister('named')")
    assert registry.registered() == {}
    for size in range(1, 6):
        defined.define(f"loader = DataLoader(Numbers({size}))\ntaas.register(loader)")
    sizes = {name: len(one.loader) for name, one in registry.registered().items()}
    in_outputs = {f"loader{n}": n + 1 for n in range(4)}  # IPython's `Out` holds the old loaders
    assert sizes == {**in_outputs, "loader": 5}
    assert result(defined.run("[len(loader)]", gpus=1)) == [5]


LOOPS = {
    "dict": "loaders = {}\n"
    "for split, size in (('train', 4), ('val', 8)):\n"
    "    loader = DataLoader(torch.arange(size), batch_size=2)\n"
    "    loaders[split] = taas.register(loader)\n"
    "first, second = 'train', 'val'",
    "list": "loaders = []\n"
    "for size in (4, 8):\n"
    "    loader = taas.register(DataLoader(torch.arange(size), batch_size=2))\n"
    "    loaders.append(loader)\n"
    "first, second = 0, 1",
    "same name": "loaders = []\n"
    "for size in (4, 8):\n"
    "    train = DataLoader(torch.arange(size), batch_size=2)\n"
    "    loaders.append(taas.register(train, name='train'))\n"
    "first, second = 0, 1",
}
"""Cells that register two loaders in a loop, with 2 and 4 batches."""


@pytest.mark.parametrize("loop", LOOPS)
def test_loaders_that_a_loop_registers_are_all_shared_by_the_ranks(
    frontend_of_module: Frontend, loop: str
) -> None:
    imports = "import taas, torch\nfrom torch.utils.data import DataLoader\n"
    for _ in range(2):
        frontend_of_module.run(imports + LOOPS[loop])
    ran = frontend_of_module.run(
        "%%taas --gpus 2\n"
        "print([[batch.tolist() for batch in loaders[key]] for key in (first, second)])"
    )
    shown = frontend_of_module.text(ran)
    assert "[[[0, 1]], [[0, 1], [4, 5]]]" in shown
    assert "[[[2, 3]], [[2, 3], [6, 7]]]" in shown


def test_a_cell_uses_a_loader_whose_variable_now_has_another_loader(defined: Notebook) -> None:
    defined.define("train = taas.register(DataLoader(Numbers(4), 2))\nloaders = {'train': train}")
    defined.define("train = taas.register(DataLoader(Numbers(2), 1))")
    outcome = defined.run("print([batch.tolist() for batch in loaders['train']])")
    assert outcome.error is None, outcome.shown
    assert outcome.lines == {0: ["[[0, 1]]"], 1: ["[[2, 3]]"]}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loaded_state_of_a_local_loader_is_refused(defined: Notebook) -> None:
    defined.define(
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "first = StatefulDataLoader(Numbers(8), 2)\n"
        "next(iter(first))\n"
        "loader = StatefulDataLoader(Numbers(8), 2)\n"
        "taas.register(loader)"
    )
    assert result(defined.run(FIRST, gpus=1)) == local(defined, "first")
    defined.define("loader.load_state_dict(first.state_dict())")
    assert "has loaded a state in the notebook" in defined.run(FIRST, gpus=1).shown
    assert "has loaded a state in the notebook" in refusal(defined, "taas.register(loader)")


def test_a_dataset_may_contain_whatever_capture_can_send(defined: Notebook) -> None:
    defined.define(
        "@functools.lru_cache\n"
        "def squared(n):\n"
        "    return n * n\n"
        "class Squares(Numbers):\n"
        "    def __init__(self, size):\n"
        "        super().__init__(size)\n"
        "        self.of, self.picture = squared, torch.arange(100)\n"
        "    def __getitem__(self, index):\n"
        "        return self.of(index) + int(self.picture[index])\n"
        "loader = taas.register(DataLoader(Squares(6), 2))"
    )
    for flags in CPUS[:2]:
        assert result(defined.run(FIRST, flags, gpus=1)) == local(defined, "loader")


def test_persistent_workers_of_the_notebook_stay_there(defined: Notebook) -> None:
    defined.define(
        "loader = taas.register("
        "DataLoader(Numbers(6), 2, num_workers=1, persistent_workers=True))\n"
        "looked = list(loader)"
    )
    assert result(defined.run(FIRST, "--cpus 1", gpus=1)) == [[0, 1], [2, 3], [4, 5]]
    defined.define("loader._iterator = None")


def test_without_fetchers_lines_that_a_dataset_prints_belong_to_the_rank(defined: Notebook) -> None:
    defined.define(
        "class Printing(Numbers):\n"
        "    def __getitem__(self, index):\n"
        "        print('read', index)\n"
        "        return index\n"
        "loader = taas.register(DataLoader(Printing(2), 2))"
    )
    outcome = defined.run("list(loader)", gpus=1)
    assert outcome.error is None, outcome.shown
    assert outcome.lines[0][:2] == ["read 0", "read 1"], "it reads ahead, too"


def test_loaders_in_threads_of_their_own(defined: Notebook) -> None:
    defined.define(
        "import threading\n"
        "class Noise(Numbers):\n"
        "    def __getitem__(self, index):\n"
        "        return torch.rand(()) + index\n"
        "made = [DataLoader(Noise(40), 2, shuffle=True) for _ in range(2)]\n"
        "loaders = [taas.register(loader, seed=n) for n, loader in enumerate(made)]\n"
        "def epochs():\n"
        "    seen = [None, None]\n"
        "    def take(n):\n"
        "        seen[n] = [batch.tolist() for batch in loaders[n]]\n"
        "    threads = [threading.Thread(target=take, args=(n,)) for n in (0, 1)]\n"
        "    for thread in threads: thread.start()\n"
        "    for thread in threads: thread.join()\n"
        "    return seen"
    )
    alone = "[[batch.tolist() for batch in loader] for loader in loaders]"
    expected = result(defined.run(alone, gpus=1))
    cell = "before = torch.get_rng_state()\nepochs(), torch.equal(before, torch.get_rng_state())"
    for flags in CPUS[:2]:
        assert result(defined.run(cell, flags, gpus=1)) == (expected, True)


def test_autoreload_of_the_loaders_class_keeps_the_registration(
    defined: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(defined.project)
    source = (
        "class Tokens:\n"
        "    def __len__(self): return 4\n"
        "    def __iter__(self): return iter([[n] for n in range(4)])\n"
    )
    path = defined.project / "edited_loader.py"
    path.write_text(source)
    defined.define("%load_ext autoreload\n%autoreload 2")
    defined.define("import edited_loader\ntokens = taas.register(edited_loader.Tokens())")
    path.write_text(f"{source}# edited")
    try:
        outcome = defined.run("print(*[n for [n] in tokens])")
    finally:
        defined.define("%autoreload 0")
    assert outcome.error is None, outcome.shown
    assert (outcome.lines[0], outcome.lines[1]) == (["0 2"], ["1 3"])
