"""Runs cases on ranks, and compares the batches that ranks receive with local DataLoaders.

A case is a function without parameters in one of the modules of this folder. A case returns a
loader; or a loader and a script; or a loader, a script and further arguments of `taas.register`.
A script is a function that uses a loader and returns a result. The default script returns the
batches of two epochs.

The cases of a module are distributed over its SETTINGS, so that each case runs in one setting. If
the environment variable TAAS_EVERY_SETTING is set, each case runs in all settings.
"""

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.data.loaders import described
from tests.data.loaders.described import Script
from tests.data.loaders.share import SEED, Local, Share
from tests.harness import Notebook, without_pytests_filter
from tests.rig.pools import settings_in

SeenByCase = dict[str, object]


class Setting(NamedTuple):
    """Numbers of ranks and fetchers with which cases run.

    Attributes:
        ranks: Number of ranks.
        cpus: Number of fetchers of the cell.
        resumed_cpus: Number of fetchers of a second cell, which loads the states of the first
            cell. None for no second cell.
    """

    ranks: int
    cpus: int
    resumed_cpus: int | None = None


SeenBySetting = dict[Setting, list[SeenByCase]]

PATIENT = "[data]\nfetch_s = 100\n"
"""Settings for a busy machine.

A fetcher that starts the workers of fifty loaders at once may not answer for a long time.
"""

REGISTER = """
import taas

cases = {{}}
for name in {names}:
    loader, script, options = parts(globals()[name]())
    cases[name] = taas.register(loader, name=name, seed={seed}, **options), script
"""
CELL = """
import torch.distributed as dist

dist.init_process_group("gloo")
mine = {name: seen_of(script, loader) for name, (loader, script) in cases.items()}
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, mine)
"""
SAVE = """
import torch.distributed as dist

dist.init_process_group("gloo")
mine = {name: seen_of(script, loader) for name, (loader, script) in cases.items()}
kept = {name: loader.state_dict() for name, (loader, script) in cases.items()}
seen, states = [None] * dist.get_world_size(), [None] * dist.get_world_size()
dist.all_gather_object(seen, mine)
dist.all_gather_object(states, kept)
"""
LOAD = """
import torch.distributed as dist

dist.init_process_group("gloo")
mine = {}
for name, (loader, script) in cases.items():
    loader.load_state_dict(states[dist.get_rank()][name])
    mine[name] = seen_of(two_epochs, loader)
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, mine)
"""
UNREGISTER = """
for loader, script in cases.values():
    taas.unregister(loader)
del cases, name, loader, script, options
"""


@contextlib.contextmanager
def unfiltered() -> Iterator[None]:
    """Within the block, ignore warnings of too many workers, and torchdata's deprecations."""
    with without_pytests_filter():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        yield


def cases_of(module: ModuleType) -> list[str]:
    """Return the names of a module's cases."""
    functions = inspect.getmembers(module, inspect.isfunction)
    own = [function for _, function in functions if function.__module__ == module.__name__]
    return [function.__name__ for function in own if not inspect.signature(function).parameters]


def parameters(*modules: ModuleType) -> list[Any]:
    """Return all cases of some modules as pytest parameters.

    `make nightly` runs all cases; `make test` runs the cases of daily parts (`Part.is_daily`).
    """
    return [
        pytest.param(
            *(module, name),
            id=f"{module.__name__.rpartition('.')[2]}-{name}",
            marks=marks(any(part.is_daily for part in parts_of(module) if name in part.names)),
        )
        for module in modules
        for name in cases_of(module)
    ]


def marks(is_daily: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return the pytest marks of a parameter: none if it is daily, else the mark `nightly`."""
    return () if is_daily else (pytest.mark.nightly,)


CASES = 12
"""Largest number of cases in one cell."""

EVERY_SETTING = bool(os.environ.get("TAAS_EVERY_SETTING"))
"""Whether each case runs in every setting of its module."""


class Part(NamedTuple):
    """Group of a module's cases that one cell runs in one setting.

    Attributes:
        is_daily: Whether `make test` runs the part. The first part of each setting is daily. If all
            cases run in all settings, only the first parts of the first and last setting are daily.
    """

    module: ModuleType
    setting: Setting
    names: tuple[str, ...]
    is_daily: bool

    def __str__(self) -> str:
        ranks, cpus, resumed_cpus = self.setting
        module = self.module.__name__.rpartition(".")[2]
        return f"{module}-{ranks}-{cpus}-{resumed_cpus}-{self.names[0]}"


def parts_of(module: ModuleType) -> list[Part]:
    """Split a module's cases into parts, one for each cell."""
    names, settings = cases_of(module), settings_of(module)
    has_all = EVERY_SETTING or len(names) <= len(settings)
    daily = (settings[0], settings[-1]) if has_all else settings
    return [
        Part(module, setting, tuple(group), is_daily=setting in daily and number == 0)
        for turn, setting in enumerate(settings)
        for number, group in enumerate(
            groups(names if has_all else names[turn :: len(settings)], CASES)
        )
    ]


def groups(names: list[str], size: int) -> list[list[str]]:
    """Distribute names in turn over as few lists as possible, with at most `size` names each."""
    count = -(-len(names) // size)
    return [names[number::count] for number in range(count)]


def all_parts(*modules: ModuleType) -> list[Any]:
    """Return the parts of some modules as pytest parameters."""
    return [
        pytest.param(part, id=str(part), marks=marks(part.is_daily))
        for module in modules
        for part in parts_of(module)
    ]


def settings_of(module: ModuleType) -> list[Setting]:
    """Return the settings in which a module's cases run."""
    return [Setting(*numbers) for numbers in module.SETTINGS]


class Seen:
    """Cache of the cases' results on ranks. It runs a cell when a test first needs its results."""

    def __init__(self, notebook: Notebook, settings: Path) -> None:
        self._notebook, self._settings = notebook, settings_in(settings, PATIENT)
        self._seen: dict[Part, list[SeenByCase] | Exception] = {}

    def of(self, module: ModuleType, name: str) -> SeenBySetting:
        """Return a dict from each setting in which a case runs to the results of that cell.

        These are only the cells that tests of this session have run. If there is none, run all.
        """
        parts = [part for part in parts_of(module) if name in part.names]
        known = [part for part in parts if part in self._seen]
        return {part.setting: self.of_part(part) for part in known or parts}

    def of_part(self, part: Part) -> list[SeenByCase]:
        """Return a part's results: a dict for each rank, with the results by case.

        Run the part's cell at the first call. If the cell failed, each call raises its exception.
        """
        if part not in self._seen:
            self._seen[part] = self._entered(part)
        found = self._seen[part]
        if isinstance(found, Exception):
            raise found
        return found

    def _entered(self, part: Part) -> list[SeenByCase] | Exception:
        """Run a part's cell with the test's folders; return its results, or the exception."""
        with pytest.MonkeyPatch.context() as patch, unfiltered():
            patch.setenv("TAAS_STATE_DIR", str(self._notebook.state_dir))
            patch.setenv("XDG_CONFIG_HOME", str(self._settings))
            patch.chdir(self._notebook.project)
            try:
                return self._run(part)
            except Exception as error:  # `of_part` raises it in each test of the part
                return error

    def _run(self, part: Part) -> list[SeenByCase]:
        for each in (described, part.module):
            assert each.__file__ is not None
            self._notebook.define(Path(each.__file__).read_text())
        try:
            self._notebook.define(REGISTER.format(seed=SEED, names=list(part.names)))
            return self._ranks(part.setting)
        finally:
            self._notebook.define(UNREGISTER)

    def _ranks(self, setting: Setting) -> list[SeenByCase]:
        if setting.resumed_cpus is None:
            return self._cell(CELL, setting.ranks, setting.cpus, "seen")
        before = self._cell(SAVE, setting.ranks, setting.cpus, "seen,states")
        after = self._cell(LOAD, setting.ranks, setting.resumed_cpus, "seen")
        return [
            {name: (saved[name], loaded[name]) for name in saved}
            for saved, loaded in zip(before, after, strict=True)
        ]

    def _cell(self, source: str, ranks: int, cpus: int, out: str) -> list[SeenByCase]:
        outcome = self._notebook.run(source, f"--cpus {cpus} --out {out} --timeout 200", gpus=ranks)
        assert outcome.error is None, f"{ranks} ranks, --cpus {cpus}: {outcome.shown}"
        found: list[SeenByCase] = self._notebook.shell.user_ns["seen"]
        return found


@functools.cache
def expected(module: ModuleType, name: str, rank: int, ranks: int, is_resumed: bool) -> object:
    """Return the result that a case should have on a rank, derived from a local DataLoader.

    If `is_resumed`, return two results: that of the first cell, and that of a second cell, which
    loads the state of the first cell.
    """
    local, script, options = _local(module, name)
    if not local.loader.num_workers:
        local, *_ = _made(module, name)
    with contextlib.closing(local), unfiltered():
        first = Share(local, rank, ranks, **options)
        seen = described.seen_of(script, first)
        if not is_resumed:
            return seen
        second = Share(local, rank, ranks, **options)
        second.load_state_dict(first.state_dict())
        return seen, described.seen_of(described.two_epochs, second)


@functools.lru_cache(1)
def _local(module: ModuleType, name: str) -> tuple[Local, Script, dict[str, str]]:
    """Return the local loader, script and options of a case. The last case is cached.

    If the loader has workers, all ranks can share its batches, because a worker sends each batch in
    new memory. Only one case is cached, because each tensor from a worker keeps a file open.
    """
    return _made(module, name)


def _made(module: ModuleType, name: str) -> tuple[Local, Script, dict[str, str]]:
    with unfiltered():
        loader, script, options = described.parts(getattr(module, name)())
    return Local(loader), script, options


def differences(seen: Seen, module: ModuleType, name: str) -> list[str]:
    """Return a description of each rank whose results differ from the expected ones."""
    found = []
    for setting, ranks in seen.of(module, name).items():
        for rank, mine in enumerate(ranks):
            shall = expected(module, name, rank, setting.ranks, setting.resumed_cpus is not None)
            if mine[name] != shall:
                found.append(f"{setting}, rank {rank}:\n  saw   {mine[name]}\n  shall {shall}")
    return found
