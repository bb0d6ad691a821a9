"""Paths as Spark takes them: it has patterns and URLs where the rest of the world has names."""

from __future__ import annotations

import os

__all__ = ["AS_THEY_ARE", "url"]

AS_THEY_ARE = {"__globPaths__": "false"}
"""Options of a reader for whose paths patterns mean nothing; Spark's own, for paths that it has found itself.

Escaped patterns are no way: Hadoop cannot look below a directory with a colon in its name then.
"""


def url(path: str | os.PathLike[str]) -> str:
    """Return a local path for Spark; a configuration of Hadoop may put paths without a scheme elsewhere.

    :param path: an absolute path; Spark decodes nothing in it.
    """
    return f"file://{os.fspath(path)}"
