"""Pruners meet their data: all or nothing, everything else as it was, errors by name."""

import copy
from dataclasses import replace

import pytest
import torch
from nets import ConvNet, images, mlp, same, snapshot
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import (
    Chain,
    GlobalTopK,
    Quantize,
    UniformTopK,
    compress,
    compress_,
    compressible_weights,
)
from torchcram.pruners import (
    BoundPruner,
    Calibration,
    Obs,
    SparseGPT,
    Wanda,
    bind,
    parse_pruner,
    prune_,
)

HALF = UniformTopK(0.5)
PRUNERS = [Obs(HALF, gradients=4, recomputations=2), Wanda(HALF), SparseGPT(HALF)]


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def samples(count=4):
    return [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(count)]


@pytest.fixture(params=PRUNERS, ids=str)
def pruner(request):
    return request.param


def assert_refused(model, pruner, batches, message, *, error=ValueError, how=loss, weights=None):
    """The error comes; weights, modes, hooks and flags are what they were."""
    before, modes = snapshot(model), [module.training for module in model.modules()]
    with pytest.raises(error, match=message):
        prune_(model, pruner, batches, loss=how, weights=weights)
    assert same(before, snapshot(model))
    assert [module.training for module in model.modules()] == modes
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_pruner_is_an_operator_in_every_call(pruner):
    model, batches = mlp(), samples()
    masks = compress_(model, bind(pruner, model, batches, loss=loss))
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {
        "0.weight": 64,
        "2.weight": 32,
    }
    for name, mask in masks.items():
        assert torch.equal(model.get_parameter(name) != 0, mask)
    assert all(module.training for module in model.modules())
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_the_same_data_gives_the_same_weights(pruner):
    model, batches = mlp(), samples()
    twin = copy.deepcopy(model)
    prune_(model, pruner, batches, loss=loss)
    prune_(twin, pruner, batches, loss=loss)
    assert same(snapshot(model), snapshot(twin))


def test_only_the_given_weights_change(pruner):
    model, batches = mlp(), samples()
    before = snapshot(model)
    weights = compressible_weights(model, only="2")
    masks = prune_(model, pruner, batches, loss=loss, weights=weights)
    changed = {
        name for name, value in snapshot(model).items() if not torch.equal(value, before[name])
    }
    assert list(masks) == ["2.weight"]
    assert changed == {"2.weight"}


def test_an_empty_loader_is_an_error(pruner):
    assert_refused(
        mlp(), pruner, [], "needs at least one batch|4 gradients need as many batches.*are 0"
    )


def test_an_iterator_is_refused(pruner):
    assert_refused(mlp(), pruner, iter(samples()), "batches is a list_iterator")
    assert_refused(mlp(), pruner, 7, "batches is a int")


def test_what_no_batch_reaches_is_named(pruner):
    model = ConvNet()
    weights = compressible_weights(model, skip="up")
    batches = [images() for _ in range(4)]
    assert_refused(model, pruner, batches, r"reaches.*: unused\.weight", weights=weights)


def test_bad_numbers_are_named(pruner):
    batches = samples()
    batches[2][0][1, 3] = float("nan")
    assert_refused(mlp(), pruner, batches, r"not finite in.*0\.weight")
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"not all weights are finite in: 2\.weight"):
        prune_(model, pruner, samples(), loss=loss)


def test_an_error_halfway_leaves_everything_as_it_was(pruner):
    calls = []

    def failing(model, batch):
        calls.append(float(model[0].weight.detach().count_nonzero()))
        if len(calls) > 6:  # every pruner but Wanda, which looks once, has pruned something by then
            raise KeyboardInterrupt("now")
        return loss(model, batch)

    batches = samples(7 if isinstance(pruner, Wanda) else 4)
    model = mlp().train()
    model[1].eval()
    assert_refused(model, pruner, batches, "now", error=KeyboardInterrupt, how=failing)


def test_sparsegpt_had_pruned_a_layer_when_it_failed():
    seen = []

    class Failing(nn.Module):
        def forward(self, x):
            seen.append(int(model[0].weight.detach().count_nonzero()))
            if seen[-1] == 64:
                raise RuntimeError("too late")
            return torch.relu(x)

    model = mlp()
    model[1] = Failing()
    assert_refused(model, SparseGPT(HALF), samples(), "too late", error=RuntimeError)
    assert set(seen[:-1]) == {128}
    assert seen[-1] == 64


def test_a_result_that_is_not_finite_is_not_left_there():
    class Divided(Wanda):
        def prune_(self, weights, calibration):  # noqa: ARG002
            for weight in weights.values():
                weight.div_(0)
            return {}

    assert_refused(mlp(), Divided(HALF), samples(), r"not all weights are finite in: 0\.weight, 2")


def test_obs_needs_a_loss_and_enough_batches():
    obs = PRUNERS[0]
    assert_refused(mlp(), obs, samples(), "gradients need a loss", how=None)
    assert_refused(mlp(), obs, samples(3), "4 gradients need as many batches, and there are 3")
    for bad in (lambda *_: torch.ones(2), lambda *_: 1.0, lambda *_: torch.ones(())):
        assert_refused(mlp(), obs, samples(), "must return one number with a gradient", how=bad)


@pytest.mark.parametrize("pruner", PRUNERS[1:], ids=str)
def test_layers_whose_inputs_are_unknown_are_named(pruner):
    assert_refused(ConvNet(), pruner, [images()], r"'up\.weight' is the weight of ConvTranspose2d")


def test_the_model_of_the_data_is_the_one_that_is_pruned(pruner):
    model, other = mlp(), mlp()
    bound = bind(pruner, model, samples(), loss=loss)
    with pytest.raises(ValueError, match=r"is bound to another model: '0\.weight'"):
        compress_(other, bound)
    with pytest.raises(ValueError, match="a copy is another model"):
        compress(model, bound)


def test_without_data_it_says_what_is_missing(pruner):
    with pytest.raises(ValueError, match=f"{pruner} looks at data first: prune_"):
        compress_(mlp(), pruner)


def test_every_pruner_of_a_chain_is_bound_and_others_stay():
    model, batches = mlp(), samples()
    chain = parse_pruner("uniform:0.1+wanda@row:0.5+int8")
    bound = bind(chain, model, batches)
    assert str(bound) == str(chain)
    assert isinstance(bound, Chain)
    assert isinstance(bound.first.then, BoundPruner)
    assert bound.then == Quantize(8)
    masks = prune_(model, "wanda@row:0.5+int8", batches)
    assert masks["0.weight"].sum(1).tolist() == [4] * 16
    plain, twin = mlp(), GlobalTopK(0.5)
    assert bind(twin, plain, batches) is twin


def test_a_batch_is_inputs_or_a_tuple_or_a_mapping():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(x)

    found = []
    for wrap in (lambda x: x, lambda x: (x, 1), lambda x: [x], lambda x: {"x": x}):
        torch.manual_seed(0)
        model = Net()
        prune_(model, "wanda@row:0.5", [wrap(torch.randn(5, 8))])
        found.append(snapshot(model))
    assert all(same(found[0], other) for other in found[1:])


def test_no_pattern_and_ranges_are_refused(pruner):
    with pytest.raises(ValueError, match=r"Quantize\(.*is no pattern"):
        replace(pruner, pattern=Quantize(4))
    with pytest.raises(ValueError, match=r"uniform:0\.1-0\.5 is a range"):
        replace(pruner, pattern=UniformTopK((0.1, 0.5)))


def test_masks_can_be_used_again(pruner):
    model = mlp()
    bound = bind(pruner, model, samples(), loss=loss)
    weights = compressible_weights(model)
    masks = compress_(model, bound)
    with torch.no_grad():
        model[0].weight.fill_(1)
    bound.recompress_(weights, masks)
    assert torch.equal(model[0].weight != 0, masks["0.weight"])


def test_a_loss_in_half_precision_sees_the_weights_as_they_have_become():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    losses, gradients = [], []

    def loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            losses.append(model(batch).float().square().mean())
        return losses[-1]

    calibration = Calibration(model, [torch.ones(2, 8)], loss)
    with torch.autocast("cpu", enabled=False):  # casts are kept until this ends
        for value in (1.0, 0.0):
            nn.init.constant_(model[1].weight, value)
            calibration.run()
            nn.init.constant_(model[1].weight, 1 - value)
            calibration.differentiate({"w": model[0].weight}, 1, gradients.append)
    assert [bool(one > 0) for one in losses] == [True, False, False, True]
    assert [bool(one["w"].any()) for one in gradients] == [False, True]
