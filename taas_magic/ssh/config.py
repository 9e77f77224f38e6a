"""From a host as the user writes it, and ssh's own configuration, to how it is reached. Pure.

The files are those of OpenSSH (ssh_config(5)), so that whoever can `ssh gpu1` can use `gpu1` in a
pool. paramiko reads them but for `Include`, which is unfolded here.
"""

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from paramiko import ConfigParseError, SSHConfig

from taas_magic.errors import UsageError
from taas_magic.store.rule import user_name

SSH_PORT = 22
MAX_JUMPS = 8

_HOST = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@\s]+)@)?(?:\[(?P<bracketed>[^\]]+)\]|(?P<name>[^:@\s]+))"
    r"(?::(?P<port>\d+))?/?"
)
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_USER_KNOWN = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"


@dataclass(frozen=True)
class Target:
    """How one host is reached.

    Attributes:
        label: The host as the user wrote it.
        hostname: Its name or address, where the connection goes.
        port: Its sshd's port.
        user: Whom to be there.
        known_as: What its key is filed under in known_hosts.
        identity_files: Private keys to offer, those of the configuration or the usual ones.
        identities_only: Whether an agent's other keys are kept back.
        known_hosts: Files with known host keys; the user's first.
        jump: The host through which it is reached.
        proxy_command: The program whose standard input and output lead to it.
    """

    label: str
    hostname: str
    port: int
    user: str
    known_as: str
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    known_hosts: tuple[str, ...] = ()
    jump: "Target | None" = None
    proxy_command: str | None = None

    @property
    def place(self) -> str:
        """`user@host:port`, for messages."""
        return f"{self.user}@{self.hostname}:{self.port}"


def read_config(path: str | None) -> SSHConfig:
    """What ssh reads: the user's file, then the system's; or only `path`, as with `ssh -F`.

    Raises:
        UsageError: A file cannot be read or understood.
    """
    if path is None:
        files = [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
        files = [file for file in files if file.is_file()]
    else:
        files = [Path(path).expanduser()]
    lines = [line for file in files for line in ["Host *", *_unfolded(file)]]
    try:
        return SSHConfig.from_text("\n".join(lines))
    except ConfigParseError as error:
        raise UsageError(f"{' or '.join(map(str, files))}: {error}") from error


def find_target(host: str, config: SSHConfig, through: tuple[str, ...] = ()) -> Target:
    """How to reach `host`: `gpu1`, `me@gpu3:2222`, `[fe80::1]:22` or `ssh://gpu1`.

    Args:
        host: The host as the user wrote it.
        config: From `read_config`.
        through: The hosts that are reached through this one.

    Raises:
        UsageError: It is no such name, or jumps lead in a circle.
    """
    match = _HOST.fullmatch(host)
    if match is None:
        raise UsageError(f'"{host}" is no host: write name, user@name or user@name:port')
    if host in through or len(through) > MAX_JUMPS:
        raise UsageError(f"ProxyJump leads in a circle: {' through '.join((*through, host))}")
    name = match["bracketed"] or match["name"]
    found = config.lookup(name)
    hostname, port = found["hostname"], int(match["port"] or found.get("port", SSH_PORT))
    user = match["user"] or found.get("user") or user_name()
    alias = found.get("hostkeyalias")
    jump = _jump(found.get("proxyjump"), config, (*through, host))
    return Target(
        label=host,
        hostname=hostname,
        port=port,
        user=user,
        known_as=alias or (hostname if port == SSH_PORT else f"[{hostname}]:{port}"),
        identity_files=_identity_files(cast("list[str] | None", found.get("identityfile"))),
        identities_only=found.get("identitiesonly") == "yes",
        known_hosts=_known_hosts(
            found.get("userknownhostsfile"), found.get("globalknownhostsfile")
        ),
        jump=jump,
        proxy_command=None if jump else _not_none(found.get("proxycommand")),
    )


def _jump(value: str | None, config: SSHConfig, through: tuple[str, ...]) -> Target | None:
    """The last of `a,b,c`, reached through the ones before it."""
    hosts = [host.strip() for host in (_not_none(value) or "").split(",") if host.strip()]
    way: Target | None = None
    for host in hosts:
        here = find_target(host, config, through)
        way = here if way is None else _with_jump(here, way)
    return way


def _with_jump(target: Target, jump: Target) -> Target:
    return Target(**{**vars(target), "jump": jump, "proxy_command": None})


def _identity_files(configured: list[str] | None) -> tuple[str, ...]:
    if configured is None:
        usual = [os.path.expanduser(f"~/.ssh/{name}") for name in _DEFAULT_KEYS]
        return tuple(path for path in usual if os.path.exists(path))
    return tuple(os.path.expanduser(path) for path in configured if path.lower() != "none")


def _known_hosts(user: str | None, system: str | None) -> tuple[str, ...]:
    words = f"{user or _USER_KNOWN} {system or _SYSTEM_KNOWN}".split()
    return tuple(os.path.expanduser(word) for word in words if word.lower() != "none")


def _not_none(value: str | None) -> str | None:
    return None if value is None or value.lower() == "none" else value


def _unfolded(file: Path, depth: int = 0) -> Iterator[str]:
    """The lines of a file, with those of the files that it includes in their place.

    The block that an `Include` stands in goes on after it.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    block = "Host *"
    for line in lines:
        words = line.split()
        first = words[0].lower() if words else ""
        if first == "include" and depth < MAX_JUMPS:
            for word in words[1:]:
                for included in _included(word.strip('"'), file):
                    yield from _unfolded(included, depth + 1)
            yield block
            continue
        if first in ("host", "match"):
            block = line
        yield line


def _included(pattern: str, file: Path) -> list[Path]:
    base = "/etc/ssh" if str(file).startswith("/etc/") else os.path.expanduser("~/.ssh")
    return [Path(found) for found in sorted(glob.glob(os.path.join(base, _home(pattern))))]


def _home(pattern: str) -> str:
    return os.path.expanduser(pattern)
