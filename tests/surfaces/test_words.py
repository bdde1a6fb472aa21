"""Figures and foreign text as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.surfaces.words import clean, count_text, counted, duration_text, short_id, size_text


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (size_text(0), "0 B"),
        (size_text(1536), "1.5 KiB"),
        (size_text(5 * 1024**5), "5120.0 TiB"),
        (duration_text(59.9), "59s"),
        (duration_text(187), "3m07s"),
        (duration_text(18120), "5h02m"),
        (duration_text(183600), "2d03h"),
        (count_text(12345), "12,345"),
        (count_text(1_200_000), "1.2M"),
        (count_text(7_000_000_000), "7.0G"),
        (short_id("12D3KooWabcdefgh"), "..abcdefgh"),
        (short_id("short"), "short"),
        (clean("a" * 9, 6), "aaa..."),
        (clean("na\u00efve \u4f60"), "na\u00efve \u4f60"),
    ],
)
def test_texts(made, expected):
    assert made == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.characters(), max_size=50))
def test_clean_text_is_one_encodable_line(text):
    shown = clean(text)
    assert shown.isprintable()
    assert shown.encode("utf-8") is not None
    assert len(shown) == len(text)


def test_one_of_a_kind_has_no_s():
    assert [counted(count, "peer") for count in (0, 1, 2, 1000)] == ["0 peers", "1 peer", "2 peers", "1,000 peers"]
