"""The page's call streams and downloads: credits, bounds, and peers that do not keep to them."""

from __future__ import annotations

import pytest
from phone_parts import PartError

from kvasir_node.base.ids import cid_of
from kvasir_node.net.rpc_credits import Grant
from kvasir_node.net.rpc_frames import Kind, encode_grant, pack_header


def frame(kind, method, call_id, body=b""):
    return (pack_header(kind, method, call_id, len(body)) + body).hex()


GRANT = frame(Kind.GRANT, 0, 0, encode_grant(Grant(8, 1 << 20)))
GRANTED_BY_US = frame(Kind.GRANT, 0, 0, encode_grant(Grant(2, 1 << 16)))  # never less than what holds before a GRANT


def test_calls_are_answered_each_by_its_id_however_the_bytes_are_cut(parts):
    calls = bytes.fromhex(frame(Kind.CALL, 3, 7, b"abc") + frame(Kind.NOTICE, 4, 0, b"n") + frame(Kind.CALL, 9, 8))
    for step in (1, 5, 14, len(calls)):
        chunks = [calls[at : at + step].hex() for at in range(0, len(calls), step)]
        told = parts("calls", chunks, 2, 1000, True, [])
        assert told["written"][0] == GRANTED_BY_US
        assert frame(Kind.RESULT, 3, 7, b"abc") in told["written"]
        assert told["written"][2][8:10] == f"{Kind.ERROR:02x}"
        assert told["notices"] == ["4:6e"]
        assert told["ended"] is None


@pytest.mark.parametrize(
    "chunks",
    [
        [frame(Kind.CALL, 3, n) for n in (1, 1)],
        [frame(Kind.CALL, 3, 1) + frame(Kind.CALL, 3, 2) + frame(Kind.CALL, 3, 3)],
        [pack_header(Kind.CALL, 3, 1, 1001).hex()],
        [pack_header(Kind.GRANT, 0, 0, 9).hex()],
        [b"\0\0\0\0\x07".ljust(14, b"\0").hex()],
        [frame(Kind.RESULT, 3, 1, b"unasked")],
        [GRANT + frame(Kind.GRANT, 0, 0, encode_grant(Grant(7, 1 << 20)))],
    ],
    ids=[
        "an id twice",
        "beyond the grant",
        "too large",
        "a wrong grant",
        "an unknown kind",
        "unasked",
        "a smaller grant",
    ],
)
def test_who_breaks_the_rules_is_cut_off(parts, chunks):
    if chunks == [frame(Kind.CALL, 3, 1)] * 2:
        chunks = ["".join(chunks)]  # before the first is answered
    told = parts("calls", chunks, 2, 1000, True, [])
    assert told["isReset"]
    assert told["ended"]


def test_calls_wait_for_credit_and_fail_with_the_stream(parts):
    bodies = ["aa", "bb", "cc"]
    told = parts("calls", [], 8, 1000, False, bodies)
    assert told["written"] == [frame(Kind.CALL, 1, 1, b"\xaa")]  # one until a GRANT has come
    told = parts("calls", [GRANT, frame(Kind.RESULT, 1, 2, b"two")], 2, 1000, False, bodies)
    assert [each[8:10] for each in told["written"]] == ["01"] * 3  # two at once, the third after the second's answer
    assert told["results"] == [b"two".hex()]
    told = parts("calls", ["ff" * 14], 8, 1000, False, bodies)
    assert told["results"] == ["Unreachable"] * 3


def test_an_end_that_takes_no_calls_says_so(parts):
    told = parts("calls", [frame(Kind.CALL, 3, 1)], 2, 1000, False, [])
    assert "unknown_method" in bytes.fromhex(told["written"][0]).decode(errors="replace")


BLOCKS = {cid_of(bytes([n]) * 50): (bytes([n]) * 50).hex() for n in range(20)}


def test_a_peer_that_was_told_of_no_larger_window_sends_all_the_same(parts):
    assert parts("windows", 4 << 20, 5000) == 4 << 20


def test_blocks_come_from_whoever_has_them(parts):
    half = dict(list(BLOCKS.items())[:10])
    rest = dict(list(BLOCKS.items())[10:])
    assert parts("download", BLOCKS, {"a": half, "b": rest})["fetched"] == 1000


def test_bad_blocks_are_asked_of_another_and_never_kept(parts):
    bad = {cid: "00" * 50 if place % 2 else data for place, (cid, data) in enumerate(BLOCKS.items())}
    tally = parts("download", BLOCKS, {"liar": bad, "honest": BLOCKS})
    assert tally["fetched"] == 1000
    assert tally["wasted"] > 0
    with pytest.raises(PartError, match="could not be fetched") as caught:
        parts("download", BLOCKS, {"liar": bad})
    assert caught.value.name == "Unreachable"


def test_what_nobody_has_ends_the_download(parts):
    some = dict(list(BLOCKS.items())[:3])
    with pytest.raises(PartError, match="17 blocks could not be fetched"):
        parts("download", BLOCKS, {"a": some, "b": some})


def test_a_store_keeps_what_is_pinned_and_drops_the_longest_unused(parts):
    acts = [["put", name, 40] for name in "ab"] + [["get", "a"], ["put", "c", 40], ["get", "b"], ["get", "a"], ["used"]]
    assert parts("store", acts, 100) == ["kept", "kept", 40, "kept", None, 40, 80]
    acts = [
        ["pin", "x", ["a", "b"]],
        ["put", "a", 50],
        ["put", "b", 50],
        ["put", "c", 1],
        ["unpin", "x"],
        ["put", "c", 1],
    ]
    assert parts("store", acts, 100) == ["kept", "kept", "CapacityError", "kept"]
