"""``sbus pub KEY PAYLOAD`` without the libraries that all other commands need.

Theory of operation
-------------------

Shell scripts start ``sbus pub`` for every message. click and the client library take several times as long to import
as Python takes to start, and one message needs neither. So `publish` runs first. It takes over the command line if it
is ``pub KEY [PAYLOAD]`` with nothing but an address besides, and sends the packets that the client would send, except
``bundle/on``, which serves many messages.

Invariants:

* Until the message is sent, any doubt (an option, a key with ``!``, an unusual address, a long message, a
  failed connect) returns False. The whole command then starts from the beginning, and words the error. What was read
  from standard input until then is in `sbus.cli.unread`, where the whole command reads first.
* Once the message is sent it is never sent again. A failure from there on goes through the same code as in the whole
  command, which is imported for it.
* A test compares what the server receives, what the user sees and the exit status with those of the whole command.

This module and `sbus.client.lookup` import next to nothing; a test lists the modules. The packets are spelled out here,
and that test compares them with `sbus.protocol`.
"""

from __future__ import annotations

import _socket as socket  # the module in Python imports five times as much
import errno
import os

from sbus.cli.unread import unread
from sbus.client.lookup import find_default

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

__all__ = ["publish"]

_ASKED = b"CMSG bye/on", b"CMSG denied/on"
_DENIED = b"CMSG denied\0"
_WHOAMI = b"CMSG !/cred/whoami"
_LONGEST_PACKET = 65536
"""Bytes of a packet that fits the send buffer of every socket, so that sending it needs no preparation."""
_LONGEST_NAME = 107
"""Bytes in the path of a Unix socket (unix(7)); an abstract name may have one more, and is left to the command."""


def publish(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Publish one message, and return when the server has handled it.

    :param arguments: the command line without its first word.
    :returns: whether that was all; False if the whole command has to run, in which case nothing was sent.
    :raises SystemExit: if the server refuses the message, or the connection is lost after it was sent.
    """
    words = _parse(arguments)
    if words is None or "_SBUS_COMPLETE" in environ:
        return False
    address, key, payload = words
    address = address or find_default(environ)
    packet = b"MSG %b\0" % os.fsencode(key)
    if payload != "-":
        packet += os.fsencode(payload)
    name = os.fsencode(address)
    if name.startswith(b"@"):
        name = b"\0" + name[1:]
    if (
        key in ("", "-")
        or "!" in key
        or len(packet) > _LONGEST_PACKET
        or address.startswith(("/dev/fd/", "/dev/unix/", "systemd"))
        or not 1 < len(name) <= _LONGEST_NAME
    ):
        return False
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        try:
            sock.setblocking(False)
            sock.connect(name)
            sock.setblocking(True)
        except OSError:  # the whole command retries, or says what is the matter
            return False
        if payload == "-":
            if not _read_input(_LONGEST_PACKET - len(packet)):
                return False
            packet += unread
        return _exchange(sock, packet, address)
    finally:
        sock.close()


def _read_input(limit: int) -> bool:
    """Read standard input to its end.

    :param limit: the number of bytes that it may have.
    :returns: whether that was possible; the beginning is in `unread` in any case.
    """
    try:
        while len(unread) <= limit:
            part = os.read(0, limit + 1 - len(unread))
            if not part:
                return True
            unread.extend(part)
    except OSError:  # another program has made it non-blocking, or it is closed
        pass
    return False


def _parse(arguments: Sequence[str]) -> tuple[str, str, str] | None:
    """Return address (empty for the default one), key and payload; None for any other command line."""
    address = ""
    words: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word in ("-s", "--socket"):
            address = next(rest, "-")
            if address.startswith("-"):
                return None
        elif word.startswith("--socket="):
            address = word.removeprefix("--socket=")
        elif word.startswith("-") and word != "-" and not _is_number(word):  # another option
            return None
        else:
            words.append(word)
    if not 2 <= len(words) <= 3 or words[0] != "pub":
        return None
    return address, words[1], "".join(words[2:])


def _is_number(word: str) -> bool:
    """Return whether a word with a dash is a negative number, which `sbus.cli.numbers` takes for an argument."""
    if not word[1:2].isdigit() and word[1:2] != ".":
        return False
    try:
        float(word)
    except ValueError:
        return False
    return word.isascii() and "_" not in word


def _exchange(sock: socket.socket, packet: bytes, address: str) -> bool:
    """Send the packet, and wait for the answer to the question after it.

    :returns: False if the kernel did not take the packet.
    """
    error: OSError | None = None
    is_sent = False
    try:
        for question in _ASKED:
            sock.send(question, socket.MSG_NOSIGNAL)
        sock.send(packet, socket.MSG_NOSIGNAL)
        is_sent = True
        sock.send(_WHOAMI, socket.MSG_NOSIGNAL)
    except OSError as e:
        if not is_sent and e.errno not in (errno.EPIPE, errno.ECONNRESET):
            return False
        error = e
        sock.setblocking(False)  # what the server sent before is here
    received: list[bytes] = []
    try:
        while each := sock.recv(_LONGEST_PACKET):
            if each.startswith(_WHOAMI + b"\0"):
                return True
            if each.startswith(_DENIED):
                _refused(each[len(_DENIED) :])
            received.append(each)
    except OSError as e:
        error = error or e
    _fail(error, received, address)


def _refused(payload: bytes) -> None:
    """End as the whole command does when the server refuses the message."""
    from sbus.cli.main import fail
    from sbus.client.denials import error_of
    from sbus.protocol.notices import parse_denied

    denial = parse_denied(payload)
    if denial is not None:
        fail(error_of(denial))


def _fail(error: OSError | None, received: list[bytes], address: str) -> NoReturn:
    """End as the whole command does when the connection is lost.

    :param error: the error of send(2) or recv(2); None if the server closed the connection.
    :param received: what the server sent before.
    """
    from sbus.cli.main import fail
    from sbus.client.connecting import SERVER_CLOSED, describe_loss
    from sbus.client.core import ClientCore

    extensions = ClientCore().extensions
    extensions.take_farewell(received)
    fail(extensions.connection_lost(SERVER_CLOSED if error is None else describe_loss(error), address))
