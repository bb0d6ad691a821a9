"""The Twisted client, one function for each topic: ``python3 twisted_tour.py ADDRESS``."""

from __future__ import annotations

import os
import sys
from typing import Any

from twisted.internet.defer import Deferred, DeferredList, TimeoutError
from twisted.internet.interfaces import IPushProducer
from twisted.internet.task import react
from zope.interface import implementer

from sbus import InvalidKey, NobodyListens, NotAllowed, Request, RequestFailed
from sbus.client.tx import Bus, connect


async def first_steps(reactor: Any, address: str) -> None:
    bus = await connect(reactor, address)
    weather = bus.subscribe("weather/")
    await bus.publish("weather/rain", b"3 mm")
    async for message in weather:
        print(message.key, message.payload)
        break
    await bus.close()


def with_deferreds(reactor: Any, address: str) -> Deferred[None]:
    """Publish and receive without a coroutine."""

    def connected(bus: Bus) -> Deferred[None]:
        weather = bus.subscribe("weather/")
        bus.publish("weather/rain", b"3 mm")
        got = weather.get().addCallback(lambda message: print(message.key, message.payload))
        return got.addBoth(lambda result: bus.close().addCallback(lambda _: result))

    return connect(reactor, address).addCallback(connected)


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


async def time_outs(reactor: Any, bus: Bus) -> None:
    quiet = bus.subscribe("quiet/")
    try:
        await quiet.get().addTimeout(0.01, reactor)
    except TimeoutError:
        print("nothing for a hundredth of a second")
    await bus.publish("quiet/please", b"hush")
    print(await quiet.get())  # the cancelled call has taken no message


@implementer(IPushProducer)
class Counter:
    """Publishes numbers at the pace of the socket."""

    def __init__(self, bus: Bus, count: int) -> None:
        self.numbers = iter(range(count))
        self.bus = bus
        self.paused = False
        self.done: Deferred[None] = Deferred()

    def resumeProducing(self) -> None:
        self.paused = False
        for number in self.numbers:
            self.bus.publish("numbers", b"%d" % number)
            if self.paused:
                return
        self.bus.unregisterProducer()
        if not self.done.called:
            self.done.callback(None)

    def pauseProducing(self) -> None:
        self.paused = True

    def stopProducing(self) -> None:
        self.numbers = iter(())


async def a_producer(bus: Bus) -> None:
    counter = Counter(bus, 5000)
    bus.registerProducer(counter, streaming=True)
    counter.resumeProducing()
    await counter.done
    await bus.fence()  # the server has received them all


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


async def what_you_may_not_do(reactor: Any, address: str) -> None:
    bus = await connect(reactor, address, on_denied=lambda denial: print("refused:", denial.key, denial.rule))
    try:
        async for message in bus.subscribe("!/cred/1/2/3/letters"):  # only the process 3 of user 2 and group 1 may
            print(message.payload)
    except NotAllowed as error:
        print("may not:", error.key, error.rule)
    bus.subscribe("!/cred/1/2/3/letters", print)
    await bus.fence()  # what was sent before has been carried out or refused
    await bus.close()


def answer_requests(bus: Bus) -> None:
    def double(request: Request) -> bytes:
        if not request.payload.isdigit():
            raise RequestFailed(f"{request.payload!r} is no number")
        return b"%d" % (2 * int(request.payload))

    bus.respond("calculator/double", double)


async def ask(bus: Bus) -> None:
    print(await bus.request("calculator/double", b"21"))
    results = await DeferredList([bus.request("calculator/double", b"%d" % n) for n in range(3)])
    print([answer for _, answer in results])
    try:
        await bus.request("calculator/double", b"twenty-one")
    except RequestFailed as error:
        print(error)
    try:
        await bus.request("calculator/square", b"3")
    except NobodyListens as error:
        print(error)


async def refused_at_once(bus: Bus) -> None:
    for key in ("no\0NUL", "!/my/own"):
        try:
            await bus.publish(key, b"")
        except InvalidKey as error:
            print(error)


async def main(reactor: Any, address: str) -> None:
    await first_steps(reactor, address)
    await what_you_may_not_do(reactor, address)
    await with_deferreds(reactor, address)
    for topic in [several_subscriptions, a_producer, who_and_when, who_sent_it, who_listens, refused_at_once]:
        bus = await connect(reactor, address)
        await topic(bus)
        await bus.close()
    bus, server = await connect(reactor, address), await connect(reactor, address)
    await time_outs(reactor, bus)
    answer_requests(server)
    await server.fence()
    await ask(bus)
    await server.close()
    await bus.close()


if __name__ == "__main__":
    react(main, sys.argv[1:])
