import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from bench_samples import bench, generating_bench, generation, model_record
from hypothesis import given, settings
from hypothesis import strategies as st
from result_samples import cram, sgd
from rich.console import Console
from test_runs_page import FRAME, HOSTILE, Page

from torchcram.experiments.bench.record import Setting, write_bench
from torchcram.report.bench import (
    latency_chart,
    overview_table,
    size_chart,
    size_table,
    speed_tables,
)
from torchcram.report.charts import pareto
from torchcram.report.generation import generation_chart, generation_tables
from torchcram.report.runs import runs_page
from torchcram.report.sources import read_benches
from torchcram.report.units import ms, rate, size, times


@pytest.fixture(scope="module")
def page():
    return Page(runs_page([sgd(), cram()], benches=[bench()]))


def test_the_page_has_every_number(page):
    assert "Speed and size" in page.words
    assert ["dense", "90.00", "", "40.0", "40.1", "1.00x", "40.0"] in page.rows
    assert ["global:0.9", "89.00", "-1.00", "40.0", "5.00", "8.00x", "40.0"] in page.rows
    assert ["int4", "88.00", "-2.00", "40.0", "5.50", "7.27x", ""] in page.rows
    first = page.rows.index(["model", "torch", "onnxruntime", "torchcram"])
    assert page.rows[first + 1 : first + 4] == [
        ["dense", "10.0 0.80x9.00 to 11.0", "8.00 1.00x7.20 to 8.80", "9.00 0.89x8.10 to 9.90"],
        [
            "global:0.9",
            "10.5 0.76x9.45 to 11.6",
            "8.50 0.94x7.65 to 9.35",
            "2.00 4.00x1.80 to 2.20",
        ],
        ["int4", "11.0 0.73x9.90 to 12.1", "-", "9.50 0.84x8.55 to 10.5"],
    ]
    assert page.words.count("int4 with onnxruntime: no int4 here") == 2
    assert {"batch 1, 2 threads, 1x3x32x32", "batch 16, 2 threads, 16x3x32x32"} <= set(page.words)
    said = " ".join(" ".join(page.words).split())
    assert "against onnxruntime, the fastest engine on the dense model" in said
    assert "Measured in turns on Abacus 3, torch 9.8.7, torchcram <6.5.4>." in said


def test_the_fastest_engine_is_bold(page):
    assert re.findall(r"<td><strong>([\d.]+)</strong>", page.source) == [
        *("8.00", "2.00", "9.50"),
        *("100", "25.0", "102"),
    ]


def test_charts_follow_those_of_the_runs(page):
    figures = [value for _, name, value in page.attributes if name == "data-chart"]
    assert figures == ["0", "1", "2"]
    assert page.charts[1] == latency_chart(bench())
    assert page.charts[2] == size_chart(bench())


def test_accuracy_against_latency_has_a_view_for_every_setting():
    chart = latency_chart(bench())
    assert [view["name"] for view in chart["views"]] == ["batch 1", "batch 16"]
    assert [view["x"]["max"] for view in chart["views"]] == pytest.approx([1.04 * 11, 1.04 * 121])
    *engines, front = chart["series"]
    assert [one["name"] for one in engines] == ["torch", "onnxruntime", "torchcram"]
    assert [len(one["points"]) for one in engines] == [6, 4, 6]
    assert all(one["line"] is False for one in engines)
    here = [(point["x"], point["y"]) for point in front["points"]]
    assert here == [(2, [89, None]), (8, [90, None]), (25, [None, 89]), (100, [None, 90])]
    assert front["front"]
    assert front["points"][0]["text"] == [
        ["model", "global:0.9"],
        ["accuracy", "89.00 %"],
        ["latency", "2.00 ms"],
        ["quartiles", "1.80 to 2.20 ms"],
        ["images/s", "500"],
        ["speed", "4.00x"],
    ]


def test_threads_are_named_where_they_differ():
    settings = (Setting(1, 1, (1, 3)), Setting(1, 2, (1, 3)))
    views = latency_chart(bench(settings=settings))["views"]
    assert [view["name"] for view in views] == ["batch 1, 1 thread", "batch 1, 2 threads"]


def test_accuracy_against_size_has_a_series_for_every_format():
    *formats, front = size_chart(bench())["series"]
    assert [(one["name"], len(one["points"])) for one in formats] == [
        ("compact file", 3),
        ("ONNX file", 2),
        ("plain file", 3),
    ]
    assert [(point["x"], point["y"]) for point in front["points"]] == [(5, [89]), (40, [90])]
    assert formats[0]["points"][1]["text"] == [
        ["model", "global:0.9"],
        ["accuracy", "89.00 %"],
        ["compact file", "5.00 MB"],
        ["smaller", "8.00x"],
    ]


def test_without_accuracies_there_are_tables_alone():
    unknown = tuple(replace(one, accuracy=None) for one in bench().subjects)
    page = Page(runs_page([sgd()], benches=[bench(subjects=unknown)]))
    assert len(page.charts) == 1
    assert ["global:0.9", "", "", "40.0", "5.00", "8.00x", "40.0"] in page.rows


def test_a_page_without_benchmarks_has_no_section():
    assert "Speed and size" not in Page(runs_page([sgd()])).words


def test_benchmarks_are_found_in_run_folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write_bench(bench(), tmp_path / "two" / "bench.json")
    assert read_benches([tmp_path / "one", tmp_path / "two", tmp_path / "no"]) == [bench()]
    write_bench(bench(device="cuda"), tmp_path / "two" / "bench-cuda.json")
    assert read_benches([tmp_path / "two"]) == [bench(), bench(device="cuda")]
    (tmp_path / "one" / "bench.json").write_text("{}")
    with pytest.raises(ValueError, match=r"one/bench\.json"):
        read_benches([tmp_path / "one"])


@settings(max_examples=25, deadline=None)
@given(text=st.just(HOSTILE) | st.text(min_size=1))
def test_whatever_is_given_stays_text(text):
    text = text.replace("\x00", "") or "a"
    name = f"a{text}"
    timings = tuple(
        replace(one, engine=name, note=text) if one.engine == "torch" else one
        for one in bench().timings
    )
    odd = generating_bench(title=text, machine=text, versions={text: text}, data=text)
    told = generation(
        timings=tuple(
            replace(one, engine=name if one.engine == "torch" else one.engine, note=text)
            for one in generation().timings
        )
    )
    odd = replace(odd, timings=timings, generation=told)
    usual = Page(runs_page([sgd()], benches=[generating_bench()]))
    page = Page(runs_page([sgd()], benches=[odd]))
    tags = re.compile(r"<(script|b|style|figure|strong)\b")
    assert tags.findall(page.source) == tags.findall(usual.source)
    assert page.charts[1]["series"][0]["name"] == name
    assert page.charts[3]["series"][0]["name"] == name


def test_the_page_has_tokens_per_second():
    page = Page(runs_page([sgd()], benches=[generating_bench()]))
    first = page.rows.index(["model", "file", "torch", "torchcram-int8", "llama.cpp"])
    assert page.rows[first + 1 : first + 5] == [
        [
            "dense",
            "40.1",
            "50.0 0.25x45.5 to 55.6prompt 2,000perplexity 25.00",
            "200 1.00x182 to 222prompt 2,000perplexity 25.10",
            "",
        ],
        [
            "global:0.9",
            "5.00",
            "48.8 0.24x44.3 to 54.2prompt 2,000perplexity 26.00",
            "500 2.50x455 to 556prompt 2,500perplexity 26.20",
            "",
        ],
        ["int4", "5.50", "49.5 0.25x45.0 to 55.0prompt 2,000perplexity 30.00", "-", ""],
        ["small.gguf", "98.7", "", "", "250 1.25x227 to 278prompt 10,000perplexity 28.00"],
    ]
    titles = [word for word in page.words if word.startswith("prompt of")]
    assert titles == [
        "prompt of 100 tokens, 64 after it, 1 thread",
        "prompt of 100 tokens, 64 after it, 2 threads",
    ]
    assert page.words.count("int4 with torchcram-int8: no kernels here") == 2
    said = " ".join(" ".join(page.words).split())
    assert "against torchcram-int8, the fastest engine on the dense model" in said
    assert "on the first 2,048 test tokens of cifar-jpeg" in said
    assert page.charts[3] == generation_chart(generating_bench())
    assert len(page.charts) == 4


def test_perplexity_against_tokens_per_second_has_a_front_of_fast_and_good():
    chart = generation_chart(generating_bench())
    assert [view["name"] for view in chart["views"]] == ["1 thread", "2 threads"]
    *engines, front = chart["series"]
    names = [(one["name"], len(one["points"])) for one in engines]
    assert names == [("torch", 6), ("torchcram-int8", 4), ("llama.cpp", 2)]
    shown = [(point["x"], point["y"]) for point in front["points"] if point["y"][0] is not None]
    assert shown == [
        (500, [pytest.approx(math.log10(26.2)), None]),
        (200, [pytest.approx(math.log10(25.1)), None]),
        (50, [pytest.approx(math.log10(25.0)), None]),
    ]
    assert front["points"][0]["text"] == [
        ["model", "global:0.9"],
        ["perplexity", "26.20"],
        ["tokens/s", "500"],
        ["quartiles", "455 to 556"],
        ["prompt, tokens/s", "2,500"],
        ["file", "5.00 MB"],
        ["speed", "2.50x"],
    ]
    unknown = tuple(replace(one, perplexity=None) for one in generation().timings)
    assert generation_chart(generating_bench(generation=generation(timings=unknown))) is None
    assert generation_chart(bench()) is None


def test_the_tables_of_the_terminal_have_generation():
    first, second = generation_tables(generating_bench())
    text = printed(first)
    assert "generation, prompt of 100 tokens, 64 after it, 1 thread on Abacus 3" in text
    row = r"│ +│ torchcram-int8 +│ +2,500 │ +500 │ +\(455 to 556\) │ +2\.50x │ +26\.20 │ +│"
    assert re.search(row, text)
    assert re.search(r"│ +│ torchcram-int8 +│ +│ +│ +│ +│ +│ no kernels here │", text)
    assert re.search(r"│ small\.gguf +│ llama\.cpp +│ +10,000 │ +250 │ ", text)
    assert "perplexity: of what the engine computes, on the first 2,048 test tokens of" in text
    assert "2 threads on Abacus 3" in printed(second)
    assert generation_tables(bench()) == []
    unknown = tuple(replace(one, perplexity=None) for one in generation().timings)
    bare = generating_bench(generation=generation(timings=unknown, scored_tokens=None))
    assert "of what the engine computes" not in printed(*generation_tables(bare))


points = st.tuples(st.integers(0, 9), st.integers(0, 9))


@settings(deadline=None)
@given(st.lists(points, max_size=12))
def test_nothing_beats_the_front_and_it_beats_all_else(found):
    front = pareto(found)
    kept = [found[place] for place in front]
    assert kept == sorted(set(kept))

    def beats(one, other):
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    for point in found:
        assert (point in kept) == (not any(beats(other, point) for other in found))


def test_numbers_are_short():
    assert [ms(value) for value in (0.1234, 1.234, 12.34, 123.4)] == [
        "0.123",
        "1.23",
        "12.3",
        "123",
    ]
    assert [size(value) for value in (12_345, 1_234_567, 12_345_678)] == ["0.012", "1.23", "12.3"]
    assert [times(value) for value in (0.456, 2.345, 23.45)] == ["0.46x", "2.35x", "23.4x"]
    assert [rate(value) for value in (1.234, 12.34, 1234.5)] == ["1.23", "12.3", "1,234"]


def printed(*tables):
    console = Console(width=160, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_the_tables_of_the_terminal_have_every_number():
    text = printed(size_table(bench()), *speed_tables(bench()))
    row = r"│ global:0\.9 +│ +90\.00 │ +89\.00 │ +-1\.00 │ +40\.0 │ +5\.00 │ +8\.00x │ +40\.0 │"
    assert re.search(row, text)
    assert re.search(r"│ +│ torchcram +│ +2\.00 │ \(1\.80 to 2\.20\) │ +4\.00x │ +500 │ +│", text)
    assert re.search(r"│ +│ onnxruntime +│ +│ +│ +│ +│ no int4 here │", text)
    assert "batch 16, 2 threads (16x3x32x32) on Abacus 3" in text
    assert "speed: relative to onnxruntime, the fastest engine on the dense model" in text
    assert "speed: relative to torch, the fastest engine on the dense model" in text


def test_the_overview_has_a_row_per_model():
    lines = printed(overview_table(bench())).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["dense", "40.1", "1.00x", "10.0", "8.00", "9.00", "1.00x"],
        ["global:0.9", "5.00", "8.00x", "10.5", "8.50", "2.00", "4.00x"],
        ["int4", "5.50", "7.27x", "11.0", "", "9.50", "0.84x"],
    ]


def test_a_table_without_accuracies_has_gaps():
    unknown = (model_record("dense", None, 10), *bench().subjects[1:])
    text = printed(size_table(bench(subjects=unknown)))
    assert re.search(r"│ global:0\.9 +│ +90\.00 │ +89\.00 │ +│ +40\.0 │", text)


PROBE = """
addEventListener("load", () => setTimeout(() => {
  const found = {};
  const figure = document.querySelectorAll("figure")[1];
  const svg = figure.querySelector("svg");
  const tip = figure.querySelector(".tip");
  found.wide = document.documentElement.scrollWidth;
  found.lines = figure.querySelectorAll(".plot .line").length;
  found.markers = figure.querySelectorAll(".plot .marker").length;
  const texts = () => [...svg.querySelectorAll("text")].map((text) => text.textContent);
  found.first = texts();
  const at = figure.querySelectorAll(".marker")[6].getBoundingClientRect();
  const place = { clientX: at.left + 4, clientY: at.top + 4, bubbles: true };
  svg.dispatchEvent(new PointerEvent("pointermove", place));
  found.tip = tip.innerText;
  found.inside = tip.getBoundingClientRect().right <= innerWidth;
  let seen = 0;
  for (let i = 0; i < 9; i++) {
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    seen += tip.innerText.startsWith("Pareto");
  }
  found.walked = seen;
  figure.querySelectorAll(".views button")[1].click();
  found.second = texts();
  const buttons = figure.querySelectorAll(".legend button");
  buttons[buttons.length - 1].click();
  found.without = figure.querySelectorAll(".plot .line").length;
  parent.postMessage(JSON.stringify(found), "*");
}, 200));
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1100])
def test_the_charts_answer_in_a_browser(width, tmp_path):
    source = runs_page([sgd()], benches=[bench()])
    source = source.replace("</body>", f"<script>{PROBE}</script></body>")
    (tmp_path / "page.html").write_text(source)
    (tmp_path / "frame.html").write_text(FRAME.format(width))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,1000", "--dump-dom"]
    line = [shutil.which("chromium"), *options, (tmp_path / "frame.html").as_uri()]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", ran.stdout)
    assert title, ran.stdout + ran.stderr
    found = json.loads(title[1].replace("&amp;", "&"))
    assert found["wide"] <= width
    assert (found["lines"], found["markers"], found["without"]) == (1, 8, 0)
    assert {"torchcram", "global:0.9", "89.00", "2.00", "4.00x"} <= set(found["tip"].split())
    assert found["inside"]
    assert found["walked"] == 0
    assert "10" in found["first"]
    assert "100" in found["second"]
