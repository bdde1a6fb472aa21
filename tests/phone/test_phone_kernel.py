"""The page's experts, held to Python's: the same frames in, the same sums out."""

from __future__ import annotations

import shutil
import subprocess
from itertools import product

import pytest
import torch
from phone_parts import PartError

from kvasir_node.base.ids import DAG_CBOR_CODEC, RAW_CODEC, ExpertId, cid_of
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.manifest import LayerNode, Manifest, encode_layer_node, encode_manifest
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.tensor_file import DTYPES, expert_file, expert_file_bytes, parse_expert_file
from kvasir_node.roles.comparing import agrees
from kvasir_node.wire.blobs import BlobRef
from kvasir_node.wire.tensors import Encoding, ExpertRequest, read_answer, read_request, request_parts

WIDTH, INNER, EXPERTS = 32, 24, 4
KERNELS = ("experts.wasm", "experts-relaxed.wasm")
MEMORY_BYTES = 8 << 20


def parts_of(maths, dtype, joined, inner=INNER):
    def shape(rows, columns):
        return (columns, rows) if maths.transposed else (rows, columns)

    ups = {"gate_up": 2 * inner} if joined else {"gate": inner, "up": inner} if maths.gate != "none" else {"up": inner}
    found = {}
    for name, rows in (*ups.items(), ("down", WIDTH)):
        found[name] = shape(rows, inner if name == "down" else WIDTH)
        if maths.bias:
            found[f"{name}_bias"] = (rows,)
    size = DTYPES[dtype].itemsize
    return {name: (dtype, shape, torch.Size(shape).numel() * size) for name, shape in found.items()}


def manifest_of(maths, parts, experts=EXPERTS, width=WIDTH, inner=INNER):
    node = cid_of(b"node", DAG_CBOR_CODEC)
    blob = BlobRef(cid_of(b"", RAW_CODEC), 0)
    chosen = {"experts_per_layer": experts, "chosen_per_row": 2, "hidden_size": width, "expert_hidden_size": inner}
    return Manifest(
        name="tiny", family="tiny", config=blob, maths=maths.to_dict(), layer_nodes={3: node},
        layer_parts={3: parts}, files={}, trunk=blob, **chosen,
    )  # fmt: skip


def file_of(parts, generator):
    tensors = (torch.randn(shape, generator=generator).mul(0.2).to(DTYPES[dtype]) for dtype, shape, _ in parts.values())
    return expert_file(parts) + b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)


def request_of(rows, encoding, generator, experts=EXPERTS):
    values = torch.randn(rows, WIDTH, generator=generator).to(
        torch.bfloat16 if encoding is Encoding.BFLOAT16 else torch.float32
    )
    pair_row = torch.arange(rows, dtype=torch.int32).repeat_interleave(2)
    pair_expert = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(rows)]).reshape(-1)
    weights = torch.rand(2 * rows, generator=generator)
    request = ExpertRequest(3, values, pair_row, pair_expert.to(torch.int32), weights, encoding)
    return b"".join(request_parts(request, encoding))


class Held:
    """The same experts in both: of one model, with its kernel."""

    def __init__(self, parts, phone, maths, dtype, *, joined=False, kernel=KERNELS[0], seed=0) -> None:
        self.parts, self.maths = parts, maths
        specs = parts_of(maths, dtype, joined)
        generator = torch.Generator().manual_seed(seed)
        parts("kernel", str(phone / "kernel" / kernel), MEMORY_BYTES)
        parts("manifest", encode_manifest(manifest_of(maths, specs)).hex())
        self.shard = ExpertShard(maths, WIDTH, INNER)
        for index in range(EXPERTS):
            file = file_of(specs, generator)
            parts("load", 3, index, file.hex())
            self.shard.add(ExpertId(3, index), parse_expert_file(file, specs))

    def sums(self, frame, rows, encoding):
        answer = bytearray.fromhex(self.parts("compute", frame.hex()))
        return read_answer(memoryview(answer), rows=rows, hidden_size=WIDTH, dtype=encoding).to(torch.float32)

    def own(self, frame):
        request = read_request(memoryview(bytearray(frame)), hidden_size=WIDTH)
        pairs = (request.pair_row.long(), request.pair_expert.long(), request.pair_weight)
        return self.shard.compute_naive(3, request.rows.to(torch.float32), *pairs)


def maths_of_all_kinds():
    for dtype in ("F32", "BF16", "F16"):
        yield ExpertMaths(), dtype == "F16", dtype
        odd = ExpertMaths(gate="gptoss", limit=0.5, alpha=1.7, bias=True, transposed=True, interleaved=True)
        yield odd, True, dtype
    for activation in ("gelu", "gelu_tanh", "relu", "relu2"):
        yield ExpertMaths(activation=activation), False, "BF16"
    yield ExpertMaths(gate="clamped", limit=0.5), False, "BF16"
    yield ExpertMaths(gate="none", activation="gelu_tanh", bias=True), False, "F32"
    yield ExpertMaths(interleaved=True), True, "BF16"


@pytest.mark.parametrize(("maths", "joined", "dtype"), maths_of_all_kinds())
def test_every_kind_of_expert_gives_what_python_computes(parts, phone_packages, maths, joined, dtype):
    held = Held(parts, phone_packages, maths, dtype, joined=joined)
    for rows in (1, 7):
        frame = request_of(rows, Encoding.FLOAT32, torch.Generator().manual_seed(rows))
        sums, own = held.sums(frame, rows, Encoding.FLOAT32), held.own(frame)
        assert agrees(sums, own, Encoding.FLOAT32)
        assert (sums - own).abs().max() <= 3e-6 * own.abs().max()


@pytest.mark.parametrize(("kernel", "encoding"), product(KERNELS, Encoding))
def test_frames_of_every_encoding_and_size(parts, phone_packages, kernel, encoding):
    try:
        held = Held(parts, phone_packages, ExpertMaths(), "BF16", kernel=kernel)
    except PartError as error:
        if "relaxed" in kernel and "WebAssembly" in str(error):
            pytest.skip("this Node.js knows no relaxed SIMD")
        raise
    for rows in (1, 2, 3, 5, 16, 70):
        frame = request_of(rows, encoding, torch.Generator().manual_seed(rows))
        assert agrees(held.sums(frame, rows, encoding), held.own(frame), encoding)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_experts_of_a_coordinator_that_computes_in_int8(parts, phone_packages, dtype):
    maths, generator = ExpertMaths(), torch.Generator().manual_seed(0)
    specs = parts_of(maths, dtype, joined=False, inner=32)
    parts("kernel", str(phone_packages / "kernel" / KERNELS[0]), MEMORY_BYTES)
    parts("manifest", encode_manifest(manifest_of(maths, specs, inner=32)).hex())
    shard = ExpertShard(maths, WIDTH, 32, stored=torch.int8)
    for index in range(EXPERTS):
        file = file_of(specs, generator)
        parts("load", 3, index, file.hex(), True)
        shard.add(ExpertId(3, index), parse_expert_file(file, specs))
    frame = request_of(9, Encoding.FLOAT32, generator)
    request = read_request(memoryview(bytearray(frame)), hidden_size=WIDTH)
    own = shard.compute(3, request.rows, request.pair_row.long(), request.pair_expert.long(), request.pair_weight)
    answer = bytearray.fromhex(parts("compute", frame.hex()))
    sums = read_answer(memoryview(answer), rows=9, hidden_size=WIDTH, dtype=Encoding.FLOAT32)
    assert (sums - own).abs().max() <= 3e-6 * own.abs().max()


def test_answers_are_spelt_bit_for_bit_as_python_spells_them(parts, phone_packages):
    held = Held(parts, phone_packages, ExpertMaths(), "F32")
    for encoding in (Encoding.BFLOAT16, Encoding.INT8):
        frame = request_of(5, encoding, torch.Generator().manual_seed(1))
        exact = request_of(5, Encoding.FLOAT32, torch.Generator().manual_seed(1))
        answer = bytearray.fromhex(parts("compute", frame.hex()))
        again = read_answer(memoryview(answer), rows=5, hidden_size=WIDTH, dtype=encoding)  # refuses other spellings
        assert torch.isfinite(again).all()
        assert len(held.sums(exact, 5, Encoding.FLOAT32)) == 5


def test_bad_frames_are_refused_as_a_coordinators_fault(parts, phone_packages):
    Held(parts, phone_packages, ExpertMaths(), "BF16")
    frame = request_of(3, Encoding.FLOAT32, torch.Generator().manual_seed(0))

    def changed(at, value):
        return frame[:at] + value + frame[at + len(value) :]

    nan, far = b"\x00\x00\xc0\x7f", (9).to_bytes(4, "little")
    wrong = [
        b"", frame[:19], frame[:-1], frame + b"\0", changed(0, b"\0\0"), changed(2, b"\x04"), changed(3, b"\1"),
        changed(8, bytes(4)), changed(12, b"\xff\xff\xff\xff"), changed(16, b"\x08\0\0\0"), changed(20, nan),
        changed(20 + 24, far), changed(len(frame) - 4, nan),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(PartError) as caught:
            parts("compute", each.hex())
        assert caught.value.reason == "bad_frame", each[:20]
    for level in (b"\x80", b"\x01"):  # -128 does not exist; a row whose largest level is not ±127 is no row
        frame = bytearray(request_of(1, Encoding.INT8, torch.Generator().manual_seed(0)))
        frame[-WIDTH:] = level * WIDTH
        with pytest.raises(PartError) as caught:
            parts("compute", frame.hex())
        assert caught.value.reason == "bad_frame"


def test_experts_that_are_not_held_are_no_fault(parts, phone_packages):
    Held(parts, phone_packages, ExpertMaths(), "BF16")
    frame = request_of(3, Encoding.FLOAT32, torch.Generator().manual_seed(0))
    for index in range(EXPERTS):
        parts("drop", 3, index)
    with pytest.raises(PartError) as caught:
        parts("compute", frame.hex())
    assert caught.value.name == "Overloaded"


def test_memory_is_given_back_and_bounded(parts, phone_packages):
    maths = ExpertMaths()
    specs = parts_of(maths, "BF16", joined=False)
    file = file_of(specs, torch.Generator().manual_seed(0)).hex()
    parts("kernel", str(phone_packages / "kernel" / KERNELS[0]), 1 << 20)
    parts("manifest", encode_manifest(manifest_of(maths, specs, experts=999)).hex())
    sizes = set()
    for _ in range(4):
        for index in range(40):
            sizes.add(parts("load", 3, index, file))
        for index in range(40):
            parts("drop", 3, index)
    assert max(sizes) <= 1 << 20
    fitting = int(0.7 * (1 << 20) / expert_file_bytes(specs))
    for index in range(fitting):
        parts("load", 3, index, file)
    with pytest.raises(PartError) as caught:
        [parts("load", 3, index, file) for index in range(fitting, 999)]
    assert caught.value.name == "CapacityError"


def test_room_grows_together_again(parts):
    acts = [["take", 100_000]] * 4 + [
        ["give", 1],
        ["give", 3],
        ["give", 2],
        ["take", 300_000],
        ["give", 0],
        ["give", 4],
    ]
    told = parts("arena", acts, 1 << 20)
    assert told[7] == told[1]  # the three holes were one
    assert told[-1] == told[4]  # and the memory did not grow for it
    with pytest.raises(PartError, match="bytes of memory"):
        parts("arena", [["take", 2 << 20]], 1 << 20)


def test_a_manifest_that_cannot_be_computed_is_refused_by_name(parts):
    plain = parts_of(ExpertMaths(), "BF16", joined=False)
    odd = {"gate": ("F8_E4M3", (INNER, WIDTH), INNER * WIDTH), **{k: v for k, v in plain.items() if k != "gate"}}
    scaled = ExpertMaths(scale_rows=16, scale_columns=16)
    manifest = manifest_of(ExpertMaths(), plain)
    assert parts("manifest", encode_manifest(manifest).hex())["bytes"] == [manifest.expert_bytes(3)]
    for maths, specs, words in ((ExpertMaths(), odd, "F8_E4M3"), (scaled, plain, "fp8")):
        with pytest.raises(PartError, match=words) as caught:
            parts("manifest", encode_manifest(manifest_of(maths, specs)).hex())
        assert caught.value.name == "DataError"
    node = LayerNode(3, tuple(BlobRef(cid_of(bytes([n])), manifest.expert_bytes(3)) for n in range(EXPERTS)))
    parts("manifest", encode_manifest(manifest).hex())
    assert len(parts("layerNode", encode_layer_node(node).hex(), 3)) == EXPERTS
    with pytest.raises(PartError, match="layer"):
        parts("layerNode", encode_layer_node(LayerNode(4, node.experts)).hex(), 3)


def test_the_built_kernels_are_what_their_source_gives(phone_packages, tmp_path):
    if shutil.which("clang-16") is None or shutil.which("wasm-ld-16") is None:
        pytest.skip("clang-16 and lld-16 are not installed")
    subprocess.run(["node", phone_packages / "kernel" / "build.mjs", tmp_path], check=True, timeout=60)
    for kernel in (*KERNELS, "cipher.wasm"):
        assert (tmp_path / kernel).read_bytes() == (phone_packages / "kernel" / kernel).read_bytes()
        assert (tmp_path / kernel).stat().st_size <= 10 * 1024
