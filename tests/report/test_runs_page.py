import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_samples import cram, result, seed, sgd

import torchcram.report
from torchcram.experiments.io.files import slug
from torchcram.report.runs import COLOURS, runs_page
from torchcram.report.sources import Log
from torchcram.report.summary import dense, percent, points, summaries

VOID = {"meta", "br", "link", "hr", "input"}
HOSTILE = "</script><b>\"'&{{ 7 * 7 }}<!--"
LOGS = [
    Log(
        0,
        seed=0,
        records=[
            {"epoch": 1, "loss": 2.25, "accuracy": 0.25, "lr": 0.1},
            {"epoch": 2, "loss": float("nan"), "accuracy": None, "lr": 0.05},
        ],
    ),
    Log(1, seed=4, records=[{"epoch": 1, "loss": 1.5, "compressed_loss": 1.75}]),
]


class Page(HTMLParser):
    """Checks that tags are closed in order; collects texts, attributes, rows and the data."""

    def __init__(self, source):
        super().__init__()
        self.source, self.open, self.attributes, self.words = source, [], [], []
        self.rows, self.scripts = [], []
        self.feed(source)
        self.close()
        assert self.open == []
        self.rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        self.charts = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
            return
        self.words.append(data.strip())
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def page():
    other = result("sgd", [seed(0, 0.6, {"global:0.5": 0.5})], title="SGD", model="wide")
    return Page(runs_page([sgd(), cram(), other], logs=LOGS))


def test_the_page_is_well_formed(page):
    assert page.source.startswith("<!DOCTYPE html>")
    assert ("html", "lang", "en") in page.attributes
    assert any(value.startswith("width=device-width") for _, _, value in page.attributes if value)
    assert "prefers-color-scheme: dark" in page.source


def test_the_page_needs_nothing_else(page):
    assert not [name for _, name, _ in page.attributes if name in ("src", "href", "srcset")]
    assert not re.search(r"https?:|//\w+\.|@import|<link|fetch\(|XMLHttp|import\(", page.source)
    assert not re.search(r"url\((?!#)", page.source)
    policy = next(value for _, _, value in page.attributes if value and "default-src" in value)
    assert "default-src 'none'" in policy


def test_the_page_has_every_number(page):
    for one, label in ((sgd(), "SGD"), (cram(), "CrAM+-Multi")):
        assert [label, "", str(dense(one)), "", "", "40"] in page.rows
        for operator, row in summaries(one).items():
            zeros = f"{100 * row.sparsity:.1f} / {100 * row.model_sparsity:.1f}"
            numbers = [zeros, percent(row.before.mean), str(row.after), points(row.change.mean)]
            numbers.append("40")  # passes
            at = page.rows.index([operator])
            following = page.rows[at + 1 : at + 3]
            assert [label, *numbers] in following
    assert ["global:0.5", "50.0 / 49.5", "30.00", "50.00", "-10.00", "40"] in page.rows


def test_the_page_has_the_recipe_the_machine_and_every_seed(page):
    assert {"cram.rho", "0.15", "global:0.5, global:0.9", "null", "Abacus 3", "9.8.7"} <= set(
        page.words
    )
    assert {"Seed 1", "Seed 4", "Seed 6"} <= set(page.words)
    for one in cram().seeds:
        for target in one.targets:
            said = f"{percent(target.before)} as is, {percent(target.after)} after BNT"
            assert said in page.words
    assert "cifar/net/cram-plus, 3 seeds, 20 epochs, 40 passes, 2.0 min each" in page.words


def test_curves_begin_dense_and_follow_global_sparsity(page):
    plain, aware = page.charts[0]["series"]
    assert (plain["name"], aware["name"]) == ("SGD", "CrAM+-Multi")
    assert [point["x"] for point in plain["points"]] == pytest.approx([0, 50, 95])
    assert [point["y"][0] for point in plain["points"]] == pytest.approx([88.7, 88.31, 24])
    assert [point["y"][1] for point in plain["points"]] == pytest.approx([0, -0.39, -64.7])
    assert [point["std"] for point in plain["points"]] == [[0, 0]] * 3
    assert [point["std"][0] for point in aware["points"]] == pytest.approx([1, 0, 1])
    assert [point["std"][1] for point in aware["points"]] == pytest.approx([0, 1, 0], abs=1e-9)
    assert aware["points"][2]["text"] == [
        ["operator", "global:0.9"],
        ["before BNT", "68.00 %"],
        ["after BNT", "88.00 ± 1.00 %"],
        ["change from dense", "-2.00"],
    ]


def dpf(target="global:0.9", scores=None):
    """A model that was trained sparse."""
    seeds = [seed(0, 0.85, {target: 0.86, "global:0.95": 0.4} if scores is None else scores)]
    trained = result("dpf", seeds, title="DPF, trained for it", cram=None)
    return replace(trained, recipe={**trained.recipe, "method": {"name": "dpf", "target": target}})


def test_a_model_that_was_trained_sparse_is_shown_at_its_target():
    page = Page(runs_page([sgd(), dpf()]))
    plain, sparse = page.charts[0]["series"]
    assert plain["points"][0]["x"] == 0
    assert [(point["x"], point["y"][0]) for point in sparse["points"]] == [(90, 86), (95, 40)]
    assert sparse["points"][0]["text"] == [["operator", "global:0.9"], ["accuracy", "86.00 %"]]
    at = page.rows.index(["dense"])
    assert [row[0] for row in page.rows[at + 1 : at + 3]] == ["SGD", "global:0.5"]
    at = page.rows.index(["global:0.9"])
    cells = ["DPF, trained for it", "90.0 / 89.1", "85.00", "86.00", "", "20"]
    assert page.rows[at + 1] == cells
    assert "as trained" in page.words
    assert any("trained for one target are in its row" in text for text in page.words)


def test_a_page_of_sparse_models_alone_has_no_dense_row():
    alone = Page(runs_page([dpf(scores={"global:0.95": 0.4})]))
    assert ["global:0.9", "", "85.00", "", "", "20"] in alone.rows
    assert not [row for row in alone.rows if row[0] == "dense"]
    assert alone.charts[0]["series"][0]["points"][0]["x"] == pytest.approx(90)
    both = Page(runs_page([dpf(), dpf("global:0.5", {})]))
    assert ["dense"] not in both.rows
    pattern = Page(runs_page([dpf("nm:2:4", {})]))  # which has no place along the axis
    assert pattern.charts[0]["series"][0]["points"] == []
    assert ["nm:2:4", "", "85.00", "", "20"] in pattern.rows  # nothing was tuned


def test_a_page_without_sparse_models_does_not_speak_of_them(page):
    assert "as trained" not in page.words
    assert not any("trained for one target" in text for text in page.words)


def test_a_method_looks_the_same_everywhere(page):
    first, second, training = page.charts
    assert [one["style"] for one in first["series"]] == [0, 1]
    assert [one["style"] for one in second["series"]] == [0]
    assert [one["style"] for one in training["series"]] == [0, 1]
    figures = [value for _, name, value in page.attributes if name == "data-chart"]
    assert figures == ["0", "1", "2"]


def test_training_curves_have_the_names_and_looks_of_their_runs():
    long = replace(sgd(), recipe={**sgd().recipe, "train": {"epochs": 200}})
    seeds = replace(sgd(), seeds=(seed(0, 0.8, {}), seed(1, 0.8, {})))
    other = replace(sgd(), model="wide")
    record = [{"epoch": 1, "loss": 1.0}]
    logs = [Log(1, 0, record), Log(1, 1, record), Log(0, 0, record)]

    def curves(results, logs):
        chart = Page(runs_page(results, logs=logs)).charts[-1]
        return [(one["name"], one["style"]) for one in chart["series"]]

    mine, theirs = "SGD (train.epochs=20, train.batch_size=128)", "SGD (train.epochs=200"
    (first, one), (second, two), (third, three) = curves([long, seeds], logs)
    assert (first, second) == (f"{mine}, seed 0", f"{mine}, seed 1")
    assert third.startswith(theirs)
    assert (one, two, three) == (1, 1, 0)
    assert curves([sgd(), other], [Log(0, 0, record), Log(1, 0, record)]) == [
        ("cifar / net: SGD", 0),
        ("cifar / wide: SGD", 0),
    ]


def test_training_curves_show_what_was_logged(page):
    training = page.charts[2]
    assert [view["name"] for view in training["views"]] == [
        "accuracy",
        "loss",
        "compressed loss",
        "lr",
    ]
    plain, further = training["series"]
    assert [point["y"] for point in plain["points"]] == [
        [25, 2.25, None, 0.1],
        [None, None, None, 0.05],
    ]
    assert further["points"][0]["y"] == [None, 1.5, 1.75, None]
    text = [["epoch", "1"], ["accuracy", "25.00 %"], ["loss", "2.2500"], ["lr", "0.1"]]
    assert plain["points"][0]["text"] == text
    assert training["x"]["max"] == 2


def test_an_epoch_logged_twice_counts_once():
    records = [{"epoch": 1, "loss": 9.0}, {"epoch": 2, "loss": 8.0}, {"epoch": 2, "loss": 7.0}]
    (curve,) = Page(runs_page([sgd()], logs=[Log(0, 0, records)])).charts[1]["series"]
    assert [(point["x"], point["y"]) for point in curve["points"]] == [(1, [9.0]), (2, [7.0])]


@pytest.mark.parametrize("epoch", [None, "3", 1.5])
def test_a_record_without_an_epoch_is_refused(epoch):
    with pytest.raises(ValueError, match="SGD: record 1 of the log has epoch="):
        runs_page([sgd()], logs=[Log(0, 0, [{"epoch": 1}, {"epoch": epoch, "loss": 1.0}])])


def test_a_short_training_has_seconds():
    short = replace(sgd(), seeds=(replace(sgd().seeds[0], seconds=7.4),))
    words = Page(runs_page([short])).words
    assert "cifar/net/sgd, 1 seed, 20 epochs, 40 passes, 7 s" in words
    assert "7 s" in words
    words = Page(runs_page([cram()])).words
    assert "cifar/net/cram-plus, 3 seeds, 20 epochs, 40 passes, 2.0 min each" in words
    assert "3.0 min" in words


def test_a_page_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        runs_page([])


def test_without_logs_there_is_no_training_chart():
    alone = Page(runs_page([sgd()]))
    assert len(alone.charts) == 1
    assert "Training" not in alone.words
    assert ["nm:2:4", "13.0 / 12.9", "51.00", "71.00", "-17.70", "40"] in alone.rows


@settings(max_examples=25, deadline=None)
@given(text=st.just(HOSTILE) | st.text(min_size=1))
def test_whatever_is_given_stays_text(text):
    text = text.replace("\x00", "")
    one = replace(sgd(), title=text, data=text, recipe={text: text, "x": {"y": [text]}})
    one = replace(one, seeds=(replace(one.seeds[0], machine=text, versions={text: text}),))
    usual = Page(runs_page([sgd()], logs=[Log(0, 0, [])]))
    page = Page(runs_page([one], title=text, logs=[Log(0, 0, [{"epoch": 1, "loss": 1}])]))
    tags = re.compile(r"<(script|b|style|figure)\b")
    assert tags.findall(page.source) == tags.findall(usual.source)
    assert page.charts[0]["series"][0]["name"] == text
    assert page.charts[1]["series"][0]["name"] == text


def test_the_script_and_the_style_sheet_have_as_many_colours(page):
    assert f"const COLOURS = {COLOURS};" in page.source
    for number in range(COLOURS):
        assert len(re.findall(rf"--c{number}: #", page.source)) == 2  # light and dark
    assert f"--c{COLOURS}:" not in page.source


def test_script_and_style_sheet_are_whole_in_the_page(page):
    for name in ("runs.js", "runs_marks.js", "runs.css"):
        text = (Path(torchcram.report.__file__).parent / name).read_text()
        assert text.strip() in page.source


# what a person does, and what there is to see then
PROBE = """
addEventListener("load", () => setTimeout(() => {
  const found = {};
  const figure = document.querySelector("figure");
  const svg = figure.querySelector("svg");
  const tip = figure.querySelector(".tip");
  const box = svg.getBoundingClientRect();
  const lines = () => figure.querySelectorAll(".plot .line").length;
  const point = (marker) => {
    const at = marker.getBoundingClientRect();
    const [x, y] = [at.left + at.width / 2 + 3, at.top + at.height / 2 - 3];
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
  };
  found.width = innerWidth;
  found.wide = document.documentElement.scrollWidth;
  found.hidden = tip.hidden;
  found.lines = lines();
  const markers = figure.querySelectorAll(".marker");
  point(markers[markers.length - 1]);
  found.tip = tip.innerText;
  found.inside = tip.getBoundingClientRect().right <= innerWidth;
  svg.dispatchEvent(new PointerEvent("pointerleave", { pointerType: "mouse" }));
  found.left = tip.hidden;
  svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  found.first = tip.innerText;
  const [plain] = figure.querySelectorAll(".legend button");
  plain.click();
  found.pressed = plain.getAttribute("aria-pressed");
  found.without = lines();
  plain.click();
  found.again = lines();
  figure.querySelectorAll(".views button")[1].click();
  found.title = [...svg.querySelectorAll("text")].map((text) => text.textContent)
    .find((text) => text.includes("points"));
  found.ticks = [...svg.querySelectorAll("text")].map((text) => text.textContent)
    .filter((text) => /^-?[0-9.]+$/.test(text));
  parent.postMessage(JSON.stringify(found), "*");
}, 200));
"""
FRAME = """<!DOCTYPE html><iframe src="page.html" style="width: {}px; height: 900px"></iframe>
<script>addEventListener("message", (event) => {{ document.title = event.data; }});</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1100])
def test_the_charts_answer_in_a_browser(width, tmp_path):
    source = runs_page([sgd(), cram()], title=HOSTILE, logs=LOGS)
    (tmp_path / "page.html").write_text(
        source.replace("</body>", f"<script>{PROBE}</script></body>")
    )
    (tmp_path / "frame.html").write_text(FRAME.format(width))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,1000", "--dump-dom"]
    frame = (tmp_path / "frame.html").as_uri()
    line = [shutil.which("chromium"), *options, frame]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", ran.stdout)
    assert title, ran.stdout + ran.stderr
    found = json.loads(title[1].replace("&amp;", "&"))
    assert found["width"] == width
    assert found["wide"] <= width
    assert (found["hidden"], found["left"], found["inside"]) == (True, True, True)
    assert (found["lines"], found["without"], found["again"]) == (2, 1, 2)
    assert found["pressed"] == "false"
    words = found["tip"].split()
    assert words[0] == "CrAM+-Multi"
    assert {"global:0.9", "68.00", "88.00", "-2.00"} <= set(words)
    assert found["first"].split()[0] == "SGD"
    assert "dense" in found["first"]
    assert found["title"] == "change from dense, points; lower ones not shown"
    assert "-10" in found["ticks"]


def test_curves_are_called_by_the_metric_of_the_task():
    record = {"epoch": 1, "loss": 2.0, "accuracy": 0.75, "compressed_accuracy": 0.5, "metric": "F1"}
    logs = [Log(0, seed=0, records=[record])]
    chart = Page(runs_page([sgd()], logs=logs)).charts[-1]
    assert [view["label"] for view in chart["views"]][:2] == [
        "test F1, %",
        "test F1 when compressed, %",
    ]
    (point,) = chart["series"][0]["points"]
    assert point["y"][:2] == [75, 50]
    assert point["text"][1:3] == [["F1", "75.00 %"], ["compressed F1", "50.00 %"]]
    mixed = [*logs, Log(1, seed=4, records=[{"epoch": 1, "accuracy": 0.5}])]
    chart = Page(runs_page([sgd(), cram()], logs=mixed)).charts[-1]
    assert chart["views"][0]["label"] == "test F1 or accuracy, %"
    assert chart["series"][1]["points"][0]["text"][1] == ["accuracy", "50.00 %"]


def test_language_models_have_their_metric_and_no_batch_norm():
    text = {"text": {"task": "squad"}}
    one = replace(result("adam", [seed(0, 0.8, {"uniform:0.5": 0.6})], **text), metric="F1")
    page = Page(runs_page([one]))
    assert ["compressed to", "sparsity", "F1", "vs dense", "passes"] in page.rows
    assert ["uniform:0.5", "13.0 / 12.9", "60.00", "-20.00", "40"] in page.rows
    assert "Test F1 in %" in page.words
    assert "BNT" not in page.source
    assert not any("fine-tuned" in word for word in page.words)


def test_a_model_fine_tuned_at_several_targets_is_one_curve():
    def tuned(at, after, **others):
        title = f"SGD, fine-tuned at {at}"
        return result(
            f"sgd-finetune-{slug(at)}", [seed(0, 0.887, {at: after})], title=title, **others
        )

    some = [tuned("global:0.9", 0.85), tuned("global:0.5", 0.88)]
    page = Page(runs_page([sgd(), *some]))
    assert [one["name"] for one in page.charts[0]["series"]] == ["SGD", "SGD, fine-tuned"]
    assert [one["x"] for one in page.charts[0]["series"][1]["points"]] == [0, 50, 90]
    assert any("called fine-tuned or distilled" in word for word in page.words)
    assert "cifar/net/sgd-finetune-global-0.5, 1 seed, 20 epochs, 40 passes, 2.5 min" in page.words
    rows = [row for row in page.rows if row[0] == "SGD, fine-tuned"]
    assert [row[-1] for row in rows] == ["40", "40 + 40", "40 + 40"]  # dense, 50 %, 90 %
    assert any("those of fine-tuning follow after a plus" in word for word in page.words)
    alone = [row[-1] for row in Page(runs_page(some)).rows if row[0] in ("dense", "global:0.5")]
    assert alone == ["", "… + 40"]  # nothing says what it was fine-tuned from
    title = {"title": "Mine"}
    others = [
        result(f"{one}-finetune-global-0.5", [seed(0, 0.9, {"global:0.5": 0.8})], **title)
        for one in ("a", "b", "a-finetune-distilled")
    ]
    assert len(Page(runs_page(others)).charts[0]["series"]) == 3
    again = tuned("global:0.5", 0.87, cram=None)  # other settings at the same target: on its own
    names = [one["name"] for one in Page(runs_page([*some, again])).charts[0]["series"]]
    assert names[0] == "SGD, fine-tuned"
    assert names[1].startswith("SGD, fine-tuned at global:0.5 (")
