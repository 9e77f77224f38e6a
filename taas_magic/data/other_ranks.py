"""What a rank's loader needs to know of the other ranks: a common order, and whether data differ.

All ranks of an attempt share a key-value store. By this store, the ranks agree on the order that an
unseeded sampler has drawn. They also compare hashes of their data, and warn the user if the hashes
differ. The cell's thread runs this code.
"""

import threading
import warnings
from collections import Counter
from contextlib import suppress
from typing import Protocol

from msgspec import structs

from taas_magic.data.client import Client
from taas_magic.data.protocol import EpochDescription
from taas_magic.data.sharding import is_compared
from taas_magic.errors import RunLost

_KEPT_ORDERS = 3
"""Number of latest epochs whose order stays in the ranks' key-value store."""

_ANSWER_S = 5.0
"""Maximum seconds to wait for the ranks' key-value store, for a comparison."""

_OTHER_ORDER_HERE = (
    'loader "{}": in epoch {}, the sampler gives this rank a different order than other ranks, and '
    "it has no length, so the ranks cannot share one order. Draw the order from torch, "
    "numpy.random or random, which are seeded, or use --cpus 1: all ranks then share one order"
)

_NO_COMMON_ORDER = (
    'loader "{}": in epoch {}, the sampler gives this rank a different order than other ranks, and '
    "the common order is not known. Either another rank is more than {} epochs ahead, or it has "
    "ended. Draw the order from torch, numpy.random or random, which are seeded"
)

_ANOTHER_STREAM = (
    'loader "{}": epoch {} begins with a different batch than when the state was saved, so samples '
    "may come twice or not at all. The dataset uses a random generator that is not seeded, or its "
    "data have changed. Seed the generator, for example in the dataset's set_epoch(epoch)"
)

_STREAMS_DIFFER = (
    'loader "{}": batch {} of epoch {} differs between rank {} and other ranks, so samples may '
    "come twice or not at all. With --cpus 0 each rank reads the dataset itself, and the dataset "
    "uses a random generator that is not seeded. Use --cpus 1, where all ranks share one stream, "
    "or seed the generator, for example in the dataset's set_epoch(epoch)"
)

_OTHER_EPOCH = (
    'loader "{}": rank {} has read epoch {} to its end, but another rank has read epoch {} '
    "instead, so samples may come twice or not at all. Each iterator begins the next epoch of its "
    "rank. This also holds for next(iter(loader)). Create the same number of iterators on all "
    "ranks, or call loader.{}.set_epoch(epoch) before each epoch"
)

_READ_AGAIN = (
    'loader "{}": in epoch {}, a worker read the dataset again and got other data than before, so '
    "samples may come twice or not at all. The dataset uses a random generator that is not seeded. "
    "Seed it, for example in the dataset's set_epoch(epoch). A worker reads the dataset again if "
    "ranks begin an epoch again or restart, if a rank is more than one epoch behind, if a worker "
    "or a fetcher has ended, or if the prefetch buffer is too small for several streams"
)


class KeyValueStore(Protocol):
    """Key-value store that all ranks of an attempt share."""

    def store_first(self, key: str, value: bytes) -> bytes:
        """Store `value`, unless a rank has already stored a value for `key`; return `key`'s value.

        So all ranks get the value that the first rank has stored.
        """

    def publish(self, key: str, value: bytes, replaced: str) -> None:
        """Store `value` under `key` for the other ranks; remove the value of key `replaced`."""

    def read(self, key: str) -> bytes:
        """Wait until another rank publishes a value for `key`, and return this value.

        Raises:
            RuntimeError: No rank has published a value in time, or the store's process has ended.
        """


class OtherRanks:
    """One loader's connection to the same loader in the other ranks.

    Args:
        loader: Name of the loader.
        rank: Number of this rank.
        store: Key-value store of the ranks; None if there is only one rank.
        has_fetchers: Whether the run has fetchers. Without fetchers, each rank reads the dataset
            itself.
    """

    def __init__(
        self, loader: str, rank: int, store: KeyValueStore | None, has_fetchers: bool
    ) -> None:
        self.loader, self.rank, self.has_fetchers = loader, rank, has_fetchers
        self._store, self._is_silent = store, False
        self._has_warned = False
        self._cell = self._finished = 0
        self._kept_orders: dict[int, str] = {}
        self._order_counts = Counter[int]()

    @property
    def can_compare(self) -> bool:
        """Whether there are other ranks whose data may be compared with this rank's data.

        False after the first warning about data that differ, because there is at most one such
        warning for each loader and cell. Also False if the key-value store did not answer.
        """
        return self._store is not None and not self._is_silent and not self._has_warned

    def begin_cell(self, number: int) -> None:
        """Begin a cell of a session: number the passes anew, and warn again if data differ.

        Args:
            number: Number of the cell in the session.
        """
        self._has_warned, self._cell, self._finished = False, number, 0

    def warn(self, text: str, stacklevel: int) -> None:
        """Warn that data differ, unless a call for this loader and cell has warned already."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=1 + stacklevel)

    def first_value(self, key: str, mine: bytes) -> bytes:
        """Return the value that the first rank has stored under `key`, for a comparison.

        The value is only needed for a warning. So if the key-value store does not answer within
        `_ANSWER_S`, return `mine`, and compare no further data of this loader. The store's process
        may have ended or be stopped, and torch may then wait without a limit.
        """
        store, found = self._store, [mine]
        if store is None or self._is_silent:
            return mine

        def ask() -> None:
            with suppress(RuntimeError):  # the store's process has ended
                found.append(store.store_first(f"{self.loader}/{key}", mine))

        thread = threading.Thread(target=ask, name="taas-compare", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        self._is_silent = thread.is_alive()
        return found[-1]

    def compare_epoch(self, epoch: int, order: int, part: str) -> None:
        """Warn if other ranks have read another epoch in their pass with the same number.

        Call this method at the end of each pass that has reached the end of its epoch. These passes
        have the numbers 0, 1, 2, … in each cell. If both epochs have the same order, for example in
        a loader without `shuffle`, there is no warning.

        Args:
            order: Hash of the epoch's order; for an iterable-style loader, of its first batch. 0 if
                the hash is not known.
            part: Attribute of the loader with `set_epoch`, for the warning: `sampler` or `dataset`.
        """
        number, self._finished = self._finished, self._finished + 1
        if not self.can_compare:
            return
        mine = f"{epoch} of {order}".encode()
        first = self.first_value(f"finished/{self._cell}/{number}", mine)
        other_epoch, other_order = map(int, first.split(b" of "))
        if other_epoch != epoch and other_order != order and other_order and order:
            about = self.loader, self.rank, epoch, other_epoch, part
            self.warn(_OTHER_EPOCH.format(*about), stacklevel=4)  # the cell's loop

    def adopt_common_order(
        self, client: Client, epoch: int, description: EpochDescription
    ) -> EpochDescription:
        """Make all ranks use the same order of an epoch; return the description with this order.

        Call this method for a map-style loader whose sampler is not of a type from torch. In a run
        without fetchers, each rank runs the sampler itself. In a run with fetchers, ranks may get
        the order from different fetchers, if a fetcher has ended. If the sampler draws from an
        unseeded generator, these orders differ. The ranks agree as follows:

        - The first rank that has the epoch's description stores the hash of its order for all
          ranks. If the sampler has a length, this rank also publishes the order, and removes an
          older one (`_keys_of_order`).
        - A rank with the same hash returns `description` unchanged. So does a single rank.
        - A rank with another hash waits for the published order. Its client then requests batches
          in this order.

        Raises:
            RunLost: This rank's order differs, and the sampler has no length, or no rank publishes
                the common order in time.
        """
        store = self._store
        if store is None:
            return description
        key, replaced = self._keys_of_order(epoch)
        order, who = str(description.order).encode(), str(self.rank).encode()
        stored = store.store_first(f"{key}/order", order + b" of " + who)
        first, _, whose = stored.partition(b" of ")
        if whose == who and first == order and description.batches is not None:
            old = f"{replaced}/indices" if replaced else ""
            store.publish(f"{key}/indices", client.request_order(), old)
        if first == order:
            return description
        if description.batches is None:
            raise RunLost(_OTHER_ORDER_HERE.format(self.loader, epoch))
        try:
            indices = store.read(f"{key}/indices")
        except RuntimeError as error:
            raise RunLost(_NO_COMMON_ORDER.format(self.loader, epoch, _KEPT_ORDERS)) from error
        batches = client.use_order(indices)
        return structs.replace(description, batches=batches, order=int(first))

    def _keys_of_order(self, epoch: int) -> tuple[str, str]:
        """Return the keys under which ranks publish the order of an epoch that begins now.

        Of the epochs that this rank has begun, the ranks keep the orders of the latest
        `_KEPT_ORDERS` epochs. If the rank begins one of these epochs again, the order stays the
        same. If the rank begins any other epoch again, the ranks agree on a new order, because the
        sampler may have drawn a new one.

        Returns:
            The key of the order, and the key of an older order that is no longer kept, or "".
        """
        if epoch in self._kept_orders:
            return self._kept_orders[epoch], ""
        key = f"{self.loader}/{epoch}/{self._order_counts[epoch]}"
        self._order_counts[epoch] += 1
        self._kept_orders[epoch] = key
        if len(self._kept_orders) <= _KEPT_ORDERS:
            return key, ""
        return key, self._kept_orders.pop(next(iter(self._kept_orders)))


class PassComparison:
    """Comparison of the batches of one pass over an iterable-style loader with other hashes.

    Args:
        others: The loader's connection to the other ranks.
        epoch: The epoch of the pass.
        number: Number of the pass; the first pass over the loader has the number 0.
        order: Hash of the epoch according to a loaded state; 0 without a loaded state.

    Attributes:
        order: Hash of the epoch, for a state that is saved. For an iterable-style loader, this is
            the hash of the epoch's first batch. 0 if it is not known yet.
    """

    def __init__(self, others: OtherRanks, epoch: int, number: int, order: int) -> None:
        self._others, self._epoch, self._number = others, epoch, number
        self.order = order
        self._first_hashes: dict[int, int] = {}

    def compare(self, streams: int, slot: int, order: int, is_own: bool) -> None:
        """Compare the hash of a stream's batch with other hashes; warn if the data differ.

        The comparisons are, in this order:

        - The rank's own batches that have the hash of the stream's first batch: compare `order`
          with the first hash that any rank received for the stream in this pass. A difference
          means that a worker has read the stream again and got other data. For most batches, this
          is the only comparison. In a run without fetchers, compare `order` only with hashes that
          this rank received.
        - Slot 0: compare `order` with the hash that a loaded state requires, if any. In any case,
          store `order` in the attribute `order`.
        - All slots, in a run without fetchers and with several ranks: each rank reads the whole
          stream. So compare `order` with the hash that the first rank has stored for this slot.

        Args:
            streams: Number of streams of the loader.
            order: Hash of the slot's batch or, for most slots of a stream, of the stream's first
                batch (`Response.order`).
            is_own: Whether the batch belongs to this rank.
        """
        others, item, stream = self._others, *divmod(slot, streams)
        is_of_first = not item or not is_compared(item)
        if is_of_first and is_own and self._first_hash(stream, order) != order:
            others.warn(_READ_AGAIN.format(others.loader, self._epoch), stacklevel=2)
        if item and is_of_first:
            return
        if not slot:
            if self.order not in (0, order):
                warnings.warn(_ANOTHER_STREAM.format(others.loader, self._epoch), stacklevel=2)
            self.order = order
        if others.has_fetchers or not others.can_compare:
            return
        mine = str(order).encode()
        if others.first_value(f"{self._epoch}/{slot}", mine) != mine:
            about = others.loader, slot, self._epoch, others.rank
            others.warn(_STREAMS_DIFFER.format(*about), stacklevel=2)

    def _first_hash(self, stream: int, order: int) -> int:
        """Return the first hash that any rank received for a stream's first batch in this pass.

        Without fetchers, each rank reads the stream itself, so only this rank's hashes count.
        """
        if stream not in self._first_hashes:
            mine = str(order).encode()
            if self._others.has_fetchers:
                mine = self._others.first_value(f"{self._epoch}/pass {self._number}/{stream}", mine)
            self._first_hashes[stream] = int(mine)
        return self._first_hashes[stream]
