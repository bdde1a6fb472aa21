"""What counts as healthy: who should be asked. It knows neither HTTP nor exit codes, and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence


def health_of(*, roles: Sequence[str], has_model: bool, is_draining: bool) -> str:
    """ok | draining | unavailable (a coordinator without a model). Warnings are no part of it."""
    if is_draining:
        return "draining"
    return "ok" if "coordinator" not in roles or has_model else "unavailable"
