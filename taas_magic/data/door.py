"""A lane's door: let in who knows the run's key, and keep everybody else from doing harm.

A peer that does not show the key within two seconds is dropped. Only so many peers may stand in the
door at once, so a flood of connections waits in the sockets' backlog instead of in this process.
"""

import errno
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable

from taas_magic.data import link, wire
from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.link import TICK_S, Socket
from taas_magic.data.talk import Role, Talk, prove, proven
from taas_magic.data.wire import Frame, Kind
from taas_magic.errors import ProtocolError

_PROOF_S = 2.0
"""How long a peer may take to show that it belongs to the run."""

_GREETERS = 128

_log = logging.getLogger(__name__)


class Door:
    """Where peers of a lane come in.

    Args:
        spec: Whose door.
        tls: Context for TCP connections.
        serve: Called in a thread of its own with each peer that knows the key; blocks.
        refused: Called for each peer that does not.
    """

    def __init__(
        self,
        spec: LaneSpec,
        tls: ssl.SSLContext | None,
        serve: Callable[[Socket, Talk], None],
        refused: Callable[[], None],
    ) -> None:
        self._spec, self._tls, self._let_in, self._refused = spec, tls, serve, refused
        about = {"loader": spec.loader, "fetcher": spec.fetcher, "lane": spec.lane}
        self._about = json.dumps(about).encode()
        self._greeters = threading.BoundedSemaphore(_GREETERS)

    def open(self, listener: socket.socket) -> None:
        """Accept from now on, in a thread."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._greeters.acquire()
            try:
                sock, _ = listener.accept()
            except OSError as error:
                self._greeters.release()
                if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE):
                    return
                time.sleep(TICK_S / 10)
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: Socket) -> None:
        spec = self._spec
        try:
            try:
                sock = self._greet(sock)
                talk = _introduce(sock, spec.key, self._about)
            finally:
                self._greeters.release()
            link.tick(sock, TICK_S)
            self._let_in(sock, talk)
        except ProtocolError as error:
            self._refused()
            _log.warning("lane %s of %r refused a peer: %s", spec.lane, spec.loader, error)
        except OSError as error:
            # A rank that is gone has nothing more to ask, and one that is not asks again.
            _log.info("lane %s of %r lost a peer: %s", spec.lane, spec.loader, error)
        finally:
            sock.close()

    def _greet(self, sock: Socket) -> Socket:
        sock.settimeout(_PROOF_S)
        link.keep_watch(sock)
        if self._tls is None or sock.family == socket.AF_UNIX:
            link.tick(sock, _PROOF_S)
            return sock
        return self._tls.wrap_socket(sock, server_side=True)


def _introduce(sock: Socket, key: bytes, about: bytes) -> Talk:
    """A lane's side of the handshake; blocks for at most `_PROOF_S` a step.

    Raises:
        ProtocolError: The peer does not know the run's key, or speaks something else.
        OSError: It is gone, or too slow.
    """
    talk, nonce = Talk(Role.LANE), os.urandom(wire.NONCE_BYTES)
    link.send(sock, [wire.pack(Frame(Kind.CHALLENGE, body_bytes=len(nonce))), nonce])
    header = memoryview(bytearray(wire.HEADER_BYTES))
    link.receive_into(sock, header, _PROOF_S)
    frame = wire.unpack(header)
    talk.hear(frame.kind)
    body = memoryview(bytearray(frame.body_bytes))
    link.receive_into(sock, body, _PROOF_S)
    theirs, mac = bytes(body[: wire.NONCE_BYTES]), bytes(body[wire.NONCE_BYTES :])
    if not proven(key, Role.RANK, nonce, mac):
        why = b"this peer does not know the run's key"
        link.send(sock, [wire.pack(Frame(Kind.REFUSED, body_bytes=len(why))), why])
        raise ProtocolError(why.decode())
    welcome = prove(key, Role.LANE, theirs) + about
    link.send(sock, [wire.pack(Frame(Kind.WELCOME, body_bytes=len(welcome))), welcome])
    return talk
