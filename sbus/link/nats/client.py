"""One connection to NATS: the only module that knows the client library, nats-py.

.. rubric:: Theory of operation

nats-py is the client that nats.io maintains, and the only living one on PyPI for all Pythons that sbus supports
(nats-core and natsio need 3.13). `Connection` uses little of it, because a bridge must know its losses:

* **A connection lives once.** nats-py can reconnect by itself; it then sends what waited in its buffer, and cannot say
  what of it had arrived before. Here a lost connection is the end of the object, and the bridge makes another.
* **One queue for all subscriptions.** nats-py gives each subscription its own queue and task, so that the messages of
  one publisher may overtake each other. It also parses all headers. `_Client` takes each message before that (it
  overrides ``_process_msg``) and hands it on as bytes, in the order of the socket. That halves the CPU time per
  message, too.
* **A fence that fences.** nats-py's ``flush`` sends its PING before the commands that wait in its buffer. `fence` waits
  until that buffer is empty first; then the PONG says that nats-server has handled all that was published before.
* **An end without waiting.** ``close`` sends the buffer first, for ever if the server is stopped; `abort` does not.

The overridden and private names (``_process_msg``, ``_close``, ``_transport``) have been the same for years; a test
holds nats-py to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from sbus.errors import UsageError
from sbus.link.nats.settings import Login, is_usable
from sbus.link.subjects import MAX_SUBJECT

__all__ = ["Connection", "ConnectionFailed", "connect_options"]

Receiver = Callable[[bytes, bytes, bytes], None]
"""Takes a message: its subject, its payload, and its headers as they were sent."""

_CONNECT_TIME = 2
"""Seconds for each step of connecting to one server."""
_PING_INTERVAL = 5
"""Seconds between two pings on an idle connection; after two without an answer it counts as lost."""
_FAR = 3600
_POLL = 0.002
_HEADERS_ROOM = 512
"""Bytes that headers may take of what nats-server accepts as a payload."""


class ConnectionFailed(Exception):
    """A connection to NATS could not be made, or was lost."""


def connect_options(urls: tuple[str, ...], login: Login) -> dict[str, object]:
    """Return the arguments of nats-py's ``connect`` for a login.

    :raises UsageError: if a file cannot be read or used, or a library is missing.
    """
    options: dict[str, object] = {}
    first = urlsplit(urls[0])
    if login.user is not None:
        options.update(user=login.user, password=_secret(login.password_file))
    elif login.token_file is not None:
        options["token"] = _secret(login.token_file)
    elif login.nkey_file is not None:
        options["nkeys_seed_str"] = _secret(login.nkey_file)
    elif login.creds is not None:
        _secret(login.creds)
        options["user_credentials"] = login.creds
    elif first.username and first.password:
        options.update(user=first.username, password=first.password)  # servers that are discovered need it too
    elif first.username:
        options["token"] = first.username
    if login.nkey_file is not None or login.creds is not None:
        try:
            import nkeys  # noqa: F401
        except ModuleNotFoundError:
            raise UsageError("--nkey-file and --creds need nkeys, which is not installed: pip install nkeys") from None
    if login.tls_ca or login.tls_cert or any(url.startswith(("tls://", "wss://")) for url in urls):
        try:
            context = ssl.create_default_context(cafile=login.tls_ca)
            if login.tls_cert is not None:
                context.load_cert_chain(login.tls_cert, login.tls_key)
        except (OSError, ssl.SSLError) as e:
            raise UsageError(f"TLS: {e}: check --tls-ca, --tls-cert and --tls-key") from e
        options["tls"] = context
    return options


def _secret(path: str | None) -> str:
    assert path is not None
    try:
        text = Path(path).read_text().strip()
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}: correct the path, or let this user read the file") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{path}: this is no text: name the file with the secret") from e
    if not text:
        raise UsageError(f"{path}: the file is empty: write the secret into it")
    return text


_REFUSED = re.compile(rb"-ERR\s+'Permissions Violation for Subscription to \"([^\"]*)\"", re.IGNORECASE)


class _Client(Client):
    """nats-py's client, whose messages go to one receiver as they come.

    :ivar lost: done when the connection is lost, or closed; the result is the reason.
    """

    def __init__(self, receiver: Receiver, refused: Callable[[str], object]) -> None:
        super().__init__()
        self._receiver = receiver
        self._refused = refused
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._receiver(subject, data, headers or b"")

    async def _process_err(self, err_msg: str) -> None:
        # In the library's text all is lower case. The parser still has the line, in which the subject has its case.
        if refused := _REFUSED.match(self._ps.buf[: 2 * MAX_SUBJECT]):
            self._refused(refused[1].decode("utf-8", "replace"))
        await super()._process_err(err_msg)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # nats-py reports the loss after it has tried to send what waits, and not at all if that fails.
        if not self.lost.done():
            self.lost.set_result(str(self.last_error or "") or "nats-server closed the connection")
        await super()._close(status, do_cbs)


class _Errors:
    """The errors that the library reports: the last one while it connects, and later all of them."""

    def __init__(self) -> None:
        self.last: Exception | None = None
        self.report: Callable[[str], object] | None = None

    async def note(self, error: Exception) -> None:
        self.last = error
        if self.report is not None:
            self.report(str(error))


class Connection:
    """A connection to one nats-server, until it is lost.

    :ivar lost: done when the connection is gone; the result is the reason.
    :ivar server: the server's address and version, for the log.
    """

    def __init__(self, client: _Client) -> None:
        self._client = client
        self.lost = client.lost
        url = client.connected_url
        version = client.connected_server_version
        where = url.netloc.rpartition("@")[2] if url else "?"
        self.server = f"{where} (nats-server {version.major}.{version.minor}.{version.patch})"
        self.max_packet = client.max_payload - _HEADERS_ROOM
        self.publish = client.publish  # (subject, payload, headers=...); raises NatsError when the connection is lost

    @classmethod
    async def open(
        cls,
        urls: list[str],
        options: dict[str, object],
        name: str,
        receiver: Receiver,
        report: Callable[[str], object],
        refused: Callable[[str], object] = lambda subject: None,
    ) -> Connection:
        """Connect to one of the servers.

        :param options: as `connect_options` returns them.
        :param name: what nats-server's monitoring shows.
        :param receiver: gets all messages.
        :param report: called with errors that nats-server reports later, such as a subject that is not permitted.
        :param refused: called with each subject that may not be subscribed to.
        :raises ConnectionFailed: with the reason.
        """
        client = _Client(receiver, refused)
        errors = _Errors()
        arguments: dict[str, Any] = dict(options)
        try:
            async with asyncio.timeout(2 + 2 * _CONNECT_TIME * len(urls)):
                await client.connect(
                    urls,
                    error_cb=errors.note,
                    name=name,
                    allow_reconnect=False,
                    connect_timeout=_CONNECT_TIME,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=_PING_INTERVAL,
                    no_echo=True,
                    pending_size=0,
                    flusher_queue_size=0,  # else a caller waits for room for ever once the connection is aborted
                    skip_subject_validation=True,
                    **arguments,
                )
            connection = cls(client)
        except Exception as error:  # the server may say anything, and the library trusts it
            _abort(client)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error  # of which `asyncio.wait_for` of Python 3.11 loses some
            cause = errors.last or error
            name, text = type(cause).__name__, str(cause)
            is_clear = isinstance(cause, (OSError, NatsError, ValueError))
            raise ConnectionFailed(text or name if is_clear else f"{name}: {text}") from error
        except BaseException:
            _abort(client)
            raise
        errors.report = report
        return connection

    def peers(self) -> list[str]:
        """Return the URLs of the servers of the cluster, as far as nats-server has reported them by now.

        The library would refuse the whole list of a server for one URL that it cannot use.
        """
        urls = [f"{uri.scheme}://{uri.netloc.rpartition('@')[2]}" for uri in self._client.servers]
        return [url for url in urls if is_usable(url)]

    async def subscribe(self, subject: str) -> Subscription:
        """Subscribe to a subject.

        :raises NatsError: if the connection is lost.
        """
        return await self._client.subscribe(subject, pending_msgs_limit=1)

    async def fence(self, timeout: float) -> bool:
        """Wait until nats-server has handled all that was published and subscribed to so far.

        :param timeout: seconds after which the server counts as gone, and the connection is aborted.
        :returns: whether it has; False if the connection was lost.
        """
        if self.lost.done():
            return False
        fence = asyncio.ensure_future(self._fence())
        try:
            done, _ = await asyncio.wait((fence, self.lost), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.abort(f"nats-server has not answered for {timeout:g} seconds")
            return fence in done and fence.exception() is None and not self.lost.done()
        finally:
            fence.cancel()

    async def _fence(self) -> None:
        client = self._client
        for attempt in range(1 << 30):
            if not client.pending_data_size or not client.is_connected:
                break
            await asyncio.sleep(0 if attempt < 3 else _POLL)
        await client.flush(_FAR)

    def abort(self, why: str) -> None:
        """End the connection at once."""
        if not self.lost.done():
            self.lost.set_result(why)
        _abort(self._client)

    async def close(self) -> None:
        """Send the waiting messages, and end the connection; abort it after a second."""
        if self.lost.done():
            _abort(self._client)
            return
        with contextlib.suppress(TimeoutError, NatsError, OSError):
            async with asyncio.timeout(1):
                await self._client.close()
        self.abort("the bridge closed the connection")


def _abort(client: _Client) -> None:
    """End the client's tasks, and close its socket without sending waiting messages."""
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
    for task in ("_reading_task", "_ping_interval_task", "_flusher_task"):
        running = getattr(client, task, None)
        if running is not None:
            running.cancel()
    client._status = Client.CLOSED
