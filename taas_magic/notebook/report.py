"""Write the file of `%taas report`, which a user sends to a developer with a bug report.

The file holds no secret settings, no cell and no variables. But error messages in it may quote
cells and variables.
"""

import os
import platform
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from taas_magic import messages, probe
from taas_magic.config import Config, PoolConfig
from taas_magic.engines.base import log_tail
from taas_magic.errors import UsageError, reason_of
from taas_magic.journal.folder import RunFolder
from taas_magic.notebook import pools

PACKAGES = (
    *("taas-magic", "torch", "distributed", "dask", "dask-jobqueue", "ipykernel", "ipython"),
    *("jupyterlab", "notebook", "nbclient", "cloudpickle", "paramiko", "msgspec", "numpy"),
    *("accelerate", "lightning", "transformers", "flwr"),
)
"""Packages whose versions the report lists if they are installed."""

FIRST_EVENTS = 200
"""Maximum number of journal events in the report, without the events with the ranks' output."""

_HIDDEN = "…"
"""Text that replaces the value of a setting that may be a secret."""

_OUTPUT = (messages.Lines, messages.Display, messages.Progress, messages.ClearOutput)


def write_report(config: Config, run: Path | None, target: Path) -> Path:
    """Write the report for `%taas report` to `target`, and return the path `target`.

    Send no requests to the processes of pools. So the call works even if no pool answers.

    The report has versions, settings without secrets, the run's journal without the ranks' output,
    and the ends of the pools' logs.

    Args:
        config: Settings of taas.toml.
        run: Folder of the run to report. None for a report without a run.
        target: File to write. The file is readable by the user only.

    Raises:
        UsageError: The file cannot be written.
    """
    text = "\n".join([*_system(), *_settings(config), *_run(run), *_pool_logs(config)]) + "\n"
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # the file of an earlier report may be readable for others
            file.write(messages.escaped(text))
    except OSError as error:
        raise UsageError(f"%taas report: cannot write {target}: {reason_of(error)}") from error
    return target


def _system() -> Iterator[str]:
    """Yield the report's title and its lines about this process, its machine and its packages.

    Of the environment variables whose names begin with `TAAS_`, list only the names.
    """
    yield f"# taas-magic report, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    yield "# Read it before you send it: error messages may quote your code and data."
    yield "\n## System"
    yield f"Python {platform.python_version()} ({sys.executable})"
    yield f"{platform.platform()}, {probe.cores()} cores, {probe.count_gpus()} GPUs"
    for name in PACKAGES:
        if found := probe.installed_version(name):
            yield f"{name} {found}"
    # List the names only, because the values may be secrets.
    yield "TAAS_ variables: " + (
        ", ".join(sorted(n for n in os.environ if n[:5] == "TAAS_")) or "none"
    )


def _settings(config: Config) -> Iterator[str]:
    yield f"\n## Settings ({config.source or 'there is no taas.toml'})"
    runs = msgspec.structs.replace(config.runs, notify=config.runs.notify and _HIDDEN)
    tables = {"store": config.store, "capture": config.capture, "runs": runs, "data": config.data}
    for name, table in tables.items():
        yield f"[{name}] {_text(table)}"
    for name, pool in config.pools.items():
        yield f'[pools."{name}"] {_text(_without_secrets(pool))}'


def _without_secrets(pool: PoolConfig) -> PoolConfig:
    """Return a pool's settings without the values of its `options`, which may be secrets."""
    return msgspec.structs.replace(pool, options=dict.fromkeys(pool.options, _HIDDEN))


def _text(settings: msgspec.Struct) -> str:
    return msgspec.json.encode(settings).decode()


def _run(run: Path | None) -> Iterator[str]:
    if run is None:
        return
    yield f"\n## Run {run.name}"
    told = (event for event in RunFolder(run).read_events() if not isinstance(event, _OUTPUT))
    for event in islice(told, FIRST_EVENTS):
        yield messages.encode(event).decode("utf-8", "replace")


def _pool_logs(config: Config) -> Iterator[str]:
    for name in config.pools:
        log = pools.named(name, config).folder.log
        if log.exists():
            yield f'\n## The end of the log of pool "{name}"'
            yield log_tail(log)
