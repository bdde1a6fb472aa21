"""What fan-out costs while it is off: CPU time of the computing thread, against a dispatch that knows no workers."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest
import torch
from fanout_fakes import FakeCrew

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.decide.spot_checks import SpotChecks
from kvasir_node.model.bench_checkpoint import make_checkpoint
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.jobs import Job
from kvasir_node.model.trunk import LocalDispatch, load_trunk
from kvasir_node.roles.dispatch import FanoutDispatch
from kvasir_node.roles.library import demo_folder
from kvasir_node.roles.own_experts import OwnExperts


def token_ms(engine: Engine, number: int, tokens: int = 60) -> float:
    engine.join(Job(number, (5, 6, 7, 8), tokens, SamplingOptions(temperature=0.0), frozenset()))
    engine.step()
    started, steps = time.thread_time(), 0
    while not engine.is_idle:
        engine.step()
        steps += 1
    return (time.thread_time() - started) / steps * 1000


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_law_2_a_calm_stream_is_as_quick_as_without_fan_out(tmp_path):
    """On S, as the bar says; the demo's token takes a twelfth of that, so its share is shown and not held to it."""
    make_checkpoint("S", tmp_path / "S", demo_folder())
    demo, small = (
        cost_of(folder, dtype) for folder, dtype in ((demo_folder(), torch.float32), (tmp_path / "S", torch.bfloat16))
    )
    print(f"CPU time per token with fan-out off: demo x{demo:.3f}, S x{small:.3f}")
    assert small <= 1.02


def cost_of(folder: Path, dtype: torch.dtype) -> float:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(folder)
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, dtype)
    held = {layer: shard.held(layer) for layer in checkpoint.layers}
    own = OwnExperts(shard, checkpoint, held, 1 << 30)
    count = checkpoint.experts_per_layer
    fanout = FanoutDispatch(
        own,
        checkpoint.layers,
        count,
        dtype=dtype,
        crew=FakeCrew({}),
        spot_checks=SpotChecks(0.0, random.Random(1)),
        patience_s=2.0,
        body_bytes_max=1 << 25,
    )
    fanout.set_routes({}, {}, 32)
    engines = [
        Engine(load_trunk(folder, dtype, "cpu", dispatch), 1, 512, 256) for dispatch in (LocalDispatch(shard), fanout)
    ]
    times = [[token_ms(engine, number) for engine in engines] for number in range(20)]
    return statistics.median(fanout_ms / local_ms for local_ms, fanout_ms in times)
