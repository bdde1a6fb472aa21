"""How one model speaks: which grammar its answer must follow, and how calls of tools and thoughts stand in its text.

It does not know tokens' probabilities, places or HTTP. The chat template tells which format a model was trained on; a
model without a known one can still be forced to call a tool (as one JSON object), but what it says of its own
accord stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import GenerationRequest, JsonFormat, Tool, Tools, ToolUse
from kvasir_node.model.grammar import Grammar, GrammarCompiler, json_rule, literal, special
from kvasir_node.model.harmony import CALL, FINAL, MARKS, HarmonyReader
from kvasir_node.model.text import TextModel
from kvasir_node.model.tools import MISTRAL, MISTRAL_ARGS, PLAIN, TAGGED, CallFormat, Reader

PARAM = "tools"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How one request's answers are made and read. `shown`: special tokens whose names the reader must see."""

    grammar: Grammar | None
    shown: frozenset[int]
    reader: Callable[[], Reader] | None  # None = all of it is text


class Dialect:
    """One model's; may be used by several threads."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._grammars = GrammarCompiler(text)
        template = text.template or ""
        self._harmony = "<|channel|>" in template and "<|message|>" in template
        self._calls = None if self._harmony else _format_of(template)

    def plan(self, request: GenerationRequest) -> AnswerPlan:
        """Compiling a grammar may take some 100 ms. Raises UsageError that names the parameter at fault."""
        tools, wanted = request.tools, request.format
        if self._harmony:
            return AnswerPlan(self._harmony_grammar(tools, wanted), self._special_ids(MARKS), HarmonyReader)
        calls = self._calls
        if tools is not None and tools.use is ToolUse.REQUIRED and calls is None:
            calls = PLAIN
        if tools is None or calls is None:
            self._refuse_strict(tools)
            grammar = None if wanted is None else self._grammars.json(wanted.schema, wanted.param)
            return AnswerPlan(grammar, frozenset(), None)
        return AnswerPlan(self._grammar(tools, wanted, calls), self._special_ids(calls.marks), calls.reader)

    def needs_time(self, request: GenerationRequest) -> bool:
        """A grammar must be compiled, which is worth a thread."""
        tools = request.tools
        return request.format is not None or (tools is not None and (tools.use is ToolUse.REQUIRED or _strict(tools)))

    def _grammar(self, tools: Tools, wanted: JsonFormat | None, calls: CallFormat) -> Grammar | None:
        def rule(tool: Tool, before: str) -> str:
            terms = [self._terms(before.format(name=tool.name), calls.marks), json_rule(tool.parameters, PARAM)]
            return " ".join([*terms, self._terms(calls.after.format(), calls.marks)])

        if tools.use is ToolUse.REQUIRED:
            return self._grammars.lark(_choice([rule(tool, calls.before) for tool in _callable(tools)]), PARAM)
        if wanted is not None:
            rules = [rule(tool, calls.before) for tool in tools.offered]
            return self._grammars.lark(_choice([json_rule(wanted.schema, wanted.param), *rules]), wanted.param)
        if not _strict(tools):
            return None
        rest = calls.before.removeprefix(calls.opening)
        rules = [rule(tool, rest) for tool in tools.offered]
        return self._grammars.lark(_free_text_and(self._terms(calls.opening, calls.marks), rules), PARAM)

    def _harmony_grammar(self, tools: Tools | None, wanted: JsonFormat | None) -> Grammar | None:
        rules = [
            f"{self._terms(CALL.format(name=tool.name), MARKS)} {json_rule(tool.parameters, PARAM)}"
            for tool in ([] if tools is None else _callable(tools))
        ]
        if tools is not None and tools.use is ToolUse.REQUIRED:
            return self._grammars.lark(_choice(rules), PARAM)
        if wanted is not None:
            final = f"{self._terms(FINAL, MARKS)} {json_rule(wanted.schema, wanted.param)}"
            return self._grammars.lark(_choice([final, *rules]), wanted.param)
        self._refuse_strict(tools)
        return None

    def _refuse_strict(self, tools: Tools | None) -> None:
        if tools is not None and _strict(tools):
            raise UsageError(
                "this model's way to call tools cannot be kept to a schema unless a call is required; leave out "
                'strict, or send tool_choice "required"',
                param=PARAM,
            )

    def _terms(self, text: str, marks: Sequence[str]) -> str:
        """Lark terms of a fixed text; marks that are special tokens become those."""
        if not text:
            return ""
        specials = {mark: token for mark in marks if (token := self._special_id(mark)) is not None}
        parts = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
        return " ".join(special(specials[part]) if part in specials else literal(part) for part in parts if part)

    def _special_id(self, mark: str) -> int | None:
        token = self._text.token_id(mark)
        return token if token in self._text.special_tokens else None

    def _special_ids(self, marks: Sequence[str]) -> frozenset[int]:
        return frozenset(token for mark in marks if (token := self._special_id(mark)) is not None)


def _format_of(template: str) -> CallFormat | None:
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    return TAGGED if "<tool_call>" in template else None


def _strict(tools: Tools) -> bool:
    return any(tool.strict for tool in tools.offered)


def _callable(tools: Tools) -> list[Tool]:
    return [tool for tool in tools.offered if tools.only in (None, tool.name)]


def _choice(rules: Sequence[str]) -> str:
    return "start: " + " | ".join(f"({rule})" for rule in rules) + "\n"


def _free_text_and(opening: str, rules: Sequence[str]) -> str:
    """Text in which each opening is followed by one of the rules.

    A spelled opening ends its text lazily: as soon as it stands there, nothing but a rule can follow. A special token
    cannot be part of any text.
    """
    free = f"free: TEXT {opening}" if opening.startswith("<[") else f"free[lazy]: TEXT {opening}"
    alternatives = " | ".join(f"({rule})" for rule in rules)
    return f"start: (free ({alternatives}))* TEXT\n{free}\nTEXT: /(.|\\n)*/\n"
