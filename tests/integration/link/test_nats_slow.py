"""A million messages from host to host, while nats-server is killed again and again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("nats", reason="no nats-py: pip install 'sbusd[nats]'")

from sbus.client.blocking import connect
from sbus.client.losses import Lost
from tests.integration.link.test_nats import Difference, Joined, run_joined

_KEYS = [b"k/%d" % number for number in range(10)]
_KILLS = 20
_MESSAGES = 1_000_000
_BURST = 1_000
_AHEAD = 3_000
"""Messages that may be on their way while nats-server runs."""


@pytest.fixture
def joined() -> Iterator[Joined]:
    with run_joined() as joined:
        yield joined


class Counting(threading.Thread):
    """A subscriber that checks the order of each key, and counts.

    :ivar arrived: messages, those at the end not included.
    :ivar newest: about the newest number.
    :ivar goes_on: set when that grows.
    :ivar wrong: what came twice, or too late.
    """

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.arrived = self.ends = self.newest = 0
        self.goes_on = threading.Event()
        self.lost: list[Lost] = []
        self.wrong: list[tuple[bytes, int, int]] = []
        self._last = dict.fromkeys(_KEYS, -1)
        self._bus = connect(address, on_lost=self.lost.append)
        self._subscription = self._bus.subscribe(b"k/")
        self._bus.fence()

    def run(self) -> None:
        while self.ends < len(_KEYS):
            message = self._subscription.get()
            if message.payload == b"end":
                self.ends += 1
                continue
            number = int(message.payload)
            if number <= self._last[message.key]:
                self.wrong.append((message.key, self._last[message.key], number))
            self._last[message.key] = number
            self.arrived += 1
            if number - self.newest >= _BURST:
                self.newest = number
                self.goes_on.set()
        self._bus.close()


@pytest.mark.slow
def test_a_million_messages_through_twenty_kills(joined: Joined) -> None:
    """Published = arrived + what the bridges count as lost, to the message; nothing is doubled or out of order."""
    out, come = joined.bridges["a"], joined.bridges["b"]
    before_out, before_come = Difference(out), Difference(come)
    counting = Counting(str(joined.buses["b"].address))
    joined.server.wait_subscriptions("sbus b", "sbus.k.>")
    counting.start()
    number, dice = 0, random.Random(17)
    with connect(str(joined.buses["a"].address)) as publisher:

        def publish(count: int) -> None:
            nonlocal number
            for _ in range(count // _BURST):
                publisher.publish_many(
                    (_KEYS[each % len(_KEYS)], b"%d" % each) for each in range(number, number + _BURST)
                )
                number += _BURST
                publisher.fence()

        def publish_paced(count: int) -> None:
            for _ in range(count // _BURST):
                while number - counting.newest > _AHEAD and counting.goes_on.wait(
                    0.5
                ):  # else it waits for what is lost
                    counting.goes_on.clear()
                publish(_BURST)

        publish(_BURST)
        before_come.wait(published=_BURST)  # each key is known
        share = (_MESSAGES - number) // _KILLS // _BURST * _BURST
        for kill in range(1, _KILLS + 1):
            while_down = dice.choice([0, 1, 2, 40]) * _BURST
            publish_paced(share - while_down)
            joined.server.kill_now()
            publish(while_down)
            joined.replace_server()
            for bridge in joined.bridges.values():
                bridge.wait_joined(1 + kill)
            joined.server.wait_subscriptions("sbus b", "sbus.k.>")
        publish_paced(_MESSAGES - number)
        before_out.wait(out=0)
        publisher.publish_many((key, b"end") for key in _KEYS)
        publisher.fence()
    counting.join(60)
    assert counting.ends == len(_KEYS)
    assert counting.wrong == []
    sent, came = before_out.wait(out=0), before_come.wait(come=0)
    lost = [sent.get(name, 0) for name in ("out_full", "bus_lost")] + [came.get("missed", 0), came.get("in_full", 0)]
    print(f"arrived {counting.arrived:,}; sender {sent}; receiver {came}")
    assert counting.lost == []
    assert counting.arrived + sum(lost) == number == _MESSAGES
    assert 0 < came["missed"] <= sent["unconfirmed"] + sent["confirmed"]
