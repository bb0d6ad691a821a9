"""Authorisation: only the administrator may command the pump, and the display believes only the pump.

python3 pump.py serve ADDRESS ADMINISTRATOR      (a user's name or UID, as below)
python3 pump.py start ADDRESS
python3 pump.py stop ADDRESS
python3 pump.py watch ADDRESS KEEPER             (KEEPER: the user that the pump runs as)
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import sbus
from sbus import Request, RequestFailed


def serve(address: str, administrator: str) -> None:
    def command(request: Request) -> bytes:
        if not (request.sender and request.sender.is_user(administrator)):
            raise RequestFailed("only the administrator may command the pump")
        state = b"running" if request.key.endswith(b"/start") else b"stopped"
        bus.publish("pump/state", state)
        return state

    with sbus.connect(address) as bus:
        bus.respond("pump/command/*", command, sender=True)
        bus.fence()
        print("the pump is ready", flush=True)
        for _ in bus:
            pass


def start(address: str) -> None:
    tell(address, "start")


def stop(address: str) -> None:
    tell(address, "stop")


def tell(address: str, word: str) -> None:
    with sbus.connect(address) as bus:
        try:
            print(bus.request(f"pump/command/{word}").decode())
        except RequestFailed as error:
            sys.exit(f"the pump says: {error}")


def watch(address: str, keeper: str) -> None:
    with sbus.connect(address) as bus:
        states = bus.subscribe("pump/state", sender=True)
        bus.fence()
        print("watching", flush=True)
        for message in states:
            if message.sender and message.sender.is_user(keeper):
                print(message.payload.decode(), flush=True)
            else:
                print(f"{message.sender} pretends to be the pump", flush=True)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"serve": serve, "start": start, "stop": stop, "watch": watch}
    commands[sys.argv[1]](*sys.argv[2:])
