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
"""Maximum bytes of a payload, argument or result that a message about a job contains itself.

Larger parts are sent separately. Each host receives a large argument only once. The jobs on the
host map this argument into their memory.
"""

PUT_PART, GET_PART, DROP_PART = "taas_put_part", "taas_get_part", "taas_drop_part"
"""Names of the Dask messages that store, fetch and remove large parts of arguments.

The parts are stored in the farm's process, from which nodes fetch them. The kernel cannot send them
to a node, because no process can connect to a node. For example, the node may be behind an SSH
server or in a batch system's network.
"""

LOST_NODES = 3
"""Maximum number of times that a job runs again because its node was lost.

If a node is lost once more while it runs the job, the job fails.
"""

Security = dict[str, str | bool]
"""Keyword arguments for Dask's class `Security`: certificates and a private key."""

Part = bytes | str
"""A part of a job's payload or arguments.

Either the bytes of the part, or the name under which the farm's process has stored a large part.
"""


class SharedBytes:
    """Copy of bytes in a memory file (memfd), which other processes of this host can map."""

    def __init__(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._descriptor = os.memfd_create("taas-value")
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]

    def __del__(self) -> None:
        """Close the memory file. Mappings in other processes stay valid until they are unmapped."""
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """Path by which processes of this host open the memory file, while this object exists."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


class FarmSettings(Struct, frozen=True):
    """The settings of a farm. The kernel sends them to the farm's process.

    Attributes:
        name: Name of the farm.
        pools: Names of the pools whose hosts the farm uses.
        least: Minimum number of nodes.
        most: Maximum number of nodes.
        gpus: Number of CUDA devices of each job.
        cpus: Number of processors of each job.
        store: Rule for the project store, to which jobs cannot write.
        origin: Settings that the nodes inherit from the notebook, such as environment variables.
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
    """The address and key by which the kernel connects to the farm's process.

    Attributes:
        address: Address of the Dask scheduler in the farm's process, as "tls://host:port".
        security: Certificates and private key.
        slots: Number of jobs that the smallest node runs at a time.
    """

    address: str
    security: Security
    slots: int


class NodeSettings(Struct, frozen=True):
    """The settings of a node. The farm's process passes them to the rank that starts the node.

    Attributes:
        name: Name of the node, as "node-3".
        unique_address: An address that is different for each node, because Dask identifies workers
            by their address. No process listens on this address.
        security: Certificates and private key for connecting to the farm's scheduler.
        slots: Number of jobs that the node runs at a time.
        gpus: Number of CUDA devices of each job.
        cpus: Number of processors of each job.
        store: Rule for the project store, with the store's path on the notebook's machine.
        start_timeout_s: Seconds for which the starting node may do nothing; then its start has
            failed.
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
    """The settings that a job process applies to itself at its start.

    The rank that starts the node (`run_node`) sets the fields without a default. The node sets all
    fields with a default.

    Attributes:
        environ: All environment variables of the process.
        cwd: Working directory.
        sys_path: The import path.
        cpus: Number of threads that torch uses.
        store: Rule for the project store, with the store's path on this host.
        protection: Mechanism that keeps the process's writes out of the store, such as "Landlock"
            (a value of `store.guard.StoreProtection`).
        files: Folder that contains one folder for the saved files of each job.
        scratch: Path of the scratch folder, which receives the writes that are kept out of the
            store. The process creates this folder. The node sets one path for each slot. For each
            process, the slot adds a new suffix to this path.
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
    """The settings of a node's process. A rank starts the process, and writes them to its stdin.

    Attributes:
        settings: Settings of the node, including its private key. Job processes do not get them.
        scheduler: The address at which this host reaches the farm's scheduler.
        jobs: Settings for each job process of the node.
        folder: Folder in which the node creates its temporary folder. After the run, the host's
            agent removes `folder` with all its contents, even if the node was killed.
    """

    settings: NodeSettings
    scheduler: str
    jobs: JobProcessState
    folder: str


class JobCall(Struct, frozen=True):
    """The function call that a job makes, without the function and the arguments.

    Attributes:
        name: Name of the job.
        shape: Description of the call. The node receives the function and the arguments separately:
            the function in the payload, and the arguments in parts.
        fresh: Whether the job needs a process in which no other job has run.
        settings_hash: A hash of the project's modules and of the settings that the notebook has
            made in its process. Only jobs with the same hash may share a process, because a process
            cannot undo imports and settings.
    """

    name: str
    shape: CallShape
    fresh: bool
    settings_hash: str


class JobAssignment(Struct, frozen=True):
    """The message by which a node gives a job to a job process.

    Attributes:
        call: The function call that the job makes.
        saves: Folder to which `taas.save` writes the job's files.
        payload: The payload with the function, or the path of a file with the payload.
        arguments: Parts of the pickled arguments, each as bytes or as the path of a file.
    """

    call: JobCall
    saves: str
    payload: bytes | str
    arguments: list[bytes | str]


CANCELLED = "<cancelled>"
"""Value of `JobOutcome.etype` for a job that was cancelled.

The brackets distinguish this value from the class name of an exception.
"""


class JobOutcome(Struct, tag="outcome", kw_only=True):
    """The outcome of a job: its error or its result, and the files that it saved.

    Attributes:
        job: The job's name. The job's process leaves this field empty; the node sets it.
        node: Name of the node that ran the job. The job's process leaves this field empty.
        etype: Class name of the exception, `CANCELLED`, or "JobDied" if the job's process ended; ""
            if the function returned.
        message: Text of the exception, or how the job's process ended.
        traceback: Lines of the exception's traceback.
        took_s: Seconds from the receipt of the job to the pickled result.
        parts: A pickle of the result, and the buffers of this pickle. Empty if the job's process
            sends the parts after this message (`n_parts_following`).
        files: Path and content of each file that the job saved. The path is relative to the job's
            folder, and need not be valid UTF-8.
        process_is_reusable: Whether the job's process may run a further job.
        n_parts_following: Number of parts of a large result that the job's process sends after this
            message, on the same pipe.
        imported_deferred: Whether the job has imported all modules of
            `forkserver.DEFERRED_MODULES`. If so, the node imports them for later jobs.
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
    imported_deferred: bool = False


NODE_STATES = ("requested", "starting", "ready", "left", "lost", "given up")
"""The states of a node, in their order. After "ready", at most one further state follows.

"left": the farm has ended the node, because no job needed it. "lost": the node ended by itself or
did not start. "given up": the farm has no node left, and starts none, because the last starts
failed.
"""


class NodeUpdate(Struct, tag="node"):
    """Message to the kernel about a change of a node's state.

    Several threads send these messages, so an earlier state may arrive after a later state.

    Attributes:
        node: Name of the node.
        state: The new state, one of `NODE_STATES`.
        why: Reason for the state, or what the starting node does now; "" if there is none.
        host: Name of the node's host; "" if it is unknown or has not changed.
    """

    node: str
    state: str
    why: str = ""
    host: str = ""


class JobUpdate(Struct, tag="job"):
    """Message to the kernel: a job runs, has failed, or has printed something.

    Attributes:
        job: Name of the job.
        node: Name of the node that runs the job; "" for a failure.
        state: "running"; "erred" if the job has failed (its Dask future has the error); "" if only
            `lines` is new.
        lines: New output of the job.
    """

    job: str
    node: str
    state: str = ""
    lines: str = ""


FarmUpdate = NodeUpdate | JobUpdate | JobOutcome


class JobEnded(Exception):
    """Error of a job's Dask task: the function raised, its process died, or the job was cancelled.

    If the job failed and has retries left, Dask runs the job again.

    Args:
        outcome: Outcome of the job, with the exception's class name, message and traceback.
    """

    def __init__(self, outcome: JobOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        return f"{self.outcome.etype}: {self.outcome.message}"
