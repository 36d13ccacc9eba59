"""The weights that were trained for compression are those that are compressed."""

import copy
import warnings

import pytest
import torch
from nets import ConvNet, closure_for, images, same, snapshot
from torch import nn
from torch.optim import SGD

from torchcram import CrAM, compress, compress_, compressible_weights, sparsity
from torchcram.trained import trained_weights


def trained(skip="fc"):
    model = ConvNet()
    weights = compressible_weights(model, skip=skip)
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5", weights=weights)
    optimizer.step(closure_for(model, optimizer, images()))
    return model, optimizer


def test_the_optimizer_compresses_what_it_trained():
    model, optimizer = trained()
    small = optimizer.compress("global:0.9")
    assert same(snapshot(small), snapshot(compress(model, "global:0.9", weights=optimizer.weights)))
    assert torch.equal(small.fc.weight, model.fc.weight)
    assert sparsity(compressible_weights(small, skip="fc")) == pytest.approx(0.9, abs=1e-2)


def test_a_compiled_model_is_compressed_without_its_wrapper():
    model, _ = trained()
    wrapper = torch.compile(model, backend="eager")
    weights = compressible_weights(wrapper, skip="fc")
    optimizer = CrAM(wrapper, SGD(wrapper.parameters(), lr=0.1), "global:0.5", weights=weights)
    small = optimizer.compress("global:0.9")
    assert type(small) is ConvNet
    plain = compress(model, "global:0.9", weights=compressible_weights(model, skip="fc"))
    assert same(snapshot(small), snapshot(plain))
    assert optimizer.state_dict()["cram"]["weights"] == trained_weights(model)


def test_other_weights_are_named_once():
    model, optimizer = trained()
    with pytest.warns(UserWarning, match=r"1 of the 4 .* left dense in training.*: fc\.weight\."):
        compress(model, "global:0.9")
    compress(model, "global:0.9")  # said once
    optimizer.compress("global:0.9")


def test_the_warning_points_at_the_caller():
    for call in (compress, compress_):
        model, _ = trained()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call(model, "global:0.9")
        assert [warning.filename for warning in said] == [__file__]


def test_fewer_weights_and_models_that_no_optimizer_knows():
    model, _ = trained()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compress(model, "global:0.9", weights=compressible_weights(model, only="conv1"))
        compress(copy.deepcopy(model), "global:0.9")
        compress(ConvNet(), "global:0.9")
    assert not said


def test_copies_and_wrappers_know_it_too():
    model, _ = trained()
    names = ["conv1.weight", "up.weight", "unused.weight"]
    assert trained_weights(model) == names
    assert trained_weights(nn.Sequential(model)) == [f"0.{name}" for name in names]
    small = compress(model, "global:0.9", weights=compressible_weights(model, skip="fc"))
    assert trained_weights(small) == names
    assert trained_weights(copy.deepcopy(model)) == []


def test_a_second_training_replaces_the_first():
    model, _ = trained()
    CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5")
    compress(model, "global:0.9")
    assert "fc.weight" in trained_weights(model)


def test_the_state_says_which_weights_were_trained():
    model, optimizer = trained()
    state = optimizer.state_dict()
    assert state["cram"]["weights"] == ["conv1.weight", "up.weight", "unused.weight"]
    other = CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5")
    with pytest.warns(UserWarning, match=r"compressed other weights; only now: fc\.weight"):
        other.load_state_dict(state)
    del state["cram"]["weights"]  # as before they were recorded
    other.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())
