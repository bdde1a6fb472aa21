"""How far honest machines differ on real rows of the demo model, against what is called a wrong answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, silu

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.jobs import Job
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.model.text import TextModel
from kvasir_node.model.trunk import LocalDispatch, load_trunk
from kvasir_node.roles.comparing import TOLERANCES, agrees, pick_pairs
from kvasir_node.roles.library import demo_folder
from kvasir_node.wire.tensors import Encoding, ExpertRequest, answer_parts, read_answer, through_wire

PROMPT = "Once upon a time there was a little girl who lived in a house near the wood. One day she saw a red bird. " * 4


class Recorder(LocalDispatch):
    """Remembers the rows of all layers."""

    def __init__(self, shard) -> None:
        super().__init__(shard)
        self.seen: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer, rows, chosen, weights) -> torch.Tensor:
        self.seen.append((layer, rows.clone(), chosen.clone(), weights.clone()))
        return super().__call__(layer, rows, chosen, weights)


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(demo_folder())


def requests_of(checkpoint, dtype) -> list[ExpertRequest]:
    """The calls of a prompt and of 64 tokens after it, each with half of the experts, as a worker would get them."""
    recorder = Recorder(load_from_checkpoint(checkpoint, checkpoint.experts, dtype))
    engine = Engine(load_trunk(checkpoint.path, dtype, "cpu", recorder), 1, 512, 256)
    prompt = tuple(TextModel(checkpoint.path).encode(PROMPT))
    engine.join(Job(1, prompt, 64, SamplingOptions(temperature=0.0), frozenset(), ignore_end=True))
    while not engine.is_idle:
        engine.step()
    found = []
    for layer, rows, chosen, weights in recorder.seen:
        for half in (0, 1):
            mask = chosen % 2 == half
            if bool(mask.any()):
                found.append(pick_pairs(layer, rows.to(dtype), chosen, weights, mask)[0])
    return found


def by_shard(shard):
    def compute(request: ExpertRequest) -> torch.Tensor:
        return shard.compute(
            request.layer, request.rows, request.pair_row.long(), request.pair_expert.long(), request.pair_weight
        )

    return compute


def by_torch(checkpoint, dtype):
    """Another machine's way: one matrix product after the other, each result rounded to `dtype`, on one pair a time."""
    weights = {
        expert: {name: read_tensor(part).to(dtype) for name, part in parts.items()}
        for expert, parts in checkpoint.experts.items()
    }
    by_place = {(expert.layer, expert.index): parts for expert, parts in weights.items()}

    def compute(request: ExpertRequest) -> torch.Tensor:
        sums = torch.zeros(request.rows.shape, dtype=dtype)
        for row, index, weight in zip(
            request.pair_row.tolist(), request.pair_expert.tolist(), request.pair_weight, strict=True
        ):
            parts, x = by_place[request.layer, index], request.rows[row].to(dtype)
            inner = silu(linear(x, parts["gate"])) * linear(x, parts["up"])
            sums[row] += (weight * linear(inner, parts["down"])).to(dtype)
        return sums.to(torch.float32)

    return compute


def difference(sums: torch.Tensor, own: torch.Tensor) -> float:
    """The largest of any row, as a share of the row's largest value."""
    return float(((sums - own).abs().amax(1) / own.abs().amax(1).clamp_min(1e-6)).max())


CASES = [
    (torch.float32, Encoding.FLOAT32),
    (torch.bfloat16, Encoding.BFLOAT16),
    (torch.float32, Encoding.BFLOAT16),
    (torch.float32, Encoding.INT8),
    (torch.bfloat16, Encoding.INT8),
]


@pytest.mark.parametrize(("dtype", "encoding"), CASES)
def test_law_8_no_honest_machine_is_near_the_tolerance(checkpoint, dtype, encoding):
    own = by_shard(load_from_checkpoint(checkpoint, checkpoint.experts, dtype))
    others = {
        "kernel, stored bfloat16": by_shard(
            load_from_checkpoint(checkpoint, checkpoint.experts, dtype, stored=torch.bfloat16)
        ),
        "kernel, stored as computed": by_shard(
            load_from_checkpoint(checkpoint, checkpoint.experts, dtype, stored=dtype)
        ),
        "torch, rounded at each step": by_torch(checkpoint, dtype),
    }
    worst = dict.fromkeys(others, 0.0)
    requests = [replace(r, rows=through_wire(r.rows, encoding)) for r in requests_of(checkpoint, dtype)]
    rows = sum(request.rows.shape[0] for request in requests)
    for request in requests:
        mine = own(request).to(torch.float32)
        for name, compute in others.items():
            frame = memoryview(bytearray(b"".join(answer_parts(compute(request), encoding))))
            count, size = request.rows.shape
            sums = read_answer(frame, rows=count, hidden_size=size, dtype=encoding).to(torch.float32)
            assert agrees(sums, mine, encoding), name
            worst[name] = max(worst[name], difference(sums, mine))
    print(
        f"{dtype} as {encoding.name.lower()}, {rows} rows: "
        + ", ".join(f"{name} {value:.2e}" for name, value in worst.items())
    )
    assert rows > 1500
    assert max(worst.values()) < TOLERANCES[encoding] / 2
