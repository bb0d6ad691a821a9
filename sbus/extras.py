"""Optional libraries: the error for a missing one names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sbus.distribution import DISTRIBUTION
from sbus.errors import UsageError

__all__ = ["needs"]

_LIBRARIES = {"deltalake", "duckdb", "jinja2", "nats", "nkeys", "py4j", "pyarrow", "pyspark"}


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wrap imports of libraries that `extra` installs.

    :param extra: the name of an extra of this package.
    :raises UsageError: if a library of the extra is missing.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        library = (e.name or "").partition(".")[0]
        if library not in _LIBRARIES:
            raise
        raise UsageError(
            f"this needs {library}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'"
        ) from None
