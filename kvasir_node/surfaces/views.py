"""Parts of a node's snapshot as documents of their own. It does not know HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvasir_node.base.snapshot import ExpertLayerSnapshot, NodeSnapshot, RequestsSnapshot
from kvasir_node.surfaces.health import health_of
from kvasir_node.surfaces.verdict import verdict_of

PEERS_SCHEMA = "kvasir.peers/1"
DEMAND_SCHEMA = "kvasir.demand/1"
HEALTH_SCHEMA = "kvasir.health/1"
REQUESTS_SCHEMA = "kvasir.requests/1"
REVOKED_SCHEMA = "kvasir.revoked/1"
EXPERTS_SCHEMA = "kvasir.experts/1"


def status_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """With the verdict as `headline`: what a person reads first."""
    return {**snapshot.to_json(), "headline": verdict_of(snapshot, None).to_json()}


def peers_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    return {
        "schema": PEERS_SCHEMA,
        "peer_id": snapshot.peer_id,
        "net": asdict(snapshot.net),
        "workers": [asdict(worker) for worker in snapshot.workers],
        "members": [asdict(member) for member in snapshot.members],
        "revoked": list(snapshot.revoked),
    }


def revoked_document(snapshot: NodeSnapshot, *, changed: bool) -> dict[str, Any]:
    """Who is shut out after a request about it; `changed`: whether the request changed that."""
    return {"schema": REVOKED_SCHEMA, "changed": changed, "revoked": list(snapshot.revoked)}


def demand_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """As this node's hub sees it; `hub` null means that the node is none."""
    hub = asdict(snapshot.hub) if snapshot.hub is not None else None
    demand = hub.pop("demand") if hub is not None else []
    return {"schema": DEMAND_SCHEMA, "peer_id": snapshot.peer_id, "hub": hub, "demand": demand}


def requests_document(requests: RequestsSnapshot) -> dict[str, Any]:
    """Those under way, and how the latest ended: numbers only, no text."""
    return {"schema": REQUESTS_SCHEMA, **asdict(requests)}


def experts_document(snapshot: NodeSnapshot, layers: Sequence[ExpertLayerSnapshot]) -> dict[str, Any]:
    """Each layer's experts in columns, so that thousands of them stay small; `model` null = no coordinator."""
    model = snapshot.model
    return {
        "schema": EXPERTS_SCHEMA,
        "model": None if model is None else {"id": model.id, "name": model.name},
        "experts_per_layer": 0 if model is None else model.experts_per_layer,
        "layers": [
            {"layer": each.layer, "use": each.use, "where": each.where, "copies": each.copies} for each in layers
        ],
    }


def health_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """For load balancers: who should not be asked now. Warnings do not make it fail."""
    status = health_of(roles=snapshot.roles, has_model=snapshot.model is not None, is_draining=snapshot.draining)
    return {"schema": HEALTH_SCHEMA, "status": status, "warnings": list(snapshot.warnings)}
