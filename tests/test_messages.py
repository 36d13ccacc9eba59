"""Warnings point at the caller, and neither warnings nor errors list layers without end."""

import warnings

import pytest
import torch
from nets import closure_for
from torch import nn
from torch.optim import SGD

from torchcram import (
    NM,
    CoverageWarning,
    CrAM,
    GlobalTopK,
    Quantize,
    compress,
    compress_,
    compressible_weights,
    hold_masks,
)
from torchcram.messages import list_names
from torchcram.pruners import prune_


def fresh(count=1):
    """A model whose layers, by name, no warning has spoken of yet; N:M and groups do not fit."""
    fresh.made += 1
    return nn.Sequential(
        *[nn.ModuleDict({f"made{fresh.made}": nn.Linear(5, 5)}) for _ in range(count)]
    )


fresh.made = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = fresh()

    def forward(self, x):
        for layer in self.layers:
            (inner,) = layer.values()
            x = inner(x)
        return x


def test_eight_names_then_how_many_more():
    names = [f"n{i}" for i in range(11)]
    assert list_names([]) == ""
    assert list_names(iter(names[:8])) == "n0, n1, n2, n3, n4, n5, n6, n7"
    assert list_names(names) == "n0, n1, n2, n3, n4, n5, n6, n7 and 3 more"


def step(model, operator):
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), operator)
    batch = torch.randn(2, 5), torch.randint(5, (2,))
    optimizer.step(closure_for(model, optimizer, batch))


def compress_inside(model, operator):
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), operator)
    model(torch.randn(2, 5)).sum().backward()
    with optimizer.compressed():
        model(torch.randn(2, 5)).sum().backward()


def prune(model, operator):
    prune_(model, f"wanda@{operator}", [torch.randn(2, 5)])


WAYS = {
    "compress": lambda model, operator: compress(model, operator),
    "compress_": lambda model, operator: compress_(model, operator),
    "operator": lambda model, operator: operator.compress_(compressible_weights(model)),
    "step": step,
    "compressed": compress_inside,
}


@pytest.mark.parametrize("operator", [NM(2, 4), Quantize(4, 4)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_warnings_of_operators_point_at_the_caller(way, operator):
    with pytest.warns(UserWarning, match="input dimension is no multiple of 4") as caught:
        WAYS[way](Net(), operator)
    assert [warning.filename for warning in caught] == [__file__]


def test_warnings_of_pruners_point_at_the_caller():
    with pytest.warns(UserWarning, match="input dimension is no multiple of 4") as caught:
        prune(Net(), "nm:2:4")
    assert [warning.filename for warning in caught] == [__file__]


class Bare(nn.Module):
    """Half of it is a matrix that is in no layer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.mixing = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return self.fc(x) @ self.mixing


@pytest.mark.parametrize("way", WAYS)
def test_coverage_warnings_point_at_the_caller(way):
    with pytest.warns(CoverageWarning, match="mixing") as caught:
        WAYS[way](Bare(), GlobalTopK(0.5))
    assert [warning.filename for warning in caught] == [__file__]


def test_python_shows_a_warning_once_per_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            compressible_weights(Bare())
    assert len(caught) == 1


def many():
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(30)])


def no_pattern():
    compressible_weights(many(), skip="lm_head")


def nothing_left():
    compressible_weights(many(), skip=".")


def mask_without_weight():
    model = many()
    masks = {"x": torch.ones(5, 5, dtype=torch.bool)}
    hold_masks(SGD(model.parameters()), compressible_weights(model), masks)


def not_finite():
    model = many()
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(torch.inf)
    prune_(model, "wanda@uniform:0.5", [torch.randn(2, 5)])


def no_input():
    model = nn.Sequential(nn.Identity(), many())
    model.forward = lambda x: x
    prune_(model, "wanda@uniform:0.5", [torch.randn(2, 5)])


def no_gradient():
    model = nn.ModuleDict({"used": nn.Linear(5, 5), "others": many()})
    prune_(
        model,
        "obs:m1@uniform:0.5",
        [torch.randn(2, 5)],
        loss=lambda model, batch: model["used"](batch).sum(),
    )


def gradient_not_finite():
    model = many()
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), GlobalTopK(0.5))

    def closure():
        loss = model(torch.full((2, 5), torch.nan)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize(
    "refused",
    [
        no_pattern,
        nothing_left,
        mask_without_weight,
        not_finite,
        no_input,
        no_gradient,
        gradient_not_finite,
    ],
)
def test_errors_name_eight_layers_at_most(refused):
    with pytest.raises((ValueError, FloatingPointError), match=r" and \d+ more") as error:
        refused()
    assert str(error.value).count("weight") <= 9 + 2


@pytest.mark.parametrize("operator", ["nm:2:4", "int4:g4"])
def test_warnings_name_eight_layers_at_most(operator):
    with pytest.warns(UserWarning, match=r"weight and 22 more$") as caught:
        compress_(fresh(30), operator)
    assert str(caught[0].message).count("weight") == 8
