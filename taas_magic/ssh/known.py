"""Whether a host's key is the one that the user knows; decided before anything is sent to it."""

import base64
import contextlib
import shlex
from pathlib import Path

from paramiko import HostKeys, PKey
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from taas_magic.errors import PoolError
from taas_magic.ssh.target import SSH_PORT, Target

_RSA = ("rsa-sha2-512", "rsa-sha2-256")


def known_types(target: Target) -> list[str]:
    """The signature algorithms of the keys that are known of a host; they are asked for first."""
    names = [
        name for keys in _files(target).values() for name in keys.lookup(target.known_as) or ()
    ]
    spread = [_RSA if name == "ssh-rsa" else (name,) for name in names]
    return list(dict.fromkeys(name for names in spread for name in names))


def verify(target: Target, key: PKey) -> None:
    """Returns when the key that a host showed is known to be its own.

    Raises:
        PoolError: It is unknown, has changed, or is revoked; with the fingerprint and what to do.
    """
    files = _files(target)
    if _is_revoked(target, key):
        raise PoolError(f"{_shown(target, key)} is marked @revoked in known_hosts: it is refused")
    if any(keys.check(target.known_as, key) for keys in files.values()):
        return
    for path, keys in files.items():
        if known := keys.lookup(target.known_as):
            raise PoolError(_changed(target, key, path, next(iter(known.values()))))
    raise PoolError(_unknown(target, key))


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
