"""A process in a pseudo-terminal of its own, as a person would have it before them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    controller: int
    shown: str = ""

    def type(self, keys: str) -> None:
        """What is shown from now on counts."""
        self.shown = ""
        os.write(self.controller, keys.encode())

    def until(self, text: str, timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline, f"never saw {text!r} in {self.shown[-2000:]!r}"
            if select.select([self.controller], [], [], 0.1)[0]:
                self.shown += os.read(self.controller, 65536).decode("utf-8", "replace")

    def end(self) -> int:
        code = self.process.wait(40)
        self.until(LEAVE)
        return code


@contextmanager
def in_terminal(
    command: list[str], environment: dict[str, str], lines: int = 24, width: int = 80
) -> Iterator[tuple[Terminal, int]]:
    """Of that size, whatever the one that the tests run in has left in their environment."""
    controller, end = pty.openpty()
    resize(end, lines, width)
    inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, env={**inherited, **environment}, preexec_fn=_own_terminal
    )
    try:
        yield Terminal(process, controller), end
    finally:
        process.kill()
        process.wait()
        os.close(controller)
        os.close(end)


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def resize(terminal: int, lines: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, width, 0, 0))
