"""The asyncio client, one function for each topic: ``python3 asyncio_tour.py ADDRESS``."""

from __future__ import annotations

import asyncio
import os
import sys

from sbus import InvalidKey, NobodyListens, NotAllowed, Request, RequestFailed, TimedOut
from sbus.client.aio import Bus, connect


async def first_steps(address: str) -> None:
    async with await connect(address) as bus:
        weather = bus.subscribe("weather/")
        await bus.publish("weather/rain", b"3 mm")
        async for message in weather:
            print(message.key, message.payload)
            break


async def several_subscriptions(bus: Bus) -> None:
    rain = bus.subscribe("weather/*/rain")
    north = bus.subscribe("weather/north/")
    bus.subscribe("alarm", lambda message: print("alarm:", message.payload))

    await bus.publish_many([("weather/north/rain", b"3 mm"), ("weather/north/wind", b"5 m/s"), ("alarm", b"storm")])
    print("rain:", (await rain.get()).payload)
    print("north:", (await north.get()).payload, (await north.get()).payload)
    rain.close()
    north.close()
    await bus.fence()  # the alarm has arrived before the server's reply


async def time_outs(bus: Bus) -> None:
    quiet = bus.subscribe("quiet/")
    try:
        async with asyncio.timeout(0.01):
            await quiet.get()
    except TimeoutError:
        print("nothing for a hundredth of a second")
    await bus.publish("quiet/please", b"hush")
    print(await quiet.get())  # the cancelled call has taken no message


async def side_by_side(bus: Bus) -> None:
    """Use one connection from several tasks, each with its own subscription."""

    async def listen(pattern: str, count: int) -> None:
        with bus.subscribe(pattern) as subscription:
            for _ in range(count):
                print(pattern, (await subscription.get()).payload)

    async def publish() -> None:
        await bus.fence()  # both subscriptions are in force
        for n in range(2):
            await bus.publish(f"count/{n}", b"%d" % n)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listen("count/0", 1))
        tasks.create_task(listen("count/1", 1))
        tasks.create_task(publish())


async def who_and_when(bus: Bus) -> None:
    me = await bus.whoami()  # b"!/cred/<gid>/<uid>/<pid>"
    print(me.count(b"/"), "slashes")
    inbox = await bus.inbox("letters")
    print(inbox.key == me + b"/letters")
    await bus.publish(inbox.key, b"to myself, and nobody else can read it")
    print((await inbox.subscription.get()).payload)


async def who_sent_it(bus: Bus) -> None:
    with bus.subscribe("pump/command", sender=True) as commands:
        await bus.publish("pump/command", b"start")
        sender = (await commands.get()).sender
        print("published by me:", str(sender).encode() == await bus.whoami())
        print("published by my user:", sender is not None and sender.is_user(os.geteuid()))


async def who_listens(bus: Bus) -> None:
    print(await bus.has_subscribers("lamp/set"))
    with bus.watch_subscribers("lamp/set") as watch:
        print(await watch.get())  # the state now
        bus.subscribe("lamp/set")
        print(await watch.get())  # and then each change
    try:
        await bus.request("lamp/ask")
    except NobodyListens as error:
        print(error)


async def what_you_may_not_do(address: str) -> None:
    async with await connect(address, on_denied=lambda denial: print("refused:", denial.key, denial.rule)) as bus:
        try:
            async for message in bus.subscribe("!/cred/1/2/3/letters"):  # only the process 3 of user 2 and group 1 may
                print(message.payload)
        except NotAllowed as error:
            print("may not:", error.key, error.rule)
        bus.subscribe("!/cred/1/2/3/letters", print)
        await bus.fence()  # what was sent before has been carried out or refused


def answer_slowly(bus: Bus) -> None:
    """Answer requests one beside the other, each when its reply is ready."""

    async def sleep(request: Request) -> bytes:
        try:
            seconds = float(request.payload)
        except ValueError:
            raise RequestFailed(f"{request.payload!r} is no number of seconds") from None
        await asyncio.sleep(seconds)
        return b"slept well"

    bus.respond("bedroom/sleep", sleep)


async def ask(bus: Bus) -> None:
    print(await bus.request("bedroom/sleep", b"0.01"))
    print(await asyncio.gather(*(bus.request("bedroom/sleep", b"0.01") for _ in range(3))))
    try:
        await bus.request("bedroom/sleep", b"long")
    except RequestFailed as error:
        print(error)
    try:
        await bus.request("bedroom/sleep", b"60", timeout=0.02)
    except TimedOut as error:
        print(error)


async def refused_at_once(bus: Bus) -> None:
    for key in ("no\0NUL", "!/my/own"):
        try:
            await bus.publish(key, b"")
        except InvalidKey as error:
            print(error)


async def main(address: str) -> None:
    await first_steps(address)
    await what_you_may_not_do(address)
    for topic in [
        several_subscriptions,
        time_outs,
        side_by_side,
        who_and_when,
        who_sent_it,
        who_listens,
        refused_at_once,
    ]:
        async with await connect(address) as bus:
            await topic(bus)
    async with await connect(address) as server, await connect(address) as bus:
        answer_slowly(server)
        await server.fence()
        await ask(bus)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
