import copy

import pytest
import torch
from nets import ConvNet, closure_for, images, same, snapshot
from torch.optim import LBFGS, SGD, AdamW

from torchcram import CRAM, CrAM, GlobalTopK, compress_, compressible_weights, hold_masks, sparsity


def build(kind, **options):
    model = ConvNet()
    optimizer = kind(model.parameters(), **{"lr": 0.05, **options})
    weights = compressible_weights(model)
    return model, optimizer, weights, GlobalTopK(0.7).select(weights)


def moments(optimizer, weight):
    return [v for v in optimizer.state[weight].values() if v.shape == weight.shape]


@pytest.mark.parametrize("with_closure", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {"momentum": 0.9, "weight_decay": 0.1}), (AdamW, {}), (AdamW, {"fused": True})],
)
def test_pruned_weights_and_their_moments_stay_zero(kind, options, with_closure):
    model, optimizer, weights, masks = build(kind, **options)
    held = hold_masks(optimizer, weights, masks)
    assert sparsity(weights) == pytest.approx(0.7, abs=1e-3)
    before = snapshot(model)
    for _ in range(4):
        closure = closure_for(model, optimizer, images())
        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert not same(snapshot(model), before)
    for name, mask in masks.items():
        assert (weights[name][~mask] == 0).all()
        if name != "unused.weight":
            assert len(moments(optimizer, weights[name])) > 0
            assert all((state[~mask] == 0).all() for state in moments(optimizer, weights[name]))
    held.remove()
    optimizer.step(closure_for(model, optimizer, images()))
    assert sparsity(compressible_weights(model)) < 0.5


def test_a_with_block_and_lbfgs():
    model, optimizer, weights, masks = build(LBFGS, max_iter=3)
    with hold_masks(optimizer, weights, masks):
        optimizer.step(closure_for(model, optimizer, images()))
        assert all((weights[name][~mask] == 0).all() for name, mask in masks.items())
    optimizer.step(closure_for(model, optimizer, images()))
    assert sparsity(compressible_weights(model)) < 0.7


def test_a_new_head_trains_freely():
    model = ConvNet()
    weights = compressible_weights(model, skip="fc")
    masks = compress_(model, "global:0.9", weights=weights)
    optimizer = SGD(model.fc.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="trains none of the weights with a mask"):
        hold_masks(optimizer, weights, masks)
    optimizer = SGD(model.parameters(), lr=0.1)
    hold_masks(optimizer, weights, masks)
    optimizer.step(closure_for(model, optimizer, images()))
    assert sparsity({"fc": model.fc.weight}) == 0
    assert sparsity(weights) == pytest.approx(0.9, abs=1e-2)


@pytest.mark.parametrize(
    ("name", "mask", "says"),
    [
        ("nowhere", torch.ones(2, 2, dtype=torch.bool), "'nowhere'"),
        ("fc.weight", torch.ones(2, 2, dtype=torch.bool), r"shape \(2, 2\).*\(5, 4\)"),
        ("fc.weight", torch.ones(5, 4), r"torch\.float32"),
    ],
)
def test_masks_that_do_not_fit_are_refused(name, mask, says):
    model, optimizer, weights, masks = build(SGD)
    before = snapshot(model)
    with pytest.raises(ValueError, match=says):
        hold_masks(optimizer, weights, {**masks, name: mask})
    assert same(snapshot(model), before)


def test_moments_that_are_there_already_are_cleared():
    model, optimizer, weights, masks = build(AdamW)
    optimizer.step(closure_for(model, optimizer, images()))
    hold_masks(optimizer, weights, masks)
    for name in ("conv1.weight", "fc.weight"):
        assert all((state[~masks[name]] == 0).all() for state in moments(optimizer, weights[name]))


def test_momentum_that_comes_back_from_before_the_masks():
    model, optimizer, weights, masks = build(SGD, momentum=0.9)
    for _ in range(3):
        optimizer.step(closure_for(model, optimizer, images()))
    dense = copy.deepcopy(optimizer.state_dict())
    with hold_masks(optimizer, weights, masks):
        optimizer.load_state_dict(dense)  # its momentum moves pruned weights, too
        (momentum,) = moments(optimizer, weights["fc.weight"])
        assert (momentum[~masks["fc.weight"]] != 0).any()
        for _ in range(3):
            optimizer.step(closure_for(model, optimizer, images()))
            for name, mask in masks.items():
                assert (weights[name][~mask] == 0).all(), name


def test_with_cram_closure_and_context_take_the_same_step():
    def trained(with_closure):
        torch.manual_seed(0)
        model, base, weights, masks = build(SGD)
        optimizer = CrAM(model, base, GlobalTopK(0.5), rho=2.0, rule=CRAM)
        hold_masks(optimizer, weights, masks)
        batch = images()
        closure = closure_for(model, optimizer, batch)
        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            with optimizer.compressed():
                closure()
            optimizer.step()
        return snapshot(model)

    one, two = trained(True), trained(False)
    assert all(torch.equal(one[n], two[n]) for n in one if "running" not in n and "num_" not in n)


def test_no_masks_to_hold():
    model, optimizer, weights, _ = build(SGD)
    with pytest.raises(ValueError, match="the operator has none"):
        hold_masks(optimizer, weights, compress_(model, "int4"))
