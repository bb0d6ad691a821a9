"""A terminal that a command draws on: an alternate screen, keys without Return, and everything as before at the end."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from sbus.syscalls.polling import is_readable

__all__ = ["Screen", "open_screen"]

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_SEQUENCE = re.compile("\x1b[\\[O][0-9;]*.")
_BOLD, _REVERSE, _PLAIN = "\x1b[1m", "\x1b[7m", "\x1b[0m"


class Screen:
    """The terminal while it is drawn on.

    :param colors: whether to use bold and reverse text.
    """

    def __init__(self, colors: bool) -> None:
        self._colors = colors

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return found.columns or 80, found.lines or 24

    def draw(self, lines: Sequence[str], header: int) -> None:
        """Replace the text on the screen.

        :param header: the index of the line to show in reverse.
        """
        columns, height = self.size()
        text = [_HOME]
        for at, line in enumerate(lines[:height]):
            cut = line[:columns]
            if at == header:
                cut = cut.ljust(columns)
                text.append(f"{_REVERSE}{cut}{_PLAIN}" if self._colors else cut)
            else:
                text.append(f"{_BOLD}{cut}{_PLAIN}{_END_OF_LINE}" if self._colors and not at else cut + _END_OF_LINE)
            if at < min(len(lines), height) - 1:
                text.append("\n")
        text.append(_END_OF_SCREEN)
        sys.stdout.write("".join(text))
        sys.stdout.flush()

    def keys(self, until: float) -> str:
        """Return the keys that were pressed; none if there are none until a time of `time.monotonic`.

        Keys that send a sequence, such as the arrows, are left out. At the end of the input it is ``q``.
        """
        left = max(0.0, until - time.monotonic())
        if not is_readable(sys.stdin, left):
            return ""
        data = os.read(sys.stdin.fileno(), 64)
        return _SEQUENCE.sub("", data.decode(errors="ignore")) if data else "q"


@contextlib.contextmanager
def open_screen(colors: bool) -> Iterator[Screen]:
    """Draw on the terminal until the block ends, however it ends."""
    before = termios.tcgetattr(sys.stdin.fileno())
    sys.stdout.write(_ENTER)
    sys.stdout.flush()
    try:
        tty.setcbreak(sys.stdin.fileno())
        yield Screen(colors)
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)
        with contextlib.suppress(OSError):
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
