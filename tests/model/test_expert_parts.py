"""Which parts make up an expert, and that every way to store one gives the same matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import DataError
from kvasir_node.model.expert_parts import ExpertWeights, check_parts, decode, in_order
from kvasir_node.model.maths import ExpertMaths

D, INNER = 8, 6
CPU = torch.device("cpu")


def matrices(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (INNER, D), "up": (INNER, D), "down": (D, INNER)}
    shapes |= {"gate_bias": (INNER,), "up_bias": (INNER,), "down_bias": (D,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stored(maths: ExpertMaths, *, joined: bool) -> dict[str, torch.Tensor]:
    """The same expert as a checkpoint of these maths would have it."""
    plain = {name: tensor for name, tensor in matrices().items() if maths.bias or not name.endswith("_bias")}
    if joined:
        for end in ("", "_bias") if maths.bias else ("",):
            gate, up = plain.pop("gate" + end), plain.pop("up" + end)
            pair = torch.stack((gate, up), dim=1).flatten(0, 1) if maths.interleaved else torch.cat((gate, up))
            plain["gate_up" + end] = pair
    return {
        name: tensor.t().contiguous() if maths.transposed and tensor.dim() == 2 else tensor
        for name, tensor in plain.items()
    }


def decoded(maths: ExpertMaths, parts: dict[str, torch.Tensor]) -> ExpertWeights:
    return decode(maths, parts, D, INNER, torch.float32, torch.float32, CPU)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_every_layout_gives_the_same_matrices(bias, transposed, interleaved, joined):
    maths = ExpertMaths(bias=bias, transposed=transposed, interleaved=interleaved)
    weights, plain = decoded(maths, stored(maths, joined=joined)), matrices()
    assert torch.equal(weights.up, torch.cat((plain["gate"], plain["up"])))
    assert torch.equal(weights.down, plain["down"])
    assert weights.up.is_contiguous()
    assert weights.down.is_contiguous()
    if bias:
        assert weights.up_bias is not None
        assert torch.equal(weights.up_bias, torch.cat((plain["gate_bias"], plain["up_bias"])))
    assert (weights.down_bias is None) == (not bias)


def test_what_was_given_may_be_reused_at_once():
    maths = ExpertMaths(bias=True)
    parts = stored(maths, joined=True)
    weights = decoded(maths, parts)
    for tensor in parts.values():
        tensor.fill_(float("nan"))
    for tensor in (weights.up, weights.down, weights.up_bias, weights.down_bias):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_the_order_of_parts_is_fixed():
    names = ["down_bias", "down", "up", "gate_scale", "gate_up", "gate", "gate_up_blocks"]
    assert in_order(names) == ["gate", "gate_scale", "up", "gate_up", "gate_up_blocks", "down", "down_bias"]
    with pytest.raises(DataError, match="'gate_other' is not a part"):
        in_order(["gate", "gate_other"])


GOOD = {"gate": ("F32", (6, 8), 192), "up": ("F32", (6, 8), 192), "down": ("F32", (8, 6), 192)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gate": None}, "no gate matrix"),
        ({"gate": None, "up": None}, "no gate matrix|no gate_up matrix"),
        ({"gate_up": ("F32", (12, 8), 384)}, "a gate_up matrix, which it should not have"),
        ({"gate": ("F32", (8, 6), 192)}, r"gate has the shape \[8, 6\], expected \[6, 8\]"),
        ({"gate": ("I8", (6, 8), 48)}, "gate is I8; supported"),
        ({"gate": ("F32", (6, 8), 191)}, "cannot have 191 bytes"),
        ({"gate_bias": ("F32", (6,), 24)}, "gate has a bias, expected none"),
        ({"gate_scale": ("F32", (1, 1), 4)}, "gate, gate_scale, which cannot be decoded"),
        ({"gate": None, "gate_blocks": ("U8", (6, 0, 16), 0), "gate_scales": ("U8", (6, 0), 0)}, "cannot be decoded"),
        ({"gate": None, "gate_blocks": ("U8", (6, 1, 16), 96)}, "gate_blocks, which cannot be decoded"),
        ({"gate": None, "gate_q8_0": ("U8", (6, 34), 204)}, "gate_q8_0, which cannot be decoded"),
        ({"gate_q8_0": ("U8", (6, 34), 204)}, "gate, gate_q8_0, which cannot be decoded"),
    ],
)
def test_other_parts_are_refused_by_name(changes, reason):
    parts = {name: spec for name, spec in (GOOD | changes).items() if spec is not None}
    with pytest.raises(DataError, match=reason):
        check_parts(ExpertMaths(), parts, D, INNER)


def test_an_expert_without_a_gate_has_no_place_for_one():
    maths = ExpertMaths(gate="none")
    check_parts(maths, {"up": GOOD["up"], "down": GOOD["down"]}, D, INNER)
    with pytest.raises(DataError, match="a gate matrix, which it should not have"):
        check_parts(maths, GOOD, D, INNER)
