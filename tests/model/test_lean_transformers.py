"""What a loaded trunk leaves out of memory, and that what was left out is there for whoever asks. In one process of its
own, as others import transformers as they like."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from kvasir_node.roles.library import demo_folder
import kvasir_node.model  # transformers' model code is there
import torch
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.trunk import LocalDispatch, load_trunk
checkpoint = open_checkpoint(demo_folder())
experts = load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32)
trunk = load_trunk(demo_folder(), torch.float32, "cpu", LocalDispatch(experts))
cache = trunk.new_cache(1, 16)
lane = cache.lane()
lane.begin([0], [0], 4)
trunk.forward(torch.ones(1, 4, dtype=torch.int64), lane)
left_out = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp")
assert not [name for name in left_out if name in sys.modules]
doubled = torch.compile(lambda x: 2 * x, backend="eager")
assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
assert "torch._dynamo" in sys.modules
import transformers.utils
assert transformers.utils.is_torch_distributed_available() == torch.distributed.is_available()
"""


def test_neither_the_compiler_nor_distribution_is_imported_and_both_can_be():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
