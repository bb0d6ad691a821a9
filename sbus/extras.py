"""Libraries that come with an extra only: where one is missing, the error names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sbus.errors import UsageError

__all__ = ["needs"]

_BROUGHT = {"jinja2", "pyarrow", "pyspark", "py4j"}


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports: `extra` is the one of this package's that brings what is imported.

    :raises UsageError: if a library of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        library = (e.name or "").partition(".")[0]
        if library not in _BROUGHT:
            raise
        raise UsageError(f"this needs {library}, which is not installed: pip install 'sbus[{extra}]'") from None
