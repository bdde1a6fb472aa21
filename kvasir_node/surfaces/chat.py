"""`run` as a chat on a terminal: lines with editing and history, words that begin with `/`, and interrupts.

It does not know HTTP: a Conversation asks. Ctrl-C ends the answer, and what came of it stays part of the chat; at
the prompt it drops the line. Ctrl-D leaves. A request that fails is told, and the chat goes on.
"""

from __future__ import annotations

import json
import os
import readline
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvasir_node.base.errors import KvasirError
from kvasir_node.surfaces.exits import say
from kvasir_node.surfaces.talk import Conversation

PROMPT, MORE = ">>> ", "... "
BLOCK = '"""'
HISTORY_NAME, HISTORY_LINES_MAX = "chat_history", 1000
HELP = {
    "/help": "this list",
    "/clear": "forget what was said; the system text stays",
    "/system [TEXT]": "what the model is told before all else; without TEXT: show it",
    "/save FILE": "write the chat as JSON",
    "/exit": "leave (so does Ctrl-D)",
}
_WORDS = tuple(each.partition(" ")[0] for each in HELP)
_HINT = 'Ctrl-C stops an answer. """ begins and ends a text of several lines.'


def chat(talk: Conversation, data_dir: Path) -> None:
    """Until `/exit` or the end of the input. Lines are kept in the data directory, which only its owner may read."""
    say("/help tells what can be typed; Ctrl-D leaves")
    with _history(data_dir):
        for text in _texts():
            if text.startswith("/"):
                if text == "/exit":
                    return
                _obey(talk, text)
            else:
                _answer(talk, text)


def _answer(talk: Conversation, text: str) -> None:
    try:
        talk.ask(text, sys.stdout)
    except KeyboardInterrupt:
        print()
    except KvasirError as error:
        say(f"error: {error}")


def _obey(talk: Conversation, text: str) -> None:
    word, _, rest = (part.strip() for part in text.partition(" "))
    if word == "/help":
        say("\n".join([*(f"{name:<16}{meaning}" for name, meaning in HELP.items()), _HINT]))
    elif word == "/clear":
        talk.messages.clear()
    elif word == "/system":
        talk.system = rest or talk.system
        say(f"system: {talk.system or 'nothing'}")
    elif word == "/save":
        _save(talk, rest)
    else:
        say(f"{word} is not known; /help tells what is")


def _save(talk: Conversation, name: str) -> None:
    try:
        with open(os.path.expanduser(name), "x", encoding="utf-8") as file:
            json.dump(talk.document(), file, ensure_ascii=False, indent=2)
            file.write("\n")
    except OSError as error:
        say(f"cannot write {name or 'a file without a name'}: {error.strerror}")
    else:
        say(f"saved in {name}")


def _texts() -> Iterator[str]:
    """What was typed, without blank ones; ends with the input."""
    while True:
        try:
            text = _block() if (line := input(PROMPT).strip()) == BLOCK else line
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if text:
            yield text


def _block() -> str:
    lines: list[str] = []
    while (line := input(MORE)).strip() != BLOCK:
        lines.append(line)
    return "\n".join(lines)


@contextmanager
def _history(data_dir: Path) -> Iterator[None]:
    """Kept only where it can be: a chat does not need it."""
    path = data_dir / HISTORY_NAME
    with suppress(OSError):
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES_MAX)
    readline.set_completer(_complete)
    readline.set_completer_delims("")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with suppress(OSError):
            readline.write_history_file(path)


def _complete(text: str, number: int) -> str | None:
    return next(iter([word for word in _WORDS if text and word.startswith(text)][number:]), None)
