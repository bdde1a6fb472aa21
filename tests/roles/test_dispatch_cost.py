"""What fan-out costs while it is off: CPU time of the computing thread, against a dispatch that knows no workers."""

from __future__ import annotations

import random
import statistics
import time

import pytest
import torch
from fanout_fakes import FakeCrew

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.decide.spot_checks import SpotChecks
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
def test_law_2_a_calm_stream_is_as_quick_as_without_fan_out():
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(demo_folder())
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32)
    held = {layer: shard.held(layer) for layer in checkpoint.layers}
    own = OwnExperts(shard, checkpoint, held, 1 << 30)
    count = checkpoint.experts_per_layer
    fanout = FanoutDispatch(
        own,
        checkpoint.layers,
        count,
        dtype=torch.float32,
        crew=FakeCrew({}),
        spot_checks=SpotChecks(0.0, random.Random(1)),
        patience_s=2.0,
        body_bytes_max=1 << 25,
    )
    fanout.set_routes({}, {}, 32)
    engines = [
        Engine(load_trunk(demo_folder(), torch.float32, "cpu", dispatch), 1, 512, 256)
        for dispatch in (LocalDispatch(shard), fanout)
    ]
    times = [[token_ms(engine, number) for engine in engines] for number in range(20)]
    ratio = statistics.median(fanout_ms / local_ms for local_ms, fanout_ms in times)
    print(f"CPU time per token with fan-out off: x{ratio:.3f}")
    assert ratio <= 1.02
