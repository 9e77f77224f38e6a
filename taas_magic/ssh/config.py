"""OpenSSH's files: how a host is reached, which key must be its own, which keys it is offered.

Whoever can `ssh gpu1` can use `gpu1` in a pool. paramiko reads ssh_config(5) but for `Include`,
which is unfolded here. When it connects it asks `KnownHosts`, before anything secret is sent to the
host, and then `UserKeys`.
"""

import base64
import contextlib
import glob
import hmac
import os
import re
import shlex
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from paramiko import (
    Agent,
    ConfigParseError,
    MissingHostKeyPolicy,
    PKey,
    SSHClient,
    SSHConfig,
    SSHException,
    Transport,
)
from paramiko.auth_strategy import AuthFailure, AuthSource, AuthStrategy
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.pkey import PublicBlob
from paramiko.ssh_exception import BadAuthenticationType

from taas_magic.errors import PoolError, UsageError
from taas_magic.store.rule import user_name

SSH_PORT = 22
MAX_JUMPS = 8

_HOST = re.compile(
    r"(?:ssh://)?(?:(?P<user>\S+)@)?(?:\[(?P<bracketed>[^\]]+)\]|(?P<name>[^:@\s]+))"
    r"(?::(?P<port>\d+))?/?"
)
_COMMENT = re.compile(r'^((?:"[^"]*"|[^"])*?)\s#.*$')
_WHOLE_LINES = ("proxycommand", "localcommand", "remotecommand", "knownhostscommand")
"""What follows these words is a shell's, to the end of the line."""

_AGENT_S = 5.0
_ASK_KEYS, _KEYS = b"\0\0\0\1\x0b", b"\x0c"
"""Of the ssh agent's protocol: a request for its keys, with its length; the answer's first byte."""

_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_USER_KNOWN = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"


@dataclass(frozen=True)
class Target:
    """How one host is reached.

    Attributes:
        label: The host as the user wrote it.
        hostname: Its name or address, where the connection goes.
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
    def address(self) -> str:
        """`hostname:port`, for messages."""
        return f"{self.hostname}:{self.port}"

    @property
    def is_alias(self) -> bool:
        """Whether known_hosts has it by another name than its own."""
        return self.known_as not in (self.hostname, f"[{self.hostname}]:{self.port}")


def read_config(path: str | None) -> SSHConfig:
    """Read what ssh reads: the user's file, then the system's; or only `path`, as with `ssh -F`.

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
    except (ConfigParseError, ValueError) as error:
        raise UsageError(f"{' or '.join(map(str, files))}: {error}") from error


def _unfolded(file: Path, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a file, with those of the files that it includes in their place.

    The block that an `Include` stands in goes on after it.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    folder = "/etc/ssh" if str(file).startswith("/etc/") else os.path.expanduser("~/.ssh")
    block = "Host *"
    for line in map(_for_paramiko, lines):
        first, *words = line.split() or [""]
        if first.lower() == "include" and depth < MAX_JUMPS:
            for word in words:
                pattern = os.path.join(folder, os.path.expanduser(word.strip('"')))
                for included in sorted(glob.glob(pattern)):
                    yield from _unfolded(Path(included), depth + 1)
            yield block
            continue
        if first.lower() in ("host", "match"):
            block = line
        yield line


def _for_paramiko(line: str) -> str:
    """Return a line of ssh's configuration without what ssh understands and paramiko does not.

    That are comments after words, and `all` beside `final`, as Red Hat's own configuration has it.
    """
    first, *words = line.split() or [""]
    if first.lower() == "match" and "final" in words:
        line = re.sub(r"\ball\b", "", line)
    return line if first.lower() in _WHOLE_LINES else _COMMENT.sub(r"\1", line)


def find_target(host: str, config: SSHConfig, through: tuple[str, ...] = ()) -> Target:
    """Return how to reach `host`: `gpu1`, `me@gpu3:2222`, `[fe80::1]:22` or `ssh://gpu1`.

    Args:
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
    try:
        found = config.lookup(match["bracketed"] or match["name"])
        hostname, port = found["hostname"], int(match["port"] or found.get("port", SSH_PORT))
    except (SSHException, LookupError, ValueError) as error:
        raise UsageError(f"host {host}: ssh's configuration of it: {error}") from error
    # as for ssh, the first one counts
    proxy = next((key for key in found if key in ("proxyjump", "proxycommand")), "")
    jump = _jump(found[proxy], config, (*through, host)) if proxy == "proxyjump" else None
    return Target(
        label=host,
        hostname=hostname,
        port=port,
        user=match["user"] or found.get("user") or user_name(),
        known_as=found.get("hostkeyalias")
        or (hostname if port == SSH_PORT else f"[{hostname}]:{port}"),
        identity_files=_identity_files(cast("list[str] | None", found.get("identityfile"))),
        identities_only=found.get("identitiesonly") == "yes",
        known_hosts=_known_hosts(
            found.get("userknownhostsfile"), found.get("globalknownhostsfile")
        ),
        jump=jump,
        proxy_command=_not_none(found[proxy]) if proxy == "proxycommand" else None,
    )


def _jump(value: str | None, config: SSHConfig, through: tuple[str, ...]) -> Target | None:
    """Return the last of `a,b,c`, reached through the ones before it."""
    way: Target | None = None
    for host in filter(None, map(str.strip, (_not_none(value) or "").split(","))):
        here = find_target(host, config, through)
        way = here if way is None else replace(here, jump=way, proxy_command=None)
    return way


def _identity_files(configured: list[str] | None) -> tuple[str, ...]:
    if configured is None:
        usual = [os.path.expanduser(f"~/.ssh/{name}") for name in _DEFAULT_KEYS]
        return tuple(path for path in usual if os.path.exists(path))
    return tuple(os.path.expanduser(path) for path in configured if _not_none(path))


def _known_hosts(user: str | None, system: str | None) -> tuple[str, ...]:
    words = f"{user or _USER_KNOWN} {system or _SYSTEM_KNOWN}".split()
    return tuple(os.path.expanduser(word) for word in words if _not_none(word))


def _not_none(value: str | None) -> str | None:
    """Return the value of a setting; None where it says "none"."""
    return None if value is None or value.lower() == "none" else value


class KnownHosts(MissingHostKeyPolicy):
    """Accepts a host's key if the user's known_hosts files have it, else raises.

    It is the policy of a client that is told no host keys: paramiko knows no patterns (`*.lab`),
    fails on lines with a mark (@revoked), and names neither the file nor what to do.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._portless = target.known_as if target.is_alias else target.hostname
        self._known: list[tuple[str, PKey]] = []
        """The host's keys, each with the file that has it."""
        self._of_any_port: list[tuple[str, PKey]] = []
        """Those of lines without its port, which count where no line has that, as for ssh."""
        self._revoked: list[str] = []
        for path in target.known_hosts:
            # As ssh does: what cannot be read makes nothing known.
            with contextlib.suppress(OSError):
                for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
                    with contextlib.suppress(InvalidHostKey, SSHException, ValueError):
                        self._add(path, " ".join(line.split()))

    def _add(self, path: str, line: str) -> None:
        if line.startswith("@revoked"):
            self._revoked.append(line)
        elif line and line[0] not in "#@" and (entry := HostKeyEntry.from_line(line)):
            if _is_named(self._target.known_as, entry.hostnames):
                self._known.append((path, entry.key))
            elif _is_named(self._portless, entry.hostnames):
                self._of_any_port.append((path, entry.key))

    def make_transport(self, sock: Any, **options: Any) -> Transport:
        """Have the host show a key of a type that is known of it, where it has several."""
        transport = Transport(sock, **options)
        offered = transport.get_security_options()
        known = {key.get_name() for _, key in self._known or self._of_any_port}
        if "ssh-rsa" in known:
            known |= {"rsa-sha2-512", "rsa-sha2-256"}
        offered.key_types = sorted(offered.key_types, key=lambda name: name not in known)
        return transport

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        """Return when `key` is known to be the host's own.

        Raises:
            PoolError: It is unknown, has changed, or is revoked; with the fingerprint and what to
                do.
        """
        target = self._target
        shown = (
            f"host {target.label}: the SSH host key of {target.address}, "
            f"{key.get_name()} {key.fingerprint},"
        )
        text = base64.b64encode(key.asbytes()).decode()
        if any(text in line for line in self._revoked):
            raise PoolError(f"{shown} is marked @revoked in known_hosts: it is refused")
        known = self._known or self._of_any_port
        if any(own.asbytes() == key.asbytes() for _, own in known):
            return
        for path, own in self._known:
            forget = f"ssh-keygen -R {shlex.quote(target.known_as)} -f {shlex.quote(path)}"
            raise PoolError(
                f"{shown} is not the one that {path} has ({own.fingerprint}): the host was set up "
                "anew, or somebody is in between; nothing was sent to it.\n"
                + _how_to_accept(target, key, forget)
            )
        raise PoolError(
            f"{shown} is not known; nothing was sent to it.\n{_how_to_accept(target, key)}"
        )


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a line of known_hosts is of a host: by its name, a hash of it, or a pattern.

    Raises:
        ValueError: A hash is none.
    """
    found = False
    for pattern in patterns:
        if pattern.startswith("|1|"):
            salt, mark = map(base64.b64decode, pattern[3:].split("|"))
            found = found or hmac.digest(salt, name.lower().encode(), "sha1") == mark
        elif _glob(pattern.lstrip("!")).fullmatch(name.lower()):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _glob(pattern: str) -> re.Pattern[str]:
    """Return a pattern of ssh's, which knows `*` and `?` alone."""
    return re.compile(re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", "."))


def _how_to_accept(target: Target, key: PKey, *commands: str) -> str:
    """Say how to see whether a key is the host's own, and what makes it known then."""
    name = key.get_name()
    kind = next((kind for kind in ("ed25519", "ecdsa", "rsa") if kind in name), name)
    if target.jump or target.proxy_command:
        accept = f"ssh {shlex.quote(target.label)}   (it asks whether the key is right)"
    else:
        port = "" if target.port == SSH_PORT else f"-p {target.port} "
        into = target.known_hosts[0] if target.known_hosts else "~/.ssh/known_hosts"
        alias = shlex.quote(f"s|^[^ ]*|{target.known_as}|")
        name_it = f" | sed {alias}" if target.is_alias else ""
        scan = f"ssh-keyscan {port}-t {kind} {target.hostname}{name_it}"
        accept = f"{scan} >> {shlex.quote(into)}"
    check = (
        "Compare the fingerprint with what its owner says, or on the host itself with "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub`, then:"
    )
    return "\n  ".join([check, *commands, accept])


class UserKeys(AuthStrategy):
    """Offers the ssh agent's keys, then those of files, until the host takes one."""

    def __init__(self, target: Target) -> None:
        super().__init__(ssh_config=SSHConfig())
        self._target = target

    def get_sources(self) -> Iterator[AuthSource]:
        """Yield the keys in the order in which they are offered."""
        target, agent = self._target, Agent() if _agent_answers() else None
        blobs = {path: _public_blob(path) for path in target.identity_files}
        offered = set()
        try:
            keys = agent.get_keys() if agent else ()
            # those of files first: a host hears no more than a few
            for key in sorted(keys, key=lambda key: key.asbytes() not in blobs.values()):
                if not target.identities_only or key.asbytes() in blobs.values():
                    offered.add(key.asbytes())
                    yield _Key(target.user, f"agent's key {key.fingerprint}", key)
            for path, blob in blobs.items():
                if blob not in offered:
                    yield _Key(target.user, path)
        finally:
            if agent:
                agent.close()


def _agent_answers() -> bool:
    """Return whether there is an ssh agent that says which keys it has.

    paramiko would wait for ever for one that was forwarded here by a machine that sleeps.
    """
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(_AGENT_S)
        agent.connect(os.environ["SSH_AUTH_SOCK"])
        agent.sendall(_ASK_KEYS)
        return agent.makefile("rb").read(5)[4:] == _KEYS
    return False


class _Key(AuthSource):
    """A key, and what to call it when the host refuses it.

    Args:
        key: None reads the file `name`, when its turn comes.
    """

    def __init__(self, user: str, name: str, key: PKey | None = None) -> None:
        super().__init__(user)
        self._name, self._key = name, key

    def __repr__(self) -> str:
        return self._name

    def authenticate(self, transport: Transport) -> list[str]:
        key = _load(self._name) if self._key is None else self._key
        if more := transport.auth_publickey(self.username, key):
            raise SSHException(
                f"the host asks for {', '.join(more)} besides, which cannot be given"
            )
        return []


def _load(path: str) -> PKey:
    """Read a private key.

    Raises:
        SSHException: It cannot be used; says why.
    """
    try:
        return PKey.from_path(path)
    except FileNotFoundError:
        raise SSHException("there is no such file") from None
    except (OSError, SSHException, ValueError, TypeError) as error:
        if "encrypted" in str(error).lower() or "password" in str(error).lower():
            name = shlex.quote(path)
            advice = f"it has a passphrase: `ssh-add {name}` unlocks it for the ssh agent"
            if not os.path.exists(f"{path}.pub"):
                advice += f"; `ssh-keygen -y -f {name} > {name}.pub` says which of its keys it is"
            raise SSHException(advice) from error
        raise SSHException(f"cannot be read: {error}") from error


def _public_blob(path: str) -> bytes:
    """Return the public half of a key, which lies beside its file; empty where it does not.

    `path` may itself be the public half of a key that an agent has.
    """
    for file in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError):
            return PublicBlob.from_file(file).key_blob
    return b""


def refusal(target: Target, failure: AuthFailure) -> str:
    """Return who was not let in where, what was tried, and what to do."""
    tried = [f"  {each.source!r}: {_why(each.result)}" for each in failure.result]
    if not tried:
        tried = ["  no key: there is none in ~/.ssh and no ssh agent has one"]
    if "SSH_AUTH_SOCK" not in os.environ:
        tried.append("  no ssh agent (SSH_AUTH_SOCK is not set)")
    elif not _agent_answers():
        tried.append(f"  the ssh agent does not answer ({os.environ['SSH_AUTH_SOCK']})")
    return "\n".join(
        [
            f"host {target.label}: SSH authentication as {target.user!r} at "
            f"{target.address} failed. Tried:",
            *tried,
            f"`ssh {target.label}` must work without a question; `ssh-copy-id {target.label}` "
            "puts your public key there",
        ]
    )


def _why(error: object) -> str:
    if isinstance(error, BadAuthenticationType):
        return f"the host takes only {', '.join(error.allowed_types)}"
    return str(error) if type(error) is SSHException else "refused"
