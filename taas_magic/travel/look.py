"""A look through a whole store, in a thread of its own: it may take longer than an answer may."""

import threading

from taas_magic.store import StoreRule
from taas_magic.travel.hashes import Hashes
from taas_magic.travel.manifest import (
    Manifest,
    Survey,
    check_limit,
    describe,
    ignore_of,
    survey,
)
from taas_magic.travel.tree import Tree


class Look:
    """Begins at once.

    Args:
        tree: The store.
        hashes: Nobody else's until the look is over.
        rule: The store's.
    """

    def __init__(self, tree: Tree, hashes: Hashes, rule: StoreRule) -> None:
        self._tree, self._hashes, self._rule = tree, hashes, rule
        self._found: tuple[Survey, Manifest] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._carry_out, name="taas-store-look", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> tuple[Survey, Manifest]:
        """What was found; waits until the look is over.

        Raises:
            StoreError: It is too much to travel.
            OSError: The store cannot be read.
        """
        self._thread.join()
        if self._found is None:
            assert self._error is not None
            raise self._error
        return self._found

    def wait(self) -> None:
        self._thread.join()

    def _carry_out(self) -> None:
        try:
            found = survey(self._tree, ignore_of(self._tree))
            check_limit(found, self._rule.path, self._rule.limit_bytes)
            self._found = found, describe(self._tree, found, self._hashes)
        except Exception as error:  # whoever asks for the result gets it
            self._error = error
