"""The pages of the client libraries: members, tours, and tests that users write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sbus.client import aio, blocking, tx
from sbus.testing import RunningBus
from tests.integration.docs.pages import EXAMPLES, page
from tests.integration.docs.programs import output
from tests.support import ROOT
from tests.support.harness import TIMEOUT
from tests.support.servers import StartBus

# --- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "module"),
    [("blocking", blocking), ("asyncio", aio), ("twisted", tx)],
    ids=["blocking", "asyncio", "tx"],
)
def test_every_method_is_described(library: str, module: Any) -> None:
    """Each public member of a connection or a subscription is on the library's page or on the common one."""
    text = page("clients/index.rst") + page(f"clients/{library}.rst")
    text += (EXAMPLES / "clients" / f"{library}_tour.py").read_text()
    internal = {"send", "waiter", "callback_failed", "pause_for", "resume_for", "unsubscribe", "deliver", "end"}
    internal |= {"begin", "handler_failed", "has_unread", "keep", "report_lost", "run_handler", "unwatch"}
    internal |= {"call_user", "close_now", "is_connected", "schedule_wake", "wait_drained", "wake"}
    internal |= {"takes", "connection_made", "connection_lost", "packets_received"}
    offered = {name for kind in (module.Bus, module.Subscription) for name in dir(kind) if not name.startswith("_")}
    missing = {name for name in offered - internal if not re.search(rf"\b{name}\b", text)}
    assert missing == set()


def test_what_is_described_is_there() -> None:
    """Each call that the common page names exists in all libraries."""
    named = set(re.findall(r"``([a-z_]+)\(", page("clients/index.rst"))) - {"connect"}
    assert {"subscribe", "close", "request", "flood_control"} <= named
    for module in (blocking, aio, tx):
        assert {
            name for name in named if not any(hasattr(kind, name) for kind in (module.Bus, module.Subscription))
        } == set()


def test_members_of_the_fixture() -> None:
    """The page on testing describes each public member of the fixture."""
    text = page("testing.rst")
    table = text[text.index("* - Member") : text.index("Write options of")]
    described = set(re.findall(r"``([a-z_]+)", table))
    assert described == {name for name in dir(RunningBus) if not name.startswith("_")} | {"address"}


# --- the tours ------------------------------------------------------------------------------------


SUBSCRIPTIONS = ["b'weather/rain' b'3 mm'", "alarm: b'storm'", "rain: b'3 mm'", "north: b'3 mm' b'5 m/s'"]
NAMES = ["4 slashes", "True", "b'to myself, and nobody else can read it'"]
REFUSED = [
    "the routing key 'no\\x00NUL' contains a NUL, which ends a key",
    "the routing key '!/my/own' is not allowed: '!' is reserved: it may only begin !/cred/<gid>/<uid>/<pid>/",
]
TOURS = {
    "blocking": ["nothing for a hundredth of a second", "nothing now", "True", "b'HELLO'"],
    "asyncio": [
        "nothing for a hundredth of a second",
        "Message(key=b'quiet/please', payload=b'hush')",
        "count/0 b'0'",
        "count/1 b'1'",
        "b'slept well'",
        "[b'slept well', b'slept well', b'slept well']",
        "b'long' is no number of seconds",
        "no answer within 0.02 s",
    ],
    "twisted": [
        "b'weather/rain' b'3 mm'",
        "nothing for a hundredth of a second",
        "Message(key=b'quiet/please', payload=b'hush')",
        "b'42'",
        "[b'0', b'2', b'4']",
        "b'twenty-one' is no number",
        "nobody subscribes to 'calculator/square': start the program that answers",
    ],
}
SENDER = ["published by me: True", "published by my user: True"]
FORBIDDEN = ["may not: b'!/cred/1/2/3/letters' secret", "refused: b'!/cred/1/2/3/letters' secret"]
LISTENING = ["False", "False", "True", "nobody subscribes to 'lamp/ask': start the program that answers"]


@pytest.mark.parametrize("library", TOURS)
def test_tours(library: str, bus: StartBus) -> None:
    """Each tour prints what the page promises."""
    printed = output(f"clients/{library}_tour.py", bus().address).splitlines()
    assert sorted(printed) == sorted(SUBSCRIPTIONS + NAMES + SENDER + REFUSED + FORBIDDEN + LISTENING + TOURS[library])


def test_a_program_after_nats(bus: StartBus) -> None:
    """The program of the page for those who come from another bus gets its reading and its reply."""
    assert output("convert/readings.py", bus().address) == "sensors/kitchen/temperature 21.5\nb'noon'\n"


def test_a_blocking_inbox_keeps_its_messages(bus: StartBus) -> None:
    """An inbox keeps its messages from the start, also while the program waits for something else."""
    with blocking.connect(str(bus().address)) as client:
        inbox = client.inbox("letters")
        client.publish(inbox.key, b"first")
        client.fence(TIMEOUT)
        client.publish(inbox.key, b"second")
        assert [inbox.subscription.get(TIMEOUT).payload for _ in range(2)] == [b"first", b"second"]
        assert client.pending == 0


# --- the tests of users ---------------------------------------------------------------------------


def users_tests(directory: Path, *arguments: str | Path) -> str:
    """Run tests as a user does, in their own directory, and return the output."""
    examples = directory / "examples"
    shutil.copytree(EXAMPLES, examples, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONSAFEPATH", None)  # a test of Spark jobs before this one may have set it
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=examples,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def count_tests(name: str) -> int:
    return len(re.findall(r"^ *(?:async )?def test_", (EXAMPLES / name).read_text(), re.MULTILINE))


@pytest.mark.slow
def test_users_tests_with_pytest(directory: Path) -> None:
    """The example of tests with pytest passes."""
    said = users_tests(directory, "pytest", "-q", "-p", "no:cacheprovider", "test_users_program.py")
    assert f"{count_tests('test_users_program.py')} passed" in said


def test_users_tests_with_trial(directory: Path) -> None:
    """The example of tests with trial passes."""
    said = users_tests(directory, "twisted.trial", "test_users_service")
    assert f"PASSED (successes={count_tests('test_users_service.py')})" in said
