"""Tests that the package uses only those private names of libraries that ARCHITECTURE.md lists."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LISTED = {
    "capture/culprit.py": {"_buffers", "_modules", "_parameters", "torch._dynamo.eval_frame"},
    "capture/plain.py": {"_backward_hooks", "_metadata"},
    "capture/reducers.py": {
        *("_cdata", "_iterator", "_member_type_", "_sort_order_", "_untyped_storage"),
        *("_backward_hooks", "_post_accumulate_grad_hooks"),
    },
    "data/accelerated.py": {"_add_dataloader", "_dataloaders"},
    "data/epoch.py": {"torch.utils.data._utils.pin_memory"},
    "data/dataset.py": {"torch.utils.data._utils", "_worker_info"},
    "data/encode.py": {"_indices", "_values"},
    "store/libraries.py": {"torch.jit._script"},
    "store/redirect.py": {
        *("_C", "_NormalAccessor", "_StringGlobber", "_TemporaryFileCloser", "_builtin_open"),
        *("_file_openers", "_io", "numpy.lib._datasource"),
    },
    "host/forkserver.py": {"_fd", "_pid", "_registry", "_resource_tracker", "torch._dynamo"},
    "federation/flower.py": {"_main"},
    "host/profile.py": {"_profiler_enabled"},
    "host/heartbeat.py": {
        *("_C", "_distributed_c10d", "_dump_fr_trace_json", "_dump_nccl_trace_json"),
    },
    "host/rank.py": {"_shutdown", "_run_exitfuncs", "_logging", "_init_logs"},
    "host/results.py": {"torch.distributed._tensor"},
    "host/shell.py": {"hydra._internal.utils"},
    "host/stacks.py": {"_launch"},
}

OWN = {
    "_storages",
    # attributes of `Attempt` and `HostRun`, used by their subclasses in host/host_session.py
    *(
        "_emit",
        "_end_steps",
        "_files",
        "_poll_ends",
        "_on_message",
        "_host_address",
        "_report_started",
    ),
    *("_check", "_path_prefix", "_rendezvous", "_share", "_spec", "_start_ranks"),
    "_acquire_hosts",  # of `Share`, used by its subclasses in pool/runs.py
    "_numbers",  # of the picklers in data/encode.py
    "_storage",  # of a buffer that capture/reducers.py makes
}
"""Private attributes that one class of this package uses of another class of this package."""

DOCUMENTED = {
    *("_exit", "_getframe", "_current_frames", "_replace", "_make", "_fields", "_asdict"),
    *("_ih", "_oh", "_dh", "_render_traceback_", "_name_", "_value_"),
}
"""Names with an underscore that Python or IPython documents."""

GONE = {
    "threading._shutdown": "host/rank.py: find another way to join all threads but daemon threads",
    "atexit._run_exitfuncs": "Python may do it itself for forks now: see python/cpython#83856",
    "weakref.finalize._registry": "host/forkserver.py: find what weakref.finalize keeps them in",
    "multiprocessing.resource_tracker._resource_tracker": "host/forkserver.py: find it",
    "torch.utils.data._utils.worker._worker_info": "find what get_worker_info() reads now",
    "torch.utils.data._utils.pin_memory.pin_memory": "data/epoch.py: find its new place",
    "torch.jit._script": "store/libraries.py: find where torch.jit opens files",
    "torch._dynamo.eval_frame": "capture/culprit.py: find where torch.compile's functions are",
    "torch.autograd._profiler_enabled": "host/profile.py: find what says that a profiler runs",
    "torch.Tensor._backward_hooks": "capture: find where torch keeps a tensor's hooks",
    "torch.Tensor._post_accumulate_grad_hooks": "capture: find where torch keeps these hooks",
    "accelerate.state.GradientState._add_dataloader": "data/accelerated.py: see accelerate",
    "bz2._builtin_open": "store/redirect.py: see how bz2 and lzma open files now",
    "torch.UntypedStorage._cdata": "capture/reducers.py needs another identity of a storage",
    "torch.Tensor._indices": "data/encode.py: see how torch pickles sparse tensors",
    "torch.Tensor._values": "data/encode.py: see how torch pickles sparse tensors",
    "torch._C.PyTorchFileWriter": "store/redirect.py: find what torch.save writes with",
    "torch._C._distributed_c10d._dump_fr_trace_json": "host/heartbeat.py: find the new recorder",
    "numpy.lib._datasource._file_openers": "store/redirect.py: see how numpy.savetxt opens now",
    "torch._logging._init_logs": "host/rank.py: see how torch reads TORCH_LOGS now",
    "tempfile._TemporaryFileCloser": "store/redirect.py: see how tempfile unlinks now",
    "IPython.core.interactiveshell.InteractiveShell._showtraceback": "host/shell.py: see IPython",
    "distributed.batched.time": "host/agent_worker.py: see by what clock BatchedSend waits",
}


def test_no_private_name_is_used_that_is_not_listed() -> None:
    found = {
        str(path.relative_to(ROOT / "taas_magic")): names
        for path in sorted((ROOT / "taas_magic").rglob("*.py"))
        if (names := set(private_names(ast.parse(path.read_text()))))
    }
    assert found == LISTED, "ARCHITECTURE.md and this test list them, each with its reason"
    page = (ROOT / "ARCHITECTURE.md").read_text().partition("## Private parts")[2]
    listed = [name.rpartition(".")[2] for names in LISTED.values() for name in names]
    assert [name for name in listed if name not in page] == []


@pytest.mark.parametrize("name", GONE)
def test_listed_private_names_still_exist(name: str) -> None:
    assert exists(name), f"{name} has gone: {GONE[name]}"
    page = (ROOT / "ARCHITECTURE.md").read_text().partition("## Private parts")[2]
    assert name.rpartition(".")[2] in page


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of other modules that a module uses.

    A module uses a name as an attribute, in an import, or as a string, such as the argument of
    `getattr`.
    """
    known = OWN | DOCUMENTED | set(_own_names(tree))
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("taas_magic"):
            yield from _imported(node)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            overridden = ast.unparse(node.value) == "super()" and node.attr not in OWN
            if overridden or node.attr not in known:
                yield node.attr
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            text = str(node.value)
            if _NAME.fullmatch(text) and text not in known:
                yield text


_NAME = re.compile(r"([a-zA-Z]\w*\.)*_(?!_|taas)\w+[a-zA-Z]\w*(\.\w+)*(?<!\.py)(?<!__)")
"""Pattern of a name with a private part, such as "torch._C".

Private parts that begin with "_taas" are left out, because this package defines them.
"""


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines or assigns, also to attributes of `self` or `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif name := getattr(node, "name", None):
            yield name


def _imported(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    if any(_is_private(part) for part in module.split(".")):
        yield module
    yield from (f"{module}.{alias.name}" for alias in node.names if _is_private(alias.name))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of a module."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
