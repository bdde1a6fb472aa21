"""What it means for one forward that an expert is not on this machine: which rows wait for it, and whose they are.

It does not know how an expert could come.
"""

from __future__ import annotations

from collections.abc import Collection

from kvasir_node.base.errors import CapacityError


class ExpertsMissing(CapacityError):
    """An expert dispatch cannot compute some rows now, because experts of a layer that they chose are nowhere.

    `rows` are those of the forward. All other rows could be computed, by a forward of their own.
    """

    def __init__(self, layer: int, experts: Collection[int], rows: Collection[int]) -> None:
        shown = ", ".join(map(str, sorted(experts)[:5]))
        super().__init__(
            f"{'expert' if len(experts) == 1 else 'experts'} {shown}{' and more' if len(experts) > 5 else ''} of layer "
            f"{layer} not on this machine, and no worker computes {'it' if len(experts) == 1 else 'them'}; start a "
            "worker, or hold more with coordinator.hold"
        )
        self.layer = layer
        self.experts = frozenset(experts)
        self.rows = tuple(rows)


class JobsWait(CapacityError):
    """Some jobs of an engine cannot go on without these experts; their neighbours can, in the next step."""

    def __init__(self, missing: ExpertsMissing, job_ids: Collection[int]) -> None:
        super().__init__(str(missing))
        self.layer = missing.layer
        self.experts = missing.experts
        self.job_ids = tuple(job_ids)
