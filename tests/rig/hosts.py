"""Simulated hosts on one machine, each with its own network, files, processes and sshd.

hosts.sh makes them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.eventually import HUNG_S

SCRIPT = Path(__file__).parent / "hosts.sh"
ROOT = Path(__file__).parents[2]
NAMESPACES = Path("/run/netns")
NEEDS = ("ip", "tc", "iptables", "nsenter", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")


def missing() -> str:
    """Return why this machine cannot simulate hosts; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "making hosts needs Linux and root"
    lacking = [name for name in NEEDS if shutil.which(name) is None]
    if lacking:
        return f"missing: {', '.join(lacking)} (Debian: openssh-server iproute2 iptables)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "network namespaces cannot be made here"


@dataclass(frozen=True)
class Hosts:
    """Running hosts, numbered from 1.

    Attributes:
        prefix: Start of the hosts' names.
        subnet: First three parts of the hosts' addresses; this machine has the address `.254`.
        state: Folder with `ssh_config`, `known_hosts` and `id_ed25519`.
        environ: Environment variables for hosts.sh.
    """

    prefix: str
    subnet: str
    state: Path
    count: int
    environ: dict[str, str] = field(repr=False)

    @property
    def names(self) -> list[str]:
        return [self.name(number) for number in range(1, self.count + 1)]

    @property
    def ssh_config(self) -> Path:
        """The file for `ssh -F`, and for a pool's option `ssh_config`."""
        return self.state / "ssh_config"

    @property
    def caller(self) -> str:
        """The address of this machine in the hosts' network."""
        return f"{self.subnet}.254"

    def name(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def address(self, number: int) -> str:
        return f"{self.subnet}.{number}"

    def exec(self, number: int, *command: str) -> str:
        """Run a command in a host, without ssh; return its output.

        Raises:
            RuntimeError: The command failed. The message has the command's output.
        """
        return self._script("exec", number, *command)

    def processes(self, number: int) -> list[psutil.Process]:
        """Return the processes of a host, without its pid 1 and sshd's listener.

        Also leave out zombies and `sleep`.
        """
        pid = int((self.state / str(number) / "pid").read_text())
        controller = psutil.Process(pid)
        kept = {pid} | {child.pid for child in controller.children() if _is_listener(child)}
        return [p for p in controller.children(recursive=True) if p.pid not in kept and _is_real(p)]

    def kill_processes(self, number: int, name: str = "") -> None:
        """Kill all processes of a host whose names start with `name`."""
        for process in self.processes(number):
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith(name):
                    process.kill()

    def left(self, number: int, ignoring: str = "-") -> list[psutil.Process]:
        """Wait at most `HUNG_S` seconds for a host's current processes to end.

        Args:
            number: Number of the host.
            ignoring: Prefix of the names of processes to ignore.

        Returns:
            The processes that have not ended.
        """
        found = [p for p in self.processes(number) if not name_of(p).startswith(ignoring)]
        _, alive = psutil.wait_procs(found, timeout=HUNG_S)
        return alive

    def cut(self, number: int) -> None:
        self._script("cut", number)

    def heal(self, number: int) -> None:
        self._script("heal", number)

    def hole(self, number: int) -> None:
        self._script("hole", number)

    def unhole(self, number: int) -> None:
        self._script("unhole", number)

    def limit(self, number: int, rate: str) -> None:
        """Limit a host's bandwidth in both directions, such as "1mbit"; "none" ends the limit."""
        self._script("limit", number, rate)

    def lose(self, number: int, percent: str) -> None:
        """Drop this percentage of the packets to a host; "none" ends the loss."""
        self._script("lose", number, percent)

    def deafen(self, number: int) -> None:
        """Drop all packets to a host; packets from the host still arrive."""
        self._script("deaf", number)

    def undeafen(self, number: int) -> None:
        self._script("deaf", number, "none")

    def kill(self, number: int) -> None:
        """End all processes of a host at once, as a power failure would."""
        self._script("kill", number)

    def _script(self, command: str, *words: object) -> str:
        """Run a command of hosts.sh, and return its output; raise RuntimeError if it fails."""
        done = subprocess.run(
            [str(SCRIPT), command, *map(str, words)],
            env={**os.environ, **self.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = f"{done.stdout}{done.stderr}".strip()
            raise RuntimeError(f"hosts.sh {command}: exit code {done.returncode}: {said}")
        return done.stdout


@contextmanager
def hosts_up(
    count: int,
    *,
    keep: Sequence[Path] = (),
    share: Sequence[Path] = (),
    debian: bool = False,
) -> Iterator[Hosts]:
    """Run hosts until the block ends; skip the test if this machine cannot simulate hosts.

    The hosts get names and a subnet that no other test process uses. Also remove hosts whose start
    failed.

    Args:
        count: Number of hosts.
        keep: Further folders of this machine that hosts see read-only. They always see this
            Python, its packages and the project.
        share: Folders of this machine that hosts can write.
        debian: Whether a host resolves its own name to 127.0.1.1, as on Debian.
    """
    if why := missing():
        pytest.skip(why)
    number = _reserve_number()
    prefix, subnet = f"t{number}h", f"10.77.{number}"
    seen = dict.fromkeys([sys.base_prefix, sys.prefix, str(ROOT), *map(str, keep)])
    environ = {
        "TAAS_HOSTS_PREFIX": prefix,
        "TAAS_HOSTS_SUBNET": subnet,
        "TAAS_HOSTS_STATE": str(_state_folder(number)),
        "TAAS_HOSTS_HIDE": f"/{ROOT.parts[1]}",
        "TAAS_HOSTS_KEEP": " ".join(seen),
        "TAAS_HOSTS_SHARE": " ".join(map(str, share)),
        "TAAS_HOSTS_DEBIAN": str(int(debian)),
    }
    made = Hosts(prefix, subnet, Path(environ["TAAS_HOSTS_STATE"]), count, environ)
    try:
        made._script("up", count)
        yield made
    finally:
        made._script("down")


def _state_folder(number: int) -> Path:
    return Path(f"/run/taas-rig-t{number}h")


def _reserve_number() -> int:
    """Return a number whose subnet, names and state folder are unused on this machine.

    The creation of the state folder reserves the number: only one of two test processes succeeds.
    """
    used = {
        address.address.rsplit(".", 1)[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
    }
    for step in range(250):
        number = 1 + (os.getpid() + step) % 250
        if f"10.77.{number}" in used or any(NAMESPACES.glob(f"t{number}h*")):
            continue
        with suppress(FileExistsError):
            _state_folder(number).mkdir(mode=0o700)
            return number
    raise RuntimeError(f"no subnet of 10.77.1 to 10.77.250 is free: {sorted(used)}")


def name_of(process: psutil.Process) -> str:
    """Return a process's name; "" if the process has ended."""
    with suppress(psutil.Error):
        return str(process.name())
    return ""


def _is_listener(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "/run/rig/sshd_config" in process.cmdline() or process.name() == "sleep"
    return True


def _is_real(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and process.name() != "sleep"
    return False
