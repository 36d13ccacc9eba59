"""Frank-Wolfe: balls, parameters that are not compressible, dtypes, refused input."""

import pytest
import torch
from problems import adamw, batches, build, loss_on, sgd, train
from torch import nn

from torchcram import compressible_weights
from torchcram.baselines import SFW, CompressionAwareSFW

each_method = pytest.mark.parametrize("method", [SFW, CompressionAwareSFW])


@each_method
def test_a_vertex_is_the_best_point_of_its_ball(method):
    optimizer = method(model := build(), sgd(model), "global:0.9", fraction=0.25)
    generator = torch.Generator().manual_seed(3)
    m = torch.randn(4, 4, generator=generator)
    mask = torch.zeros(16, dtype=torch.bool)
    mask[m.flatten().abs().topk(4).indices] = True
    (v,) = optimizer.vertices([m], [mask.view(4, 4)], [torch.tensor(2.0)])
    assert int(v.count_nonzero()) == 4
    torch.testing.assert_close(v.norm(), torch.tensor(2.0))
    for _ in range(500):  # other vertices of the same ball
        other = torch.zeros(16)
        chosen = torch.randperm(16, generator=generator)[:4]
        values = torch.randn(4, generator=generator)
        other[chosen] = values.sign() if method is SFW else values
        other *= 2 / other.norm()
        assert (m * v).sum() <= (m.flatten() * other).sum() + 1e-6


@each_method
def test_weights_end_inside_the_ball(method):
    model = build()
    radii = {n: 0.5 * w.detach().norm() for n, w in compressible_weights(model).items()}
    optimizer = method(model, sgd(model), "global:0.9", radius=0.5, lr_scale=50)
    train(model, optimizer, batches(40))
    for name, weight in compressible_weights(model).items():
        assert weight.norm() <= radii[name] * 1.001


@each_method
@pytest.mark.parametrize("base_of", [sgd, adamw])
def test_base_trains_the_other_parameters_only(method, base_of):
    model = build()
    base = base_of(model)
    train(model, method(model, base, "global:0.9"), batches())
    for parameter in model.parameters():
        assert (parameter in base.state) == (parameter.dim() == 1)
        assert parameter.grad is not None


@each_method
def test_gradients_come_back_when_the_base_optimizer_fails(method, monkeypatch):
    model = build()
    base = sgd(model)
    optimizer = method(model, base, "global:0.9")
    loss_on(model, batches()[0]).backward()

    def fails():
        raise KeyboardInterrupt

    monkeypatch.setattr(base, "step", fails)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())


@each_method
def test_weights_without_gradient_stay(method):
    model = build()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = method(model, sgd(model), "global:0.9")
    train(model, optimizer, batches())
    assert torch.equal(model[0].weight, before)


@each_method
def test_gradients_and_weights_of_zero_do_no_harm(method):
    model = build()
    nn.init.zeros_(model[2].weight)  # its input gets no gradient
    before = model[0].weight.clone()
    optimizer = method(model, torch.optim.SGD(model.parameters(), 0.1), "global:0.9")
    train(model, optimizer, batches(1))
    assert torch.equal(model[0].weight, before)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert model[2].weight.count_nonzero() > 0


@each_method
def test_other_dtypes_train(method):
    for dtype in (torch.bfloat16, torch.float64):
        model = build(dtype=dtype)
        optimizer = method(model, sgd(model), "global:0.9", fraction=0.3, radius=5)
        losses = train(model, optimizer, batches(3, dtype=dtype) * 20)
        assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
        assert model[0].weight.dtype == dtype


@each_method
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fraction": 0.0}, r"fraction must be in \(0, 1\], got 0.0"),
        ({"fraction": 1.5}, r"fraction must be in \(0, 1\], got 1.5"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"radius": 0.0}, "radius must be a finite number above 0, got 0.0"),
        ({"lr_scale": float("inf")}, "lr_scale must be a finite number above 0, got inf"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(method, arguments, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        method(model, sgd(model), "global:0.9", **arguments)


@pytest.mark.parametrize(
    ("method", "defaults"),
    [(SFW, (0.05, 15.0, 0.9, 10.0)), (CompressionAwareSFW, (0.3, 10.0, 0.9, 1.0))],
)
def test_defaults_are_those_of_the_papers(method, defaults):
    names = ("fraction", "radius", "momentum", "lr_scale")
    plain = method(model := build(), sgd(model), "global:0.9")
    assert tuple(getattr(plain, name) for name in names) == defaults
    other = method(model, sgd(model), "global:0.9", momentum=0.0, radius=2.0)
    assert (other.momentum, other.radius) == (0.0, 2.0)
    assert tuple(getattr(method, name) for name in names) == defaults
