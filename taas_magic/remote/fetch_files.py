"""What fetchers need on a host that shares no files with the notebook: loaders, and the project."""

import dataclasses
import os
from collections.abc import Callable

from taas_magic.remote.project import is_shared
from taas_magic.remote.run_files import RunFiles, runs_cache
from taas_magic.remote.spec import HostSpec, Place
from taas_magic.remote.travelling import Travelling
from taas_magic.travel.ask import Ask


class FetchFiles:
    """The files of a run's fetchers on this host. Nothing is written to the project here.

    Args:
        spec: The run's, as the notebook's machine has it.
        place: This host.
        ask: Asks the pool's process for what is not on this host.
        note: Tells the user something, once.
    """

    def __init__(self, spec: HostSpec, place: Place, ask: Ask, note: Callable[[str], None]) -> None:
        self._spec, self._place, self._ask, self._note = spec, place, ask, note
        self._folder: RunFiles | None = None
        self._project: Travelling | None = None

    def bring_in(self, is_wanted: Callable[[], bool]) -> HostSpec | None:
        """The run's spec with this host's paths, when all is here; None: it has ended meanwhile.

        Raises:
            PoolError: The pool's process does not answer.
            StoreError: The project cannot be copied to this host.
        """
        # ranks of the run may be on this host, too, and have its folder in the usual place
        cache = runs_cache().with_name("fetching")
        self._folder = RunFiles(self._spec, self._ask, cache)
        if not self._folder.bring_in(is_wanted):
            return None
        spec = self._folder.local(self._spec)
        if self._place.is_foreign:
            origin = spec.origin.on_another_machine(os.environ, self._place.sys_path)
            spec = dataclasses.replace(spec, origin=origin)
        if is_shared(self._spec, self._ask):
            return spec
        self._project = Travelling(self._spec, self._ask, self._note, sends=[])
        return self._project.local(spec)

    def close(self) -> None:
        """Sends the fetchers' logs back; called when nothing of them runs any more.

        Raises:
            PoolError: The pool's process does not answer.
        """
        if self._project is not None:
            self._project.finish()
        if self._folder is not None:
            try:
                self._folder.send_back()
            finally:
                self._folder.close()
