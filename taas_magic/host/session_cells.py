"""Run the cells of a session on one rank."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from taas_magic.capture import payload
from taas_magic.capture.home import RankNamespace
from taas_magic.capture.modules import ModuleSource, find_outdated, install_modules
from taas_magic.host import cell_main, tracebacks
from taas_magic.host.assignments import Assignments
from taas_magic.host.ddp_groups import release_ddp_groups
from taas_magic.host.feeding import SessionLoaders
from taas_magic.host.heartbeat import collective_progress
from taas_magic.host.keyboard import Keyboard
from taas_magic.host.link import AgentLink, flush_output, rank_file
from taas_magic.host.lone_training import report_lone_training
from taas_magic.host.outcome import result_writer, send_outcome
from taas_magic.host.process_groups import ProcessGroupPrefixes
from taas_magic.host.prompt import Prompt, users_names
from taas_magic.host.shell import RankShell
from taas_magic.host.spec import ProcessSpec
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import CellOrder, Note, RankCreatesGroup, RankErrorSent
from taas_magic.store import redirect


def session_prompt(
    spec: ProcessSpec, link: AgentLink, rank: int, environ: Mapping[str, str], feeds: SessionLoaders
) -> Prompt:
    """Prepare the shell for a session's cells, and return the prompt of this rank.

    Also replaces torch's `init_process_group` by a wrapper for sessions (`ProcessGroupPrefixes`).
    Call this function once, before code of the user runs.

    Args:
        environ: torchrun's environment variables of this rank.
        feeds: Connections of the rank's registered loaders to the data service.
    """
    cells = _SessionCells(spec, link, environ, feeds)

    def has_pending() -> bool:
        return any(begun > ended for begun, ended in collective_progress()[0])

    return Prompt(link, spec.folder, rank, cells.run, has_pending)


class _SessionCells:
    """Runner of a session's cells on this rank. All cells of the session share one namespace."""

    def __init__(
        self, spec: ProcessSpec, link: AgentLink, environ: Mapping[str, str], feeds: SessionLoaders
    ) -> None:
        self._spec, self._link, self._environ, self._feeds = spec, link, environ, feeds
        self._shell = RankShell.instance()
        own_keyboard = Keyboard(link, rank_file(spec.folder, int(environ["RANK"]), "input"))
        colors = spec.share.run.origin.colors
        self._namespace = self._shell.connect_to_agent(
            link, own_keyboard, shows=False, colors=colors
        )
        self._modules: dict[str, ModuleSource] = {}
        self._kept: frozenset[str] = frozenset()
        self._groups = ProcessGroupPrefixes(self._report_new_group)
        self._groups.install()

    def _report_new_group(self) -> None:
        if self._link.is_own:  # not a child that the cell forked
            self._link.send(RankCreatesGroup())

    def run(self, order: CellOrder) -> bool:
        """Run a cell, and send its results or failure; return whether the cell succeeded.

        First prepares the cell. If one of these steps fails, sends the failure and returns False:

        1. Read the cell's payload. If modules were edited since the session imported them, send the
           user a note.
        2. Make the payload's modules importable.
        3. Connect the payload's registered loaders to the data service.
        4. Load the payload's objects into the session's namespace.

        If this rank takes part in the cell, then runs the cell, and sends its results or failure.
        Otherwise, only sends the results of `--out`. After success, a note tells the user if each
        rank has trained a model of its own.

        At the end, sends `CellNames`, and flushes the output. `CellNames` has the names that the
        cell has assigned or deleted, and the cells whose fetchers this rank still needs. A child
        that the cell forked does neither.
        """
        folder, shell, link = RunFolder(Path(order.run_dir)), self._shell, self._link
        shell.shows, shell.last_value = order.shows, None
        os.environ[cell_main.PAYLOAD] = str(folder.payload)
        # A new process group must not use keys of an earlier group in the key-value store.
        self._groups.begin_cell(order.number)
        release_ddp_groups()
        redirect.begin_run()
        try:
            self._feeds.expect_cell(folder.path)
            loaded = payload.read(folder.payload)
            settings = loaded.load_settings()
            self._modules |= loaded.modules
            if order.takes_part and (names := self._outdated()):
                link.send(Note(text=_outdated_note(names)))
            loaded = structs.replace(loaded, modules=self._modules)
            install_modules(self._modules)
            self._feeds.begin_cell(order.number, folder.path, settings)
            work = loaded.load_into(self._namespace)
        except Exception as error:
            tracebacks.send_failure(link, tracebacks.describe_exception(error))
            link.send(RankErrorSent())
            return False
        assignments = Assignments(work if order.takes_part else None, self._names())
        sent = {variable.name for variable in loaded.captured}
        kept = self._kept | loaded.kept | (sent & assignments.in_text)
        scope = RankNamespace(self._namespace, kept - assignments.in_text)
        writer = result_writer(folder, self._environ, link, self._spec, scope, order.ranks)
        raised = None
        if order.takes_part:
            result = shell.run(work, loaded.sources)
            raised = result.error_in_exec
            succeeded = send_outcome(shell, result, link, writer, order.out, is_session=True)
            if succeeded:
                everyone = range(self._spec.share.plan.world_size)
                report_lone_training(link, int(self._environ["RANK"]), order.ranks or everyone)
        else:
            writer.write(shell.users_names(), order.out, value=None, failed=False)
            succeeded = True
        if link.is_own:
            changes = assignments.find(self._names(), raised)
            changes.fetched = self._feeds.end_cell()
            self._kept = kept - set(changes.assigned)
            link.send(changes)
            flush_output()
        return succeeded

    def _outdated(self) -> list[str]:
        """Return the names of edited modules whose old code the session uses.

        If a cell has loaded IPython's extension `autoreload`, return no names, because this
        extension renews the modules without importing them again.
        """
        if "AutoreloadMagics" in self._shell.magics_manager.registry:
            return []
        return find_outdated(self._modules)

    def _names(self) -> dict[str, Any]:
        return users_names(self._shell.users_names())


def _outdated_note(names: Sequence[str]) -> str:
    """Return a note for the user: the session still uses the old code of edited modules.

    Args:
        names: Names of modules that were edited after the session imported them.
    """
    modules = ", ".join(f"`{name}`" for name in names)
    return (
        f"the ranks use the old code of {modules}, edited since the session imported it: call "
        f"importlib.reload({names[0]}) in a cell of the session, or `%taas restart`"
    )
