"""Every decoder that reads bytes of strangers, under one shape: bytes in, nothing out, only KvasirErrors raised.

Used twice: by `test_hostile_bytes.py` (hypothesis, in CI) and by `fuzz_decoders.py` (atheris, by hand). A target that
accepts bytes also spells them again and compares, so that a decoder never reads two spellings as one thing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fuzz_file_targets import FILE_TARGETS, PARTS, file_seeds
from fuzz_peer_targets import PEER_TARGETS, peer_seeds

from kvasir_node.base.errors import KvasirError, Misbehaved
from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.pairing import PairRefusal
from kvasir_node.model import manifest as manifests
from kvasir_node.model.manifest import LayerNode, Manifest
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.tensor_file import expert_file, parse_expert_file, parse_json_object
from kvasir_node.model.worker_frames import WorkerFrames
from kvasir_node.net.muxer_frames import FrameReader
from kvasir_node.net.rpc_credits import Grant
from kvasir_node.net.rpc_frames import (
    FrameAssembler,
    Kind,
    decode_error,
    decode_grant,
    encode_grant,
    pack_header,
)
from kvasir_node.wire import messages
from kvasir_node.wire.blobs import BlobRef, decode_blob_node, encode_blob_node
from kvasir_node.wire.blocks import decode_answer, decode_want, encode_answer, encode_want
from kvasir_node.wire.envelope import open_record
from kvasir_node.wire.guest_pass import GuestPass, PairAsk, PairLink, read_pair_answer, refusal_bytes
from kvasir_node.wire.hub_proof import HubProofs, with_hub_proof
from kvasir_node.wire.lists import TableRow
from kvasir_node.wire.revocation import make_revocation, read_revocations, write_revocations
from kvasir_node.wire.swarm_keys import KEY_BYTES, NAME_BYTES, read_secret
from kvasir_node.wire.tensors import (
    Encoding,
    ExpertRequest,
    answer_parts,
    computed_s_of,
    read_answer,
    read_request,
    request_parts,
)
from kvasir_node.wire.ticket import Ticket, read_ticket, write_ticket

HIDDEN = 4
WORKER_FRAMES = WorkerFrames(HIDDEN, by_kernel=True)
BODY_BYTES_MAX = 1024

_expert = BlobRef(cid_of(b"expert"), len(expert_file(PARTS)) + 96)
_node = BlobRef(cid_of(b"trunk node", DAG_CBOR_CODEC), 3 << 20)
MANIFEST = Manifest(
    name="tiny",
    family="qwen3_moe",
    config=BlobRef(cid_of(b"config"), 100),
    maths=ExpertMaths().to_dict(),
    layer_nodes={0: cid_of(b"layer 0", DAG_CBOR_CODEC), 2: cid_of(b"layer 2", DAG_CBOR_CODEC)},
    experts_per_layer=2,
    chosen_per_row=1,
    hidden_size=4,
    expert_hidden_size=2,
    layer_parts={0: PARTS, 2: PARTS},
    files={"tokenizer.json": BlobRef(cid_of(b"tokenizer"), 9)},
    trunk=_node,
)
_MODEL = ModelId(MANIFEST.model)
_SLICE = SliceId(2, 0, 1)
_ADDRESS = "/ip4/192.0.2.1/tcp/9481"
_HUB = PeerId("12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd")
_KEYS = read_secret(bytes(range(32)))


def _manifest(data: bytes) -> None:
    assert manifests.encode_manifest(manifests.decode_manifest(data)) == data


def _layer_node(data: bytes) -> None:
    assert manifests.encode_layer_node(manifests.decode_layer_node(data, MANIFEST, 2)) == data


def _blob_node(data: bytes) -> None:
    node = decode_blob_node(data)
    assert encode_blob_node(node.size, node.blocks) == data


def _want(data: bytes) -> None:
    assert encode_want(decode_want(data)) == data


def _answer(data: bytes) -> None:
    assert b"".join(encode_answer(decode_answer(data, 3))) == data


def _expert_file(data: bytes) -> None:
    assert set(parse_expert_file(data, PARTS)) == set(PARTS)


def _json(data: bytes) -> None:
    parse_json_object(data, "config.json")


def _rpc_frames(data: bytes) -> None:
    assembler = FrameAssembler(BODY_BYTES_MAX)
    for at in range(0, len(data), 7):
        for frame in assembler.feed(data[at : at + 7]):
            assert len(frame.body) <= BODY_BYTES_MAX


def _rpc_error(data: bytes) -> None:
    assert isinstance(decode_error(data), KvasirError)


def _grant(data: bytes) -> None:
    assert encode_grant(decode_grant(data)) == data


def _muxer_frames(data: bytes) -> None:
    seen = sum(len(part.payload or b"") for part in FrameReader().feed(data))
    assert seen <= len(data)


def _request(data: bytes) -> None:
    body = memoryview(bytearray(data))
    refusal = _refusal(lambda: WORKER_FRAMES.read(body))
    assert refusal == _refusal(lambda: read_request(body, hidden_size=HIDDEN))
    request = read_request(body, hidden_size=HIDDEN)
    assert b"".join(request_parts(request, request.encoding)) == data
    by_kernel = WORKER_FRAMES.read(body)
    assert torch.equal(by_kernel.rows.to(request.rows.dtype), request.rows)
    assert by_kernel.pair_row.tolist() == request.pair_row.tolist()
    assert by_kernel.pair_expert.tolist() == request.pair_expert.tolist()


def _refusal(read: Callable[[], object]) -> str | None:
    """In which words; None when it was taken."""
    try:
        read()
    except Misbehaved as error:
        return str(error)
    return None


def _sums(encoding: Encoding) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        body = memoryview(bytearray(data))
        assert 0 <= computed_s_of(body) < 4295
        sums = read_answer(body, rows=2, hidden_size=HIDDEN, dtype=encoding)
        spelt = b"".join(answer_parts(sums, encoding))
        assert (spelt[:12], spelt[16:]) == (data[:12], data[16:])  # between them: microseconds

    return target


def _ticket(data: bytes) -> None:
    read_ticket(data.decode("utf-8", "replace"))


def _hub_proof(data: bytes) -> None:
    """Only what was proven is opened, whatever else stands around it."""
    assert HubProofs(lambda: (_KEYS,)).open(_HUB, data) == b"a record"


def _revocations(data: bytes) -> None:
    found = read_revocations(data)
    assert read_revocations(write_revocations(found)) == found


def _pair_link(data: bytes) -> None:
    PairLink.from_text(data.decode("utf-8", "replace"))


def _pair_answer(data: bytes) -> None:
    answer = read_pair_answer(data)
    again = answer.to_bytes() if isinstance(answer, GuestPass) else refusal_bytes(answer)
    assert read_pair_answer(again) == answer


def _record(data: bytes) -> None:
    open_record("demand", data, body_bytes_max=4096)


def _message(read: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    """A number may come as 0 or 0.0, so here the values are compared, not the bytes."""

    def target(data: bytes) -> None:
        message = read(data)
        assert read(message.to_bytes()) == message

    return target


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": _manifest,
    "layer node": _layer_node,
    "blob node": _blob_node,
    "want-list": _want,
    "block answer": _answer,
    "expert file": _expert_file,
    "json": _json,
    "rpc frames": _rpc_frames,
    "rpc error": _rpc_error,
    "grant": _grant,
    "muxer frames": _muxer_frames,
    "expert request": _request,
    "expert answer": _sums(Encoding.FLOAT32),
    "expert answer, int8": _sums(Encoding.INT8),
    "ticket": _ticket,
    "signed record": _record,
    "demand": _message(messages.DemandRecord.from_bytes),
    "table": _message(messages.DemandTable.from_bytes),
    "poll": _message(messages.Poll.from_bytes),
    "poll answer": _message(messages.read_poll_answer),
    "renewals": _message(messages.Renewals.from_bytes),
    "verdicts": _message(messages.Verdicts.from_bytes),
    "hub news": _message(messages.HubNews.from_bytes),
    "hub greeting": _message(messages.HubGreeting.from_bytes),
    "hub proof": _hub_proof,
    "revocations": _revocations,
    "pair link": _pair_link,
    "pair ask": _message(PairAsk.from_bytes),
    "pair answer": _pair_answer,
    "attachment": _message(messages.Attachment.from_bytes),
    "standing": _message(messages.Standing.from_bytes),
    "about": _message(messages.About.from_bytes),
    **FILE_TARGETS,
    **PEER_TARGETS,
}


def hold(name: str, data: bytes) -> bool:
    """Gives bytes to a target; whether they were accepted. Any exception but a KvasirError is a finding."""
    try:
        TARGETS[name](data)
    except KvasirError:
        return False
    return True


def seeds() -> dict[str, list[bytes]]:
    """At least one accepted input per target, for mutation."""
    wanted = (Wanted(_SLICE, 2, (PeerId("ann"),)),)
    demand = messages.DemandRecord(17, 7, 1.7e9, 30.0, _MODEL, "demo", "float32", 1 << 24, (_ADDRESS,), 4, 4, 9, wanted)
    lease = messages.Renewal("1.1", _MODEL, _SLICE, PeerId("carl"), serving=True, progress=4)
    row = TableRow(_MODEL, _SLICE, want=2, proven=1, leased=1)
    floats = torch.arange(8, dtype=torch.float32).view(2, HIDDEN)
    pair = torch.tensor([0, 1], dtype=torch.int32)
    request = ExpertRequest(3, floats, pair, pair, torch.ones(2))
    layer = LayerNode(2, (_expert, _expert))
    call = pack_header(Kind.CALL, 1, 5, 3) + b"abc" + pack_header(Kind.CANCEL, 0, 5, 0)
    return {
        "manifest": [manifests.encode_manifest(MANIFEST)],
        "layer node": [manifests.encode_layer_node(layer)],
        "blob node": [encode_blob_node(3 << 20, [cid_of(bytes((n,))) for n in range(3)])],
        "want-list": [encode_want([cid_of(bytes((n,))) for n in range(3)])],
        "block answer": [struct.pack("<I", 2) + b"ab" + b"\xff\xff\xff\xff" + b"\xfe\xff\xff\xff"],
        "expert file": [expert_file(PARTS) + bytes(96)],
        "json": [b'{"model_type": "qwen3_moe", "a": [1, 2.5, null, {"b": true}]}'],
        "rpc frames": [call],
        "grant": [encode_grant(Grant(8, 1 << 26))],
        "rpc error": [b"\x07bad_message\nwords", b"\x04busy"],
        "muxer frames": [struct.pack("!BBHII", 0, 0, 1, 1, 4) + b"data" + struct.pack("!BBHII", 0, 2, 1, 0, 9)],
        "expert request": [b"".join(request_parts(request, encoding)) for encoding in Encoding],
        "expert answer": [b"".join(answer_parts(floats))],
        "expert answer, int8": [b"".join(answer_parts(floats, Encoding.INT8))],
        "ticket": [write_ticket(Ticket(bytes(32), (f"{_ADDRESS}/p2p/12D3KooW",))).encode()],
        "signed record": [demand.to_bytes()],
        "demand": [demand.to_bytes()],
        "table": [messages.DemandTable(17, 9, 1.7e9, 30.0, (_ADDRESS,), (row,)).to_bytes()],
        "poll": [messages.Poll(1 << 31, ((_MODEL, _SLICE),), ()).to_bytes()],
        "poll answer": [
            messages.NoOffer(2.5).to_bytes(),
            messages.Offer("1.1", _MODEL, "float32", _SLICE, PeerId("carl"), (_ADDRESS,), 15.0).to_bytes(),
        ],
        "renewals": [messages.Renewals((lease, replace(lease, lease="1.2"))).to_bytes()],
        "hub news": [messages.HubNews(17, True, ((PeerId("carl"), _MODEL, _SLICE, 1),)).to_bytes()],
        "hub greeting": [messages.HubGreeting(17).to_bytes()],
        "hub proof": [with_hub_proof((_KEYS,), _HUB, b"a record")],
        "revocations": [write_revocations([make_revocation(_KEYS, _HUB, 17, is_revoked=True)])],
        "pair link": [PairLink(bytes(16), PeerId("12D3KooW"), (f"{_ADDRESS}/ws",)).to_text().encode()],
        "pair ask": [PairAsk(bytes(16), "a telephone").to_bytes()],
        "pair answer": [
            GuestPass(bytes(NAME_BYTES), *(bytes(KEY_BYTES),) * 3, (f"{_ADDRESS}/p2p/12D3KooW",)).to_bytes(),
            refusal_bytes(PairRefusal.WRONG),
        ],
        "verdicts": [messages.Verdicts((messages.LeaseVerdict(15.0, ""),)).to_bytes()],
        "attachment": [messages.Attachment(_MODEL, "bfloat16", (_SLICE,)).to_bytes()],
        "standing": [messages.Standing(_SLICE, "proven").to_bytes()],
        "about": [messages.About("name", "0.1.0", ("hub",), (_ADDRESS,)).to_bytes()],
        **file_seeds(),
        **peer_seeds(),
    }
