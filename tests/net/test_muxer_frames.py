import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.errors import Misbehaved
from kvasir_node.net.muxer_frames import Flag, Frame, FrameReader, FrameType, pack


def test_a_header_has_the_layout_of_the_specification():
    assert pack(FrameType.WINDOW_UPDATE, Flag.SYN, 3, 0x01020304).hex() == "000100010000000301020304"


def parts_of(reader, chunks):
    return [part for chunk in chunks for part in reader.feed(chunk)]


def whole_frames(parts):
    """[(frame, payload)] put together again."""
    frames, payload = [], b""
    for part in parts:
        if part.payload is not None:
            payload += part.payload
        if part.complete:
            frames.append((part.frame, payload))
            payload = b""
    return frames


frames = st.lists(
    st.tuples(st.sampled_from(list(FrameType)), st.integers(0, 15), st.integers(0, 2**32 - 1), st.binary(max_size=50)),
    max_size=8,
)


@given(frames, st.data())
def test_frames_come_out_whole_whatever_the_chunks(sent, data):
    wire, expected = b"", []
    for kind, flags, stream_id, payload in sent:
        body = payload if kind is FrameType.DATA else b""
        wire += pack(kind, Flag(flags), stream_id, len(payload)) + body
        expected.append((Frame(kind, flags, stream_id, len(payload)), body))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    chunks = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert whole_frames(parts_of(FrameReader(), chunks)) == expected


def test_a_frame_is_announced_before_its_payload_is_there():
    parts = parts_of(FrameReader(), [pack(FrameType.DATA, Flag.NONE, 1, 1_000_000)])
    assert [(part.frame.length, part.complete) for part in parts] == [(1_000_000, False)]


@pytest.mark.parametrize("header", ["01000000" + "0" * 16, "00040000" + "0" * 16, "00ff0000" + "0" * 16])
def test_an_unknown_version_or_type_is_refused(header):
    with pytest.raises(Misbehaved, match="not a yamux frame"):
        parts_of(FrameReader(), [bytes.fromhex(header)])


@given(st.integers(0, 11), st.integers(0, 7))
def test_any_flipped_bit_is_refused_or_read_as_another_frame(position, bit):
    header = bytearray(pack(FrameType.WINDOW_UPDATE, Flag.ACK, 7, 4096))
    header[position] ^= 1 << bit
    try:
        parts = parts_of(FrameReader(), [bytes(header)])
    except Misbehaved:
        return
    assert parts[0].frame != Frame(FrameType.WINDOW_UPDATE, Flag.ACK, 7, 4096)
