import io
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from result_samples import cram, result, seed, sgd, target
from rich.console import Console

from torchcram.experiments.evaluation.results import write_result
from torchcram.experiments.io.files import slug
from torchcram.experiments.recipe import load_recipe
from torchcram.report.markdown_tables import (
    END,
    NOT_RUN,
    markdown_table,
    marked,
    stale,
    update_files,
    update_marked,
)
from torchcram.report.results_table import comparison_table, result_table
from torchcram.report.summary import labels, number, points, rounded, sort_operators, summaries


def lines_of(table, width=80):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(table)
    return console.file.getvalue().splitlines()


def cells_of(lines, first):
    line = next(line for line in lines if f"│ {first} " in line)
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_a_model_that_was_trained_sparse_is_compared_with_itself():
    trained = replace(sgd(), recipe={"method": {"name": "dpf", "target": "global:0.9"}})
    shown = " ".join("".join(lines_of(result_table(trained), width=200)).split())
    assert "as trained" in shown
    assert "vs trained: BNT - trained" in shown
    assert "dense" not in shown


def test_the_terminal_shows_one_seed_plainly():
    lines = lines_of(result_table(sgd()))
    assert max(map(len, lines)) <= 80
    assert cells_of(lines, "dense") == ["dense", "", "", "88.70", "", ""]
    assert cells_of(lines, "nm:2:4") == ["nm:2:4", "13.0", "12.9", "51.00", "71.00", "-17.70"]
    assert "±" not in "".join(lines)
    assert "cifar-jpeg" in "".join(lines)


def test_the_terminal_shows_mean_and_deviation_of_seeds():
    lines = lines_of(result_table(cram()))
    assert max(map(len, lines)) <= 80
    assert cells_of(lines, "dense")[3] == "90.00 ± 1.00"
    assert cells_of(lines, "global:0.9")[1:] == ["90.0", "89.1", "68.00", "88.00 ± 1.00", "-2.00"]
    assert cells_of(lines, "global:0.5+int4")[5] == "-30.00"
    assert "± over 3 seeds" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [80, 100])
def test_methods_stand_side_by_side(width):
    one_seed = result("cram-plus", [cram().seeds[0]], title="CrAM+-Multi")
    perfect = result("sgd", [seed(0, 1.0, {"global:0.8+int4": 1.0})], title="SGD")
    full = result("cram-plus", [seed(0, 1.0, {"int4": 0.2})], title="CrAM+-Multi")
    assert "100.00" in "".join(lines_of(comparison_table([perfect, full]), width))
    assert max(map(len, lines_of(comparison_table([perfect, full]), width))) <= width
    lines = lines_of(comparison_table([sgd(), one_seed]), width)
    assert max(map(len, lines)) <= width
    assert cells_of(lines, "dense") == ["dense", "88.70", "", "", "89.00", "", ""]
    both = ["global:0.5", "68.31", "88.31", "-0.39", "69.00", "89.00", "0.00"]
    assert cells_of(lines, "global:0.5") == both
    assert cells_of(lines, "nm:2:4") == ["nm:2:4", "51.00", "71.00", "-17.70", "", "", ""]
    assert "…" not in "".join(lines)


def test_the_terminal_shows_the_deviation_of_calibration_sets():
    one = seed(0, 0.9, {})
    tuned = target("int4", 0.85, after_std=0.004, trials=10)
    lines = lines_of(result_table(result("sgd", [replace(one, targets=(tuned,))])))
    assert cells_of(lines, "int4")[4:] == ["85.00 ± 0.40", "-5.00"]
    assert "± over 10 calibration sets" in " ".join(" ".join(lines).split())


def test_brackets_are_no_markup():
    lines = lines_of(result_table(replace(sgd(), data="[bold]x[/bold]")))
    assert "[bold]x[/bold]" in "".join(lines)


def test_changes_are_those_of_each_seed():
    first = seed(0, 0.9, {"int4": 0.8})
    second = seed(1, 0.5, {"int4": 0.5, "nm:2:4": 0.45})
    rows = summaries(result("sgd", [first, second]))
    assert rows["int4"].change.mean == pytest.approx(-0.05)
    assert rows["int4"].change.std == pytest.approx(0.1 / 2**0.5)
    assert (rows["nm:2:4"].change.mean, rows["nm:2:4"].after.std) == (pytest.approx(-0.05), None)


def test_targets_are_in_order_of_kind_and_sparsity():
    given_order = ["later:3", "int4", "global:0.95", "uniform:0.8", "nm:2:4", "global:0.5+int4"]
    assert sort_operators([*given_order, "global:0.5", "int4", "uniform:0.5"]) == [
        "global:0.5", "global:0.95", "uniform:0.5", "uniform:0.8", "nm:2:4", "int4",
        "global:0.5+int4", "later:3",
    ]  # fmt: skip


def test_small_changes_have_no_sign():
    assert [points(change) for change in (-0.00004, 0.00006, -0.0123)] == ["0.00", "+0.01", "-1.23"]


def rows_of(table):
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_markdown_has_every_method_and_target():
    header, rule, *rows = rows_of(markdown_table([sgd(), cram()], "cifar/net"))
    assert header == [
        "method", "dense", "`global:0.5`", "`global:0.9`", "`global:0.95`", "`nm:2:4`", "`int4`",
        "`global:0.5+int4`", "seeds", "epochs", "passes", "min",
    ]  # fmt: skip
    assert len(rule) == len(header)
    assert rows == [
        [
            "CrAM+-Multi", "90.00 ± 1.00", "89.00 ± 0.00 (-1.00)", "88.00 ± 1.00 (-2.00)", "", "",
            "88.00 ± 0.00 (-2.00)", "60.00 ± 0.00 (-30.00)", "3", "20", "40", "2.0",
        ],
        [
            "SGD", "88.70", "88.31 (-0.39)", "", "24.00 (-64.70)", "71.00 (-17.70)",
            "62.00 (-26.70)", "", "1", "20", "40", "2.5",
        ],
    ]  # fmt: skip


def test_markdown_names_data_and_machine():
    note = markdown_table([sgd(), cram()], "cifar/net").splitlines()[-1]
    assert "on cifar-jpeg after" in note
    assert "Abacus 3" in note
    assert "Passes: forward and backward over the training set." in note
    mixed = markdown_table([sgd(), replace(cram(), data="cifar")], "cifar/net")
    assert [row[0] for row in rows_of(mixed)[2:]] == ["CrAM+-Multi on cifar", "SGD on cifar-jpeg"]


def test_listed_methods_come_in_their_order_and_empty_where_there_is_no_result():
    _, _, *rows = rows_of(markdown_table([sgd(), cram()], "cifar/net sgd  what cram-plus"))
    assert [row[:2] for row in rows] == [
        ["SGD", "88.70"],
        ["`what`", NOT_RUN],
        ["CrAM+-Multi", "90.00 ± 1.00"],
    ]
    assert set(rows[1][2:]) == {""}
    assert rows_of(markdown_table([sgd(), cram()], "cifar/net sgd"))[2:][0][0] == "SGD"
    assert len({len(row) for row in rows}) == 1


def test_a_recipe_that_was_not_run_has_its_title():
    name = "cifar10/resnet20/cram-plus-multi"
    _, _, row = rows_of(markdown_table([sgd()], "cifar10/resnet20 cram-plus-multi"))
    assert row[:2] == [load_recipe(name).title, NOT_RUN]


def test_nothing_run_is_said():
    table = markdown_table([], "cifar/net")
    assert "Nothing of this has been run yet." in table
    assert len(rows_of(table)) == 2


@pytest.mark.parametrize("name", ["", "cifar", "a/b/c", "cifar/net a/b", "/net"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="names no results"):
        markdown_table([], name)


@given(title=st.text(), data=st.text(), machine=st.text(), operator=st.text().filter(str.strip))
def test_no_text_breaks_the_table_or_the_markers(title, data, machine, operator):
    one = replace(sgd(), title=title, data=data)
    targets = (target(operator, 0.5, sparsity=0.5, model_sparsity=0.5),)
    one = replace(one, seeds=(replace(one.seeds[0], machine=machine, targets=targets),))
    table = markdown_table([one], "cifar/net")
    assert len(table.splitlines()) == 5
    assert len({len(row) for row in rows_of(table)}) == 1
    text = f"<!-- results:cifar/net -->\n{END}\n"
    assert marked(update_marked(text, "cifar/net", table)) == ["cifar/net"]
    assert all(row[0] != "" or title.strip() == "" for row in rows_of(table))


def test_runs_of_one_title_are_told_apart():
    one, other = sgd(), replace(sgd(), recipe={**sgd().recipe, "cram": {"rho": 0.3}})
    assert labels([one, cram()]) == ["SGD", "CrAM+-Multi"]
    assert "cram.rho=0.15" in labels([one, other])[0]
    assert "cram.rho=0.3" in labels([one, other])[1]
    assert labels([one, one]) == ["SGD #1", "SGD #2"]
    later = replace(one, seeds=(replace(one.seeds[0], seed=5),))
    assert labels([one, later]) == ["SGD (seed=0)", "SGD (seed=5)"]


def test_seeds_tell_runs_apart_only_where_nothing_else_does():
    one = sgd()
    longer = replace(
        sgd(),
        recipe={**one.recipe, "train": {"epochs": 9, "batch_size": 128}},
        seeds=cram().seeds,
    )
    assert labels([one, longer]) == ["SGD (train.epochs=20)", "SGD (train.epochs=9)"]


lines = st.text(st.characters(exclude_characters="\r\n<", codec="utf-8"), max_size=20)
texts = st.lists(lines, max_size=4).map("\n".join)
place_names = st.from_regex(r"[a-z]{1,4}/[a-z0-9]{1,4}( [a-z+]{1,4}){0,2}", fullmatch=True)


@given(before=texts, old=texts, after=texts, table=texts, name=place_names)
def test_a_table_is_replaced_and_nothing_else(before, old, after, table, name):
    text = f"{before}\n<!-- results:{name} -->\n{old}\n{END}\n{after}"
    new = update_marked(text, name, table)
    assert new == update_marked(new, name, table)
    assert new.startswith(f"{before}\n<!-- results:{name} -->\n")
    assert new.endswith(f"\n{END}\n{after}")
    assert table.strip("\n") in new
    assert marked(new) == [name]
    assert update_marked(text, name, f"{table}\n") == new


@given(before=texts, name=place_names, other=place_names, tables=st.tuples(texts, texts))
def test_places_do_not_disturb_each_other(before, name, other, tables):
    assume(name != other)
    places = "".join(f"<!-- results:{one} -->\n{END}\n" for one in (name, other, name))
    text = f"{before}\n{places}"
    one_way = update_marked(update_marked(text, name, tables[0]), other, tables[1])
    other_way = update_marked(update_marked(text, other, tables[1]), name, tables[0])
    assert one_way == other_way
    assert marked(one_way) == [name, other]


def test_backslashes_and_ends_of_lines_stay_as_they_are():
    text = f"a\\1\r\n<!-- results:a/b -->\r\nold\r\n{END}\r\nz\\g<0>\r\n"
    new = update_marked(text, "a/b", "x\\1|y")
    assert new.startswith("a\\1\r\n<!-- results:a/b -->\r\n")
    assert "x\\1|y\n" in new
    assert new.endswith(f"{END}\r\nz\\g<0>\r\n")
    assert update_marked(new, "a/b", "x\\1|y") == new


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no section is marked '<!-- results:a/b -->'"),
        (f"<!-- results:a/c -->\n{END}", r"marked: \['a/c'\]"),
        ("<!-- results:a/b -->\n", "is not followed by"),
        (f"x\n{END}\n", "line 2: '<!-- end results -->' stands in the wrong order"),
        (f"<!-- results:a/b -->\n<!-- results:a/c -->\n{END}\n", "line 2: .*a/c"),
    ],
)
def test_markers_that_do_not_fit_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        update_marked(text, "a/b", "table")


def test_a_table_with_a_marker_is_refused():
    with pytest.raises(ValueError, match="contains a marker"):
        update_marked(f"<!-- results:a/b -->\n{END}\n", "a/b", f"x\n{END}\n")


@pytest.fixture
def pages(tmp_path):
    readme, page = tmp_path / "README.md", tmp_path / "results.md"
    readme.write_text(f"# one\n<!-- results:cifar/net sgd sam -->\n{END}\nlast\n")
    page.write_bytes(f"<!-- results:cifar/net -->\r\n{END}\r\n\r\nunmarked\r\n".encode())
    for one in (sgd(), cram()):
        write_result(one, tmp_path / "results" / one.path)
    return readme, page


def test_stale_files_are_named_and_updated(pages, tmp_path):
    readme, page = pages
    folder = tmp_path / "results"
    assert stale(pages, folder) == [f"{readme}: cifar/net sgd sam", f"{page}: cifar/net"]
    assert update_files(pages, folder) == [readme, page]
    assert stale(pages, folder) == []
    assert update_files(pages, folder) == []
    assert "| SGD | 88.70 |" in readme.read_text()
    assert f"| `sam` | {NOT_RUN} |" in readme.read_text()
    assert readme.read_text().endswith(f"{END}\nlast\n")
    assert page.read_bytes().endswith(b"\r\n\r\nunmarked\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "results",
        "results.md",
    ]

    write_result(replace(sgd(), title="plain SGD"), folder / sgd().path)
    assert stale([readme], folder) == [f"{readme}: cifar/net sgd sam"]


def test_a_page_with_bad_markers_is_named_and_left(pages, tmp_path):
    readme, page = pages
    page.write_text(f"{END}\n")
    with pytest.raises(ValueError, match=r"results\.md: line 1"):
        stale(pages, tmp_path / "results")
    before = readme.read_text()
    with pytest.raises(ValueError, match=r"results\.md: line 1"):
        update_files(pages, tmp_path / "results")
    assert (readme.read_text(), page.read_text()) == (before, f"{END}\n")


def test_pruners_come_after_all_others_each_in_order():
    order = [
        *("global:0.9", "uniform:0.5", "uniform:0.8", "nm:2:4", "int8"),
        *("obs@uniform:0.5", "obs:r8@uniform:0.8", "obs@nm:2:4", "wanda@nm:2:4"),
        *("sparsegpt@uniform:0.7", "something else"),
    ]
    assert sort_operators(reversed(order)) == order


def test_the_seconds_of_pruners_have_a_column():
    one = seed(0, 0.9, {"global:0.5": 0.8})
    pruned = target("obs@uniform:0.5", 0.85, seconds=41.6)
    lines = lines_of(result_table(result("sgd", [replace(one, targets=(*one.targets, pruned))])))
    assert cells_of(lines, "obs@uniform:0.5")[-1] == "42"
    assert cells_of(lines, "global:0.5")[-1] == ""
    assert "seconds" in "".join(lines)
    assert "seconds" not in "".join(lines_of(result_table(sgd())))


def test_a_name_may_choose_the_targets():
    table = rows_of(markdown_table([sgd(), cram()], "cifar/net cram-plus int4 obs@nm:2:4"))
    assert table[0][:4] == ["method", "dense", "`int4`", "`obs@nm:2:4`"]
    assert table[2][0] == "CrAM+-Multi"
    assert table[2][2].startswith("88.00")
    assert table[2][3] == ""
    assert len(table) == 3
    assert len(rows_of(markdown_table([sgd(), cram()], "cifar/net int4"))) == 4


def test_pruners_and_fine_tuning_have_rows_below_their_method():
    one = seed(0, 0.9, {"uniform:0.5": 0.8, "obs@uniform:0.5": 0.85, "obs@nm:2:4": 0.7})
    tuned = result("sgd-finetune-nm-2-4", [seed(0, 0.9, {"nm:2:4": 0.88})])
    name = "cifar/net sgd wanda@ obs@ fine-tuned@ uniform:0.5 nm:2:4"
    table = rows_of(markdown_table([result("sgd", [one]), tuned], name))
    assert [row[0] for row in table[2:]] == ["sgd", "- obs", "- fine-tuned"]  # nothing by Wanda
    assert table[3][1:4] == ["", "85.00 (-5.00)", "70.00 (-20.00)"]
    assert table[4][1:4] == ["", "", "88.00 (-2.00)"]
    assert table[3][4:] == ["", "", "", ""]  # a pruner trains nothing
    assert table[4][4:] == ["", "20 + 20", "40 + 40", ""]


def test_what_early_stopping_left_out_does_not_count():
    stop = {"train": {"epochs": 2, "early_stopping": {"held_out": 0.1, "patience": 3}}}
    base = result("sgd", [seed(0, 0.9, {"nm:2:4": 0.6})], cram=None)
    ends = {"nm:2:4": 1.25, "int4": 0.75}
    some = [
        result(f"sgd-finetune-{slug(at)}", [seed(0, 0.9, {at: 0.8}, epochs=end)], cram=None, **stop)
        for at, end in ends.items()
    ]
    name = "cifar/net sgd fine-tuned@ nm:2:4 int4"
    assert rows_of(markdown_table([base, *some], name))[3][-4:] == ["", "20 + 1", "20 + 0.9", ""]
    old = replace(some[1], seeds=(replace(some[1].seeds[0], epochs=None),))
    row = rows_of(markdown_table([base, some[0], old], name))[3]
    assert row[-4:] == ["", "20 + ≤ 1.62", "20 + ≤ 1.46", ""]
    shown = " ".join("".join(lines_of(result_table(old), width=200)).split())
    assert "fine-tuned for ≤ 2 epochs, ≤ 1.8 passes" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(400.0, "400"), (5.7, "5.7"), (0.4499, "0.45"), (0.001, "0"), (100, "100"), (2 / 3, "0.67")],
)
def test_numbers_have_no_digits_that_say_nothing(value, shown):
    assert number(value) == shown
    assert rounded(value) == float(shown)
    assert isinstance(rounded(value), int) == ("." not in shown)


@pytest.mark.parametrize(
    ("cram", "passes"),
    [
        (None, "20"),
        ({"rule": "CrAM+"}, "40"),
        ({"rule": "C-SAM"}, "60"),
        ({"dense_share": 0.5, "compressed_share": 0.5}, "20"),
        ({"compressed_share": 0.5, "base_step_probability": 0.1}, "29"),
    ],
)
def test_the_cost_is_in_every_table(cram, passes):
    one = result("sgd", [seed(0, 0.9, {"int4": 0.8})], title="SGD", cram=cram)
    words = f"20 epochs, {passes} passes"
    assert rows_of(markdown_table([one], "cifar/net"))[2][-3:] == ["20", passes, "2.5"]
    shown = " ".join("".join(lines_of(result_table(one), width=200)).split())
    assert f"trained for {words}" in shown
    assert "passes: forward and backward over the training set" in shown
    shown = " ".join("".join(lines_of(comparison_table([one]), width=200)).split())
    assert f"SGD: {words}" in shown


def test_a_result_without_epochs_has_no_cost():
    one = replace(sgd(), recipe={})
    assert rows_of(markdown_table([one], "cifar/net"))[2][-3:-1] == ["", ""]
    assert "passes" not in "".join(lines_of(result_table(one)))


def test_models_without_batch_norm_are_not_called_tuned():
    same = target("int4", 0.8, before=0.8)
    one = replace(seed(0, 0.9, {}), targets=(same,))
    assert "batch-norm" not in markdown_table([result("vit", [one])], "cifar/net")
    assert "BNT" not in "".join(lines_of(result_table(result("vit", [one]))))


def test_what_a_pruner_left_and_what_learned_from_the_dense_model_have_rows_too():
    at = "obs@nm:2:4"
    some = [
        result("sgd", [seed(0, 0.9, {"nm:2:4": 0.6})]),
        result("sgd-finetune-obs-nm-2-4", [seed(0, 0.9, {at: 0.87})]),
        result("sgd-finetune-distilled-obs-nm-2-4", [seed(0, 0.9, {at: 0.89})]),
        result("sgd-finetune-distilled-nm-2-4", [seed(0, 0.9, {"nm:2:4": 0.88})]),
    ]
    name = "cifar/net sgd fine-tuned@ distilled@ obs@fine-tuned@ obs@distilled@ nm:2:4"
    table = rows_of(markdown_table(some, name))
    assert [(row[0], row[2]) for row in table[3:]] == [
        ("- distilled", "88.00 (-2.00)"),
        ("- obs, fine-tuned", "87.00 (-3.00)"),
        ("- obs, distilled", "89.00 (-1.00)"),
    ]


def test_the_terminal_says_what_is_fine_tuned_and_has_all_metrics():
    one = seed(0, 0.9, {})
    tuned = replace(one, targets=(target("nm:2:4", 0.88, others={"exact match": 0.5}),))
    lines = lines_of(result_table(result("sgd-finetune-nm-2-4", [tuned])), width=120)
    assert "fine-tuned" in "".join(lines)
    assert "one shot" not in "".join(lines)
    assert cells_of(lines, "nm:2:4")[-1] == "50.00"
    assert cells_of(lines, "dense")[-1] == ""
