"""The state of a farm: how messages change it, and how it is shown as a table (text and HTML)."""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from html import escape
from typing import Any

from taas_magic.display.head import FRAME, as_html, columns
from taas_magic.farms.messages import NODE_STATES, JobUpdate, NodeUpdate

SHOWN_JOBS = 12
"""Maximum number of jobs that the table shows, and maximum number of nodes that it shows."""

LINE_CHARS = 100
"""Maximum number of characters of a job's last line in the table."""

WHY_CHARS = 300
"""Maximum number of characters in the table for the reason why a node has ended.

The limit is higher than `LINE_CHARS`, because the reason names a log file.
"""

STATES = ("queued", "running", "done", "failed", "cancelled")


@dataclass(eq=False)
class JobState:
    """The state of one job.

    Attributes:
        name: The function's name and a number.
        host: Name of the host that runs the job or ran it last; "" before the job first runs.
        node: Name of the node that runs the job or ran it last; "" before the job first runs.
        last_line: The last line that the job has printed.
        runs: Whether a node runs the job. Not updated when the job has ended.
        took_s: Seconds that the function took; 0 until the function has returned.
        ended: The state with which the job has ended: "done", "failed" or "cancelled"; "" before.
    """

    name: str
    host: str = ""
    node: str = ""
    last_line: str = ""
    runs: bool = False
    took_s: float = 0.0
    ended: str = ""

    @property
    def state(self) -> str:
        """State of the job: "queued", "running", "done", "failed" or "cancelled"."""
        return self.ended or ("running" if self.runs else "queued")


@dataclass
class FarmState:
    """The state of a farm, its nodes and its jobs. The notebook shows this state as a table.

    One thread may change the state while a second thread reads it. So readers iterate over copies
    of the dicts.

    Attributes:
        name: Name of the farm.
        pools: Names of the farm's pools, as text.
        least: Minimum number of nodes.
        most: Maximum number of nodes.
        slots: Number of jobs that the smallest node runs at a time.
        jobs: The state of each job, by the job's name. For a job that has ended, a `JobState`
            without arguments and result, so that Python can free them.
        nodes: The state of each node, by the node's name: a `NodeUpdate` with the node's newest
            state, and with its host.
        is_closed: Whether the farm is closed.
        changes: Number of changes so far. If it has grown, the farm shows its table again.
    """

    name: str
    pools: str
    least: int
    most: int
    slots: int = 1
    jobs: dict[str, JobState] = field(default_factory=dict)
    nodes: dict[str, NodeUpdate] = field(default_factory=dict)
    is_closed: bool = False
    changes: int = 0

    def add_job(self, job: JobState) -> None:
        """Add a job that the kernel is about to submit."""
        self.jobs[job.name] = job
        self.changes += 1

    def end_job(self, job: JobState) -> None:
        """Replace a job that has ended by a plain `JobState`, if this state has the job."""
        self.changes += 1
        if job.name in self.jobs:
            self.jobs[job.name] = JobState(
                job.name, job.host, job.node, job.last_line, took_s=job.took_s, ended=job.state
            )

    def apply_message(self, update: NodeUpdate | JobUpdate) -> None:
        """Apply a message from a node or from the farm's process to this state.

        For a message about a job, record the job's node and host, whether the job runs, and the
        last line of its output. If the job has ended or is unknown, record nothing of this. For a
        message about a node, see `_apply_node_update`. Every message adds 1 to `changes`.
        """
        self.changes += 1
        if isinstance(update, NodeUpdate):
            self._apply_node_update(update)
        elif (job := self.jobs.get(update.job)) is not None and job.state in ("queued", "running"):
            job.node, job.host = update.node, self.host_of(update.node)
            job.runs = job.runs or update.state == "running"
            lines = [line for line in update.lines.replace("\r", "\n").split("\n") if line]
            job.last_line = lines[-1] if lines else job.last_line

    def mark_closed(self) -> None:
        """Mark the farm as closed, so that the table no longer shows its nodes."""
        self.is_closed = True
        self.changes += 1

    def host_of(self, node: str) -> str:
        """Return the name of a node's host; "" if the node or its host is unknown."""
        return self.nodes[node].host if node in self.nodes else ""

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state. The keys are `STATES`, in this order."""
        found = Counter(job.state for job in list(self.jobs.values()))
        return {state: found[state] for state in STATES}

    @property
    def ready(self) -> list[NodeUpdate]:
        """The nodes that accept jobs, each as a `NodeUpdate` with its newest state."""
        return [node for node in list(self.nodes.values()) if node.state == "ready"]

    def eta_s(self) -> float | None:
        """Estimate the seconds until all jobs have ended, from the mean time of jobs that returned.

        The estimate assumes that each remaining job takes this mean time, and that each ready node
        runs `slots` jobs at a time until the end. A job that is running counts as a whole job. If
        no node is ready, the estimate assumes one slot.

        Returns:
            The estimate. None if no job has returned yet, or if no job is queued or running.
        """
        jobs = list(self.jobs.values())
        took = [job.took_s for job in jobs if job.state == "done" and job.took_s]
        counts = self.counts()
        left = counts["queued"] + counts["running"]
        if not took or not left:
            return None
        return sum(took) / len(took) * left / max(1, len(self.ready) * self.slots)

    def _apply_node_update(self, update: NodeUpdate) -> None:
        """Apply a change of a node's state.

        A message may arrive late and report an earlier state. Of such a message, store only the
        host's name. If the node is lost or has left, mark the node's running jobs as queued again.
        """
        node = self.nodes.setdefault(update.node, update)
        node.host = update.host or node.host
        if NODE_STATES.index(update.state) >= NODE_STATES.index(node.state):
            node.state, node.why = update.state, update.why
        if node.state in ("lost", "left"):
            for job in list(self.jobs.values()):
                job.runs = job.runs and job.node != node.node

    def __repr__(self) -> str:
        return mime_bundle(self)["text/plain"]

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return mime_bundle(self)


def head_line(state: FarmState) -> str:
    """Return one line: the number of nodes, of jobs in each state, and the estimated time left."""
    counts = ", ".join(f"{number} {name}" for name, number in state.counts().items() if number)
    eta_s = state.eta_s()
    eta = f" · about {eta_s:.0f} s left" if eta_s is not None else ""
    nodes = "closed" if state.is_closed else _nodes_text(state)
    return f"{state.name} on {state.pools}: {nodes} · {counts or 'no jobs'}{eta}"


def _nodes_text(state: FarmState) -> str:
    nodes = f"{len(state.ready)} node{'s' * (len(state.ready) != 1)}"
    bounds = f" ({state.least} to {state.most})" if state.least != state.most else ""
    jobs = f"{state.slots} job{'s' * (state.slots != 1)}"
    return f"{nodes}{bounds}; each runs at most {jobs} at a time"


def rows(state: FarmState) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: up to `SHOWN_JOBS` nodes, then up to `SHOWN_JOBS` jobs.

    The columns are name, state, host, and the last line or reason.

    - Nodes: the newest nodes, except nodes that have left the farm. For a closed farm, no nodes.
    - Jobs: sorted by state (running, failed, cancelled, done, queued). In each state, the newest
      job is first. Queued jobs are an exception: the oldest queued job is first, because it starts
      next.
    """
    there = [] if state.is_closed else list(state.nodes.values())
    nodes = [n for n in there if n.state != "left"]
    found = [
        (n.node, n.state, n.host, n.why.partition("\n")[0][:WHY_CHARS]) for n in nodes[-SHOWN_JOBS:]
    ]
    by_state: defaultdict[str, list[JobState]] = defaultdict(list)
    for job in list(state.jobs.values()):
        by_state[job.state].append(job)
    newest_first = [by_state[it][::-1] for it in ("running", "failed", "cancelled", "done")]
    jobs = [*itertools.chain(*newest_first), *by_state["queued"]]
    found += [(it.name, it.state, it.host, it.last_line[:LINE_CHARS]) for it in jobs[:SHOWN_JOBS]]
    return found


def mime_bundle(state: FarmState) -> dict[str, str]:
    """Return the head line and the table as text and as HTML, by MIME type.

    The HTML escapes all text, because hosts that run jobs can send any text.
    """
    cells = rows(state)
    table = columns([("name", "state", "host", "last line"), *cells]) if cells else []
    title, text = head_line(state), "\n".join(table)
    html = f"<div style='{FRAME}'>{escape(title)}{as_html(text)}</div>"
    return {"text/plain": "\n".join([title, *(f"  {it}" for it in table)]), "text/html": html}
