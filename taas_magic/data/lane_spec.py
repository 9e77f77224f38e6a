"""What the process of a lane is told by the fetcher that starts it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaneSpec:
    """What a lane needs to know.

    Attributes:
        payload: The pickled loader.
        loader: Its name.
        seed: The run's seed.
        key: The run's key.
        fetcher: Number of the fetcher.
        lane: Number of this lane in its fetcher.
        number: Number of this lane among all lanes of all fetchers.
        lanes: How many there are.
        stride: Distance of the slots that these lanes are asked for (see `shard.home`).
        first: The first of them.
        buffer_bytes: How much prepared data may wait in memory.
        shared_bytes: How much memory may be shared with the ranks of this host.
        units: The bound of `--units`, None for none.
        host: Name of the host, for messages.
        follows_a_death: Whether it takes the place of a lane that died, perhaps of a batch.
    """

    payload: bytes = field(repr=False)
    loader: str
    seed: int
    key: bytes = field(repr=False)
    fetcher: int = 0
    lane: int = 0
    number: int = 0
    lanes: int = 1
    stride: int = 1
    first: int = 0
    buffer_bytes: int = 256 << 20
    shared_bytes: int = 512 << 20
    units: int | None = None
    host: str = ""
    follows_a_death: bool = False
