"""The messages between the processes of a farm. This module needs neither torch nor Dask."""

import os
from typing import Any

from msgspec import Struct

from taas_magic.capture.work import CallShape
from taas_magic.host.spec import Origin
from taas_magic.store.rule import StoreRule

TOPIC = "taas-farm"
"""The Dask topic on which nodes and the farm's process send messages to the kernel."""

INLINE_BYTES = 64 << 10
"""Size in bytes above which a job's payload or a part of its arguments is sent separately.

Each host receives these bytes once. The jobs on the host map the bytes into their memory.
"""

PUT_PART, GET_PART, DROP_PART = "taas_put_part", "taas_get_part", "taas_drop_part"
"""Names of the Dask messages that store, fetch and remove large parts of arguments.

The parts are stored in the farm's process, because no process can connect to a node: the node may
be behind an SSH server or in a batch system's network.
"""

LOST_NODES = 3
"""Number of times that a job runs again after its node was lost. The next loss fails the job."""

Security = dict[str, str | bool]
"""Keyword arguments of dask's `Security`."""

Part = bytes | str
"""A part of a job's payload or arguments: its bytes, or the name of a large part."""


class SharedBytes:
    """Bytes in memory that other processes of this host can map by a path."""

    def __init__(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._descriptor = os.memfd_create("taas-value")
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]

    def __del__(self) -> None:
        """Release the memory. Existing mappings stay valid until they are unmapped."""
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """Path of the bytes; valid while this object exists."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


class FarmSettings(Struct, frozen=True):
    """The settings of a farm, which the kernel sends to the farm's process.

    Attributes:
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


class FarmAddress(Struct, frozen=True):
    """The address and key by which the kernel connects to the farm's process."""

    address: str
    security: Security
    slots: int


class NodeSettings(Struct, frozen=True):
    """The settings of a node, which the farm's process sends.

    Attributes:
        unique_address: An address that is different for each node, because Dask identifies workers
            by their address. Nothing listens there.
        store: The rule of the project store, with the path on the notebook's machine.
        start_timeout_s: Seconds without any activity after which the start of the node fails.
    """

    name: str
    unique_address: str
    security: Security
    slots: int
    gpus: int
    cpus: int
    store: StoreRule
    start_timeout_s: float


class JobProcessState(Struct, frozen=True):
    """The settings of a job process.

    The rank that starts the node (`run_node`) sets the fields without a default. The node sets the
    other fields.

    Attributes:
        store: The rule of the project store, with this host's path.
        protection: The mechanism that keeps the process's writes out of the store (value of
            `store.guard.StoreProtection`).
        files: The folder below which jobs save files.
        scratch: Path of the scratch folder for writes that are kept out of the store; the process
            creates the folder. The node sets one path for each slot. Each time the slot starts a
            process, it adds another suffix to this path.
    """

    environ: dict[str, str]
    cwd: str
    sys_path: list[str]
    cpus: int
    store: StoreRule
    protection: str = ""
    files: str = ""
    scratch: str = ""


class NodeProcessState(Struct, frozen=True):
    """The settings of a node's process. Job processes receive only `jobs`, not the node's keys.

    Attributes:
        scheduler: The address at which this host reaches the farm's scheduler.
        folder: Folder in which the node creates its own folder. The host's agent removes the
            outer folder with all its content after the run, even if the node was killed.
    """

    settings: NodeSettings
    scheduler: str
    jobs: JobProcessState
    folder: str


class JobCall(Struct, frozen=True):
    """The function call that a job makes.

    Attributes:
        shape: Description of the call, without the function and the arguments. The node receives
            these separately: the function in the payload, and the arguments in parts.
        settings_hash: A hash of the project's modules and of the settings that the notebook has
            made in its process. Only jobs with the same hash may share a process, because a process
            cannot undo imports and settings.
    """

    name: str
    shape: CallShape
    fresh: bool
    settings_hash: str


class JobAssignment(Struct, frozen=True):
    """A job as the node sends it to the job's process.

    Attributes:
        saves: The folder that `taas.save` writes to.
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
    """The outcome of a job: its error or its result, and the files that it saved.

    Attributes:
        job: The job's name. The job's process leaves `job` and `node` empty; the node sets them.
        etype: The type of the exception, `CANCELLED`, or "JobDied" if the job's process ended; ""
            if the job returned.
        parts: A pickle of the result, and the buffers of this pickle. Empty if the job's process
            sends the parts after this message (`n_parts_following`).
        files: Path and content of each saved file. The path is relative to the job's folder, and
            need not be UTF-8.
        process_is_reusable: Whether the job's process may run another job.
        n_parts_following: Number of large parts of the result that the process sends after this
            message, on the same pipe.
        imported_later: Whether the job has imported `forkserver.DEFERRED_MODULES`.
    """

    job: str = ""
    node: str = ""
    etype: str = ""
    message: str = ""
    traceback: list[str] = []
    took_s: float = 0.0
    parts: list[Any] = []
    files: list[tuple[bytes, Any]] = []
    process_is_reusable: bool = False
    n_parts_following: int = 0
    imported_later: bool = False


NODE_STATES = ("requested", "starting", "ready", "left", "lost", "given up")
"""The states of a node, in their order. After "ready", a node gets at most one more state."""


class NodeUpdate(Struct, tag="node"):
    """A change of a node's state.

    Several threads send these messages, so an earlier state may arrive after a later one.
    """

    node: str
    state: str
    why: str = ""
    host: str = ""


class JobUpdate(Struct, tag="job"):
    """A change of a job: the job runs, has failed, or has printed something.

    Attributes:
        state: "running", "erred" (the job's Dask future has the error), or "" for output only.
    """

    job: str
    node: str
    state: str = ""
    lines: str = ""


FarmUpdate = NodeUpdate | JobUpdate | JobOutcome


class JobEnded(Exception):
    """Error by which a job's Dask task reports that the job did not return.

    If the job has retries left, Dask then runs the job again.
    """

    def __init__(self, outcome: JobOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        return f"{self.outcome.etype}: {self.outcome.message}"
