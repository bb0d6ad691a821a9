"""A program's arguments for its bus, checked before the bus is made: an error names the place of the mistake."""

from __future__ import annotations

from twisted.internet.interfaces import IStreamServerEndpoint
from zope.interface.interface import InterfaceClass, Method

from sbus.errors import UsageError
from sbus.protocol.keys import Dialect
from sbus.server.core.interfaces import ICredentials, IObserver
from sbus.server.core.limits import Limits

__all__ = ["check_credentials", "check_dialect", "check_endpoint", "check_limits", "check_observer", "check_policy"]


def check_endpoint(endpoint: object) -> None:
    """Check where to listen.

    :raises UsageError: if it is no endpoint.
    """
    _check_methods(
        endpoint,
        IStreamServerEndpoint,
        "an endpoint",
        "SeqpacketServerEndpoint(reactor, '/run/my-program.sock')",
    )


def check_credentials(credentials: object) -> None:
    """Check the permissions of clients.

    :raises UsageError: if methods of `ICredentials` are missing.
    """
    _check_methods(credentials, ICredentials, "credentials", "OwnUserPolicy().make(AccessSettings())")


def check_observer(observer: object) -> None:
    """Check an observer.

    :raises UsageError: if methods of `IObserver` are missing.
    """
    _check_methods(observer, IObserver, "an observer", "an object of a class derived from sbus.server.Observer")


def check_limits(limits: object) -> None:
    """Check the limits of the bus.

    :raises UsageError: if they are no `Limits`.
    """
    if not isinstance(limits, Limits):
        raise UsageError(f"{limits!r:.80} is not a Limits: give, for example, Limits(max_clients=100)")


def check_dialect(dialect: object) -> None:
    """Check the revision of the protocol.

    :raises UsageError: if it is no `Dialect`.
    """
    if not isinstance(dialect, Dialect):
        raise UsageError(f"{dialect!r:.80} is not a dialect: give sbus.protocol.keys.CURRENT or EARLY")


def check_policy(policy: object, dialect: Dialect) -> None:
    """Check the policy of the bus.

    :raises UsageError: if it is no `sbus.policy.Policy`, or the dialect has none.
    """
    if policy is None:
        return
    if not dialect.control:
        raise UsageError(f"a policy is for keys of the current dialect: give no policy to a bus with {dialect.name}")
    if not callable(getattr(policy, "rights_of", None)):
        raise UsageError(f"{policy!r:.80} is not a policy: give, for example, sbus.policy.load('policy.toml')")


def _check_methods(value: object, interface: InterfaceClass, what: str, example: str) -> None:
    methods = [name for name, element in interface.namesAndDescriptions(all=True) if isinstance(element, Method)]
    missing = sorted(name for name in methods if not callable(getattr(value, name, None)))
    if isinstance(value, type) or missing:
        why = "is a class" if isinstance(value, type) else f"has no {missing[0]}()"
        raise UsageError(f"{value!r:.80} is not {what}, as it {why}: give, for example, {example}")
