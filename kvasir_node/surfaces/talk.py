"""`run`: one answer or a chat on the terminal, through a running node or a private one that ends with it.

It does not know HTTP (client.py does) nor what a node is made of: the private one is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from kvasir_node.base.errors import CapacityError, UsageError
from kvasir_node.store.catalog import DEMO
from kvasir_node.surfaces.client import NodeClient

READY_TIMEOUT_S = 120.0  # loading a model from a slow disk
STOP_TIMEOUT_S = 15.0
LOG_TAIL_CHARACTERS = 2000


@dataclass
class Conversation:
    """Messages so far and the options of every answer; `model` None = the first that the node serves."""

    client: NodeClient
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, out: TextIO) -> None:
        """Streams one answer to `out`, and keeps it for the next question."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self._model_name(), "messages": asked, **self.options}
        parts: list[str] = []
        with closing(self.client.stream_chat(body)) as chunks:
            for part in filter(None, map(_text_of, chunks)):
                parts.append(part)
                out.write(part)
                out.flush()
        out.write("\n")
        out.flush()
        self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]

    def chat(self, lines: Iterator[str], out: TextIO) -> None:
        """One answer for every line that is not blank."""
        for line in lines:
            if line.strip():
                self.ask(line.strip(), out)

    def _model_name(self) -> str:
        if self.model is None:
            models = self.client.get("/v1/models")["data"]
            if not models:
                raise CapacityError(f"the node at {self.client.url} serves no model: it is no coordinator")
            self.model = models[0]["id"]
        return str(self.model)


def _text_of(chunk: dict[str, Any]) -> str | None:
    choices = chunk.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content")


@contextmanager
def private_node(model: Path | None, data_dir: Path | None = None) -> Iterator[str]:
    """The URL of a node that lives as long as the context, on loopback, with its own data directory.

    `model` is a checkpoint's folder, as a new data directory knows no names; None = the embedded model. Raises
    CapacityError with the end of the node's log when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="kvasir-run-") as folder, open(Path(folder) / "log", "w+b") as log:
        command = _private_command(model, data_dir or Path(folder) / "data")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        try:
            yield _url_when_ready(process, log)
        finally:
            _stop(process)


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
