"""A private Slurm from Debian's packages: controller and nodes, without systemd and cgroups.

Its only node is this machine, or its nodes are simulated hosts (hosts.py).
"""

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.eventually import HUNG_S
from tests.rig.hosts import Hosts, hosts_up

NEEDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
PATH = f"{os.environ['PATH']}:/usr/sbin"
CORES = 8

CONFIG = """
ClusterName=rig
SlurmctldHost={machine}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={spool}/slurmd.pid
SlurmdSpoolDir={spool}
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={spool}/slurmd.log
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmdTimeout=30
InactiveLimit=0
KillWait=5
MessageTimeout=60
MinJobAge=300
SchedulerParameters=sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Attributes:
        folder: Folder with its configuration and logs, which the nodes share.
        hosts: The simulated hosts that are its nodes; None if this machine is the only node.
    """

    folder: Path
    hosts: Hosts | None

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands; return its output."""
        environ = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": PATH}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True, timeout=100
        )
        return done.stdout.strip()

    def jobs(self) -> dict[str, str]:
        """Return the states of waiting and running jobs, by job id."""
        lines = self.run("squeue", "--noheader", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until none is left."""
        if jobs := self.jobs():
            self.run("scancel", *jobs)
        self.wait_until_empty()

    def wait_until_empty(self) -> None:
        """Wait until no job waits or runs."""
        _wait(lambda: not self.jobs(), "jobs did not end")


def missing() -> str:
    """Return why this machine cannot run Slurm; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of our own needs Linux and root"
    lacking = [name for name in NEEDS if shutil.which(name, path=PATH) is None]
    return f"missing: {', '.join(lacking)} (Debian: slurm-wlm munge)" if lacking else ""


@contextmanager
def slurm_up(hosts: int = 0, share: tuple[Path, ...] = ()) -> Iterator[Slurm]:
    """Run Slurm until the block ends; skip the test if this machine cannot run Slurm.

    Args:
        hosts: Number of simulated hosts to use as nodes; 0 uses only this machine.
        share: Further folders that the hosts share with this machine, in addition to Slurm's own.
    """
    if why := missing():
        pytest.skip(why)
    with ExitStack() as until_end:
        folder = Path(tempfile.mkdtemp(prefix="taas-slurm-"))
        until_end.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "state").mkdir()
        made = until_end.enter_context(hosts_up(hosts, share=[folder, *share])) if hosts else None
        slurm = Slurm(folder, made)
        until_end.callback(shutil.rmtree, _spool_of(slurm), ignore_errors=True)
        _configure(slurm)
        until_end.callback(_stop, folder)
        _start(slurm)
        _wait(lambda: _has_idle_node(slurm), "no node is idle")
        until_end.callback(slurm.cancel_all)
        yield slurm


def _configure(slurm: Slurm) -> None:
    """Write slurm.conf with the nodes and free ports, cgroup.conf, and a new key for munge."""
    machine = socket.gethostname().partition(".")[0]
    address, names, places = "127.0.0.1", [machine], ["127.0.0.1"]
    spool = slurm.folder / "spool"
    if slurm.hosts is not None:
        address, names = slurm.hosts.caller, slurm.hosts.names
        places = [slurm.hosts.address(number + 1) for number in range(slurm.hosts.count)]
        spool = _spool_of(slurm)
    nodes = [
        f"NodeName={name} NodeAddr={place} CPUs={CORES} RealMemory=8000 State=UNKNOWN"
        for name, place in zip(names, places, strict=True)
    ]
    controller_port, node_port = _free_ports(2)
    values = {
        "machine": machine,
        "address": address,
        "folder": slurm.folder,
        "spool": spool,
        "controller_port": controller_port,
        "node_port": node_port,
        "nodes": "\n".join(nodes),
        "names": ",".join(names),
    }
    slurm.conf.write_text(CONFIG.format(**values))
    (slurm.folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
    key = slurm.folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)


def _start(slurm: Slurm) -> None:
    """Start munge, the controller, and the nodes: this machine or each of the hosts."""
    folder = slurm.folder
    slurm.run(
        "munged",
        "--force",
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munge.seed",
    )
    slurm.run("slurmctld")
    if slurm.hosts is None:
        (folder / "spool").mkdir()
        slurm.run("slurmd")
        return
    for number, name in enumerate(slurm.hosts.names, start=1):
        start = f"mkdir -p {_spool_of(slurm)}; SLURM_CONF={slurm.conf} /usr/sbin/slurmd -N {name}"
        slurm.hosts.exec(number, "bash", "-c", start)


def _has_idle_node(slurm: Slurm) -> bool:
    with suppress(subprocess.CalledProcessError):  # the controller does not listen yet
        return "idle" in slurm.run("sinfo", "-h", "-o", "%T")
    return False


def _spool_of(slurm: Slurm) -> Path:
    """Return the nodes' spool folder; its name is unique to this Slurm."""
    return Path("/var/tmp") / slurm.folder.name


def _stop(folder: Path) -> None:
    for name in ("spool/slurmd.pid", "slurmctld.pid", "munged.pid"):
        with suppress(OSError, ValueError):
            _end(int((folder / name).read_text()), name)


def _end(pid: int, name: str) -> None:
    os.kill(pid, signal.SIGTERM)
    _wait(lambda: not Path(f"/proc/{pid}").exists(), f"{name} did not end")


def _free_ports(count: int) -> list[int]:
    """Return free ports outside the range from which the system assigns ports."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(lowest // 2, lowest), 100):
        with suppress(OSError), socket.create_server(("", port)):
            found.append(port)
    return found[:count]


def _wait(condition: Callable[[], object], otherwise: str) -> None:
    deadline = time.monotonic() + HUNG_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.25)
