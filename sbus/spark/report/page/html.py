"""HTML that cannot be broken by what is put into it: text is escaped where it comes in, not where one remembers to."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["Html", "Part", "el", "join", "shown"]

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "wbr"})


class Html(str):
    """Markup that is safe to insert. Only `el`, `join` and constants in this package make it."""

    __slots__ = ()


Part = str | int | float | None | Iterable["Part"]


def join(parts: Part) -> Html:
    """Markup stays, None is left out, what is iterable is joined; all else is text, and escaped."""
    if isinstance(parts, Html):
        return parts
    if parts is None:
        return Html()
    if isinstance(parts, str | int | float):
        return Html(html.escape(str(parts)))
    return Html("".join(map(join, parts)))


def el(name: str, /, *children: Part, **attributes: str | int | float | bool | None) -> Html:
    """An element. ``class_`` is class, ``_`` in names is ``-``; None and False leave an attribute out."""
    given = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def _attribute(name: str, value: str | int | float | bool) -> str:
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def shown(key: str, limit: int = 160) -> str:
    r"""A key as text that shows what is in it: what cannot be printed, or would turn the line around, as ``\xNN``.

    :param limit: characters; of a longer one the middle is left out.
    """
    if len(key) > limit:
        key = f"{key[: limit // 2]}…{key[-(limit // 2) :]}"
    return "".join(
        c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode("utf-8", "surrogatepass")) for c in key
    )
