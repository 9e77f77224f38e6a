"""What a run needs on a host and leaves there: its folder and the project store, shared or not."""

import dataclasses
import os
from collections.abc import Callable, Mapping

from taas_magic.journal import Event, event
from taas_magic.remote.project import Project
from taas_magic.remote.run_files import RunFiles
from taas_magic.remote.spec import HostSpec, Place
from taas_magic.travel.ask import Ask


class HostFiles:
    """The files of a run on this host.

    Args:
        spec: The run's share of this host, as the notebook's machine has it.
        place: This host.
        ask: Asks the pool's process for what is not on this host.
        emit: Sends an event to the pool's process.
    """

    def __init__(
        self, spec: HostSpec, place: Place, ask: Ask, emit: Callable[[Event], None]
    ) -> None:
        self._spec, self._place, self._ask, self._emit = spec, place, ask, emit
        self._folder: RunFiles | None = None
        self._project: Project | None = None

    def bring_in(self, is_wanted: Callable[[], bool]) -> bool:
        """Returns when all is here that ranks need; False if the run was ended meanwhile.

        Raises:
            PoolError: The pool's process does not answer.
            StoreError: The store cannot be copied to this host.
        """
        self._folder = RunFiles(self._spec, self._ask)
        if not self._folder.bring_in(is_wanted):
            return False
        self._project = Project(self._spec, self._ask, self._note)
        return True

    def local(self, spec: HostSpec) -> HostSpec:
        """A share of the run with this host's paths; called when all is here."""
        assert self._folder is not None and self._project is not None
        if self._place.is_foreign:
            origin = spec.origin.on_another_machine(os.environ, self._place.sys_path)
            spec = dataclasses.replace(spec, origin=origin)
        return self._project.local(self._folder.local(spec))

    def again(self, spec: HostSpec) -> None:
        """Makes ready for the next attempt; called when the ranks of the last are gone.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        assert self._project is not None
        self._project.again(spec)

    def take(self, rank: int, message: Mapping[str, str]) -> None:
        """Takes down what a rank says of the store."""
        if self._project is not None:
            self._project.take(rank, message)

    def bring_home(self) -> None:
        """Sends what the run left here, and its receipt; called when nothing of it runs any more.

        Raises:
            PoolError: The pool's process does not answer.
        """
        try:
            receipt = self._project.close() if self._project is not None else None
            if receipt is not None:
                self._emit(event("receipt", self._place.host, **receipt))
            if self._folder is not None:
                self._folder.send_back()
        finally:
            if self._folder is not None:
                self._folder.close()

    def _note(self, text: str) -> None:
        self._emit(event("note", self._place.host, text=text))
