"""Every parameter with every kind of wrong value: refused by name or taken, never a 500, and the next request works."""

from __future__ import annotations

import json

import pytest
from surfaces_helpers import CHAT, COMPLETE, serve, settings_with

from kvasir_node.surfaces.fake_node import FakeNode
from kvasir_node.surfaces.openai import CHAT_PARAMETERS, TEXT_PARAMETERS

BULKY = ["1" + "0" * 500, "-" + "9" * 25, json.dumps("\U0001f9ca" * 1000), "[" * 50 + "]" * 50]
VALUES = [
    "true",
    "-1",
    "0.5",
    "1e308",
    "1e999",
    "NaN",
    "[]",
    "{}",
    "[null]",
    "[-1]",
    '""',
    '"\\ud800"',
    '{"":null}',
    *BULKY,
]


@pytest.mark.parametrize(("path", "parameters"), [(CHAT, CHAT_PARAMETERS), (COMPLETE, TEXT_PARAMETERS)])
async def test_no_value_of_any_parameter_is_a_server_error(path, parameters):
    refused = 0
    content = '"messages":[{"role":"user","content":"x"}]' if path == CHAT else '"prompt":"x"'
    async with serve(FakeNode(settings_with())) as served:
        for name in sorted(parameters):
            base = "" if name in ("messages", "prompt") else f",{content}"
            model = "" if name == "model" else ',"model":"demo"'
            for value in VALUES:
                body = f'{{"{name}":{value}{model}{base}}}'.encode()
                headers = {"content-type": "application/json"}
                response = await served.client.post(path, content=body, headers=headers)
                case = (name, value[:40], response.text[:200])
                assert response.status_code in (200, 400, 404), case
                if response.status_code == 200:
                    continue
                refused += 1
                error = response.json()["error"]
                assert error["message"], case
                if error["code"] != "invalid_json":
                    assert error["param"].split("[")[0].split(".")[0] == name, case
        assert (await served.chat()).status_code == 200
    assert refused > 10 * len(parameters)  # most are wrong for most
