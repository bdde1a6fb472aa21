"""The other side of `bench model`: transformers' own batched `generate` on the same checkpoint.

It does not know our engine. Its best is what counts: of its ways to compute experts, the quicker one is found out for
each number of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from kvasir_node.base.errors import DataError
from kvasir_node.model.bench_engine import Burst, Prompt

# batched_mm is left out: it copies the weights of every (row, expert) pair, 50 GB for 32 prompts of size M.
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")


class TransformersBench:
    """The whole model in transformers. Loading takes the memory of the whole model."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises DataError for a checkpoint that transformers cannot read: GGUF, or one fetched by content."""
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"loading {folder.name} into transformers as the baseline: {str(error)[:300]}") from error
        # Without the checkpoint's own: an end token must not end a burst early.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self.implementations: dict[int, str] = {}  # the quicker one, by requests at once

    def warm_up(self, prompts: Sequence[Prompt], steps: int) -> None:
        """Finds the quicker implementation for bursts of this size."""
        found = {each: self._burst(prompts, steps, each).decode_tokens_s for each in EXPERTS_IMPLEMENTATIONS}
        self.implementations[len(prompts)] = max(found, key=found.__getitem__)

    def burst(self, prompts: Sequence[Prompt], steps: int) -> Burst:
        """All prompts (of one length) at once, then `steps` tokens of each; `warm_up` comes first."""
        return self._burst(prompts, steps, self.implementations[len(prompts)])

    def _burst(self, prompts: Sequence[Prompt], steps: int, implementation: str) -> Burst:
        self._model.set_experts_implementation(implementation)
        tokens = torch.tensor(prompts)
        stamps = _Stamps()
        began_at = perf_counter()
        self._model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=steps + 1, stopping_criteria=[stamps]
        )
        prefilled_at, ended_at = stamps.at[0], stamps.at[-1]
        decoded = (len(stamps.at) - 1) * len(prompts)
        return Burst(tokens.numel() / (prefilled_at - began_at), decoded / (ended_at - prefilled_at))


class _Stamps(StoppingCriteria):
    """Is asked after every token, and only looks at the clock."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.at.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)
