"""Tests of a program that uses a bus, with pytest: a bus for each test, and the program in a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbus.client import aio
from sbus.testing import AsyncioRecordingClient, RunningBus, running_bus

PROGRAM = Path(__file__).with_name("thermostat.py")


@pytest.fixture
def thermostat(sbus_bus: RunningBus) -> Iterator[subprocess.Popen[str]]:
    """Run the program until the test ends; it is subscribed when the test starts."""
    command = [sys.executable, str(PROGRAM), sbus_bus.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "regulating\n"
        yield process
        process.terminate()


@pytest.mark.usefixtures("thermostat")
def test_switches_when_it_must(sbus_bus: RunningBus) -> None:
    with sbus_bus.record("heating/") as recording, sbus_bus.connect() as bus:
        for temperature in (b"19", b"18", b"warm", b"21"):
            bus.publish("temperature/kitchen", temperature)
        assert recording.wait_for(2) == [(b"heating/kitchen", b"on"), (b"heating/kitchen", b"off")]


def test_goes_on_after_a_crash_of_the_bus(sbus_bus: RunningBus, thermostat: subprocess.Popen[str]) -> None:
    sbus_bus.kill()
    sbus_bus.restart()
    assert thermostat.stdout
    assert thermostat.stdout.readline().startswith("back on the bus")
    with sbus_bus.record("heating/") as recording, sbus_bus.connect() as bus:
        bus.publish("temperature/hall", b"12")
        assert recording.wait_for(1) == [(b"heating/hall", b"on")]


@pytest.mark.usefixtures("thermostat")
@pytest.mark.sbus_options(max_packet=200)
def test_fits_small_packets(sbus_bus: RunningBus) -> None:
    with sbus_bus.record("heating/") as recording, sbus_bus.connect() as bus:
        bus.publish("temperature/" + 150 * "x", b"12")
        assert len(recording.wait_for(1)[0].key) == 158


def test_without_the_fixture() -> None:
    with running_bus(block_timeout=2, allow_user=[0, 1000]) as bus:
        thermostat = subprocess.Popen([sys.executable, str(PROGRAM), bus.address], stdout=subprocess.PIPE)
        assert thermostat.stdout
        assert thermostat.stdout.readline() == b"regulating\n"
        thermostat.terminate()
        thermostat.communicate()


@pytest.mark.usefixtures("thermostat")
def test_with_asyncio(sbus_bus: RunningBus) -> None:
    async def main() -> None:
        async with (
            AsyncioRecordingClient(sbus_bus.address, "heating/") as recording,
            await aio.connect(sbus_bus.address) as bus,
        ):
            await bus.publish("temperature/attic", b"-3")
            assert await recording.wait_for(1) == [(b"heating/attic", b"on")]

    asyncio.run(main())
