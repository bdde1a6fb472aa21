import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.errors import (
    BugError,
    CallTimeout,
    CapacityError,
    DataError,
    KvasirError,
    Misbehaved,
    NotFoundError,
    Overloaded,
    PeerError,
    QueueFull,
    RejectReason,
    Unreachable,
    UsageError,
)
from kvasir_node.net.rpc_credits import Grant
from kvasir_node.net.rpc_frames import (
    ERROR_TEXT_BYTES_MAX,
    GRANT_BYTES_MAX,
    HEADER,
    FrameAssembler,
    Kind,
    decode_error,
    decode_grant,
    encode_error,
    encode_grant,
    pack_header,
)

MAX = 1000


def test_the_golden_frame():
    assert (pack_header(Kind.CALL, 7, 0x0102030405060708, 3) + b"abc").hex() == "0300000001070807060504030201616263"


def assemble(chunks):
    assembler = FrameAssembler(MAX)
    frames = [frame for chunk in chunks for frame in assembler.feed(chunk)]
    return frames, assembler.is_mid_frame


frames = st.lists(
    st.tuples(st.sampled_from([Kind.CALL, Kind.RESULT, Kind.NOTICE]), st.integers(0, 255), st.binary(max_size=80)),
    max_size=6,
)


@given(frames, st.data())
def test_frames_come_out_whole_whatever_the_chunks(sent, data):
    wire = b"".join(pack_header(kind, method, i, len(body)) + body for i, (kind, method, body) in enumerate(sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    chunks = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    received, mid_frame = assemble(chunks)
    assert [(f.kind, f.method, f.id, bytes(f.body)) for f in received] == [
        (kind, method, i, body) for i, (kind, method, body) in enumerate(sent)
    ]
    assert not mid_frame


def test_byte_by_byte():
    wire = pack_header(Kind.CALL, 1, 2, 3) + b"abc" + pack_header(Kind.CANCEL, 0, 2, 0)
    received, mid_frame = assemble([wire[i : i + 1] for i in range(len(wire))])
    assert [(f.kind, bytes(f.body)) for f in received] == [(Kind.CALL, b"abc"), (Kind.CANCEL, b"")]
    assert not mid_frame
    assert assemble([wire[:-1]])[1]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (HEADER.pack(MAX + 1, Kind.CALL, 0, 0), RejectReason.TOO_LARGE),
        (HEADER.pack(2**32 - 1, Kind.RESULT, 0, 0), RejectReason.TOO_LARGE),
        (HEADER.pack(1, Kind.CANCEL, 0, 0), RejectReason.TOO_LARGE),
        (HEADER.pack(ERROR_TEXT_BYTES_MAX + 2, Kind.ERROR, 0, 0), RejectReason.TOO_LARGE),
        (HEADER.pack(0, 0, 0, 0), RejectReason.BAD_FRAME),
        (HEADER.pack(9, Kind.GRANT, 0, 0), RejectReason.TOO_LARGE),
        (HEADER.pack(0, 7, 0, 0), RejectReason.BAD_FRAME),
    ],
)
def test_hostile_headers_are_refused_before_anything_is_allocated(header, reason):
    with pytest.raises(Misbehaved) as caught:
        assemble([header])
    assert caught.value.reason is reason


def test_a_body_has_memory_of_its_own():
    wire = bytearray(pack_header(Kind.CALL, 1, 2, 3) + b"abc")
    (frame,), _ = assemble([bytes(wire)])
    frame.body[0] = ord("z")
    assert bytes(frame.body) == b"zbc"


# --- grants ---


def test_a_grants_golden_vector():
    wire = pack_header(Kind.GRANT, 0, 0, 8) + encode_grant(Grant(8, 1 << 26))
    assert wire.hex() == "080000000600" + "00" * 8 + "08000000" + "00000004"
    (frame,), _ = assemble([wire])
    assert decode_grant(frame.body) == Grant(8, 1 << 26)
    assert decode_grant(encode_grant(Grant(1, 1 << 40))).bytes == GRANT_BYTES_MAX


def test_every_flipped_byte_of_a_grant_gives_another_frame_or_is_refused():
    wire = pack_header(Kind.GRANT, 0, 0, 8) + encode_grant(Grant(8, 1 << 26))
    original, _ = assemble([wire])
    for at in range(len(wire)):
        for bit in range(8):
            flipped = bytearray(wire)
            flipped[at] ^= 1 << bit
            try:
                frames, _ = assemble([bytes(flipped)])
            except Misbehaved:
                continue
            assert frames != original, (at, bit)


@given(st.binary(max_size=12))
def test_any_body_is_a_grant_of_eight_bytes_or_misbehaviour(body):
    if len(body) == 8:
        assert encode_grant(decode_grant(body)) == body
    else:
        with pytest.raises(Misbehaved, match="expected 8"):
            decode_grant(body)


# --- results that go where the caller wants them ---


def placed(wire, buffer, chunk_bytes, call_id=5):
    assembler = FrameAssembler(MAX)
    assembler.place(call_id, memoryview(buffer))
    frames = []
    for at in range(0, len(wire), chunk_bytes):
        frames += assembler.feed(wire[at : at + chunk_bytes])
    return frames


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_a_result_lands_in_its_buffer_and_nothing_else_does(chunk_bytes):
    wire = pack_header(Kind.CALL, 1, 5, 3) + b"abc" + pack_header(Kind.RESULT, 1, 6, 3) + b"def"
    wire += pack_header(Kind.RESULT, 1, 5, 4) + b"here"
    buffer = bytearray(b"........")
    call, other, result = placed(wire, buffer, chunk_bytes)
    assert buffer == b"here...."
    assert result.body.obj is buffer
    assert (bytes(result.body), bytes(call.body), bytes(other.body)) == (b"here", b"abc", b"def")


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_a_result_too_large_for_its_buffer_is_dropped_and_the_next_frame_is_read(chunk_bytes):
    wire = pack_header(Kind.RESULT, 1, 5, 9) + b"too large" + pack_header(Kind.RESULT, 1, 6, 2) + b"ok"
    buffer = bytearray(b"........")
    dropped, following = placed(wire, buffer, chunk_bytes)
    assert (dropped.id, dropped.dropped_bytes, len(dropped.body), buffer) == (5, 9, 0, b"........")
    assert (bytes(following.body), following.dropped_bytes) == (b"ok", 0)


@given(st.integers(0, 30))
def test_a_displaced_buffer_is_not_written_to_any_more(cut):
    wire = pack_header(Kind.RESULT, 1, 5, 8) + b"abcdefgh" + pack_header(Kind.RESULT, 1, 6, 2) + b"ok"
    buffer, assembler = bytearray(8), FrameAssembler(MAX)
    assembler.place(5, memoryview(buffer))
    frames = list(assembler.feed(wire[:cut]))
    assembler.displace(5)
    before = bytes(buffer)
    frames += assembler.feed(wire[cut:])
    assert buffer == before
    assert [frame.id for frame in frames] == [5, 6]
    assert bytes(frames[1].body) == b"ok"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UsageError("x"), UsageError),
        (NotFoundError("x"), NotFoundError),
        (Overloaded("x"), Overloaded),
        (CapacityError("x"), CapacityError),
        (QueueFull("x", retry_after_s=1), CapacityError),
        (DataError("x"), DataError),
        (CallTimeout("x"), CallTimeout),
        (Unreachable("x"), Unreachable),
        (BugError("x"), PeerError),
        (KvasirError("x"), PeerError),
    ],
)
def test_errors_travel_as_the_same_class(error, expected):
    decoded = decode_error(encode_error(error))
    assert type(decoded) is expected
    assert "x" in str(decoded)


@pytest.mark.parametrize("reason", list(RejectReason))
def test_a_refusal_keeps_its_reason(reason):
    decoded = decode_error(encode_error(Misbehaved(reason, "two\nlines")))
    assert isinstance(decoded, Misbehaved)
    assert decoded.reason is reason
    assert str(decoded) == "two\nlines"


def test_long_words_are_cut_between_characters():
    body = encode_error(UsageError("é" * 1000))
    assert len(body) <= 1 + ERROR_TEXT_BYTES_MAX
    assert str(decode_error(body)) == "é" * 250


@given(st.binary(max_size=40))
def test_any_body_is_an_error_or_misbehaviour(body):
    try:
        decoded = decode_error(body)
    except Misbehaved as error:
        decoded = error
    assert isinstance(decoded, KvasirError)
