"""OpenAI's own client against a node: models, a chat, the same streamed, logprobs, and JSON that follows a schema.

    pip install openai
    kvasir-node up                        # in another terminal
    python examples/openai_client.py      # or with --url and --key of another node

Exits 0 only if the streamed text equals the whole one and the JSON is of the schema. The demo model continues novels:
expect no sense of it, though its JSON is of the schema.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

import openai

PROMPT = "It is a truth"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "goose"]},
        "legs": {"type": "integer", "minimum": 2, "maximum": 4},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


def chat(client: openai.OpenAI, model: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": PROMPT}]
    return client.chat.completions.create(model=model, messages=messages, temperature=0, **more)


def whole_and_streamed(client: openai.OpenAI, model: str) -> bool:
    whole = chat(client, model, max_tokens=24).choices[0].message.content
    print(f"chat      {PROMPT} | {whole!r}")
    pieces: list[str] = []
    for chunk in chat(client, model, max_tokens=24, stream=True):
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    print(f"streamed  {len(pieces)} pieces, the same text: {''.join(pieces) == whole}")
    return "".join(pieces) == whole


def likely_tokens(client: openai.OpenAI, model: str) -> None:
    answer = chat(client, model, max_tokens=3, logprobs=True, top_logprobs=3)
    for token in answer.choices[0].logprobs.content:
        others = ", ".join(f"{each.token!r} {math.exp(each.logprob):.0%}" for each in token.top_logprobs)
        print(f"logprobs  {token.token!r}: {others}")


def animal(client: openai.OpenAI, model: str) -> bool:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    text = chat(client, model, max_tokens=64, response_format=wanted).choices[0].message.content
    try:
        found = json.loads(text)
    except ValueError:
        print(f"json      {text!r}, which is none")
        return False
    print(f"json      {json.dumps(found)}")
    kinds, legs = SCHEMA["properties"]["animal"]["enum"], found.get("legs")
    return set(found) == {"animal", "legs"} and found["animal"] in kinds and legs in (2, 3, 4)


def show(client: openai.OpenAI) -> bool:
    names = [model.id for model in client.models.list()]
    print(f"models    {', '.join(names) or 'none: this node coordinates nothing'}")
    if not names:
        return False
    is_same = whole_and_streamed(client, names[0])
    likely_tokens(client, names[0])
    return animal(client, names[0]) and is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:9480/v1")
    parser.add_argument("--key", default="none", help="api.key of the node, if it has one")
    options = parser.parse_args()
    with openai.OpenAI(base_url=options.url, api_key=options.key) as client:
        try:
            return 0 if show(client) else 1
        except openai.OpenAIError as error:
            print(f"error: {options.url}: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
