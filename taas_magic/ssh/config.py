"""Reads OpenSSH's files: ssh_config, known_hosts and private keys, for connections by paramiko.

A user who can run `ssh gpu1` can use `gpu1` in a pool. paramiko can read ssh_config(5) except
`Include` lines, which this module expands. When paramiko connects, `KnownHosts` checks the host's
key before anything secret is sent to the host. Then `UserKeys` offers the user's keys to the host.
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
"""Keywords of ssh_config whose value is a shell command, so that a `#` in it begins no comment."""

_AGENT_S = 5.0
_ASK_KEYS, _KEYS = b"\0\0\0\1\x0b", b"\x0c"
"""Messages of the ssh agent's protocol: a request for its keys, and the type byte of its answer.

The request begins with its length, in four bytes.
"""

_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_USER_KNOWN = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"


@dataclass(frozen=True)
class Target:
    """Address of a host, and the settings by which ssh would connect to it.

    Attributes:
        label: The host as the user wrote it.
        hostname: Name or address to connect to.
        port: Port of the host's sshd.
        user: Name of the user to log in as.
        known_as: Name under which known_hosts files list the host's key.
        identity_files: Paths of the private keys to offer: those in the configuration, else the
            usual ones in ~/.ssh that exist.
        identities_only: Whether to offer only the keys of `identity_files`, even if the ssh agent
            has more.
        known_hosts: Paths of the known_hosts files; the user's come first.
        jump: Jump host through which the connection goes; None for a direct connection.
        proxy_command: Shell command of a program whose standard input and output are the connection
            to the host; None if there is none.
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
        """The address as `hostname:port`, for messages."""
        return f"{self.hostname}:{self.port}"

    @property
    def is_alias(self) -> bool:
        """Whether known_hosts lists the host under another name (`HostKeyAlias`)."""
        return self.known_as not in (self.hostname, f"[{self.hostname}]:{self.port}")


def read_config(path: str | None) -> SSHConfig:
    """Read the configuration files that ssh would read.

    Args:
        path: The only file to read, as with `ssh -F`; None for the user's file, then the system's.

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
    """Yield the lines of a configuration file, with each `Include` replaced by the included lines.

    After included lines, the `Host` or `Match` line that applied to the `Include` is repeated,
    because an included file may contain such lines of its own.

    Raises:
        UsageError: A file cannot be read.
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
    """Return a configuration line without the syntax that ssh accepts and paramiko does not.

    This removes a comment at the end of a line, and `all` in `Match final all`, which Red Hat's
    configuration contains.
    """
    first, *words = line.split() or [""]
    if first.lower() == "match" and "final" in words:
        line = re.sub(r"\ball\b", "", line)
    return line if first.lower() in _WHOLE_LINES else _COMMENT.sub(r"\1", line)


def find_target(host: str, config: SSHConfig, through: tuple[str, ...] = ()) -> Target:
    """Return the `Target` of a host, from its name and ssh's configuration.

    Args:
        host: The host, such as `gpu1`, `me@gpu3:2222`, `[fe80::1]:22` or `ssh://gpu1`.
        config: The configuration, from `read_config`.
        through: The hosts for which `host` is a jump host; a circle is detected by them.

    Raises:
        UsageError: `host` has none of these forms, or jump hosts lead in a circle.
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
    # if both are set, the first one counts, as in ssh
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
    """Return the last jump host of a `ProxyJump` value; each one is reached through the one before.

    Args:
        value: A value such as `a,b,c`, "none", or None.
        config: The configuration, from `read_config`.
        through: See `find_target`.
    """
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
    """Return the value of a setting; None if it is "none", which switches the setting off."""
    return None if value is None or value.lower() == "none" else value


class KnownHosts(MissingHostKeyPolicy):
    """Accepts a host's key if the user's known_hosts files list it, and raises PoolError otherwise.

    paramiko's client gets no list of host keys, so it passes every key to this policy. Its own
    check is not used for three reasons. It does not support patterns (`*.lab`), it fails on lines
    with a marker (`@revoked`), and its error names neither the file nor a remedy.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._portless = target.known_as if target.is_alias else target.hostname
        self._known: list[tuple[str, PKey]] = []
        """Known keys of the host, each with the path of the file that lists it."""
        self._of_any_port: list[tuple[str, PKey]] = []
        """The same for lines that name the host without its port.

        As in ssh, they count only if no line names the host with its port.
        """
        self._revoked: list[str] = []
        for path in target.known_hosts:
            # as ssh does, skip files and lines that cannot be read
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
        """Return paramiko's transport, set to ask first for key types that known_hosts lists.

        A host may have keys of several types, and known_hosts may list only one of them.
        """
        transport = Transport(sock, **options)
        offered = transport.get_security_options()
        known = {key.get_name() for _, key in self._known or self._of_any_port}
        if "ssh-rsa" in known:
            known |= {"rsa-sha2-512", "rsa-sha2-256"}
        offered.key_types = sorted(offered.key_types, key=lambda name: name not in known)
        return transport

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        """Check the key that a host has shown; called by paramiko.

        Raises:
            PoolError: The key is unknown, revoked, or not the one in known_hosts. The message has
                the key's fingerprint and a remedy.
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
    """Return whether a line of known_hosts applies to a host.

    Args:
        name: Name of the host.
        patterns: The line's names: plain names, hashed names, or patterns such as `*.lab`.

    Raises:
        ValueError: A hashed name is malformed.
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
    """Return the regular expression for a pattern of ssh, in which only `*` and `?` are special."""
    return re.compile(re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", "."))


def _how_to_accept(target: Target, key: PKey, *commands: str) -> str:
    """Return text for the user: how to verify a host's key, and the commands that accept it.

    Args:
        target: The host.
        key: The key that the host has shown.
        *commands: Commands to run before the key is accepted, such as one that removes an old key.
    """
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
    """Offers the user's keys to a host until it accepts one: the ssh agent's first, then files."""

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
            # of the agent's keys, first those that are also in identity files, because a host
            # disconnects after a few refused keys
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
    """Return whether an ssh agent exists and answers within `_AGENT_S`.

    The agent may be forwarded from a machine that has gone to sleep. paramiko would wait forever
    for the answer of such an agent.
    """
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(_AGENT_S)
        agent.connect(os.environ["SSH_AUTH_SOCK"])
        agent.sendall(_ASK_KEYS)
        return agent.makefile("rb").read(5)[4:] == _KEYS
    return False


class _Key(AuthSource):
    """A key to offer to a host.

    Args:
        user: Name of the user to log in as.
        name: Path of the key's file, or a description of the agent's key; messages show it.
        key: The agent's key; None to read the file `name` when the key is offered.
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
                f"the host also asks for {', '.join(more)}, which a pool cannot give"
            )
        return []


def _load(path: str) -> PKey:
    """Read a private key.

    Raises:
        SSHException: The key cannot be used; the message has the reason.
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
    """Return the public key that belongs to an identity file; empty if there is none.

    Args:
        path: Path of a private key with the public key in `<path>.pub`, or of a public key whose
            private key only the ssh agent has.
    """
    for file in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError):
            return PublicBlob.from_file(file).key_blob
    return b""


def refusal(target: Target, failure: AuthFailure) -> str:
    """Return the error message for a refused login: user, host, each key tried, and a remedy."""
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
