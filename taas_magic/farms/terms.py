"""What the processes of a farm tell each other."""

from typing import Any

from msgspec import Struct

from taas_magic.host.spec import Origin
from taas_magic.store.rule import StoreRule

Security = dict[str, str | bool]
"""Keyword arguments of dask's `Security`."""

Part = Any
"""A part of what a job is given: bytes; a `PartName`; where it is run, a `values.Blob`."""


class PartName(Struct, frozen=True):
    """A part that travels by itself (`farms/parts.py`).

    Attributes:
        mark: What is in it, as a hash.
        number: How often parts were put into the farm's process before.
    """

    mark: str
    number: int

    @property
    def text(self) -> str:
        return f"{self.mark}-{self.number}"


class FarmTerms(Struct, frozen=True):
    """What the kernel tells the farm's process.

    Attributes:
        name: The farm's.
        pools: Names of the pools whose hosts become nodes.
        least: Nodes that there are at least.
        most: Nodes that there are at most.
        gpus: CUDA devices of each job.
        cpus: Processors of each job.
        store: The rule of the project store.
        origin: What jobs take over from the notebook.
        start_s: Seconds in which a node must have come.
    """

    name: str
    pools: tuple[str, ...]
    least: int
    most: int
    gpus: int
    cpus: int
    store: StoreRule
    origin: Origin
    start_s: float


class FarmPlace(Struct, frozen=True):
    """How the kernel connects to the farm, and how many jobs a node runs at a time."""

    address: str
    security: Security
    slots: int


class NodeTerms(Struct, frozen=True):
    """What the farm's process tells a node.

    Attributes:
        name: The node's.
        place: The address by which Dask knows it; nobody connects to it.
        security: The node's key to the farm's scheduler.
        slots: Jobs that run at a time.
        gpus: CUDA devices of each.
        cpus: Processors of each.
        store: The rule of the project store, as the notebook's machine has it.
    """

    name: str
    place: str
    security: Security
    slots: int
    gpus: int
    cpus: int
    store: StoreRule


class NodeSetting(Struct, frozen=True):
    """What a node's process is started with: its terms, and what its rank found on the host.

    Attributes:
        terms: The node's.
        scheduler: Where this host finds the farm's scheduler.
        store: The rule of the project store, with this host's path.
        sys_path: The import path of jobs.
        cwd: Their folder.
        environ: Their environment.
    """

    terms: NodeTerms
    scheduler: str
    store: StoreRule
    sys_path: list[str]
    cwd: str
    environ: dict[str, str]


class JobSetting(Struct, frozen=True):
    """What a job's process is started with.

    Attributes:
        environ: All of its environment.
        cwd: Its folder.
        sys_path: Its import path.
        cpus: Its processors.
        store: The rule of the project store.
        means: What holds it off the store.
        files: The folder below which jobs save.
        scratch: A folder to make, for what it may not write to the store.
    """

    environ: dict[str, str]
    cwd: str
    sys_path: list[str]
    cpus: int
    store: StoreRule
    means: str
    files: str
    scratch: str


class JobCall(Struct, frozen=True):
    """A job: which name of its payload is called, and with what.

    Attributes:
        name: The job's.
        called: The function's name in the payload.
        count: How many arguments have no name.
        names: Those of the others.
        fresh: Whether it must have a process that no other job has run in.
    """

    name: str
    called: str
    count: int
    names: tuple[str, ...]
    fresh: bool


class PlacedCall(Struct, frozen=True):
    """A job as its process is told it.

    Attributes:
        call: The job.
        saves: Where `taas.save` writes.
        payload: The payload, or a path to it.
        arguments: Parts of the arguments, each as bytes or a path.
    """

    call: JobCall
    saves: str
    payload: bytes | str
    arguments: list[bytes | str]


class JobOutcome(Struct):
    """How a job ended.

    Attributes:
        state: "done", "failed" or "cancelled".
        etype: The type of what it raised; "JobDied" where its process ended.
        message: What that says.
        traceback: Its lines.
        again: Whether the process may serve another job.
        sends: How many parts of the result follow on the same pipe.
    """

    state: str
    etype: str = ""
    message: str = ""
    traceback: list[str] = []
    again: bool = False
    sends: int = 0


class JobResult(Struct):
    """What a job returned and saved.

    Attributes:
        node: Where.
        parts: A pickle, and the memory that it refers to.
        files: By their paths in the job's folder.
    """

    node: str
    parts: list[bytes]
    files: dict[str, bytes]


NODE_STATES = ("", "asked for", "starting", "here", "left", "lost", "given up")
"""In the order in which a node may have them; after "here" it has at most one more."""


class NodeNews(Struct, tag="node"):
    """A node comes or goes; threads tell it, so that an earlier state may be told later."""

    node: str
    state: str
    why: str = ""
    host: str = ""


class JobNews(Struct, tag="job"):
    """A job has begun (`state`), or has printed something (`lines`)."""

    job: str
    node: str
    state: str = ""
    lines: str = ""


News = NodeNews | JobNews


class JobEnded(Exception):
    """How a job ended that did not return; Dask carries it, and runs the job again.

    Attributes:
        node: Where.
        outcome: How.
    """

    def __init__(self, node: str, outcome: JobOutcome) -> None:
        super().__init__(node, outcome)
        self.node, self.outcome = node, outcome

    def __str__(self) -> str:
        return f"{self.outcome.etype}: {self.outcome.message}"
