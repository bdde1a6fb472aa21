"""`run` as a chat: what is typed, what is remembered, and what an interrupt or a failure leaves."""

from __future__ import annotations

import io
import json
import readline
import stat
from collections.abc import Generator
from typing import Any

import pytest

from kvasir_node.base.errors import CapacityError
from kvasir_node.surfaces.chat import chat
from kvasir_node.surfaces.talk import Conversation


class ScriptedClient:
    """Answers with each of `answers` in turn; an exception among the pieces is raised there."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers, self.asked = list(answers), list[list[tuple[str, str]]]()

    def stream_chat(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        self.asked.append([(message["role"], message["content"]) for message in body["messages"]])
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield {"choices": [{"delta": {"content": piece}}]}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": {"completion_tokens": 2}, "kvasir": {"local_pairs": 7}}


@pytest.fixture
def typed(monkeypatch, tmp_path, capsys):
    """Runs a chat over these lines: (stdout without prompts, stderr, the client)."""
    readline.clear_history()

    def run_it(lines: list[str], *answers: list[Any]) -> tuple[str, str, ScriptedClient]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        client = ScriptedClient(*answers)
        chat(Conversation(client, "demo"), tmp_path / "data")  # type: ignore[arg-type]
        out, err = capsys.readouterr()
        return out.replace(">>> ", "").replace("... ", ""), err, client

    return run_it


def test_an_answer_is_part_of_the_next_question_until_it_is_cleared(typed):
    lines = ["one", "", "two", "/clear", "/system be brief", "three", "/exit", "never asked"]
    out, _, client = typed(lines, ["A", "B"], ["C"], ["D"])
    assert out == "AB\nC\nD\n"
    assert client.asked == [
        [("user", "one")],
        [("user", "one"), ("assistant", "AB"), ("user", "two")],
        [("system", "be brief"), ("user", "three")],
    ]


def test_an_interrupt_ends_the_answer_and_keeps_what_came_and_a_failure_keeps_nothing(typed):
    failures = ["A", KeyboardInterrupt()], [CapacityError("the queue is full")], [KeyboardInterrupt()], ["E"]
    out, err, client = typed(["one", "two", "three", "four"], *failures)
    assert out == "A\n\nE\n\n"  # a line after each interrupt, and one after the end of the input
    assert "error: the queue is full\n" in err
    assert client.asked[-1] == [("user", "one"), ("assistant", "A"), ("user", "four")]


def test_a_text_of_several_lines_is_one_question(typed):
    assert typed(['"""', "one", " two", '"""'], ["A"])[2].asked == [[("user", "one\n two")]]


def test_slash_words_help_save_and_say_what_is_wrong(typed, tmp_path):
    file = tmp_path / "chat.json"
    _, err, _ = typed(["/help", "one", f"/save {file}", f"/save {file}", "/save", "/nope"], ["A"])
    for word in ("/help", "/clear", "/system", "/save", "/exit", "File exists", "without a name", "/nope is not known"):
        assert word in err
    saved = json.loads(file.read_text())
    assert (saved["schema"], [each["content"] for each in saved["messages"]]) == ("kvasir.chat/1", ["one", "A"])


def test_lines_are_kept_for_their_owner_alone(typed, tmp_path):
    readline.add_history("as if typed")
    typed(["/exit"])
    history = tmp_path / "data" / "chat_history"
    assert "as if typed" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    readline.clear_history()
    typed(["/exit"])
    assert readline.get_history_item(1) == "as if typed"
