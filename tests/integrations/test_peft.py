"""LoRA: the compressed point is that of the merged weight, and merging keeps the zeros."""

import copy
import gc
import runpy
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from nets import RULES, images, same, snapshot
from ranks import assert_same_on_all_ranks, run_ranks
from torch import distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from torchcram import (
    CRAM,
    GlobalTopK,
    compress_,
    compressible_weights,
    masks_of,
    parse_operator,
    sparsity,
    split_batch,
)

pytest.importorskip("peft", reason="peft is not installed")
from peft import LoraConfig, get_peft_model

from torchcram.integrations.peft import (
    LoraCrAM,
    hold_lora_masks,
    merge_sparse,
    merge_sparse_,
    merged_model,
    merged_weights,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"
OPERATORS = ["global:0.5", "uniform:0.7", "nm:2:4", "int4", "global:0.5+int8"]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for nets this small
    yield
    torch.set_num_threads(before)


def adapted(net=None, *, targets=("0", "2"), **options):
    """A net with adapters that do something already."""
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=list(targets), init_lora_weights=False, **options
    )
    return get_peft_model(net, config)


def conv_net():
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1),
        nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch_of(count=6, dtype=torch.float32):
    return torch.randn(count, 8, dtype=dtype), torch.randint(4, (count,))


def closure_of(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


class Oracle:
    """The rules for a net of two adapted layers, on tensors alone."""

    def __init__(self, model, operator, batch):
        layers = [model.base_model.model[0], model.base_model.model[2]]
        self.frozen = [
            (layer.base_layer.weight.detach(), layer.base_layer.bias.detach()) for layer in layers
        ]
        self.point = [
            part["default"].weight.detach().clone()
            for layer in layers
            for part in (layer.lora_A, layer.lora_B)
        ]
        self.operator, self.batch = operator, batch

    def merged(self, point):
        (w1, _), (w2, _) = self.frozen
        a1, b1, a2, b2 = point
        return [w1 + 2 * b1 @ a1, w2 + 2 * b2 @ a2]  # s = 4 / 2

    def gradient(self, point, weights=None, masks=None):
        """With respect to A and B; through compressed `weights` if there are any."""
        point = [part.clone().requires_grad_() for part in point]
        merged = self.merged(point)
        at = [w.clone().requires_grad_() for w in (merged if weights is None else weights)]
        (_, c1), (_, c2) = self.frozen
        out = linear(linear(self.batch[0], at[0], c1).relu(), at[1], c2)
        big = torch.autograd.grad(cross_entropy(out, self.batch[1]), at)
        if masks is not None:
            big = [torch.where(mask, part, 0.0) for mask, part in zip(masks, big, strict=True)]
        return torch.autograd.grad(merged, point, big)

    def compress(self, point):
        weights = dict(enumerate(self.merged(point)))
        masks = self.operator.compress_(weights)
        return list(weights.values()), None if masks is None else list(masks.values())

    def ascend(self, g, rho, *, normalize):
        length = torch.sqrt(sum((part**2).sum() for part in g)) if normalize else 1.0
        return [p + rho * part / length for p, part in zip(self.point, g, strict=True)]

    def step(self, rule, rho, *, sparse):
        g = self.gradient(self.point)
        if rule == "SAM":
            return self.gradient(self.ascend(g, rho, normalize=True))
        if rule in ("Top-K", "Top-K+"):
            point = self.point
        elif rule == "C-SAM":
            weights, masks = self.compress(self.point)
            h = self.gradient(self.point, weights, masks if sparse else None)
            point = self.ascend(h, rho, normalize=True)
        else:
            point = self.ascend(g, rho, normalize=False)
        weights, masks = self.compress(point)
        found = self.gradient(point, weights, masks if sparse and rule != "Top-K" else None)
        return [a + b for a, b in zip(found, g, strict=True)] if rule.endswith("+") else found


@rules
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_step_is_that_of_the_rule_over_merged_weights(rule, operator, sparse):
    model, batch = adapted().double(), batch_of(dtype=torch.float64)
    expected = Oracle(model, parse_operator(operator), batch).step(rule.name, 0.1, sparse=sparse)
    before = [p.detach().clone() for p in trained(model)]
    optimizer = LoraCrAM(
        model,
        SGD(trained(model), lr=0.5),
        operator,
        rho=0.1,
        rule=rule,
        sparse_gradients=sparse,
    )
    optimizer.step(closure_of(model, optimizer, batch))
    for old, new, g in zip(before, trained(model), expected, strict=True):
        torch.testing.assert_close((old - new.detach()) / 0.5, g, rtol=1e-9, atol=1e-12)


@rules
def test_passes_on_parts_of_micro_batches_are_those_on_parts_of_one_batch(rule):
    ours, theirs = adapted().double(), adapted().double()
    both = [LoraCrAM(m, SGD(trained(m), lr=0.5), OPERATORS[:3], rule=rule) for m in (ours, theirs)]
    for _ in range(3):
        micro = [split_batch(batch_of(4, torch.float64)) for _ in range(2)]
        passes = list(zip(*micro, strict=True))
        union = [[torch.cat(values) for values in zip(*parts, strict=True)] for parts in passes]
        both[1].step(*(closure_of(theirs, both[1], part) for part in union))
        both[0].zero_grad()
        for number, parts in enumerate((passes[0], *([passes[1]] * len(rule.passes)))):
            with both[0].compressed() if number else nullcontext():
                for x, y in parts:
                    (cross_entropy(ours(x), y) / 2).backward()
        both[0].step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-12)


KINDS = {
    "linear": adapted,
    "conv": lambda: adapted(conv_net(), targets=("0", "3")),
    "dropout": lambda: adapted(lora_dropout=0.5),
    "saved head": lambda: adapted(targets=("0",), modules_to_save=["2"]),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("outer", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_inside_the_model_is_the_compressed_merged_one_bit_for_bit(kind, operator, outer):
    model, batch = KINDS[kind](), images() if kind == "conv" else batch_of()
    deployed, flags = KINDS[kind](), [p.requires_grad for p in model.parameters()]
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.1), operator, rho=0.2)
    with torch.autocast("cpu", torch.bfloat16, enabled=outer):
        closure_of(model, optimizer, batch)()
        before = snapshot(model)
        deployed.load_state_dict(before)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for ours, theirs in zip(trained(model), trained(deployed), strict=True):
                theirs.add_(ours.grad, alpha=0.2)
            deployed = merge_sparse(deployed, operator)
        with optimizer.compressed():
            assert torch.equal(model(batch[0]), deployed(batch[0]))
            cross_entropy(model(batch[0]), batch[1]).backward()
    assert same(snapshot(model), before)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not any(getattr(module, "merged", False) for module in model.modules())


@rules
def test_without_learning_rate_nothing_moves_not_even_after_an_error(rule):
    model, batch = adapted(), batch_of()
    before = snapshot(model)
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.0), OPERATORS[:3], rule=rule, rho=0.3)
    usual, calls = closure_of(model, optimizer, batch), []
    for _ in range(4):
        optimizer.step(usual)
    assert same(snapshot(model), before)

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError
        return usual()

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert same(snapshot(model), before)
    assert all("lora" in n for n, p in model.named_parameters() if p.requires_grad)


@rules
def test_micro_batches_and_the_loss_scale_do_not_change_the_step(rule):
    batch, weights = batch_of(12), []
    for parts, scale in ((1, 1.0), (3, 1.0), (2, 2.0**16)):
        model, scaler = adapted(), GradScaler("cpu", init_scale=scale)
        optimizer = LoraCrAM(model, SGD(trained(model), lr=0.5), "global:0.5", rule=rule, rho=0.1)

        def backward(model=model, scaler=scaler, parts=parts):
            for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
                scaler.scale(cross_entropy(model(x), y) / parts).backward()

        backward()
        for _ in rule.passes:
            with optimizer.compressed(grad_scaler=scaler):
                backward()
        scaler.step(optimizer)
        weights.append(trained(model))
    for one, *others in zip(*weights, strict=True):
        for other in others:
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_does_not_change_the_step(reentrant):
    from torch.utils.checkpoint import checkpoint

    batch, steps = batch_of(), []
    for on in (False, True):
        model = adapted()
        optimizer = LoraCrAM(model, SGD(trained(model), lr=0.5), "global:0.5", rho=0.1)
        x = batch[0].clone().requires_grad_()

        def closure(model=model, optimizer=optimizer, on=on, x=x):
            optimizer.zero_grad()
            out = checkpoint(model, x, use_reentrant=reentrant) if on else model(x)
            loss = cross_entropy(out, batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
        steps.append(snapshot(model))
    assert same(*steps)


def test_masks_are_kept_and_the_state_resumes():
    batches = [batch_of() for _ in range(8)]
    models = [adapted(), adapted()]
    first, second = (
        LoraCrAM(m, AdamW(trained(m), lr=0.01), ["global:0.5", "nm:2:4"], mask_interval=3)
        for m in models
    )
    for batch in batches:
        first.step(closure_of(models[0], first, batch))
    for batch in batches[:4]:
        second.step(closure_of(models[1], second, batch))
    third = LoraCrAM(
        models[1], AdamW(trained(models[1]), lr=0.01), ["global:0.5", "nm:2:4"], mask_interval=3
    )
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    for batch in batches[4:]:
        third.step(closure_of(models[1], third, batch))
    assert same(*map(snapshot, models))
    assert repr(third).startswith("CrAM(CrAM+, [global:0.5, nm:2:4]")


def test_masks_that_are_kept_are_those_of_merged_weights():
    model, batch, seen = adapted(), batch_of(), []
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.0), "global:0.5+int8", mask_interval=9)
    usual = closure_of(model, optimizer, batch)
    for _ in range(2):
        optimizer.step(lambda: (seen.append(usual()), seen[-1])[1])
    assert seen[1] == seen[3]  # at w~, the second time with the masks of the first
    assert seen[0] != seen[1]


def test_ctrl_c_while_layers_are_put_back():
    model, batch = adapted(), batch_of()
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5")
    closure, before = closure_of(model, optimizer, batch), snapshot(model)
    flags = [p.requires_grad for p in model.parameters()]
    closure()
    calls, interrupted = optimizer._undo._calls, [True, True]

    def interrupt():
        if interrupted:
            interrupted.pop()
            raise KeyboardInterrupt

    def backward():
        calls.insert(len(calls) // 2, interrupt)
        closure()

    with pytest.raises(KeyboardInterrupt), optimizer.compressed():
        backward()
    assert not same(snapshot(model), before)
    optimizer.restore()
    assert same(snapshot(model), before)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not any(getattr(module, "merged", False) for module in model.modules())
    optimizer.step(closure)


@pytest.mark.parametrize("fails", [False, True])
def test_masks_of_a_pass_do_not_outlive_it(fails):
    model, batch, seen = adapted(), batch_of(), []
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5")
    closure_of(model, optimizer, batch)()
    prepare = optimizer._prepare_layers

    def watched(one, masks):
        seen.extend(map(weakref.ref, masks.values()))
        prepare(one, masks)

    optimizer._prepare_layers = watched
    with pytest.raises(KeyError) if fails else nullcontext(), optimizer.compressed():
        cross_entropy(model(batch[0]), batch[1]).backward()
        if fails:
            raise KeyError
    gc.collect()
    assert len(seen) == 2
    assert not any(mask() is not None for mask in seen)


def test_an_error_forgets_the_masks_of_its_operator():
    model, batch = adapted(), batch_of()
    operators = ["global:0.5", "nm:2:4"]
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.1), operators, mask_interval=9)
    closure = closure_of(model, optimizer, batch)
    for _ in range(9):
        optimizer.step(closure)
    assert {operator for operator, *_ in optimizer.state_dict()["cram"]["masks"]} == {*operators}
    closure()
    with pytest.raises(KeyError), optimizer.compressed():
        raise KeyError
    (left,) = {operator for operator, *_ in optimizer.state_dict()["cram"]["masks"]}
    assert left != str(optimizer.operator)


def test_operators_are_those_that_were_given():
    model, given = adapted(), (GlobalTopK(0.5), parse_operator("nm:2:4"))
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.1), given, base_step_probability=0.5)
    drawn = set()
    for _ in range(20):
        optimizer.step(closure_of(model, optimizer, batch_of()))
        drawn.add(optimizer.operator)
    assert all(ours is theirs for ours, theirs in zip(optimizer.operators, given, strict=True))
    assert drawn == {*given, None}
    assert not {type(operator) for operator in drawn} - {*map(type, (*given, None))}


def test_a_plain_pass_is_at_w():
    model, batch = adapted(), batch_of()
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.0), "global:0.5")
    optimizer.step(closure_of(model, optimizer, batch))
    optimizer.base_step_probability = 1.0
    dense = model(batch[0])
    closure_of(model, optimizer, batch)()
    with optimizer.compressed() as needed:
        assert not needed
        assert torch.equal(model(batch[0]), dense)


@pytest.mark.parametrize("net", [None, conv_net()], ids=["linear", "conv"])
def test_a_model_is_merged_for_a_block_and_comes_back(net):
    targets = ("0", "2") if net is None else ("0", "3", "5")
    model = adapted(copy.deepcopy(net), targets=targets).eval()
    x = torch.randn(5, 8) if net is None else torch.randn(5, 4, 6, 6)
    before, expected = snapshot(model), model(x)
    merged = copy.deepcopy(model).merge_and_unload()
    with suppress(KeyError), merged_model(model) as inside:  # also after an exception
        assert not any("lora" in name for name, _ in inside.named_parameters())
        plain = {name.removeprefix("base_model.model."): v for name, v in inside.named_parameters()}
        assert same(plain, dict(merged.named_parameters()))
        torch.testing.assert_close(inside(x), expected)
        raise KeyError
    assert same(snapshot(model), before)
    assert torch.equal(model(x), expected)
    with pytest.raises(ValueError, match="has no adapters"), merged_model(merged):
        pass


def test_ranges_and_plain_steps():
    model, batch, seen = adapted(), batch_of(), []
    optimizer = LoraCrAM(
        model, SGD(trained(model), lr=0.1), "global:0.3-0.9", base_step_probability=0.5
    )
    usual = closure_of(model, optimizer, batch)

    def closure():
        seen.append((sparsity(optimizer.weights), optimizer.operator is None))
        return usual()

    for _ in range(12):
        optimizer.step(closure)
    levels = [level for level, _ in seen if level > 0]
    assert 12 < len(seen) < 24  # some steps are plain, some are not
    assert len(set(levels)) == len(levels)
    assert all(0.28 < level < 0.92 for level in levels)


def train_on_rank(rank):
    generator = torch.Generator().manual_seed(rank)
    data = [(torch.randn(4, 8, generator=generator), torch.arange(4)) for _ in range(4)]
    for view in (False, True):
        model = adapted()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
        optimizer = LoraCrAM(wrapped, SGD(trained(model), lr=0.1, momentum=0.9), OPERATORS[:3])
        before = snapshot(model)
        for batch in data:
            optimizer.step(closure_of(wrapped, optimizer, batch))
            assert_same_on_all_ranks(dict(model.named_parameters()))
        assert not same(snapshot(model), before)


@pytest.mark.slow
def test_ranks_with_other_data_stay_bit_identical():
    assert run_ranks(2, train_on_rank) == 2


@pytest.fixture
def one_process(tmp_path):
    meet = (tmp_path / "meet").as_uri()
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@rules
@pytest.mark.usefixtures("one_process")
def test_data_parallel_takes_the_same_step(rule):
    steps, batch = [], batch_of()
    for wrap in (lambda model: model, DistributedDataParallel):
        model = adapted()
        wrapped = wrap(model)
        optimizer = LoraCrAM(wrapped, SGD(trained(model), lr=0.1), "global:0.5", rule=rule)
        for _ in range(3):
            optimizer.step(closure_of(wrapped, optimizer, batch))
        steps.append(snapshot(model))
    assert same(*steps)


@pytest.mark.usefixtures("one_process")
def test_a_search_for_unused_parameters_is_refused():
    model = adapted()
    base = SGD(trained(model), lr=0.1)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for one in (wrapped, torch.compile(wrapped, backend="eager")):
        with pytest.raises(ValueError, match=r"find_unused_parameters=True .* set it to False"):
            LoraCrAM(one, base, "global:0.5")


@pytest.mark.parametrize("operator", OPERATORS[:3])
def test_a_merge_to_an_operator_has_its_zeros(operator):
    model = adapted(targets=("0",), modules_to_save=["2"])
    dense = copy.deepcopy(model).merge_and_unload()
    merged = merge_sparse(model, operator)
    masks = compress_(dense, operator)
    assert same(snapshot(merged), snapshot(dense))
    assert masks.keys() == {"0.weight", "2.weight"}


def test_a_merge_leaves_the_model_for_the_next_one():
    model, batch = adapted(), batch_of()
    before, output = snapshot(model), model(batch[0])
    for level in (0.9, 0.5):  # from the higher to the lower one
        merged = merge_sparse(model, GlobalTopK(level))
        assert sparsity(compressible_weights(merged)) == pytest.approx(level, abs=0.01)
    assert same(snapshot(model), before)
    assert torch.equal(model(batch[0]), output)


def test_a_merge_in_place_is_done_once():
    model = adapted()
    expected = snapshot(merge_sparse(model, "global:0.5"))
    assert same(snapshot(merge_sparse_(model, "global:0.5")), expected)
    for call in (merge_sparse, merge_sparse_):
        with pytest.raises(ValueError, match="has no adapters; they may be merged already"):
            call(model, "global:0.2")
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged already: unmerge_adapter"):
        merge_sparse(model, "global:0.5")


def test_a_merge_of_the_weights_that_were_trained():
    model, batch = adapted(targets=("0", "2")), batch_of()
    weights = {name: w for name, w in merged_weights(model).items() if ".0." in name}
    base = SGD(trained(model), lr=0.1)
    optimizer = LoraCrAM(model, base, "global:0.5", weights=weights)
    optimizer.step(closure_of(model, optimizer, batch))
    for merged in (
        optimizer.compress("global:0.9"),
        merge_sparse(model, "global:0.9", weights=optimizer.weights),
    ):
        found = compressible_weights(merged)
        assert sparsity({"": found["0.weight"]}) == pytest.approx(0.9, abs=0.01)
        assert sparsity({"": found["2.weight"]}) == 0
    with pytest.warns(UserWarning, match=r"left dense in training with CrAM: 2\.weight"):
        merge_sparse(model, "global:0.9")
    with pytest.raises(ValueError, match=r"no compressible 7\.weight"):
        merge_sparse(model, "global:0.9", weights={"7.weight": torch.zeros(2, 2)})


def pruned_and_adapted(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    masks = compress_(net, "global:0.7")
    return adapted(net, **options), masks


def zeros_stay(model, masks):
    weights = compressible_weights(model)
    return all((weights[n][~m] == 0).all() and (weights[n][m] != 0).all() for n, m in masks.items())


def test_a_merge_by_masks_has_the_same_zeros():
    model, masks = pruned_and_adapted()
    assert not zeros_stay(copy.deepcopy(model).merge_and_unload(), masks)
    by_new_names = dict(zip(merged_weights(model), masks.values(), strict=True))
    assert zeros_stay(merge_sparse(model, by_new_names), masks)
    assert zeros_stay(merge_sparse(model, masks), masks)


@pytest.mark.parametrize("cram", [False, True], ids=["plain", "CrAM"])
def test_held_masks_are_held_in_training_and_in_every_merge(cram):
    model, masks = pruned_and_adapted()
    base = AdamW(trained(model), lr=0.05)
    optimizer = LoraCrAM(model, base, "global:0.8", rule=CRAM) if cram else base
    batches = [batch_of() for _ in range(5)]
    with hold_lora_masks(model, masks):
        losses = [optimizer.step(closure_of(model, optimizer, batch)) for batch in batches * 4]
        x = batches[0][0]
        assert losses[-1] < losses[0] - 0.1
        for merged in (
            copy.deepcopy(model).merge_and_unload(),
            copy.deepcopy(model).merge_and_unload(safe_merge=True),
            merge_sparse(model, masks),
        ):
            assert zeros_stay(merged, masks)
            torch.testing.assert_close(merged(x), model(x), rtol=1e-5, atol=1e-5)
        before = snapshot(model)
        model.merge_adapter()
        model.unmerge_adapter()
        for name, value in snapshot(model).items():
            torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)
    assert not zeros_stay(copy.deepcopy(model).merge_and_unload(), masks)


def test_held_masks_in_convolutions():
    torch.manual_seed(0)
    net = conv_net()
    masks = compress_(net, "global:0.7")
    model = adapted(net, targets=("0", "3")).eval()
    with hold_lora_masks(model, masks):
        x, dense = images()[0], copy.deepcopy(model)
        merged = merge_sparse(dense, masks)
        torch.testing.assert_close(model(x), merged(x), rtol=1e-5, atol=1e-5)
        assert zeros_stay(merged, masks)


def test_the_gradient_of_held_masks_is_that_of_the_masked_product():
    model, masks = pruned_and_adapted()
    batch, oracle = batch_of(), Oracle(model, None, None)
    hold_lora_masks(model, masks)
    cross_entropy(model(batch[0]), batch[1]).backward()
    oracle.batch = batch
    weights = [
        torch.where(mask, w, 0.0)
        for mask, w in zip(masks.values(), oracle.merged(oracle.point), strict=True)
    ]
    expected = oracle.gradient(oracle.point, weights, list(masks.values()))
    for parameter, g in zip(trained(model), expected, strict=True):
        torch.testing.assert_close(parameter.grad, g, rtol=1e-5, atol=1e-7)


REFUSED = {
    "variant of LoRA": {"use_dora": True},
    r"bias \(lora_bias\)": {"lora_bias": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_more_than_plain_lora_is_refused(reason):
    model = adapted(**REFUSED[reason])
    with pytest.raises(ValueError, match=f"'base_model.model.0'.*{reason}.*plain LoRA"):
        LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5")


def test_what_else_is_refused():
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged already"):
        LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5")
    model = adapted().requires_grad_(True)
    with pytest.raises(ValueError, match="its own weight is trained"):
        LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5")
    plain = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="no LoRA adapter"):
        LoraCrAM(plain, SGD(plain.parameters(), lr=0.1), "global:0.5")
    net = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten())
    with pytest.warns(UserWarning, match="groups"):
        model = adapted(net, targets=("0",))
    with pytest.raises(ValueError, match="in groups"):
        LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5")


@pytest.mark.parametrize("call", [merge_sparse, merge_sparse_, hold_lora_masks])
def test_masks_that_do_not_fit_change_nothing(call):
    model, masks = pruned_and_adapted()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"mask for '7.weight', but only weights 0.weight"):
        call(model, {"7.weight": masks["0.weight"]})
    with pytest.raises(ValueError, match=r"'0.weight' is torch.bool of shape \(4, 16\); needed"):
        call(model, {"0.weight": masks["2.weight"]})
    with pytest.raises(ValueError, match=r"torch.float32 of shape \(16, 8\)"):
        call(model, {"0.weight": masks["0.weight"].float()})
    assert same(snapshot(model), before)


def test_a_weight_that_is_trained_by_itself_is_for_hold_masks():
    model, masks = pruned_and_adapted(targets=("0",), modules_to_save=["2"])
    with pytest.raises(ValueError, match="hold_masks"):
        hold_lora_masks(model, masks)


def test_a_transformer_trains_and_keeps_its_zeros():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    model = adapted(net, targets=("q_proj", "down_proj", "lm_head"), task_type="CAUSAL_LM")
    tokens = torch.arange(8).repeat(4, 1) % 4
    weights = merged_weights(model)
    assert not any("lora" in name or "embed" in name for name in weights)
    assert len(weights) == 2 * 7 + 1
    optimizer = LoraCrAM(model, AdamW(trained(model), lr=0.05), ["global:0.5", "nm:2:4"])

    def closure():
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(15)]
    assert losses[-1] < losses[0] - 1
    merged = merge_sparse(model, "global:0.5")
    assert sparsity(compressible_weights(merged)) == pytest.approx(0.5, abs=1e-4)
    with torch.no_grad():
        pruned = merged(input_ids=tokens, labels=tokens).loss.item()
    assert pruned < losses[0] - 1


def test_the_example(capsys):
    accuracy = runpy.run_path(str(EXAMPLE))["main"](epochs=4)
    assert accuracy["global:0.5"] > 0.6
    assert "80% zeros" in capsys.readouterr().out
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_masks_of_a_merged_model_are_its_zeros():
    merged = merge_sparse(adapted(), GlobalTopK(0.5))
    kept = sum(int(m.sum()) for m in masks_of(compressible_weights(merged)).values())
    assert kept == (8 * 16 + 16 * 4) // 2


class Conv1DNet(nn.Module):
    """The projections of GPT-2, with their inputs before their outputs."""

    def __init__(self):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.up, self.down = Conv1D(16, 8), Conv1D(4, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def conv1d_net():
    return adapted(Conv1DNet(), targets=("up", "down"), fan_in_fan_out=True)


@pytest.mark.parametrize("operator", ["global:0.5", "nm:2:4", "int4"])
def test_conv1d_of_transformers_is_compressed_once_merged(operator):
    model, batch = conv1d_net(), batch_of()
    expected = merge_sparse(copy.deepcopy(model), operator)(batch[0])
    optimizer = LoraCrAM(model, SGD(trained(model), lr=0.1), operator, rho=0.0)
    cross_entropy(model(batch[0]), batch[1]).backward()
    with optimizer.compressed():
        assert torch.equal(model(batch[0]), expected)
        cross_entropy(model(batch[0]), batch[1]).backward()


def test_held_masks_in_conv1d_of_transformers():
    torch.manual_seed(0)
    net = Conv1DNet()
    masks = compress_(net, "nm:2:4")
    assert masks["up.weight"].unflatten(0, (-1, 4)).sum(1).eq(2).all()
    model = adapted(net, targets=("up", "down"), fan_in_fan_out=True).eval()
    with hold_lora_masks(model, masks):
        x = batch_of()[0]
        merged = merge_sparse(copy.deepcopy(model), masks)
        torch.testing.assert_close(model(x), merged(x), rtol=1e-5, atol=1e-5)
        assert zeros_stay(merged, masks)


def test_adapters_of_attention_are_refused_and_can_be_left_out():
    def build():
        net = nn.ModuleDict({"att": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 4)})
        return adapted(net, targets=("att", "fc"))

    model = build()
    with pytest.raises(
        ValueError, match=r"model.att' adapts weights of a MultiheadAttention.*leave out .*in_proj"
    ):
        LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5")
    weights = compressible_weights(model, only=r"fc\.base_layer")
    LoraCrAM(model, SGD(trained(model), lr=0.1), "global:0.5", weights=weights)
    merged = merge_sparse(build(), "uniform:0.5")
    zeros = [int(part.eq(0).sum()) for part in merged.att.in_proj_weight.chunk(3)]
    assert zeros == [32, 32, 32]
