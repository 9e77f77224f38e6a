"""Find the settings, known_hosts files and private keys with which ssh would connect to a host.

`find_target` asks `ssh -G` for the settings of a host, so OpenSSH itself reads the user's
configuration. paramiko makes the connection: `KnownHosts` checks the host's key before anything
secret is sent, then `UserKeys` offers the user's keys.
"""

import base64
import contextlib
import hmac
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramiko import (
    Agent,
    MissingHostKeyPolicy,
    PKey,
    SSHClient,
    SSHConfig,
    SSHException,
    Transport,
)
from paramiko.auth_strategy import AuthFailure, AuthSource, AuthStrategy
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.pkey import PublicBlob, UnknownKeyType
from paramiko.ssh_exception import BadAuthenticationType

from taas_magic.errors import PoolError, UsageError
from taas_magic.store.rule import user_name

SSH_PORT = 22
MAX_JUMPS = 8
"""Maximum number of jump hosts on the way to a host."""

CONNECT_TIMEOUT_S = 15.0
"""Seconds to wait for a connection to a host if ssh's settings have no `ConnectTimeout`."""

_HOST = re.compile(
    r"(?:ssh://)?(?:(?P<user>\S+)@)?(?:\[(?P<bracketed>[^\]]+)\]|(?P<name>[^:@\s]+))"
    r"(?::(?P<port>\d+))?/?"
)
_TOKEN = re.compile("%([%dhikLlnpru])")

_SSH_S = 15.0
"""Maximum seconds for `ssh -G`, which may run commands (`Match exec`) and ask name servers."""

_TICK_S = 0.1
_TAIL_LINES = 5

_AGENT_S = 5.0
_ASK_KEYS, _KEYS = b"\0\0\0\1\x0b", b"\x0c"
"""The request that asks an ssh agent for its keys, and the type byte of the agent's response."""

_USUAL_KEYS = tuple(
    f"~/.ssh/id_{kind}"
    for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk", "xmss", "dsa")
)
"""Identity files that `ssh -G` prints if ssh's settings name none. The files may not exist."""

_USER_KNOWN = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"

_ADDS_NEW_KEYS = (["accept-new"], ["false"])
"""Values of StrictHostKeyChecking, as `ssh -G` prints them, that accept keys of unknown hosts."""

_Settings = Mapping[str, Sequence[str]]
"""SSH settings of one host: the values of each setting, by keyword in lower case."""


class ConnectStopped(Exception):
    """Exception of `find_target` and `connect` after the caller has set `stop` to cancel them."""


@dataclass(frozen=True)
class SshTarget:
    """Address of a host, and the settings by which ssh would connect to it.

    Attributes:
        label: The host as the user wrote it.
        hostname: Name or address to connect to.
        known_as: Name under which known_hosts files list the host's key.
        identity_files: Paths of the private keys to offer.
        identities_only: Whether the ssh agent's keys are offered only if they are also in
            `identity_files`.
        known_hosts: Paths of the known_hosts files; the user's come first.
        jump: Jump host through which the connection goes; None for a direct connection.
        proxy_command: Shell command of the setting ProxyCommand; None if there is none.
        adds_new_keys: Whether to accept and store the key of a host that no known_hosts file lists.
        config_file: The only configuration file that was read, as with `ssh -F`; "" for the user's
            file and the system's.
    """

    label: str
    hostname: str
    port: int
    user: str
    known_as: str
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    known_hosts: tuple[str, ...] = ()
    jump: "SshTarget | None" = None
    proxy_command: str | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    adds_new_keys: bool = False
    config_file: str = ""

    @property
    def address(self) -> str:
        """The address as `hostname:port`, for messages."""
        return f"{self.hostname}:{self.port}"

    @property
    def is_alias(self) -> bool:
        """Whether known_hosts lists the host by an alias (`HostKeyAlias`), not by `hostname`."""
        return self.known_as not in (self.hostname, f"[{self.hostname}]:{self.port}")


def unread_config(config_file: str | None) -> str:
    """Return a note if an SSH configuration file is ignored because no `ssh` is installed.

    The note is "" if there is no such file, or if `ssh` is installed.

    Args:
        config_file: Path of the file; None for `~/.ssh/config`.
    """
    name = config_file or "~/.ssh/config"
    if shutil.which("ssh") or not os.path.exists(_expand_home(name)):
        return ""
    return (
        f"{name} was not read, because no `ssh` program is installed here: only the host names, "
        "users and ports in taas.toml count. Install OpenSSH's client to change that"
    )


def find_target(
    host: str,
    config_file: str | None,
    stop: threading.Event,
    jumps: str = "",
    through: tuple[str, ...] = (),
) -> SshTarget:
    """Return the `SshTarget` of a host, as `ssh` would connect to it. Blocks.

    Read the settings from the output of `ssh -G`. If no `ssh` is installed, take the user and the
    port from `host`, and OpenSSH's defaults for all other settings.

    If there are jump hosts, `SshTarget.jump` describes the last jump host before `host`. This
    description is found in the same way, and contains the jump hosts before the last one.

    Args:
        host: The host, such as `gpu1`, `me@gpu3:2222`, `[fe80::1]:22` or `ssh://gpu1`.
        config_file: The only configuration file to read, as with `ssh -F`; None for the user's file
            and the system's.
        stop: Event that the caller sets to cancel.
        jumps: Jump hosts on the way to `host`, as with `ssh -J`; "" for the jump hosts in the
            configuration.
        through: Used in recursive calls, in which `host` is a jump host: the hosts that are reached
            through it. By these hosts, the function detects a circle.

    Raises:
        UsageError: `host` has none of the forms above, the jump hosts form a circle, or there are
            more than `MAX_JUMPS` of them.
        PoolError: `ssh -G` failed or took too long.
        ConnectStopped: `stop` was set; raised within about 0.1 s.
    """
    match = _HOST.fullmatch(host)
    if match is None:
        raise UsageError(f'"{host}" is not a host: write name, user@name or user@name:port')
    if host in through or len(through) > MAX_JUMPS:
        raise UsageError(f"ProxyJump forms a circle: {' through '.join((*through, host))}")
    name, user, written_port = match["bracketed"] or match["name"], match["user"], match["port"]
    if shutil.which("ssh"):
        options = {
            "-F": os.path.expanduser(config_file or ""),
            **{"-l": user, "-p": written_port, "-J": jumps},
        }
        given = [word for option in options.items() if option[1] for word in option]
        settings = _ask_ssh(host, ["ssh", "-T", "-G", *given, "--", name], stop)
    else:
        settings = _settings_without_ssh(name, user, written_port)
    hostname, port = settings["hostname"][0], int(settings["port"][0])
    alias = next(iter(settings.get("hostkeyalias", ())), None)
    tokens = _tokens(settings, name, alias)
    # `ssh -G` prints a ProxyJump or a ProxyCommand, but not both
    way = ",".join(filter(_is_set, settings.get("proxyjump", ())))
    jumps, _, last_jump = _expand_tokens(way, tokens).rpartition(",")
    through = (*through, host)
    commands = list(filter(_is_set, settings.get("proxycommand", ())))
    known_hosts = [
        path
        for keyword in ("userknownhostsfile", "globalknownhostsfile")
        for line in settings.get(keyword, ())
        for path in line.split()
    ]
    return SshTarget(
        label=host,
        hostname=hostname,
        port=port,
        user=settings["user"][0],
        known_as=alias or (hostname if port == SSH_PORT else f"[{hostname}]:{port}"),
        identity_files=_identity_files(settings.get("identityfile", ()), tokens),
        identities_only=settings.get("identitiesonly") == ["yes"],
        known_hosts=tuple(map(_expand_home, filter(_is_set, known_hosts))),
        jump=find_target(last_jump, config_file, stop, jumps, through) if last_jump else None,
        proxy_command=_expand_tokens(commands[0], tokens) if commands else None,
        connect_timeout_s=_seconds(settings.get("connecttimeout", ()), CONNECT_TIMEOUT_S),
        adds_new_keys=settings.get("stricthostkeychecking") in _ADDS_NEW_KEYS,
        config_file=os.path.expanduser(config_file or ""),
    )


def forward_command(host: str, config_file: str | None, port: int) -> str:
    """Return the `ssh` command that forwards a port of this machine to the same port of a host.

    The user runs the command. ssh itself reads the jump hosts and keys from its configuration.

    Args:
        host: The host, in one of the forms of `find_target`.
        config_file: The only configuration file to read, as with `ssh -F`; None for the user's file
            and the system's.
    """
    match = _HOST.fullmatch(host)
    name, words = host, ["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}"]
    if config_file:
        words += ["-F", os.path.expanduser(config_file)]
    if match is not None:
        name = match["bracketed"] or match["name"]
        words += ["-p", match["port"]] if match["port"] else []
        words += ["-l", match["user"]] if match["user"] else []
    return shlex.join([*words, name])


def _settings_without_ssh(name: str, user: str | None, port: str | None) -> _Settings:
    """Return OpenSSH's default settings for a host, in the form in which `ssh -G` prints them."""
    return {
        "hostname": [name],
        "user": [user or user_name()],
        "port": [port or str(SSH_PORT)],
        "identityfile": _USUAL_KEYS,
        "userknownhostsfile": [_USER_KNOWN],
        "globalknownhostsfile": [_SYSTEM_KNOWN],
    }


def _ask_ssh(host: str, command: Sequence[str], stop: threading.Event) -> _Settings:
    """Run `ssh -G` for a host and return the settings that it prints.

    If the caller sets `stop`, or the command takes too long, kill the command and its children.

    Raises:
        PoolError: The command failed, or did not finish within `_SSH_S` seconds. The text has the
            last lines of the command's output.
        ConnectStopped: `stop` was set.
    """
    until = time.monotonic() + _SSH_S
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="surrogateescape",
        start_new_session=True,  # so that `killpg` ends the commands of `Match exec`, too
    )
    with process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_TICK_S)
                    break
                if stop.is_set():
                    raise ConnectStopped
                if time.monotonic() > until:
                    raise _failed(
                        host,
                        command,
                        f"did not finish within {_SSH_S:.0f} s, so taas-magic ended it",
                        "In the SSH configuration, look at `Match exec` commands and at "
                        "CanonicalizeHostname, which asks name servers",
                    )
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    settings: dict[str, list[str]] = {}
    for line in out.splitlines():
        keyword, _, value = line.partition(" ")
        settings.setdefault(keyword.lower(), []).append(value)
    if process.returncode or not {"hostname", "port", "user"} <= settings.keys():
        tail = "".join(f"\n    {line}" for line in (err or out).splitlines()[-_TAIL_LINES:])
        raise _failed(
            host,
            command,
            f"failed with exit code {process.returncode}:{tail}",
            "Correct the SSH configuration until this command prints the host's settings",
        )
    return settings


def _failed(host: str, command: Sequence[str], what: str, todo: str) -> PoolError:
    return PoolError(f"host {host}: `{shlex.join(command)}` {what}\n{todo}")


def _tokens(settings: _Settings, name: str, alias: str | None) -> dict[str, str]:
    """Return the values of ssh's tokens, such as `%h`, by the character after the `%`.

    taas-magic expands tokens itself, because `ssh -G` expands them only in a few settings.

    Args:
        name: The host's name as the user wrote it, without user and port.
        alias: The setting `HostKeyAlias`; None if it is not set.
    """
    here = socket.gethostname()
    return {
        "%": "%",
        "d": _home(),
        "h": settings["hostname"][0],
        "i": str(os.getuid()),
        "k": alias or name,
        "L": here.partition(".")[0],
        "l": here,
        "n": name,
        "p": settings["port"][0],
        "r": settings["user"][0],
        "u": user_name(),
    }


def _expand_tokens(text: str, tokens: Mapping[str, str]) -> str:
    return _TOKEN.sub(lambda match: tokens[match[1]], text)


def _expand_home(path: str) -> str:
    return _home() + path[1:] if path.startswith("~/") else os.path.expanduser(path)


def _home() -> str:
    """Return the home folder that ssh uses: the entry of the user database, not `$HOME`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")


def _seconds(values: Sequence[str], default: float) -> float:
    """Return the first positive number of seconds in a setting; `default` if there is none."""
    return next((float(value) for value in values if value.isdecimal() and int(value)), default)


def _is_set(value: str) -> bool:
    """Return False for the value "none", which switches a setting off; True for other values."""
    return value.lower() != "none"


def _identity_files(values: Sequence[str], tokens: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths of the identity files, with `~`, variables and tokens expanded.

    The value "none" is left out. A default key file, such as `~/.ssh/id_rsa`, is left out if the
    file does not exist (`_USUAL_KEYS`).
    """
    found = []
    for value in filter(_is_set, values):
        named = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), value)
        path = _expand_home(_expand_tokens(named, tokens))
        if value not in _USUAL_KEYS or os.path.exists(path):
            found.append(path)
    return tuple(found)


class KnownHosts(MissingHostKeyPolicy):
    """Policy for paramiko that accepts a host's key only if the known_hosts files list the key.

    There is one exception: if the target has `adds_new_keys`, and no file lists any key of the
    host, the policy accepts and stores the key. For any other key, the policy raises PoolError,
    whatever StrictHostKeyChecking says.

    The policy replaces paramiko's own check, which does not support patterns (`*.lab`), and fails
    on lines with a marker (`@revoked`).
    """

    def __init__(self, target: SshTarget) -> None:
        self._target = target
        self._portless = target.known_as if target.is_alias else target.hostname
        self._known: list[tuple[str, PKey]] = []
        """Known keys of the host, each with the path of the file that lists it."""
        self._of_any_port: list[tuple[str, PKey]] = []
        """Keys from lines that name the host without its port, each with the path of the file.

        As in ssh, these keys count only if no line names the host with its port.
        """
        self._revoked: list[str] = []
        for path in target.known_hosts:
            # as ssh does, skip files and lines that cannot be read
            with contextlib.suppress(OSError):
                for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
                    with contextlib.suppress(InvalidHostKey, SSHException, ValueError):
                        self._add(path, " ".join(line.split()))

    def _add(self, path: str, line: str) -> None:
        """Record a line of the known_hosts file `path` if the line lists a key of the host.

        If the target has another port than 22, also record a key that the file lists for the host
        without a port. Also record each line with `@revoked`, whichever host it names. Skip
        comments and lines with other markers.

        Raises:
            InvalidHostKey, SSHException, ValueError: The line is malformed.
        """
        if line.startswith("@revoked"):
            self._revoked.append(line)
        elif line and line[0] not in "#@" and (entry := HostKeyEntry.from_line(line)):
            if _is_named(self._target.known_as, entry.hostnames):
                self._known.append((path, entry.key))
            elif _is_named(self._portless, entry.hostnames):
                self._of_any_port.append((path, entry.key))

    def make_transport(self, sock: Any, **options: Any) -> Transport:
        """Return a transport of paramiko that prefers the key types that known_hosts lists.

        A host may have keys of several types, and known_hosts may list only one of them. The host
        must then show this key, because `missing_host_key` would refuse any other key.
        """
        transport = Transport(sock, **options)
        offered = transport.get_security_options()
        known = {key.get_name() for _, key in self._known or self._of_any_port}
        if "ssh-rsa" in known:
            known |= {"rsa-sha2-512", "rsa-sha2-256"}
        offered.key_types = sorted(offered.key_types, key=lambda name: name not in known)
        return transport

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        """Check the key that a host has shown. Raise PoolError unless the key is accepted.

        Called by paramiko. The key is accepted if known_hosts lists it for the host, and has not
        revoked it. If known_hosts lists no key of the host, and the target has `adds_new_keys`, the
        key is accepted and stored.

        Raises:
            PoolError: The key is unknown, revoked, or not the one in known_hosts. The text says
                how to accept the key, unless it is revoked.
        """
        target = self._target
        shown = (
            f"host {target.label}: the SSH host key of {target.address}, "
            f"{key.get_name()} {key.fingerprint},"
        )
        text = base64.b64encode(key.asbytes()).decode()
        if any(text in line for line in self._revoked):
            raise PoolError(f"{shown} is marked @revoked in known_hosts, so it is refused")
        known = self._known or self._of_any_port
        if any(own.asbytes() == key.asbytes() for _, own in known):
            return
        for path, own in self._known:
            forget = f"ssh-keygen -R {shlex.quote(target.known_as)} -f {shlex.quote(path)}"
            raise PoolError(
                f"{shown} differs from the key in {path} ({own.fingerprint}): the host was "
                "reinstalled, or somebody intercepts the connection; nothing was sent to it.\n"
                + _how_to_accept(target, key, forget)
            )
        if target.adds_new_keys and not known:
            self._store(key)
            return
        raise PoolError(
            f"{shown} is unknown; nothing was sent to it.\n{_how_to_accept(target, key)}"
        )

    def _store(self, key: PKey) -> None:
        """Add the host's key to the user's first known_hosts file.

        Create the file and its folder if they are missing. If the file cannot be written, do not
        store the key; there is no error.
        """
        line = f"{self._target.known_as} {key.get_name()} {key.get_base64()}\n"
        # as ssh does, connect even if the file cannot be written
        with contextlib.suppress(OSError, IndexError):
            path = Path(self._target.known_hosts[0])
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read() == b"\n" else f"\n{line}"
                file.write(line.encode())


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a line of known_hosts applies to the host `name`.

    A pattern after `!` excludes the hosts that match, even if they match the line's other patterns.

    Args:
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
    """Return the regular expression for a pattern of ssh, such as `*.lab`.

    In patterns of ssh, only `*` and `?` are special.
    """
    return re.compile(re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", "."))


def _how_to_accept(target: SshTarget, key: PKey, *commands: str) -> str:
    """Return text for the user: how to verify a host's key, and the commands that accept it.

    The last command adds the key to known_hosts. It is `ssh-keyscan`, or an interactive `ssh` if
    the host has a jump host or a ProxyCommand.

    Args:
        *commands: Commands to run before the last one, such as one that removes the old key.
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
        "Compare the fingerprint with the one from the host's owner, or with the output of "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` on the host, then run:"
    )
    return "\n  ".join([check, *commands, accept])


class UserKeys(AuthStrategy):
    """Strategy for paramiko that offers the user's keys to a host, until the host accepts one."""

    def __init__(self, target: SshTarget) -> None:
        super().__init__(ssh_config=SSHConfig())
        self._target = target

    def get_sources(self) -> Iterator[AuthSource]:
        """Yield the keys in the order in which they are offered.

        A host disconnects after a few refused keys, so the order matters:

        1. Keys of the ssh agent that are also in identity files.
        2. Other keys of the ssh agent, unless IdentitiesOnly is set.
        3. Other identity files.
        """
        target, agent = self._target, Agent() if _agent_answers() else None
        blobs = {path: _public_blob(path) for path in target.identity_files}
        offered = set()
        try:
            keys = agent.get_keys() if agent else ()
            for key in sorted(keys, key=lambda key: key.asbytes() not in blobs.values()):
                if not target.identities_only or key.asbytes() in blobs.values():
                    offered.add(key.asbytes())
                    yield _OfferedKey(target.user, f"agent's key {key.fingerprint}", key)
            for path, blob in blobs.items():
                if blob not in offered:
                    yield _OfferedKey(target.user, path)
        finally:
            if agent:
                agent.close()


def _agent_answers() -> bool:
    """Return whether an ssh agent exists and answers within `_AGENT_S` seconds.

    Call this function before paramiko asks the agent, because paramiko would wait without a time
    limit. For example, the agent may be forwarded from a machine that has gone to sleep.
    """
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(_AGENT_S)
        agent.connect(os.environ["SSH_AUTH_SOCK"])
        agent.sendall(_ASK_KEYS)
        return agent.makefile("rb").read(5)[4:] == _KEYS
    return False


class _OfferedKey(AuthSource):
    """A key to offer to a host.

    Args:
        name: Path of the key's file, or a description of the agent's key, for messages.
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
    """Read the private key in the file `path`.

    Raises:
        SSHException: The file does not exist, has a passphrase, or cannot be read. For a
            passphrase, the text says how to use the ssh agent.
    """
    try:
        return PKey.from_path(path)
    except FileNotFoundError:
        raise SSHException("there is no such file") from None
    except (OSError, SSHException, ValueError, TypeError, UnknownKeyType) as error:
        if "encrypted" in str(error).lower() or "password" in str(error).lower():
            name = shlex.quote(path)
            advice = f"it has a passphrase: `ssh-add {name}` unlocks it for the ssh agent"
            if not os.path.exists(f"{path}.pub"):
                advice += (
                    f"; `ssh-keygen -y -f {name} > {name}.pub` lets taas-magic find it in the agent"
                )
            raise SSHException(advice) from error
        raise SSHException(f"cannot be read: {error}") from error


def _public_blob(path: str) -> bytes:
    """Return the public key, in SSH's binary form, that belongs to an identity file.

    The result is empty if there is no public key.

    Args:
        path: Path of a private key, or of a public key whose private key only the ssh agent has.
    """
    for file in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError):
            return PublicBlob.from_file(file).key_blob
    return b""


def login_refused_message(target: SshTarget, failure: AuthFailure) -> str:
    """Return the error message for a refused login: user, host, each key tried, and a remedy.

    The message also says if there is no ssh agent, or if the agent does not answer.
    """
    tried = [f"  {each.source!r}: {_refusal_text(each.result)}" for each in failure.result]
    if not tried:
        tried = ["  no key: there is none in ~/.ssh and no ssh agent has one"]
    if "SSH_AUTH_SOCK" not in os.environ:
        tried.append("  no ssh agent (SSH_AUTH_SOCK is not set)")
    elif not _agent_answers():
        tried.append(f"  the ssh agent does not answer ({os.environ['SSH_AUTH_SOCK']})")
    words = f"-F {shlex.quote(target.config_file)} " if target.config_file else ""
    words += target.label
    return "\n".join(
        [
            f"host {target.label}: SSH authentication as {target.user!r} at "
            f"{target.address} failed. Tried:",
            *tried,
            f"`ssh {words}` must work without a question; `ssh-copy-id {words}` puts your public "
            "key there",
        ]
    )


def _refusal_text(error: object) -> str:
    if isinstance(error, BadAuthenticationType):
        return f"the host takes only {', '.join(error.allowed_types)}"
    return str(error) if type(error) is SSHException else "refused"
