"""How much of common models is compressed, and what is said of the rest."""

import gc
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchcram import (
    CoverageWarning,
    CrAM,
    GlobalTopK,
    artifact,
    compress,
    compressible_weights,
    sparsity,
)
from torchcram.weights import uncovered


def transformers_model(kind, config, **sizes):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def mixtral():
    return transformers_model(
        "MixtralForCausalLM", "MixtralConfig", vocab_size=64, hidden_size=32, intermediate_size=48,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip


def gpt2():
    return transformers_model(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=1, n_head=2,
        n_positions=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def vit():
    vision = pytest.importorskip("torchvision.models.vision_transformer")
    return vision.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64
    )


def hugging_face_vit():
    return transformers_model(
        "ViTForImageClassification", "ViTConfig", hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
    )  # fmt: skip


MODELS = {
    "nn.TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 128, batch_first=True), 2
    ),
    "nn.Transformer": lambda: nn.Transformer(32, 2, 1, 1, 64, batch_first=True),
    "ViT": vit,
    "ViT of Transformers": hugging_face_vit,
    "LSTM": lambda: nn.ModuleDict({"rnn": nn.LSTM(32, 64, 2), "head": nn.Linear(64, 10)}),
    "Mixtral": mixtral,
    "GPT-2": gpt2,
}


@pytest.mark.parametrize("name", MODELS)
def test_nearly_all_of_common_models_is_compressed(name):
    model = MODELS[name]()
    weights = compressible_weights(model)  # a warning would be an error here
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = sum(
        parameter.numel()
        for path, parameter in model.named_parameters()
        if id(parameter) not in tables and not path.endswith(("embedding", "embeddings"))
    )
    assert sum(weight.numel() for weight in weights.values()) > 0.95 * others


class Mixing(nn.Module):
    """A Linear layer, matrices in no layer, and what is to stay dense whatever its shape."""

    def __init__(self, matrices=1, size=4):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        for i in range(matrices):
            self.register_parameter(f"mixing{i}", nn.Parameter(torch.randn(size, size)))
        self.embedding = nn.Embedding(100, 8)
        self.norm = nn.LayerNorm((8, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 50, 8))
        self.position_embeddings = nn.Parameter(torch.randn(50, 8))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.mask_tokens = nn.Parameter(torch.randn(9, 8))
        self.relative_position_bias_table = nn.Parameter(torch.randn(49, 8))
        self.expert_bias = nn.Parameter(torch.randn(9, 8))
        self.layer_scale = nn.Parameter(torch.randn(1, 800))


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(warning.category is CoverageWarning for warning in found)
    return [str(warning.message) for warning in found]


def test_what_is_not_covered_is_named_with_its_share():
    model = Mixing()
    (message,) = caught(lambda: compressible_weights(model))
    assert message.startswith("20% of the parameters of this Mixing, embeddings, norms and biases")
    assert "are in no layer that is compressed: mixing0. To compress" in message
    assert list(uncovered(model, compressible_weights(model))) == ["mixing0"]


def test_a_tenth_is_not_worth_a_word():
    assert not caught(lambda: compressible_weights(Mixing(size=2)))
    assert len(caught(lambda: compressible_weights(Mixing(matrices=12, size=2)))) == 1


def test_at_most_eight_names():
    (message,) = caught(lambda: compressible_weights(Mixing(12)))
    named = re.search(r"compressed: (.*?)\. To", message)[1]
    assert named == ", ".join(f"mixing{i}" for i in range(8)) + " and 4 more"


def test_once_per_model_and_its_compressed_copies():
    model = Mixing()
    assert len(caught(lambda: compressible_weights(model))) == 1
    assert not caught(lambda: compressible_weights(model, dense_ends=False))
    small = compress(model, "global:0.5")
    assert not caught(lambda: sparsity(compressible_weights(small)))
    assert len(caught(lambda: compressible_weights(Mixing()))) == 1
    assert len(caught(lambda: compress(Mixing(), "global:0.5"))) == 1
    other = Mixing()
    base = torch.optim.SGD(other.parameters(), lr=0.1)
    assert len(caught(lambda: CrAM(other, base, GlobalTopK(0.5)))) == 1


def test_models_that_were_warned_about_can_go():
    from torchcram.weights import _warned

    gc.collect()
    before = len(_warned)
    caught(lambda: compressible_weights(Mixing()))
    gc.collect()
    assert len(_warned) <= before


def test_a_choice_of_weights_is_no_surprise(tmp_path):
    model = Mixing()
    assert not caught(lambda: compressible_weights(model, only="fc"))
    assert not caught(lambda: compressible_weights(nn.Sequential(model, nn.Linear(8, 8)), skip="1"))
    everything = {**compressible_weights(model, only="."), "mixing0": model.mixing0}
    assert not caught(lambda: compress(model, "global:0.5", weights=everything))
    assert not caught(lambda: artifact.save(model, tmp_path / "model.safetensors"))


def test_the_weights_of_others_can_be_given():
    model = Mixing()
    everything = {**compressible_weights(model, only="."), "mixing0": model.mixing0}
    twin = compress(model, "uniform:0.5", weights=everything)
    assert int(twin.mixing0.count_nonzero()) == 8


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (nn.utils.parametrizations.weight_norm, r"1\.parametrizations\.weight\.original1"),
        (nn.utils.parametrizations.spectral_norm, r"1\.parametrizations\.weight\.original"),
        (lambda layer: prune.random_unstructured(layer, "weight", 0.5), r"1\.weight_orig"),
        (lambda _: nn.Bilinear(4, 4, 4), r"1\.weight"),
    ],
)
def test_weights_behind_something_else_are_named(change, name):
    model = nn.Sequential(nn.Linear(4, 4), change(nn.Linear(4, 4)))
    (message,) = caught(lambda: compressible_weights(model))
    assert re.search(f"compressed: {name}", message)


def test_tied_weights_are_covered_where_one_of_their_layers_is():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bare = nn.Parameter(torch.randn(8, 8))
            self.fc = nn.Linear(8, 8)
            self.fc.weight = self.bare

    model = Net()
    assert not caught(lambda: compressible_weights(model))
    assert list(compressible_weights(model)) == ["bare"]


def test_lazy_layers_elsewhere_do_not_get_in_the_way():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d())
    assert list(compressible_weights(model)) == ["0.weight"]
