"""Tests of pickling values into bytes and buffers, of storing them in a file, and of loading."""

import math
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.backends.cudnn as cudnn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from taas_magic.capture import pickling, reducers
from taas_magic.errors import CaptureError
from taas_magic.messages import Failure

REPOSITORY = Path(__file__).parents[2]


def through_a_file(value: Any, path: Path) -> Any:
    pickling.write_archive(path, pickling.dump(value))
    archive = pickling.read_archive(path)
    path.unlink()
    return pickling.loads(archive.stream(), archive.buffers)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values"


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_tensors_of_any_dtype_and_shape(path: Path, dtype: torch.dtype, shape: Any) -> None:
    value = torch.ones(shape).to(dtype)
    back = through_a_file(value, path)
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert torch.equal(back, value)


@pytest.mark.filterwarnings("ignore")  # torch warns that some layouts are beta or deprecated
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.arange(6).reshape(2, 3).t(), id="transposed"),
        pytest.param(lambda: torch.arange(6)[1::2], id="strided"),
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.eye(3).to_sparse_csr(), id="csr"),
        pytest.param(lambda: torch.ones(2, requires_grad=True), id="leaf"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), id="quantized"
        ),
    ],
)
def test_tensors_of_any_layout(path: Path, make: Callable[[], torch.Tensor]) -> None:
    value = make()
    back = through_a_file(value, path)
    assert (back.layout, back.requires_grad) == (value.layout, value.requires_grad)
    if value.layout == torch.strided:
        assert back.stride() == value.stride()
    plain = [t.dequantize() if t.is_quantized else t.to_dense() for t in (back, value)]
    assert torch.equal(*plain)


def test_a_meta_tensor(path: Path) -> None:
    assert through_a_file(torch.zeros(2, device="meta"), path).device.type == "meta"


def test_parameters_and_views_keep_one_storage(path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    base = torch.zeros(8)
    values = [net, net.state_dict(), base[4:], base.view(torch.int32)]
    pickled = pickling.dump(values)
    back_net, state, tail, bits = through_a_file(values, path)
    state["0.weight"].fill_(2)
    tail.fill_(1)
    assert back_net[0].weight.tolist() == [[2, 2], [2, 2]]
    assert isinstance(back_net[0].weight, torch.nn.Parameter)
    assert bits.count_nonzero() == 4
    assert len(pickled.buffers) == len(net.state_dict()) + 1


class Scaled(torch.nn.Parameter):
    """Subclass of `torch.nn.Parameter`, as a user may write it."""


class Info(np.ndarray[Any, np.dtype[Any]]):
    """Subclass of `ndarray` with an attribute, as in numpy's guide to subclasses."""


def test_users_kinds_of_parameters_and_arrays_keep_class_and_attributes(path: Path) -> None:
    weight, picture = Scaled(torch.ones(2)), np.arange(6.0).reshape(2, 3).view(Info)
    vars(weight)["rate"], vars(picture)["unit"] = 0.5, "cm"
    [back, again], shown, part = through_a_file([[weight, weight], picture, picture.T], path)
    assert type(back) is Scaled and back.requires_grad and back is again
    assert type(shown) is Info and shown.tolist() == picture.tolist()
    assert (vars(back), vars(shown)) == ({"rate": 0.5}, {"unit": "cm"})
    assert type(part) is Info and part.tolist() == picture.T.tolist()


def test_a_module_may_have_tensors_and_arrays_as_attributes(path: Path) -> None:
    net: Any = torch.nn.Linear(2, 1)
    net.anchors, net.table = torch.arange(3), np.arange(3)
    net.my_hooks = torch.ones(2)
    back = through_a_file(net, path)
    assert back.anchors.tolist() == back.table.tolist() == [0, 1, 2]
    assert back.my_hooks.tolist() == [1, 1]


class Whole(torch.Tensor):
    """Tensor whose class decides how its state is pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _whole, (self.tolist(),), {"unit": self.unit}

    unit = "cm"


def _whole(values: list[float]) -> Whole:
    return torch.tensor(values, requires_grad=True).as_subclass(Whole)


@pytest.mark.filterwarnings("error")
def test_hooks_of_tensors_are_left_out_of_results(path: Path) -> None:
    weight: Any = torch.ones(1, requires_grad=True)
    own: Any = _whole([1.0]).detach().requires_grad_()
    own.unit = "mm"
    for each in (weight, own):
        each.register_hook(lambda grad: grad * 2)

    def reduced(keeps_hooks: bool, value: torch.Tensor) -> Any:
        rules = reducers.torch_reducers({}, keeps_hooks=keeps_hooks)
        return rules[torch.Tensor](value)  # type: ignore[misc]

    rebuild, args, hooks, _, _, fill = reduced(True, weight)
    copy = rebuild(*args)
    fill(copy, hooks)
    copy.sum().backward()
    assert copy.grad.item() == 2
    with pytest.warns(UserWarning, match="will not be serialized"):
        assert reduced(False, weight) is NotImplemented
    assert reduced(True, own)[2] == {"unit": "mm"}  # the hook is left out, but not the state


class Symmetric(torch.nn.Module):
    """Parametrization that makes a matrix symmetric."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.triu() + values.triu(1).T


def test_modules_with_parametrizations(path: Path) -> None:
    lines = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    net: Any = torch.nn.Sequential(*lines, torch.nn.Conv1d(3, 2, 1))
    parametrizations.weight_norm(net[0])
    parametrizations.orthogonal(net[1])
    parametrize.register_parametrization(net[2], "weight", Symmetric())
    parametrize.register_parametrization(net[2], "weight", torch.nn.Identity())
    parametrizations.spectral_norm(net[3])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    back, first, stepping = through_a_file([net, net[0], optimizer], path)
    assert first is back[0] and isinstance(first, torch.nn.Linear) and str(back) == str(net)
    assert list(back.state_dict()) == list(net.state_dict())
    names, parameters = zip(*back.named_parameters(), strict=True)
    assert list(names) == [name for name, _ in net.named_parameters()]
    assert list(map(id, stepping.param_groups[0]["params"])) == list(map(id, parameters))
    values = torch.rand(3, 3)
    for one in (net, back):
        one.eval()
        one(values).sum().backward()
    stepping.step()
    optimizer.step()
    assert torch.equal(net(values), back(values))
    parametrize.remove_parametrizations(back[2], "weight")
    assert type(back[2]) is torch.nn.Linear and torch.equal(back[2].weight, net[2].weight)


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
def test_recurrent_modules_with_parametrizations(path: Path, kind: Any) -> None:
    net = kind(2, 3, num_layers=2, bidirectional=True)
    parametrizations.weight_norm(net, "weight_hh_l0")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    back, stepping = through_a_file([net, optimizer], path)
    values = torch.rand(4, 2)
    before = net(values)[0]
    for one, its in (net, optimizer), (back, stepping):
        one(values)[0].sum().backward()
        its.step()
    assert torch.equal(net(values)[0], back(values)[0])
    assert not torch.equal(net(values)[0], before)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_modules_of_torch_jit_share_their_tensors(path: Path) -> None:
    jit: Any = torch.jit
    plain: Any = torch.nn.ModuleDict({"tied": torch.nn.Linear(2, 2), "norm": torch.nn.Tanh()})
    net: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), plain["tied"], torch.nn.BatchNorm1d(2))
    net[0].weight = net[1].weight
    net[2].running_var = net[2].running_mean
    whole = torch.nn.Sequential(jit.script(net), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    parts = whole, optimizer, plain, dict(whole.named_buffers(remove_duplicate=False))
    back, stepping, module, buffers = through_a_file(parts, path)
    parameters = dict(back.named_parameters(remove_duplicate=False))
    held = [id(each) for each in stepping.param_groups[0]["params"]]
    assert held == list(map(id, back.parameters()))
    assert parameters["0.0.weight"] is parameters["0.1.weight"] is module["tied"].weight
    own = dict(back.named_buffers(remove_duplicate=False))
    assert {name: id(each) for name, each in own.items()} == {n: id(b) for n, b in buffers.items()}
    assert own["0.2.running_var"] is own["0.2.running_mean"]
    values = torch.rand(4, 2)
    before = back(values)
    before.sum().backward()
    stepping.step()
    assert not torch.equal(before, back(values))


def test_large_data_is_stored_outside_the_pickle() -> None:
    values = {"tensor": torch.ones(1 << 18), "array": np.ones(1 << 18)}
    pickled = pickling.dump(values)
    assert len(pickled.data) < 2000
    assert pickled.size_bytes > 3 << 20
    assert pickled.buffers[0].raw().obj is not None


def test_values_are_writable_aligned_and_the_file_does_not_change(path: Path) -> None:
    pickling.write_archive(path, pickling.dump([np.ones(3), torch.ones(5), np.arange(4)]))
    before = path.read_bytes()
    archive = pickling.read_archive(path)
    array, tensor, numbers = pickling.loads(archive.stream(), archive.buffers)
    array[:], tensor[:] = 7, 8
    numbers += 1
    assert path.read_bytes() == before
    assert [t % 64 for t in (array.ctypes.data, tensor.data_ptr(), numbers.ctypes.data)] == [0] * 3


def test_generators_continue_where_they_were(path: Path) -> None:
    for make, draw in (
        (torch.Generator, lambda g: torch.rand(3, generator=g).tolist()),
        (lambda: np.random.default_rng(1), lambda g: g.random(3).tolist()),
    ):
        generator = make()
        draw(generator)
        back = through_a_file(generator, path)
        assert draw(back) == draw(generator)


def test_a_cuda_tensor_is_loaded_to_the_cpu_if_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    storage = reducers.rebuild_untyped(bytearray(torch.ones(2).numpy().tobytes()), "cuda")
    typed = reducers.rebuild_typed(storage, torch.float32)
    assert torch.tensor(typed).tolist() == [1, 1]
    assert reducers.target_device("cuda") == "cpu"


def test_a_rank_loads_to_its_gpu_and_a_kernel_only_if_it_uses_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert reducers.target_device("cuda") == "cuda:1"
    assert reducers.target_device("cpu") == "cpu"
    monkeypatch.delenv("LOCAL_RANK")
    assert reducers.target_device("cuda") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert reducers.target_device("cuda") == "cuda:1"
    assert reducers.target_device("cpu") == "cpu"


@pytest.mark.filterwarnings("error")
def test_a_learning_rate_scheduler_continues_without_a_warning(path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    arrived, its_scheduler = through_a_file((optimizer, scheduler), path)
    assert its_scheduler.optimizer is arrived and arrived.param_groups[0]["lr"] == 0.1
    for _ in range(3):
        for one, its in (optimizer, scheduler), (arrived, its_scheduler):
            one.step()
            its.step()
    assert arrived.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class Clipped(torch.optim.SGD):
    """Optimizer that limits the norm of gradients; its class has the default, as public ones do."""

    max_norm: float | None = None

    def step(self, closure: Any = None) -> Any:
        if self.max_norm:
            for group in self.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], self.max_norm)
        return super().step(closure)


def test_optimizers_keep_attributes_hooks_and_schedulers(path: Path) -> None:
    net, steps = torch.nn.Linear(2, 1), list[int]()
    clipped, lbfgs = Clipped(net.parameters(), lr=1.0), torch.optim.LBFGS(net.parameters())
    clipped.max_norm = 0.1
    lbfgs.register_step_post_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(clipped, 1)
    back = through_a_file((net, clipped, lbfgs, scheduler, steps), path)
    net, clipped, lbfgs, scheduler, steps = back
    before = net.weight.detach().clone()
    (10 * net(torch.ones(1, 2))).sum().backward()
    clipped.step()
    scheduler.step()
    assert (net.weight.detach() - before).norm() < 0.11
    assert scheduler.optimizer is clipped
    lbfgs.step(lambda: net(torch.ones(1, 2)).sum())
    assert steps == [1]


@pytest.mark.process
def test_a_loader_is_pickled_without_its_running_iterator(path: Path) -> None:
    loader = DataLoader(
        TensorDataset(torch.zeros(4)),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    back = through_a_file(loader, path)
    assert isinstance(iterator, _MultiProcessingDataLoaderIter)
    iterator._shutdown_workers()
    assert back._iterator is None
    assert len(back) == 4


def test_the_file_is_private_and_appears_whole(path: Path) -> None:
    pickling.write_archive(path, pickling.dump(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    broken = pickling.Pickled(b"", [pickle.PickleBuffer(memoryview(bytes(4))[::2])])
    with pytest.raises(BufferError):
        pickling.write_archive(path, broken)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("keep", [0, 5, 20, 60, -1])
def test_a_damaged_file_is_named(path: Path, keep: int) -> None:
    pickling.write_archive(path, pickling.dump(np.ones(100)), Failure())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CaptureError, match=str(path)):
        pickling.read_archive(path)


def test_another_kind_of_file_is_named(path: Path) -> None:
    path.write_bytes(bytes(100))
    with pytest.raises(CaptureError, match="is incomplete"):
        pickling.read_archive(path)


def test_functions_find_the_namespace_they_are_loaded_into() -> None:
    notebook: dict[str, Any] = {"__name__": "__main__", "x": 1}
    exec("def f(): return x\ndef g(): return f() + x", notebook)
    pickled = pickling.dump([notebook["f"], notebook["g"]], namespace=notebook)
    rank: dict[str, Any] = {"x": 5, "f": lambda: 5}
    f, g = pickling.loads(pickled.data, pickled.buffers, namespace=rank)
    assert f.__globals__ is rank
    assert [f(), g()] == [5, 10]
    assert rank["x"] == 5
    rank["f"] = lambda: 100
    assert g() == 105


def test_a_module_with_its_own_class_is_pickled_by_name() -> None:
    pickled = pickling.dump([cudnn, math], namespace={})
    first, second = pickling.loads(pickled.data, pickled.buffers)
    assert first is cudnn and second is math


def test_a_refusal_names_the_result() -> None:
    with pytest.raises(CaptureError, match=r"`model\['lock'\]` is a _thread.lock"):
        pickling.dump({"lock": threading.Lock()}, name="model")


def test_an_error_of_the_users_code_is_in_the_message(path: Path) -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("not today")

    with pytest.raises(CaptureError, match=r"`value\[0\]`.*ValueError: not today"):
        pickling.dump([Stubborn()])


RANK = """
import sys, types
from pathlib import Path
from taas_magic.capture import pickling

main = types.ModuleType("__main__")
sys.modules["__main__"] = main
archive = pickling.read_archive(Path(sys.argv[1]))
main.__dict__.update(pickling.loads(archive.stream(), archive.buffers, namespace=main.__dict__))
exec(sys.argv[2], main.__dict__)
out = {name: main.__dict__[name] for name in sys.argv[3:]}
pickling.write_archive(Path(sys.argv[1] + ".result"), pickling.dump(out))
"""


def back_from_a_rank(notebook: dict[str, Any], path: Path, cell: str, *names: str) -> Any:
    values = {k: v for k, v in notebook.items() if not k.startswith("__")}
    pickling.write_archive(path, pickling.dump(values, namespace=notebook))
    subprocess.run(
        [sys.executable, "-c", RANK, str(path), textwrap.dedent(cell), *names],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    archive = pickling.read_archive(path.with_name(path.name + ".result"))
    return pickling.loads(archive.stream(), archive.buffers)


def test_results_have_the_classes_of_the_notebook(path: Path) -> None:
    notebook: dict[str, Any] = {"__name__": "__main__"}
    source = """
        import enum, torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def forward(self, x): return self.layer(x) * scale
        as_member = getattr(enum, "member", lambda function: (function,))  # new in Python 3.11
        class Mode(enum.Enum):
            FAST = 1
            OWN = as_member(lambda: scale)
            NONE = float("nan")
        net, scale = Net(), 1
    """
    exec(textwrap.dedent(source), notebook)
    forward = notebook["Net"].forward
    cell = """
        scale = 100
        net.layer.weight.data.fill_(3)
        net.layer.bias.data.fill_(0)
        modes = [*Mode]
    """
    result = back_from_a_rank(notebook, path, cell, "net", "modes")
    assert type(result["net"]) is notebook["Net"]
    assert notebook["Net"].forward is forward
    assert all(one is own for one, own in zip(result["modes"], notebook["Mode"], strict=True))
    assert result["net"](torch.ones(2)).item() == 6
    assert notebook["scale"] == 1


def test_a_result_made_by_the_cells_own_definitions(path: Path) -> None:
    notebook: dict[str, Any] = {"__name__": "__main__", "x": 1}
    cell = """
        x = 10
        class Made:
            def get(self): return x
        def read(): return x
        made = Made()
    """
    result = back_from_a_rank(notebook, path, cell, "made", "read")
    assert [result["made"].get(), result["read"]()] == [10, 10]
    assert notebook["x"] == 1
    assert result["read"].__globals__ is not notebook


def test_a_result_whose_class_is_gone_has_a_clear_error() -> None:

    with pytest.raises(CaptureError, match="`Net`"):
        reducers._known_class("no such id", "Net")


def test_functions_keep_the_name_of_their_file(path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def outer():\n    return lambda: 1", "Cell In[7]", "exec"), names)
    outer = through_a_file(names["outer"], path)
    assert {outer.__code__.co_filename, outer().__code__.co_filename} == {"Cell In[7]"}
