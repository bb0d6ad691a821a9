"""Arrow tables between processes: python tables.py send|receive ADDRESS"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pyarrow as pa

from sbus.client import aio


def size_of(table: Any) -> int:
    """Return the bytes of a table as a stream of Arrow."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return int(sink.size())


def write(table: Any, view: memoryview) -> None:
    """Write a table into a view, as a stream of Arrow."""
    with pa.FixedSizeBufferWriter(pa.py_buffer(view)) as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


async def send(address: str) -> None:
    """Send two tables in one memory."""
    hours = pa.table({"hour": range(24), "load": [0.5] * 24})
    readings = pa.table({"number": range(100_000)})
    async with await aio.connect(address, payloads=True) as bus:
        async with bus.payloads() as batch:
            for name, table in (("hours", hours), ("readings", readings)):
                view = batch.allocate(size_of(table))
                write(table, view)
                batch.publish(f"tables/{name}", view)
        await bus.fence()


async def receive(address: str) -> None:
    """Use the tables where they are."""
    async with await aio.connect(address, payloads=True) as bus:
        messages = bus.subscribe("tables/")
        await bus.fence()
        print("waiting", flush=True)
        before = pa.total_allocated_bytes()
        for _ in range(2):
            message = await messages.get()
            table = pa.ipc.open_stream(pa.py_buffer(message.payload)).read_all()
            print(message.key.decode(), table.num_rows, table.column(0)[-1], flush=True)
        print("copied:", pa.total_allocated_bytes() - before > 100_000, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    role = {"send": send, "receive": receive}[sys.argv[1]]
    asyncio.run(role(sys.argv[2]))
