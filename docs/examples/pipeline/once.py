"""Print each alarm once, although Spark may publish it again: python once.py SOCKET"""

import sys

import sbus

REMEMBERED = 100_000  # keys; a repeat comes within a batch of Spark

seen: dict[bytes, None] = {}
with sbus.connect(sys.argv[1]) as bus:
    bus.subscribe("alarms/")
    bus.fence()
    print("ready", flush=True)
    for message in bus:
        if message.key in seen:
            continue
        seen[message.key] = None
        if len(seen) > REMEMBERED:
            del seen[next(iter(seen))]
        print(message.key.decode(), message.payload.decode(), flush=True)
