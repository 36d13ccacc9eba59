"""Weight files: tied weights are stored once, and other files are refused in a short line."""

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from torchcram.experiments.io.weights import load_model_, save_model


def tied_model():
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64, bias=False))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_stored_once(tmp_path):
    model, path = tied_model(), tmp_path / "model.safetensors"
    save_model(model, path)
    assert list(load_file(path)) == ["0.weight"]
    other = tied_model()
    for load in (load_model_, load_model):  # ours, and that of safetensors
        nn.init.zeros_(other[0].weight)
        load(other, path)
        assert torch.equal(other[0].weight, model[0].weight)
        assert other[0].weight is other[1].weight


def test_files_of_one_model_have_the_same_bytes(tmp_path):
    model = tied_model()
    for number in range(8):
        save_model(model, tmp_path / str(number))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_files_with_all_names_of_tied_weights_are_read(tmp_path):
    model, path = tied_model(), tmp_path / "model.safetensors"
    weight = torch.ones(64, 8)
    save_file({"0.weight": weight, "1.weight": weight.clone()}, path)
    load_model_(model, path)
    assert torch.equal(model[1].weight, weight)


def test_parts_of_one_tensor_are_all_stored(tmp_path):
    model, whole = nn.Module(), torch.arange(8.0)
    for name, part in {"first": whole[:4], "second": whole[4:], "all": whole}.items():
        model.register_buffer(name, part)
    save_model(model, tmp_path / "model.safetensors")
    assert len(load_file(tmp_path / "model.safetensors")) == 3


def test_empty_tensors_are_all_stored(tmp_path):
    model = nn.Module()
    model.register_buffer("first", torch.zeros(0))
    model.register_buffer("second", torch.zeros(0))
    save_model(model, tmp_path / "model.safetensors")
    load_model_(model, tmp_path / "model.safetensors")


def test_a_file_of_another_model_is_refused_in_a_short_line(tmp_path):
    path = tmp_path / "other.safetensors"
    save_model(nn.Sequential(*(nn.Linear(2, 2) for _ in range(40))), path)
    with pytest.raises(ValueError, match=r"other\.safetensors .* expected model: .*conv") as caught:
        load_model_(nn.ModuleDict({"conv": nn.Conv2d(1, 1, 1)}), path)
    assert "has others: 0.bias, 0.weight" in str(caught.value)
    assert "more" in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))
