"""A connection to the admin socket, and the option that says where it is."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote_from_bytes

import click

from sbus.admin.locate import find_admin
from sbus.cli.options import Target
from sbus.cli.types import COUNT, SocketPath
from sbus.errors import ConnectError, Disconnected, SbusError, TimedOut, UsageError

__all__ = ["Admin", "Refused", "admin_option", "json_option", "limit_option"]

_TIMEOUT = 30.0
"""Seconds without a byte of an answer."""


class Refused(SbusError):
    """The bus does not answer this request; the text says why and what to do."""


admin_option = click.option(
    "--admin",
    type=SocketPath(),
    metavar="PATH",
    help="Path of the admin socket.  [default: $SBUS_ADMIN, else that of the bus with .admin appended]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer of the bus as JSON.")
limit_option = click.option(
    "--limit", "-n", type=COUNT, default=100, show_default=True, metavar="N", help="At most N rows."
)


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("bus", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A blocking connect(2) waits for a place among the connections to be accepted; a non-blocking one fails.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(_TIMEOUT), 0))
        try:
            self.sock.connect(self._path)
        except BlockingIOError:
            raise TimeoutError from None
        self.sock.settimeout(self.timeout)


class Admin:
    """The admin socket of a bus.

    :param target: the bus.
    :param path: the value of ``--admin``, or None.
    :raises sbus.errors.AddressError: if the bus has no path and none is given.
    """

    def __init__(self, target: Target, path: str | None) -> None:
        self.path = find_admin(path, target.socket)

    def get(self, what: str, **parameters: object) -> Any:
        """Return an answer.

        :param parameters: parameters of the query: numbers, text or bytes; None leaves one out.
        :raises ConnectError: if there is no admin socket.
        :raises Disconnected: if the bus ends in the middle of its answer.
        :raises Refused: if the bus refuses the request, or the other end is not a bus.
        """
        return self._answer("GET", what, parameters)

    def post(self, what: str, **parameters: object) -> Any:
        """Return an answer to a request that changes something; see `get`."""
        return self._answer("POST", what, parameters)

    def _answer(self, method: str, what: str, parameters: dict[str, object]) -> Any:
        with self._explained(), self._ask(method, what, parameters, _TIMEOUT) as response:
            answer = response.read()
        try:
            return json.loads(answer)
        except ValueError:
            raise _no_json(response) from None

    def events(self, **parameters: object) -> Iterator[tuple[str, Any]]:
        """Yield the name and the data of each event, without end.

        :raises Disconnected: if the bus ends the stream.
        """
        with self._explained():
            response = self._ask("GET", "/v1/events", parameters, None)
        name = ""
        with response:
            while line := _read(response.readline):
                field, _, value = line.rstrip(b"\n").partition(b": ")
                if field == b"event":
                    name = value.decode()
                elif field == b"data":
                    yield name, json.loads(value)
        raise Disconnected("the bus has ended the stream of events")

    def _ask(
        self, method: str, what: str, parameters: dict[str, object], timeout: float | None
    ) -> http.client.HTTPResponse:
        query = "&".join(f"{name}={_quoted(value)}" for name, value in parameters.items() if value is not None)
        connection = _Connection(self.path, timeout)
        connection.request(method, f"{what}?{query}" if query else what, headers={"Connection": "close"})
        response = connection.getresponse()
        if response.status == 200:
            return response
        problem = _problem(response)
        connection.close()
        raise problem

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of a request, and of reading its answer, into those of sbus."""
        try:
            yield
        except TimeoutError:
            raise TimedOut(f"the bus has not answered at {self.path}: it is stopped or overloaded") from None
        except http.client.IncompleteRead:
            raise Disconnected(
                f"the bus has closed the connection at {self.path} in the middle of its answer"
            ) from None
        except (http.client.HTTPException, ConnectionResetError, BrokenPipeError):
            raise Refused(
                f"the bus has closed the connection at {self.path} without an answer: too many programs ask, or you "
                "may not; try again as root or as the server's user"
            ) from None
        except OSError as e:
            raise ConnectError(_describe(self.path, e)) from None


def _read(readline: Callable[[], bytes]) -> bytes:
    try:
        return readline()
    except (http.client.HTTPException, ConnectionResetError):
        return b""


def _quoted(value: object) -> str:
    return quote_from_bytes(value if isinstance(value, bytes) else os.fsencode(str(value)), safe="/")


def _problem(response: http.client.HTTPResponse) -> SbusError:
    """Return the error for an answer whose status is not 200."""
    try:
        detail = str(json.loads(response.read())["detail"])
    except (ValueError, KeyError, TypeError):
        return _no_json(response)
    return UsageError(detail) if response.status == 400 else Refused(detail)


def _no_json(response: http.client.HTTPResponse) -> Refused:
    return Refused(
        f"the answer of the admin socket is not JSON (status {response.status}): name the admin socket of a bus "
        "(--admin)"
    )


def _describe(path: str, error: OSError) -> str:
    remedies = {
        errno.ENOENT: "start the bus with --admin, or say where the socket is (--admin, SBUS_ADMIN)",
        errno.ECONNREFUSED: "the bus is gone; start it again",
        errno.EACCES: "you lack the permission; ask as root or as the server's user, or have --admin-group set",
        errno.EPROTOTYPE: "that is a bus and not its admin socket; append .admin to its path",
    }
    why = os.strerror(error.errno) if error.errno else str(error)
    remedy = remedies.get(error.errno or 0, "say where the socket is (--admin, SBUS_ADMIN)")
    return f"no admin socket at {path}: {why}: {remedy}"
