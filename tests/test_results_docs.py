"""The tables and the picture of the documentation are those of the results."""

import json
import runpy
from pathlib import Path

from PIL import Image

from torchcram.experiments.evaluation.results import read_result, read_results
from torchcram.report.markdown_tables import TRAINED_ON, TRANSFER, marked, stale

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md"]
PAGES += [ROOT / "docs" / f"{name}.md" for name in ("results", "transfer", "baselines")]


def test_tables_are_up_to_date():
    assert marked((ROOT / "docs" / "results.md").read_text())
    assert stale(PAGES, ROOT / "results") == [], (
        "make them anew: torchcram results --write README.md docs/*.md"
    )


def test_every_result_has_its_row():
    text = (ROOT / "docs" / "results.md").read_text()
    shown = {(*name.split()[0].split("/"), m) for name in marked(text) for m in name.split()[1:]}
    # in rows of their own there
    tuned = {place[:2] for place in shown if place[2].endswith(tuple(TRAINED_ON))}
    found = {
        (one.task, one.model, one.method)
        for one in read_results(ROOT / "results")
        if one.seeds[0].source is None
        if "-finetune-" not in one.method or (one.task, one.model) not in tuned
    }
    assert found
    assert found <= shown, "docs/results.md leaves out results"


def test_every_source_of_transfers_has_its_rows():
    pages = (ROOT / "docs" / name for name in ("results.md", "transfer.md"))
    words = [name.split() for page in pages for name in marked(page.read_text())]
    shown = {f"{name[1]}/{method}" for name in words if name[0] == TRANSFER for method in name[2:]}
    sources = [one.seeds[0].source for one in read_results(ROOT / "results")]
    assert {source.recipe for source in sources if source is not None} <= shown


def test_the_picture_is_up_to_date():
    curves = runpy.run_path(str(ROOT / "docs" / "accuracy.py"))["read_curves"]()
    shown = json.loads(Image.open(ROOT / "docs" / "accuracy.png").text["Description"])
    assert shown == json.loads(json.dumps(curves)), "draw it anew: python docs/accuracy.py"


def test_the_learning_rates_are_those_of_the_results():
    def text(value):
        return (
            f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 100 else f"{value:.2f}"
        )

    folder = ROOT / "results" / "learning-rates" / "wiki-paragraphs" / "smollm2-135m"
    page = (ROOT / "docs" / "language.md").read_text()
    (header,) = (line for line in page.splitlines() if line.startswith("| method | learning rate"))
    shown = [cell.strip(" `") for cell in header.strip("|").split("|")][3:]
    paths = sorted(folder.glob("*.json"))
    assert len(paths) == 6
    for path in paths:
        (seed,) = read_result(path).seeds
        rate = json.loads(path.read_text())["recipe"]["optimizer"]["lr"]
        assert float(path.stem.removeprefix("adamw-").removeprefix("cram-plus-multi-1x-")) == rate
        scores = {target.operator: target.after for target in seed.targets}
        cells = [text(seed.dense), *(text(scores[target]) for target in shown)]
        assert f"| {' | '.join(cells)} |" in page, path.name
