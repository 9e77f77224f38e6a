"""Copy changed settings of the kernel's process to the ranks.

A setting is copied if the notebook has changed the setting from its default; warning filters are
always copied. docs/capture.md lists the settings. All values are sent as plain data, so a rank need
not import a library to load these values. Ranks import matplotlib only if the notebook has changed
rcParams of matplotlib.
"""

import importlib
import importlib.util
import itertools
import logging
import multiprocessing
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import PurePath
from typing import Any, NamedTuple

from taas_magic.capture import pickling
from taas_magic.capture.reducers import stream_name, target_device
from taas_magic.errors import CaptureError
from taas_magic.late_imports import module_if_imported

State = dict[str, Any]

_SEED_LIMIT = 1 << 32
"""Torch seeds below this number count as chosen by the user, and are copied to the ranks.

Torch itself chooses random 64-bit seeds. Such a seed is almost always larger than this number.
"""

_DEFAULT_RECURSION_LIMIT = 1000
_NUMPY_PRINTS = {
    "edgeitems": 3,
    "threshold": 1000,
    "floatmode": "maxprec",
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "legacy": False,
}
_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_INTERACTIVITY = "last_expr"
_TRACEBACK_MODE = "Context"
_FIGURES = {
    "figure_formats": {"png"},
    "print_figure_kwargs": {"bbox_inches": "tight"},
    "close_figures": True,
}
"""Defaults of IPython's settings for matplotlib's figures, `%config InlineBackend`."""

_TORCH = {
    "dtype": "float32",
    "device": "cpu",
    "matmul_precision": "highest",
    "deterministic": 0,
    "grad": True,
    "anomaly": False,
    "cudnn_benchmark": False,
    "cudnn_deterministic": False,
    "sharing": "file_descriptor",
}
_DEFAULTS: State = {
    "start_method": multiprocessing.get_all_start_methods()[0],
    "numpy": {"print": _NUMPY_PRINTS, "error": _NUMPY_ERRORS},
    "ipython": {
        "interactivity": _INTERACTIVITY,
        "traceback": _TRACEBACK_MODE,
        "figures": _FIGURES,
    },
    "torch": _TORCH,
}
"""Defaults of settings that `collect` leaves out."""

_RC_OF_THE_PROCESS = {"backend", "backend_fallback", "interactive"}
"""rcParams of matplotlib that are not copied, because each process must choose its own value."""


def collect() -> State:
    """Return the settings of this process (the kernel) that differ from the defaults.

    The result also has all warning filters, changed or not. This function imports no library.
    """
    return {name: found for name, part in _SETTING_KINDS.items() if (found := part.collect())}


def changes(before: State, now: State) -> State:
    """Return the settings in `now` that differ from the settings in `before`.

    The kernel sends only these settings to the ranks of a session. If the kernel sent an unchanged
    seed again, the ranks would draw the same random numbers again.

    If `now` lacks a setting that `before` has, the notebook has set it back to its default. The
    result then has the default. Exceptions are settings without a known default, such as a seed.

    Of the warning filters, the result has only those that the notebook has added, or has moved to
    the front. So a filter that a cell has added in the ranks stays before older ones of the
    notebook.
    """
    loggers = before.get("logging", {}).get("loggers", {})
    defaults = {
        **_DEFAULTS,
        "logging": {
            "disable": logging.NOTSET,
            "loggers": {name: _default_logger(name, one.is_own) for name, one in loggers.items()},
        },
        "matplotlib": _pickled_rc_defaults(before.get("matplotlib", ())),
    }
    changed = _differences(before, now, defaults)
    if "warnings" in changed:
        changed["warnings"] = _added_filters(before.get("warnings", ()), now["warnings"])
    return changed


def _differences(before: State, now: State, defaults: State) -> State:
    """Return the values in `now` that differ from those in `before`.

    For each name that a dict lacks, the value in `defaults` counts. If this value is a dict, the
    settings in it are compared one by one. But a dict in `_FIGURES` is one setting.
    """
    found: State = {}
    for name in {**before, **now}:
        default = defaults.get(name)
        old, new = before.get(name, default), now.get(name, default)
        if isinstance(default, dict) and name not in _FIGURES:
            if changed := _differences(before.get(name, {}), now.get(name, {}), default):
                found[name] = changed
        elif new is not None and old != new:
            found[name] = new
    return found


def apply_filters(state: State) -> None:
    """Add the notebook's warning filters to the filters of this process (a rank).

    Call this function before the import of modules that may warn.
    """
    _apply_filters(state.get("warnings", ()))


def apply(state: State) -> None:
    """Apply settings of the kernel, read by `collect`, to this process (a rank)."""
    for name, kind in _SETTING_KINDS.items():
        if name in state:
            kind.apply(state[name])


def without_device(state: State) -> State:
    """Return a copy of `state` without torch's default device, for a fetcher.

    With the default device, a dataset would create its tensors on the GPU. This would fail in a
    fetcher's workers, because CUDA does not work in a forked process.
    """
    of_torch = {name: value for name, value in state.get("torch", {}).items() if name != "device"}
    return {**state, "torch": of_torch}


class _Filter(NamedTuple):
    """An entry of `warnings.filters`, as plain data.

    Attributes:
        message: Regular expression for the warning's text; "" for any text.
        category: Module and name of the warning's class.
        module: Regular expression for the module that warns; "" for any module.
        lineno: Line that warns; 0 for any line.
    """

    action: str
    message: str
    category: tuple[str, str]
    module: str
    lineno: int


def _collect_filters() -> list[_Filter]:
    found = []
    for action, message, kind, module, lineno in warnings.filters:
        category: Any = kind
        where = (category.__module__, category.__qualname__)
        found.append(_Filter(action, _text(message), where, _text(module), lineno))
    return found


def _text(pattern: Any) -> str:
    return str(getattr(pattern, "pattern", pattern) or "")


def _apply_filters(filters: Sequence[_Filter]) -> None:
    """Insert the notebook's warning filters before the filters of this process, in the same order.

    If this process already has an equal filter, that filter is moved. Skip filters for a warning
    class whose library this process has not imported: no code can issue such a warning yet.
    """
    for found in reversed(filters):
        category = _category(*found.category)
        if category is not None:
            action: Any = found.action
            warnings.filterwarnings(action, found.message, category, found.module, found.lineno)


def _added_filters(before: Sequence[_Filter], now: Sequence[_Filter]) -> Sequence[_Filter]:
    """Return the filters in `now` without those with which both `before` and `now` end."""
    pairs = zip(reversed(before), reversed(now), strict=False)
    n_kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return now[: len(now) - n_kept]


def _category(module: str, qualname: str) -> type[Warning] | None:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Warning) else None


class _Logger(NamedTuple):
    """Settings of a logger. If a library made the logger, ranks set only the level.

    Attributes:
        is_own: True for the root logger, and for a logger that a cell has probably made. A cell has
            probably made a logger in two cases: the part of the logger's name before the first dot
            is `__main__`, or no imported module has this part as its name.
        handlers: Stream name, level and pickled formatter of each handler that can be copied.
    """

    is_own: bool
    level: int
    propagate: bool = True
    handlers: Sequence[tuple[str, int, bytes]] = ()


def _collect_loggers() -> dict[str, Any]:
    """Return the level of `logging.disable`, and the loggers whose settings are not the defaults.

    For a logger that a library made, this function reads only the level. For the root logger and
    loggers that a cell made, it also reads `propagate` and the handlers that can be copied. The
    result is empty if all these settings have their defaults.
    """
    manager = logging.root.manager
    changed: dict[str, _Logger] = {}
    for name, logger in [("", logging.root), *manager.loggerDict.items()]:
        if not isinstance(logger, logging.Logger):
            continue
        top = name.partition(".")[0]
        state = _Logger(False, logger.level)
        if top in ("", "__main__") or top not in sys.modules:
            handlers = [found for each in logger.handlers if (found := _handler_state(each))]
            state = _Logger(True, logger.level, logger.propagate, tuple(handlers))
        if state != _default_logger(name, state.is_own):
            changed[name] = state
    return {"disable": manager.disable, "loggers": changed} if changed or manager.disable else {}


def _default_logger(name: str, is_own: bool) -> _Logger:
    """Return the settings that Python gives to a new logger; `name` is "" for the root logger."""
    return _Logger(is_own, logging.NOTSET if name else logging.WARNING)


def lost_loggers(collected: State) -> list[str]:
    """Return notes on loggers whose messages below WARNING appear in the notebook, not in ranks.

    The notebook's logger has a handler that shows such messages, but the handler cannot be copied.
    There is no note in two cases:

    - A library made the logger.
    - Ranks get another handler that shows the messages of the logger. This is a copied handler of
      the logger itself or, if the logger propagates its messages, of the root logger.

    Args:
        collected: The process state that `collect` returned.
    """
    found = collected.get("logging", {}).get("loggers", {})
    root = found.get("", _default_logger("", True))
    notes = []
    for name, state in found.items():
        shows = [it for it in logging.getLogger(name).handlers if _shows(it)]
        is_heard = state.handlers or (name and state.propagate and root.handlers)
        if state.is_own and shows and 0 < state.level < logging.WARNING and not is_heard:
            kinds = ", ".join(type(handler).__name__ for handler in shows)
            notes.append(
                f"logger {name or 'root'}: its {kinds} stays in the notebook, so ranks show only "
                "its warnings; add a handler in the %%taas cell"
            )
    return notes


def _shows(handler: logging.Handler) -> bool:
    """Return whether a handler outputs log records and is not one of the kernel's own handlers."""
    is_kernels = type(handler.formatter).__module__.startswith("traitlets")
    return not isinstance(handler, logging.NullHandler) and not is_kernels


def _handler_state(handler: logging.Handler) -> tuple[str, int, bytes] | None:
    """Return a handler's stream name, level and pickled formatter; None if it cannot be copied.

    A handler can be copied if all these conditions hold: The handler is a StreamHandler, not an
    instance of a subclass. It writes to stdout or stderr. It has no filters. Its formatter is None
    or a picklable `logging.Formatter`, not an instance of a subclass.
    """
    if type(handler) is not logging.StreamHandler or handler.filters:
        return None
    stream, formatter = stream_name(handler.stream), handler.formatter
    if stream is None or type(formatter) not in (type(None), logging.Formatter):
        return None
    try:  # a cell may have set a `converter` on the formatter that cannot be pickled
        return stream, handler.level, pickling.dump(formatter).data
    except CaptureError:
        return None


def _apply_loggers(found: Mapping[str, Any]) -> None:
    """Give this process's loggers the levels, handlers and `propagate` of the notebook's loggers.

    Also call `logging.disable` if `found` has its level. The rules for one logger are:

    - A logger that a library made gets only the level. If this process has no logger of this name,
      the logger is skipped. Reason: the library sets up its logger during the import, and would
      overwrite the level.
    - Any other logger gets all settings. But if the logger already has handlers in this process, no
      handlers are added.

    Args:
        found: The result of `_collect_loggers` in the kernel, or its entries that have changed.
    """
    if "disable" in found:
        logging.disable(found["disable"])
    known = logging.root.manager.loggerDict
    for name, state in found.get("loggers", {}).items():
        if not state.is_own and name not in known:
            continue
        logger = logging.getLogger(name)
        logger.setLevel(state.level)
        if not state.is_own:
            continue
        logger.propagate = state.propagate
        if not logger.handlers:  # a module imported with the values may have added handlers
            for stream, level, formatter in state.handlers:
                handler = logging.StreamHandler(getattr(sys, stream))
                handler.setLevel(level)
                handler.setFormatter(pickling.loads(formatter))
                logger.addHandler(handler)


def _collect_argv() -> list[str]:
    return [] if is_default_argv(sys.argv, sys.orig_argv) else [str(word) for word in sys.argv]


def is_default_argv(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """Return whether `sys.argv` still has the value that the interpreter set at its start.

    This is so if two conditions hold: The words in `argv` after the first are the last words of
    `orig_argv`. And the first word of `argv` is, or contains, the name of the script or module that
    comes before these words in `orig_argv`.

    Args:
        argv: Current value of `sys.argv`.
        orig_argv: Command line of the interpreter: `sys.orig_argv`.
    """
    program, *words = argv or [""]
    before = orig_argv[: len(orig_argv) - len(words)]
    if not before or list(orig_argv[len(before) :]) != words:
        return False
    path, name = PurePath(program), before[-1].rpartition(".")[2]
    return program in (before[-1], "-c") or name in (path.stem, path.parent.name)


def _apply_argv(argv: Sequence[str]) -> None:
    sys.argv[:] = argv


def _collect_recursion_limit() -> int:
    limit = sys.getrecursionlimit()
    return limit if limit > _DEFAULT_RECURSION_LIMIT else 0


def _collect_start_method() -> str:
    method = multiprocessing.get_start_method(allow_none=True)
    return method if method and method != multiprocessing.get_all_start_methods()[0] else ""


def _collect_torch() -> dict[str, Any]:
    """Return each setting of torch that differs from torch's default, by name.

    If the user has probably set a seed (`_SEED_LIMIT`), the result also has the seed. If the
    notebook has set torch's newer option for the precision of matrix products, torch refuses to
    return the older option. The result then lacks the older option. The result is empty if this
    process has not imported torch.
    """
    torch = module_if_imported("torch")
    if torch is None:
        return {}
    seed = torch.initial_seed()
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # raised once the newer torch.backends.fp32_precision was used
        precision = "highest"
    values = {
        "dtype": str(torch.get_default_dtype()).rpartition(".")[2],
        "device": torch.get_default_device().type,
        "matmul_precision": precision,
        "deterministic": torch.get_deterministic_debug_mode(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "seed": seed if seed < _SEED_LIMIT else None,
    }
    return {name: value for name, value in values.items() if value != _TORCH.get(name)}


def _apply_torch(values: Mapping[str, Any]) -> None:
    """Apply the kernel's settings of torch to this process, including a seed.

    If the default device of the notebook is a GPU, use the device that `target_device` chooses.
    """
    import torch

    def set_device(device: str) -> None:
        torch.set_default_device(target_device(device) if device == "cuda" else device)

    setters: dict[str, Callable[[Any], Any]] = {
        "dtype": lambda name: torch.set_default_dtype(getattr(torch, name)),
        "device": set_device,
        "matmul_precision": torch.set_float32_matmul_precision,
        "deterministic": torch.set_deterministic_debug_mode,
        "grad": torch.set_grad_enabled,
        "anomaly": torch.autograd.set_detect_anomaly,
        "cudnn_benchmark": lambda on: setattr(torch.backends.cudnn, "benchmark", on),
        "cudnn_deterministic": lambda on: setattr(torch.backends.cudnn, "deterministic", on),
        "sharing": torch.multiprocessing.set_sharing_strategy,
        "seed": torch.manual_seed,
    }
    for name, value in values.items():
        setters[name](value)


def _collect_numpy() -> dict[str, Any]:
    """Return the print options and error handling of numpy that differ from the defaults.

    The result is empty if this process has not imported numpy.
    """
    numpy = module_if_imported("numpy")
    if numpy is None:
        return {}
    prints, errors = numpy.get_printoptions(), numpy.geterr()
    printing = {n: prints[n] for n, value in _NUMPY_PRINTS.items() if prints[n] != value}
    error = {n: errors[n] for n, value in _NUMPY_ERRORS.items() if errors[n] != value}
    changed = {"print": printing, "error": error}
    return {name: values for name, values in changed.items() if values}


def _apply_numpy(found: Mapping[str, Any]) -> None:
    import numpy

    numpy.set_printoptions(**found.get("print", {}))
    numpy.seterr(**found.get("error", {}))


def _collect_matplotlib() -> dict[str, bytes]:
    """Return pickles of the rcParams that differ from matplotlib's defaults, by name.

    The settings in `_RC_OF_THE_PROCESS` are left out. The result is empty if this process has not
    imported matplotlib.
    """
    matplotlib = module_if_imported("matplotlib")
    if matplotlib is None:
        return {}
    own, defaults = matplotlib.rcParams, matplotlib.rcParamsDefault
    names = [name for name in defaults if name not in _RC_OF_THE_PROCESS]
    return {name: pickle.dumps(own[name]) for name in names if own[name] != defaults[name]}


def _pickled_rc_defaults(names: Iterable[str]) -> dict[str, bytes]:
    """Return pickles of the defaults of these rcParams; none if matplotlib is not imported."""
    matplotlib = module_if_imported("matplotlib")
    defaults = {} if matplotlib is None else matplotlib.rcParamsDefault
    return {name: pickle.dumps(defaults[name]) for name in names if name in defaults}


def _apply_matplotlib(pickled: Mapping[str, bytes]) -> None:
    # A host without matplotlib draws nothing. Another version of matplotlib may lack some names.
    if importlib.util.find_spec("matplotlib") is None:
        return
    own = importlib.import_module("matplotlib").rcParams
    own.update({name: pickle.loads(value) for name, value in pickled.items() if name in own})


def _collect_ipython() -> dict[str, Any]:
    """Return the settings of IPython for expressions, tracebacks and figures, by name.

    - "interactivity": the shell's `ast_node_interactivity`.
    - "traceback": the mode of `%xmode`.
    - "figures": a dict of the settings of `%config InlineBackend`. It lacks each setting whose
      value cannot be sent as plain data (`_is_plain`).
    - "inline": True if IPython displays figures. The notebook's first use of `matplotlib.pyplot`
      turns this on.

    Settings with their default are left out.
    """
    shell, found = _shell(), dict[str, Any]()
    if shell is None:
        return found
    if shell.ast_node_interactivity != _INTERACTIVITY:
        found["interactivity"] = shell.ast_node_interactivity
    if (mode := shell.InteractiveTB.mode) != _TRACEBACK_MODE:
        found["traceback"] = mode
    backend = _inline_backend()
    if backend is None:  # IPython keeps the settings until it displays the first figure
        figures = dict(shell.config.get("InlineBackend", {}))
    else:
        found["inline"] = True
        own = {name: getattr(backend, name) for name in _FIGURES}
        figures = {name: value for name, value in own.items() if value != _FIGURES[name]}
    # A cell may change a value in place later, so the result has copies.
    if figures := {name: deepcopy(value) for name, value in figures.items() if _is_plain(value)}:
        found["figures"] = figures
    return found


def _is_plain(value: object) -> bool:
    """Return whether a value is a string, number, bool or None, or a set or dict of these."""
    if isinstance(value, set | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | int | float | None)


def _apply_ipython(found: Mapping[str, Any]) -> None:
    """Make this rank display expressions, tracebacks and figures as the notebook does.

    Usually, IPython begins to display figures when a cell imports `matplotlib.pyplot`. But a cell
    may show a figure of the notebook without this import. So if the notebook displays figures, and
    this rank has imported `matplotlib.figure`, this function makes IPython display figures at once.

    In a process without an IPython shell, such as a fetcher, this function does nothing.
    """
    if (shell := _shell()) is None:
        return
    shell.ast_node_interactivity = found.get("interactivity", shell.ast_node_interactivity)
    shell.InteractiveTB.set_mode(found.get("traceback", shell.InteractiveTB.mode))
    if figures := found.get("figures"):
        config = importlib.import_module("traitlets.config").Config(InlineBackend=figures)
        shell.config.merge(config)  # IPython reads it when `matplotlib.pyplot` draws first
        if (backend := _inline_backend()) is not None:
            backend.update_config(config)
    if found.get("inline") and "matplotlib.figure" in sys.modules:
        importlib.import_module("matplotlib_inline.backend_inline")


def _shell() -> Any:
    """Return this process's IPython shell; None without a shell."""
    module = sys.modules.get("IPython.core.getipython")
    return module.get_ipython() if module is not None else None


def _inline_backend() -> Any:
    """Return IPython's settings for figures; None if IPython does not display figures yet."""
    module = sys.modules.get("matplotlib_inline.config")
    is_used = module is not None and module.InlineBackend.initialized()
    return module.InlineBackend.instance() if module is not None and is_used else None


class _SettingKind(NamedTuple):
    """Functions that read one kind of setting in the kernel and apply it in a rank."""

    collect: Callable[[], Any]
    apply: Callable[[Any], None]


_SETTING_KINDS = {
    "argv": _SettingKind(_collect_argv, _apply_argv),
    "recursion_limit": _SettingKind(
        _collect_recursion_limit,
        lambda limit: sys.setrecursionlimit(max(limit, sys.getrecursionlimit())),
    ),
    "start_method": _SettingKind(
        _collect_start_method, lambda name: multiprocessing.set_start_method(name, force=True)
    ),
    "numpy": _SettingKind(_collect_numpy, _apply_numpy),
    "matplotlib": _SettingKind(_collect_matplotlib, _apply_matplotlib),
    "ipython": _SettingKind(_collect_ipython, _apply_ipython),
    "torch": _SettingKind(_collect_torch, _apply_torch),
    "warnings": _SettingKind(_collect_filters, _apply_filters),
    "logging": _SettingKind(_collect_loggers, _apply_loggers),
}
"""Kinds of settings, in the order in which they are applied.

Warning filters and loggers come last. Reason: filters and loggers of a library are skipped if this
process has not imported the library, and applying the other settings may import a library.
"""
