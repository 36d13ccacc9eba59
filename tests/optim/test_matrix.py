"""Every optimizer of torch, with its flags, takes the step that ten lines written by hand take."""

import inspect

import pytest
import torch
from nets import closure_for, mlp, same, snapshot
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import CrAM, compressible_weights, parse_operator

RHO = 0.05
OPERATORS = ["global:0.5", "uniform:0.7", "nm:2:4", "int4", "global:0.5+int8"]
FLAGS = {
    "foreach": (True, False),
    "fused": (True,),
    "amsgrad": (True,),
    "nesterov": (True,),
    "maximize": (True,),
    "centered": (True,),
    "capturable": (),  # CUDA alone
    "differentiable": (),  # steps that gradients flow through
    "decoupled_weight_decay": (True,),
    "weight_decay": (0.1,),
    "momentum": (0.9,),
}
LEFT_OUT = {"Optimizer", "LBFGS", "SparseAdam"}  # takes a closure itself; sparse gradients alone


def optimizers():
    """Yields every optimizer of torch as it comes, and with each of its flags."""
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or name in LEFT_OUT:
            continue
        yield kind, {}
        known = inspect.signature(kind).parameters
        for flag, values in FLAGS.items():
            for value in values if flag in known else ():
                options = {flag: value}
                if flag == "nesterov" and name == "SGD":
                    options["momentum"] = 0.9
                yield kind, options


CASES = [*optimizers()]


def oracle(model, base, operator, batch):
    """One step of CrAM+, from the equation: g~ = M * grad L(C(w + rho g)) + g."""

    def gradients():
        model.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        return [p.grad.clone() for p in model.parameters()]

    w, g = [p.detach().clone() for p in model.parameters()], gradients()
    with torch.no_grad():
        for p, along in zip(model.parameters(), g, strict=True):
            p.add_(along, alpha=RHO)
    masks = operator.compress_(compressible_weights(model)) or {}
    tilde = dict(zip(dict(model.named_parameters()), gradients(), strict=True))
    for (name, p), start, along in zip(model.named_parameters(), w, g, strict=True):
        p.data.copy_(start)
        p.grad = tilde[name].masked_fill(~masks[name], 0) if name in masks else tilde[name]
        p.grad += along
    base.step()


def net(kind, dtype):
    torch.manual_seed(0)
    if kind.__name__ == "Muon":  # for matrices alone
        layers = nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)
        return nn.Sequential(*layers).to(dtype)
    return mlp().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    CASES,
    ids=[f"{kind.__name__}-{options}" for kind, options in CASES],
)
def test_a_step_is_that_of_the_equation_bit_for_bit(kind, options, dtype):
    ours, theirs = net(kind, dtype), net(kind, dtype)
    base, plain = (kind(model.parameters(), **options) for model in (ours, theirs))
    batches = [(torch.randn(6, 8, dtype=dtype), torch.randint(4, (6,))) for _ in range(3)]
    for text in OPERATORS:
        operator = parse_operator(text)
        optimizer = CrAM(ours, base, operator, rho=RHO)
        for batch in batches:
            optimizer.step(closure_for(ours, optimizer, batch))
            oracle(theirs, plain, operator, batch)
        assert same(snapshot(ours), snapshot(theirs)), text
