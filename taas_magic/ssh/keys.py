"""UserKeys on both sides of an SSH connection, as paramiko's SSHClient asks for them.

`KnownHosts` decides whether a host's key is the one that the user knows, before anything secret is
sent to the host; `UserKeys` says which of the user's keys are offered to it.
"""

import base64
import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from paramiko import (
    Agent,
    HostKeys,
    MissingHostKeyPolicy,
    PKey,
    SSHClient,
    SSHConfig,
    SSHException,
    Transport,
)
from paramiko.auth_strategy import AuthFailure, AuthSource, AuthStrategy, InMemoryPrivateKey
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.ssh_exception import BadAuthenticationType

from taas_magic.errors import PoolError
from taas_magic.ssh.config import SSH_PORT, Target

_RSA = ("rsa-sha2-512", "rsa-sha2-256")


class KnownHosts(MissingHostKeyPolicy):
    """Accepts a host's key if the user's known_hosts files have it, else raises.

    It is the policy of a client that is told no host keys: paramiko fails on lines with a mark
    (@revoked), and names neither the file nor what to do.

    Args:
        target: The host.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._files = _files(target)

    def types(self) -> list[str]:
        """Signature algorithms of the keys that are known of the host, which is to use one."""
        found = [
            name
            for keys in self._files.values()
            for name in keys.lookup(self._target.known_as) or ()
        ]
        spread = [_RSA if name == "ssh-rsa" else (name,) for name in found]
        return list(dict.fromkeys(name for names in spread for name in names))

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        """Return when `key` is known to be the host's own.

        Raises:
            PoolError: It is unknown, has changed, or is revoked; with the fingerprint and what to
                do.
        """
        target = self._target
        if _is_revoked(target, key):
            raise PoolError(
                f"{_shown(target, key)} is marked @revoked in known_hosts: it is refused"
            )
        if any(keys.check(target.known_as, key) for keys in self._files.values()):
            return
        for path, keys in self._files.items():
            if known := keys.lookup(target.known_as):
                raise PoolError(_changed(target, key, path, next(iter(known.values()))))
        raise PoolError(_unknown(target, key))


class UserKeys(AuthStrategy):
    """Offers the ssh agent's keys, then those of files, until the host takes one.

    Args:
        target: The host.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(ssh_config=SSHConfig())
        self._target = target

    def get_sources(self) -> Iterator[AuthSource]:
        """Yield the keys in the order in which they are offered."""
        target, agent = self._target, Agent()
        wanted = {_public_blob(path) for path in target.identity_files}
        offered = set()
        try:
            for key in agent.get_keys():
                if not target.identities_only or key.asbytes() in wanted:
                    offered.add(key.asbytes())
                    yield _Key(target.user, f"agent's key {key.fingerprint}", key)
            for path in target.identity_files:
                if _public_blob(path) not in offered:
                    yield _KeyFile(target.user, path)
        finally:
            agent.close()


class _Key(InMemoryPrivateKey):
    """A key, and what to call it when the host refuses it."""

    def __init__(self, user: str, name: str, key: PKey) -> None:
        super().__init__(user, key)
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def authenticate(self, transport: Transport) -> list[str]:
        if more := super().authenticate(transport):
            raise SSHException(
                f"the host asks for {', '.join(more)} besides, which cannot be given"
            )
        return []


class _KeyFile(AuthSource):
    """A key's file, read when its turn comes."""

    def __init__(self, user: str, path: str) -> None:
        super().__init__(user)
        self._path = path

    def __repr__(self) -> str:
        return self._path

    def authenticate(self, transport: Transport) -> list[str]:
        return _Key(self.username, self._path, _load(self._path)).authenticate(transport)


def refusal(target: Target, failure: AuthFailure) -> str:
    """Who was not let in where, what was tried, and what to do."""
    tried = [f"{each.source!r}: {_why(each.result)}" for each in failure.result]
    has_agent = "SSH_AUTH_SOCK" in os.environ
    return "\n".join(
        [
            f"host {target.label}: SSH authentication as {target.user!r} at "
            f"{target.hostname}:{target.port} failed. Tried:",
            *(f"  {line}" for line in tried or [_NO_KEY]),
            *([] if has_agent else ["  no ssh agent (SSH_AUTH_SOCK is not set)"]),
            f"`ssh {target.label}` must work without a question; `ssh-copy-id {target.label}` "
            "puts your public key there",
        ]
    )


_NO_KEY = "no key: there is none in ~/.ssh and no ssh agent has one"


def _why(error: object) -> str:
    if isinstance(error, BadAuthenticationType):
        return f"the host takes only {', '.join(error.allowed_types)}"
    return str(error) if type(error) is SSHException else "refused"


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
            advice = f"it has a passphrase: `ssh-add {path}` unlocks it for the ssh agent"
            raise SSHException(advice) from error
        raise SSHException(f"cannot be read: {error}") from error


def _public_blob(path: str) -> bytes:
    """The public half of a private key's file; empty where it is not beside it."""
    try:
        return base64.b64decode(Path(f"{path}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _files(target: Target) -> dict[str, HostKeys]:
    """The known keys, by file. Lines with a mark are for `_is_revoked`; paramiko fails on them."""
    found = {}
    for path in target.known_hosts:
        found[path] = keys = HostKeys()
        for line in _lines(path):
            with contextlib.suppress(InvalidHostKey):
                entry = HostKeyEntry.from_line(line) if line[0] not in "#@" else None
                if entry is not None:
                    for name in entry.hostnames:
                        keys.add(name, entry.key.get_name(), entry.key)
    return found


def _is_revoked(target: Target, key: PKey) -> bool:
    text = base64.b64encode(key.asbytes()).decode()
    lines = (line for path in target.known_hosts for line in _lines(path))
    return any(line.startswith("@revoked") and text in line for line in lines)


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # as ssh does: what cannot be read makes nothing known
    return [line.strip() for line in lines if line.strip()]


def _shown(target: Target, key: PKey) -> str:
    return (
        f"host {target.label}: the SSH host key of {target.hostname}:{target.port}, "
        f"{key.get_name()} {key.fingerprint},"
    )


def _unknown(target: Target, key: PKey) -> str:
    return (
        f"{_shown(target, key)} is not known; nothing was sent to it.\n"
        f"{_check(key)}, then:\n  {_accept(target, key)}"
    )


def _changed(target: Target, key: PKey, path: str, known: PKey) -> str:
    forget = f"ssh-keygen -R {shlex.quote(target.known_as)} -f {shlex.quote(path)}"
    return (
        f"{_shown(target, key)} is not the one that {path} has ({known.fingerprint}): "
        "the host was set up anew, or somebody is in between; nothing was sent to it.\n"
        f"{_check(key)}, then:\n  {forget}\n  {_accept(target, key)}"
    )


def _check(key: PKey) -> str:
    kind = _kind(key)
    return (
        "Compare the fingerprint with what its owner says, or on the host itself with "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub`"
    )


def _accept(target: Target, key: PKey) -> str:
    """The command that makes a key known."""
    if target.jump or target.proxy_command or target.known_as.strip("[]").startswith("["):
        return f"ssh {shlex.quote(target.label)}   (it asks whether the key is right)"
    port = "" if target.port == SSH_PORT else f"-p {target.port} "
    into = target.known_hosts[0] if target.known_hosts else "~/.ssh/known_hosts"
    return f"ssh-keyscan {port}-t {_kind(key)} {target.hostname} >> {shlex.quote(into)}"


def _kind(key: PKey) -> str:
    name = key.get_name()
    return next((kind for kind in ("ed25519", "ecdsa", "rsa") if kind in name), name)
