"""Tells by the keys of a checkpoint which expert a tensor belongs to, as transformers' own loading would.

It does not know files, dtypes or shapes. Layouts: a tensor per expert and matrix (under whichever name the family's
checkpoints use), or one for all experts of a layer. What transformers would do beyond putting them side by side
(transpose, interleave, permute) has no word here and is refused.

`rename_source_key` and `get_model_conversion_mapping` are not public; pyproject pins transformers' version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key

from kvasir_node.base.errors import DataError
from kvasir_node.model.expert_parts import part_name

_EXPERT = re.compile(r"\.experts\.(0|[1-9][0-9]{0,5})\.")
_QUANTISED = re.compile(r"(?P<base>.*(?:\.weight|_proj))_(?P<piece>scale_inv|blocks|scales)\Z")
_TARGET = re.compile(r"(?P<module>.*\bexperts)\.(?P<matrix>gate_up|up|down)_proj(?P<bias>_bias)?\Z")
_PIECES = {"scale_inv": "scale", "blocks": "blocks", "scales": "scales"}


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor belongs; `expert` None = it holds this part of all experts of the layer, in order."""

    layer: int
    expert: int | None
    part: str


@dataclass(frozen=True, slots=True)
class _Target:
    """What a key means in the model: a module's matrix, or one of those it is put together of."""

    module: str
    part: str


class ExpertKeys:
    """`layers` = the experts modules of `model` (on the meta device) and the layers they are in; `identities` = expert
    ids without weights, although checkpoints may hold a part of some; `ignored` = keys that transformers skips."""

    def __init__(
        self,
        family: str,
        model: Any,
        layers: Mapping[str, int],
        identities: range,
        ignored: Sequence[str],
    ) -> None:
        self._family = family
        self._layers = layers
        self._identities = identities
        self._ignored = [re.compile(pattern) for pattern in ignored]
        mapping = get_model_conversion_mapping(model)
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._renamings: list[Any] = [each for each in mapping if not isinstance(each, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()
        self._targets: dict[str, tuple[str, _Target | None]] = {}  # by key with the expert's number taken out

    def locate(self, key: str) -> Location | None:
        """None = not of a routed expert. Raises DataError for an expert's tensor whose layout has no word here."""
        number = _EXPERT.search(key)
        target_key, target = self._target(key if number is None else key.replace(number[0], ".experts.0.", 1))
        if target is None:
            if ".experts." in target_key or number is not None:
                raise DataError(f"{self._family}: the layout of the expert tensor {key[:100]!r} is not supported")
            return None
        layer = self._layers.get(target.module)
        if layer is None:
            raise DataError(f"{self._family}: the expert tensor {key[:100]!r} is not foreseen by config.json")
        return Location(layer, None if number is None else int(number[1]), target.part)

    def is_ignored(self, key: str) -> bool:
        """Of something that is not part of the model as it is run: heads for several tokens ahead, identity experts."""
        number = _EXPERT.search(key)
        if number is not None and int(number[1]) in self._identities:
            return True
        if not any(pattern.search(key) for pattern in self._ignored):
            return False
        # The patterns name layers by the numbers of the family's best known sizes; another size may really have them.
        target_key, target = self._target(key if number is None else key.replace(number[0], ".experts.0.", 1))
        return target_key not in self._state and (target is None or target.module not in self._layers)

    def trunk_names(self) -> list[str]:
        """The model's own names of all that is not a routed expert, buffers included."""
        return [name for name in self._state if name.rpartition(".experts.")[0] + ".experts" not in self._layers]

    def _target(self, key: str) -> tuple[str, _Target | None]:
        known = self._targets.get(key)
        if known is None:
            known = self._targets[key] = self._find_target(key)
        return known

    def _find_target(self, key: str) -> tuple[str, _Target | None]:
        quantised = _QUANTISED.match(key)
        base, piece = (key, "") if quantised is None else (quantised["base"], _PIECES[quantised["piece"]])
        renamed, pattern = rename_source_key(base, self._renamings, self._converters, self._prefix, self._state)
        match = _TARGET.match(renamed)
        if match is None:
            return renamed, None
        is_single = _EXPERT.search(key) is not None
        if is_single != (pattern is not None) or (match["bias"] and piece):
            return renamed, None
        matrix = match["matrix"] if pattern is None else self._source_matrix(match["matrix"], pattern)
        if matrix is None:
            return renamed, None
        return renamed, _Target(match["module"], part_name(matrix, "bias" if match["bias"] else piece))

    def _source_matrix(self, matrix: str, pattern: str) -> str | None:
        """Which of our matrices a converter's source is: gate and up are those that it puts one after the other."""
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        match converter.operations:
            case [MergeModulelist(dim=0)] if len(converter.source_patterns) == 1:
                return matrix
            case [MergeModulelist(dim=0), Concatenate(dim=1)] if len(converter.source_patterns) == 2:
                return ("gate", "up")[converter.source_patterns.index(pattern)] if matrix == "gate_up" else None
        return None
