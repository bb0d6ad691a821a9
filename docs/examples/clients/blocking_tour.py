"""The blocking client, one function for each topic: ``python3 blocking_tour.py ADDRESS``."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading

import sbus
from sbus.errors import InvalidKey, NobodyListens, NotAllowed, TimedOut


def first_steps(address: str) -> None:
    with sbus.connect(address) as bus:
        bus.subscribe("weather/")
        bus.publish("weather/rain", b"3 mm")
        for message in bus:
            print(message.key, message.payload)
            break


def several_subscriptions(bus: sbus.Bus) -> None:
    rain = bus.subscribe("weather/*/rain")
    bus.subscribe("weather/north/")
    bus.subscribe("alarm", lambda message: print("alarm:", message.payload))

    bus.publish_many([("weather/north/rain", b"3 mm"), ("weather/north/wind", b"5 m/s"), ("alarm", b"storm")])
    print("rain:", rain.get(timeout=5).payload)  # from now on, rain has a queue of its own
    print("north:", bus.receive(timeout=5).payload, bus.receive(timeout=5).payload)
    rain.close()
    bus.fence()  # reads until the server has replied; the callback runs meanwhile


def time_outs_and_flags(bus: sbus.Bus) -> None:
    bus.subscribe("quiet/")
    try:
        bus.receive(timeout=0.01)
    except TimedOut:
        print("nothing for a hundredth of a second")
    try:
        bus.receive(flags=socket.MSG_DONTWAIT)
    except BlockingIOError:
        print("nothing now")
    bus.publish("quiet/please", b"hush", flags=socket.MSG_DONTWAIT)  # or BlockingIOError, if the socket is full
    peeked = bus.receive(flags=socket.MSG_PEEK)
    print(bus.receive() == peeked)


def with_other_descriptors(bus: sbus.Bus, other: socket.socket) -> None:
    """Wait for messages and for input on another socket until that socket is closed."""
    bus.subscribe("to-socket/")
    bus.fence()
    selector = selectors.DefaultSelector()  # not select(2), which fails with descriptors from 1024 on
    selector.register(bus, selectors.EVENT_READ)
    selector.register(other, selectors.EVENT_READ)
    while True:
        # Messages that came with a reply, such as the fence's, are in memory: no poll shows them.
        readable = [bus] if bus.pending else [key.fileobj for key, _ in selector.select()]
        if bus in readable:
            for message in bus.get_ready():
                other.send(message.payload)
        if other in readable:
            received = other.recv(1000)
            if not received:
                break
            bus.publish("to-socket/echo", received.upper())


def who_and_when(bus: sbus.Bus) -> None:
    me = bus.whoami()  # b"!/cred/<gid>/<uid>/<pid>"
    print(me.count(b"/"), "slashes")
    inbox = bus.inbox("letters")
    print(inbox.key == me + b"/letters")
    bus.publish(inbox.key, b"to myself, and nobody else can read it")
    print(inbox.subscription.get().payload)


def who_sent_it(bus: sbus.Bus) -> None:
    with bus.subscribe("pump/command", sender=True) as commands:
        bus.publish("pump/command", b"start")
        sender = commands.get().sender
        print("published by me:", str(sender).encode() == bus.whoami())
        print("published by my user:", sender is not None and sender.is_user(os.geteuid()))


def who_listens(bus: sbus.Bus) -> None:
    print(bus.has_subscribers("lamp/set"))
    with bus.watch_subscribers("lamp/set") as watch:
        print(watch.get(timeout=5))  # the state now
        bus.subscribe("lamp/set")
        print(watch.get(timeout=5))  # and then each change
    try:
        bus.request("lamp/ask")
    except NobodyListens as error:
        print(error)


def what_you_may_not_do(address: str) -> None:
    with sbus.connect(address, on_denied=lambda denial: print("refused:", denial.key, denial.rule)) as bus:
        letters = bus.subscribe("!/cred/1/2/3/letters")  # only the process 3 of user 2 and group 1 may read them
        try:
            letters.get(timeout=5)
        except NotAllowed as error:
            print("may not:", error.key, error.rule)
        bus.subscribe("!/cred/1/2/3/letters", print)
        bus.fence()  # what was sent before has been carried out or refused


def settings(bus: sbus.Bus) -> None:
    bus.flood_control(soft="queue", hard="discard", order="stack")  # newest first; the oldest are dropped
    bus.echo(False)  # do not send our own messages back
    bus.control("blocking/soft/acme")  # a strategy of a plugin
    bus.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    bus.fence()  # the settings are in force


def refused_at_once(bus: sbus.Bus) -> None:
    for key in ("no\0NUL", "!/my/own"):
        try:
            bus.publish(key, b"")
        except InvalidKey as error:
            print(error)


def main(address: str) -> None:
    first_steps(address)
    what_you_may_not_do(address)
    topics = [
        several_subscriptions,
        time_outs_and_flags,
        who_and_when,
        who_sent_it,
        who_listens,
        settings,
        refused_at_once,
    ]
    for topic in topics:
        with sbus.connect(address) as bus:
            topic(bus)

    ours, theirs = socket.socketpair()
    with sbus.connect(address) as bus:
        thread = threading.Thread(target=with_other_descriptors, args=(bus, theirs))
        thread.start()
        ours.send(b"hello")
        print(ours.recv(1000))
        ours.close()
        thread.join()
    theirs.close()


if __name__ == "__main__":
    main(sys.argv[1])
