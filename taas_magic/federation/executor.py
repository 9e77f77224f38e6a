"""A replacement of Flower's SuperExec. The replacement starts apps as forks of its own process.

Flower's own SuperExec starts a new Python process for each task (one run of an app). Each new
process imports the app's modules, and Flower cancels the task if the imports take more than 30 s.
The program in this module imports the modules once, and then forks for each task.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import (
    TASK_TYPE_TO_APPIO_API_ADDRESS_ARG,
    TASK_TYPE_TO_COMMAND,
    TaskType,
)
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor

from taas_magic.errors import signal_name
from taas_magic.host.system import seed_torch_and_numpy

IMPORTS = "TAAS_FEDERATION_IMPORTS"
"""Name of the environment variable with the modules that the apps need, separated by commas."""

STARTS = 3
"""Maximum number of times that this program starts one task (one run of an app).

Flower starts a task again if the app does not answer.
"""

LOG_IMPORT_AFTER_S = 5.0
"""Seconds that an import may take before the log names the module."""

_FORKED = (TaskType.CLIENT_APP, TaskType.SERVER_APP)


def needed_modules(payload: Path, modules: Iterable[str]) -> list[str]:
    """Return the names in `modules` of modules that Flower's apps will probably import, sorted.

    An app probably imports a module if the module's name appears in the run's payload. This
    function leaves out three kinds of modules:

    - modules of Python's standard library
    - modules of taas-magic
    - submodules whose names begin with `_`

    Args:
        payload: Path of the run's payload file.
        modules: Names of the modules to choose from.
    """
    data = payload.read_bytes()
    ours = {*sys.stdlib_module_names, "taas_magic", "taas"}
    public = (it for it in modules if "._" not in it and it.partition(".")[0] not in ours)
    return sorted(it for it in public if it.encode() in data)


def main() -> None:
    """Run a changed SuperExec of Flower until a signal ends this program.

    First import the modules that the apps will probably need. Then replace two methods of Flower's
    executor:

    - The new `launch` starts an app as a fork of this process.
    - The new `reconcile` logs which apps were killed by a signal.

    Then start Flower's own code, which reads the command line.
    """
    for name in filter(None, os.environ.get(IMPORTS, "").split(",")):
        _import(name)
    for kind in _FORKED:
        _load_main(kind)
    forks = _AppForks()
    executor: Any = SubprocessExecutor
    executor.launch = lambda own, spec: forks.launch(spec)
    executor.reconcile = lambda own: forks.report_killed()
    flower_superexec()


def _import(name: str) -> None:
    """Import a module. If the import takes longer than `LOG_IMPORT_AFTER_S`, log the module's name.

    Ignore errors, because an app that imports the module raises the error again.
    """

    def log_import() -> None:
        _log_line(f"this host imports {name} for the apps")

    timer = threading.Timer(LOG_IMPORT_AFTER_S, log_import)
    timer.start()
    with suppress(Exception):
        importlib.import_module(name)
    timer.cancel()
    timer.join()


def _log_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _load_main(kind: TaskType) -> Any:
    [found] = entry_points(group="console_scripts", name=TASK_TYPE_TO_COMMAND[kind])
    return found.load()


class _AppForks:
    """The processes of Flower apps that this SuperExec has forked."""

    def __init__(self) -> None:
        self._running: list[Any] = []
        self._starts: Counter[int] = Counter()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start an app in a fork of this process. Called by Flower for each task.

        Args:
            spec: The task: one run of an app.

        Returns:
            The answer for Flower: accepted, or a failure if the task is not a run of an app.

        Raises:
            SystemExit: Flower has already started this task `STARTS` times. The exception ends this
                program.
        """
        if spec.task_type not in _FORKED:
            return LaunchResult.failed(f"this host runs no {spec.task_type}")
        self._starts[spec.task_id] += 1
        if self._starts[spec.task_id] > STARTS:
            sys.exit(
                f"Flower started the {spec.task_type} of task {spec.task_id} {STARTS} times, but "
                "it did not answer: this host is too slow, or a program kills its processes"
            )
        process = multiprocessing.get_context("fork").Process(target=_run_app, args=(spec,))
        process.start()
        self._running.append(process)
        return LaunchResult.accepted()

    def report_killed(self) -> None:
        """Log which app processes were killed by a signal, and forget all ended processes.

        Flower calls this method ten times a second.
        """
        for process in [it for it in self._running if it.exitcode is not None]:
            self._running.remove(process)
            if process.exitcode < 0:
                how = signal_name(process.exitcode)
                _log_line(f"an app's process {process.pid} was killed by {how}")
            process.close()


def _run_app(spec: ExecutionSpec) -> None:
    """Run an app in this fork, with the arguments that Flower's own SuperExec would pass.

    First set SIGTERM and SIGINT to their default handlers, and seed random generators anew. If
    `spec.suppress_output` is set, discard all output.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed_torch_and_numpy()
    if spec.suppress_output:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    arguments = [TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address]
    arguments += ["--token", spec.token, "--parent-pid", str(os.getppid())]
    if spec.insecure:
        arguments.append("--insecure")
    elif spec.root_certificates_path is not None:
        arguments += ["--root-certificates", spec.root_certificates_path]
    sys.argv[:] = [TASK_TYPE_TO_COMMAND[spec.task_type], *arguments]
    _load_main(spec.task_type)()
