"""Pass a child's stderr on as it comes, and keep the end of it: an abort says why only there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import termios
import threading
import tty

KEPT_BYTES = 16_384
SECONDS_AFTER_DEATH = 1.0
"""How long to wait for the rest; a grandchild may hold the other end open for longer."""
STDERR = 2
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OURS = ("warning: ", "error: ")
"""Starts of lines of our own console, which may tell of an earlier death."""


class Relay:
    """One child's stderr: give `child_end` to it, then call `start`.

    On a terminal the child gets a terminal too, so that it still draws its progress bar.

    Args:
        to: File descriptor to pass everything on to.
    """

    def __init__(self, to: int = STDERR) -> None:
        self._to = to
        self._kept = b""
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        if os.isatty(to):
            self._own_end, self.child_end = os.openpty()
            tty.setraw(self.child_end)
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(to, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self.child_end, termios.TIOCSWINSZ, size)
        else:
            self._own_end, self.child_end = os.pipe()

    def start(self) -> None:
        """The child has its end: let go of it here and read."""
        os.close(self.child_end)
        self._thread.start()

    def said(self) -> str:
        """After the child's death: the last it wrote, our own lines left out."""
        self._thread.join(SECONDS_AFTER_DEATH)
        text = ESCAPES.sub("", self._kept.decode(errors="replace"))
        lines = [line for line in text.splitlines() if not line.startswith(OURS)]
        return "\n".join(lines)

    def _pass_on(self) -> None:
        try:
            while data := os.read(self._own_end, 65_536):
                self._kept = (self._kept + data)[-KEPT_BYTES:]
                written = 0
                while written < len(data):
                    written += os.write(self._to, data[written:])
        except OSError as error:
            # A terminal ends in EIO. Where nobody reads us, the child learns it as well: its end
            # has no reader any more.
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
        finally:
            os.close(self._own_end)
