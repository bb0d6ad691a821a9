"""``sbus web`` as a process, with a page without files, beside a bus that stops for a while."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sbus.syscalls.polling import is_readable
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused

Ask = Callable[..., http.client.HTTPResponse]
# Time passes faster than for the command, and its page has not been built.
START = """
import sys
from twisted.internet import reactor
from sbus.web import process
from sbus.web.files import File
later = reactor.callLater
reactor.callLater = lambda delay, *call, **how: later(delay / 15, *call, **how)
process.load = lambda: {"/": File("text/html", b"")}
sys.argv = ["sbus", "web", f"--socket={sys.argv[1]}", *sys.argv[2:]]
from sbus.cli.main import main
main()
"""


@contextmanager
def web(bus: Bus) -> Iterator[tuple[subprocess.Popen[str], http.client.HTTPResponse, Ask]]:
    """Run it; yield the process, the stream of events of a page that shows everything of the admin socket, and how to
    ask for more."""
    command = [sys.executable, "-c", START, str(bus.address)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127.0.0.1:(\d+)/#(\S+)", process.stdout.readline())
            assert found, process.stderr and process.stderr.read()
            port, headers = int(found[1]), {"Authorization": f"Bearer {found[2]}", "Content-Type": "application/json"}
            with contextlib.ExitStack() as connections:

                def ask(method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
                    connections.callback(connection.close)
                    connection.request(method, path, body, headers)
                    return connection.getresponse()

                yield process, ask("GET", "/api/events?clients=queue&depth=1&keys="), ask
        finally:
            process.kill()


def events(stream: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """The events of a stream, without end."""
    name = ""
    while line := stream.readline():
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_a_path_that_is_no_socket(bus: StartBus, directory: Path) -> None:
    """The error names the option of this command."""
    (directory / "file").touch()
    command = [sys.executable, "-c", START, str(bus().address), f"--unix={directory / 'file'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("/file exists and is not a socket: remove it yourself, or choose another --unix\n")


def test_a_bus_that_stops_for_a_while(bus: StartBus, directory: Path) -> None:
    """The page says that the bus does not answer, and shows it again when it goes on; nothing is logged."""
    running = bus(f"--admin={directory}/bus.admin")
    with web(running) as (process, stream, _):
        coming = events(stream)
        seen = set[str]()
        while not {"status", "clients", "talk"} <= seen:
            seen.add(next(coming)[0])
        with paused(running.pid):
            problem = next(value for name, value in coming if name == "admin" and value["status"] != 200)
            assert problem == {
                "status": 0,
                "detail": "the admin socket has not answered within 5 seconds: the bus is stopped or overloaded",
            }
        assert next(value for name, value in coming if name == "admin")["status"] == 200
        for wanted in ("status", "clients", "talk"):
            assert next(value for name, value in coming if name == wanted)
        assert running.stop() == 0
        # A request that was under way ends without an answer first.
        assert any("no admin socket" in value["detail"] for name, value in coming if name == "admin")
        assert process.stderr is not None
        assert not is_readable(process.stderr, 0)
