"""Operators on shards: the masks and the weights of one process, bit for bit."""

import copy
import warnings

import pytest
import torch
from ranks import run_ranks
from shards import local_state, network, replicated_shards, rows_here, shard, whole_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW

from torchcram import (
    Chain,
    CrAM,
    Quantize,
    Sparsifier,
    compress,
    compress_,
    compressible_weights,
    hold_masks,
    masks_of,
    parse_operator,
    sparsity,
)
from torchcram.baselines.base import Baseline

OPERATORS = (
    "global:0.5",
    "global:0.93",
    "uniform:0.7",
    "nm:2:4",
    "nm:1:8",
    "nm:5:6",  # leaves some layers dense
    "int4",
    "int3:g4",
    "int4:g8",
    "int4:g12",
    "global:0.5+int8",
    "nm:2:4+global:0.75",
)


def start(kind):
    """The net; "tied" rounds it so that magnitudes are equal by the dozen."""
    model = network(torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "tied":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 8).round() / 8)
    return model


def assert_like_one_process(model, sharded, text):
    whole = copy.deepcopy(model)
    expected = compress_(whole, text)
    masks = compress_(sharded, text)
    assert (masks is None) == (expected is None)
    parameters = dict(sharded.named_parameters())
    for name, mask in (expected or {}).items():
        assert type(masks[name]) is torch.Tensor, name
        assert torch.equal(masks[name], rows_here(mask, parameters[name])), (text, name)
    for name, value in whole_state(sharded).items():
        assert torch.equal(value, whole.get_parameter(name)), (text, name)
    weights, alone = compressible_weights(sharded), compressible_weights(whole)
    assert sparsity(weights) == sparsity(alone)
    for name, mask in masks_of(weights).items():
        assert torch.equal(mask, rows_here(masks_of(alone)[name], parameters[name])), name


def _every_operator():
    size = torch.distributed.get_world_size()
    for kind in ("plain", "tied", "bf16"):
        model = start(kind)
        for text in OPERATORS:
            assert_like_one_process(model, shard(model), text)
            if size == 4:
                assert_like_one_process(model, shard(model, replicated_shards()), text)


def _mixed():
    """Weights that are whole, cut in four, and cut in two with replicas, ranked together."""
    for kind, text in (("tied", "global:0.5"), ("tied", "uniform:0.6"), ("bf16", "global:0.9")):
        model = start(kind)
        sharded = copy.deepcopy(model)
        fully_shard(sharded.up, mesh=replicated_shards())
        outside = {sharded.fc.weight, sharded.conv.weight}
        fully_shard(sharded, mesh=init_device_mesh("cpu", (4,)), ignored_params=outside)
        assert type(sharded.fc.weight) is nn.Parameter
        assert_like_one_process(model, sharded, text)
        some = {n: p for n, p in sharded.named_parameters() if n in ("fc.weight", "up.weight")}
        whole = {n: p for n, p in model.named_parameters() if n in some}
        compress_(sharded, "global:0.97", weights=some)
        compress_(model, text)
        compress_(model, "global:0.97", weights=whole)
        for name, value in whole_state(sharded).items():
            assert torch.equal(value, model.get_parameter(name)), (text, name)


def _direct(rank):
    """Operators called by hand; a model that a forward pass has left gathered; masks held."""
    model = start("plain")
    sharded = shard(model, reshard_after_forward=False)
    x = torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        sharded(x)
    names = list(compressible_weights(model))
    weights = compressible_weights(sharded)
    assert list(weights) == names
    expected = parse_operator("global:0.7").select(compressible_weights(model))
    masks = parse_operator("global:0.7").select(weights)
    for name, mask in masks.items():
        assert torch.equal(mask, rows_here(expected[name], weights[name])), name
    with torch.no_grad():
        sharded(x)
        compress_(sharded, "int2")
        compress_(model, "int2")
        torch.testing.assert_close(sharded(x), model(x))
    with pytest.raises(ValueError, match="cannot be copied"):
        compress(sharded, "int4")

    compressible_weights(sharded)  # also drops the gathered copies
    optimizer = AdamW(sharded.parameters(), lr=0.01)
    sharded(x).sum().backward()
    optimizer.step()
    wrong = {**masks, "fc.weight": masks["fc.weight"][:, 1:]}
    with pytest.raises(ValueError, match=r"'fc\.weight' is torch\.bool of shape"):
        hold_masks(optimizer, weights, wrong)
    held = hold_masks(optimizer, weights, masks)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        sharded(torch.randn(2, 4, 4, 4)).square().sum().backward()
        optimizer.step()
    for name, mask in masks.items():
        state = optimizer.state[weights[name]]
        moments = [state[key] for key in ("exp_avg", "exp_avg_sq") if name != "unused.weight"]
        for tensor in (weights[name], *moments):
            assert not tensor.to_local()[~mask].any(), name
    assert sparsity(weights) >= 0.7 - 1e-3
    held.remove()
    before = local_state(sharded)
    optimizer.step()
    after = local_state(sharded)
    assert any((before[n] != after[n]).any() for n in before)


def _refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for placements in ((Replicate(), Shard(1)), (Shard(0), Shard(0)), (Shard(0), Shard(1))):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.data, mesh, placements))
        before = model[2].weight.to_local().clone()
        with pytest.raises(ValueError, match=r"'2\.weight' is placed as .*Shard.*allowed is Repl"):
            CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5")
        with pytest.raises(ValueError, match=r"'2\.weight' is placed as"):
            compress_(model, "global:0.5")
        assert torch.equal(before, model[2].weight.to_local())
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].bias = nn.Parameter(distribute_tensor(model[0].bias.data, mesh["tensor"], [Shard(0)]))
    fully_shard(model, mesh=mesh["data"], ignored_params={model[0].bias})
    CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5")


class PlainMethod(Baseline):
    """The simplest method: it does what the base class does."""


class Rows(Sparsifier):
    """Keeps the larger half of the rows that it sees."""

    def select(self, scores):
        return {
            name: (score.norm(dim=1) >= score.norm(dim=1).median()).view(-1, 1).expand_as(score)
            for name, score in scores.items()
        }

    def __str__(self):
        return "rows"


def _operators_of_others():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(model)
    for operator in (Rows(), Chain(Rows(), Quantize(8))):
        with pytest.raises(ValueError, match=r"^rows.* does not say that it works on weights that"):
            CrAM(model, SGD(model.parameters(), lr=0.1), operator)
        with pytest.raises(ValueError, match="each rank would select among its own rows"):
            compress_(model, operator)
    with pytest.raises(ValueError, match=r"^rows does not say that it works on weights that"):
        PlainMethod(model, SGD(model.parameters(), lr=0.1), Rows())


def _two(rank):
    warnings.simplefilter("ignore")
    _every_operator()
    _direct(rank)
    _operators_of_others()


def test_two_ranks():
    assert run_ranks(2, _two) == 2


def _four(_rank):
    warnings.simplefilter("ignore")
    _every_operator()
    _mixed()
    _refused()


@pytest.mark.slow  # two ranks are tested always
def test_four_ranks():
    assert run_ranks(4, _four) == 4
