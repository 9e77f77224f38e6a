"""What a rank knows of the run's data service, and of each loader."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from taas_magic.data.entries import Directory
from taas_magic.data.ledger import Ledger
from taas_magic.data.route import Timing
from taas_magic.data.shard import Uneven

if TYPE_CHECKING:
    from taas_magic.data.loader import RemoteLoader


@dataclass(frozen=True)
class LoaderShape:
    """A loader as the notebook describes it; no part of its data.

    Attributes:
        name: The loader's name in the run.
        batches: Batches of an epoch; None where it does not say.
        samples: Length of its dataset; None where it has none.
        iterable: Whether the dataset is iterable-style.
        batch_size: As the loader has it.
        drop_last: As the loader has it.
        num_workers: As the loader has it.
        pin_memory: Whether batches are to lie in page-locked memory (where there is CUDA).
        timeout_s: How long a rank waits for a batch, 0: as long as it takes.
        uneven: What happens when batches do not divide by the ranks.
        seed: The seed of its randomness; None: the run's.
        attributes: The dataset's small attributes.
        has_state: Whether an iterable-style dataset has a `state_dict` of its own.
    """

    name: str
    batches: int | None
    samples: int | None
    iterable: bool
    batch_size: int | None
    drop_last: bool
    num_workers: int
    pin_memory: bool = False
    timeout_s: float = 0.0
    uneven: Uneven = "pad"
    seed: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    has_state: bool = False


@dataclass
class Feed:
    """What a rank knows of the run's data service.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        payload: Returns the pickled loader of a name.
        directory: Where the lanes are; None: this rank prepares its batches itself.
        key: The run's key.
        units: The bound of `--units`.
        seed: The run's seed.
        tls: What makes a client context, for fetchers on other hosts.
        ledger: Where it is written what was handed out.
        generation: Which attempt of the run.
        window_bytes: How much a rank asks for ahead.
        timing: How long to wait for what.
        direct: Whether shared memory may be used on one host.
    """

    rank: int
    world_size: int
    payload: Callable[[str], bytes]
    directory: Directory | None = None
    key: bytes = b""
    units: int | None = None
    seed: int = 0
    tls: Callable[[], Any] | None = None
    ledger: Ledger | None = None
    generation: int = 0
    window_bytes: int = 128 << 20
    timing: Timing = Timing()  # noqa: RUF009
    direct: bool = True
    loaders: "list[RemoteLoader]" = field(default_factory=list)

    def counts(self) -> dict[str, dict[str, float]]:
        """What this rank was handed so far, for each loader."""
        return {loader.name: loader.counted() for loader in self.loaders}
