import json

from kvasir_node.net.bench import NetFigures
from kvasir_node.surfaces.bench import net_table
from kvasir_node.surfaces.cli import run_command

FIGURES = NetFigures(
    rtt_16k_us={"plain_tcp": 100.0, "stock": 600.0, "kvasir": 180.0},
    bulk_mb_s={"plain_tcp": 2000.0, "tls": 600.0, "stock": 200.0, "kvasir": 1000.0},
    calls_per_s={"one_at_a_time": 5000.0, "in_flight_64": 20_000.0},
    call_under_bulk_us={"idle": 180.0, "busy": 900.0},
)


def test_bench_net_measures_two_real_processes(capfd):
    assert run_command(["bench", "net", "--json", "--seconds", "0.5"]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document.pop("schema") == "kvasir.bench.net/1"
    assert {kind: tuple(figures) for kind, figures in document.items()} == {
        "rtt_16k_us": ("plain_tcp", "stock", "kvasir"),
        "bulk_mb_s": ("plain_tcp", "tls", "stock", "kvasir"),
        "calls_per_s": ("one_at_a_time", "in_flight_64"),
        "call_under_bulk_us": ("idle", "busy"),
    }
    assert all(figure > 0 for figures in document.values() for figure in figures.values())
    assert "round 8 of 8" in err


def test_the_table_shows_every_figure_with_its_ratio():
    table = net_table(FIGURES)
    assert "kvasir               180   ×1.80" in table
    assert "kvasir              1000   ×0.50" in table
    assert "64 in flight       20000   ×4.00" in table
    assert "beside bulk          900   ×5.00" in table
