"""A run's project store on this host, from before its ranks start until they have ended."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taas_magic.receipt import Ledger
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.travelling import Travelling
from taas_magic.travel.ask import Ask


class Project:
    """The folder itself where this host shares it with the notebook, else a copy that travels.

    Args:
        spec: The run's share of this host.
        ask: Asks for what is not on this host.
        note: Tells the user something, once.

    Raises:
        StoreError: The store cannot be copied to this host.
    """

    def __init__(self, spec: HostSpec, ask: Ask, note: Callable[[str], None]) -> None:
        self._travelling = None
        if not is_shared(spec, ask):
            self._travelling = Travelling(spec, ask, note, _sends(spec))
        rule = self.local(spec).plan.store
        self._ledger = Ledger(rule.path, rule.shared) if rule else None
        self._has_rank_0 = spec.share.first_rank == 0

    def local(self, spec: HostSpec) -> HostSpec:
        """The share with this host's paths; also that of a later attempt."""
        return self._travelling.local(spec) if self._travelling else spec

    def again(self, spec: HostSpec) -> None:
        """Makes ready for the run's next attempt; called when the ranks of the last are gone.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        self._has_rank_0 = self._has_rank_0 or spec.share.first_rank == 0
        if self._travelling is not None:
            self._travelling.again(_sends(spec))

    def take(self, rank: int, message: Mapping[str, str]) -> None:
        """Takes down what a rank says of the store."""
        if self._ledger is not None:
            self._ledger.take(rank, message)

    def close(self) -> dict[str, Any] | None:
        """Called when the ranks are gone; returns when all that they wrote is where it belongs.

        Returns:
            The fields of a `receipt` event; None where the run has no store.
        """
        if self._ledger is None:
            return None
        if self._travelling is None:
            return self._ledger.close(has_rank_0=self._has_rank_0)
        return self._ledger.close(has_rank_0=False) | self._travelling.finish()


def is_shared(spec: HostSpec, ask: Ask) -> bool:
    """Whether this host sees the very folder that is the run's store."""
    store = spec.origin.store
    return spec.plan.store is None or store is None or store.is_here(lambda: ask("token"))


def _sends(spec: HostSpec) -> Sequence[str] | None:
    """What ranks may write here: all of the store (None), or its shared folders, relative to it."""
    rule = spec.plan.store
    if rule is None or spec.share.first_rank == 0:
        return None
    return [os.path.relpath(folder, rule.path) for folder in rule.shared]
