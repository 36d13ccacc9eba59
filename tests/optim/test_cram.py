"""What always holds of a step, for every rule and operator it speaks of."""

import copy

import pytest
import torch
from nets import OPERATORS, RULES, ConvNet, closure_for, images, mlp, same, snapshot
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, AdamW

from torchcram import (
    C_SAM,
    CRAM_PLUS,
    SAM,
    TOPK,
    CrAM,
    GlobalTopK,
    Quantize,
    UniformTopK,
    compressible_weights,
    hold_masks,
    sparsity,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*(leaves dense|one scale per output)")
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
operators = pytest.mark.parametrize("operator", OPERATORS, ids=str)


def train(model, optimizer, batches):
    return [optimizer.step(closure_for(model, optimizer, batch)).item() for batch in batches]


@rules
@operators
def test_without_learning_rate_nothing_moves(rule, operator):
    model = ConvNet()
    model.fc.bias.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.0), operator, rule=rule, rho=0.3)
    train(model, optimizer, [images(), images()])
    assert same({n: p.detach() for n, p in model.named_parameters()}, before)


@rules
def test_the_weights_inside_are_elsewhere_and_come_back_when_the_closure_raises(rule):
    model, batch = ConvNet(), images()
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), GlobalTopK(0.5), rule=rule, rho=0.3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    usual, calls = closure_for(model, optimizer, batch), []

    def closure():
        calls.append(sparsity(compressible_weights(model)))
        if len(calls) == 2:
            assert not same({n: p.detach() for n, p in model.named_parameters()}, before)
            raise KeyboardInterrupt
        return usual()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert calls == [0, 0 if rule is SAM else 0.5]
    assert same({n: p.detach() for n, p in model.named_parameters()}, before)
    assert model.bn1.track_running_stats
    dense = copy.deepcopy(model)
    cross_entropy(dense(batch[0]), batch[1]).backward()
    assert torch.equal(model.fc.weight.grad, dense.fc.weight.grad)  # .grad is g again
    assert optimizer.step(usual) is not None  # and training goes on


@rules
def test_the_loss_at_w_is_returned_and_the_closure_called_once_per_pass(rule):
    model, batch = ConvNet(), images()
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), GlobalTopK(0.9), rule=rule)
    expected = cross_entropy(copy.deepcopy(model)(batch[0]), batch[1]).item()
    calls, usual = [], closure_for(model, optimizer, batch)
    loss = optimizer.step(lambda: (calls.append(1), usual())[1])
    assert loss.item() == expected
    assert len(calls) == (3 if rule is C_SAM else 2)


@rules
@operators
def test_batch_norm_sees_what_plain_training_sees(rule, operator):
    model, batch = ConvNet(), images()
    plain = copy.deepcopy(model)
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), operator, rule=rule)
    optimizer.step(closure_for(model, optimizer, batch))
    plain(batch[0])
    assert same(dict(model.named_buffers()), dict(plain.named_buffers()))


@rules
def test_parameter_groups_do_not_change_the_step(rule):
    one, batch = ConvNet(), images()
    many = copy.deepcopy(one)
    first = CrAM(one, SGD(one.parameters(), lr=0.1), GlobalTopK(0.5), rule=rule, rho=0.1)
    groups = [{"params": [p]} for p in reversed(list(many.parameters()))]
    second = CrAM(many, SGD(groups, lr=0.1), GlobalTopK(0.5), rule=rule, rho=0.1)
    first.step(closure_for(one, first, batch))
    second.step(closure_for(many, second, batch))
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_rho_per_group():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    twin = copy.deepcopy(model)
    groups = [{"params": model[0].parameters(), "rho": 0.0}, {"params": model[2].parameters()}]
    optimizer = CrAM(model, SGD(groups, lr=0.1), (), rule=SAM, rho=0.2, normalize=False)
    cross_entropy(model(batch[0]), batch[1]).backward()
    g = {n: p.grad.clone() for n, p in model.named_parameters()}
    with optimizer.compressed():
        for name, parameter in model.named_parameters():
            rho = 0.0 if name.startswith("0") else 0.2
            expected = dict(twin.named_parameters())[name] + rho * g[name]
            torch.testing.assert_close(parameter, expected)
        cross_entropy(model(batch[0]), batch[1]).backward()


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
@pytest.mark.parametrize("option", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_any_base_optimizer(kind, option):
    model, batch = ConvNet(), images()
    optimizer = CrAM(model, kind(model.parameters(), lr=0.02, **option), [*OPERATORS], rho=0.05)
    losses = train(model, optimizer, [batch] * 25)
    assert losses[-1] < losses[0] - 0.2


def test_schedulers_on_the_wrapper():
    model = ConvNet()
    base = SGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer = CrAM(model, base, GlobalTopK(0.5))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    rates = []
    for _ in range(10):
        train(model, optimizer, [images()])
        rates.append(base.param_groups[0]["lr"])
        scheduler.step()
    assert rates[0] == pytest.approx(0.004)
    assert max(rates) == pytest.approx(0.1, rel=0.1)
    assert rates[-1] < 1e-5


def test_named_parameters_and_groups_added_later():
    model = ConvNet()
    base = SGD(list(model.conv1.named_parameters()), lr=0.1)
    optimizer = CrAM(model, base, GlobalTopK(0.5), rho=0.07)
    optimizer.add_param_group({"params": list(model.fc.named_parameters()), "lr": 0.3})
    before = model.fc.weight.detach().clone()
    train(model, optimizer, [images()])
    assert base.param_groups[1]["lr"] == 0.3
    assert not torch.equal(model.fc.weight, before)


def test_draws_are_uniform_seeded_and_apart_from_the_global_generator():
    def drawn(seed, disturb):
        model = ConvNet()
        optimizer = CrAM(model, SGD(model.parameters(), lr=0.0), OPERATORS, seed=seed)
        found = []
        for _ in range(60):
            torch.rand(disturb)
            train(model, optimizer, [images()])
            found.append(str(optimizer.operator))
        return found

    assert drawn(3, 0) == drawn(3, 5)
    assert drawn(3, 0) != drawn(4, 0)
    assert set(drawn(3, 0)) == set(map(str, OPERATORS))


def test_masks_are_refreshed_at_every_tauth_use_of_their_operator():
    model, batch = ConvNet(), images()
    a, b = GlobalTopK(0.5), UniformTopK(0.8)
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.5), [a, b], mask_interval=3)
    seen = {a: [], b: []}
    usual = closure_for(model, optimizer, batch)

    def closure():
        zeros = tuple(w.eq(0).numpy().tobytes() for w in optimizer.weights.values())
        if not model.bn1.track_running_stats:
            seen[optimizer.operator].append(zeros)
        return usual()

    for _ in range(30):
        optimizer.step(closure)
    for masks in seen.values():
        assert len(masks) > 6
        threes = [masks[i : i + 3] for i in range(0, len(masks), 3)]
        assert all(len(set(three)) == 1 for three in threes)
        assert len({three[0] for three in threes}) > 1


def test_a_plain_step_with_the_given_probability():
    model, batch = ConvNet(), images()
    plain = copy.deepcopy(model)
    optimizer = CrAM(
        model, SGD(model.parameters(), lr=0.1), GlobalTopK(0.9), base_step_probability=1.0
    )
    base = SGD(plain.parameters(), lr=0.1)
    calls, usual = [], closure_for(model, optimizer, batch)
    optimizer.step(lambda: (calls.append(1), usual())[1])
    closure_for(plain, base, batch)()
    base.step()
    assert len(calls) == 1
    assert same(snapshot(model), snapshot(plain))
    cross_entropy(model(batch[0]), batch[1]).backward()
    g = model.fc.weight.grad.clone()
    with optimizer.compressed() as needed:
        assert not needed
        (model(batch[0]).sum() * 7).backward()  # does not count
    assert torch.equal(model.fc.weight.grad, g)
    optimizer.base_step_probability = 0.5
    drawn = []
    for _ in range(80):
        optimizer.step(usual)
        drawn.append(optimizer.operator is None)
    assert 20 < sum(drawn) < 60


def test_random_numbers_can_be_replayed():
    def dropped(replay):
        seen = []
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)
        )
        model[1].register_forward_hook(lambda *args: seen.append(args[-1].eq(0)))
        batch = torch.randn(16, 8), torch.randint(4, (16,))
        optimizer = CrAM(
            model,
            SGD(model.parameters(), lr=0.1),
            Quantize(8),
            rule=C_SAM,
            replay_randomness=replay,
        )
        train(model, optimizer, [batch, batch])
        return [torch.equal(seen[0], other) for other in seen[1:3]] + [
            torch.equal(seen[0], seen[3])
        ]

    assert dropped(True) == [True, True, False]
    assert dropped(False) == [False, False, False]


def test_a_range_of_levels_and_a_choice_of_weights():
    model = ConvNet()
    weights = compressible_weights(model, dense_ends=True)
    optimizer = CrAM(
        model, SGD(model.parameters(), lr=0.1), GlobalTopK((0.3, 0.9)), weights=weights
    )
    seen, usual = [], closure_for(model, optimizer, images())

    def closure():
        seen.append(sparsity(weights))
        assert sparsity({"first": model.conv1.weight}) == 0
        return usual()

    for _ in range(20):
        optimizer.step(closure)
    assert all(0.28 < level < 0.92 for level in seen[1::2])
    assert len(set(seen[1::2])) > 10


def test_hooks_and_held_masks_work_through_the_wrapper():
    model, called = ConvNet(), []
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1, momentum=0.9), GlobalTopK(0.5))
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    weights = compressible_weights(model)
    masks = GlobalTopK(0.8).compress_(weights)
    hold_masks(optimizer, weights, masks)
    train(model, optimizer, [images()] * 5)
    assert called == [1] * 5
    assert all((weights[n][~m] == 0).all() for n, m in masks.items())
    assert all(
        (optimizer.state[weights[n]]["momentum_buffer"][~masks[n]] == 0).all()
        for n in ("conv1.weight", "fc.weight")
    )


def test_it_says_what_it_is():
    model = ConvNet()
    optimizer = CrAM(
        model, SGD(model.parameters(), lr=0.1), [GlobalTopK(0.5), Quantize(4)], rho=0.1
    )
    assert repr(optimizer).startswith("CrAM(CrAM+, [global:0.5, int4], rho=0.1, base=SGD")


def test_topk_and_rules_are_data():
    assert TOPK.passes[0].mask is False
    assert CRAM_PLUS.passes[0].plus is True
    assert [rule.normalize for rule in RULES] == [True, False, False, True, False, False]


def test_an_outer_autocast_does_not_hide_the_compressed_point():
    def losses(outer):
        torch.manual_seed(0)
        model, batch, seen = mlp(), (torch.randn(6, 8), torch.randint(4, (6,))), []
        optimizer = CrAM(model, SGD(model.parameters(), lr=0.0), GlobalTopK(0.9), rho=0.5)

        def closure():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            seen.append(loss.item())
            return loss

        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            optimizer.step(closure)
            optimizer.step(closure)
        return seen

    assert losses(outer=True) == losses(outer=False)
    assert len(set(losses(outer=True))) == 2


def test_options_of_the_base_that_are_called_rho():
    model = mlp()
    optimizer = CrAM(
        model, torch.optim.Adadelta(model.parameters(), rho=0.9), Quantize(8), rho=0.01
    )
    assert optimizer._rho_of(optimizer.param_groups[0]) == 0.01
    assert optimizer.base.param_groups[0]["rho"] == 0.9
    batch = torch.randn(6, 8), torch.randint(4, (6,))
    train(model, optimizer, [batch])


def test_two_wrappers_of_one_base_have_a_rho_each():
    model = mlp()
    base = SGD(model.parameters(), lr=0.1)
    first, second = (CrAM(model, base, Quantize(8), rho=rho) for rho in (0.05, 0.5))
    assert first._rho_of(base.param_groups[0]) == 0.05
    assert second._rho_of(base.param_groups[0]) == 0.5


def test_wrapper_and_base_stay_one():
    model = ConvNet()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = CrAM(model, base, GlobalTopK(0.5))
    base.load_state_dict(base.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, [images()])
    assert same({n: p.detach() for n, p in model.named_parameters()}, before)
    assert optimizer.state is base.state


def test_groups_added_to_the_base():
    model = ConvNet()
    base = SGD(model.conv1.parameters(), lr=0.1)
    optimizer = CrAM(model, base, GlobalTopK(0.5))
    base.add_param_group({"params": model.fc.parameters()})
    train(model, optimizer, [images()])
    assert len(optimizer.param_groups) == 2


def test_replayed_randomness_goes_on_after_plain_steps():
    seen = []
    model = mlp()
    optimizer = CrAM(
        model,
        SGD(model.parameters(), lr=0.1),
        Quantize(8),
        replay_randomness=True,
        base_step_probability=1.0,
    )
    usual = closure_for(model, optimizer, (torch.randn(6, 8), torch.randint(4, (6,))))
    for _ in range(4):
        optimizer.step(lambda: (seen.append(torch.rand(1).item()), usual())[1])
    assert len(set(seen)) == 4


def test_both_passes_of_a_step_use_one_level():
    model, seen = ConvNet(), []
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), GlobalTopK((0.1, 0.9)), rule=C_SAM)
    usual = closure_for(model, optimizer, images())
    for _ in range(3):
        optimizer.step(lambda: (seen.append(sparsity(optimizer.weights)), usual())[1])
    assert [seen[i] for i in (1, 4, 7)] == [seen[i] for i in (2, 5, 8)]
    assert len(set(seen)) == 4


def test_copies_train_alike():
    model = ConvNet()
    optimizer = CrAM(
        model, SGD(model.parameters(), lr=0.1, momentum=0.9), OPERATORS, mask_interval=2
    )
    train(model, optimizer, [images() for _ in range(5)])
    twin, other = copy.deepcopy((model, optimizer))
    batches = [images() for _ in range(5)]
    train(model, optimizer, batches)
    train(twin, other, batches)
    assert same(snapshot(model), snapshot(twin))


def test_hooks_on_the_state():
    model, called = ConvNet(), []
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), GlobalTopK(0.5))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    state = optimizer.state_dict()
    assert state.pop("extra") == 1
    optimizer.load_state_dict(state)
    assert called == ["before", "loaded"]


def test_operators_as_text():
    model = ConvNet()
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), ["global:0.9", "int4"])
    assert "[global:0.9, int4]" in repr(optimizer)
    CrAM(model, SGD(model.parameters(), lr=0.1), None, rule=SAM)
