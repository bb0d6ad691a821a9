"""What all tests share: deadlines of property tests, signals, and which tests run in one process of several."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.support.servers", "tests.support.journals"]

# Other load on the machine is no failure.
settings.register_profile("sbus", deadline=None)
settings.load_profile("sbus")

# What a shell starts in the background ignores it, and so would all that the tests start, and stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _ByFolder(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file in one process, and all that share the Spark session in another."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "spark" if path.startswith("tests/spark/") else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByFolder:
    """Say which process runs which tests."""
    return _ByFolder(config, log)
