"""Packed integers in folders of Transformers: written from the description of the format alone."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchcram import compress, compressible_weights
from torchcram.integrations.compressed_tensors import (
    BITS,
    check_layers,
    pack_words,
    read_quantizer,
    save_compressed_tensors,
)

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

BLOCKS = r"\.\d+\."  # names of the weights in numbered layers: no embeddings and no head
TARGETS = ("int8", "int4", "int4:g16", "int2:g8", "uniform:0.5+int8", "nm:2:4+int4:g8")
DOWN = "model.layers.1.mlp.down_proj"  # 24 inputs, no multiple of 16


def unpack(words, bits, columns):
    """Every row is a number of 32 bits per word, and its digits are the integers."""
    rows = []
    for row in words.tolist():
        number = sum(word % 2**32 << 32 * place for place, word in enumerate(row))
        digits = [number >> bits * column for column in range(columns)]
        rows.append([digit % 2**bits - 2 ** (bits - 1) for digit in digits])
    return torch.tensor(rows, dtype=torch.int8)


def read_weight(state, layer, bits):
    """The weight of a layer in a file."""
    scale, (outputs, inputs) = state[f"{layer}.weight_scale"], state[f"{layer}.weight_shape"]
    integers = unpack(state[f"{layer}.weight_packed"], bits, int(inputs))
    assert len(integers) == outputs
    return integers * scale.repeat_interleave(int(inputs) // scale.shape[1], 1)


def llama(**changes):
    """A Llama with a few weights, whose embeddings are its head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=32, **changes)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture
def small(model, operator):
    """The model with all layers in numbered blocks compressed."""
    return compress(model, operator, weights=compressible_weights(model, only=BLOCKS))


def save(small, folder, operator):
    save_compressed_tensors(
        small, folder, operator, weights=compressible_weights(small, only=BLOCKS)
    )
    config = json.loads((folder / "config.json").read_text())
    return safetensors.load_file(folder / "model.safetensors"), config["quantization_config"]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(BITS), st.integers(1, 4), st.integers(1, 40))
def test_integers_come_back_from_words(data, bits, rows, columns):
    lowest = -(2 ** (bits - 1))
    numbers = st.integers(lowest, -lowest - 1)
    row = st.lists(numbers, min_size=columns, max_size=columns)
    drawn = data.draw(st.lists(row, min_size=rows, max_size=rows))
    integers = torch.tensor(drawn, dtype=torch.int8)
    words = pack_words(integers, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack(words, bits, columns), integers)


def test_a_word_by_hand():
    words = pack_words(torch.tensor([[-8, 7, 0, 1, 2, 3, 4, 5, -1]], dtype=torch.int8), 4)
    assert words.tolist() == [[0xDCBA98F0 - 2**32, 7]]


@pytest.mark.filterwarnings("ignore:int.* takes one scale per output channel")
@pytest.mark.parametrize("operator", TARGETS)
def test_every_weight_is_in_the_file(small, operator, tmp_path):
    state, config = save(small, tmp_path, operator)
    quantize = read_quantizer(operator)
    weights = compressible_weights(small, only=BLOCKS)
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        assert torch.equal(read_weight(state, layer, quantize.bits), weight.detach()), name
        assert name not in state
    rest = small.state_dict().keys() - weights.keys() - {"lm_head.weight"}  # which is tied
    assert {name for name in state if "weight_" not in name} == rest
    assert all(torch.equal(state[name], small.state_dict()[name]) for name in rest)
    assert config["quant_method"] == "compressed-tensors"
    assert config["ignore"] == ["model.embed_tokens", "lm_head"]
    groups = [group["weights"] for group in config["config_groups"].values()]
    assert {group["num_bits"] for group in groups} == {quantize.bits}
    assert groups[-1]["group_size"] == quantize.group_size


@pytest.mark.parametrize("operator", ["int8"])
def test_all_who_may_read_the_folder_may_read_the_weights(small, operator, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    save(small, folder, operator)
    (weights,) = folder.glob("*.safetensors")
    assert weights.stat().st_mode & 0o777 == folder.stat().st_mode & 0o644


@pytest.mark.filterwarnings("ignore:int.* takes one scale per output channel")
@pytest.mark.parametrize("operator", ["int4:g16"])
def test_layers_that_a_group_does_not_divide_are_named(small, operator, tmp_path):
    state, config = save(small, tmp_path, operator)
    named, others = config["config_groups"].values()
    assert named["targets"] == [DOWN.replace("1", "0"), DOWN]
    assert (named["weights"]["strategy"], others["weights"]["strategy"]) == ("channel", "group")
    assert others["targets"] == ["Linear"]
    assert state[f"{DOWN}.weight_scale"].shape == (16, 1)
    assert state[f"{DOWN.replace('down', 'up')}.weight_scale"].shape == (24, 1)  # 16 inputs


def test_rows_of_zeros_and_negative_zeros_are_written(model, tmp_path):
    small = compress(model, "int4")
    weight = small.get_parameter(f"{DOWN}.weight")
    with torch.no_grad():
        weight[0] = 0.0
        weight[1] = weight[1].masked_fill(weight[1].abs() < weight[1].abs().max(), -0.0)
    save_compressed_tensors(small, tmp_path, "int4")
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert torch.equal(read_weight(state, DOWN, 4), weight.detach())


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ("uniform:0.5", "uniform:0.5 does not quantize; allowed are int2, int4 and int8"),
        ("int3", "int3 has integers of 3 bits; allowed are int2, int4 and int8"),
        ("nm:2:4+int6:g8", "has integers of 6 bits"),
        ("int2", "no scales reproduce the values of model.layers.0.self_attn.q_proj.weight with 2"),
    ],
)
def test_targets_that_the_format_cannot_hold(operator, message, model, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_compressed_tensors(compress(model, "int8"), tmp_path / "folder", operator)
    assert not (tmp_path / "folder").exists()


def test_models_that_the_format_cannot_hold(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="Sequential is not a model of Transformers"):
        save_compressed_tensors(compress(net, "int8"), tmp_path / "folder", "int8")
    half = compress(llama().bfloat16(), "int8")
    with pytest.raises(ValueError, match=r"q_proj\.weight is torch\.bfloat16; only torch\.float32"):
        save_compressed_tensors(half, tmp_path / "folder", "int8")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Linear(4, 4), nn.Conv1d(4, 4, 1)], r"1\.weight belongs to a layer of type Conv1d"),
        ([nn.LSTM(4, 4)], r"0\.weight_ih_l0 belongs to a layer of type LSTM"),
        ([nn.MultiheadAttention(4, 2)], "in_proj_weight belongs to a layer of type Multihead"),
    ],
)
def test_layers_that_the_format_cannot_hold(layers, message):
    net = nn.Sequential(*layers)
    with pytest.raises(ValueError, match=message):
        check_layers(net, compressible_weights(net))


def test_a_weight_of_two_layers_is_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    with pytest.raises(ValueError, match=r"0\.weight, 1\.weight are one tensor"):
        check_layers(net, compressible_weights(net))


def test_a_model_that_saves_something_else_is_refused(model, tmp_path, monkeypatch):
    small = compress(model, "int8")
    plain = type(small).save_pretrained
    monkeypatch.setattr(type(small), "save_pretrained", lambda self, to, **_: plain(self, to))
    with pytest.raises(ValueError, match="the packed weights of 0 layers instead of 14"):
        save_compressed_tensors(small, tmp_path, "int8")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", TARGETS)
def test_transformers_loads_the_same_model(small, operator, tmp_path):
    pytest.importorskip("compressed_tensors")
    save(small, tmp_path, operator)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())
    packed = loaded.get_submodule(DOWN).weight_packed
    assert packed.dtype == torch.int32
    tokens = torch.randint(40, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, small(tokens).logits)
    weights = [each.get_parameter(f"{DOWN}.weight") for each in (loaded, small)]
    assert torch.equal(*weights)
