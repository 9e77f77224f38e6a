"""Libraries with ways of their own to a file: torch's C++ writer, numpy's maps, temporary files."""

import functools
import importlib.util
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from taas_magic.store import publish
from taas_magic.store.redirect import writes
from taas_magic.store.redirect.opens import writable
from taas_magic.store.redirect.views import StoreView, Watched, lead


def install(view: StoreView) -> None:
    """Leads them all by a rank's view; imports torch and numpy, which a rank has in memory."""
    _lead_torch_writer(view)
    _lead_temporary_files()
    if isinstance(view, Watched):
        _save_atomically(view)
    if view.diverts:
        _map_privately(view)
        # Entry by entry, it would stumble over what rank 0 removes at the same time.
        setattr(shutil, "rmtree", writes.removes_folder(view, shutil.rmtree))  # noqa: B010


def _lead_torch_writer(view: StoreView) -> None:
    """torch.save's C++ writer, whose errors do not name the path."""
    import torch

    real: Any = torch._C.PyTorchFileWriter
    target = functools.partial(writable, view)

    class PyTorchFileWriter(real):
        def __init__(self, file: Any, *args: Any, **kw: Any) -> None:
            led = file
            if isinstance(file, (str, os.PathLike)):
                led, _ = lead(view, target, file, follow=True)
            try:
                super().__init__(led, *args, **kw)
            except RuntimeError as error:
                raise RuntimeError(f"torch cannot write {file}: {error}") from error

    setattr(torch._C, "PyTorchFileWriter", PyTorchFileWriter)  # noqa: B010


def _lead_temporary_files() -> None:
    """tempfile took `unlink` when it was imported, as the default of a parameter."""
    closer: Any = getattr(tempfile, "_TemporaryFileCloser", None)
    for method in (getattr(closer, name, None) for name in ("close", "cleanup")):
        if method is not None:
            real, defaults = inspect.unwrap(os.unlink), method.__defaults__ or ()
            method.__defaults__ = tuple(os.unlink if it is real else it for it in defaults)


def _save_atomically(view: StoreView) -> None:
    """Makes rank 0's `torch.save` into the store `taas.save`: no kill leaves half a checkpoint."""
    import torch

    real = torch.save

    @functools.wraps(real)
    def save(obj: object, f: Any, *args: Any, **kw: Any) -> None:
        is_path = isinstance(f, (str, os.PathLike))
        write: Callable[..., None] = publish.save if is_path and view.locate(f) else real
        write(obj, f, *args, **kw)

    torch.save = torch.serialization.save = save


def _map_privately(view: StoreView) -> None:
    """Has a file of the store that a rank maps to change it (numpy's default) mapped privately.

    What is changed in a private map is seen by this rank alone, and nothing is copied for it.
    """
    if importlib.util.find_spec("numpy") is None:  # torch does without
        return
    import numpy

    real: Any = numpy.memmap.__new__
    signature = inspect.signature(real)

    @functools.wraps(real)
    def new(*args: Any, **kw: Any) -> Any:
        asked = signature.bind(*args, **kw)
        asked.apply_defaults()
        if asked.arguments["mode"] in ("r+", "readwrite"):
            asked.arguments["mode"] = _map_mode(view, asked.arguments["filename"])
        return real(*asked.args, **asked.kwargs)

    setattr(numpy.memmap, "__new__", staticmethod(new))  # noqa: B010


def _map_mode(view: StoreView, file: Any) -> str:
    if not isinstance(file, (str, os.PathLike)):
        return "r+"
    with view.plain():
        place = view.locate(file)
        is_the_stores = place is not None and os.path.exists(place) and not view.own(place)
    return "c" if is_the_stores else "r+"
