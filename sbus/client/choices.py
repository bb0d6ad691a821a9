"""The choices of a client: the state that it restores after a reconnect."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbus.protocol import controls
from sbus.protocol.controls import BYE_ON, INTEREST_ON, LAST, ORDER, PAYLOAD_ON, SENDER_ON, WHOAMI
from sbus.protocol.packets import CMSG, SUB, build

__all__ = ["Choices", "last_packets"]

_REPEATED_GROUPS = frozenset(control.group for control in controls.CONTROLS if control.repeated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The settings in force, the keys watched and the patterns subscribed to.

    A new kind of choice is a new field here, sent by `packets`; a test compares what a server knows after `packets`
    with what it knew before the connection was lost.

    :ivar controls: keys of the control messages in force, in the order to send them.
    :ivar watched: the keys whose subscribers are watched.
    :ivar patterns: each pattern with the number of its subscriptions here, in the order of first subscription. The
        client sends one ``SUB`` for all of them.
    :ivar last: those of the patterns that have a subscription with last values.
    """

    controls: tuple[bytes, ...] = ()
    watched: tuple[bytes, ...] = ()
    patterns: tuple[tuple[bytes, int], ...] = ()
    last: tuple[bytes, ...] = ()

    @property
    def keeps_order(self) -> bool:
        """Whether the server sends waiting messages in the order in which they came."""
        return all(controls.group_of(key) != ORDER or key == ORDER + b"/queue" for key in self.controls)

    def with_control(self, key: bytes) -> Choices:
        """Return these choices with a control message put in force.

        A control message that is not repeated adds nothing.

        It replaces the earlier choices of its group. A row that *refines* (``order/random``) stands beside them. A key
        without a row is a plugin's: it counts if its group has rows.
        """
        row, group = controls.find(key), controls.group_of(key)
        if group not in _REPEATED_GROUPS:
            return self
        refines = row is not None and row.refines
        kept = [other for other in self.controls if other != key and (refines or controls.group_of(other) != group)]
        return replace(self, controls=(*kept, key) if row is None or row.repeated else tuple(kept))

    def packets(self) -> list[bytes]:
        """Return the packets that make these choices: settings, then watches, then subscriptions."""
        packets = [build(CMSG, key) for key in self.controls]
        if SENDER_ON in self.controls:
            packets.append(build(CMSG, WHOAMI))  # its reply shows whether the server names senders
        if PAYLOAD_ON in self.controls:
            packets.append(build(CMSG, WHOAMI))  # likewise for payloads
        packets += [build(CMSG, INTEREST_ON, key) for key in self.watched]
        for pattern, _ in self.patterns:
            packets += last_packets(pattern) if pattern in self.last else [build(SUB, pattern)]
        return packets


def last_packets(pattern: bytes, *, is_first: bool = True) -> list[bytes]:
    """Return the packets that subscribe with last values (see `sbus.client.snapshots`).

    :param is_first: whether the pattern has no other subscription.
    """
    subscribe = [build(SUB, pattern)] if is_first else []
    return [build(CMSG, BYE_ON), build(CMSG, LAST, pattern), *subscribe, build(CMSG, WHOAMI)]
