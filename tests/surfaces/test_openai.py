"""Request bodies: what is taken, and that every wrong one names its parameter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import JsonFormat, SamplingOptions, Tool, Tools, ToolUse
from kvasir_node.surfaces.openai import TEXT_MAX_TOKENS_DEFAULT, parse_chat, parse_completion, parse_json_object

USER = [{"role": "user", "content": "hello"}]


def assistant_calls(*calls: object):
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": list(calls)}]}


def a_tool(name, **more: object):
    return {"type": "function", "function": {"name": name, **more}}


BAD_CHAT = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"model": "\ud800"}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": USER * 2049}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [*USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "half \udc00"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    (assistant_calls({}), "messages[0].tool_calls[0].function"),
    (assistant_calls({"id": "a", "type": "other", "function": {"name": "f"}}), "messages[0].tool_calls[0].type"),
    (assistant_calls({"id": "a", "function": {}}), "messages[0].tool_calls[0]"),
    (assistant_calls({"function": {"name": "f"}}), "messages[0].tool_calls[0]"),
    (
        assistant_calls({"id": "a", "function": {"name": "f", "arguments": "[1]"}}),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        assistant_calls({"id": "a", "function": {"name": "f", "arguments": "{"}}),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        assistant_calls({"id": "a", "function": {"name": "f", "arguments": "{}", "more": 1}}),
        "messages[0].tool_calls[0].function.more",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": True}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": "x" * 513}, "stop"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"user": 5}, "user"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
    ({"prompt": "x"}, "prompt"),
    ({"logprobs": 0}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": ["text"]}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
        "response_format.json_schema.schema",
    ),
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ({"tools": [a_tool("a b")]}, "tools[0].function.name"),
    ({"tools": [a_tool("a"), a_tool("a")]}, "tools"),
    ({"tools": [a_tool("a", parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [a_tool("a", strict=1)]}, "tools[0].function.strict"),
    ({"tools": [a_tool("a", more=1)]}, "tools[0].function.more"),
    ({"tools": [a_tool(f"a{n}") for n in range(129)]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [a_tool("a")], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [a_tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    ({"tools": [a_tool("a")], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [a_tool("a")], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"temprature": 1}, "temprature"),
    ({"half \ud800": 1}, "half ?"),
]

BAD_PROMPTS = [
    None,
    "",
    [],
    [[]],
    ["a", ""],
    [[1], []],
    ["a", 1],
    ["a"] * 65,
    [1, -1],
    [1, "a"],
    [True],
    [1.5],
    5,
    {},
    [""],
    "\ud800",
    [2**31],
]


@pytest.mark.parametrize(("change", "param"), BAD_CHAT)
def test_a_wrong_chat_parameter_is_named(change, param):
    with pytest.raises(UsageError) as caught:
        parse_chat({"model": "demo", "messages": USER} | change)
    assert caught.value.param == param
    assert str(caught.value).encode("utf-8")  # a message that cannot be sent would be an error of its own


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_wrong_prompt_is_named(prompt):
    with pytest.raises(UsageError) as caught:
        parse_completion({"model": "demo", "prompt": prompt})
    assert caught.value.param == "prompt"


def test_all_supported_parameters_arrive():
    asked = parse_chat(
        {
            "model": "demo",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "eve",
                },
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.25,
            "seed": -5,
            "stop": ["x", "\n"],
            "n": 1,
            "user": "someone",
        }
    )
    assert (asked.model, asked.stream, asked.include_usage) == ("demo", True, True)
    assert asked.generation.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "eve"},
    )
    assert asked.generation.sampling == SamplingOptions(0.0, 0.5, 3, 0.25, -5)
    assert (asked.generation.max_tokens, asked.generation.stop) == (7, ("x", "\n"))


def test_what_shapes_the_logits_and_the_number_of_answers_arrives():
    asked = parse_chat(
        {
            "model": "demo",
            "messages": USER,
            "n": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -1,
            "logit_bias": {"30": -100, "7": 2.5},
        }
    ).generation
    assert (asked.choices, asked.top_logprobs) == (3, 2)
    sampling = asked.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
    assert sampling.logit_bias == ((7, 2.5), (30, -100.0))


def test_log_probabilities_are_a_flag_in_chats_and_a_number_in_completions():
    assert parse_chat({"model": "demo", "messages": USER, "logprobs": True}).generation.top_logprobs == 0
    assert parse_chat({"model": "demo", "messages": USER, "logprobs": False}).generation.top_logprobs is None
    text = {"model": "demo", "prompt": "x"}
    assert [parse_completion(text | {"logprobs": n}).generation.top_logprobs for n in (0, 5, False)] == [0, 5, None]
    for wrong in (True, 21, "1"):
        with pytest.raises(UsageError) as caught:
            parse_completion(text | {"logprobs": wrong})
        assert caught.value.param == "logprobs"


def test_formats_arrive_as_schemas():
    def format_of(value):
        return parse_chat({"model": "demo", "messages": USER, "response_format": value}).generation.format

    assert format_of({"type": "text"}) is None
    assert format_of({"type": "json_object"}) == JsonFormat({"type": "object"})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"name": "x", "schema": schema, "strict": True, "description": None}
    assert format_of({"type": "json_schema", "json_schema": given}) == JsonFormat(schema)


def test_tools_arrive_with_how_they_may_be_used():
    def tools_of(**fields: object):
        body = {"model": "demo", "messages": USER, "tools": [a_tool("f", description="d", strict=True), a_tool("g")]}
        return parse_chat(body | fields).generation.tools

    offered = (Tool("f", "d", {"type": "object"}, strict=True), Tool("g", None, {"type": "object"}))
    assert tools_of() == tools_of(tool_choice="auto") == tools_of(parallel_tool_calls=True) == Tools(offered)
    assert tools_of(tool_choice="none") is None
    assert tools_of(tool_choice="required") == Tools(offered, ToolUse.REQUIRED)
    named = {"type": "function", "function": {"name": "g"}}
    assert tools_of(tool_choice=named, parallel_tool_calls=False) == Tools(offered, ToolUse.REQUIRED, "g")


def test_earlier_calls_and_their_results_arrive_as_templates_expect_them():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
    ]
    arrived = parse_chat({"model": "demo", "messages": messages}).generation.messages
    assert arrived is not None
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert arrived[1] == {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "hm"}
    assert arrived[2] == {"role": "tool", "content": "5", "tool_call_id": "c1"}


def test_defaults_are_openais():
    chat = parse_chat({"model": "demo", "messages": USER}).generation
    text = parse_completion({"model": "demo", "prompt": "x"}).generation
    assert chat.sampling == SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
    assert (chat.max_tokens, text.max_tokens) == (None, TEXT_MAX_TOKENS_DEFAULT)


def test_null_and_values_that_ask_for_nothing_are_as_good_as_absent():
    neutral = {
        "temperature": None,
        "whatever": None,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": False,
        "tools": [],
        "response_format": {"type": "text"},
        "logit_bias": {},
    }
    plain = {"model": "demo", "messages": USER}
    assert parse_chat(plain | neutral) == parse_chat(plain)


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [("hi", "hi", None), (["hi"], "hi", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2))],
)
def test_prompts_are_text_or_token_ids(prompt, text, tokens):
    asked = parse_completion({"model": "demo", "prompt": prompt}).generation
    assert (asked.prompt, asked.prompt_tokens, asked.messages) == (text, tokens, None)


def test_several_prompts_stay_in_their_order():
    asked = parse_completion({"model": "demo", "prompt": ["a", [1, 2], "c"], "n": 2}).generation
    assert asked.prompts == ("a", (1, 2), "c")
    assert (asked.prompt, asked.prompt_tokens, asked.answer_count) == (None, None, 6)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"5", b"null", b'{"a": NaN}', b'{"a": Infinity}', b"\xff\xfe{}", b"[" * 100_000, b"9" * 5000],
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(UsageError):
        parse_json_object(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=8,
)
names = st.sampled_from(
    (  # noqa: SIM905
        "messages prompt stop seed stream stream_options n top_k tools other logit_bias response_format tool_choice"
        " logprobs"
    ).split()
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(names, json_values, max_size=4), st.sampled_from([parse_chat, parse_completion]))
def test_any_body_is_taken_or_refused_by_name(body, parse):
    refusal, contents = None, []
    try:
        asked = parse({"model": "demo", **body}).generation
        contents = [asked.messages, asked.prompt, asked.prompt_tokens, asked.prompts or None]
    except UsageError as error:
        refusal = error
    if refusal is None:
        assert sum(content is not None for content in contents) == 1
    else:
        assert refusal.param
        json.dumps([refusal.param, str(refusal)], ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("1e999", "temperature must be a number from 0 to 2, got inf"),
        ("7" * 300, f"temperature must be a number from 0 to 2, got {'7' * 40}..."),
        ("7" * 10_000, "the request body holds a number with more than 400 digits"),
        ("-" + "7" * 10_000, "the request body holds a number with more than 400 digits"),
    ],
)
def test_a_number_of_absurd_size_is_refused_in_our_own_words(number, message):
    body = json.dumps({"model": "m", "messages": USER, "temperature": "NUMBER"}).replace('"NUMBER"', number)
    with pytest.raises(UsageError) as caught:
        parse_chat(parse_json_object(body.encode()))
    assert message in str(caught.value)
