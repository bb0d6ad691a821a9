"""The interfaces of what a server can be given: a credentials policy, and observers."""

from __future__ import annotations

from typing import Any

from zope.interface import Attribute, Interface

from sbus.errors import CloseReason, Violation
from sbus.protocol.keys import PeerCredentials, SecretKey

__all__ = [
    "ICredentials",
    "ICredentialsPolicy",
    "IObserver",
]


class ICredentials(Interface):
    """Who may do what on one bus. All methods are called for each event, so they must be quick."""

    restrictsPublishing: bool = Attribute(
        "Whether `mayPublish` is to be asked. It costs time for every message, so say False if it allows everything."
    )

    def mayConnect(peer: PeerCredentials) -> bool:
        """Whether this peer may use the bus."""

    def checkSubscription(peer: PeerCredentials, pattern: bytes, secret: SecretKey | None) -> None:
        """Whether this peer may subscribe; `secret` is the pattern's parts where it is a secret one.

        :raises sbus.errors.Violation: if not.
        """

    def mayPublish(peer: PeerCredentials, key: bytes) -> bool:
        """Whether this peer may publish with this key (asked only if `restrictsPublishing`)."""

    def mayBlock(receiver: PeerCredentials, publisher: PeerCredentials) -> bool:
        """Whether a receiver that chose to block may hold this publisher back."""


class ICredentialsPolicy(Interface):
    """A kind of `ICredentials` that can be chosen with ``--credentials=NAME``."""

    name: str = Attribute("What ``--credentials`` calls it.")
    description: str = Attribute("One line for ``--help``.")

    def make(settings: Any) -> ICredentials:
        """Make the component for one bus from the `sbus.server.credentials.AccessSettings` in force."""


class IObserver(Interface):
    """Somebody who is told what happens on a bus: a log, metrics, a dashboard.

    Derive from `sbus.server.observers.Observer` and override what you need: an event that no
    observer overrides costs nothing. `client` is what stands for a connection throughout; its
    ``peer`` is a `PeerCredentials` and its ``number`` counts up from 1. A secret key is cut after
    ``<pid>``, and its payload is withheld.
    """

    def connected(client: Any) -> None:
        """A client is connected."""

    def subscribed(client: Any, pattern: bytes) -> None:
        """A client has subscribed."""

    def unsubscribed(client: Any, pattern: bytes) -> None:
        """A client has dropped a subscription."""

    def published(client: Any, key: bytes, payload: bytes | None) -> None:
        """A client has published a message; the payload is None if the key is secret."""

    def delivered(client: Any, packets: int, size: int) -> None:
        """So many packets, of so many bytes together, were handed to the kernel for a client."""

    def dropped(client: Any, packets: int, size: int) -> None:
        """So many packets, of so many bytes together, were dropped that a client should have got."""

    def violated(client: Any, violation: Violation, key: bytes) -> None:
        """A client broke the protocol (with this key or pattern, as far as there is one)."""

    def refused(peer: PeerCredentials, reason: CloseReason) -> None:
        """A connection was accepted only to be closed."""

    def closed(client: Any, reason: CloseReason) -> None:
        """A client is gone."""
