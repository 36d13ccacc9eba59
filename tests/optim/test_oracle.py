"""Every rule against the table of the paper, written down here once more, without the library.

rule        w~                                              g~
SAM         w + rho g/|g|                                   grad L(w~)
CrAM        C(w + rho g)                                    M * grad L(w~)
CrAM+       C(w + rho g)                                    M * grad L(w~) + g
C-SAM       C(w + rho h/|h|), h = M_w * grad L(C(w))        M * grad L(w~)
Top-K       C(w)                                            grad L(w~), dense
Top-K+      C(w)                                            M * grad L(w~) + g
"""

import copy

import pytest
import torch
from nets import OPERATORS, RULES, ConvNet, closure_for, images
from torch.nn.functional import cross_entropy

from torchcram import NM, Chain, CrAM, GlobalTopK, Quantize, UniformTopK

LAYERS = ["conv1.weight", "up.weight", "fc.weight", "unused.weight"]
RHO = 0.1

pytestmark = pytest.mark.filterwarnings("ignore:.*(leaves dense|one scale per output)")


def largest(values, count):
    sizes = values.abs().flatten().tolist()
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    mask[order[:count]] = True
    return mask.view(values.shape)


def inputs_last(name, weight):
    return weight.movedim(0, -1) if name.startswith("up") else weight.movedim(1, -1)


def inputs_back(name, weight):
    return weight.movedim(-1, 0) if name.startswith("up") else weight.movedim(-1, 1)


def compress(operator, w):
    """C(w) and M for a dictionary of all parameters."""
    w, mask = dict(w), None
    if isinstance(operator, Chain):
        w, one = compress(operator.first, w)
        w, two = compress(operator.then, w)
        both = one is not None and two is not None
        return w, {n: one[n] & two[n] for n in LAYERS} if both else one or two
    if isinstance(operator, GlobalTopK):
        flat = torch.cat([w[n].reshape(-1) for n in LAYERS])
        kept = largest(flat, flat.numel() - round(operator.sparsity * flat.numel()))
        parts = kept.split([w[n].numel() for n in LAYERS])
        mask = {n: part.view(w[n].shape) for n, part in zip(LAYERS, parts, strict=True)}
    elif isinstance(operator, UniformTopK):
        mask = {
            n: largest(w[n], w[n].numel() - round(operator.sparsity * w[n].numel())) for n in LAYERS
        }
    elif isinstance(operator, NM):
        mask = {}
        for n in LAYERS:
            rows = inputs_last(n, w[n])
            groups = rows.reshape(-1, operator.group)
            kept = torch.stack([largest(group, operator.keep) for group in groups])
            mask[n] = inputs_back(n, kept.view(rows.shape))
    elif isinstance(operator, Quantize):
        top = 2 ** (operator.bits - 1) - 1
        for n in LAYERS:
            rows = inputs_last(n, w[n])
            channels = 1 if n.startswith("up") else 0
            size = operator.group_size
            if size is None:
                each = w[n].transpose(0, channels).reshape(w[n].shape[channels], -1)
                scale = each.abs().amax(1) / top
                shape = [-1 if d == channels else 1 for d in range(w[n].dim())]
                scale = scale.view(shape)
                w[n] = (w[n] / scale).round() * scale
            else:
                groups = rows.reshape(-1, size)
                scale = groups.abs().amax(1, keepdim=True) / top
                w[n] = inputs_back(n, ((groups / scale).round() * scale).view(rows.shape))
    if mask is not None:
        w.update({n: torch.where(mask[n], w[n], 0.0) for n in LAYERS})
    return w, mask


def gradient(model, w, batch):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(w[name])
    cross_entropy(model(batch[0]), batch[1]).backward()
    return {
        n: p.grad if p.grad is not None else torch.zeros_like(p)
        for n, p in model.named_parameters()
    }


def times(mask, g):
    return (
        g
        if mask is None
        else {n: torch.where(mask[n], g[n], 0.0) if n in mask else g[n] for n in g}
    )


def ascend(w, g, normalize, rho):
    length = torch.sqrt(sum((x**2).sum() for x in g.values())) if normalize else 1.0
    return {n: w[n] + rho * g[n] / length for n in w}


def oracle(rule, model, operator, batch, *, sparse, normalize, rho=RHO):
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    g = gradient(model, w, batch)

    def keep(mask):
        return mask if sparse else None

    if rule == "SAM":
        return gradient(model, ascend(w, g, normalize, rho), batch)
    if rule in ("Top-K", "Top-K+"):
        point, mask = compress(operator, w)
    elif rule == "C-SAM":
        first, mask = compress(operator, w)
        h = times(keep(mask), gradient(model, first, batch))
        point, mask = compress(operator, ascend(w, h, normalize, rho))
    else:
        point, mask = compress(operator, ascend(w, g, normalize, rho))
    found = gradient(model, point, batch)
    if rule != "Top-K":
        found = times(keep(mask), found)
    return {n: found[n] + g[n] for n in g} if rule.endswith("+") else found


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_gradient_is_that_of_the_table(rule, operator, sparse, normalize):
    model, batch = ConvNet().double(), images(dtype=torch.float64)
    normal = rule.name in ("SAM", "C-SAM") if normalize is None else normalize
    expected = oracle(rule.name, model, operator, batch, sparse=sparse, normalize=normal)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = CrAM(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        operator,
        rho=RHO,
        rule=rule,
        sparse_gradients=sparse,
        normalize=normalize,
    )
    optimizer.step(closure_for(model, optimizer, batch))
    for name, parameter in model.named_parameters():
        moved = (before[name] - parameter.detach()) / 0.5
        torch.testing.assert_close(moved, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_without_rho_only_sam_and_c_sam_ascend(rule, operator):
    model, batch = ConvNet().double(), images(dtype=torch.float64)
    ascends = rule.name in ("SAM", "C-SAM")
    rho = 0.05 if ascends else 0.0
    expected = oracle(rule.name, model, operator, batch, sparse=True, normalize=ascends, rho=rho)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = CrAM(model, base, operator, rho=None, rule=rule)
    optimizer.step(closure_for(model, optimizer, batch))
    for name, parameter in model.named_parameters():
        moved = (before[name] - parameter.detach()) / 0.5
        torch.testing.assert_close(moved, expected[name], rtol=1e-9, atol=1e-12)
