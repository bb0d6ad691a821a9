"""Proof of identity: a safe that keeps one note for each user, and accepts it from and returns it to that user only.

python3 safe.py keep ADDRESS
python3 safe.py put ADDRESS KEEPER TEXT
python3 safe.py get ADDRESS KEEPER          (KEEPER: the UID that the safe runs as)
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable

import sbus
from sbus import Message
from sbus.errors import Violation
from sbus.protocol.keys import CURRENT


def user_of(key: bytes) -> bytes | None:
    """Return the UID of the only user with access to a secret key; None if other users can read it too."""
    try:
        secret = CURRENT.check(key)
    except Violation:
        return None
    return secret.uid or None if secret else None


class Safe:
    def __init__(self, bus: sbus.Bus) -> None:
        self.bus = bus
        self.notes: dict[bytes, bytes] = {}
        self.drafts: dict[bytes, tuple[bytes, bytes]] = {}

    def handle(self, request: Message) -> None:
        reply_to, _, wish = request.payload.partition(b"\0")
        # The sender may be anyone, but only this user can read the reply.
        user = user_of(reply_to)
        if user is None:
            return
        verb, _, rest = wish.partition(b" ")
        if verb == b"get":
            self.bus.answer(request, self.notes.get(user, b""))
        elif verb == b"put":
            # The request may be in another user's name: have that user repeat a token that no other user can read.
            token = secrets.token_hex(16).encode()
            self.drafts[user] = (token, rest)
            self.bus.answer(request, token)
        elif verb == b"confirm" and user in self.drafts and secrets.compare_digest(self.drafts[user][0], rest):
            self.notes[user] = self.drafts.pop(user)[1]
            self.bus.answer(request, b"kept")
        else:
            self.bus.fail(request, "say get, put or confirm")


def keep(address: str) -> None:
    with sbus.connect(address) as bus:
        inbox = bus.inbox("safe")
        safe = Safe(bus)
        bus.respond("safe/where", lambda request: inbox.key)
        bus.answer_proofs()
        bus.fence()
        print("the safe is open", flush=True)
        for request in inbox.subscription:
            safe.handle(request)


def find(bus: sbus.Bus, keeper: str) -> bytes:
    """Return the key of the safe, which only its keeper can read."""
    key = bus.request("safe/where")
    if user_of(key) != keeper.encode():
        sys.exit("another program pretends to be the safe")
    if not bus.verify(key.removesuffix(b"/safe")):
        sys.exit("the safe is not there")  # or another client has sent us a wrong key
    return key


def put(address: str, keeper: str, text: str) -> None:
    with sbus.connect(address) as bus:
        safe = find(bus, keeper)
        token = bus.request(safe, b"put " + text.encode())
        print(bus.request(safe, b"confirm " + token).decode())


def get(address: str, keeper: str) -> None:
    with sbus.connect(address) as bus:
        print(bus.request(find(bus, keeper), b"get").decode())


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"keep": keep, "put": put, "get": get}
    commands[sys.argv[1]](*sys.argv[2:])
