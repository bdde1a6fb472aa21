"""Bytes of a terminal as keys, however they are cut."""

from __future__ import annotations

import pytest

from kvasir_node.surfaces.keys import KeyReader


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q?1", ["q", "?", "1"]),
        (b"\x1b[A\x1b[B\x1bOC\x1b[D", ["up", "down", "right", "left"]),
        (b"\t\x1b[Z\r\n\x7f\x08\x0c", ["tab", "shift-tab", "enter", "enter", "backspace", "backspace", "redraw"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page-up", "page-down", "home", "end"]),
        ("ü🧊".encode(), ["ü", "🧊"]),
        (b"\x1b[1;5Cx", ["x"]),  # Ctrl-right has no name here
        (b"\x1bxq", ["q"]),  # Alt-x
        (b"\x1b[200~ask\r q\x1b[201~p", ["paste:ask q", "p"]),
        (b"\x1b[201~p\x1b[200~\x1b[201~", ["p"]),
        (b"\x1b[200~" + b"q" * 999 + b"\x1b[201~", ["paste:" + "q" * 200]),
        (b"\x00\x01q", ["q"]),
        (b"\xff\xfeq", ["q"]),
        (b"\x1b[" + b"1;" * 40 + b"q", None),  # no terminal sends this; it must end, that is all
    ],
)
def test_keys_come_out_whole_and_byte_by_byte(data, keys):
    whole = KeyReader().feed(data)
    single = KeyReader()
    by_byte = [key for byte in data for key in single.feed(bytes([byte]))]
    if keys is not None:
        assert whole == keys
    assert by_byte == whole


def test_escape_alone_is_a_key_only_after_a_moment():
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.is_waiting
    assert reader.rest() == ["esc"]
    assert not reader.is_waiting
    assert reader.feed(b"\x1b[") == reader.rest() == []


def test_two_escapes_are_one_and_the_beginning_of_another():
    reader = KeyReader()
    reader.feed(b"\x1b\x1b")
    assert reader.rest() == ["esc"]
