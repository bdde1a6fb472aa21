"""The `bench` verbs: measured figures, each beside its baseline of the same run.

It does not know how anything is measured. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvasir_node.net.bench import NetFigures
    from kvasir_node.roles.bench_fetch import FetchFigures

NET_SCHEMA = "kvasir.bench.net/1"
NET_SECONDS = 20.0
FETCH_SCHEMA = "kvasir.bench.fetch/1"

bench_app = typer.Typer(
    help="Measured figures, each with its baseline in the same run.", rich_markup_mode=None, no_args_is_help=True
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@bench_app.command("net")
def bench_net(
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="About how long to measure.")] = NET_SECONDS,
    as_json: JsonFlag = False,
) -> None:
    """The network between two processes of this machine: round trips, bulk and calls."""
    import trio

    from kvasir_node.net.bench import measure

    figures = trio.run(measure, seconds, _say)
    if as_json:
        print(json.dumps(net_document(figures)))
    else:
        print(net_table(figures))


@bench_app.command("fetch")
def bench_fetch(
    megabytes: Annotated[int, typer.Option(min=1, max=4096, help="Size of what is fetched, in MiB.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Each way is measured this often.")] = 3,
    as_json: JsonFlag = False,
) -> None:
    """A fetch by content from one and from two processes, beside a plain HTTP download of the same bytes."""
    import trio

    from kvasir_node.roles.bench_fetch import measure

    figures = trio.run(measure, megabytes, rounds, _say)
    if as_json:
        print(json.dumps(fetch_document(figures)))
    else:
        print(fetch_table(figures))


def fetch_document(figures: FetchFigures) -> dict[str, Any]:
    return {
        "schema": FETCH_SCHEMA,
        "mb_s": figures.mb_s,
        "rounds_mb_s": figures.rounds_mb_s,
        "megabytes": figures.megabytes,
    }


def fetch_table(figures: FetchFigures) -> str:
    """Lines for a person; ratios are to the plain HTTP download."""
    baseline = figures.mb_s["http"]
    lines = [f"{figures.megabytes} MiB, verified and on the disk, MB/s"]
    lines += [f"  {way:<20}{rate:>8.0f}   ×{rate / baseline:.2f}" for way, rate in figures.mb_s.items()]
    return "\n".join(lines)


def net_document(figures: NetFigures) -> dict[str, Any]:
    return {
        "schema": NET_SCHEMA,
        "rtt_16k_us": figures.rtt_16k_us,
        "bulk_mb_s": figures.bulk_mb_s,
        "calls_per_s": figures.calls_per_s,
        "call_under_bulk_us": figures.call_under_bulk_us,
    }


def net_table(figures: NetFigures) -> str:
    """Lines for a person; ratios are to plain TCP, or to the line above where there is no such baseline."""
    plain_us, plain_mb_s = figures.rtt_16k_us["plain_tcp"], figures.bulk_mb_s["plain_tcp"]
    one, many = figures.calls_per_s.values()
    idle, busy = figures.call_under_bulk_us["idle"], figures.call_under_bulk_us["busy"]
    lines = ["16 KiB there and back, µs (ours: one call)"]
    lines += [f"  {name:<14}{us:>10.0f}   ×{us / plain_us:.2f}" for name, us in figures.rtt_16k_us.items()]
    lines += ["bulk one way, MB/s"]
    lines += [f"  {name:<14}{rate:>10.0f}   ×{rate / plain_mb_s:.2f}" for name, rate in figures.bulk_mb_s.items()]
    lines += ["calls of 16 KiB per second", f"  {'one at a time':<14}{one:>10.0f}"]
    lines += [f"  {'64 in flight':<14}{many:>10.0f}   ×{many / one:.2f}"]
    lines += [
        "one call, µs",
        f"  {'idle':<14}{idle:>10.0f}",
        f"  {'beside bulk':<14}{busy:>10.0f}   ×{busy / idle:.2f}",
    ]
    return "\n".join(lines)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
