"""Section `method` of a recipe, and trainings with every method."""

from dataclasses import replace

import pytest
from result_samples import result, seed
from runs import CPU, Stop, digits, recipe, run, stop_after, weights

from torchcram import compressible_weights, sparsity
from torchcram.baselines.registry import METHODS
from torchcram.experiments.evaluation.compressed_models import score_model
from torchcram.experiments.evaluation.results import read_result, write_result
from torchcram.experiments.recipe import Recipe
from torchcram.experiments.recipe.build import build_batches, build_initial_model, target_weights
from torchcram.experiments.recipe.methods import read_time
from torchcram.experiments.recipe.overrides import finetune_recipe
from torchcram.experiments.results_store import measure
from torchcram.report.markdown_tables import markdown_table

ARGS = {
    "gradual-magnitude": {"begin": "1 epoch", "end": "75 %", "interval": 2},
    "dpf": {"end": "2 epochs", "interval": 2},
    "acdc": {"warmup": "1 epoch", "period": 2, "end": "80 %"},
    "str": {"initial": -3.0},
    "sr-ste": {"decay": 0.001},
    "gradual-obs": {"begin": 2, "end": "2 epochs", "interval": 4, "gradients": 4},
    "lottery-tickets": {"round_steps": "2 epochs", "rewind_step": "1 epoch", "rounds": 2},
    "sfw": {"radius": 10.0},
    "compression-aware-sfw": {},
    "l0": {"penalty": 10.0, "end": "75 %"},
    "movement": {"end": "75 %", "interval": 1},
    "soft-movement": {"end": "75 %", "interval": 1, "threshold": 0.5},
    "platon": {"end": "75 %", "interval": 2},
}


def plain(**sections):
    return {**recipe(method="sgd").to_dict(), **sections}


def with_method(name="dpf", target="global:0.9", **args):
    section = {"name": name, "target": target, "args": args or ARGS[name]}
    return Recipe.from_dict(plain(method=section))


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.mark.parametrize(
    ("initial", "said"),
    [
        (-1.0, "of 9.*% instead of 90.0%; the difference was brought back at the end"),
        (-9.0, "of 0.*% instead of 90.0%; the difference was pruned at the end"),
    ],
)
def test_a_sparsity_that_training_did_not_reach_is_named(initial, said, tmp_path, data):
    with pytest.warns(UserWarning, match=f"convnet-digits/sgd: training reached a sparsity {said}"):
        trained = run(tmp_path, with_method("str", initial=initial), data)
    reached = trained.finished.reached
    assert reached == pytest.approx(0.0 if initial < -5 else 0.95, abs=0.06)
    measured = measure(trained, data, device=CPU)
    write_result(measured, tmp_path / "result.json")
    assert read_result(tmp_path / "result.json").seeds[0].reached == reached
    said = f"which changed them: {measured.title}: {100 * reached:.1f} %."
    assert said in markdown_table([measured], "digits/convnet-digits")


@pytest.mark.parametrize("name", ["dpf", "sfw"])
def test_methods_that_reach_the_target_or_train_for_all_are_silent(name, tmp_path, data):
    trained = run(tmp_path, with_method(name), data)
    assert trained.finished.reached is None


def test_every_method_is_tested():
    assert ARGS.keys() == METHODS.keys()


@pytest.mark.filterwarnings("ignore:.*training reached a sparsity")
@pytest.mark.parametrize("name", METHODS)
def test_a_training_ends_at_exactly_the_target_wherever_it_was_stopped(name, tmp_path, data):
    given = with_method(name, "uniform:0.7")
    trained = run(tmp_path / "whole", given, data)
    found = compressible_weights(trained.model)
    kept = sum(weight.numel() - round(0.7 * weight.numel()) for weight in found.values())
    total = sum(weight.numel() for weight in found.values())
    assert sparsity(found) == pytest.approx(1 - kept / total)
    for steps in (3, 8, 14):
        folder = tmp_path / f"stopped after {steps}"
        with pytest.raises(Stop):
            run(folder, given, data, make_step=stop_after(steps))
        run(folder, given, data)
        assert weights(folder) == weights(tmp_path / "whole")


def test_the_score_is_that_of_the_pruned_model(tmp_path, data):
    given = with_method()
    trained = run(tmp_path, given, data)
    batches = build_batches(given, data, train=False, device=CPU, seed=0)
    score = score_model(trained.model, given, data, batches, device=CPU)
    assert trained.finished.accuracy == score.value


def test_targets_are_compressed_where_the_method_pruned():
    model = build_initial_model(recipe(method="sgd"), classes=10, seed=0)
    everything = list(compressible_weights(model))
    section = {"name": "dpf", "target": "global:0.9", "args": ARGS["dpf"], "dense_ends": True}
    given = Recipe.from_dict(plain(method=section))
    assert list(target_weights(given, model)) == everything[1:-1]
    other = replace(given, compress=replace(given.compress, only="."))
    assert list(target_weights(other, model)) == everything
    assert list(target_weights(recipe("cram.dense_ends=true"), model)) == everything


def test_batches_are_built_once(tmp_path, data, monkeypatch):
    built = []

    def counted(*arguments, train, **options):
        built.append(train)
        return build_batches(*arguments, train=train, **options)

    monkeypatch.setattr("torchcram.experiments.training.trainer.build_batches", counted)
    run(tmp_path, with_method(), data)
    assert sorted(built) == [False, True]


def test_fine_tuning_takes_plain_steps():
    tuning = finetune_recipe(with_method(), "global:0.9")
    assert (tuning.method, tuning.cram) == (None, None)


def test_cram_is_a_method_too():
    section = recipe().to_dict()["cram"]
    by_section = Recipe.from_dict(plain(cram=section))
    by_method = Recipe.from_dict(plain(method={"name": "cram", "args": section}))
    assert by_method == by_section
    assert by_method.cram == recipe().cram
    with pytest.raises(ValueError, match="recipe: method is cram; allowed: args alone"):
        Recipe.from_dict(plain(method={"name": "cram", "args": section}, cram=section))


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (7, 7),
        (0, 0),
        ("2 epochs", 40),
        ("1 epoch", 20),
        ("1.5epochs", 30),
        ("75 %", 75),
        ("10%", 10),
    ],
)
def test_times_are_steps_epochs_or_a_part(value, steps):
    assert read_time("end", value, epochs=5, steps_per_epoch=20) == steps


@pytest.mark.parametrize("value", [-1, 1.5, "soon", "5", "-3 epochs", None, True])
def test_other_times_are_refused(value):
    with pytest.raises(ValueError, match="30 epochs"):
        with_method(end=value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": {"name": "dfp", "target": "global:0.9"}}, "did you mean 'dpf'"),
        ({"method": {"name": "dpf", "target": "int4"}}, "prunes to one target"),
        ({"method": {"name": "dpf", "target": "nm:2:4"}}, "no single sparsity"),
        ({"method": {"name": "dpf", "target": "global:0.9"}}, "args.end is missing"),
        (
            {"method": {"name": "dpf", "target": "global:0.9", "args": {"end": 5, "stop": 3}}},
            "args.stop is no known argument",
        ),
        (
            {
                "method": {"name": "dpf", "target": "global:0.9", "args": {"end": 5}},
                "cram": {"operators": ["global:0.5"]},
            },
            "null, as there is a section method",
        ),
    ],
)
def test_sections_that_make_no_sense_are_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(plain(**sections))


@pytest.mark.parametrize("name", ["dpf", "acdc"])
def test_a_schedule_that_ends_after_the_training_is_refused_before_it(name, tmp_path, data):
    given = with_method(name, **{**ARGS[name], "end": "3 epochs"})
    with pytest.raises(ValueError, match=r"method.args .* 15 steps: the end must be at most 14"):
        run(tmp_path, given, data)
    assert not (tmp_path / "model.safetensors").exists()


def test_tables_show_a_sparse_model_in_the_column_of_its_target():
    method = {"name": "dpf", "target": "global:0.9"}
    scores = {"global:0.9": 0.91, "nm:2:4": 0.5}
    sample = result("dpf-k90", [seed(0, 0.9, scores)], title="DPF, 90 %", cram=None)
    sample = replace(sample, recipe={**sample.recipe, "method": method})
    row = markdown_table([sample], "cifar/net").splitlines()[2]
    assert row.startswith("| DPF, 90 % |  | 91.00 | 50.00 (-40.00) | 1 | 20 | 20 |")
