"""Log lines: both formats, levels, and that nobody can forge one."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import LOG_PARTS, LogSettings, load_settings
from kvasir_node.surfaces.log import PANE_LINES_MAX, PARTS, pane, set_up_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("kvasir_node", *(f"kvasir_node.{name}" for names in PARTS.values() for name in names)):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.captureWarnings(False)


def logged(level: str, format_: str) -> list[str]:
    stream = io.StringIO()
    set_up_logging(LogSettings(level, format_), stream=stream)
    ours, theirs = logging.getLogger("kvasir_node.roles.hub"), logging.getLogger("hypercorn")
    ours.debug("small")
    ours.warning("peer %s said %s", "\x1b[2Jevil", "one\ntwo")
    theirs.info("chatter")
    theirs.error("trouble")
    return stream.getvalue().splitlines()


def test_json_lines_have_the_fields():
    records = [json.loads(line) for line in logged("info", "json")]
    assert [(r["level"], r["logger"]) for r in records] == [
        ("warning", "kvasir_node.roles.hub"),
        ("error", "hypercorn"),
    ]
    assert records[0]["message"] == "peer ?[2Jevil said one two"
    assert records[0]["ts"].endswith("+00:00")


def test_console_lines_are_one_a_record():
    lines = logged("debug", "console")
    assert len(lines) == 3
    assert lines[1].endswith("warning roles.hub: peer ?[2Jevil said one two")


def test_auto_is_json_where_there_is_no_terminal():
    assert all(json.loads(line) for line in logged("info", "auto"))


def test_a_part_has_a_level_of_its_own_and_the_others_follow_that_of_all():
    for levels, heard in (("warning,net=debug,market=error", ["net.mdns", "roles.reaching"]), ("error", [])):
        stream = io.StringIO()
        set_up_logging(LogSettings(levels, "json"), stream=stream)
        for name in ("net.mdns", "roles.reaching", "roles.hub", "roles.crew"):
            logging.getLogger(f"kvasir_node.{name}").info("x")
        assert [json.loads(line)["logger"] for line in stream.getvalue().splitlines()] == [
            f"kvasir_node.{name}" for name in heard
        ]


@pytest.mark.parametrize("level", ["loud", "net=debug,x=info", "net=", "=debug", ""])
def test_a_level_that_is_none_is_told_with_the_parts_that_there_are(level):
    with pytest.raises(UsageError, match="parts: api, fanout, market, model, net, store"):
        load_settings(flags={"log.level": level})


def test_parts_name_modules_that_there_are():
    assert tuple(sorted(PARTS)) == LOG_PARTS
    for name in (name for names in PARTS.values() for name in names):
        assert importlib.util.find_spec(f"kvasir_node.{name}") is not None, name


def test_a_traceback_is_kept_in_one_json_line():
    stream = io.StringIO()
    set_up_logging(LogSettings("info", "json"), stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("kvasir_node").exception("failed")
    assert "ValueError: boom" in json.loads(stream.getvalue())["exception"]


def test_the_pane_keeps_the_newest():
    lines = pane()
    set_up_logging(LogSettings("info", "auto"), lines=lines)
    for index in range(PANE_LINES_MAX + 5):
        logging.getLogger("kvasir_node").info("line %d", index)
    assert len(lines) == PANE_LINES_MAX
    assert lines[-1].endswith(f"line {PANE_LINES_MAX + 4}")
