"""The link between two buses, without I/O: what to say to either, and what to carry.

.. rubric:: Theory of operation

A link is a client of two buses, the one *below* and its master *above*. `LinkCore` gets what each of them sends, in
batches, and hands packets to a `Wire` (`sbus.link.wire`). It has no clock: each call brings the time, in seconds.

========  ==============================================================================================================
stage     what happens on a connection
========  ==============================================================================================================
GREETING  The link has asked its questions. A server ignores a question that it does not know, so the last one is one
          that every server answers: ``whoami`` above, ``chain/off`` below, where ``whoami`` may have no
          answer before the link's name above is known.
KNOWN     The bus has answered. When both have, the link checks the path, announces it below, subscribes above to all
          that is wanted below, and asks the master again.
OPEN      The master has answered: the subscriptions are in force, and the link is *up*. It says so below, subscribes
          below to what is wanted above, and carries messages. It drops and counts those that come while it is not up.
========  ==============================================================================================================

Invariants:

* *Only listed keys cross.* The link subscribes on each side to the intersections of the wanted patterns with the listed
  ones (`sbus.link.interest`). Of secret messages, down: those that begin with the link's own name and go on with other
  credentials; up: those that the bus below sends it, if secrets go up.
* *No echo.* The link publishes on the connection on which it subscribes, with ``echo/off``.
* *Trees only.* A bus that finds its own identifier in the path above is in a loop. The link announces the path before
  it asks the last time: of two links that would close a loop at the same moment, at least one sees the other.
* *Subscribe, then carry.* Nothing crosses before the master has confirmed the subscriptions.
* *Authors stay.* A message keeps its publisher's name on the other bus (`sbus.link.authors`).
* *Losses are counted and reported*: those in receipts of either bus, and the link's own (`LinkCore.tick`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sbus.client.identity import explain_name
from sbus.errors import Violation
from sbus.link.authors import NOTICE, Authors
from sbus.link.interest import Change, Interest
from sbus.link.wire import Side, Stage, Wire
from sbus.protocol import controls
from sbus.protocol.bundles import MAGIC, MAX_BUNDLE, unbundle
from sbus.protocol.notices import BYE, DENIED, LOST, SEVERAL, parse_denied
from sbus.protocol.packets import CMSG, DEFAULT_MAX_PACKET, MSG, SUB, UNSUB, Truncated, build, parse
from sbus.routing.runs import next_run

__all__ = ["CLOSELY", "LOOP_RETRY", "LinkCore", "Side", "Stage", "Wire"]

CLOSELY = 64
"""Packets of a batch that are handled one by one in one go: 0.3 ms. One read can bring 25,000 messages of as many keys;
the rest waits for a later turn of the reactor."""
_GLANCES = 16
"""The number of publishers' names, or changes of interest, that take as long as one such packet."""
LOOP_RETRY = 30.0
"""Seconds after which a link that would close a loop is tried again."""
_REPORT_INTERVAL = 1.0
"""Seconds between two reports of losses to the bus below."""
_LOG_INTERVAL = 60.0
"""Seconds between two log lines of a kind: about messages that were too long to cross, or what a policy forbids."""
_MAX_KEYS = 16_384
"""Keys that are remembered as free to cross."""
_LONGEST_KEY = 256
"""Bytes of the longest key that is remembered: a look at a longer one costs less than the memory."""
_CREDENTIALS = b"/!/cred/"
_PATTERN = build(CMSG, controls.INTEREST_PATTERN, b"")
_PROBE = b"/link/echo"
"""The end of the key by which a link finds out whether a bus honours ``echo/off``."""
_CARRY = (True,)
_LONGEST_NUMBER = 19
"""Digits of the longest number that a bus sends."""
_LIMITS = (b"violation ", b"user-limit ")
"""Reasons of a bus for ending the connection that too many patterns can have."""


class _Bus:
    """The state of one of the link's buses.

    :ivar interest: what to subscribe to here.
    :ivar stage: how far the connection has come.
    :ivar name: the link's own name here.
    :ivar path: the buses from here up to the root: identifier and name.
    :ivar is_asked: whether this connection has been asked for all that was wanted: from then on, changes follow.
    :ivar patterns: the list of patterns that are wanted here, while it is being sent; `number` is that of the last one.
    :ivar fences: the questions under way, each with the number of the change of interest that its reply confirms.
    :ivar receipts: messages that the bus has dropped for the link.
    :ivar known: the keys of messages that may cross, for `next_run`.
    :ivar grants: whether this bus lists the wanted patterns for the link, so that it trusts the link.
    :ivar names: whether this bus names publishers, and accepts names from a link that it trusts.
    :ivar authors: the publishers of this bus's messages.
    """

    def __init__(self, listed: tuple[bytes, ...], limit: int) -> None:
        self.listed = listed
        self.interest = Interest(listed, limit=limit)
        self.known: dict[bytes, tuple[bool, ...]] = {}
        self.authors = Authors()
        self.reset()

    def reset(self) -> None:
        self.stage = Stage.CLOSED
        self.is_asked = False
        self.known.clear()
        self.name = b""
        self.path: list[tuple[bytes, bytes]] = []
        self.grants = self.names = False
        self.authors.restart_source()
        self.patterns: dict[bytes, None] = {}
        self.number = 0
        self.is_listed = False
        self.fences: list[int | None] = []
        self.receipts = 0


class LinkCore:
    """One link.

    :param out: the patterns that may go up.
    :param into: the patterns that may come down.
    :param secrets: whether secret messages that are not for the bus below go up.
    :param limit: patterns to subscribe to at one bus.
    :raises sbus.errors.UsageError: if a listed pattern cannot be used.
    :ivar lost: messages lost on the way up, and on the way down.
    :ivar carried: messages carried up, and down.
    :ivar refused: secret messages from above without a receiver below.
    :ivar left: packets at the end of the last batch that are for another call of `received`.
    :ivar known: by side, the keys of open messages that may cross. While the link is up, the shell around this core can
        pass on a batch with only such keys (`next_run`) as it is; it then adds the messages to `carried`.
    """

    def __init__(
        self,
        wire: Wire,
        out: Iterable[bytes] = (),
        into: Iterable[bytes] = (),
        *,
        secrets: bool = False,
        limit: int = 8192,
    ) -> None:
        # What is wanted above is subscribed to below, and the other way round.
        self._below = _Bus(tuple(out), limit)
        self._above = _Bus(tuple(into), limit)
        self._buses = (self._below, self._above)
        self.known = (self._below.known, self._above.known)
        self._wire = wire
        self._secrets = secrets
        self._master = "the master"
        self.is_up = False
        self.lost = [0, 0]
        self.carried = [0, 0]
        self.refused = self.left = 0
        self._logged: dict[str, float] = {}  # when each kind of line was last logged that may come often
        self._reported = (0, 0)
        self._report_due = 0.0
        self._collapsed = [False, False]
        self._fenced = 0

    # --- connections -------------------------------------------------------------------------

    def connected(self, side: Side) -> None:
        """Begin a new connection."""
        bus = self._buses[side]
        self._reset(side)
        bus.stage = Stage.GREETING
        questions = [controls.ECHO_OFF, controls.BUNDLE_ON, controls.BYE_ON, controls.RECEIPTS_ON, controls.DENIED_ON]
        questions += [controls.SENDER_ON, controls.LINK_LOST, controls.LINK_PATH, controls.INTEREST_PATTERNS]
        questions.append(controls.CHAIN_ON if side is Side.ABOVE else controls.CHAIN_OFF)
        self._wire.send(side, [build(CMSG, key) for key in questions])
        if side is Side.ABOVE:
            self._ask(None)

    def disconnected(self, side: Side) -> None:
        """Note the end of a connection. Without the bus below, the one above is left, too."""
        if self._buses[side].stage is Stage.CLOSED:
            return
        was_up, self.is_up = self.is_up, False
        self._reset(side)
        if side is Side.BELOW:
            if self._above.stage is not Stage.CLOSED:
                self._reset(Side.ABOVE)
                self._wire.disconnect(Side.ABOVE, "the bus below has gone", None)
        elif self._below.stage is not Stage.CLOSED:
            if was_up:
                self._tell_below(controls.LINK_DOWN)
            self._tell_below(controls.LINK_PATH, b"")
        if was_up:
            self._wire.is_up(False, self._master)

    def _reset(self, side: Side) -> None:
        """Forget the state of a connection, on both ends."""
        self._buses[side].reset()
        self._buses[side.other].authors.restart_target()

    def _refuse(self, side: Side, reason: str, retry: float | None = None) -> None:
        self.disconnected(side)
        self._wire.disconnect(side, reason, retry)

    # --- time --------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """Return the time at which `tick` has something to do; None for never."""
        times = []
        if self.is_up:
            times += [due for bus in self._buses if (due := bus.interest.due(now)) is not None]
            if tuple(self.lost) != self._reported:
                times.append(self._report_due)
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Do the work that is due: changes of interest, and a report of both sums of losses to the bus below."""
        if not self.is_up:
            return
        for side in Side:
            self._follow(side, now)
        self._fence()
        if tuple(self.lost) != self._reported and now >= self._report_due:
            self._reported = (self.lost[0], self.lost[1])
            self._report_due = now + _REPORT_INTERVAL
            self._tell_below(controls.LINK_LOST, b"%d %d" % self._reported)

    def _follow(self, side: Side, now: float) -> None:
        """Subscribe and unsubscribe at one bus, as its interest says."""
        interest = self._buses[side].interest
        changes = interest.changes(now)
        if changes:
            self._wire.send(side, _packets(changes))
        if interest.is_collapsed is not self._collapsed[side]:
            self._collapsed[side] = interest.is_collapsed
            where = "at the master" if side is Side.ABOVE else "at the bus below"
            if interest.is_collapsed:
                self._wire.log(f"too many patterns are wanted {where}: subscribing to the listed ones whole")
            else:
                self._wire.log(f"subscribing {where} to what is wanted again, and no more to the listed patterns whole")

    def _fence(self) -> None:
        """Have the master confirm the link's requests, unless a question is under way.

        The reply confirms all subscriptions sent before the question, and the link passes that on (``link/fence``).
        Changes that come meanwhile share the next question.
        """
        above = self._above
        if not above.fences and above.interest.settled > self._fenced:
            self._fenced = above.interest.settled
            self._ask(self._fenced)

    def _ask(self, number: int | None) -> None:
        """Ask the master ``whoami``; the reply confirms the changes of interest up to this number."""
        self._above.fences.append(number)
        self._wire.send(Side.ABOVE, [build(CMSG, controls.WHOAMI)])

    def _tell_below(self, key: bytes, payload: bytes | None = None) -> None:
        self._wire.send(Side.BELOW, [build(CMSG, key, payload)])

    # --- packets -----------------------------------------------------------------------------

    def received(self, side: Side, packets: list[bytes], now: float) -> bool:
        """Take a batch that a bus has sent, or the part of it before `left`.

        Messages with known keys form a run (`sbus.routing.runs`), which is one list on its way to the other bus, so a
        message costs the link no more than it costs a bus. Any other packet is looked at by itself.

        :returns: whether `due` may have changed: not if there were only messages to carry.
        """
        bus = self._buses[side]
        total = len(packets)
        at = looks = self.left = 0
        is_plain = self.is_up
        ready: list[bytes] = []
        while at < total and bus.stage is not Stage.CLOSED:
            found, until = next_run(packets, at, total, bus.known)
            if found is None:
                if looks >= CLOSELY * _GLANCES:
                    self.left = total - at
                    break
                packet, until = packets[at], at + 1
                if packet.startswith((NOTICE, _PATTERN)):
                    looks += 1
                    if packet.startswith(NOTICE):
                        ready += bus.authors.hear(packet)
                    else:
                        if self._wanted(side, bus, packet[len(_PATTERN) :], now):
                            looks += _GLANCES
                        is_plain = False
                    at = until
                    continue
                looks += _GLANCES
                if packet[:4] == MAGIC:  # read together with the answer that agrees to bundles
                    parts = unbundle([packet])
                    if parts[0] is not packet:
                        packets[at:until] = parts
                        total = len(packets)
                        continue
                if ready and packet[:4] != b"MSG ":
                    self._wire.send(side.other, ready)  # before the link obeys the packet
                    ready = []
                if not self._handle(side, bus, packet, now):
                    at = until
                    is_plain = False
                    continue
            if not self.is_up:
                self.lost[side] += until - at
            else:
                self.carried[side] += until - at
                if until - at == total:
                    ready = packets
                else:
                    ready += packets[at:until]
            at = until
        if ready:
            self._wire.send(side.other, ready)
        if not is_plain:
            self.tick(now)
        return not is_plain

    def log_long(self, why: str, now: float) -> None:
        """Log that a message was lost, as too long; at once, and then once a minute."""
        self._log_rarely("long", f"a message was lost, as too long: {why}; others like it are counted", now)

    def _log_rarely(self, kind: str, line: str, now: float) -> None:
        if now >= self._logged.get(kind, -math.inf) + _LOG_INTERVAL:
            self._logged[kind] = now
            self._wire.log(line)

    def lose(self, side: Side, count: int) -> None:
        """Count messages from one bus that could not be sent to the other."""
        self.lost[side] += count

    def _handle(self, side: Side, bus: _Bus, packet: bytes, now: float) -> bool:
        """Handle a packet that is not part of a known run; return whether to carry it."""
        try:
            verb, key, payload = parse(packet)
        except Violation:
            self.lose(side, 1)
            if isinstance(packet, Truncated):
                self.log_long(f"{self._name(side)} sent {packet.size} bytes, more than --max-packet of this link", now)
            return False
        if verb == MSG:
            return self._may_cross(side, bus, key)
        if verb == CMSG:
            self._control(side, bus, key, payload, now)
        return False

    def _may_cross(self, side: Side, bus: _Bus, key: bytes) -> bool:
        if not key.startswith(b"!/"):
            if len(bus.known) >= _MAX_KEYS:
                bus.known.clear()
            if len(key) <= _LONGEST_KEY:
                bus.known[key] = _CARRY
            return True
        if side is Side.BELOW:
            return self._secrets
        if bus.stage is Stage.GREETING and key == bus.name + _PROBE:
            self._refuse(side, "it does not know echo/off, so every message would come back: link only a newer master")
            return False
        if bus.name and key.startswith(bus.name + _CREDENTIALS):
            return True
        self.refused += 1
        return False

    def _control(self, side: Side, bus: _Bus, key: bytes, payload: bytes, now: float) -> None:
        if key == controls.WHOAMI:
            if side is Side.ABOVE:
                self._answered(payload, now)
        elif key == controls.CHAIN_OFF:
            if side is Side.BELOW and bus.stage is Stage.GREETING:
                self._greeted_below(now)
        elif key == controls.INTEREST_PATTERNS:
            self._list_complete(side, bus, now)
        elif key == controls.LINK_PATH:
            self._path(side, bus, payload)
        elif key == controls.CHAIN:
            self._renamed(bus, payload)
        elif key == controls.BUNDLE_ON:
            if payload.isdigit() and len(payload) < 10:
                self._wire.bundle(side, min(int(payload), MAX_BUNDLE))
        elif key == controls.BYE_ON:
            self._wire.limit(side, int(payload) if payload.isdigit() and len(payload) < 10 else DEFAULT_MAX_PACKET)
        elif key == controls.SENDER_ON:
            bus.names = True
        elif key == LOST:
            self._lost(side, bus, payload)
        elif key == DENIED:
            self._denied(side, payload, now)
        elif key == BYE:
            if payload.startswith(_LIMITS) and bus.stage is not Stage.GREETING:  # it has been asked for something
                bus.interest.lower_limit()
            self._wire.log(f"disconnected by {self._name(side)}: {payload.partition(b' ')[2].decode(errors='replace')}")

    def _lost(self, side: Side, bus: _Bus, payload: bytes) -> None:
        """Count the messages that a bus has dropped for the link, by the totals in its receipts.

        Report the keys in the receipt to the other bus (``link/gap``).
        """
        text, *keys = payload.split(b"\0")
        words = text.split(b" ")
        if len(words) >= 3 and words[2].isdigit() and len(words[2]) <= _LONGEST_NUMBER:
            total = int(words[2])
            self.lost[side] += max(0, total - bus.receipts)
            bus.receipts = total
        if keys and self.is_up and self._buses[side.other].grants:
            self._wire.send(side.other, [build(CMSG, controls.LINK_GAP, each) for each in keys])

    def _denied(self, side: Side, payload: bytes, now: float) -> None:
        """Handle a denial by the policy of a bus: a message counts as lost, a pattern as refused.

        A summary of several denials counts as that many lost messages.
        """
        denial = parse_denied(payload)
        if denial is None:
            return
        if denial.verb == SUB:
            self._buses[side].interest.refuse(denial.key, now)
        else:
            self.lose(side.other, denial.count)
        if denial.verb != SEVERAL:
            what = f"{denial.verb.decode(errors='replace')} {denial.key.decode(errors='replace')}"
            line = f"{self._name(side)} denies the link what others want it to carry: {what} (rule {denial.rule})"
            self._log_rarely(f"denied {side}", line, now)

    # --- interest ----------------------------------------------------------------------------

    def _wanted(self, side: Side, bus: _Bus, payload: bytes, now: float) -> bool:
        """Note a change of the wanted patterns on one side; return whether that took long."""
        words = payload.split(b" ", 2)
        if len(words) < 3 or not words[1].isdigit() or len(words[1]) > _LONGEST_NUMBER:
            return False
        sign, number, pattern = words[0], int(words[1]), words[2]
        bus.grants = True
        if not bus.is_listed:
            bus.number = number
            if sign == b"+":
                bus.patterns[pattern] = None
            else:
                bus.patterns.pop(pattern, None)
            return False
        other = self._buses[side.other]
        if other.is_asked:
            other.interest.note(sign == b"+", pattern, number)
        else:
            other.interest.apply(sign == b"+", pattern, number, now)
        return not other.is_asked

    def _list_complete(self, side: Side, bus: _Bus, now: float) -> None:
        bus.grants = bus.is_listed = True
        self._buses[side.other].interest.replace(bus.patterns, now, bus.number)
        bus.patterns = {}
        self._maybe_join(now)

    # --- coming up ---------------------------------------------------------------------------

    def _answered(self, name: bytes, now: float) -> None:
        above = self._above
        number = above.fences.pop(0) if above.fences else None
        if above.stage is Stage.GREETING:
            self._greeted_above(name, now)
        elif above.stage is Stage.KNOWN:
            self._open(now)
        elif number is not None and self.is_up:
            self._tell_below(controls.LINK_FENCE, b"%d" % number)
            self._fence()

    def _greeted_below(self, now: float) -> None:
        if not self._below.grants:
            reason = "it does not list the wanted patterns for this link: run the link as root or as the bus's user"
            self._refuse(Side.BELOW, reason)
            return
        self._below.stage = Stage.KNOWN
        self._tell_below(controls.LINK_PATH, b"")  # from here on this is the link of that bus, also without a master
        self._maybe_join(now)

    def _greeted_above(self, name: bytes, now: float) -> None:
        above = self._above
        if not above.name:
            above.name = name
            if explain_name(name) is None:
                # Does it honour echo/off? The reply to the second question comes behind the message, or alone.
                own = name + _PROBE
                self._wire.send(Side.ABOVE, [build(SUB, own), build(MSG, own, b""), build(UNSUB, own)])
                self._ask(None)
                return
        if not above.grants:  # a master of the original's kind: it names no wanted patterns, so all listed ones count
            self._below.interest.replace(self._below.listed, now)
        above.stage = Stage.KNOWN
        self._maybe_join(now)

    def _maybe_join(self, now: float) -> None:
        """When both buses are known: check the path, announce it, and subscribe above."""
        below, above = self._below, self._above
        if below.stage is not Stage.KNOWN and below.stage is not Stage.OPEN:
            return
        if above.stage is not Stage.KNOWN or above.fences or not below.is_listed:
            return
        if above.grants and not above.is_listed:
            return
        self._master = above.path[0][1].decode(errors="replace") if above.path else "a master without a name"
        if not self._check_path():
            return
        self._tell_below(controls.LINK_PATH, _lines(above.path))
        packets = []
        unproven = explain_name(above.name)
        if unproven is None:
            packets.append(build(SUB, above.name + b"/"))
        else:
            self._wire.log(f"no secret message comes through this link: {unproven}")
        packets += _packets(above.interest.restart(now))
        above.is_asked = True
        self._fenced = above.interest.settled
        packets.append(build(CMSG, controls.LINK_PATH))
        self._wire.send(Side.ABOVE, packets)
        self._ask(self._fenced)

    def _open(self, now: float) -> None:
        """The master has confirmed the subscriptions: carry messages from now on."""
        below, above = self._below, self._above
        if not self._check_path():
            return
        proven = explain_name(above.name) is None
        above.stage = Stage.OPEN
        self._tell_below(controls.LINK_UP, above.name if proven else b"")
        self._tell_below(controls.LINK_FENCE, b"%d" % self._fenced)
        self.is_up = True
        self._name_authors()
        if below.stage is Stage.KNOWN:
            below.stage = Stage.OPEN
            changes = below.interest.restart(now)
            below.is_asked = True
        else:
            changes = below.interest.changes(now)
        if changes:
            self._wire.send(Side.BELOW, _packets(changes))
        self._wire.is_up(True, self._master)

    def _name_authors(self) -> None:
        """Name the publisher of the next message from each bus to the other bus."""
        is_proven = explain_name(self._above.name) is None
        if is_proven:
            self._below.authors.put_behind(self._above.name)
        for side in Side:
            authors, target = self._buses[side].authors, self._buses[side.other]
            authors.may_name = is_proven and target.grants and target.names
            if due := authors.due():
                self._wire.send(side.other, due)

    def _renamed(self, bus: _Bus, name: bytes) -> None:
        """The link has a new name at the master, because the master has one; its subscription to it still counts."""
        if bus.stage is not Stage.GREETING and explain_name(name) is None:
            bus.name = name
            if self.is_up:
                self._tell_below(controls.LINK_UP, name)
                self._name_authors()

    # --- the path ----------------------------------------------------------------------------

    def _path(self, side: Side, bus: _Bus, payload: bytes) -> None:
        path = [(line[:32], line[33:]) for line in payload.split(b"\n") if line]
        if path == bus.path:
            return
        bus.path = path
        if side is Side.ABOVE and self.is_up and self._check_path():
            self._tell_below(controls.LINK_PATH, _lines(path))

    def _check_path(self) -> bool:
        """Return whether the bus below is not in the path above; if it is, end the connection and say so."""
        if not self._below.path:
            return True
        own, name = self._below.path[0]
        if all(identity != own for identity, _ in self._above.path):
            return True
        master = self._above.path[0][1].decode(errors="replace")
        self._refuse(
            Side.ABOVE,
            f"the bus {name.decode(errors='replace')!r} cannot have {master!r} as its master: that would close a loop, "
            f"as its messages come there already; give each bus one master, as in a tree",
            LOOP_RETRY,
        )
        return False

    def _name(self, side: Side) -> str:
        path = self._buses[side].path
        return path[0][1].decode(errors="replace") if path else ("the master" if side is Side.ABOVE else "the bus")


def _packets(changes: list[Change]) -> list[bytes]:
    return [build(SUB if change.is_new else UNSUB, change.pattern) for change in changes]


def _lines(path: list[tuple[bytes, bytes]]) -> bytes:
    return b"\n".join(b"%b %b" % each for each in path)
