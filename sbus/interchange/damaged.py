"""Turn the errors that a format's library raises for a bad file into one error with the remedy."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from sbus.errors import UsageError

__all__ = ["explained"]


@contextlib.contextmanager
def explained(path: str, format_: str, remedy: str) -> Iterator[None]:
    """Translate what a library raises in the block, whether from struct, zstd, Thrift or others.

    Errors of the disk pass through.

    :param path: the file.
    :param format_: the name of its format.
    :raises UsageError: if the library refuses the file.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as e:
        # Without a number it is Arrow's own; EINVAL is a seek to before the start of a short file.
        if isinstance(e, OSError) and e.errno not in (None, errno.EINVAL):
            raise
        problem = str(e).partition("\n")[0] or type(e).__name__
        raise UsageError(f"{path}: this is no {format_} file, or it is cut off or damaged ({problem}): {remedy}") from e
