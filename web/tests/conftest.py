"""Fixtures of the tests in a browser: a real bus under load, ``sbus web``, and Chromium."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from sbus.testing import RunningBus, running_bus

CHROMIUM = "/usr/bin/chromium"
REBOUND = "rebound.example"
"""A name that the browser takes for 127.0.0.1, as if its owner had changed its address."""
OTHER_USER = 12001
SECONDS = 600
"""How long the load runs at most; it ends with the bus."""
_START = """
import os, sys
import email.message, email.parser, email.policy
import sbus.cli.web, sbus.web.process, twisted.internet.reactor
uid = int(sys.argv.pop(1))
sbus.web.files.load()
if uid:  # after the imports: the other user may not be able to read this Python
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
from sbus.cli.main import main
main()
"""


@dataclass
class Web:
    """A running ``sbus web``."""

    pid: int
    link: str

    @property
    def origin(self) -> str:
        return self.link.partition("/#")[0]

    @property
    def token(self) -> str:
        return self.link.partition("/#")[2]

    @property
    def port(self) -> int:
        return int(self.origin.rpartition(":")[2])


@contextmanager
def run_web(address: str, *options: str, uid: int | None = None) -> Iterator[Web]:
    """Run ``sbus web`` until the block ends."""
    command = [sys.executable, "-c", _START, str(uid or 0), "web", "--socket", address, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                break
        else:
            raise AssertionError(process.stderr.read())
        yield Web(process.pid, found[0])
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=20)
        assert errors == ""


@pytest.fixture(scope="session")
def directory() -> Iterator[Path]:
    """A directory with a short name that other users can enter."""
    name = Path(tempfile.mkdtemp(prefix="sbus-"))
    name.chmod(0o755)
    yield name
    shutil.rmtree(name)


@pytest.fixture(scope="session")
def bus(directory: Path) -> Iterator[RunningBus]:
    """A bus that every user may use, and whose metrics a group may read, so that the others are refused by the bus."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    policy = directory / "policy.toml"
    policy.write_text('version = 1\n[[rule]]\nname = "no-forbidden"\ndeny_publish = ["forbidden/"]\n')
    with running_bus(
        socket=str(directory / "bus"),
        admin=str(directory / "bus.admin"),
        admin_group=f"{os.getgid()},metrics",
        mode=0o777,
        policy=str(policy),
    ) as running:
        yield running


@pytest.fixture(scope="session")
def loaded(bus: RunningBus) -> RunningBus:
    """The bus, with programs that use it until it stops."""
    subprocess.run([sys.executable, Path(__file__).with_name("load.py"), bus.address, str(SECONDS)], check=True)
    return bus


@pytest.fixture(scope="session")
def web(loaded: RunningBus) -> Iterator[Web]:
    """``sbus web`` of the bus's own user."""
    with run_web(loaded.address) as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, as Debian has it."""
    arguments = [f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a link in a new profile; what the page's console says must be nothing."""
    contexts = []
    said: list[str] = []

    def start(link: str, **settings: Any) -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(link)
        return page

    yield start
    for context in contexts:
        context.close()
    assert said == []
