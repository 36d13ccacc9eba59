"""Metrics of which less is better: how they are compared, stored and shown."""

import math
from dataclasses import replace

import pytest
from result_samples import sgd
from rich.console import Console

from torchcram.experiments.evaluation.results import read_result, write_result
from torchcram.experiments.metrics import (
    WORST_PERPLEXITY,
    average,
    best_index,
    change_from,
    goodness,
    is_possible,
    less_is_better,
    perplexity,
)
from torchcram.report import summary
from torchcram.report.charts import cost_chart, make_point
from torchcram.report.markdown_tables import markdown_table
from torchcram.report.results_table import result_table
from torchcram.report.runs import group_runs, runs_page
from torchcram.report.summary import change_text, is_noticeable_loss, on_axis, score_text

PPL = "perplexity"
VALUES = [18.4, 520.0, 76752.0]


def language(values=VALUES, seeds=1):
    """A result in perplexities: the dense one first, then those of the targets."""
    dense, *after = values
    first = sgd().seeds[0]
    targets = tuple(
        replace(target, before=value, after=value, after_std=None, others={"accuracy": 0.4})
        for target, value in zip(first.targets, after, strict=False)
    )
    entries = [
        replace(first, seed=n, dense=dense * (1 + n), targets=targets, others=None)
        for n in range(seeds)
    ]
    return replace(sgd(), metric=PPL, task="wiki", seeds=tuple(entries))


def text_of(table):
    console = Console(width=300)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_less_of_a_perplexity_is_better():
    assert less_is_better(PPL)
    assert less_is_better("wikitext-2 perplexity")
    assert not any(map(less_is_better, ("accuracy", "F1", "", "perplexity ratio")))
    assert best_index([3.0, 2.0, 2.0], PPL) == 1
    assert best_index([0.3, 0.9, 0.9], "F1") == 1
    assert goodness(2.0, PPL) > goodness(3.0, PPL)
    assert goodness(0.2, "F1") < goodness(0.3, "F1")
    assert change_from(20.0, 30.0, PPL) == 1.5
    assert change_from(0.9, 0.8, "F1") == pytest.approx(-0.1)
    assert average([10.0, 1000.0], PPL) == pytest.approx(100.0)
    assert average([0.2, 0.4], "F1") == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("loss", "value"),
    [(math.log(18.4), 18.4), (0.0, 1.0), (-1e-9, 1.0), (1e4, 1e30), (math.inf, 1e30)],
)
def test_a_perplexity_is_finite(loss, value):
    assert perplexity(loss) == pytest.approx(value)
    assert perplexity(math.nan) == WORST_PERPLEXITY
    assert is_possible(perplexity(loss), PPL)


@pytest.mark.parametrize(
    ("value", "text"),
    [(18.416, "18.42"), (520.04, "520.0"), (76752.4, "76,752"), (2.34e7, "2.3e+07")],
)
def test_perplexities_are_plain_numbers(value, text):
    assert score_text(value, PPL) == text
    assert score_text(0.98765, "accuracy") == "98.77"
    assert change_text(1.052, PPL) == "1.05x"
    assert change_text(-0.0123, "accuracy") == "-1.23"
    assert is_noticeable_loss(1.06, PPL)
    assert not is_noticeable_loss(1.04, PPL)
    assert on_axis(100.0, PPL) == 2


def test_a_result_in_perplexities_is_stored_and_other_values_are_refused(tmp_path):
    result = language()
    write_result(result, tmp_path / "a.json")
    assert read_result(tmp_path / "a.json") == result
    with pytest.raises(ValueError, match=r"dense is 0.5; allowed: from 1 to 1e\+30"):
        language([0.5, 2.0])
    with pytest.raises(ValueError, match=r"seeds\[0\].dense is 18.4; allowed: from 0 to 1"):
        replace(language(), metric="F1")


def test_tables_show_numbers_and_ratios():
    shown = text_of(result_table(language()))
    assert "test perplexity on" in shown
    assert "in %" not in shown.splitlines()[0]
    for text in ("18.40", "520.0", "76,752", "28.26x", "4,171x", "ratio, less is better", "40.00"):
        assert text in shown, text
    several = text_of(result_table(language([18.4, 520.0], seeds=2)))
    assert "27.60 ± 13.01" in several
    markdown = markdown_table([language()], "wiki/net")
    assert "| 18.40 |" in markdown
    assert "520.0 (28.26x)" in markdown
    assert "Test perplexity on " in markdown
    assert "in brackets the ratio to the same model dense. Mean" in markdown


def test_the_page_has_ratios_and_logarithms():
    result = language()
    page = runs_page([result])
    assert "Test perplexity</h3>" in page
    assert "28.26x" in page
    assert "uncompressed, as a ratio." in page
    mixed = " ".join(runs_page([result, sgd()]).split())
    assert "uncompressed, in points, and for perplexities as a ratio." in mixed
    assert "test perplexity, log10" in page
    (group,) = group_runs([result])
    assert group.ratios
    row = group.runs[0].rows[result.seeds[0].targets[0].operator]
    assert (row.change.mean, row.after.metric) == (pytest.approx(520 / 18.4), PPL)
    assert summary.std_on_axis(summary.MeanStd(10.0, 1.0, PPL)) == pytest.approx(0.1 / math.log(10))


def test_the_front_of_a_chart_goes_down_where_less_is_better():
    points = [make_point(x, [y], {}) for x, y in ((1, 5.0), (2, 3.0), (3, 4.0))]
    for falls, expected in ((True, [1, 2]), (False, [1])):
        chart = cost_chart({"a": points}, ["v"], "cost", "value", falls=falls)
        assert [point["x"] for point in chart["series"][-1]["points"]] == expected
