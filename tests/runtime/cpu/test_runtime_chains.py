"""Chains of convolutions: the plan, the operator, and chains in the graph of a prepared model."""

import copy
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_model, sparse_weight
from torch import nn

from torchcram.runtime import prepare, report
from torchcram.runtime.cpu import chains, replace_layers
from torchcram.runtime.cpu.chain_plan import NO_RESIDUAL, ChainLayer, chain_layers, plan_chain
from torchcram.runtime.cpu.memory_format import empty_images, output_dim_order
from torchcram.runtime.cpu.modules import SparseConv2d
from torchcram.runtime.cpu.ops.image_layout import images_innermost
from torchcram.runtime.cpu.packing import Geometry

pytestmark = needs_kernels

CHAIN = torch.ops.torchcram.convolution_chain


@st.composite
def layers_of_chains(draw, most=6):
    """Layers that read any earlier values, with residuals of any earlier value."""
    side = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2))
    layers = []
    for number in range(draw(st.integers(1, most))):
        geometry = Geometry(*zip(draw(side), draw(side), strict=True))
        source = draw(st.integers(max(0, number - 2), number))
        residual = draw(st.integers(NO_RESIDUAL, number))
        layers.append(ChainLayer(source, residual, 3, draw(st.booleans()), geometry))
    return tuple(layers)


def sizes_of(layers, size):
    sizes = [size]
    for layer in layers:
        sizes.append(layer.geometry.output(*sizes[layer.source]))
    return sizes


def with_fitting_residuals(layers, size):
    """Drops residuals of another size; rejects images that are too small."""
    sizes = sizes_of(layers, size)
    assume(all(min(each) >= 1 for each in sizes))
    return tuple(
        layer if sizes[layer.residual] == sizes[number] else layer._replace(residual=NO_RESIDUAL)
        for number, layer in enumerate(layers, 1)
    )


@given(layers_of_chains(), st.integers(1, 20), st.integers(1, 25))
def test_every_row_is_in_memory_when_it_is_read(layers, height, rows):
    layers = with_fitting_residuals(layers, (height, 9))
    steps, sizes, rings = plan_chain(layers, (height, 9), rows)
    assert list(sizes) == sizes_of(layers, (height, 9))
    assert all(ring <= size[0] for ring, size in zip(rings, sizes, strict=True))
    memory = [[None] * ring for ring in rings]
    memory[0] = list(range(height))
    done = [0] * len(layers)

    def read(value, row):
        assert memory[value][row % rings[value]] == row

    for step in steps:
        assert step.first == done[step.layer]
        assert step.end > step.first
        layer = layers[step.layer]
        (kernel, _), (stride, _), (pad, _), (dilation, _) = layer.geometry.__dict__.values()
        for row in range(step.first, step.end):
            for k in range(kernel):
                source_row = row * stride - pad + k * dilation
                if 0 <= source_row < sizes[layer.source][0]:
                    read(layer.source, source_row)
            if layer.residual != NO_RESIDUAL:
                read(layer.residual, row)
        for row in range(step.first, step.end):  # no row of the step is overwritten by another one
            memory[step.layer + 1][row % rings[step.layer + 1]] = row
        assert step.end - step.first <= rings[step.layer + 1]
        done[step.layer] = step.end
    assert done[-1] == sizes[-1][0]


def test_few_rows_are_in_memory():
    conv = Geometry((3, 3), padding=(1, 1))
    layers = (
        ChainLayer(0, NO_RESIDUAL, 4, True, conv),
        ChainLayer(1, NO_RESIDUAL, 4, True, conv),
        ChainLayer(2, 1, 4, False, Geometry((1, 1))),
    )
    plan = plan_chain(layers, (56, 8), 1)
    assert plan.rings == (56, 3, 1, 56)
    assert plan_chain(layers, (56, 8), 4).rings == (56, 6, 4, 56)
    assert plan_chain(layers, (56, 8), 100).rings == (56, 56, 56, 56)


def test_layers_as_numbers():
    layers = (
        ChainLayer(0, NO_RESIDUAL, 4, True, Geometry((3, 1), (2, 1), (1, 0), (1, 2))),
        ChainLayer(1, 0, 5, False, Geometry((1, 1))),
    )
    numbers = [number for layer in layers for number in layer.numbers()]
    assert chain_layers(numbers) == layers
    with pytest.raises(ValueError, match="at least one layer"):
        chain_layers([])
    with pytest.raises(ValueError, match="12 numbers for each, got 13"):
        chain_layers(numbers[:13])
    for source, residual in [(1, -1), (-1, -1), (0, 1), (0, -2)]:
        with pytest.raises(ValueError, match="layer 0 of a chain reads"):
            chain_layers([source, residual, *numbers[2:12]])


def modules_of(layers, channels=3):
    """Sparse convolutions, each with 3 outputs and every second one with a bias."""
    return [
        SparseConv2d(
            *(sparse_weight(3, channels, *layer.geometry.kernel, sparsity=0.5) / 3, bias),
            layer.geometry,
            by_images=True,
            relu=layer.relu,
        )
        for number, layer in enumerate(layers)
        for bias in [torch.randn(3) if number % 2 else None]
    ]


def arguments(x, layers, modules, rows):
    numbers = [number for layer in layers for number in layer.numbers()]
    packed, biases = [each.packed for each in modules], [each.bias for each in modules]
    return x, packed, biases, numbers, rows


def run_layers(x, layers, modules):
    values = [x]
    for layer, module in zip(layers, modules, strict=True):
        residual = None if layer.residual == NO_RESIDUAL else values[layer.residual]
        values.append(module(values[layer.source], residual))
    return values[-1]


@given(
    *(layers_of_chains(), st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 10)),
    st.sampled_from([0, 1, 2, 16, 19]),
)
@pytest.mark.usefixtures("each_level")
def test_chains_compute_what_their_layers_do(layers, size, rows, images):
    layers = with_fitting_residuals(layers, size)
    modules, x = modules_of(layers), torch.randn(images, 3, *size)
    for inputs in (images_innermost(x), x, x.to(memory_format=torch.channels_last)):
        y = CHAIN(*arguments(inputs, layers, modules, rows))
        assert torch.equal(y, run_layers(inputs, layers, modules))
        order = output_dim_order(inputs, by_images=True, channels_last=False)
        assert y.stride() == empty_images(torch.empty, tuple(y.shape), order).stride()


def test_values_that_count_as_contiguous_do_not_change_the_layout():
    layers = (
        ChainLayer(0, NO_RESIDUAL, 3, True, Geometry((3, 3))),
        ChainLayer(1, NO_RESIDUAL, 3, True, Geometry((1, 1), padding=(1, 1))),
    )
    modules, x = modules_of(layers), images_innermost(torch.randn(1, 3, 3, 3))
    call = arguments(x, layers, modules, 1)
    assert CHAIN(*call).permute(2, 3, 1, 0).is_contiguous()
    torch.library.opcheck(CHAIN.default, call, test_utils=("test_schema", "test_faketensor"))


def test_residuals_that_have_to_be_expanded():
    layers = (
        ChainLayer(0, NO_RESIDUAL, 3, False, Geometry((2, 2), (2, 2))),
        ChainLayer(0, 1, 3, True, Geometry((3, 3), (2, 2), (1, 1))),
    )
    modules, x = modules_of(layers), images_innermost(torch.randn(16, 3, 3, 3))
    y = CHAIN(*arguments(x, layers, modules, 1))
    assert torch.equal(y, run_layers(x, layers, modules))


LAYERS = (
    ChainLayer(0, NO_RESIDUAL, 3, True, Geometry((3, 3), padding=(1, 1))),
    ChainLayer(1, 0, 3, True, Geometry((1, 1))),
    ChainLayer(2, NO_RESIDUAL, 3, False, Geometry((3, 3), (2, 2), (1, 1))),
)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads):
    modules, x = modules_of(LAYERS), images_innermost(torch.randn(17, 3, 12, 10))
    expected = run_layers(x, LAYERS, modules)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(CHAIN(*arguments(x, LAYERS, modules, 2)), expected)
    finally:
        torch.set_num_threads(before)


def test_derivatives_of_chains():
    modules, x = modules_of(LAYERS), images_innermost(torch.randn(16, 3, 6, 6))
    found, expected = (
        torch.autograd.functional.jvp(function, x, torch.ones_like(x))
        for function in (
            lambda x: CHAIN(*arguments(x, LAYERS, modules, 1)),
            lambda x: run_layers(x, LAYERS, modules),
        )
    )
    torch.testing.assert_close(found, expected)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(CHAIN(*arguments(x, LAYERS, modules, 1)).sum(), x)
    (expected,) = torch.autograd.grad(run_layers(x, LAYERS, modules).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_derivatives_with_respect_to_a_bias():
    modules, x = modules_of(LAYERS), images_innermost(torch.randn(16, 3, 6, 6))
    modules[1].bias.requires_grad_()
    gradients = [
        torch.autograd.grad(function.square().sum(), modules[1].bias)[0]
        for function in (
            CHAIN(*arguments(x, LAYERS, modules, 1)),
            run_layers(x, LAYERS, modules),
        )
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dim", [0, 2])
def test_batches_of_batches(dim):
    modules, x = modules_of(LAYERS), torch.randn(3, 4, 3, 6, 6)
    expected = torch.stack([run_layers(each, LAYERS, modules) for each in x])
    _, *others = arguments(x, LAYERS, modules, 2)
    found = torch.func.vmap(lambda x: CHAIN(x, *others), in_dims=dim)(x.movedim(0, dim))
    torch.testing.assert_close(found, expected)
    packed = torch.stack([others[0][0]] * 2)
    with pytest.raises(NotImplementedError, match="over the weights"):
        torch.func.vmap(lambda p: CHAIN(x[0], [p, *others[0][1:]], *others[1:]))(packed)


def test_the_operator_is_what_torch_expects():
    modules = modules_of(LAYERS)
    for x in (torch.randn(16, 3, 6, 6), images_innermost(torch.randn(16, 3, 6, 6))):
        torch.library.opcheck(
            CHAIN.default,
            arguments(x, LAYERS, modules, 2),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_chains_that_do_not_fit_are_refused():
    modules, x = modules_of(LAYERS), images_innermost(torch.randn(16, 3, 6, 6))
    good = arguments(x, LAYERS, modules, 2)
    numbers = good[3]

    def refused(message, *, x=x, packed=good[1], biases=good[2], numbers=numbers, rows=2):
        with pytest.raises(ValueError, match=message):
            CHAIN(x, packed, biases, numbers, rows)

    refused("got 2 matrices", packed=good[1][:2])
    refused("got 3 matrices, 1 biases", biases=good[2][:1])
    refused("0 rows at a time", rows=0)
    refused(r"inputs of shape \(3, 6, 6\)", x=x[0])
    refused("need float32", x=x.double())
    refused("from 2 channels", x=images_innermost(torch.randn(16, 2, 6, 6)), numbers=[
        *numbers[:12], 1, NO_RESIDUAL, *numbers[14:],
    ])  # fmt: skip
    refused("the residual of layer 1 has 2 channels", x=images_innermost(torch.randn(16, 2, 6, 6)))
    refused("matrix 0 of a chain does not have 4 rows", numbers=[*numbers[:2], 4, *numbers[3:]])
    refused("bias is of shape", biases=[torch.zeros(2), None, None])
    refused("residual", numbers=[*numbers[:25], 0, *numbers[26:]])
    refused("does not fit images", numbers=[*numbers[:4], 9, 9, *numbers[6:]])
    refused("not a packed sparse matrix", packed=[torch.zeros(9, dtype=torch.uint8)] * 3)
    refused("do not hold", numbers=[*numbers[:4], 1, 1, *numbers[6:8], 0, 0, *numbers[10:]])


class Bottlenecks(nn.Module):
    """Three residual blocks, one of which has a residual of its own, and what cannot be chained."""

    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.short, self.norm = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)
        self.three, self.four = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.wide, self.head = nn.Conv2d(8, 8, 3, 2, 1), nn.Linear(8, 5)
        self.again = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.pool(torch.relu(self.stem(x)))
        x = torch.relu(self.two(torch.relu(self.one(x))) + self.short(x))
        x = torch.relu(self.four(torch.relu(self.three(x))) + x)
        x = torch.sigmoid(self.wide(x))
        return self.head(self.again(self.again(x)).mean((2, 3)))


@pytest.fixture
def chains_win(monkeypatch):
    """Every race is won by panels of images, and by chains of two rows at a time."""
    monkeypatch.setattr(replace_layers, "_LEAST", 0.0)

    def times(work):
        order = ("whole", "together", "2", "by_images", "sparse")
        ahead = next((name for name in order if name in work), None)
        return {name: 0.1 if name in (ahead, "copy") else 1.0 for name in work}

    monkeypatch.setattr(replace_layers, "time_in_turns", times)


def calls_of(model):
    return [
        [str(each.target) for each in node.args[1]]
        for module in model.modules()
        if hasattr(module, "graph")
        for node in module.graph.nodes
        if node.target is CHAIN
    ]


@pytest.mark.usefixtures("chains_win")
@pytest.mark.parametrize("images", [16, 40])
def test_models_with_chains(images):
    torch.manual_seed(0)
    model, x = sparse_model(Bottlenecks().eval(), "uniform:0.5"), torch.randn(images, 3, 12, 16)
    fast = prepare(model, x)
    names = ["one", "short", "two", "three", "four", "wide"]
    (packed,) = calls_of(fast)
    assert packed == [f"{name}.packed" for name in names]
    layers = [choice.name for choice in report(fast) if choice.sparse]
    assert {name.split(".")[-1] for name in layers} == {*names, "stem", "again", "head"}
    assert all(fast.get_submodule(name) for name in layers)
    with torch.no_grad():
        for shape in [(images, 12, 16), (3, 12, 16), (17, 9, 5), (1, 12, 16)]:
            x = torch.randn(shape[0], 3, *shape[1:])
            assert relative_error(fast(x), model(x)) < 1e-6
        assert fast(torch.randn(0, 3, 12, 16)).shape == (0, 5)
        assert torch.equal(copy.deepcopy(fast)(x), fast(x))
        assert torch.equal(pickle.loads(pickle.dumps(fast))(x), fast(x))  # noqa: S301
    other = prepare(sparse_model(Bottlenecks().eval(), "uniform:0.5"), torch.randn(16, 3, 12, 16))
    other.load_state_dict({k.removeprefix("model."): v for k, v in fast.state_dict().items()})
    torch.testing.assert_close(other(x), fast(x))
    x.requires_grad_()
    (found,) = torch.autograd.grad(fast(x).sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("chains_win")
def test_chains_are_as_long_as_their_rows_fit_into_the_caches(monkeypatch):
    model, x = sparse_model(Bottlenecks().eval(), "uniform:0.5"), torch.randn(16, 3, 12, 16)
    for cache, lengths in [(2**24, [6]), (2**14, [3, 2]), (2**10, [])]:
        monkeypatch.setattr(chains, "_CACHE_BYTES", cache)
        fast = prepare(model, x)
        assert [len(names) for names in calls_of(fast)] == lengths
        assert relative_error(fast(x), model(x)) < 1e-6


@pytest.mark.parametrize(("chain", "kept"), [(1.0, True), (1.02, True), (1.04, False)])
def test_a_chain_that_is_clearly_slower_is_not_used(monkeypatch, chain, kept):
    monkeypatch.setattr(replace_layers, "_LEAST", 0.0)

    def times(work):
        if "layers" in work:
            return {name: 1.0 if name == "layers" else chain for name in work}
        order = ("whole", "by_images", "sparse")
        ahead = next((name for name in order if name in work), None)
        return {name: 0.1 if name in (ahead, "copy") else 1.0 for name in work}

    monkeypatch.setattr(replace_layers, "time_in_turns", times)
    fast = prepare(sparse_model(Bottlenecks().eval(), "uniform:0.5"), torch.randn(16, 3, 12, 16))
    assert bool(calls_of(fast)) == kept


@pytest.mark.usefixtures("chains_win")
def test_models_with_chains_compile():
    model, x = sparse_model(Bottlenecks().eval(), "uniform:0.5"), torch.randn(16, 3, 12, 16)
    fast = prepare(model, x)
    assert calls_of(fast)
    with torch.no_grad():
        compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, fast(x))
