"""Which model families can be served, what sets each of them apart, and why the others cannot.

It does not know files, weights or how experts compute: that is read off transformers' own model (architecture.py).
A family is listed once its greedy tokens, with experts elsewhere and requests that join and leave, were found equal to
transformers' own (tests/model/test_families.py). `docs/models.md` says the same in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Masks(StrEnum):
    """Which attention mask the model's forward takes."""

    FULL = "full"  # one for all layers
    WINDOW = "window"  # one for all layers, with the config's sliding window if it has one
    BY_TYPE = "by_type"  # one for each type of layer, in a dict


@dataclass(frozen=True, slots=True)
class Family:
    masks: Masks = Masks.FULL
    splits_prompts: bool = True  # a prompt may be computed in chunks; else its recurrent state would be lost


_BY_TYPE = Family(Masks.BY_TYPE)
_WINDOW = Family(Masks.WINDOW)

FAMILIES: Mapping[str, Family] = {
    "afmoe": _BY_TYPE,
    "aria_text": Family(),
    "bailing_hybrid": _BY_TYPE,
    "cohere2_moe": _BY_TYPE,
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "dots1": _BY_TYPE,
    "ernie4_5_moe": Family(),
    "exaone_moe": _BY_TYPE,
    "flex_olmo": Family(),
    "gemma4_text": _BY_TYPE,
    "glm4_moe": Family(),
    "glm4_moe_lite": Family(),
    "gpt_oss": _BY_TYPE,
    "granitemoe": Family(),
    "granitemoe_swa": _BY_TYPE,
    "granitemoehybrid": _BY_TYPE,
    "granitemoeshared": Family(),
    "hunyuan_v1_moe": Family(),
    "hy_v3": Family(),
    "jamba": Family(Masks.BY_TYPE, splits_prompts=False),
    "kimi_linear": _BY_TYPE,
    "laguna": _BY_TYPE,
    "lfm2_moe": _BY_TYPE,
    "longcat_flash": Family(),
    "mellum": _BY_TYPE,
    "mimo_v2_flash": _BY_TYPE,
    "minimax_m2": Family(),
    "mixtral": _WINDOW,
    "nemotron_h": _BY_TYPE,
    "olmoe": Family(),
    "phimoe": _WINDOW,
    "qwen2_moe": _BY_TYPE,
    "qwen3_5_moe": _BY_TYPE,
    "qwen3_5_moe_text": _BY_TYPE,
    "qwen3_moe": _WINDOW,
    "qwen3_next": _BY_TYPE,
    "solar_open": Family(),
}

_INDEXED = "its attention picks keys by an index of their own, which the slot cache does not keep"
REFUSED: Mapping[str, str] = {
    "axk2": _INDEXED,
    "dbrx": "its experts are one matrix for all of them, in a module of their own kind",
    "deepseek_v32": _INDEXED,
    "deepseek_v4": _INDEXED + ", and its router chooses by token id",
    "doge": "its experts are rows of an embedding",
    "dots3_note": _INDEXED,
    "dots3_note_text": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "hy_v4": _INDEXED,
    "jetmoe": "its attention is a mixture of experts too",
    "llama4": "its experts are called with every row, and the router's weights multiply what goes in",
    "llama4_text": "its experts are called with every row, and the router's weights multiply what goes in",
    "minimax": "its lightning attention demands a cache of its own kind",
    "qwen4_exp": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "zaya": "its attention keeps convolution states that the slot cache does not",
}
