"""When bytes reached this machine, by the kernel's own word, for a socket whose reader looked up later.

It does not know what the bytes are. Linux stamps what comes by the clock of the day (socket(7), SO_TIMESTAMPNS;
of a TCP stream, the last of the bytes that one call received). Elsewhere nothing is said.
"""

from __future__ import annotations

import platform
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

_STAMP = struct.Struct("@qq")  # a timespec of a machine of 64 bits
_OPTION = 35  # SO_TIMESTAMPNS, which the socket module lacks, on all but a few old architectures
_KNOWN_ON = ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x")
STAMP_ROOM = socket.CMSG_SPACE(_STAMP.size) if hasattr(socket, "CMSG_SPACE") else 0
"""Bytes of ancillary data for a stamp."""


def ask_for_stamps(sock: socket.socket) -> None:
    """From now on, or from a little later on, where this system does that."""
    if sys.platform == "linux" and platform.machine() in _KNOWN_ON:
        with suppress(OSError):  # something that only looks like Linux: stamps are a help, no need
            sock.setsockopt(socket.SOL_SOCKET, _OPTION, 1)


def stamp_age_s(ancillary: Iterable[tuple[int, int, bytes]]) -> float | None:
    """How long ago what was received with this ancillary data had come; None when nobody says, or the clock of the day
    was put back meanwhile."""
    for level, kind, stamp in ancillary:
        if (level, kind, len(stamp)) == (socket.SOL_SOCKET, _OPTION, _STAMP.size):
            seconds, nanoseconds = _STAMP.unpack(stamp)
            age_s = time.time() - (seconds + nanoseconds * 1e-9)
            return age_s if age_s >= 0.0 else None
    return None
