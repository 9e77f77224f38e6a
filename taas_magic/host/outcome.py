"""The outcome of a rank's work: the results or the failure, which the rank sends to its agent."""

import bdb
from collections.abc import Mapping, Sequence

from IPython.core.interactiveshell import ExecutionResult

from taas_magic.capture.changes import ChangeDetector
from taas_magic.capture.home import RankNamespace
from taas_magic.data.loader import changes_of_datasets
from taas_magic.host import keyboard, tracebacks
from taas_magic.host.link import AgentLink
from taas_magic.host.results import ResultWriter
from taas_magic.host.shell import RankShell
from taas_magic.host.spec import ProcessSpec
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Note, RankCalledExit, RankErrorSent, RankRaised


def result_writer(
    folder: RunFolder,
    environ: Mapping[str, str],
    link: AgentLink,
    spec: ProcessSpec,
    scope: RankNamespace,
    working_ranks: Sequence[int] = (),
) -> ResultWriter:
    """Return a `ResultWriter` that writes this rank's results below the run folder `folder`.

    The writer sends its notes for the user over `link`.

    Args:
        environ: Environment of the rank with torchrun's variables.
        spec: Settings of the rank. If the run's pool is not trusted, the writer pickles nothing.
        scope: Namespace of the rank, with the variables that a returned function may use.
        working_ranks: Ranks that run the work, in ascending order; empty for all ranks.
    """
    return ResultWriter(
        folder.results,
        environ,
        lambda text: link.send(Note(text=text)),
        scope,
        spec.share.plan.untrusted_pool,
        working_ranks,
    )


def send_outcome(
    shell: RankShell,
    result: ExecutionResult,
    link: AgentLink,
    writer: ResultWriter,
    out: Sequence[str],
    changes: ChangeDetector | None = None,
    *,
    is_session: bool = False,
) -> bool:
    """Send the cell's results or failure to the agent; return whether the cell succeeded.

    A cell that ends by `sys.exit(0)` counts as successful. The order of the messages is:

    1. After a failure: the failure. After `sys.exit(0)` outside a session: `RankCalledExit`.
    2. After success: notes about notebook objects that the cell has changed, and about datasets of
       registered loaders (`changes_of_datasets`).
    3. The results, unless the cell could not be compiled.
    4. After a failure: `RankErrorSent`.

    A child that the cell forked sends nothing, but prints its failure. If SIGINT arrives while the
    results are written, returns False and sends nothing more. Results that were already written are
    kept.

    Args:
        shell: Shell that ran the cell.
        result: IPython's result of the cell.
        link: Connection to the agent.
        writer: Writer of the rank's results.
        out: Values of `--out`, such as "loss@all".
        changes: Detector of notebook objects that the cell changed. Each change becomes a note to
            the user. None to send no such notes.
        is_session: Whether the rank belongs to a session, in which `sys.exit(0)` only ends the
            cell.
    """
    failure = _failure(shell, result)
    if failure is not None:
        tracebacks.send_failure(link, failure)
    elif link.is_own and result.error_in_exec is not None and not is_session:  # sys.exit(0)
        # If all ranks leave by sys.exit(0), the run succeeds; otherwise it fails.
        link.send(RankCalledExit(tracebacks.format_frames(result.error_in_exec)))
    if link.is_own and failure is None:
        notes = changes.notes(shell.user_ns) if changes else []
        for text in [*notes, *changes_of_datasets()]:
            link.send(Note(text=text))
    if link.is_own and result.error_before_exec is None:
        failed = failure is not None
        try:
            writer.write(shell.users_names(), out, value=shell.last_value, failed=failed)
        except KeyboardInterrupt:  # the values written before the interrupt are kept
            return False
    if link.is_own and failure is not None:
        link.send(RankErrorSent())
    return failure is None


def _failure(shell: RankShell, result: ExecutionResult) -> RankRaised | None:
    """Return the failure of the cell; None if the cell succeeded or ended by `sys.exit(0)`.

    The failure is the first exception that IPython has shown, even if the cell has continued after
    this exception. If code of `%run`, `%time`, `%%capture` or `run_cell` raises an exception,
    IPython shows the exception and continues the cell.

    If IPython has shown no exception, the failure is the exception that ended the cell. `BdbQuit`,
    the exception with which a debugger ends the cell, gets another text: either the user has quit
    the debugger, or this run refuses debuggers.
    """
    raised = result.error_before_exec or result.error_in_exec
    if shell.failure is not None or raised is None:
        return shell.failure
    if isinstance(raised, SystemExit) and not raised.code:
        return None
    if isinstance(raised, bdb.BdbQuit):
        is_refused = shell.keyboard is not None and shell.keyboard.was_refused
        raised.args = (keyboard.NO_DEBUGGER if is_refused else keyboard.USER_QUIT,)
    # IPython has not shown this exception: it is BdbQuit, or a handler of the user has hidden it.
    return tracebacks.describe_exception(raised)
