"""What notices that a file was loaded into a model."""

import json

import pytest
import torch
from native_library import needs_kernels
from nets import ConvNet
from torch import nn
from torch.optim import SGD

from torchcram import CrAM, artifact, compress, compressible_weights
from torchcram.runtime.cpu.modules import SparseLinear
from torchcram.runtime.cpu.packing import check_packed


@pytest.mark.parametrize("operator", [None, "global:0.5", "int8", "nm:2:4"])
def test_autograd_knows_that_weights_have_changed(tmp_path, operator):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    artifact.save(model, tmp_path / "file", operator=operator)
    found = model(torch.randn(2, 8)).sum()
    artifact.load(tmp_path / "file", model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


@needs_kernels
def test_a_packed_matrix_out_of_a_file_is_checked(tmp_path):
    weight = torch.randn(32, 64) * (torch.rand(32, 64) < 0.3)
    model, x = nn.Sequential(SparseLinear(weight, None)), torch.randn(3, 64)
    artifact.save(model, tmp_path / "good")
    bad = model[0].packed.clone()
    columns = slice(*bad[:80].view(torch.int64)[8:10].tolist())
    bad[columns].view(torch.int16)[2:6] = -1  # rows that are not there
    with pytest.raises(ValueError, match="not a packed sparse matrix"):
        check_packed(bad)
    artifact.save({"0.packed": bad}, tmp_path / "bad")
    expected = model(x)
    with pytest.raises((ValueError, RuntimeError), match="not a packed sparse matrix"):
        artifact.load(tmp_path / "bad", model)
    assert torch.equal(model(x), expected)
    model[0].packed.zero_()
    assert torch.equal(artifact.load(tmp_path / "good", model)(x), expected)


def test_the_weights_that_were_trained_are_known_again(tmp_path):
    path, model = tmp_path / "model.safetensors", ConvNet()
    weights = compressible_weights(model, skip="fc")
    CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5", weights=weights)
    manifest = artifact.save(model, path)
    assert manifest.trained == tuple(weights)
    assert artifact.read_manifest(path) == manifest
    loaded = artifact.load(path, ConvNet())
    with pytest.warns(UserWarning, match=r"left dense in training with CrAM: fc\.weight"):
        compress(loaded, "global:0.9")
    assert artifact.save(ConvNet(), path).trained == ()
    assert '"trained"' not in artifact.read_manifest(path).to_json()
    for junk in (["nowhere"], [3], "fc.weight", None):
        text = json.dumps({**json.loads(manifest.to_json()), "trained": junk})
        with pytest.raises(ValueError, match="trained"):
            artifact.Manifest.from_json(text)
