"""What lies on a lane's shelf, and where it lies when memory is used up."""

from typing import Protocol


class Item(Protocol):
    """An answer on the shelf."""

    @property
    def size(self) -> int:
        """Bytes of memory that it holds."""

    @property
    def units(self) -> int:
        """What it counts in `--units`; VOID for a slot without a batch."""


class Disk(Protocol):
    """Where items may lie that have no room in memory."""

    @property
    def has_room(self) -> bool:
        """Whether more may be laid there."""

    def lay(self, item: Item) -> Item | None:
        """Write an item; returns what stands for it, None when it has to stay in memory."""

    def fetch(self, item: Item) -> Item:
        """The item that another stands for; every other item itself."""

    def drop(self, item: Item) -> None:
        """An item is on the shelf no more."""


class NoDisk:
    """There is only memory."""

    has_room = False

    def lay(self, item: Item) -> Item | None:
        """It has to stay in memory."""
        return None

    def fetch(self, item: Item) -> Item:
        """The item itself."""
        return item

    def drop(self, item: Item) -> None:
        """Nothing is left of it."""
