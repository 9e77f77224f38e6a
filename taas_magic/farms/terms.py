"""What the processes of a farm tell each other; it needs neither torch nor Dask."""

import os
from typing import Any

from msgspec import Struct

from taas_magic.host.spec import Origin
from taas_magic.store.rule import StoreRule

TOPIC = "taas-farm"
"""What nodes and the farm's process say, to the kernel."""

INLINE_BYTES = 64 << 10
"""Parts of arguments that are larger travel by themselves: to each host once, jobs map them."""

PUT, ASK, DROP = "taas_put_part", "taas_ask_part", "taas_drop_part"
"""How large parts of arguments travel: by the kernel and nodes, through the farm's process.

Nobody connects to a node, which may lie behind an SSH server or in a batch system's network: nodes
connect to the farm's process. A large part is there once while a job needs it, and each node asks
for it once.
"""

LOST_NODES = 3
"""On how many nodes that were lost a job may have been; with one more it fails."""

Security = dict[str, str | bool]
"""Keyword arguments of dask's `Security`."""

Part = bytes | str
"""A part of what a job is given; of a large one, its name in the farm's process."""


class Blob:
    """Bytes in memory that processes of this host map by a path."""

    def __init__(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._descriptor = os.memfd_create("taas-value")
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]

    def __del__(self) -> None:
        """Give the memory back; what is mapped stays until that is unmapped."""
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """Where it is, for as long as this process has it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


class FarmTerms(Struct, frozen=True):
    """What the kernel tells the farm's process.

    Attributes:
        pools: Names of the pools whose hosts become nodes.
        gpus: CUDA devices of each job.
        cpus: Processors of each job.
    """

    name: str
    pools: tuple[str, ...]
    least: int
    most: int
    gpus: int
    cpus: int
    store: StoreRule
    origin: Origin


class FarmPlace(Struct, frozen=True):
    """How the kernel connects to the farm, and how many jobs a node runs at a time."""

    address: str
    security: Security
    slots: int


class NodeTerms(Struct, frozen=True):
    """What the farm's process tells a node.

    Attributes:
        place: The address by which Dask knows it; nobody connects to it.
        security: The node's key to the farm's scheduler.
        slots: Jobs that run at a time.
        gpus: CUDA devices of each.
        cpus: Processors of each.
        store: The rule of the project store, as the notebook's machine has it.
        start_timeout_s: Seconds without any work after which its start counts as stuck.
    """

    name: str
    place: str
    security: Security
    slots: int
    gpus: int
    cpus: int
    store: StoreRule
    start_timeout_s: float


class JobSetting(Struct, frozen=True):
    """What a job's process is started with: by what its node's rank found, and by the node.

    Attributes:
        store: The rule of the project store, with this host's path.
        means: What holds it off the store.
        files: The folder below which jobs save.
        scratch: The folder that it makes for what the store may not have; at first, how the names
            of a slot's begin.
    """

    environ: dict[str, str]
    cwd: str
    sys_path: list[str]
    cpus: int
    store: StoreRule
    means: str = ""
    files: str = ""
    scratch: str = ""


class NodeSetting(Struct, frozen=True):
    """What a node's process is started with; no job is told all of it.

    Attributes:
        scheduler: Where this host finds the farm's scheduler.
        jobs: What is the same for all jobs.
    """

    terms: NodeTerms
    scheduler: str
    jobs: JobSetting


class JobCall(Struct, frozen=True):
    """A job: which name of its payload is called, and with what.

    Attributes:
        called: The function's name in the payload.
        count: How many arguments have no name.
        names: Those of the others.
        fresh: Whether it must have a process that no other job has run in.
        setting: A hash of the project's modules and of what the notebook has set in its process:
            what a process has once imported and set, stays.
    """

    name: str
    called: str
    count: int
    names: tuple[str, ...]
    fresh: bool
    setting: str


class PlacedCall(Struct, frozen=True):
    """A job as its process is told it.

    Attributes:
        saves: Where `taas.save` writes.
        payload: The payload, or a path to it.
        arguments: Parts of the arguments, each as bytes or a path.
    """

    call: JobCall
    saves: str
    payload: bytes | str
    arguments: list[bytes | str]


CANCELLED = "Cancelled"
"""The `etype` of a job that was cancelled."""


class JobOutcome(Struct, tag="outcome", kw_only=True):
    """How a job ended, and what it returned and saved.

    Attributes:
        job: Its name, and its node's; "" as its process says it.
        etype: The type of what it raised, `CANCELLED`, or "JobDied" where its process ended; "" of
            one that returned.
        took_s: Seconds that its call took.
        parts: A pickle of the result, and the memory that it refers to.
        files: Their paths in the job's folder, which need not be UTF-8, and what is in them.
        again: Whether the process may serve another job.
        sends: How many parts follow on the same pipe.
    """

    job: str = ""
    node: str = ""
    etype: str = ""
    message: str = ""
    traceback: list[str] = []
    took_s: float = 0.0
    parts: list[Any] = []
    files: list[tuple[bytes, Any]] = []
    again: bool = False
    sends: int = 0


NODE_STATES = ("asked for", "starting", "here", "left", "lost", "given up")
"""In the order in which a node may have them; after "here" it has at most one more."""


class NodeNews(Struct, tag="node"):
    """A node comes or goes; threads tell it, so that an earlier state may be told later."""

    node: str
    state: str
    why: str = ""
    host: str = ""


class JobNews(Struct, tag="job"):
    """A job runs, is "erred" (its Dask future says how), or has printed something."""

    job: str
    node: str
    state: str = ""
    lines: str = ""


News = NodeNews | JobNews | JobOutcome


class JobEnded(Exception):
    """How a job ended that did not return; Dask carries it, and runs the job again."""

    def __init__(self, outcome: JobOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        return f"{self.outcome.etype}: {self.outcome.message}"
