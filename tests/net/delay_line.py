"""A wire with a delay, a rate and losses, between pairs of TAP devices: the kernel here has no netem.

It does not know namespaces or NATs. Run as a program: it makes the devices, says "ready", and carries frames until it
is terminated. One frame lost is one draw of a seeded generator.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
FRAME_BYTES = 2048
BURST_FRAMES = 32  # of one device before the others have their turn
QUEUE_S = 0.2  # what waits longer for the wire is dropped, as a router's full buffer would


@dataclass
class Direction:
    """Frames that came from one device and leave at its partner."""

    leaves_at: int
    free_at: float = 0.0
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def deliver_due(directions: dict[int, Direction], now: float) -> float | None:
    """Seconds until the next frame is due; None when nothing waits."""
    next_at = None
    for direction in directions.values():
        while direction.waiting and direction.waiting[0][0] <= now:
            frame = direction.waiting.popleft()[1]
            with contextlib.suppress(OSError):  # the device is down or full: a lost frame
                os.write(direction.leaves_at, frame)
        if direction.waiting and (next_at is None or direction.waiting[0][0] < next_at):
            next_at = direction.waiting[0][0]
    return None if next_at is None else max(0.0, next_at - now)


def take_in(device: int, direction: Direction, options: argparse.Namespace, rng: random.Random) -> None:
    byte_s = 8 / (options.rate_mbit * 1e6) if options.rate_mbit else 0.0
    for _ in range(BURST_FRAMES):
        try:
            frame = os.read(device, FRAME_BYTES)
        except OSError:
            return
        now = time.monotonic()
        starts_at = max(now, direction.free_at)
        if rng.random() < options.loss or starts_at - now > QUEUE_S:
            continue
        direction.free_at = starts_at + len(frame) * byte_s
        direction.waiting.append((direction.free_at + options.delay_ms / 1e3, frame))


def main() -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", action="append", required=True, help="NAME:NAME of two devices to be joined")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="each way; 0 = no limit")
    parser.add_argument("--loss", type=float, default=0.0, help="share of frames, each way")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    directions: dict[int, Direction] = {}
    for pair in options.pair:
        first, second = (open_tap(name) for name in pair.split(":"))
        directions[first], directions[second] = Direction(second), Direction(first)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    rng = random.Random(options.seed)
    while True:
        readable, _, _ = select.select(list(directions), (), (), deliver_due(directions, time.monotonic()))
        for device in readable:
            take_in(device, directions[device], options, rng)


if __name__ == "__main__":
    main()
