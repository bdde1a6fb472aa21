"""The verb `sim`: a swarm in virtual time.

It does not know how a swarm is simulated.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvasir_node.base.errors import UsageError
from kvasir_node.surfaces.exits import say

SCENARIO = "flash-crowd"
SEED = 1

sim_app = typer.Typer(rich_markup_mode=None)


@sim_app.command("sim")
def sim(
    scenario: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which; `--scenario list` names them all.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Workers; each scenario has a usual number.")
    ] = None,
    hours: Annotated[float | None, typer.Option(metavar="H", min=0, help="Virtual time that is simulated.")] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Everything that happens by chance follows from it.")
    ] = None,
    replay: Annotated[int | None, typer.Option(metavar="SEED", help="Repeats the run of that seed exactly.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """A swarm of thousands of nodes in virtual time.

    The very code decides that does so in a real one.
    """
    from kvasir_node.sim.run import simulate
    from kvasir_node.sim.scenarios import SCENARIOS

    if seed is not None and replay is not None:
        raise UsageError("--seed and --replay exclude each other: both say which run it is")
    if scenario == "list":
        rows = [
            f"{name:<12} {kind.nodes:>6} nodes {kind.hours:>4g} h  {kind.words}" for name, kind in SCENARIOS.items()
        ]
        print("\n".join(rows))
        return
    chosen = next((given for given in (replay, seed) if given is not None), SEED)
    outcome = simulate(scenario or SCENARIO, chosen, nodes, hours, _progress())
    print(json.dumps(outcome.document) if as_json else f"{outcome.timeline}\n\n{figures_text(outcome.document)}")


def _progress() -> Any:
    """Words on a terminal; a script's stderr stays empty."""
    return say if sys.stderr.isatty() else lambda _: None


def figures_text(document: dict[str, Any]) -> str:
    """The figures that are there, one a line."""
    hidden = {"schema", "phases"}
    rows = [(name, value) for name, value in document.items() if name not in hidden and value not in (None, {})]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
