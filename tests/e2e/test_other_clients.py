"""Programs that people use with such an API, as they are: OpenAI's npm client, litellm, and the llm command line.

Each runs in a process of its own and must give the answer that the API itself gives. `pip install -e '.[clients]'`
brings the two that are Python's; the other one is fetched by npm.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from local_swarm import PROMPTS, node

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "js" / "openai_client.mjs"
ASKED = {"model": "demo", "max_tokens": 24, "temperature": 0}
NO_PROXY = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
LITELLM = """
import json, sys, litellm
asked = dict(model="openai/demo", api_base=sys.argv[1], api_key="none", max_tokens=24, temperature=0, num_retries=0,
             messages=[{"role": "user", "content": sys.argv[2]}])
whole = litellm.completion(**asked)
chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
try:
    litellm.completion(**asked | {"temperature": 9})
    refused = None
except litellm.BadRequestError as error:
    refused = {"kind": "BadRequestError", "status": error.status_code, "words": str(error)}
print(json.dumps({"text": whole.choices[0].message.content, "streamed": streamed,
                  "tokens": whole.usage.completion_tokens, "refused": refused}))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with node(tmp_path_factory.mktemp("clients"), "node", "--role", "coordinator", "--slots", "2") as running:
        yield f"{running.ready['api']}/v1"


@pytest.fixture(scope="module")
def truth(url) -> str:
    body = {**ASKED, "messages": [{"role": "user", "content": PROMPTS[0]}]}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]["content"]


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **NO_PROXY, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install -e '.[clients]'")


def test_openais_npm_client(url, truth, tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    run("npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "openai@^6", folder=tmp_path)
    shutil.copy(SCRIPT, tmp_path)
    seen = json.loads(run("node", SCRIPT.name, url, PROMPTS[0], folder=tmp_path))
    assert seen["text"] == seen["streamed"] == truth
    assert (seen["usage"]["completion_tokens"], seen["models"]) == (24, ["demo"])
    assert seen["facts"]["local_pairs"] > 0
    assert seen["refused"] == {"kind": "BadRequestError", "status": 400, "param": "temperature"}


def test_litellm(url, truth, tmp_path):
    need("litellm")
    seen = json.loads(run(sys.executable, "-c", LITELLM, url, PROMPTS[0], folder=tmp_path).splitlines()[-1])
    assert seen["text"] == seen["streamed"] == truth
    assert seen["tokens"] == 24
    assert (seen["refused"]["kind"], seen["refused"]["status"]) == ("BadRequestError", 400)
    assert "temperature must be a number from 0 to 2, got 9" in seen["refused"]["words"]


@pytest.mark.parametrize("streaming", [True, False])
def test_the_llm_command(url, truth, tmp_path, streaming):
    need("llm")
    models = f"- model_id: kvasir\n  model_name: demo\n  api_base: {url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    options = ["-o", "max_tokens", "24", "-o", "temperature", "0", *([] if streaming else ["--no-stream"])]
    command = (sys.executable, "-m", "llm", "-m", "kvasir", *options, PROMPTS[0])
    said = run(*command, folder=tmp_path, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none")
    assert said.strip() == truth.strip()
