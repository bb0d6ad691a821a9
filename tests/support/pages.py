"""The structure of an HTML page, as a browser would see it."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["PageStructure"]


class PageStructure(HTMLParser):
    """Parses a page, checks that its elements nest and that no attribute runs or loads anything.

    :ivar tags: the names of all elements.
    :ivar references: the attributes that refer to something.
    :ivar ids: the ids of elements.
    :ivar scripts: the content of each script element.
    :ivar texts: the text between tags.
    """

    VOID = frozenset({"meta", "wbr", "br", "hr", "img", "input", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    @property
    def text(self) -> str:
        """All text of the page."""
        return "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "action", "data", "xlink:href", "srcset"):
                self.references.append(f"{name}={value}")
            assert "url(" not in (value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif not self._open or self._open[-1] != "style":
            self.texts.append(data)
