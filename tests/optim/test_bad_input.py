"""What is refused, and that the weights are as before then."""

import copy

import pytest
import torch
from nets import RULES, ConvNet, closure_for, images, mlp, same, snapshot
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, CrAM, GlobalTopK, Operator, compressible_weights

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def make(model=None, operators=None, base=None, **options):
    model = ConvNet() if model is None else model
    base = SGD(model.parameters(), lr=0.1) if base is None else base
    return CrAM(model, base, GlobalTopK(0.5) if operators is None else operators, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"operators": []}, r"CrAM\+ needs at least one operator"),
        ({"operators": [0.5]}, r"0\.5 is neither an Operator nor text"),
        ({"operators": "global:7"}, "must be in"),
        ({"rule": "CrAM+"}, r"rule='CrAM\+' is not an UpdateRule"),
        ({"rho": -0.1}, "rho=-0.1"),
        ({"rho": float("nan")}, "rho=nan"),
        ({"mask_interval": 0}, "mask_interval=0"),
        ({"mask_interval": 2.5}, "mask_interval=2.5"),
        ({"base_step_probability": 1.5}, "base_step_probability=1.5"),
        ({"model": nn.Sequential(nn.BatchNorm1d(3))}, "no compressible weights"),
        ({"weights": {"w": torch.zeros(2, 2)}}, r"weights\['w'\] is not a parameter"),
    ],
)
def test_bad_arguments_say_what_is_wrong(options, says):
    with pytest.raises(ValueError, match=says):
        make(**options)


def test_a_base_optimizer_with_foreign_parameters():
    model = ConvNet()
    base = SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 7))], lr=0.1)
    with pytest.raises(ValueError, match=r"ConvNet does not have parameter 12 .*shape \(3, 7\)"):
        make(model, base=base)
    with pytest.raises(ValueError, match="rho='a lot'"):
        make(model, base=SGD([{"params": model.parameters(), "rho": "a lot"}], lr=0.1))


def test_sam_needs_neither_operators_nor_compressible_weights():
    model = nn.Sequential(nn.BatchNorm1d(3))
    optimizer = make(model, operators=(), rule=SAM)
    before = snapshot(model)
    optimizer.step(closure_for(model, optimizer, (torch.randn(8, 3), torch.randint(3, (8,)))))
    assert not same(snapshot(model), before)


@rules
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [1, 2])
def test_a_gradient_that_is_not_finite_is_named_and_no_step_taken(rule, bad, at):
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    optimizer = make(model, rule=rule, base=SGD(model.parameters(), lr=0.1, momentum=0.9))
    usual, calls = closure_for(model, optimizer, batch), []

    def closure():
        loss = usual()
        calls.append(1)
        if len(calls) == at:
            model[2].weight.grad[model[2].weight.abs() == model[2].weight.abs().max()] = bad
        return loss

    before = snapshot(model)
    with pytest.raises(FloatingPointError, match=r"2\.weight"):
        optimizer.step(closure)
    assert same(snapshot(model), before)
    assert not optimizer.state
    optimizer.step(usual)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_check_can_be_left_out():
    model, batch = mlp(), (torch.full((6, 8), torch.inf), torch.randint(4, (6,)))
    optimizer = make(model, check_finite=False)
    optimizer.step(closure_for(model, optimizer, batch))
    assert not all(torch.isfinite(p).all() for p in model.parameters())


def test_parameters_without_gradient_keep_their_value_and_are_compressed_meanwhile():
    model = ConvNet()
    optimizer = make(model, operators=GlobalTopK(0.9), rule=CRAM)
    model.unused.weight.data.fill_(1e-6)  # the smallest, so the first to go
    before = model.unused.weight.detach().clone()
    closure_for(model, optimizer, images())()
    with optimizer.compressed():
        assert (model.unused.weight == 0).all()
        closure_for(model, optimizer, images())()
    optimizer.step()
    assert torch.equal(model.unused.weight, before)
    assert model.unused.weight.grad is None


@rules
def test_a_gradient_in_only_one_of_the_passes(rule):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizer = make(model, rule=rule, base=SGD(model.parameters(), lr=0.0))
    x, y = torch.randn(5, 4), torch.randint(4, (5,))
    for used in (["a", "b", "b"], ["b", "a", "a"]):
        order = iter(used)

        def closure(order=order):
            optimizer.zero_grad()
            loss = cross_entropy(model[next(order)](x), y)
            loss.backward()
            return loss

        before = snapshot(model)
        optimizer.step(closure)
        assert same(snapshot(model), before)
        there = {name for name in model if model[name].weight.grad is not None}
        assert there == ({"a", "b"} if rule.passes[-1].plus else {used[-1]})


def test_no_gradient_at_all():
    model = ConvNet()
    optimizer = make(model)
    with pytest.raises(RuntimeError, match="no gradient at w"), optimizer.compressed():
        pass


def test_sparse_gradients_of_embeddings_are_refused():
    model = nn.ModuleDict({"emb": nn.Embedding(9, 4, sparse=True), "fc": nn.Linear(4, 2)})
    optimizer = make(model)
    before = snapshot(model)
    model["fc"](model["emb"](torch.tensor([1, 2]))).sum().backward()
    with (
        pytest.raises(ValueError, match=r"shape \(9, 4\) is a sparse tensor"),
        optimizer.compressed(),
    ):
        pass
    assert same(snapshot(model), before)


def test_an_operator_that_fails_leaves_the_weights_alone():
    model = ConvNet()
    optimizer = make(model, weights=compressible_weights(model))
    optimizer.weights = {**optimizer.weights, "bias": model.fc.bias}
    optimizer._sampler.operators = (
        type("Broken", (GlobalTopK,), {"select": lambda *_: 1 / 0})(0.5),
    )
    before = snapshot(model)
    usual = closure_for(model, optimizer, images())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(usual)
    named = {n: p.detach() for n, p in model.named_parameters()}
    assert all(torch.equal(named[n], before[n]) for n in named)


def test_rule_defaults():
    assert make().rule is CRAM_PLUS


def test_lbfgs_cannot_be_the_base():
    model = mlp()
    with pytest.raises(ValueError, match="LBFGS calls the closure itself"):
        make(model, base=torch.optim.LBFGS(model.parameters()))


def test_the_compressed_point_cannot_be_left_from_inside():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    optimizer = make(model, rule=C_SAM)
    usual = closure_for(model, optimizer, batch)
    before = snapshot(model)
    for again in (optimizer.step, lambda: optimizer.step(usual), optimizer.compressed().__enter__):
        usual()
        with pytest.raises(RuntimeError, match="leave compressed"), optimizer.compressed():
            again()
        assert same(snapshot(model), before)
    optimizer.step(usual)


def test_a_block_without_backward():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    optimizer = make(model, rule=CRAM)
    closure_for(model, optimizer, batch)()
    before, g = snapshot(model), model[0].weight.grad.clone()
    missing = pytest.raises(RuntimeError, match="no gradient at the compressed point")
    with missing, optimizer.compressed():
        pass
    assert same(snapshot(model), before)
    assert torch.equal(model[0].weight.grad, g)


def test_an_early_failure_leaves_no_trace():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    optimizer = make(model, allow_plain_steps=True)
    with pytest.raises(RuntimeError, match="no gradient at w"), optimizer.compressed():
        pass
    usual = closure_for(model, optimizer, batch)
    usual()
    optimizer.step()  # a plain step: no pass is left over
    usual()
    g = model[0].weight.grad.clone()
    optimizer._backup.save = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError), optimizer.compressed():
        pass
    assert torch.equal(model[0].weight.grad, g)


def test_masks_of_operators_that_cannot_use_them_again():
    class Own(Operator):
        def compress_(self, weights):
            return GlobalTopK(0.5).compress_(weights)

    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    optimizer = make(model, operators=Own(), mask_interval=2)
    usual = closure_for(model, optimizer, batch)
    optimizer.step(usual)
    before = snapshot(model)
    with pytest.raises(ValueError, match="has masks but no recompress_"):
        optimizer.step(usual)
    assert same(snapshot(model), before)


def test_masks_of_another_set_of_weights_are_not_loaded():
    model = ConvNet()
    optimizer = make(model, mask_interval=3)
    optimizer.step(closure_for(model, optimizer, images()))
    other = make(model, mask_interval=3, weights=compressible_weights(model, only="fc"))
    with pytest.raises(ValueError, match=r"mask of global:0\.5 for 'conv1\.weight'"):
        other.load_state_dict(optimizer.state_dict())


def test_gradient_buffers_that_are_used_again_are_noticed():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    optimizer = make(model, base=SGD(model.parameters(), lr=0.1))
    fixed = {p: torch.zeros_like(p) for p in model.parameters()}
    before = snapshot(model)

    def closure():
        loss = cross_entropy(model(batch[0]), batch[1])
        for p, grad in zip(fixed, torch.autograd.grad(loss, list(fixed)), strict=True):
            fixed[p].copy_(grad)
            p.grad = fixed[p]
        return loss

    with pytest.raises(RuntimeError, match="written over the first"):
        optimizer.step(closure)
    assert same(snapshot(model), before)


@rules
def test_views_into_a_buffer_are_copied(rule):
    """As DDP hands out gradients with gradient_as_bucket_view."""
    one = mlp()
    two = copy.deepcopy(one)
    batch = (torch.randn(6, 8), torch.randint(4, (6,)))
    first, second = make(one, rule=rule), make(two, rule=rule)
    parameters = list(two.parameters())
    bucket = torch.zeros(sum(p.numel() for p in parameters)).split([p.numel() for p in parameters])

    def closure():
        loss = cross_entropy(two(batch[0]), batch[1])
        for p, part, grad in zip(
            parameters, bucket, torch.autograd.grad(loss, parameters), strict=True
        ):
            p.grad = part.view_as(p).copy_(grad)
        return loss

    first.step(closure_for(one, first, batch))
    second.step(closure)
    assert same(snapshot(one), snapshot(two))


@rules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gradient_of_zero_moves_nothing(rule, dtype):
    model = mlp().to(dtype)
    optimizer = make(model, rule=rule)
    before = snapshot(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8, dtype=dtype)).sum() * 0
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same(snapshot(model), before)


def test_parameters_without_elements():
    model = mlp()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    optimizer = make(model, base=SGD(model.parameters(), lr=0.1))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).sum() + model.nothing.sum()
        loss.backward()
        return loss

    before = snapshot(model)
    optimizer.step(closure)
    assert not same(snapshot(model), before)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_model_and_base_in_the_wrong_order():
    model = mlp()
    base = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"swapped: CrAM\(model, base, operators\)"):
        CrAM(base, model, "global:0.5")
    with pytest.raises(ValueError, match=r"model='mlp' is not a torch\.nn\.Module"):
        CrAM("mlp", base, "global:0.5")


def test_groups_added_later_are_checked_as_those_of_the_constructor():
    model = ConvNet()
    optimizer = make(model, base=SGD(model.conv1.parameters(), lr=0.1))
    for foreign in (nn.Parameter(torch.zeros(3, 7)), [("x", nn.Parameter(torch.zeros(3, 7)))]):
        with pytest.raises(ValueError, match=r"does not have parameter 0 of group 1 .*\(3, 7\)"):
            optimizer.add_param_group({"params": foreign})
    for rho in (-0.1, float("inf"), "much"):
        with pytest.raises(ValueError, match="rho="):
            optimizer.add_param_group({"params": model.fc.parameters(), "rho": rho})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": (p for p in model.fc.parameters()), "rho": 0.2})
    assert len(optimizer.param_groups[1]["params"]) == 2


def junk_states():
    """States of CrAM with one part that is not what it should be."""
    model = mlp()
    optimizer = make(model, operators="global:0.5", mask_interval=3)
    optimizer.step(closure_for(model, optimizer, (torch.randn(6, 8), torch.randint(4, (6,)))))
    good = optimizer.state_dict()["cram"]
    ((operator, at, masks),) = good["masks"]
    (name, bits), *_ = masks.items()
    yield from (None, 3, [], {}, "x", torch.zeros(3))
    for key, values in {
        "generator": (None, 3, torch.zeros(3), torch.zeros(5, dtype=torch.uint8), "x"),
        "uses": (None, 3, [1], {"global:0.5": -1}, {"global:0.5": 1.5}, {3: 3}),
        "masks": (
            None,
            3,
            [3],
            [(operator, at)],
            [(operator, "1", masks)],
            [(operator, at, {name: None})],
            [(operator, at, {name: bits[:-1]})],
            [(operator, at, {name: bits.float()})],
            [(operator, at, {name: bits.view(1, -1)})],
        ),
        "weights": (None, 3, "0.weight", [3]),
    }.items():
        for value in values:
            yield {**good, key: value}


def test_junk_in_the_state_is_refused_and_changes_nothing():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = make(model, base=base, operators="global:0.5", mask_interval=3)
    optimizer.step(closure_for(model, optimizer, batch))
    before = copy.deepcopy(optimizer.state_dict())
    for junk in junk_states():
        with pytest.raises(ValueError, match="state"):
            optimizer.load_state_dict({**before, "cram": junk})
    with pytest.raises(ValueError, match="group"):  # of the base optimizer, which is second
        optimizer.load_state_dict({**before, "param_groups": [], "cram": before["cram"]})
    after = optimizer.state_dict()
    assert after["cram"]["uses"] == before["cram"]["uses"]
    assert torch.equal(after["cram"]["generator"], before["cram"]["generator"])
    assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])
