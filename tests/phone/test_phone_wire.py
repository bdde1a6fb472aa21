"""The page's messages, held to the bytes that Python writes and reads."""

import random

import pytest
from phone_parts import PartError
from wire_samples import ADDRESS, MODEL, PART, SAMPLES

from kvasir_node.base.errors import CapacityError, DataError, Misbehaved, Overloaded, RejectReason, Unreachable
from kvasir_node.base.ids import SliceId, cid_of, cid_to_bytes
from kvasir_node.net.rpc_frames import encode_error
from kvasir_node.wire.blocks import Absent, encode_answer, encode_want
from kvasir_node.wire.columns import spell_slices
from kvasir_node.wire.messages import About, Attachment, Poll, Renewals

CAUGHT = {"Misbehaved", "DataError", "UsageError", "PairingRefused"}


def test_what_a_worker_sends_is_spelt_as_python_spells_it(parts):
    assert parts("poll", 1 << 31, [[MODEL, str(PART)]], [], [["carl", 0.25]]) == SAMPLES["poll"][1]
    assert Poll.from_bytes(bytes.fromhex(parts("poll", 7, [], [[MODEL, "3:0-7"], [MODEL, "2:1-1"]], []))).busy == (
        (MODEL, SliceId(2, 1, 1)),
        (MODEL, PART),
    )
    renewals = SAMPLES["renewals"][0]
    told = [
        {
            "lease": each.lease,
            "model": each.model,
            "slice": str(each.slice),
            "coordinator": each.coordinator,
            "serving": each.serving,
            "progress": each.progress,
        }
        for each in renewals.leases
    ]
    assert Renewals.from_bytes(bytes.fromhex(parts("renewals", told))) == renewals
    assert parts("attachment", MODEL, "bfloat16", [str(PART)]) == SAMPLES["attachment"][1]
    assert Attachment.from_bytes(bytes.fromhex(parts("attachment", MODEL, "float32", []))).slices == ()
    about = About.from_bytes(bytes.fromhex(parts("about", "ein Gerät", "1.0.0")))
    assert about == About("ein Gerät", "1.0.0", ("worker",), ())


def test_what_a_worker_reads_is_what_python_wrote(parts):
    offer = parts("readPollAnswer", SAMPLES["offer"][1])
    assert offer["addresses"] == [ADDRESS]
    assert (offer["lease"], offer["slice"], offer["ttlS"]) == ("18c.1", {"layer": 3, "first": 0, "last": 7}, 15)
    assert parts("readPollAnswer", SAMPLES["no offer"][1]) == {"retryAfterS": 2.5}
    assert [each["ttlS"] for each in parts("readVerdicts", SAMPLES["verdicts"][1])] == [15, 0]
    assert parts("readStanding", SAMPLES["standing"][1])["state"] == "proven"
    about = parts("readAbout", SAMPLES["about"][1])
    assert (about["roles"], about["grants"]) == (["hub", "worker"], [["hub", bytes(range(8)).hex()]])


@pytest.mark.parametrize(
    ("read", "sample"),
    [
        ("readPollAnswer", "offer"),
        ("readPollAnswer", "no offer"),
        ("readVerdicts", "verdicts"),
        ("readStanding", "standing"),
        ("readAbout", "about"),
    ],
)
def test_bytes_that_were_changed_are_read_or_refused_and_nothing_else(parts, read, sample):
    data, rng = bytes.fromhex(SAMPLES[sample][1]), random.Random(1)
    refused = []
    for _ in range(80):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            parts(read, changed[: rng.choice((len(data), len(data) - 1, len(data)))].hex())
        except PartError as error:
            refused.append(error.name)
    assert len(refused) > 15
    assert set(refused) <= CAUGHT


def test_names_of_content_and_lists_of_slices(parts):
    rng = random.Random(2)
    for _ in range(30):
        cid = cid_of(rng.randbytes(20))
        assert parts("cid", cid_to_bytes(cid).hex()) == [cid, cid_to_bytes(cid).hex()]
        firsts = sorted(rng.sample(range(40), rng.randrange(8)))
        slices = [SliceId(layer, 4 * first, 4 * first + 3) for layer in (0, 2, 900) for first in firsts]
        assert parts("columns", list(map(str, slices))) == spell_slices(slices).hex()
    with pytest.raises(PartError, match="a Cid must be"):
        parts("cid", bytes(36).hex())


def test_want_lists_and_their_answers(parts):
    cids = [cid_of(bytes([n])) for n in range(3)]
    assert parts("want", cids) == encode_want(cids).hex()
    answer = b"".join(encode_answer([b"abc", Absent.MISSING, Absent.NOT_NOW]))
    assert parts("readAnswer", answer.hex(), 3) == ["616263", "missing", "not now"]
    for wrong in (answer[:-1], answer + b"x", answer[:2], b"\xff\xff\xff\x7f"):
        with pytest.raises(PartError) as caught:
            parts("readAnswer", wrong.hex(), 3)
        assert caught.value.reason == "bad_message"


@pytest.mark.parametrize(
    "error",
    [
        Misbehaved(RejectReason.BAD_FRAME, "words\nmore"),
        Overloaded("full"),
        CapacityError("no room"),
        DataError("wrong"),
        Unreachable("gone"),
        Unreachable("ä" * 400),
    ],
)
def test_errors_survive_the_way_there_and_back(parts, error):
    assert parts("error", encode_error(error).hex()) == encode_error(error).hex()
