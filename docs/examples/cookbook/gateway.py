"""An asyncio program with a client in it: lines from TCP connections go to the bus, messages of the bus come back.

python3 gateway.py ADDRESS [PORT]          then, for example: nc 127.0.0.1 PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys

from sbus.client.aio import Bus, connect
from sbus.errors import SbusError


class Gateway:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.numbers = itertools.count(1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one TCP connection until either side closes it."""
        number = next(self.numbers)
        out = asyncio.create_task(self.bus_to_lines(number, writer))
        try:
            async for line in reader:
                # This waits while the bus is full, so that the sender of the lines waits too.
                await self.bus.publish(f"gateway/{number}/in", line.rstrip(b"\r\n"))
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            out.cancel()
            writer.close()

    async def bus_to_lines(self, number: int, writer: asyncio.StreamWriter) -> None:
        with self.bus.subscribe(f"gateway/{number}/out") as messages, contextlib.suppress(ConnectionError):
            writer.write(b"you are %d\n" % number)
            async for message in messages:
                writer.write(message.payload + b"\n")
                await writer.drain()


async def main(address: str, port: int = 0) -> None:
    def gap(why: Exception) -> None:
        print("messages may have been missed:", why, file=sys.stderr, flush=True)

    async with (
        await connect(address, reconnect=True, on_gap=gap) as bus,
        await asyncio.start_server(Gateway(bus).serve, "127.0.0.1", port) as server,
    ):
        print("port", server.sockets[0].getsockname()[1], flush=True)
        await bus.wait_closed()


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
    except SbusError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
