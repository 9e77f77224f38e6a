"""Which keys are offered to a host, and what is said when it takes none of them."""

import os
import threading
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

from paramiko import Agent, PKey, SSHException, Transport
from paramiko.ssh_exception import BadAuthenticationType, PartialAuthentication

from taas_magic.errors import PoolError
from taas_magic.ssh.target import Target
from taas_magic.ssh.way import Patience


def authenticate(transport: Transport, target: Target, patience: Patience) -> None:
    """Offers the agent's keys, then those of files, until the host takes one.

    Raises:
        PoolError: It takes none; names host and user, and what was tried.
        Stopped: It is not wanted any more.
    """
    tried: list[str] = []
    agent = Agent()
    try:
        for name, key in _keys(target, agent, tried):
            why = _offer(transport, target, key, patience)
            if why is None:
                return
            tried.append(f"{name}: {why}")
            if not transport.is_active():
                break
    finally:
        agent.close()
    raise PoolError(_refused(target, tried))


def _keys(target: Target, agent: Agent, unusable: list[str]) -> Iterator[tuple[str, PKey]]:
    """The keys to offer, with their names; says of those of files which cannot be used, and why."""
    wanted = {_public_blob(path) for path in target.identity_files}
    offered = set()
    for key in agent.get_keys():
        blob = key.asbytes()
        if not target.identities_only or blob in wanted:
            offered.add(blob)
            yield f"agent's key {key.fingerprint}", key
    for path in target.identity_files:
        if _public_blob(path) in offered:
            continue
        loaded = _load(path)
        if isinstance(loaded, str):
            unusable.append(f"{path}: {loaded}")
        else:
            yield path, loaded


def _public_blob(path: str) -> bytes:
    """The public half of a private key's file; empty where it is not beside it."""
    try:
        return b64decode(Path(f"{path}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _load(path: str) -> PKey | str:
    """A private key, or why it cannot be used."""
    try:
        return PKey.from_path(path)
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, SSHException, ValueError, TypeError) as error:
        if "encrypted" in str(error).lower() or "password" in str(error).lower():
            return f"it has a passphrase: `ssh-add {path}` unlocks it for the ssh agent"
        return f"cannot be read: {error}"


def _offer(transport: Transport, target: Target, key: PKey, patience: Patience) -> str | None:
    """Offers one key; returns why it was refused, None when it was taken."""
    answered = threading.Event()
    try:
        transport.auth_publickey(target.user, key, answered)
        patience.wait(answered, target, "SSH authentication")
    except SSHException as error:
        return str(error)
    if transport.is_authenticated():
        return None
    why = transport.get_exception()
    if isinstance(why, BadAuthenticationType):
        return f"the host takes only {', '.join(why.allowed_types)}"
    if isinstance(why, PartialAuthentication):
        return f"the host asks for {', '.join(why.allowed_types)} besides, which cannot be given"
    return "refused" if transport.is_active() else "refused, and the host closed the connection"


def _refused(target: Target, tried: list[str]) -> str:
    lines = tried or ["no key: there is none in ~/.ssh and no ssh agent has one"]
    has_agent = "SSH_AUTH_SOCK" in os.environ
    return "\n".join(
        [
            f"host {target.label}: SSH authentication as {target.user!r} at "
            f"{target.hostname}:{target.port} failed. Tried:",
            *(f"  {line}" for line in lines),
            *([] if has_agent else ["  no ssh agent (SSH_AUTH_SOCK is not set)"]),
            f"`ssh {target.label}` must work without a question; `ssh-copy-id {target.label}` "
            "puts your public key there",
        ]
    )
