"""The files of the page, as ``make web`` builds them into the package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sbus.errors import SbusError

__all__ = ["File", "load"]

_KINDS = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "THIRD-PARTY.txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is sent.

    :ivar kind: its media type.
    :ivar data: its bytes.
    """

    kind: str
    data: bytes


def load(directory: Path | None = None) -> dict[str, File]:
    """Return the files by their paths in the URL.

    :param directory: where they are; by default in the package.
    :raises sbus.errors.SbusError: if the page was not built.
    """
    place = resources.files("sbus.web") / "static" if directory is None else directory
    try:
        files = {f"/{name}": File(kind, (place / name).read_bytes()) for name, kind in _KINDS.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise SbusError(
            "the page was not built: this is a source tree; run 'make web' there (it needs the network once), "
            "or install a wheel, which has the page"
        ) from None
    files["/"] = files["/index.html"]
    return files
