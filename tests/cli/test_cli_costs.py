"""torchcram costs."""

import json
from pathlib import Path

from commands import fail, succeed
from report.test_costs import RESNET, trained

from torchcram.experiments.evaluation.results import write_result


def test_the_command_reads_results_and_writes_them():
    for made in (
        trained(f"{RESNET}/cram-plus-multi", 0.9, 0.89),
        trained(f"{RESNET}/dpf-k50", 0.7),
        trained(f"{RESNET}/dpf-k70", 0.6),
    ):
        write_result(made, Path("results") / made.path)
    shown = succeed("costs", "--json", "costs.json").stdout
    assert "│ DPF         │   200 │   400 │      70.00 │      60.00 │     1 │" in shown
    (comparison,) = json.loads(Path("costs.json").read_text())["comparisons"]
    assert comparison["name"] == RESNET
    assert [cost["passes"] for cost in comparison["methods"]] == [[400, 400], [200, 400]]
    assert "| DPF | 200 | 60.00 | 1 |" in succeed("costs", "--at", "global:.7", "--markdown").stdout
    files = sorted(Path("results", RESNET).glob("dpf*.json"))
    assert "CrAM" not in succeed("costs", *files).stdout
    assert "no result has a score at nm:1:4" in fail("costs", "--at", "nm:1:4")
    assert "allowed are operators" in fail("costs", "--at", "dense")
    assert "every operator is allowed once" in fail("costs", "--at", "int4", "--at", "int4")
    assert "cannot read 'half'" in fail("costs", "--at", "half")
    assert "nowhere" in fail("costs", "nowhere")
