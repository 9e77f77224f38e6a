"""Run a function (`taas.run`) or a script (`python -m taas_magic run`) on ranks.

A run sends variables of an IPython shell to its ranks. A script has no shell, so this module
creates a shell for the script. The new shell has the variables of the module `__main__`.
"""

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from msgspec import structs
from traitlets.config import Config as ShellConfig

from taas_magic.capture.work import VALUE, VALUES, CellWork, FunctionWork, Work, function_name
from taas_magic.config import Config, load_config, working_folder
from taas_magic.errors import RunError, UsageError
from taas_magic.notebook import flags, launch, rehearsal
from taas_magic.notebook.options import check_callable, refuse_shared_names, text_of_value
from taas_magic.plan import Flags

if TYPE_CHECKING:
    from taas_magic.notebook.runs import Run

_of_script: InteractiveShell | None = None
"""The IPython shell that this module has created for a script; None in a notebook."""


def run(
    function: Callable[..., Any],
    /,
    *args: Any,
    gpus: int,
    cpus: int | None = None,
    units: int | str | None = None,
    pool: str | None = None,
    data_pool: str | None = None,
    prefill: int | str | None = None,
    out: str | Sequence[str] | None = None,
    name: str | None = None,
    max_restarts: int | None = None,
    timeout: float | None = None,
    profile: int | None = None,
    env: Mapping[str, str] | None = None,
    logs: str | None = None,
    gather: bool | None = None,
    **kwargs: Any,
) -> "Run":
    """Call a function on ranks, like a `%%taas` cell. Block until the run has ended.

    The ranks get the function, its arguments, and all objects of the notebook or script that the
    function uses. A notebook shows the run below the cell; a script prints the ranks' lines.

    Args:
        function: The function. Every rank calls it.
        *args: Positional arguments of the function; the same for all ranks.
        gpus: Number of ranks, as `--gpus`.
        cpus: Number of fetchers for each registered loader, as `--cpus`.
        units: Limit on the units that all ranks together get, as `--units`.
        pool: Name of the pool, as `--pool`; default is this machine.
        data_pool: Name of the pool that runs the fetchers, as `--data-pool`.
        prefill: Data that fetchers prepare before ranks start, as `--prefill`.
        out: Variables of the notebook or script to copy back from the ranks, as `--out`.
        name: Name of the run, as `--name`.
        max_restarts: Maximum number of restarts of all ranks after failures, as `--max-restarts`.
        timeout: Limit on the run's time, in seconds.
        profile: Number of steps that torch.profiler records on every rank, as `--profile`.
        env: Environment variables of the ranks, as `--env`.
        logs: Ranks whose lines are shown, as `--logs`.
        gather: Whether to return the values of all ranks, in `run.results`. By default, return only
            rank 0's value, in `run.result`.
        **kwargs: Keyword arguments of the function; the same for all ranks.

    Returns:
        The run. `run.result` is the value that rank 0 returned.

    Raises:
        UsageError: An option has an impossible value. Or `function` is not callable, or does not
            accept the arguments. Or a given option has the same name as a parameter of the
            function.
        CaptureError: The function or an argument cannot be pickled for the ranks.
        ResultError: The run succeeded, but the function's value or a variable of `out` could not be
            returned.
        PoolError: The pool could not be started, or the run was lost.
        StoreError: The project store is not usable, or another run writes to it.
        RunError: The function raised an exception on a rank.
        KeyboardInterrupt: The user interrupted the run.
    """
    options = {
        "gpus": gpus,
        "cpus": cpus,
        "units": units,
        "pool": pool,
        "data_pool": data_pool,
        "prefill": prefill,
        "out": out or None,
        "name": name,
        "max_restarts": max_restarts,
        "timeout": timeout,
        "profile": profile,
        "env": env,
        "logs": logs,
        "gather": gather,
    }
    given = {option: value for option, value in options.items() if value is not None}
    check_callable("taas.run", function)
    _check_types(given)
    refuse_shared_names("taas.run", function, given.keys())
    _check_arguments(function, args, kwargs)
    shell, settings = _shell(), load_config(working_folder())
    asked = _flags(given, settings)
    work = FunctionWork(function, args, kwargs, f"taas.run({function_name(function)}, ...)")
    return _execute(asked, work, shell, settings)


def _check_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Check that the user's function accepts the arguments that `taas.run` passes to it.

    This also finds a misspelled option of `taas.run`, because the function does not accept it. If
    the function's signature is unknown, check nothing.

    Raises:
        UsageError: The function does not accept the arguments.
    """
    try:  # a decorated function may have other parameters than the function that it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        called = f"{function_name(function)}{signature}"
        raise UsageError(f"taas.run: these are not the arguments of {called}: {error}") from None


def _check_types(given: Mapping[str, Any]) -> None:
    """Check the types of the options `out` and `env`.

    The other options need no check: `_flags` converts them to text, and the flags check the text.

    Raises:
        UsageError: `out` or `env` has a type that `run` does not allow.
    """
    out, env = given.get("out", ()), given.get("env", {})
    names = [out] if isinstance(out, str) else out
    if not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        raise UsageError(
            'taas.run: out needs names of variables, such as "model,history", or a list of names, '
            f'such as ["model", "losses@last"]; got {text_of_value(out)}'
        )
    is_text = isinstance(env, Mapping) and all(
        isinstance(text, str) for pair in env.items() for text in pair
    )
    if not is_text or any("=" in name for name in env):
        raise UsageError(
            'taas.run: env needs a dict of strings, such as {"NCCL_DEBUG": "INFO"}, without "=" in '
            f"the names; got {text_of_value(env)}"
        )


def _flags(options: Mapping[str, Any], settings: Config) -> Flags:
    """Convert the options of `run` to flags, as if the user had written them after `%%taas`.

    `Flags.out` also gets an entry for the function's return value: from rank 0, or with `gather`
    from all ranks.

    Raises:
        UsageError: An option has an impossible value. The message names the option.
    """
    words: list[str] = []
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if option == "env":
            words += [word for key, text in value.items() for word in (flag, f"{key}={text}")]
        elif option == "out":
            words += [flag, value if isinstance(value, str) else ",".join(value)]
        elif option != "gather":
            words += [flag, str(value)]
    try:
        asked = flags.parse(shlex.join(words), settings, flags.Spelling.CALL)
    except UsageError as error:
        raise UsageError(f"taas.run: {error}") from None
    returned = VALUES if options.get("gather") else VALUE
    return structs.replace(asked, out=(*asked.out, returned))


def run_script(words: Sequence[str]) -> None:
    """Run a script on ranks, as `torchrun` does. Block until the run has ended.

    The ranks run IPython's `%run SCRIPT` as their cell. So in the ranks, the script is the module
    `__main__`, and the script's folder is on the import path. `--dry-run` and `--rehearse` work as
    for a cell.

    Args:
        words: Flags of `%%taas`, then the path of the script, then the script's own arguments. Or
            the path of the script, then flags, then `--` and the script's own arguments.

    Raises:
        UsageError: No word ends with `.py`, or the first such word is not the path of a file. Or a
            flag is wrong; if the script's path comes first, the message also shows the usage.
        CaptureError: The ranks need an object that cannot be pickled.
        PoolError: The pool could not be started.
        RunError: The script failed on a rank.
        KeyboardInterrupt: The user interrupted the run.
    """
    shell, settings = _shell(), load_config(working_folder())
    given, script = _split_words(words)
    try:
        asked = flags.parse(shlex.join(given), settings, flags.Spelling.TERMINAL)
    except UsageError as error:
        if words[0] != script[0]:
            raise
        usage = f"python -m taas_magic run {script[0]} --gpus 2 -- [arguments of the script]"
        raise UsageError(f"{str(error).removesuffix('.')}. Usage: {usage}") from None
    text = f"%run {shlex.join(script)}"
    cell = CellWork(text, shell.transform_cell(text), f"<{text}>", title=text)
    if asked.dry_run:
        sys.stdout.write(launch.dry_run_text(asked, cell, shell, settings) + "\n")
        return
    _execute(asked, cell, shell, settings)


def _split_words(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the words after `python -m taas_magic run` into flags and script.

    The words before the script's path are flags, and the words after it are the script's arguments.
    But if the path is the first word, the words up to `--` are flags, and the words after `--` are
    the script's arguments. Without `--`, all further words are flags.

    Returns:
        The flags of `%%taas`; and a list of the script's path and the script's own arguments.

    Raises:
        UsageError: No word ends with `.py`, or the first such word is not the path of a file.
    """
    at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if at is None or not Path(words[at]).is_file():
        what = "the script is missing" if at is None else f"there is no file {words[at]}"
        raise UsageError(f"{what}: python -m taas_magic run --gpus 2 script.py [arguments]")
    if at:
        return words[:at], words[at:]
    end = words.index("--") if "--" in words else len(words)
    return words[1:end], [words[0], *words[end + 1 :]]


def _execute(asked: Flags, work: Work, shell: InteractiveShell, settings: Config) -> "Run":
    """Run a function or a script on ranks, or rehearse it (`--rehearse`).

    If the run of a script fails on a rank, print the details of the failure, such as the rank's
    traceback, to stderr. In a notebook, IPython shows these details with the RunError.
    """
    begin = rehearsal.rehearse if asked.rehearse else launch.execute
    try:
        return begin(asked, work, shell, settings)
    except RunError as error:
        if shell is _of_script:
            sys.stderr.write("".join(f"{line}\n" for line in error.details))
        raise


def _shell() -> InteractiveShell:
    """Return the current IPython shell. In a script, create a shell for the module `__main__`.

    The created shell has no input history. `_of_script` refers to it, and further calls return it.

    Raises:
        UsageError: This process is a rank.
    """
    global _of_script
    shell = get_ipython()
    if shell is None:
        settings = ShellConfig()
        settings.HistoryManager.enabled = False  # a script needs no input history
        main = sys.modules["__main__"]
        shell = _of_script = InteractiveShell.instance(
            config=settings, user_module=main, user_ns=vars(main), colors="NoColor"
        )
    if getattr(shell, "link", None) is not None:  # a rank's shell has a link to its agent
        raise UsageError(
            "taas.run cannot be called on a rank. Call it in the notebook, or run the script that "
            "calls it with `python script.py`"
        )
    return shell
