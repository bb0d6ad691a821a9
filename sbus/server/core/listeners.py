"""The sockets of a bus: their labels, and the users who may connect at each.

A bus has one socket, called ``main``, and any number of others (``--listen``), which all lead to the same bus. A
`Listener` is the label that the server attaches to each connection, with the rules of the socket at which the client
came in. The kernel reports the same user for a program in a container as for one outside (unless user namespaces
intervene). So only the socket identifies the container: a container can reach no socket but the one that is mounted
into it.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sbus.daemon.values import mode as parse_mode
from sbus.errors import ListenError, UsageError
from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.systemd import FIRST_DESCRIPTOR
from sbus.syscalls.addresses import Address, parse
from sbus.syscalls.users import is_owner

__all__ = [
    "ADMIN",
    "MAIN",
    "ListenOption",
    "Listener",
    "check_names",
    "check_paths",
    "parse_listen",
    "parse_user",
    "passed_admin",
    "passed_sockets",
]

ADMIN = "admin"
"""The name of a socket from systemd that is the admin socket."""
_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
_DEFAULT_MODE = 0o700
_UID_END = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket of a bus, as its clients are labelled.

    :ivar name: the label: letters, digits, ``_``, ``.`` and ``-``, at most 64.
    :ivar users: UIDs that may connect here, and no others, not even the server's own; None for all that the bus and
        the mode of the socket admit.
    :ivar max_clients: clients connected here at one time; None for the limit of the bus alone.
    :ivar is_abstract: whether only root and the server's user may connect here if `users` is None: an abstract
        address has no mode.
    :raises UsageError: if the name is none.
    """

    name: str
    users: frozenset[int] | None = None
    max_clients: int | None = None
    is_abstract: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"a socket cannot be called {self.name!r}: use letters, digits, '_', '.' and '-', 1 to 64 of them"
            )

    def admits(self, peer: PeerCredentials) -> bool:
        """Return whether this peer may connect here."""
        if self.users is not None:
            return peer.uid in self.users
        return not self.is_abstract or is_owner(peer.uid)


MAIN = Listener("main")
"""The label of the socket of a bus that has one, and of ``--socket``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOption:
    """The value of one ``--listen`` or ``--stream``; `str` writes it again.

    :ivar mode: permissions of the path; None: not given.
    :ivar group: group of the path, a name or GID; None: not given.
    :ivar stream: whether it is a stream socket (``--stream``).
    """

    name: str
    address: Address
    mode: int | None = None
    group: str | None = None
    users: frozenset[int] | None = None
    max_clients: int | None = None
    stream: bool = False

    @property
    def text(self) -> str:
        """The whole option, as it stands on a command line."""
        return f"--{'stream' if self.stream else 'listen'}={self}"

    def __str__(self) -> str:
        words = [f"{self.name}={self.address.text}"]
        if self.mode is not None:
            words.append(f"mode={self.mode:04o}")
        if self.group is not None:
            words.append(f"group={self.group}")
        if self.users is not None:
            words.append("users=" + ":".join(map(str, sorted(self.users))))
        if self.max_clients is not None:
            words.append(f"max-clients={self.max_clients}")
        return ",".join(words)

    @property
    def permissions(self) -> int:
        """The permissions of the path: those that were given, or those of ``--mode``'s default."""
        return _DEFAULT_MODE if self.mode is None else self.mode

    def explain(self, error: ListenError) -> ListenError:
        """Return an error of `sbus.syscalls.listening` with the option that caused it."""
        return ListenError(f"{self.text}: {str(error).replace('choose another --socket', 'choose another address')}")

    def listener(self, address: Address) -> Listener:
        """Return the label of connections at this socket.

        :param address: the address as it was resolved.
        """
        return Listener(self.name, self.users, self.max_clients, address.is_abstract)


def parse_user(text: str, option: str) -> int:
    """Return the UID of a user.

    :param text: a UID in decimal, or a name.
    :param option: what the text was given as, for the error.
    :raises UsageError: if there is no such user.
    """
    if text.isascii() and text.isdigit():
        if len(text) > 10 or int(text) >= _UID_END:
            raise UsageError(f"{option}: a UID is less than 2^32 - 1")
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        raise UsageError(
            f"{option}: there is no such user {text!r}: give a UID, or a name from `getent passwd`"
        ) from None


def parse_listen(text: str, stream: bool = False) -> ListenOption:
    """Parse ``NAME=ADDRESS[,mode=0660][,group=GROUP][,users=USER:USER][,max-clients=N]``.

    The address ends at the first comma.

    :param stream: this is a ``--stream``.
    :raises UsageError: if that is not what the text is, with the remedy.
    """
    option = f"--{'stream' if stream else 'listen'}={text}"
    name, equals, rest = text.partition("=")
    if not equals:
        raise UsageError(f"{option}: write NAME=ADDRESS, such as app=/run/sbus/app.sock")
    try:
        Listener(name)
    except UsageError as e:
        raise UsageError(f"{option}: {e}") from None
    if name == MAIN.name:
        raise UsageError(f"{option}: {MAIN.name} is the name of --socket: choose another name")
    written, *words = rest.split(",")
    try:
        address = parse(written)
    except UsageError as e:
        raise UsageError(f"{option}: {e}") from None
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in ("mode", "group", "users", "max-clients") or not equals:
            raise UsageError(f"{option}: {word!r} is no setting: use mode=, group=, users= or max-clients=")
        if key in settings:
            raise UsageError(f"{option}: {key}= is there twice: leave one of them out")
        if not value:
            raise UsageError(f"{option}: {key}= has no value: give one, or leave it out")
        settings[key] = value
    for key in ("mode", "group"):
        if key in settings and not address.is_path:
            raise UsageError(f"{option}: {key}= is for a path: leave it out, as {address.text} is none")
    return ListenOption(
        name=name,
        address=address,
        mode=parse_mode(settings["mode"], f"{option}: mode") if "mode" in settings else None,
        group=settings.get("group"),
        users=_users(settings["users"], option) if "users" in settings else None,
        max_clients=_max_clients(settings["max-clients"], option) if "max-clients" in settings else None,
        stream=stream,
    )


def _users(text: str, option: str) -> frozenset[int]:
    names = text.split(":")
    if "" in names:
        raise UsageError(f"{option}: users={text} has an empty name: write users=alice:1001")
    return frozenset(parse_user(name, option) for name in names)


def _max_clients(text: str, option: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise UsageError(f"{option}: max-clients={text}: give a number of clients above 0")
    return int(text)


def passed_admin(names: Sequence[str], listen: Iterable[ListenOption] = ()) -> str | None:
    """Return the address of the admin socket that systemd passed (``FileDescriptorName=admin``), or None.

    :param listen: the sockets of ``--listen``; one that they name is none.
    """
    if ADMIN not in names or ADMIN in {option.address.systemd for option in listen}:
        return None
    return f"/dev/fd/{FIRST_DESCRIPTOR + names.index(ADMIN)}"


def passed_sockets(names: Sequence[str], listen: Iterable[ListenOption] = ()) -> list[tuple[str, str]]:
    """Return the label and the address of each socket that systemd passed, the main one first.

    One socket is ``main``, whatever systemd calls it. Of several, each has the label that systemd gives it
    (``FileDescriptorName=``), and one without a name is ``main``. The one called ``admin`` is for operators.

    :param names: the names of the passed sockets, in order.
    :param listen: the sockets of ``--listen``; those that they name are left out.
    :raises UsageError: if a name is no label, or two sockets have one.
    """
    taken = {option.address.systemd for option in listen} - {None, ""}
    found = [(name, number) for number, name in enumerate(names) if name not in taken and name != ADMIN]
    if not found and ADMIN in names:
        raise UsageError(
            "systemd passed an admin socket and no other: add a .socket unit for the bus, with another name"
        )
    if len(found) < 2:
        return [(MAIN.name, _descriptor(found[0][1] if found else 0))]
    labels = [(MAIN.name if _is_default(name) else name, number) for name, number in found]
    for label, _ in labels:
        try:
            Listener(label)
        except UsageError as e:
            raise UsageError(f"systemd: {e}: set FileDescriptorName= of the socket unit") from None
    if len({label for label, _ in labels}) < len(labels):
        raise UsageError(
            f"systemd passed sockets with the names {', '.join(name or 'none' for name, _ in found)}: give each socket "
            "unit a FileDescriptorName= of its own; at most one can do without"
        )
    labels.sort(key=lambda each: each[0] != MAIN.name)
    return [(label, _descriptor(number)) for label, number in labels]


def _is_default(name: str) -> bool:
    """Return whether a name is one that systemd gives to a socket without ``FileDescriptorName=``."""
    return name in ("", "unknown") or name.endswith(".socket")


def _descriptor(number: int) -> str:
    """Return the address of a passed socket by its place; the first one has a name, as ever."""
    return f"/dev/fd/{FIRST_DESCRIPTOR + number}" if number else "systemd"


def check_names(names: Iterable[str]) -> None:
    """Check that no two sockets have one name.

    :raises UsageError: if two have.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"two sockets are called {name!r}: give each a name of its own (--listen, --stream)")
        seen.add(name)


def check_paths(sockets: Iterable[tuple[str, Address]]) -> None:
    """Check that no two sockets have one address.

    :param sockets: names and resolved addresses.
    :raises UsageError: if two have.
    """
    seen: dict[object, str] = {}
    for name, address in sockets:
        key: object = address.name
        if address.descriptor is not None:
            key = address.descriptor
        elif address.is_path:
            directory, base = os.path.split(address.name)
            key = os.path.join(os.path.realpath(directory), base)
        if key in seen:
            raise UsageError(
                f"the sockets {seen[key]!r} and {name!r} have one address, {address.text}: choose another for "
                "one of them"
            )
        seen[key] = name
