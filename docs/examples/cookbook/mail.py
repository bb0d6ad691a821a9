"""Secrets between users: ``python3 mail.py read ADDRESS``, and ``python3 mail.py send ADDRESS USER TEXT``."""

from __future__ import annotations

import pwd
import sys
from collections.abc import Callable

import sbus


def read(address: str) -> None:
    with sbus.connect(address) as bus:
        # Empty IDs match our own: this receives mail for our user, in any of that user's processes.
        bus.subscribe("!/cred////mail")
        bus.fence()
        print("waiting for mail", flush=True)
        for message in bus:
            print(message.payload.decode(), flush=True)


def send(address: str, user: str, text: str) -> None:
    uid = int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
    with sbus.connect(address) as bus:
        bus.publish(f"!/cred//{uid}//mail", text.encode())


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"read": read, "send": send}
    commands[sys.argv[1]](*sys.argv[2:])
