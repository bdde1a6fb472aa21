"""Curves as a PNG: what a reader of PNGs makes of it."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from kvasir_node.surfaces.chart import COLOURS, HEIGHT, WIDTH, curves_png


def pixels(png: bytes) -> np.ndarray:
    """[H, W, 3], by the chunks alone; every checksum is looked at."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, rest = {}, png[8:]
    while rest:
        (size,) = struct.unpack(">I", rest[:4])
        kind, data = rest[4:8], rest[8 : 8 + size]
        assert struct.unpack(">I", rest[8 + size : 12 + size])[0] == zlib.crc32(kind + data)
        chunks[kind], rest = data, rest[12 + size :]
    width, height, depth, colours, *methods = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colours, methods, chunks[b"IEND"]) == (8, 2, [0, 0, 0], b"")
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def count_of(colour: tuple[int, int, int], image: np.ndarray) -> int:
    return int((image == np.array(colour, np.uint8)).all(-1).sum())


def test_a_chart_has_axes_letters_and_a_curve_of_each_colour():
    curves = {"one": [(1, 1.0), (16, 1.5), (32, 1.9)], "two, ×": [(1, 0.8), (32, 2.4)]}
    image = pixels(curves_png("M: fan-out", "requests", "gain", curves))
    assert image.shape == (HEIGHT, WIDTH, 3)
    assert count_of((0, 0, 0), image) > 200
    assert count_of(COLOURS[0], image) > 300
    assert count_of(COLOURS[1], image) > 300
    assert not count_of(COLOURS[2], image)


def test_a_higher_value_lies_higher_and_a_doubling_is_a_step():
    image = pixels(curves_png("", "", "", {"": [(1, 1.0), (2, 2.0), (4, 4.0)]}))
    squares = np.argwhere((image[:, :700] == np.array(COLOURS[0], np.uint8)).all(-1))
    left, right = squares[squares[:, 1].argmin()], squares[squares[:, 1].argmax()]
    assert left[0] > right[0]


def test_on_an_even_axis_equal_times_are_equal_steps_and_points_have_no_marks():
    image = pixels(curves_png("", "seconds", "", {"": [(0, 0.0), (30, 0.0), (30.1, 1.0), (60, 1.0)]}, doublings=False))
    drawn = np.argwhere((image[:, :712] == np.array(COLOURS[0], np.uint8)).all(-1))
    top, bottom = drawn[drawn[:, 0] == drawn[:, 0].min()], drawn[drawn[:, 0] == drawn[:, 0].max()]
    assert abs(np.ptp(top[:, 1]) - np.ptp(bottom[:, 1])) <= 3
    assert np.bincount(drawn[:, 1]).max() > 50  # the step up
    assert np.median(np.bincount(drawn[:, 1])[drawn[:, 1].min() : drawn[:, 1].max()]) <= 2


@pytest.mark.parametrize("curves", [{"a": [(16, 1.0)]}, {"a": [(1, 0.0)]}, {"a": [(1, 12345.0), (128, 0.001)]}])
def test_any_points_can_be_drawn(curves):
    assert pixels(curves_png("T" * 300, "x", "y", curves)).shape == (HEIGHT, WIDTH, 3)


def test_a_chart_without_points_is_refused():
    with pytest.raises(ValueError, match="at least one point"):
        curves_png("", "", "", {"a": []})
