"""The installation: the name of this package, another one over it, and the libraries of its extras.

The package index has another project called ``sbus``, which installs files into the same directory. This package is
therefore distributed as ``sbusd``, although it is imported as ``sbus``. With both installed, the later one has
overwritten ``sbus/__init__.py``, and whichever is removed first takes that file with it.

The check looks into one directory, which takes well under a millisecond; `importlib.metadata` takes twenty.
``sbus pub`` imports this module, which therefore imports nothing else until there is an error.
"""

from __future__ import annotations

import os
import sys

__all__ = ["DISTRIBUTION", "check_installation", "needs"]

DISTRIBUTION = "sbusd"
"""What ``pip install`` and ``pip uninstall`` call this package."""

_LIBRARIES = {"deltalake", "duckdb", "jinja2", "mcap", "nats", "nkeys", "py4j", "pyarrow", "pyspark"}
_REMEDY = f"pip uninstall sbus {DISTRIBUTION}, then pip install {DISTRIBUTION}"


def _is_overwritten() -> bool:
    """Return whether ``sbus/__init__.py`` is not this package's."""
    return "connect" not in getattr(sys.modules["sbus"], "__all__", ())


def _has_other(directory: str) -> bool:
    """Return whether a distribution called ``sbus`` is installed in a directory."""
    try:
        return any(
            name.startswith("sbus-") and name.endswith((".dist-info", ".egg-info")) for name in os.listdir(directory)
        )
    except OSError:
        return False


def check_installation() -> None:
    """Check that the other project called ``sbus`` is not installed in the same place.

    If it is, but all files of this package are intact, a line on standard error says so.

    :raises UsageError: if the other project has overwritten this package.
    """
    if _is_overwritten():
        from sbus.errors import UsageError

        raise UsageError(f"another package called sbus has overwritten a part of this one: {_REMEDY}")
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if _has_other(directory) and sys.stderr is not None:
        print(
            f"sbus: another package called sbus is installed in {directory}, and removing or upgrading it will break "
            f"this one: {_REMEDY}",
            file=sys.stderr,
        )


class needs:
    """Wrap imports of libraries that `extra` installs.

    :param extra: the name of an extra of this package.
    :raises UsageError: at the end of the block, if a library of the extra is missing.
    """

    def __init__(self, extra: str) -> None:
        self._extra = extra

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, ModuleNotFoundError):
            return
        library = (error.name or "").partition(".")[0]
        if library in _LIBRARIES:
            from sbus.errors import UsageError

            raise UsageError(
                f"this needs {library}, which is not installed: pip install '{DISTRIBUTION}[{self._extra}]'"
            ) from None
