"""Trainings of adapters by a recipe, which end with a plain, merged model."""

import io
import sys
from dataclasses import replace

import pytest
import torch
from runs import CPU, Stop, digits, recipe, run, stop_after, weights
from safetensors.torch import load_file

from torchcram.experiments.evaluation.compressed_models import score_on_test
from torchcram.experiments.finetuning import require_new_head
from torchcram.experiments.models import build as models
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.adapters import add_adapters_, merged_model
from torchcram.experiments.recipe.build import build_initial_model, build_optimizer, cram_weights
from torchcram.experiments.training import trainer
from torchcram.experiments.training.steps import train_on
from torchcram.experiments.training.trainer import Start, load_trained
from torchcram.optim import CrAM

pytest.importorskip("peft", reason="peft is not installed")
import peft

from torchcram.integrations.peft import LoraCrAM

LORA = "lora={rank: 2, alpha: 4}"
LAYERS = ("features.0", "features.3", "features.6", "fc")
STEPS = 3  # in an epoch


def given(*sets, method="cram-plus-multi", lora=LORA):
    return recipe("train.batch_size=64", "compress.watch=global:0.7", lora, *sets, method=method)


def data():
    return digits(train=64 * STEPS, test=50)


def initial(chosen=None):
    return build_initial_model(chosen or given(), classes=10, seed=0)


def adapted(chosen):
    model = initial(chosen)
    add_adapters_(chosen, model, seed=0)
    return model


@pytest.mark.parametrize("method", ["sgd", "cram-plus-multi"])
def test_the_model_of_the_run_is_plain_and_differs_by_the_adapters(tmp_path, method):
    chosen = given(method=method)
    trained = run(tmp_path, chosen, data())
    before, after = initial().state_dict(), load_file(tmp_path / "model.safetensors")
    assert after.keys() == before.keys()
    for name, value in after.items():
        if name.removesuffix(".weight") in LAYERS:
            change = (value - before[name]).flatten(1)
            assert 1 <= torch.linalg.matrix_rank(change, rtol=1e-3) <= 2
        elif "running" not in name and "tracked" not in name:
            assert torch.equal(value, before[name]), name
    tested = load_trained(tmp_path, CPU)
    score = score_on_test(tested.model, chosen, data(), device=CPU)
    assert score.value == trained.finished.accuracy  # that of the merged model


@pytest.mark.parametrize("sets", [(), ("train.accumulation=4", "cram.mask_interval=2")])
def test_a_stopped_training_continues_exactly(tmp_path, sets):
    chosen = given("lora.dropout=0.2", *sets)
    run(tmp_path / "whole", chosen, data())
    with pytest.raises(Stop):
        run(tmp_path / "cut", chosen, data(), make_step=stop_after(2 * STEPS - 1))
    run(tmp_path / "cut", chosen, data())
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_checkpoints_hold_the_adapters_alone(tmp_path):
    chosen, start = given("lora.also_train=fc.bias"), initial()
    with pytest.raises(Stop):
        run(tmp_path, chosen, data(), make_step=stop_after(STEPS + 1), start=Start(start))
    whole = (tmp_path / "checkpoints" / "epoch-0001.pt").read_bytes()
    content = torch.load(io.BytesIO(whole.partition(b"\n")[2]), weights_only=True)
    names = content["state"]["training"]["model"].keys()
    trained = {name for name in names if "running" not in name and "tracked" not in name}
    assert trained == {
        "fc.base_layer.bias",
        *(f"{layer}.lora_{part}.recipe.weight" for layer in LAYERS for part in "AB"),
    }


def test_adapters_are_not_continued_on_other_weights(tmp_path, monkeypatch):
    chosen = given()
    with pytest.raises(Stop):
        run(tmp_path, chosen, data(), make_step=stop_after(STEPS + 1))
    other = build_initial_model(chosen, classes=10, seed=7)
    monkeypatch.setattr(trainer, "build_initial_model", lambda *_, **__: other)
    with pytest.raises(ValueError, match="its adapters were trained on other weights than those"):
        run(tmp_path, chosen, data())


@pytest.mark.parametrize("method", ["sgd", "cram-plus-multi"])
def test_zeros_are_held_also_where_a_weight_is_trained_itself(tmp_path, method):
    start = initial()
    layers = {name: start.get_parameter(f"{name}.weight") for name in LAYERS}
    masks = {f"{name}.weight": value.abs() > value.abs().median() for name, value in layers.items()}
    with torch.no_grad():
        for name, mask in masks.items():
            start.get_parameter(name).mul_(mask)
    chosen = given("lora.targets=features", "lora.also_train=fc", method=method)
    model = run(tmp_path, chosen, data(), start=Start(start, masks)).model
    for name, mask in masks.items():
        value = model.get_parameter(name)
        assert not value[~mask].any()
        assert not torch.equal(value, start.get_parameter(name))


def test_steps_are_those_of_lora_cram_on_the_chosen_weights():
    chosen = given("cram.only=features", "cram.skip=features.0", "lora.targets=features")
    model = adapted(chosen)
    optimizer = build_optimizer(chosen, model, seed=0)
    assert type(optimizer) is LoraCrAM
    assert list(optimizer.weights) == [
        "features.3.base_layer.weight",
        "features.6.base_layer.weight",
    ]
    assert list(cram_weights(chosen, model)) == ["features.3.weight", "features.6.weight"]
    assert type(build_optimizer(given(lora="lora=null"), initial(), seed=0)) is CrAM
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 6


def test_outputs_change_with_training_alone_and_merging_keeps_them():
    chosen = given(method="sgd")
    model, x = adapted(chosen), torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model.eval()(x), initial().eval()(x), rtol=0, atol=0)
    names = list(initial().state_dict())
    optimizer = build_optimizer(chosen, model, seed=0)
    for _ in range(3):
        train_on((x, torch.arange(3)), model.train(), optimizer, config=chosen.train)
    before, expected = {k: v.clone() for k, v in model.state_dict().items()}, model.eval()(x)
    with merged_model(model):
        assert list(model.state_dict()) == names
        torch.testing.assert_close(model(x), expected)
        with merged_model(model):  # nothing is left to merge
            assert list(model.state_dict()) == names
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_seed_of_a_run_draws_the_adapters():
    chosen, state = given(), torch.get_rng_state()
    first, same = (adapted(chosen).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], value) for name, value in same.items())
    other = initial(chosen)
    add_adapters_(chosen, other, seed=1)
    name = "fc.lora_A.recipe.weight"
    assert not torch.equal(other.state_dict()[name], first[name])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["lora.rank=0"], "lora.rank is 0; allowed: at least 1"),
        (["lora.alpha=0"], "lora.alpha is 0; allowed: at least 1"),
        (["lora.dropout=1"], "lora.dropout is 1.0; allowed: from 0 to below 1"),
        (["lora.targets='('"], r"lora.targets is '\(': .*; allowed: a regular expression"),
        (["train.ema=0.9"], "train.ema is 0.9; allowed: null, as the average of adapters is not"),
        (["lora.ranks=8"], "lora.ranks is no known key .did you mean 'rank'"),
        (["model.freeze=fc"], "model.freeze is 'fc'; allowed: null, as lora freezes all weights"),
        (
            ["cram=null", "method={name: dpf, target: global:0.9, args: {end: 75 %}}"],
            "lora is given; allowed: null, as dpf trains the weights themselves",
        ),
    ],
)
def test_what_is_not_allowed_is_named(sets, message):
    with pytest.raises(ValueError, match=message):
        given(*sets)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["lora.targets=nothing"], "lora.targets: only='nothing' matches no compressible weight"),
        (["lora.also_train=nothing"], "lora.also_train='nothing' matches no parameter"),
        (["lora.also_train=fc"], "lora.also_train='fc' matches fc.weight, which have an adapter"),
    ],
)
def test_patterns_that_fit_nothing_are_named_before_training(sets, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, given(*sets), data())


def test_weights_that_take_no_adapter_are_named():
    chosen = given("lora.targets=attention|grouped")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2)
            self.grouped = torch.nn.Conv2d(4, 4, 3, groups=2)

    with pytest.raises(ValueError, match=r"attention.out_proj.weight.*allowed: weights of Linear"):
        add_adapters_(chosen, Net(), seed=0)
    with pytest.raises(ValueError, match="Net has no layer that takes an adapter"):
        add_adapters_(given(), Net(), seed=0)


def test_adapters_that_a_model_brings_along_are_its_own(tmp_path, monkeypatch):
    def net(classes):
        torch.manual_seed(0)
        layers = torch.nn.Flatten(), torch.nn.Linear(64, classes)
        config = peft.LoraConfig(r=2, target_modules=["1"], init_lora_weights=False)
        return peft.inject_adapter_in_model(config, torch.nn.Sequential(*layers))

    monkeypatch.setitem(models._MODELS, "brought", net)
    chosen = given(method="sgd", lora="lora=null")
    chosen = replace(chosen, model=replace(chosen.model, name="brought"))
    trained = run(tmp_path / "own", chosen, data())
    assert "1.lora_A.default.weight" in load_file(tmp_path / "own" / "model.safetensors")
    assert torch.equal(trained.model[1].base_layer.weight, net(10)[1].base_layer.weight)
    with pytest.raises(ValueError, match="lora adds adapters, and the model has some already"):
        run(tmp_path / "both", replace(chosen, lora=given().lora), data())


def test_a_missing_peft_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r'lora needs peft: pip install "torchcram\[lora\]"'):
        run(tmp_path / "run", given(), data())
    assert not (tmp_path / "run").exists()


def test_a_transfer_trains_no_adapters():
    plain = given(lora="lora=null")
    with pytest.raises(ValueError, match="the section lora trains adapters, and a transfer"):
        require_new_head(plain, given())
    require_new_head(given(), plain)


def test_texts_need_a_trained_head():
    with pytest.raises(ValueError, match=r"lora.also_train is None; allowed: a regular expression"):
        load_recipe("squad/minilm-l6/adam", ["model.freeze=null", "lora={}"])
    chosen = ["model.freeze=null", "lora={also_train: qa_outputs}"]
    assert load_recipe("squad/minilm-l6/adam", chosen).lora.rank == 8
