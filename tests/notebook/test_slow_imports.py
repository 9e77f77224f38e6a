"""Slow imports: they delay only cells that need them, and a waiting cell names the import."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.eventually import HUNG_S
from tests.frontend import Scene
from tests.rig.pools import settings_in
from tests.rig.slow_cells import CELL, FARM, LOADER, POOLS, TRAIN

GATES = """
import importlib.abc, os, sys, time

class Gates(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "torch._dynamo"):
            while not os.path.exists(os.path.join({folder!r}, name)):
                time.sleep(0.05)

sys.meta_path.insert(0, Gates())
"""

ONCE = """
import importlib.abc, importlib.machinery, os, sys, time

begun, gate = {begun!r}, {gate!r}

class Once(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        if os.path.exists(begun):
            raise ImportError("cannot load module more than once per process")
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            open(begun, "x").close()
            while not os.path.exists(gate):
                time.sleep(0.05)
            execute(module)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Once())
"""
"""sitecustomize.py that holds the first import of a module, and refuses another one, as numpy."""

REGISTERS = """
import taas, torch
loader = taas.register(torch.utils.data.DataLoader([1, 2]))
"""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.mark.nightly
def test_cells_a_loader_and_a_farm_work_while_imports_take_for_ever(scene: Scene) -> None:
    gates = scene.folder / "gates"
    gates.mkdir()
    (gates / "sitecustomize.py").write_text(GATES.format(folder=str(gates)))
    (scene.folder / "config").mkdir()
    settings_in(scene.folder / "config", POOLS)
    paths = os.pathsep.join([str(gates), scene.environ()["PYTHONPATH"]])
    with scene.kernel(PYTHONPATH=paths) as frontend:
        first = frontend.send(CELL.format(number=0))
        frontend.wait(lambda: " imports torch, 5 s" in frontend.text(first))
        assert first not in frontend.replies
        (gates / "torch").touch()
        assert frontend.finish(first)["status"] == "ok"
        for number in (1, 2, 3):  # the import of torch._dynamo never ends
            request = frontend.run(CELL.format(number=number))
            assert f"cell {number}" in frontend.text(request)
        frontend.run(LOADER)
        assert "batches 4" in frontend.text(frontend.run(TRAIN))
        farm = frontend.send(FARM.replace("sites", "local"))
        assert frontend.finish(farm, HUNG_S)["status"] == "ok"
        assert "jobs [0, 1, 4, 9, 16]" in frontend.text(farm)


@pytest.mark.parametrize(
    ("module", "code", "shown"),
    [
        ("notebook.launch", "%taas sessions", "no sessions"),
        ("notebook.launch", "%%taas --gpus 1 --session it\nprint('works')", "works"),
        ("notebook.launch", "import taas\ntaas.run(print, 'works', gpus=1)", "works"),
        ("data.dataset", REGISTERS, ""),
    ],
)
def test_an_interrupt_leaves_the_imports_of_a_first_cell_whole(
    scene: Scene, module: str, code: str, shown: str
) -> None:
    begun, gate = scene.folder / "begun", scene.folder / "gate"
    hook = ONCE.format(module=f"taas_magic.{module}", begun=str(begun), gate=str(gate))
    (scene.folder / "sitecustomize.py").write_text(hook)
    paths = os.pathsep.join([str(scene.folder), scene.environ()["PYTHONPATH"]])
    with scene.kernel(PYTHONPATH=paths, TAAS_WARM="0") as frontend:
        first = frontend.send(code)
        frontend.wait(begun.exists)
        frontend.manager.interrupt_kernel()
        assert frontend.finish(first)["ename"] == "KeyboardInterrupt"
        gate.touch()
        assert shown in frontend.text(frontend.run(code))
        if code != REGISTERS:
            frontend.run("import sys; assert 'torch' not in sys.modules")
