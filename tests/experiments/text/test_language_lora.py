"""LoRA by the recipes for language models, and the commands that follow a training."""

from pathlib import Path

import pytest
import torch
from commands import succeed
from safetensors.torch import load_file
from tiny_language import RECIPE, SETTINGS

from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.adapters import add_adapters_
from torchcram.experiments.recipe.build import build_initial_model

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.usefixtures("_here")
FORMS = {"cram-plus-multi-lora": "cram-plus-multi", "cram-plus-multi-lora-1x": "cram-plus-multi-1x"}


@pytest.mark.parametrize("method", FORMS)
def test_the_recipes_differ_by_their_adapters(method):
    ours, whole = (load_recipe(RECIPE.format(name)) for name in (method, FORMS[method]))
    assert (ours.cram, ours.train, whole.lora) == (whole.cram, whole.train, None)
    assert ours.lora == load_recipe(RECIPE.format("adamw-lora")).lora
    assert ours.passes == whole.passes


def test_every_layer_of_the_blocks_has_an_adapter(decoder):
    chosen = load_recipe(RECIPE.format("adamw-lora"), [f"model.name={decoder}", *SETTINGS])
    model = build_initial_model(chosen, classes=0, seed=0)
    add_adapters_(chosen, model, seed=0)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    layers = {name.partition(".lora_")[0] for name in trained}
    assert len(layers) == 2 * 7  # q, k, v, o, gate, up, down
    assert len(trained) == 2 * len(layers)
    assert all(".layers." in name for name in layers)


def test_commands_work_with_the_merged_model(decoder, paragraphs):
    sets = [f"model.name={decoder}", *SETTINGS, "compress.to=[uniform:0.5]", "lora.rank=2"]
    options = [word for setting in sets for word in ("--set", setting)]
    name = RECIPE.format("cram-plus-multi-lora")
    succeed("train", name, "--data", paragraphs, *options, "--out", "run")
    stored, trained = load_file(decoder / "model.safetensors"), load_file("run/model.safetensors")
    trained = {key.removeprefix("model."): value for key, value in trained.items()}
    assert {key for key in trained if not trained[key].equal(stored.get(key, trained[key]))} == {
        key for key in stored if key.endswith("proj.weight")
    }
    (seed,) = read_result("run/result.json").seeds
    for word, further in (("compress", ["--to", "nm:2:4"]), ("evaluate", [])):
        assert f"{seed.dense:.1f}" in succeed(word, "run", "--data", paragraphs, *further).stdout
    words = ["export", "run", "--to", "uniform:0.5", "--format", "transformers", "--out", "files"]
    succeed(*words, "--data", paragraphs)
    from transformers import AutoModelForCausalLM

    (folder,) = Path("files").iterdir()
    model = AutoModelForCausalLM.from_pretrained(folder)
    up = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    assert (up == 0).float().mean() == 0.5

    at = ["--at", "uniform:0.5", "--out", "on", "--epochs", 1]
    succeed("finetune", "run", *at, "--data", paragraphs, "--set", "train.early_stopping=null")
    tuned = load_file("on/model.safetensors")["model.model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(tuned == 0, up == 0)
    assert not torch.equal(tuned, up)
