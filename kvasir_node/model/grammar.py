"""What an answer may be, as a grammar over one model's tokens.

It does not know requests, logits or how a token is drawn. llguidance does the work; here are the vocabulary it needs,
bounds on what a stranger's schema may cost, and errors that say which parameter was at fault. It refuses keywords of
JSON Schema that it does not implement, so none is silently ignored.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from kvasir_node.base.errors import UsageError
from kvasir_node.model.text import TextModel

SCHEMA_CHARACTERS_MAX = 64 * 1024  # one of 58,000 characters (40 objects of 30 texts) took 95 ms to compile
# Between two parts of JSON: nothing, a space, or a line break with an indentation, which is all that trained models
# write. A model that likes white space filled an answer of 200 tokens with 24 characters of it in every gap.
WHITESPACE = r" |\n[ \t]{0,16}"
_ERROR_CHARACTERS_MAX = 300
_SHOWN_SOURCE = re.compile(r"\s*\d+ \|")


def _limits() -> LLParserLimits:
    """Half of llguidance's defaults, or less: by its own figures at most 7 ms of lexing for one token's mask."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Grammar:
    """One compiled grammar; `matcher` gives a fresh reading of it to each answer."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._param)


class GrammarMatcher:
    """Reads one answer token by token (an engine's `Constraint`). Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self, vocabulary: int) -> torch.Tensor:
        """bool [vocabulary]. Raises UsageError when the grammar became too complex on the way."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            raise UsageError(f"the answer could not be kept to {self._param}: {reason}", param=self._param)
        mask = np.zeros(vocabulary, dtype=bool)
        known = np.unpackbits(bits, bitorder="little", count=min(vocabulary, 8 * len(bits)))
        mask[: len(known)] = known
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """A token that was not allowed shows at the next `allowed`."""
        self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary; may be used by several threads."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None  # built at first use: 0.2 s for 32,000 tokens

    def json(self, schema: Mapping[str, Any], param: str) -> Grammar:
        """One JSON value that the schema allows. Raises UsageError with `param`."""
        return self.lark(f"start: {json_rule(schema, param)}\n", param)

    def lark(self, source: str, param: str) -> Grammar:
        """A grammar in llguidance's dialect of Lark. Raises UsageError with `param` when it cannot be compiled."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._text)
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(source), log_level=0, limits=_limits())
        if matcher.is_error():
            raise UsageError(f"{param} cannot be compiled: {_reason(matcher.get_error())}", param=param)
        return Grammar(matcher, param)


def json_rule(schema: Mapping[str, Any], param: str) -> str:
    """A Lark term for one JSON value. Raises UsageError for a schema that is too large."""
    own = {"x-guidance": {"whitespace_pattern": WHITESPACE}}  # last, so that a schema cannot bring options of its own
    try:
        text = json.dumps({**schema, **own})
    except RecursionError as error:
        raise UsageError(f"{param}: the schema is nested too deeply", param=param) from error
    if len(text) > SCHEMA_CHARACTERS_MAX:
        raise UsageError(
            f"{param}: a schema may have {SCHEMA_CHARACTERS_MAX} characters as JSON, got {len(text)}", param=param
        )
    return f"%json {text}"


def literal(text: str) -> str:
    """A Lark term for a fixed text."""
    return json.dumps(text)


def special(token: int) -> str:
    """A Lark term for one token that has no text of its own."""
    return f"<[{token}]>"


class _Vocabulary:
    """What llguidance asks of a tokenizer. Called with a text that must come, it says how the model would write it."""

    def __init__(self, tokens: Sequence[bytes], specials: Sequence[int], end: int, text: TextModel) -> None:
        self.tokens = tokens
        self.special_token_ids = specials
        self.eos_token_id = end
        self.bos_token_id = None
        self._text = text
        self._longest = max(map(len, tokens))
        self._token_of = {data: token for token, data in enumerate(tokens) if token not in specials and data}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        found = list(self._text.encode_part(data.decode("utf-8", "replace")))
        # A tokenizer that puts a space in front, or text that ends inside a character, would force the wrong bytes.
        return found if b"".join(self.tokens[token] for token in found) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        found: list[int] = []
        while data:
            length = next((n for n in range(self._longest, 0, -1) if data[:n] in self._token_of), 0)
            if not length:
                break  # llguidance goes on by itself from here
            found.append(self._token_of[data[:length]])
            data = data[length:]
        return found


def _tokenizer(text: TextModel) -> LLTokenizer:
    tokens = [text.token_label(token) for token in range(text.vocabulary)]
    # A model without end tokens still needs one here; it lies beyond the vocabulary, so it is never drawn.
    ends = sorted(token for token in text.end_tokens if token < len(tokens)) or [len(tokens)]
    if ends == [len(tokens)]:
        tokens.append(b"<end>")
    specials = sorted({*text.special_tokens, *ends})
    wrapper = TokenizerWrapper(_Vocabulary(tokens, specials, ends[0], text))
    return LLTokenizer(wrapper, eos_token=ends)


def _reason(message: str) -> str:
    """The library's message without the grammar's text that it shows after it."""
    lines = itertools.takewhile(lambda line: not _SHOWN_SOURCE.match(line), message.splitlines())
    return " ".join(" ".join(lines).split()).replace("<non-verbose/>", "").strip()[:_ERROR_CHARACTERS_MAX]
