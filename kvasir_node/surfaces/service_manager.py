"""What a service manager (systemd, or whoever speaks its protocol) is told of this process: ready, stopping, alive.

It does not know what a node is. Nothing is told where nobody asked: without NOTIFY_SOCKET every call does nothing.
The protocol: sd_notify(3), datagrams of NAME=VALUE lines to a Unix socket.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

import trio

WATCHDOG_SHARE = 2  # told so many times in each watchdog interval, as sd_watchdog_enabled(3) advises


class ServiceManager:
    """The one of `environment`, if there is one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path  # @ = Linux' abstract names
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environment.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(usec) / 1e6 if is_ours and usec.isdecimal() else 0.0

    def tell(self, **fields: str) -> None:
        """Such as READY="1"; one that does not listen is no reason to fail."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto("\n".join(f"{name}={value}" for name, value in fields.items()).encode(), self._address)

    async def prove_alive(self) -> None:
        """Tells so until cancelled, for as long as our loop runs; a manager with a watchdog restarts who is silent."""
        if not self._watchdog_s:
            await trio.sleep_forever()
        while True:
            self.tell(WATCHDOG="1")
            await trio.sleep(self._watchdog_s / WATCHDOG_SHARE)
