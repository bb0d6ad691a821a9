"""The numbers of messages that a bridge has carried and lost."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["LOSSES", "LOST_IN", "LOST_OUT", "Counters"]


@dataclass(slots=True)
class Counters:
    """Messages since the bridge started; the names are those of the log, and of ``docs/nats.rst``.

    Outwards: ``taken`` = ``sent`` + ``out_full`` + ``out_too_large`` + those that wait. Inwards: ``received`` =
    ``published`` + ``own`` + ``unlisted`` + ``forged`` + ``doubled`` + ``in_full`` + ``in_too_large`` + those that
    wait.

    :ivar taken: received from the bus.
    :ivar sent: handed to NATS.
    :ivar confirmed: of these, handled by nats-server.
    :ivar unconfirmed: of these, on connections that were lost before nats-server confirmed them: up to this number are
        lost. The bridges that miss them count them exactly.
    :ivar out_full: dropped, because the queue to NATS was full.
    :ivar out_too_large: dropped, because nats-server takes no message of that size.
    :ivar out_denied: refused, because the bridge's user of NATS may not publish them.
    :ivar bus_lost: lost on their way from the bus to the bridge, as the bus reports.
    :ivar received: received from NATS.
    :ivar published: published on the bus.
    :ivar missed: never received, although subscribed to: the missing numbers in ``Sbus-Seq``.
    :ivar own: dropped, because they came from this bus.
    :ivar unlisted: dropped, because no listed pattern that is wanted matches the key.
    :ivar forged: dropped, because they are no messages of a bridge of this realm: header, packet or subject is wrong.
    :ivar doubled: dropped, because they came twice (two subscriptions match), or after newer ones.
    :ivar in_full: dropped, because the queue to the bus was full.
    :ivar in_too_large: dropped, because the bus takes no packet of that size.
    :ivar in_unconfirmed: published on connections to the bus that were lost before the bus confirmed them.
    """

    taken: int = 0
    sent: int = 0
    confirmed: int = 0
    unconfirmed: int = 0
    out_full: int = 0
    out_too_large: int = 0
    out_denied: int = 0
    bus_lost: int = 0
    received: int = 0
    published: int = 0
    missed: int = 0
    own: int = 0
    unlisted: int = 0
    forged: int = 0
    doubled: int = 0
    in_full: int = 0
    in_too_large: int = 0
    in_unconfirmed: int = 0

    def nonzero(self) -> str:
        """Return the counters that are not 0, for a line of the log."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} {value:,}" for name, value in values if value) or "nothing"


LOST_OUT = ("unconfirmed", "out_full", "out_too_large", "out_denied", "bus_lost")
"""The counters of messages that were lost on the way out, or may have been."""
LOST_IN = ("missed", "in_full", "in_too_large", "in_unconfirmed")
"""The counters of messages that were lost on the way in, or may have been."""
LOSSES = (*LOST_OUT, *LOST_IN, "forged")
"""The counters that are worth a warning."""
