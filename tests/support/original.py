"""A server of the original's kind, for tests: the protocol as its author wrote it, and no extension."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from pathlib import Path

from sbus.protocol.keys import CURRENT, PeerCredentials, matches
from sbus.protocol.packets import parse

__all__ = ["OriginalServer"]


class OriginalServer:
    """Serves in a thread until it is closed. It ignores every control message but whoami and, if told so, echo."""

    def __init__(self, path: Path, *, knows_echo: bool = True) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self.address = path
        self._knows_echo = knows_echo
        self._clients: dict[socket.socket, tuple[PeerCredentials, list[bytes]]] = {}
        self._silent: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ours, theirs = socket.socketpair()
        self._selector.register(theirs, selectors.EVENT_READ)
        self._wake = theirs
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and disconnect all clients."""
        self._ours.close()
        self._thread.join()
        for sock in (*self._clients, self._listener, self._wake):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._wake:
                    return
                if sock is self._listener:
                    client, _ = sock.accept()
                    ids = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    self._clients[client] = (PeerCredentials(*ids), [])
                    self._selector.register(client, selectors.EVENT_READ)
                else:
                    self._read(sock)

    def _read(self, sock: socket.socket) -> None:
        packet = b""
        with contextlib.suppress(ConnectionError):
            packet = sock.recv(1 << 20)
        if not packet:
            self._selector.unregister(sock)
            del self._clients[sock]
            sock.close()
            return
        verb, key, _ = parse(packet)
        peer, patterns = self._clients[sock]
        if verb == b"SUB":
            patterns.append(key)
        elif verb == b"UNSUB":
            patterns.remove(key)
        elif verb == b"MSG":
            for client, (other, wanted) in tuple(self._clients.items()):
                is_echo = client is sock and sock in self._silent
                if not is_echo and any(matches(pattern, key, CURRENT, other) for pattern in wanted):
                    self._send(client, packet)
        elif key == b"!/cred/whoami":
            self._send(sock, b"CMSG !/cred/whoami\0!/cred/%d/%d/%d" % (peer.gid, peer.uid, peer.pid))
        elif key == b"echo/off" and self._knows_echo:
            self._silent.add(sock)

    @staticmethod
    def _send(sock: socket.socket, packet: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it has left; the next read says so
            sock.send(packet)
