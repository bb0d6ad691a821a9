"""``/v1/events``: the events of a bus, as Server-Sent Events. docs/admin.rst documents them.

The stream is a page without an end: it makes events in pieces, and yields None when it has none. A reader that does not
keep up stops the page (`sbus.admin.answers`); the viewers then count the notes for which they have no room.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from sbus.admin.pages import Asked, Pieces, Problem
from sbus.flood import Signature
from sbus.journal.keytext import as_text
from sbus.protocol.notices import parse_sender, split_credentials
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.interfaces import Receiver
from sbus.server.ops.admin_status import status
from sbus.server.ops.tap import Source, Tap
from sbus.server.ops.viewers import (
    DEEPEST,
    LONGEST_HEAD,
    MOST_KEYS,
    Flow,
    MessageViewer,
    Note,
    TalkViewer,
    UnroutedViewer,
)

__all__ = ["events"]

_INTERVAL = 1.0
"""Seconds between two events ``status``, ``talk`` and ``unrouted``."""
_DEFAULT_HEAD = 256
_AT_ONCE = 16
"""Messages in one event."""
_ROWS = 2
"""Messages, flows or keys in one piece: less than 0.1 ms, or 0.6 ms if their keys are long, and not UTF-8."""
_NAMED = 64
"""Receivers that are named for each flow."""
_BEGIN = ": events of sbus\nretry: 2000\n\n"


def events(registry: SubscriptionRegistry, tap: Tap, asked: Asked) -> Pieces:
    """Return the pieces of a stream of events."""
    uncounted = registry.interest.uncounted
    messages = talk = unrouted = None
    if "monitor" in asked.parameters:
        if not asked.is_owner:
            raise Problem(403, "only root and the server's user may see what is published: leave out monitor=")
        pattern = asked.parameters["monitor"].encode("utf-8", "surrogateescape")
        messages = MessageViewer(registry.dialect, pattern, asked.number("head", _DEFAULT_HEAD, 0, LONGEST_HEAD))
    if "talk" in asked.parameters:
        talk = TalkViewer(registry.dialect, asked.number("talk", 1, 0, DEEPEST))
    if "unrouted" in asked.parameters:
        asked.number("unrouted", 1, 1, 1)
        unrouted = UnroutedViewer(registry.dialect, uncounted, registry.router.muted)
    return _Stream(registry, tap, messages, talk, unrouted).pieces()


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


class _Stream:
    """One stream.

    :param messages: the part of the published messages that it shows, besides the status; None: nothing.
    """

    def __init__(
        self,
        registry: SubscriptionRegistry,
        tap: Tap,
        messages: MessageViewer | None,
        talk: TalkViewer | None,
        unrouted: UnroutedViewer | None,
    ) -> None:
        self._registry = registry
        self._tap = tap
        self._messages = messages
        self._talk = talk
        self._unrouted = unrouted
        self._missed = 0  # of the tap, at the last event
        self._too_late = 0  # of the reader, at the last event
        self._missed_talk = 0
        self._counted_at = 0.0

    def pieces(self) -> Pieces:
        viewers = [each for each in (self._messages, self._talk, self._unrouted) if each is not None]
        tap = self._tap
        self._missed = self._missed_talk = tap.missed
        self._counted_at = time.monotonic()
        try:
            for viewer in viewers:
                tap.add(viewer)
            yield _BEGIN
            due = 0.0
            while True:
                tap.settle()
                if self._messages is not None:
                    yield from tap.charged(self._message_events(self._messages))
                if time.monotonic() >= due:
                    due = time.monotonic() + _INTERVAL
                    yield from self._status()
                    yield from tap.charged(self._counted())
                yield None
        finally:
            for viewer in viewers:
                tap.remove(viewer)

    def _status(self) -> Iterator[str]:
        for figures in status(self._registry):
            yield "" if figures is None else _event("status", figures)

    # --- messages ----------------------------------------------------------------------------

    def _message_events(self, viewer: MessageViewer) -> Iterator[str]:
        notes = viewer.take()
        missed, too_late = self._tap.missed - self._missed, viewer.missed - self._too_late
        self._missed, self._too_late = self._tap.missed, viewer.missed
        if not (notes or missed or too_late):
            return
        for at in range(0, len(notes) or 1, _AT_ONCE):
            figures = {"missed": {"budget": missed, "reader": too_late}}
            missed = too_late = 0
            yield from _listed("messages", figures, messages=map(self._message, notes[at : at + _AT_ONCE]))

    def _message(self, note: Note) -> dict[str, Any]:
        lost, losers = self._tap.lost(note.number)
        return {
            "time": note.at,
            "key": as_text(note.key),
            "is_secret": note.head is None,
            "size": note.size,
            "head": None if note.head is None else base64.b64encode(note.head).decode(),
            "publisher": note.publisher._asdict(),
            "sender": _fields(note.sender),
            "receivers": self._count(note.receivers),
            "lost": lost,
            "lost_by": losers,
        }

    def _count(self, receivers: tuple[Receiver, ...]) -> int:
        """Return the number of receivers, the keeper of last values aside."""
        keeper = self._registry.last_values
        return len(receivers) - (keeper is not None and keeper in receivers)

    # --- counted in a second -----------------------------------------------------------------

    def _counted(self) -> Iterator[str]:
        now = time.monotonic()
        seconds, self._counted_at = now - self._counted_at, now
        missed, self._missed_talk = self._tap.missed - self._missed_talk, self._tap.missed
        if self._talk is not None:
            others, self._talk.others = self._talk.others, 0
            yield from self._talk_event(self._talk.take(), seconds=seconds, missed=missed, others=others)
        if self._unrouted is not None:
            others, self._unrouted.others = self._unrouted.others, 0
            keys = self._unrouted.take()
            rows = (
                {"key": as_text(key), "messages": flow.messages, "bytes": flow.bytes}
                for key, flow in islice(keys.items(), MOST_KEYS)
            )
            yield from _listed("unrouted", {"seconds": seconds, "missed": missed, "others": others}, keys=rows)

    def _talk_event(
        self, flows: dict[tuple[Source, bytes, tuple[Receiver, ...]], Flow], **figures: Any
    ) -> Iterator[str]:
        keeper = self._registry.last_values
        seen: dict[int, Receiver | Source] = {}

        def rows() -> Iterator[dict[str, Any]]:
            for (publisher, prefix, receivers), flow in flows.items():
                seen[publisher.client] = publisher
                named = [each for each in receivers[: _NAMED + 1] if each is not keeper][:_NAMED]
                numbers = []
                for receiver in named:
                    number = getattr(receiver, "number", 0)
                    seen.setdefault(number, receiver)
                    numbers.append(number)
                yield {
                    "publisher": publisher.client,
                    "prefix": as_text(prefix),
                    "messages": flow.messages,
                    "bytes": flow.bytes,
                    "receivers": numbers,
                    "receivers_total": self._count(receivers),
                }

        def clients() -> Iterator[dict[str, Any]]:
            for number, each in seen.items():
                if isinstance(each, Source):
                    yield each._asdict()
                else:
                    listener = getattr(each, "listener", None)
                    name = "" if listener is None else listener.name
                    yield {"client": number, "pid": each.peer.pid, "uid": each.peer.uid, "listener": name}

        return _listed("talk", figures, flows=rows(), clients=clients())


def _fields(sender: Signature) -> dict[str, object]:
    """Return the fields of a publisher as receivers see it, like `sbus.interchange.jsonl.sender_fields`."""
    parsed = parse_sender(sender.notice.partition(b"\0")[2])
    if parsed is None:
        return dict.fromkeys(("number", "gid", "uid", "pid", "chain"))
    number, credentials = parsed
    gid, uid, pid, chain = split_credentials(credentials)
    return {"number": number, "gid": gid, "uid": uid, "pid": pid, "chain": chain}


def _listed(name: str, figures: dict[str, Any], **lists: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the pieces of one event with long lists."""
    text = f"event: {name}\ndata: {json.dumps(figures)[:-1]}"
    for field, rows in lists.items():
        text += f', "{field}": ['
        comma = ""
        waiting: list[str] = []
        for row in rows:
            waiting.append(json.dumps(row))
            if len(waiting) == _ROWS:
                yield text + comma + ", ".join(waiting)
                text, comma = "", ", "
                waiting = []
        if waiting:
            text += comma + ", ".join(waiting)
        text += "]"
    yield text + "}\n\n"
