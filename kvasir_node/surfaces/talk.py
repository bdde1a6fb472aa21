"""`run`: one answer or a chat on the terminal, through a running node or a private one that ends with it.

It does not know HTTP (client.py does) nor what a node is made of: the private one is a process of its own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO

from kvasir_node.base.errors import CapacityError, UsageError
from kvasir_node.store.catalog import DEMO
from kvasir_node.surfaces.client import NodeClient
from kvasir_node.surfaces.progress import waiting
from kvasir_node.surfaces.signals import handled

ANSWER_SCHEMA = "kvasir.answer/1"
CHAT_SCHEMA = "kvasir.chat/1"
READY_TIMEOUT_S = 120.0  # loading a model from a slow disk
STOP_TIMEOUT_S = 15.0
LOG_TAIL_CHARACTERS = 2000


@dataclass
class Said:
    """One answer: its text so far, and what its last chunks tell of it."""

    model: str
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "schema": ANSWER_SCHEMA,
            "model": self.model,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "kvasir": self.facts,
        }


@dataclass
class Conversation:
    """Messages so far and the options of every answer; `model` None = the first that the node serves."""

    client: NodeClient
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    system: str = ""

    def ask(self, text: str, out: TextIO | None = None) -> Said:
        """Streams one answer to `out`, and keeps it for the next question; also what came before an interrupt."""
        said = Said(self._model_name())
        question = {"role": "user", "content": text}
        told = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": said.model, "messages": [*told, *self.messages, question], **self.options}
        try:
            with closing(self.client.stream_chat({**body, "stream_options": {"include_usage": True}})) as chunks:
                for chunk in chunks:
                    _show(_heard(said, chunk), out)
            _show("\n", out)
        finally:
            if said.text:
                self.messages += [question, {"role": "assistant", "content": said.text}]
        return said

    def document(self) -> dict[str, Any]:
        return {
            "schema": CHAT_SCHEMA,
            "model": self.model,
            "system": self.system,
            "messages": self.messages,
            "options": self.options,
        }

    def _model_name(self) -> str:
        if self.model is None:
            models = self.client.get("/v1/models")["data"]
            if not models:
                raise CapacityError(f"the node at {self.client.url} serves no model: it is no coordinator")
            self.model = models[0]["id"]
        return str(self.model)


def _heard(said: Said, chunk: dict[str, Any]) -> str:
    """Adds a chunk to the answer; its new text."""
    said.usage = chunk.get("usage") or said.usage
    said.facts = chunk.get("kvasir") or said.facts
    text = ""
    for choice in chunk.get("choices") or ():
        text += choice.get("delta", {}).get("content") or ""
        said.finish_reason = choice.get("finish_reason") or said.finish_reason
    said.text += text
    return text


def _show(text: str, out: TextIO | None) -> None:
    if out is not None and text:
        out.write(text)
        out.flush()


@contextmanager
def private_node(model: Path | None, data_dir: Path | None = None, *, no_color: bool = False) -> Iterator[str]:
    """The URL of a node that lives as long as the context, on loopback, with its own data directory.

    `model` is a checkpoint's folder, as a new data directory knows no names; None = the embedded model. Raises
    CapacityError with the end of the node's log when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="kvasir-run-") as folder, open(Path(folder) / "log", "w+b") as log:
        command = _private_command(model, data_dir or Path(folder) / "data")
        # In a group of its own: a terminal's Ctrl-C is for the answer, not for the node.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, process_group=0
        )
        try:
            # SIGTERM and SIGHUP (the terminal is gone) become SystemExit, so that the private node ends with us.
            with handled((signal.SIGTERM, signal.SIGHUP), _exit):
                with waiting(lambda: "starting a private node", no_color=no_color):
                    url = _url_when_ready(process, log)
                yield url
        finally:
            _stop(process)


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _private_command(model: Path | None, data_dir: Path) -> list[str]:
    options = ["--headless", "--role", "coordinator", "--api", "127.0.0.1:0", "--listen", "/ip4/127.0.0.1/tcp/0"]
    command = [sys.executable, "-P", "-m", "kvasir_node", "--data-dir", str(data_dir), "up", *options]
    return [*command, "--", DEMO if model is None else str(model)]


def _url_when_ready(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    assert process.stdout is not None
    overdue = threading.Timer(READY_TIMEOUT_S, process.kill)  # ends the readline below
    overdue.start()
    try:
        line = process.stdout.readline()
    finally:
        overdue.cancel()
    try:
        return str(json.loads(line)["api"])
    except (ValueError, KeyError, TypeError) as error:
        log.seek(0)
        tail = log.read().decode("utf-8", "replace")[-LOG_TAIL_CHARACTERS:].strip()
        if process.wait() == UsageError.exit_code:
            raise UsageError(tail.removeprefix("error: ")) from error
        raise CapacityError(f"a private node did not start: {tail}") from error


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
