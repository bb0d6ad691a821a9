"""Print readings, and answer requests for the time: ``python3 readings.py ADDRESS``."""

import asyncio
import sys

import sbus
from sbus.client.aio import connect


def on_reading(message: sbus.Message) -> None:
    print(message.key.decode(), float(message.payload))


async def main(address: str) -> None:
    async with await connect(address, reconnect=True) as bus:
        bus.subscribe("sensors/*/temperature", on_reading)
        bus.respond("clock/now", lambda request: b"noon")
        await bus.publish("sensors/kitchen/temperature", b"21.5")
        print(await bus.request("clock/now", timeout=1))


asyncio.run(main(sys.argv[1]))
