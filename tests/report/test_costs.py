"""What several targets cost, from made-up results."""

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_samples import result, seed

from torchcram.experiments.evaluation.results import merge_seed
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.overrides import finetune_recipe
from torchcram.report.costs import compare_costs, cost_table
from torchcram.report.markdown_tables import costs_markdown, markdown_table

RESNET, SQUAD = "cifar10-jpeg/resnet20", "squad/minilm-l6"
LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95)
TARGETS = tuple(f"global:{level}" for level in LEVELS)


def trained(name, *scores, at=None, seeds=1, overrides=()):
    """The result of a recipe, or of fine-tuning after it, with a score at each target."""
    recipe = load_recipe(name)
    if at is not None:
        recipe = finetune_recipe(recipe, at, overrides=overrides)
    targets = recipe.compress.to if at in (None, "dense") else (at,)
    made = None
    for number in range(seeds):
        known = dict(zip(targets, (score + number / 100 for score in scores), strict=False))
        # the score of a method before batch-norm tuning, which counts for no table
        dense = 0.95 if recipe.method is None else next(iter(known.values())) + 0.005
        made = merge_seed(made, recipe, seed(number, dense, known))
    return made


def costs(*results, targets=(), name=RESNET):
    """Costs by the titles of methods."""
    comparison = compare_costs(results, targets).one(name)
    return {cost.title: cost for cost in comparison.methods}


def scores(cost):
    return {target: round(100 * score.mean, 6) for target, score in cost.scores.items()}


def test_a_training_for_all_targets_is_paid_once():
    known = costs(
        trained(f"{RESNET}/dpf-k50", 0.9),
        *(trained(f"{RESNET}/dpf-k{100 * level:.4g}", 0.8) for level in LEVELS[1:]),
        trained(f"{RESNET}/cram-plus-multi", 0.9, 0.89, 0.88, 0.87, 0.86),
        trained(f"{RESNET}/cram-plus-multi-1x", 0.9, 0.89, 0.88, 0.87),
        trained(f"{RESNET}/sfw", 0.8, 0.7, 0.6, 0.5, 0.4),
    )
    assert list(known) == ["CrAM+-Multi", "CrAM+-Multi, 1.0x", "SFW", "DPF"]
    assert known["CrAM+-Multi"].passes == (400,) * 5
    assert scores(known["CrAM+-Multi"])["global:0.95"] == 86
    assert known["CrAM+-Multi, 1.0x"].passes == (200,) * 4  # not measured at 95 %
    assert known["SFW"].passes == (200,) * 5
    assert not known["SFW"].per_target
    assert known["DPF"].passes == (200, 400, 600, 800, 1000)
    assert known["DPF"].per_target


def test_trainings_for_single_targets_add_up_to_the_first_that_is_missing():
    results = [trained(f"{RESNET}/acdc-k{level}", level / 100) for level in (50, 70, 90)]
    results += [trained(f"{RESNET}/str-k{level}", 0.4) for level in (90, 80)]
    known = costs(*results)
    assert known["AC/DC"].passes == (200, 400)
    assert scores(known["AC/DC"]) == {"global:0.5": 50, "global:0.7": 70, "global:0.9": 90}
    assert known["STR"].passes == ()
    assert list(known["STR"].scores) == ["global:0.8", "global:0.9"]
    more = costs(*results, trained(f"{RESNET}/acdc-k80", 0.8))
    assert more["AC/DC"].passes == (200, 400, 600, 800)


def test_the_targets_are_those_of_single_trainings_or_those_that_are_asked_for():
    multi = trained(f"{RESNET}/cram-plus-multi", *(0.9 for _ in range(8)))
    assert len(costs(multi)["CrAM+-Multi"].scores) == 8
    assert list(costs(multi, trained(f"{RESNET}/dpf-k80", 0.8))["CrAM+-Multi"].scores) == [
        "global:0.8"
    ]
    tuned = trained(f"{RESNET}/cram-plus-multi", 0.8, at="nm:2:4")
    assert list(costs(multi, tuned)["CrAM+-Multi"].scores) == ["nm:2:4"]
    order = ("nm:2:4", "global:0.5")
    assert tuple(costs(multi, tuned, targets=order)["CrAM+-Multi"].scores) == order
    assert compare_costs([multi], ["nm:1:4"]).one(RESNET).methods == ()
    assert compare_costs([multi]).one("other/net") is None


def test_fine_tuning_adds_its_passes_to_those_of_the_training():
    results = []
    for method in ("cram-plus-multi", "sgd"):
        results.append(trained(f"{RESNET}/{method}", 0.9, 0.8))
        for at, score in zip(TARGETS[:2], (0.91, 0.85), strict=True):
            results.append(trained(f"{RESNET}/{method}", score, at=at))
    known = costs(*results)
    for title, passes in (("CrAM+-Multi", 400), ("SGD", 200)):
        assert known[title].passes == (passes,) * 2
        assert known[f"{title}, fine-tuned"].passes == (passes + 20, passes + 40)
        assert scores(known[f"{title}, fine-tuned"]) == {"global:0.5": 91, "global:0.7": 85}
    assert list(known) == ["CrAM+-Multi", "CrAM+-Multi, fine-tuned", "SGD", "SGD, fine-tuned"]


def test_fine_tuning_without_compression_still_serves_all_targets():
    known = costs(
        trained(f"{RESNET}/sgd", 0.9, 0.8),
        trained(f"{RESNET}/sgd", 0.95, 0.85, at="dense"),
    )
    assert known["SGD, fine-tuned"].passes == (220, 220)
    assert scores(known["SGD, fine-tuned"]) == {"global:0.5": 95, "global:0.7": 85}


def test_fine_tuning_of_models_for_single_targets_adds_its_passes_to_each():
    results = [trained(f"{RESNET}/dpf-k{level}", 0.8) for level in (50, 70, 80)]
    for level, at in zip((50, 70), TARGETS, strict=False):
        results.append(trained(f"{RESNET}/dpf-k{level}", 0.85, at=at))
    known = costs(*results)
    assert known["DPF"].passes == (200, 400, 600)
    assert known["DPF, fine-tuned"].passes == (220, 440)
    assert scores(known["DPF, fine-tuned"]) == {"global:0.5": 85, "global:0.7": 85}


@pytest.mark.parametrize("method", ["sgd", "dpf-k50"])
def test_fine_tuning_alone_is_not_a_whole_training(method):
    alone = trained(f"{RESNET}/{method}", 0.9, at="global:0.5")
    assert compare_costs([alone]).one(RESNET).methods == ()


def test_pruners_are_rows_of_their_own():
    adam = trained(f"{SQUAD}/adam", 0.5)
    (plain,) = adam.seeds
    extra = seed(0, 0.8, {"obs:m64@uniform:0.5": 0.7, "wanda@nm:2:4": 0.6}).targets
    adam = replace(adam, seeds=(replace(plain, targets=(*plain.targets, *extra)),))
    tuned = [
        trained(f"{SQUAD}/adam", 0.75, at="obs:m64@uniform:0.5"),
        trained(f"{SQUAD}/adam", 0.77, at="uniform:0.5", overrides=["train.distillation={}"]),
    ]
    known = costs(adam, *tuned, name=SQUAD)
    shown = {title: (cost.passes, scores(cost)) for title, cost in known.items()}
    assert shown == {
        "Adam": ((2,), {"uniform:0.5": 50}),
        "Adam, obs:m64": ((2,), {"uniform:0.5": 70}),
        "Adam, obs:m64, fine-tuned": ((3.8,), {"uniform:0.5": 75}),
        "Adam, distilled": ((3.8,), {"uniform:0.5": 77}),
    }
    assert known["Adam, distilled"].at_most  # early stopping, and no number of epochs
    assert "| Adam, obs:m64, fine-tuned | ≤ 3.8 | 75.00 | 1 |" in costs_markdown(
        compare_costs([adam, *tuned]).one(SQUAD)
    )


def test_a_model_that_was_trained_for_another_pattern_counts_by_its_sparsity():
    assert load_recipe(f"{SQUAD}/l0-k50").method.target == "global:0.5"
    movement, l0 = trained(f"{SQUAD}/movement-k50", 0.7), trained(f"{SQUAD}/l0-k50", 0.6)
    known = costs(movement, l0, targets=["uniform:0.5"], name=SQUAD)
    assert {title: scores(cost) for title, cost in known.items()} == {
        "Movement, 16 epochs": {"uniform:0.5": 70},
        "l0 regularization, 16 epochs": {"uniform:0.5": 60},
    }
    assert len(compare_costs([movement, l0]).one(SQUAD).targets) == 1


def test_epochs_have_to_be_known():
    sgd = trained(f"{RESNET}/sgd", 0.9)
    unknown = replace(sgd, recipe={**sgd.recipe, "train": {}})
    with pytest.raises(ValueError, match=r"sgd\.json does not say its epochs"):
        compare_costs([unknown])


def test_the_spread_is_that_of_the_seeds_with_a_score():
    multi = trained(f"{RESNET}/cram-plus-multi", 0.9, 0.89, seeds=3)
    first, *others = multi.seeds
    targets = tuple(target for target in first.targets if target.operator != "global:0.7")
    multi = replace(multi, seeds=(replace(first, targets=targets), *others))
    cost = costs(multi, trained(f"{RESNET}/dpf-k50", 0.7), targets=TARGETS[:2])["CrAM+-Multi"]
    assert str(cost.scores["global:0.5"]) == "91.00 ± 1.00"
    assert str(cost.scores["global:0.7"]) == "90.50 ± 0.71"
    assert cost.seeds == (2, 3)


def test_the_tables_have_passes_and_scores():
    results = [
        trained(f"{RESNET}/cram-plus-multi", 0.9, 0.89, seeds=3),
        trained(f"{RESNET}/gradual-magnitude-k50", 0.7, seeds=2),
        trained(f"{RESNET}/gradual-magnitude-k70", 0.6),
    ]
    comparison = compare_costs(results).one(RESNET)
    lines = costs_markdown(comparison).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["method", "for 1", "for 2", "`global:0.5`", "`global:0.7`", "seeds"]
    assert rows[2] == ["CrAM+-Multi", "400", "400", "91.00 ± 1.00", "90.00 ± 1.00", "3"]
    assert rows[3] == ["Gradual magnitude", "200", "400", "70.50 ± 0.71", "60.00", "1 to 2"]
    assert "after batch-norm tuning, mean ± standard deviation over seeds" in lines[-1]
    table = cost_table(comparison)
    assert [str(column.header) for column in table.columns] == [cell.strip("`") for cell in rows[0]]
    assert table.row_count == 2
    section = f"costs {RESNET} gradual-magnitude global:0.7"
    assert markdown_table(results, section).splitlines()[2:3] == [
        "| Gradual magnitude | 200 | 60.00 | 1 |"
    ]
    assert markdown_table([], section) == "Not run yet.\n"
    with pytest.raises(ValueError, match=r"costs 'resnet20' names no results"):
        markdown_table(results, "costs resnet20")


def test_one_column_is_enough_where_nothing_is_paid_again():
    lines = costs_markdown(compare_costs([trained(f"{RESNET}/sgd", 0.9, 0.8)]).one(RESNET))
    assert lines.startswith("| method | passes | `global:0.5` | `global:0.7` |")
    assert "\n| SGD | 200 | 90.00 | 80.00 |" in lines


def trained_for(level):
    made = result(f"m-k{100 * level:.4g}", [seed(0, 0.5, {f"global:{level}": 0.5})])
    method = {"name": "dpf", "target": f"global:{level}"}
    recipe = {key: value for key, value in made.recipe.items() if key != "cram"}
    return replace(made, recipe={**recipe, "method": method})


@given(
    st.lists(st.sampled_from(LEVELS), unique=True, min_size=1),
    st.lists(st.sampled_from(LEVELS), unique=True, min_size=1),
)
def test_passes_add_up_over_the_leading_targets_that_have_a_model(single, asked):
    results = [trained_for(level) for level in single]
    comparison = compare_costs(results, [f"global:{level}" for level in asked]).one("cifar/net")
    served = [level for level in asked if level in single]
    leading = list(takewhile(single.__contains__, asked))
    if not served:
        assert comparison.methods == ()
        return
    (cost,) = comparison.methods
    assert list(cost.scores) == [f"global:{level}" for level in served]
    assert cost.passes == tuple(20 * (index + 1) for index in range(len(leading)))
