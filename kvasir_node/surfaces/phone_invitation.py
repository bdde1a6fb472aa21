"""Asks a node's API for what lets one phone join, for the screen. It does not know how it is drawn."""

from __future__ import annotations

from typing import Any

import httpx

from kvasir_node.surfaces.invitation import Invitation, invite_lines

TIMEOUT_S = 5.0


def api_client(url: str, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)


async def ask_invitation(client: httpx.AsyncClient) -> Invitation:
    """Never raises for what the node does: then the words say why there is no code."""
    try:
        response = await client.post("/kvasir/v1/phone")
        document: dict[str, Any] = response.json()
        if response.status_code != 200:
            return Invitation((), (f"no phone can be invited: {document['error']['message']}",))
        *code, url, words = invite_lines(document, qr=True)
        return Invitation(tuple(code), (url, words, *map(str, document["warnings"])))
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return Invitation((), (f"no phone can be invited: {str(error) or type(error).__name__}",))
