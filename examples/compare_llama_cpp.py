"""Tokens per second of the engine beside llama.cpp's, on the same weights, in the same run.

    python examples/compare_llama_cpp.py PATH_OF_LLAMA_BATCHED_BENCH CHECKPOINT [--make S|M] [--json]

CHECKPOINT is a Qwen3-MoE folder; --make makes a seeded one of that size there, once. Its weights are written as GGUF
beside it, once. Both sides take turns on the same cores, so that other load meets both alike, and the figures are
medians of the rounds. llama.cpp's tool draws random tokens of its own; it keeps keys and values in 16 bits, as the
engine does when it computes in bfloat16.

`llama-batched-bench` is in llama.cpp's tree, which the source distribution of `llama-cpp-python` holds under
`vendor/llama.cpp` (tried with 0.3.36). To build it there:

    cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama-batched-bench
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import gguf
import torch

from kvasir_node.base.ids import ExpertId
from kvasir_node.base.settings import CoordinatorSettings
from kvasir_node.model.bench_checkpoint import SIZES, make_checkpoint
from kvasir_node.model.bench_engine import Burst, EngineBench, Prompt
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.roles.library import demo_folder

Kind = gguf.GGMLQuantizationType
KINDS = {"bfloat16": Kind.BF16, "float32": Kind.F32}
PROMPT_TOKENS = 64
STEPS = 16
OURS, THEIRS = "kvasir", "llama_cpp"
Rates = dict[int, dict[str, list[Burst]]]  # by requests at once and side, one of each round


def write_gguf(checkpoint: Checkpoint, file: Path, kind: Kind) -> None:
    """A Qwen3-MoE checkpoint as llama.cpp reads it; norms and routers stay float32, as it wants them."""
    writer = gguf.GGUFWriter(file, "qwen3moe")
    _write_settings(writer, checkpoint)
    _write_vocabulary(writer, checkpoint.path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, checkpoint.config["num_hidden_layers"])
    for name, tensor in checkpoint.trunk.items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise SystemExit(f"{name} has no name in llama.cpp's qwen3moe")
        _add(writer, theirs, read_tensor(tensor), kind)
    for layer in checkpoint.layers:
        experts = [checkpoint.experts[ExpertId(layer, index)] for index in range(checkpoint.experts_per_layer)]
        for part in ("gate", "up", "down"):
            stacked = torch.stack([read_tensor(parts[part]) for parts in experts])
            _add(writer, f"blk.{layer}.ffn_{part}_exps.weight", stacked, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_count(checkpoint.experts_per_layer)
    writer.add_expert_used_count(checkpoint.chosen_per_row)
    writer.add_expert_feed_forward_length(checkpoint.expert_hidden_size)


def _write_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_bytes())
    added = {token["id"]: token["content"] for token in document["added_tokens"]}
    ids = {number: text for text, number in document["model"]["vocab"].items()} | added
    kinds = [gguf.TokenType.CONTROL if number in added else gguf.TokenType.NORMAL for number in sorted(ids)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids[number] for number in sorted(ids)])
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in document["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: Kind) -> None:
    kind = Kind.F32 if tensor.dim() == 1 or "ffn_gate_inp" in name else kind
    writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)


def llama_burst(tool: Path, model: Path, streams: int, threads: int) -> Burst:
    """One run of llama-batched-bench; it starts anew each time, which is not counted."""
    flags = {
        "-m": model,
        "-c": streams * (PROMPT_TOKENS + STEPS) + 256,
        "-b": 2048,
        "-ub": 512,
        "-npp": PROMPT_TOKENS,
        "-ntg": STEPS,
        "-npl": streams,
        "-t": threads,
        "-tb": threads,
        "--load-mode": "none",  # mapped, the first read of each page would be counted
        "--output-format": "jsonl",
    }
    command = [str(tool), *(str(each) for flag in flags.items() for each in flag)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if line is None:
        raise SystemExit(f"{tool.name} ended with {done.returncode} and no figures: {done.stderr[-500:]}")
    found = json.loads(line)
    return Burst(found["speed_pp"], found["speed_tg"])


def compare(checkpoint: Checkpoint, tool: Path, model: Path, arguments: argparse.Namespace) -> Rates:
    streams: list[int] = arguments.streams
    ours = EngineBench(
        checkpoint,
        getattr(torch, arguments.dtype),
        slots=max(streams),
        tokens_max=PROMPT_TOKENS + STEPS,
        prefill_chunk=CoordinatorSettings().prefill_chunk,
    )
    rates: Rates = {count: {OURS: [], THEIRS: []} for count in streams}
    for number in range(arguments.rounds + 1):
        print(f"round {number} of {arguments.rounds}" if number else "warming up", file=sys.stderr, flush=True)
        for count in streams:
            mine = ours.burst(_prompts(ours.vocabulary, count, seed=1000 * number + count), STEPS)
            if number:
                rates[count][OURS].append(mine)
                rates[count][THEIRS].append(llama_burst(tool, model, count, arguments.threads))
    return rates


def _prompts(vocabulary: int, count: int, seed: int) -> list[Prompt]:
    draw = torch.Generator().manual_seed(seed)
    return [tuple(row) for row in torch.randint(vocabulary, (count, PROMPT_TOKENS), generator=draw).tolist()]


def summary(rates: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
    return {name: round(rate, 1) for name, rate in found.items()}


def document(rates: Rates) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Requests at once -> decode or prefill -> side -> tokens per second."""
    return {
        str(count): {
            "decode_tokens_s": {side: summary([one.decode_tokens_s for one in bursts[side]]) for side in bursts},
            "prefill_tokens_s": {side: summary([one.prefill_tokens_s for one in bursts[side]]) for side in bursts},
        }
        for count, bursts in rates.items()
    }


def table(rates: Rates) -> str:
    lines = [f"{'requests':>8}  {'':8}{'kvasir (min–max)':>28}{'llama.cpp (min–max)':>28}{'ratio':>8}"]
    for count, kinds in document(rates).items():
        for kind, sides in kinds.items():
            shown = "".join(f"{_with_range(one):>28}" for one in sides.values())
            ratio = sides[OURS]["median"] / sides[THEIRS]["median"]
            lines.append(f"{count:>8}  {kind.removesuffix('_tokens_s'):8}{shown}{f'×{ratio:.2f}':>8}")
    return "\n".join(lines)


def _with_range(rates: dict[str, float]) -> str:
    return f"{rates['median']} ({rates['min']}–{rates['max']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tool", type=Path, metavar="LLAMA_BATCHED_BENCH")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--make", choices=tuple(SIZES), help="a seeded checkpoint of this size")
    parser.add_argument(
        "--streams", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 8, 16, 32]
    )
    parser.add_argument("--dtype", choices=tuple(KINDS), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="and cores, the first ones of the machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, range(arguments.threads))  # what is started from here stays there, too
    torch.set_num_threads(arguments.threads)
    if arguments.make is not None:
        make_checkpoint(arguments.make, arguments.checkpoint.absolute(), demo_folder())
    checkpoint = open_checkpoint(arguments.checkpoint)
    model = checkpoint.path.with_name(f"{checkpoint.path.name}-{arguments.dtype}.gguf")
    if not model.exists():
        print(f"writing {model}", file=sys.stderr)
        partial = model.with_suffix(".partial")
        write_gguf(checkpoint, partial, KINDS[arguments.dtype])
        partial.rename(model)
    rates = compare(checkpoint, arguments.tool.absolute(), model, arguments)
    about = {"model": checkpoint.path.name, "dtype": arguments.dtype, "threads": arguments.threads}
    if arguments.json:
        print(json.dumps({"schema": "kvasir.compare.llama_cpp/1", **about, "streams": document(rates)}))
    else:
        print(table(rates))


if __name__ == "__main__":
    main()
