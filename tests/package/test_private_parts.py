"""Tests that the package uses only those private names of libraries that ARCHITECTURE.md lists."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LISTED = {
    "capture/reducers.py": {"_cdata", "_untyped_storage"},
    "data/accelerated.py": {"_add_dataloader", "_dataloaders"},
    "data/epoch.py": {"torch.utils.data._utils.pin_memory"},
    "data/dataset.py": {"torch.utils.data._utils"},
    "data/encode.py": {"_indices", "_values"},
    "store/redirect.py": {"_C"},
    "host/forkserver.py": {"_registry", "_resource_tracker"},
    "federation/flower.py": {"_main"},
    "host/profile.py": {"_profiler_enabled"},
    "host/heartbeat.py": {"_C", "_distributed_c10d"},
    "host/rank.py": {"_shutdown", "_run_exitfuncs", "_logging", "_init_logs"},
}

OWN = {
    "_storages",
    # of `Attempt` and `HostRun`; host/host_session.py has their subclasses for sessions
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
    "_acquire_hosts",  # of `Share`; pool/runs.py has its subclasses
}
"""Private attributes that one class of this package uses of another class of this package."""

DOCUMENTED = {"_exit", "_getframe", "_current_frames", "_replace", "_make", "_fields", "_asdict"}
"""Names with an underscore that Python documents."""

GONE = {
    "threading._shutdown": "host/rank.py: find another way to join all threads but daemon threads",
    "atexit._run_exitfuncs": "Python may do it itself for forks now: see python/cpython#83856",
    "weakref.finalize._registry": "host/forkserver.py: find what weakref.finalize keeps them in",
    "multiprocessing.resource_tracker._resource_tracker": "host/forkserver.py: find it",
    "torch.utils.data._utils.worker._worker_info": "find what get_worker_info() reads now",
    "torch.utils.data._utils.pin_memory.pin_memory": "data/epoch.py: find its new place",
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


@pytest.mark.parametrize("name", GONE)
def test_a_private_name_is_still_there(name: str) -> None:
    assert exists(name), f"{name} has gone: {GONE[name]}"
    assert name.rpartition(".")[2] in (ROOT / "ARCHITECTURE.md").read_text()


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of other modules that a module uses as attributes or imports."""
    own = set(OWN)
    own |= {node.name for node in ast.walk(tree) if hasattr(node, "name") and node.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("taas_magic"):
            yield from _imported(node)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            overridden = ast.unparse(node.value) == "super()" and node.attr not in OWN
            if overridden or (node.attr not in own and node.attr not in DOCUMENTED):
                yield node.attr


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
