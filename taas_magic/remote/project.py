"""A run's project store on this host, from before its ranks start until they have ended."""

from collections.abc import Callable, Mapping
from typing import Any

from taas_magic.receipt import Ledger
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.travelling import Travelling, is_shared
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
        self._travelling = None if is_shared(spec, ask) else Travelling(spec, ask, note)
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
            self._travelling.again(spec)

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
