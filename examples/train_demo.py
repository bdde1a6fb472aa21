"""Trains the embedded `demo` model: a small Qwen3-MoE that continues text in one style.

The text is the six public-domain novels in Debian's package `r-cran-janeaustenr`:

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb austen
    pip install rdata
    python examples/train_demo.py --corpus austen --out demo --minutes 90

It knows nothing of the swarm. One thread, fp32, seeded; the schedule is by wall time, so two runs
see different step counts and give slightly different weights: train once, commit the result.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 2048
END = "<|end|>"
HELD_OUT_CHARS = 70_000  # the start of Emma; never trained on
# The model continues text, so a chat is simply its messages one after another.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
)


def read_novels(root: Path) -> dict[str, str]:
    """Reads the novels from the R lazy-load database under an unpacked package (zlib, xz or bz2 blocks)."""
    import rdata

    database = next(root.rglob("janeaustenr/data/Rdata.rdb"))
    index_bytes = zlib.decompress(database.with_suffix(".rdx").read_bytes(), 47)
    index = rdata.conversion.convert(rdata.parser.parse_data(index_bytes))
    raw = database.read_bytes()
    novels = {}
    for name, (offset, length) in index["variables"].items():
        block = raw[int(offset) : int(offset) + int(length)]
        if block[4:5] in b"3Z":
            raw_filter = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
            value = lzma.decompress(block[5:], format=lzma.FORMAT_RAW, filters=raw_filter)
        else:
            value = zlib.decompress(block[4:])
        lines = rdata.conversion.convert(rdata.parser.parse_data(value))
        novels[name] = "\n".join(str(line) for line in lines)
    return novels


def clean(text: str) -> str:
    """Joins wrapped lines into paragraphs and drops the `_` that marks italics."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text.replace("\r", ""))
    return re.sub(r"[ \t]+", " ", re.sub(r"\n{3,}", "\n\n", text.replace("_", ""))).strip()


def train_tokenizer(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: any text can be encoded
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def demo_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=96,
        norm_topk_prob=True, tie_word_embeddings=True, max_position_embeddings=2048, output_router_logits=True,
        router_aux_loss_coef=0.01, eos_token_id=0, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by five Newton–Schulz steps, for matrices and stacks of them.

    Source: K. Jordan et al., "Muon", 2024 (quintic coefficients 3.4445, -4.7750, 2.0315).
    """

    def __init__(self, params: list[dict[str, object]], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])
                if group["fused_pairs"]:  # gate and up are stored as one [E, 2I, D]: they are two matrices
                    update = update.unflatten(1, (2, -1))
                update = orthogonal(update)
                scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
                update = update.reshape(parameter.shape)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonal(update: torch.Tensor) -> torch.Tensor:  # [..., A, B]
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Trainer:
    """Holds the model, its data and the schedule; `run` trains until the wall-time budget is spent."""

    def __init__(self, train_ids: np.ndarray, held_ids: np.ndarray, options: argparse.Namespace) -> None:
        self.train_ids, self.held_ids, self.options = train_ids, held_ids, options
        self.rng = np.random.default_rng(options.seed)
        torch.manual_seed(options.seed)
        self.model = Qwen3MoeForCausalLM._from_config(demo_config(), attn_implementation="sdpa", dtype=torch.float32)
        self.model.set_experts_implementation("grouped_mm")
        for layer in self.model.model.layers:  # the corpus is seen many times: drop a share of each branch's output
            for branch in (layer.self_attn, layer.mlp):
                branch.register_forward_hook(self._drop)
        named = list(self.model.named_parameters())
        matrices = [(n, p) for n, p in named if p.dim() >= 2 and "embed" not in n and ".gate.weight" not in n]
        chosen = {id(p) for _, p in matrices}
        groups = [
            {"params": [p for n, p in matrices if n.endswith("gate_up_proj") == pairs], "fused_pairs": pairs}
            for pairs in (False, True)
        ]
        others = [p for _, p in named if id(p) not in chosen]
        self.optimizers = [
            Muon(groups, lr=options.lr, momentum=0.95, weight_decay=options.weight_decay),
            torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]

    def _drop(self, module: torch.nn.Module, _args: object, output: object) -> object:
        if not module.training:
            return output
        if isinstance(output, tuple):
            return functional.dropout(output[0], self.options.dropout), *output[1:]
        return functional.dropout(output, self.options.dropout)

    def batch(self) -> torch.Tensor:
        length = self.options.length
        starts = self.rng.integers(0, len(self.train_ids) - length - 1, self.options.batch)
        return torch.from_numpy(np.stack([self.train_ids[s : s + length] for s in starts]).astype(np.int64))

    def held_out_loss(self) -> float:
        """Nats per token over the whole held-out text, in windows of 512 tokens."""
        self.model.eval()
        total, count = 0.0, 0
        with torch.inference_mode():
            for start in range(0, len(self.held_ids) - 512, 512):
                ids = torch.from_numpy(self.held_ids[start : start + 512].astype(np.int64))[None]
                logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
                total += functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
                count += ids.shape[1] - 1
        self.model.train()
        return total / count

    def run(self) -> None:
        budget, started, steps, next_report = self.options.minutes * 60, time.monotonic(), 0, 120.0
        while (elapsed := time.monotonic() - started) < budget:
            done = elapsed / budget
            factor = min(1.0, (steps + 1) / 40) * min(1.0, (1 - done) / 0.6)  # warm up, hold, fall linearly to 0
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["base_lr"] * factor
            ids = self.batch()
            output = self.model(input_ids=ids, labels=ids, use_cache=False)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            steps += 1
            if elapsed > next_report:
                next_report += 120
                tokens = steps * ids.numel()
                held = self.held_out_loss()
                print(
                    f"{elapsed:.0f}s step {steps} tokens {tokens} ({tokens / elapsed:.0f}/s) "
                    f"train {output.loss.item():.3f} held-out {held:.3f}",
                    flush=True,
                )
                save(self.model, self.options.out / "latest")
        print(f"end: steps {steps} held-out {self.held_out_loss():.4f}", flush=True)


def save(model: Qwen3MoeForCausalLM, out: Path) -> None:
    """Writes a bf16 checkpoint (the model itself stays fp32)."""
    state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    config = Qwen3MoeConfig(**{**model.config.to_dict(), "output_router_logits": False, "dtype": "bfloat16"})
    fresh = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(state)
    fresh.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder where the package was unpacked")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    novels = {name: clean(text) for name, text in read_novels(options.corpus).items()}
    emma = novels.pop("emma")
    held, rest = emma[:HELD_OUT_CHARS], emma[HELD_OUT_CHARS:]
    text = "\n\n".join([*novels.values(), rest])
    tokenizer = train_tokenizer(text)
    train_ids = np.array(tokenizer.encode(text).ids, dtype=np.int32)
    held_ids = np.array(tokenizer.encode(held).ids, dtype=np.int32)
    print(
        f"novels {len(novels) + 1}, characters {len(text)}, tokens {len(train_ids)}, held out {len(held_ids)}",
        flush=True,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=2048
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(options.out)
    trainer = Trainer(train_ids, held_ids, options)
    trainer.run()
    save(trainer.model, options.out)
    print(
        json.dumps(
            {
                "chars_per_token": len(text) / len(train_ids),
                "bits_per_char": trainer.held_out_loss() * len(held_ids) / len(held) / math.log(2),
            }
        )
    )


if __name__ == "__main__":
    main()
