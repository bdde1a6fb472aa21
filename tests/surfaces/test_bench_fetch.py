"""`bench fetch`: real processes, its document, and its table."""

from __future__ import annotations

import json

from kvasir_node.roles.bench_fetch import FetchFigures
from kvasir_node.surfaces import cli
from kvasir_node.surfaces.bench import fetch_table


def test_bench_fetch_measures_all_ways_in_one_run(capsys):
    assert cli.run_command(["bench", "fetch", "--json", "--megabytes", "2", "--rounds", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "kvasir.bench.fetch/1"
    assert set(document["mb_s"]) == {"http", "kvasir", "kvasir_2_providers"}
    assert all(rate > 0 for rate in document["mb_s"].values())


def test_the_table_shows_ratios_to_the_plain_download():
    table = fetch_table(FetchFigures({"http": 200.0, "kvasir": 50.0, "kvasir_2_providers": 80.0}, {}, 64))
    assert "×0.25" in table
    assert "×0.40" in table
