"""Between text and tokens: a checkpoint's tokenizer and chat template, and text that grows token by token.

It does not know the model, requests or HTTP. Chat templates come from strangers and run in jinja's sandbox. The
tokenizer is read straight from tokenizer.json: importing transformers' wrappers for it costs 4 s and adds nothing.

Decoding goes through bytes, one token at a time, so that each token costs the same and text never ends inside a
character. Bytes that are not UTF-8 become U+FFFD as in Unicode's "maximal subpart" practice, which is what both
Python and the tokenizers library do.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvasir_node.base.errors import DataError, UsageError

FILE_BYTES_MAX = 64 * 1024 * 1024
LONG_TEXT_CHARACTERS = 16_384  # from here on a text is worth a thread: 4 MB of it take seconds
STOPS_MAX = 16
STOP_CHARACTERS_MAX = 512
# What a template's own expressions can raise beside jinja's errors.
_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class TextModel:
    """The tokenizer of one checkpoint folder; may be used by several threads."""

    def __init__(self, path: str | Path) -> None:
        """Raises DataError when the folder has no tokenizer that can be read or streamed."""
        folder = Path(path)
        self._settings = _read_object(folder / "tokenizer_config.json")
        source = _read_text(folder / "tokenizer.json")
        if source is None:
            raise DataError(f"the checkpoint {folder.name} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_str(source)
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise DataError(f"tokenizer.json of {folder.name}: {str(error)[:200]}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = frozenset(
            token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self.vocabulary = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._piece = _piece_function(json.loads(source), folder.name)
        self.template = _chat_template(folder, self._settings)  # jinja source, None = no chat
        self._template = _compiled(self.template)
        self.end_tokens = frozenset(_end_tokens(folder))

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text to be continued, with whatever the tokenizer puts in front (such as a BOS)."""
        return self._ids(text, add_special_tokens=True)

    def encode_part(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that stands in the midst of another. Some tokenizers put a space in front all the same."""
        return self._ids(text, add_special_tokens=False)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Tokens of a conversation that awaits the assistant's answer.

        Each message has a `role` and a text `content`; `tools` are in OpenAI's shape, as templates expect. Raises
        UsageError (param "messages") when the messages are not like that, the model has no chat template, or its
        template refuses them.
        """
        if self._template is None:
            raise UsageError("this model has no chat template; send a prompt to be completed instead", param="messages")
        _check_messages(messages)
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=True,
                **self._special_texts(),
            )
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return self._ids(text, add_special_tokens=False)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of an answer: special tokens are left out, a leading space is kept."""
        stream = TextStream(self)
        return stream.push(tokens) + stream.finish()

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the text; nothing if it is special or unknown."""
        return b"" if token in self.special_tokens else self.token_label(token)

    def token_label(self, token: int) -> bytes:
        """As `token_bytes`, but a special token has its name; nothing if it is unknown."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        return piece.encode() if token in self.special_tokens else self._piece(piece)

    def token_id(self, name: str) -> int | None:
        """The token of this very name, if there is one."""
        return self._tokenizer.token_to_id(name)

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) < LONG_TEXT_CHARACTERS:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # As a batch of one, because `encode` keeps the interpreter's lock meanwhile: a prompt of 2 MB stopped every
        # other thread for 1.9 to 4.0 s, and for 0.02 s this way.
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _special_texts(self) -> dict[str, str]:
        """bos_token, eos_token … as templates know them."""
        texts: dict[str, str] = {}
        for key, value in self._settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                texts[key] = text
        return texts


class TextStream:
    """One answer's text as its tokens arrive. What `push` and `finish` return adds up to the whole answer.

    An answer ends where a stop string is first complete; of several that end there the longest counts. The stop
    itself and everything after it is never returned.
    """

    def __init__(self, text_model: TextModel, stops: Sequence[str] = (), shown: frozenset[int] = frozenset()) -> None:
        """`shown`: special tokens that appear by their names all the same.

        Raises UsageError (param "stop") for an empty, overlong or surplus stop string.
        """
        if len(stops) > STOPS_MAX or not all(0 < len(stop) <= STOP_CHARACTERS_MAX for stop in stops):
            raise UsageError(
                f"at most {STOPS_MAX} stop strings of 1 to {STOP_CHARACTERS_MAX} characters each are allowed",
                param="stop",
            )
        self._text_model = text_model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown = shown
        self._stops = [_StopMatcher(stop) for stop in stops]
        self.characters = 0  # of all tokens so far, certain or held
        self._held = ""  # characters that may turn out to be the beginning of a stop
        self.stopped = False

    def push(self, tokens: Iterable[int]) -> str:
        """Takes the next tokens, returns the text that is now certain; "" once stopped."""
        model, shown = self._text_model, self._shown
        data = b"".join(model.token_label(token) if token in shown else model.token_bytes(token) for token in tokens)
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """No more tokens will come: returns what was held back."""
        text = self._take(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _take(self, text: str) -> str:
        self.characters += len(text)
        if self.stopped:
            return ""
        if not self._stops:
            return text
        start = len(self._held)
        text = self._held + text
        for at in range(start, len(text)):
            matched = max(stop.advance(text[at]) for stop in self._stops)
            if matched:
                self.stopped = True
                self._held = ""
                return text[: at + 1 - matched]
        certain = len(text) - max(stop.pending for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]


class _StopMatcher:
    """Knuth-Morris-Pratt: how many characters of the stop the text read so far ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # borders[i]: longest proper prefix of stop[: i + 1] that is also its suffix
        for at in range(1, len(stop)):
            self._borders.append(self._next(self._borders[-1], stop[at]))
        self.pending = 0

    def advance(self, character: str) -> int:
        """The stop's length when this character completes it, else 0."""
        self.pending = self._next(self.pending, character)
        return len(self._stop) if self.pending == len(self._stop) else 0

    def _next(self, matched: int, character: str) -> int:
        while matched and self._stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self._stop[matched] == character)


def _piece_function(tokenizer: Mapping[str, Any], name: str) -> Callable[[str], bytes]:
    """How a token of the vocabulary becomes bytes; DataError for a decoder whose rules are not known here."""
    decoder = tokenizer.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_piece
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0].get("pattern") == {"String": "▁"}:
        return _byte_fallback_piece  # Llama's and Mixtral's; a fourth step strips the first space, which we keep
    raise DataError(f"tokenizer.json of {name}: the decoder {kinds} is not supported")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (bytes_to_unicode in its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:  # an added token is plain text
        return piece.encode()


def _byte_fallback_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            pass  # a token that merely looks like one
    return piece.replace("▁", " ").encode()


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise UsageError("messages is empty, expected at least one", param="messages")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UsageError(f"message {number} must have a role and a content, both text", param="messages")


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    template = _read_text(folder / "chat_template.jinja")
    if template is not None:
        return template
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compiled(template: str | None) -> Any:
    """The template as transformers compiles it (utils/chat_template_utils.py of 5.24), or None."""
    if template is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise DataError(f"the model's chat template cannot be read: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _end_tokens(folder: Path) -> Iterable[int]:
    """As transformers' generate chooses: generation_config.json, and only without it config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        tokens = value if isinstance(value, list) else [value]
        found = [token for token in tokens if type(token) is int]
        if found:
            return found
    return ()


def _read_object(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name} is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file.name} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_text(file: Path) -> str | None:
    """None when there is no such file."""
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"reading {file.name}: {error.strerror or error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise DataError(f"{file.name} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file.name} is not UTF-8") from error
