"""Text that grows token by token: characters, stops and special tokens, against whole decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.model.text import STOP_CHARACTERS_MAX, STOPS_MAX, TextModel, TextStream

CORPUS = ["the quick brown fox jumps over the lazy dog", "héllo wörld", "she was, in the end, there", "STOP stops sto"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("tool call", normalized=False), AddedToken("日本", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "he"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, **settings_: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"} | settings_))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("text") / "byte_level", byte_level(), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def text_model(folder) -> TextModel:
    return TextModel(folder)


@pytest.fixture(scope="module")
def fallback_model(tmp_path_factory) -> TextModel:
    return TextModel(write(tmp_path_factory.mktemp("text") / "fallback", byte_fallback()))


BYTE_LEVEL = byte_level()
VOCABULARY = BYTE_LEVEL.get_vocab_size()


def deltas(stream: TextStream, tokens: list[int] | tuple[int, ...]) -> list[str]:
    return [stream.push([token]) for token in tokens] + [stream.finish()]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=30))
def test_any_tokens_at_all_add_up_to_the_whole_decode(text_model, tokens):
    """Byte tokens in any order: mostly not UTF-8."""
    expected = BYTE_LEVEL.decode(tokens, skip_special_tokens=True)
    assert "".join(deltas(TextStream(text_model), tokens)) == expected
    assert text_model.decode(tokens) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=40))
def test_text_survives_and_is_never_cut_inside_a_character(text_model, fallback_model, text):
    for model in (text_model, fallback_model):
        pieces = deltas(TextStream(model), model.encode(text))
        # The sentencepiece way puts a space in front of a text; continuing text keeps it.
        prefix = " " if model is fallback_model and text else ""
        if "<|end|>" not in text and "</s>" not in text and "<s>" not in text and "<unk>" not in text:
            assert "".join(pieces).replace("\u2581", " ") == (prefix + text).replace("\u2581", " ")
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_an_emoji_of_four_tokens_comes_out_once(text_model):
    tokens = text_model.encode("a🦊b")
    pieces = deltas(TextStream(text_model), tokens)
    assert len(tokens) == 6
    assert pieces == ["a", "", "", "", "🦊", "b", ""]


def test_an_unfinished_character_is_shown_as_such_at_the_end(text_model):
    tokens = text_model.encode("ab🦊")[:-1]
    assert deltas(TextStream(text_model), tokens)[-1] == "\ufffd"


def test_added_and_unknown_tokens(text_model):
    ids = text_model.encode("x tool call日本<|end|>")
    assert text_model.decode(ids) == "x tool call日本"
    assert text_model.decode([999_999]) == ""


def cut(text: str, stops: list[str]) -> str:
    """The slow, obvious version: the shortest beginning of the text that ends with a stop, without the longest one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="abST🦊", max_size=25),
    stops=st.lists(st.text(alphabet="abST🦊", min_size=1, max_size=5), max_size=4),
    size=st.integers(1, 4),
)
def test_stops_cut_as_if_the_whole_text_had_been_there(text_model, text, stops, size):
    tokens = text_model.encode(text)
    stream = TextStream(text_model, stops)
    shown = ""
    for start in range(0, len(tokens), size):
        shown += stream.push(tokens[start : start + size])
        assert cut(text, stops).startswith(shown)  # nothing of a stop was ever shown
    shown += stream.finish()
    assert shown == cut(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)


def test_a_stop_over_several_tokens_never_leaks(text_model):
    stream = TextStream(text_model, ["\nUser:", "END"])
    tokens = text_model.encode("fine EN\nUser: more")
    pieces = [stream.push([token]) for token in tokens]
    assert "".join(pieces) == "fine EN"
    assert stream.stopped
    assert stream.push(tokens) == stream.finish() == ""


def test_what_only_began_a_stop_is_given_at_the_end(text_model):
    stream = TextStream(text_model, ["STOP it"])
    assert "".join(stream.push([token]) for token in text_model.encode("say STOP ")) == "say "
    assert stream.finish() == "STOP "
    assert not stream.stopped


def test_only_what_may_begin_a_stop_is_held_back(text_model):
    stream = TextStream(text_model, ["aab"])
    tokens = text_model.encode("a") * 5
    assert [stream.push([token]) for token in tokens] == ["", "", "a", "a", "a"]


@pytest.mark.parametrize("stops", [[""], ["x" * (STOP_CHARACTERS_MAX + 1)], ["x"] * (STOPS_MAX + 1)])
def test_stops_are_bounded(text_model, stops):
    with pytest.raises(UsageError) as failure:
        TextStream(text_model, stops)
    assert failure.value.param == "stop"


def test_bytes_of_the_sentencepiece_way(fallback_model):
    tokens = fallback_model.encode("the 🦊the")
    assert deltas(TextStream(fallback_model), tokens) == [" the", " ", "", "", "", "🦊", "the", ""]
    assert fallback_model.decode([1, *tokens, 2]) == " the 🦊the"


def test_a_chat_is_rendered_by_the_models_template(text_model):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert text_model.chat(messages) == text_model.encode("hi<|end|>yes<|end|>A: ")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "system", "content": "be nice"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"content": "hi"}],
    ],
)
def test_messages_that_are_refused_are_the_callers_mistake(text_model, messages):
    with pytest.raises(UsageError) as failure:
        text_model.chat(messages)
    assert failure.value.param == "messages"


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ no_such_function() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_is_refused(tmp_path, template):
    model = TextModel(write(tmp_path, BYTE_LEVEL, chat_template=template))
    with pytest.raises(UsageError) as failure:
        model.chat(USER)
    assert failure.value.param == "messages"


def test_a_model_without_a_template_completes_but_does_not_chat(fallback_model):
    with pytest.raises(UsageError, match="no chat template") as failure:
        fallback_model.chat(USER)
    assert failure.value.param == "messages"


def test_where_templates_are_found(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, BYTE_LEVEL, chat_template=named)
    assert TextModel(tmp_path).chat(USER) == TextModel(tmp_path).encode("D")
    (tmp_path / "chat_template.jinja").write_text("F{{ messages | tojson }}")
    assert TextModel(tmp_path).chat(USER) == TextModel(tmp_path).encode("F" + json.dumps(USER))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(DataError, match="chat template cannot be read"):
        TextModel(tmp_path)


def test_end_tokens_are_those_of_generate(tmp_path):
    write(tmp_path, BYTE_LEVEL)
    assert TextModel(tmp_path).end_tokens == {0}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert TextModel(tmp_path).end_tokens == {3, 5}
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert TextModel(tmp_path).end_tokens == frozenset()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, r"no tokenizer\.json"),
        ("tokenizer.json", "{}", r"tokenizer\.json of"),
        ("tokenizer.json", "[" * 100_000, r"tokenizer\.json of"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "is not valid JSON"),
        ("generation_config.json", "{", "is not valid JSON"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, reason):
    write(tmp_path, BYTE_LEVEL)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=reason):
        TextModel(tmp_path)


def test_a_decoder_with_unknown_rules_is_refused_by_name(tmp_path):
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(DataError, match=r"decoder \['WordPiece'\] is not supported"):
        TextModel(write(tmp_path, tokenizer))
