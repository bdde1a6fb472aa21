"""Loading without experts: nothing missing goes unnoticed, nothing superfluous is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from model_checkpoints import CONFIGS, all_experts, local_trunk, make_checkpoint, prompt_of, reference_model
from safetensors.torch import load_file, save_file

from kvasir_node.base.errors import DataError
from kvasir_node.model.trunk import LocalDispatch, RowTally, load_trunk


@pytest.fixture
def folder(checkpoint_folder, tmp_path) -> Path:
    """A copy of the Qwen3-MoE checkpoint to be spoiled."""
    return Path(shutil.copytree(checkpoint_folder("qwen3_moe"), tmp_path / "model"))


class NoDispatch:
    def begin(self, rows: int) -> None: ...

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows)

    def tally(self) -> RowTally:
        return RowTally((), (), (), ())

    def fork(self) -> NoDispatch:
        return NoDispatch()


def logits_of(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    trunk = local_trunk(folder)
    lane = trunk.new_cache(1, 64).lane()
    lane.begin([0], [0], len(prompt))
    return trunk.forward(torch.tensor([prompt]), lane)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_within_1e_4_of_the_whole_model(checkpoint_folder, name):
    folder, prompt = checkpoint_folder(name), prompt_of(3, 40)
    with torch.inference_mode():
        expected = reference_model(name, folder)(torch.tensor([prompt])).logits[:, -1]
    got = logits_of(folder, prompt)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_no_expert_weight_is_loaded(checkpoint_folder):
    folder = checkpoint_folder("qwen3_moe")
    trunk = load_trunk(folder, torch.float32, "cpu", NoDispatch())
    whole = sum(parameter.nbytes for parameter in reference_model("qwen3_moe", folder).parameters())
    assert trunk.nbytes == whole - all_experts(folder).nbytes


def test_a_sharded_bf16_checkpoint_loads_and_computes(tmp_path):
    folder = make_checkpoint("qwen3_moe", tmp_path / "m", torch.bfloat16, shard="100KB")
    trunk = local_trunk(folder, torch.bfloat16)
    assert trunk.dtype is torch.bfloat16
    lane = trunk.new_cache(1, 64).lane()
    lane.begin([0], [0], 12)
    logits, tally = trunk.forward(torch.tensor([prompt_of(1, 12)]), lane)
    assert logits.dtype is torch.float32
    assert tally == RowTally([6] * 12, [0] * 12, [0] * 12, [0] * 12)
    # bf16 keeps 8 bits: close to the float32 answer of the same weights, not equal.
    torch.testing.assert_close(logits, logits_of(folder, prompt_of(1, 12)), rtol=0, atol=0.15)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model.layers.1.self_attn.q_proj.weight": None}, r"missing keys: model\.layers\.1\.self_attn\.q_proj"),
        ({"model.layers.2.mlp.gate.weight": None}, r"missing keys: model\.layers\.2\.mlp\.gate"),
        ({"model.norm.weight": torch.zeros(63)}, r"mismatched keys: .*model\.norm\.weight"),
    ],
)
def test_a_trunk_that_is_not_whole_is_refused_by_name(folder, changes, reason):
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({key: t for key, t in tensors.items() if t is not None}, folder / "model.safetensors")
    with pytest.raises(DataError, match=reason):
        load_trunk(folder, torch.float32, "cpu", NoDispatch())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type 'dynamic' are not"),
        ({"num_attention_heads": "four"}, r"config\.json of this qwen3_moe"),
        ({"num_key_value_heads": 3}, "loading the trunk of model|the trunk of model"),
    ],
)
def test_a_config_the_trunk_cannot_follow_is_refused(folder, changes, reason):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=reason):
        load_trunk(folder, torch.float32, "cpu", NoDispatch())


def test_loading_says_nothing_and_reaches_for_no_network(checkpoint_folder):
    code = (
        "import socket, sys, torch\n"
        "def refuse(*a, **k): raise SystemExit('the network was used')\n"
        "socket.getaddrinfo = socket.socket.connect = refuse\n"
        "from kvasir_node.model.trunk import LocalDispatch, load_trunk\n"
        "from kvasir_node.model.experts import load_from_checkpoint\n"
        "from kvasir_node.model.checkpoint import open_checkpoint\n"
        "c = open_checkpoint(sys.argv[1])\n"
        "shard = load_from_checkpoint(c, c.experts, torch.float32)\n"
        "load_trunk(sys.argv[1], torch.float32, 'cpu', LocalDispatch(shard))\n"
    )
    done = subprocess.run(  # a process of its own, because warnings and bars are shown once per process
        [sys.executable, "-c", code, str(checkpoint_folder("mixtral"))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_forks_compute_at_the_same_time_and_equal_what_they_do_one_after_the_other(checkpoint_folder):
    trunk = local_trunk(checkpoint_folder("qwen3_moe"))
    cache = trunk.new_cache(2, 64)
    prompts, lanes, trunks = (
        [prompt_of(n, 20 + n) for n in range(2)],
        [cache.lane(), cache.lane()],
        [trunk, trunk.fork()],
    )

    def compute(number: int) -> tuple[torch.Tensor, RowTally]:
        lanes[number].begin([number], [0], len(prompts[number]))
        return trunks[number].forward(torch.tensor([prompts[number]]), lanes[number])

    one_by_one = [compute(number) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(10):
            for (logits, tally), (expected, expected_tally) in zip(
                threads.map(compute, range(2)), one_by_one, strict=True
            ):
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
                assert tally == expected_tally


def test_a_local_dispatch_counts_every_row(checkpoint_folder):
    dispatch = LocalDispatch(all_experts(checkpoint_folder("qwen3_moe")))
    dispatch.begin(3)
    chosen, weights = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.ones(3, 2)
    for layer in (0, 1):
        dispatch(layer, torch.ones(3, 64), chosen, weights)
    assert dispatch.tally().local == [4, 4, 4]
    dispatch.begin(1)
    assert dispatch.tally().local == [0]
