"""The `bench` verbs: measured figures, each beside its baseline of the same run.

It does not know how anything is measured. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import ComputeSettings, Settings, data_dir_of, setting_keys

if TYPE_CHECKING:
    from kvasir_node.net.bench import NetFigures
    from kvasir_node.roles.bench_fetch import FetchFigures
    from kvasir_node.roles.bench_model import ModelFigures, StreamFigures

NET_SCHEMA = "kvasir.bench.net/1"
NET_SECONDS = 20.0
FETCH_SCHEMA = "kvasir.bench.fetch/1"
MODEL_SCHEMA = "kvasir.bench.model/1"
MODEL_SECONDS = 60.0
MODEL_STREAMS = "1,4,8,16,32"
STREAMS_MAX = 256
FANOUT_MODEL = "M"
FANOUT_SECONDS = 600.0
FANOUT_CONCURRENCY = "1,2,4,8,16,32"
FANOUT_CONCURRENCY_MAX = 128
FANOUT_WORKERS = "0,1,2,4,6"
FANOUT_WORKERS_MAX = 16

bench_app = typer.Typer(
    help="Measured figures, each with its baseline in the same run.", rich_markup_mode=None, no_args_is_help=True
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@bench_app.command("net")
def bench_net(
    context: typer.Context,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, max=3600, help="About how long to measure.")
    ] = NET_SECONDS,
    as_json: JsonFlag = False,
) -> None:
    """The network between two processes of this machine: round trips, bulk and calls."""
    _real_settings(context)
    import trio

    from kvasir_node.net.bench import measure

    figures = trio.run(measure, seconds, _say)
    if as_json:
        print(json.dumps(net_document(figures)))
    else:
        print(net_table(figures))


@bench_app.command("fetch")
def bench_fetch(
    context: typer.Context,
    megabytes: Annotated[int, typer.Option(metavar="N", min=1, max=4096, help="Size of what is fetched, in MiB.")] = 64,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Each way is measured this often.")] = 3,
    as_json: JsonFlag = False,
) -> None:
    """A fetch by content from one and from two processes, beside a plain HTTP download of the same bytes."""
    _real_settings(context)
    import trio

    from kvasir_node.roles.bench_fetch import measure

    figures = trio.run(measure, megabytes, rounds, _say)
    if as_json:
        print(json.dumps(fetch_document(figures)))
    else:
        print(fetch_table(figures))


@bench_app.command("model")
def bench_model(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="demo, an id or name from ls, or a path.")
    ] = None,
    make: Annotated[
        str | None, typer.Option(metavar="S|M", help="Measure a seeded checkpoint of this size; made once.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where --make puts it.")] = None,
    streams: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = MODEL_STREAMS,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, max=1024, help="node.threads by default.")] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto, float32 or bfloat16.")] = "auto",
    seconds: Annotated[
        float,
        typer.Option(metavar="S", min=0, max=86_400, help="About how long to measure, once all is loaded and warm."),
    ] = MODEL_SECONDS,
    as_json: JsonFlag = False,
) -> None:
    """Tokens per second of the engine, beside transformers' generate on the same weights and the memory's roof."""
    if make is not None and model is not None:
        raise UsageError("MODEL and --make exclude each other")
    if out is not None and make is None:
        raise UsageError("--out says where --make puts its checkpoint; give both")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UsageError(f"--dtype is auto, float32 or bfloat16; got {dtype!r}")
    counts = _counts("--streams", streams, MODEL_STREAMS, 1, STREAMS_MAX)
    settings = _real_settings(context)
    from kvasir_node.roles.bench_model import bench_folder, make_bench_checkpoint, measure
    from kvasir_node.roles.loading import thread_count

    folder = bench_folder(settings, model) if make is None else make_bench_checkpoint(settings, make, out, _say)
    figures = measure(
        folder,
        streams=counts,
        threads=thread_count(threads or settings.node.threads),
        dtype=dtype,
        prefill_chunk=settings.coordinator.prefill_chunk,
        seconds=seconds,
        say=_say,
    )
    print(json.dumps(model_document(figures)) if as_json else model_table(figures))


@bench_app.command("fanout")
def bench_fanout(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(metavar="S|M|PATH", help="A seeded checkpoint, made once, or a model of your own.")
    ] = FANOUT_MODEL,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=1,
            max=86_400,
            help="About how long to measure, once nodes have started; less = fewer points.",
        ),
    ] = FANOUT_SECONDS,
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = FANOUT_CONCURRENCY,
    workers: Annotated[str, typer.Option(metavar="N,N,…", help="Emulated workers; 0 = none.")] = FANOUT_WORKERS,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting, of all nodes.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the curves are drawn.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokens per second with workers, real and emulated, beside the coordinator alone and what could be at best."""
    counts = _counts("--concurrency", concurrency, FANOUT_CONCURRENCY, 1, FANOUT_CONCURRENCY_MAX)
    overrides = dict(_assignment(each) for each in set_ or ())
    devices = _counts("--workers", workers, FANOUT_WORKERS, 0, FANOUT_WORKERS_MAX)
    settings = _real_settings(context)
    from kvasir_node.model.bench_checkpoint import SIZES
    from kvasir_node.roles.bench_fanout import Plan, measure
    from kvasir_node.roles.bench_model import bench_folder, make_bench_checkpoint
    from kvasir_node.surfaces.bench_fanout import fanout_document, fanout_png, fanout_table

    is_made = model in SIZES
    folder = make_bench_checkpoint(settings, model, None, _say) if is_made else bench_folder(settings, model)
    cache = data_dir_of(settings).absolute() / "cache" / "bench"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that no node stays behind
    figures = measure(Plan(folder, seconds, tuple(counts), tuple(devices), overrides), cache, _say)
    png = png or cache / f"fanout-{folder.name}.png"
    png.write_bytes(fanout_png(figures))
    _say(f"the curves are in {png}")
    print(json.dumps(fanout_document(figures, str(png))) if as_json else fanout_table(figures))


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or key not in setting_keys() or key.startswith("compute."):
        raise UsageError(f"--set takes section.key=value, of any section but compute; got {text!r}", param="set")
    return key, value


def _counts(flag: str, text: str, example: str, least: int, most: int) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and least <= int(part) <= most for part in parts):
        raise UsageError(f"{flag} is a list like {example}, each from {least} to {most}; got {text!r}")
    return [int(part) for part in parts]


def _real_settings(context: typer.Context) -> Settings:
    """Of a machine that shows its real speed: figures of an emulated one would be taken for those of this one."""
    settings: Settings = context.obj.settings()
    if settings.compute != ComputeSettings():
        raise UsageError(
            f"compute.slowdown is {settings.compute.slowdown:g} and compute.answer_delay_s "
            f"{settings.compute.answer_delay_s:g}: this machine emulates another one, and figures of its speed would "
            "be wrong; set them to 1 and 0"
        )
    return settings


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


def model_document(figures: ModelFigures) -> dict[str, Any]:
    return {
        "schema": MODEL_SCHEMA,
        "model": figures.model,
        "dtype": figures.dtype,
        "threads": figures.threads,
        "read_gb_s": round(figures.read_gb_s, 2),
        "prompt_tokens": figures.prompt_tokens,
        "decode_steps": figures.decode_steps,
        "interleaved": figures.is_interleaved,
        "streams": {
            str(count): _stream_document(each, figures.roof_tokens_s(count)) for count, each in figures.streams.items()
        },
    }


def _stream_document(figures: StreamFigures, roof_tokens_s: float) -> dict[str, Any]:
    spent, sides = figures.profile, tuple(figures.bursts)
    return {
        "decode_tokens_s": {
            **{side: round(figures.decode_tokens_s(side), 1) for side in sides},
            "roof": round(roof_tokens_s, 1),
        },
        "prefill_tokens_s": {side: round(figures.prefill_tokens_s(side), 1) for side in sides},
        "decode_rounds_tokens_s": {side: _rounded(figures.decode_rounds(side)) for side in sides},
        "prefill_rounds_tokens_s": {side: _rounded(figures.prefill_rounds(side)) for side in sides},
        "step_ms": {
            "trunk": round(1e3 * spent.trunk_s, 3),
            "experts": round(1e3 * spent.experts_s, 3),
            "rest": round(1e3 * spent.rest_s, 3),
        },
        "experts_read_per_layer": round(spent.experts_read, 2),
        "touched_bytes": round(spent.touched_bytes),
        "transformers_experts": figures.experts_implementation,
    }


def _rounded(rates: list[float]) -> list[float]:
    return [round(rate, 1) for rate in rates]


def model_table(figures: ModelFigures) -> str:
    """Lines for a person: medians with (least–most) of the rounds; ratios are to transformers."""
    turns = "both in turns" if figures.is_interleaved else "one after the other: no room for both"
    lines = [
        f"{figures.model}, {figures.dtype}, {figures.threads} thread(s), memory read at {figures.read_gb_s:.1f} GB/s",
        f"prompts of {figures.prompt_tokens} tokens, {figures.decode_steps} steps, {turns}",
        f"{'decode, tokens/s':<16}{'kvasir':>22}{'transformers':>22}{'ratio':>7}{'of the roof':>13}",
    ]
    for count, each in figures.streams.items():
        ours, theirs = (_with_range(each.decode_rounds(side)) for side in each.bursts)
        share = each.decode_tokens_s("kvasir") / figures.roof_tokens_s(count)
        lines.append(f"  {_requests(count):<14}{ours:>22}{theirs:>22}{_ratio(each, 'decode'):>7}{share:>13.0%}")
    lines.append("prefill, tokens/s")
    for count, each in figures.streams.items():
        ours, theirs = (_with_range(each.prefill_rounds(side)) for side in each.bursts)
        lines.append(f"  {_requests(count):<14}{ours:>22}{theirs:>22}{_ratio(each, 'prefill'):>7}")
    lines.append(f"{'a step of ours, ms':<18}{'trunk':>10}{'experts':>10}{'rest':>10}   experts read in a layer")
    for count, each in figures.streams.items():
        spent = each.profile
        parts = "".join(f"{1e3 * part:>10.2f}" for part in (spent.trunk_s, spent.experts_s, spent.rest_s))
        lines.append(f"  {_requests(count):<16}{parts}{spent.experts_read:>10.1f}")
    return "\n".join(lines)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _with_range(rates: list[float]) -> str:
    digits = 1 if max(rates) < 1000 else 0  # 22 cells hold three numbers, and nobody needs tenths of thousands
    return f"{median(rates):.{digits}f} ({min(rates):.{digits}f}–{max(rates):.{digits}f})"


def _ratio(figures: StreamFigures, kind: str) -> str:
    rate = figures.decode_tokens_s if kind == "decode" else figures.prefill_tokens_s
    return f"×{rate('kvasir') / rate('transformers'):.2f}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
