"""GPUs and network interfaces of this host.

A host's own name is no help: Debian resolves it to 127.0.1.1, and a host with several networks has
one name for all of them. What counts is the address at which others have just reached this host.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil


def count_gpus() -> int:
    """CUDA devices that a process of this machine would see, without asking CUDA.

    Asking torch would make a CUDA context in the kernel, which no fork of it survives.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    devices = (path.name for path in Path("/dev").glob("nvidia*"))
    return sum(1 for device in devices if re.fullmatch(r"nvidia\d+", device))


def device_type() -> str:
    """What `.to(taas.device_type)` moves to: "cuda" or "cpu".

    In a rank, what torch finds there. Elsewhere, whether this machine has CUDA devices: to ask
    torch would load it, and CUDA with it, into the notebook's kernel.
    """
    if "LOCAL_RANK" in os.environ and "torch" in sys.modules:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if count_gpus() else "cpu"


LOOPBACK = "127.0.0.1"

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def address_of(name: str) -> str:
    """The address of an interface, IPv4 where it has one; "" where there is no such interface."""
    addresses = psutil.net_if_addrs().get(name, [])
    for family in _FAMILIES:
        for seen in addresses:
            if seen.family == family:
                return seen.address
    return ""


def name_of(address: str) -> str:
    """The name of the interface that has an address; "" where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(seen.address == address and seen.family in _FAMILIES for seen in addresses):
            return name
    return ""


def facing(peer: str) -> str:
    """The address of this host on the route to another; sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address: str = probe.getsockname()[0]
    return address


def choose(interface: str, environ: Mapping[str, str], scheduler: str) -> str:
    """The address that ranks and fetchers of this host use.

    Args:
        interface: What the pool's settings say: a name or an address; "" finds one.
        environ: The agent's environment; under sshd it says where this host was reached.
        scheduler: Host part of the scheduler's address as this host reaches it.

    Raises:
        ValueError: The interface that the settings name is not here.
    """
    if interface:
        address = interface if name_of(interface) else address_of(interface)
        if not address:
            have = ", ".join(sorted(psutil.net_if_addrs()))
            raise ValueError(f"this host has no network interface {interface!r}; it has {have}")
        return address
    reached = environ.get("SSH_CONNECTION", "").split()
    name = name_of(reached[2]) if len(reached) == 4 else ""
    # a batch job inherits the variable from the host on which it was submitted: not ours then
    return address_of(name) if name else facing(scheduler)
