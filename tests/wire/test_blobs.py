import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import DAG_CBOR_CODEC, cid_of, cid_to_bytes
from kvasir_node.wire.blobs import BLOB_BLOCKS_MAX, BlobNode, decode_blob_node, encode_blob_node, is_node
from kvasir_node.wire.blocks import BLOCK_BYTES_MAX

A, B = cid_of(b"a"), cid_of(b"b")
GOLDEN = (
    bytes.fromhex(
        "a461760164"
        + b"kind".hex()
        + "64"
        + b"blob".hex()
        + "64"
        + b"size".hex()
        + "1a00100001"
        + "66"
        + b"blocks".hex()
    )
    + bytes.fromhex("825824")
    + cid_to_bytes(A)
    + bytes.fromhex("5824")
    + cid_to_bytes(B)
)
FIELDS = {"v": 1, "kind": "blob", "size": 2, "blocks": [cid_to_bytes(A), cid_to_bytes(B)]}


def test_golden_vector():
    assert encode_blob_node(BLOCK_BYTES_MAX + 1, (A, B)) == GOLDEN
    assert decode_blob_node(GOLDEN) == BlobNode(BLOCK_BYTES_MAX + 1, (A, B))


def test_the_largest_node_fits_a_block_and_a_larger_one_is_refused():
    node = encode_blob_node(BLOB_BLOCKS_MAX * BLOCK_BYTES_MAX, (A,) * BLOB_BLOCKS_MAX)
    assert len(node) <= BLOCK_BYTES_MAX
    assert len(decode_blob_node(node).blocks) == BLOB_BLOCKS_MAX
    with pytest.raises(DataError, match="at most 25000"):
        encode_blob_node(1, (A,) * (BLOB_BLOCKS_MAX + 1))


def test_the_codec_tells_a_node_from_a_block():
    assert is_node(cid_of(GOLDEN, DAG_CBOR_CODEC))
    assert not is_node(A)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"v": 2}, "blob node.v"),
        ({"kind": "layer"}, "blob node.kind"),
        ({"size": 0}, "blob node.size"),
        ({"size": 1}, "blob node.size"),
        ({"size": 2 * BLOCK_BYTES_MAX + 1}, "blob node.size"),
        ({"size": 1 << 63}, "blob node.size"),
        ({"size": 2.0}, "blob node.size"),
        ({"blocks": []}, "blob node.size"),
        ({"blocks": [b"x"]}, "Cid"),
        ({"blocks": ["x"]}, "Cid"),
        ({"blocks": [cid_to_bytes(cid_of(b"n", DAG_CBOR_CODEC))] * 2}, "blob node.blocks"),
        ({"blocks": 7}, "blob node.blocks"),
        ({"more": 1}, "unknown fields"),
    ],
)
def test_hostile_nodes_are_refused_by_field(change, named):
    with pytest.raises(DataError, match=named):
        decode_blob_node(cbor2.dumps({**FIELDS, **change}, canonical=True))


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_named(name):
    fields = {key: value for key, value in FIELDS.items() if key != name}
    with pytest.raises(DataError, match=f"blob node.{name} is missing"):
        decode_blob_node(cbor2.dumps(fields, canonical=True))


@pytest.mark.parametrize("at", range(len(GOLDEN)))
def test_a_flipped_byte_is_refused_or_another_node(at):
    data = bytearray(GOLDEN)
    data[at] ^= 0x11
    try:
        node = decode_blob_node(data)
    except DataError:
        return
    assert encode_blob_node(node.size, node.blocks) == data


@given(st.binary(max_size=300))
def test_random_bytes_end_in_data_error(data):
    with pytest.raises(DataError):
        decode_blob_node(data)
