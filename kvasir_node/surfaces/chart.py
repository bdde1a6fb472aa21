"""Curves as a PNG, drawn by hand: no library for it is worth another dependency.

It does not know what the curves mean. Letters are those of a 5 × 7 font, capitals only.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 90, 250, 50, 60
TICKS = 6  # about, on the upright axis
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44), (148, 103, 189), (255, 127, 14), (23, 190, 207), (127, 90, 60))
GREY, BLACK = (210, 210, 210), (0, 0, 0)
Points = Sequence[tuple[float, float]]
Canvas = npt.NDArray[np.uint8]
_Colour = tuple[int, int, int]

# Each letter is five columns of seven bits, the lowest bit on top: the usual 5 × 7 font of small displays.
_LETTERS = {
    **dict(zip("0123456789", (
        "3E5149453E", "00427F4000", "4261514946", "2141454B31", "1814127F10", "2745454539", "3C4A494930", "0171090503",
        "3649494936", "064949291E"), strict=True)),
    **dict(zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", (
        "7E1111117E", "7F49494936", "3E41414122", "7F4141221C", "7F49494941", "7F09090901", "3E4149497A", "7F0808087F",
        "00417F4100", "2040413F01", "7F08142241", "7F40404040", "7F020C027F", "7F0408107F", "3E4141413E", "7F09090906",
        "3E4151215E", "7F09192946", "4649494931", "01017F0101", "3F4040403F", "1F2040201F", "3F4038403F", "6314081463",
        "0708700807", "6151494543"), strict=True)),
    " ": "0000000000", ".": "0060600000", ",": "0050300000", "-": "0808080808", "/": "2010080402", ":": "0036360000",
    "(": "001C224100", ")": "0041221C00", "+": "08083E0808", "%": "2313086462", "×": "2214081422",
}  # fmt: skip
LETTER_WIDTH = 6


def curves_png(title: str, across: str, upright: str, curves: Mapping[str, Points], *, doublings: bool = True) -> bytes:
    """Curves, each with its name beside it, over an axis of doublings (x at least 1, a mark at each), or an even one
    from 0 without marks, for many points. Raises ValueError for none."""
    points = [point for each in curves.values() for point in each]
    if not points:
        raise ValueError("a chart needs at least one point")
    canvas = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    xs = sorted({x for x, _ in points})
    most = _round_up(max(y for _, y in points))
    if not doublings:
        xs = [_round_up(xs[-1]) * number / TICKS for number in range(TICKS + 1)]
    plot = _Plot(xs[0], xs[-1], most, doublings=doublings)
    _write(canvas, LEFT, 8, title, size=2)
    _write(canvas, 8, TOP - 18, upright)
    _write(canvas, (LEFT + WIDTH - RIGHT) // 2 - 3 * len(across), HEIGHT - 22, across)
    for number in range(TICKS + 1):
        value = most * number / TICKS
        y = plot.y(value)
        _line(canvas, (LEFT, y), (WIDTH - RIGHT, y), GREY)
        label = f"{value:.3g}"
        _write(canvas, LEFT - 8 - LETTER_WIDTH * len(label), y - 3, label)
    for x in xs:
        _line(canvas, (plot.x(x), TOP), (plot.x(x), HEIGHT - BOTTOM), GREY)
        _write(canvas, plot.x(x) - 3, HEIGHT - BOTTOM + 8, f"{x:g}")
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(plot.x(x), plot.y(y)) for x, y in sorted(curve)]
        for begin, end in pairwise(places):
            _line(canvas, begin, end, colour, thick=True)
        for x, y in places if doublings else ():
            canvas[y - 3 : y + 4, x - 3 : x + 4] = colour
        top = TOP + 18 * number
        canvas[top : top + 7, WIDTH - RIGHT + 14 : WIDTH - RIGHT + 28] = colour
        _write(canvas, WIDTH - RIGHT + 34, top, name)
    return _png(canvas)


class _Plot:
    """Places of values on the canvas."""

    def __init__(self, least_x: float, most_x: float, most_y: float, *, doublings: bool) -> None:
        self._scale = np.log2 if doublings else float
        self._low = self._scale(least_x)
        self._span = max(self._scale(most_x) - self._low, 1e-9)
        self._most_y = most_y

    def x(self, value: float) -> int:
        return LEFT + round(float((self._scale(value) - self._low) / self._span) * (WIDTH - LEFT - RIGHT))

    def y(self, value: float) -> int:
        return HEIGHT - BOTTOM - round(value / self._most_y * (HEIGHT - TOP - BOTTOM))


def _round_up(value: float) -> float:
    """To a number of which a sixth has few digits."""
    if value <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(step * power for step in (1.2, 1.5, 1.8, 2.4, 3, 4.2, 6, 7.5, 9, 12) if step * power >= value))


def _line(canvas: Canvas, begin: tuple[int, int], end: tuple[int, int], colour: _Colour, thick: bool = False) -> None:
    steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
    xs = np.linspace(begin[0], end[0], steps + 1).round().astype(int)
    ys = np.linspace(begin[1], end[1], steps + 1).round().astype(int)
    canvas[ys, xs] = colour
    if thick:
        canvas[ys + 1, xs] = colour
        canvas[ys, xs + 1] = colour


def _write(canvas: Canvas, left: int, top: int, text: str, size: int = 1) -> None:
    """What does not fit on the canvas, or is in no letter of the font, is left out."""
    for letter in text.upper():
        columns = bytes.fromhex(_LETTERS.get(letter, _LETTERS[" "]))
        bits = np.array([[column >> row & 1 for column in columns] for row in range(7)], bool)
        bits = bits.repeat(size, 0).repeat(size, 1)
        space = canvas[top : top + bits.shape[0], left : left + bits.shape[1]]
        space[bits[: space.shape[0], : space.shape[1]]] = BLACK
        left += LETTER_WIDTH * size


def _png(canvas: Canvas) -> bytes:
    """Source: PNG (W3C, third edition), §5 and §11: signature, IHDR, one IDAT of unfiltered rows, IEND."""
    height, width, _ = canvas.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), canvas.reshape(height, -1)], 1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes()))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
