"""prepare(): which layers are replaced, and why others are not."""

import copy
import importlib
import warnings

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_model
from torch import nn

import torchcram
from torchcram import CrAM, artifact, compress, compress_, runtime
from torchcram.kernels.cpu import library
from torchcram.runtime import prepare
from torchcram.runtime.cpu import replace_layers
from torchcram.runtime.cpu.modules import SparseConv2d, SparseLinear
from torchcram.runtime.cpu.reordered import ReorderedConv2d, can_reorder

DENSE = ("dense", "reordered")

prepare_module = importlib.import_module("torchcram.runtime.cpu.prepare")


class Mixed(nn.Module):
    """Layers of which only one can get sparse kernels."""

    def __init__(self):
        super().__init__()
        self.short = nn.Linear(8, 8).to(torch.bfloat16)
        self.unused = nn.Linear(8, 8)
        self.used = nn.Linear(8, 8)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.same = nn.Conv2d(4, 4, 3, padding="same")

    def forward(self, x):
        return self.used(x)


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_the_report_says_what_was_done_and_why():
    model = Mixed()
    torchcram.compress_(model, "uniform:0.5", weights={"used.weight": model.used.weight})
    done = {
        choice.name: choice
        for choice in runtime.report(prepare(model, torch.randn(3, 8), fuse=False))
    }
    assert done["used"].sparse
    assert "times as fast as dense on 3x8" in done["used"].reason
    assert "torch.bfloat16, not float32" in done["short"].reason
    assert "does not reach it" in done["unused"].reason
    assert "2 groups" in done["grouped"].reason
    assert "padding is 'same'" in done["same"].reason
    assert sum(choice.sparse for choice in done.values()) == 1
    assert str(done["used"]).startswith("used (Linear, 50.0% zeros): sparse, ")
    with pytest.raises(ValueError, match="does not come from"):
        runtime.report(nn.Linear(2, 2))


@needs_kernels
def test_a_layer_that_gets_slower_stays_dense(monkeypatch):
    monkeypatch.setattr(
        replace_layers, "time_in_turns", lambda work: dict.fromkeys(work, 2.0) | {"dense": 1.0}
    )
    fast = prepare(sparse_model(nn.Sequential(nn.Linear(8, 8))), torch.randn(3, 8))
    assert not any(isinstance(m, SparseLinear) for m in fast.modules())
    (choice,) = runtime.report(fast)
    assert not choice.sparse
    assert "0.50 times as fast" in choice.reason


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("example", [None, torch.ones(3, 8)])
def test_a_model_of_one_layer(example):
    layer = sparse_model(nn.Sequential(nn.Linear(8, 8)))[0]
    fast = prepare(layer, example)
    assert any(isinstance(m, SparseLinear) for m in fast.modules())
    assert relative_error(fast(torch.ones(3, 8)), layer(torch.ones(3, 8))) < 1e-6


@needs_kernels
@pytest.mark.parametrize(("dense_ms", "pays"), [(1.0, False), (1.04, False), (1.06, True)])
def test_a_layer_has_to_win_clearly(monkeypatch, dense_ms, pays):
    monkeypatch.setattr(
        replace_layers,
        "time_in_turns",
        lambda work: {key: dense_ms if key in DENSE else 1.0 for key in work},
    )
    fast = prepare(sparse_model(nn.Sequential(nn.Linear(8, 8))), torch.randn(3, 8))
    assert runtime.report(fast)[0].sparse == pays


@needs_kernels
@pytest.mark.parametrize(
    ("zeros", "graph_ms", "sparse"), [(0.5, 2.0, False), (0.5, 4.0, True), (0.9, 2.0, True)]
)
def test_a_graph_of_dense_layers_is_tried_where_few_weights_are_zero(
    monkeypatch, zeros, graph_ms, sparse
):
    def race(work):  # every layer wins alone; the plain model takes 5 ms, with sparse layers 3 ms
        return {key: 2.0 - i / 10 for i, key in enumerate(work)}

    def whole(dense, _):
        plain = type(dense.args[0]) is nn.Sequential
        return replace_layers.ModelTimes(dense=5.0 if plain else graph_ms, sparse=3.0)

    monkeypatch.setattr(replace_layers, "time_in_turns", race)
    monkeypatch.setattr(prepare_module, "time_models", whole)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    model, x = sparse_model(model, f"uniform:{zeros}"), torch.randn(2, 3, 9, 9)
    fast = prepare(model, x)
    assert relative_error(fast(x), model(x)) < 1e-5
    choices = runtime.report(fast)
    assert [choice.sparse for choice in choices] == [sparse] * 2
    if not sparse:
        said = "but the model as a whole is not faster with its sparse layers (3 ms, dense 2 ms)"
        assert all(choice.reason.startswith("the sparse kernel alone is ") for choice in choices)
        assert all(choice.reason.endswith(said) for choice in choices)
        assert any(isinstance(m, ReorderedConv2d) for m in fast.modules()) == can_reorder()


@needs_kernels
@pytest.mark.parametrize("fuse", [False, True])
def test_a_model_that_gets_slower_as_a_whole_stays_dense(monkeypatch, fuse):
    monkeypatch.setattr(
        replace_layers, "time_in_turns", lambda work: {key: -i for i, key in enumerate(work)}
    )
    monkeypatch.setattr(
        prepare_module, "time_models", lambda *_: replace_layers.ModelTimes(dense=1.5, sparse=2.25)
    )
    model, x = sparse_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), torch.randn(3, 8)
    fast = prepare(model, x, fuse=fuse)
    assert not any(isinstance(m, SparseLinear) for m in fast.modules())
    assert torch.equal(fast(x), model(x))
    (choice,) = runtime.report(fast)
    assert not choice.sparse
    assert choice.reason.startswith("the sparse kernel alone is ")
    assert "times as fast as dense on 3x8 (" in choice.reason
    assert choice.reason.endswith(
        ", but the model as a whole is not faster with its sparse layers (2.25 ms, dense 1.5 ms)"
    )


@needs_kernels
def test_a_dense_layer_is_not_measured():
    fast = prepare(nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8))
    (choice,) = runtime.report(fast)
    assert not choice.sparse
    assert choice.reason == "fewer than 30% zeros"


def test_a_call_that_is_far_slower_takes_part_in_the_first_rounds_only(monkeypatch):
    clock, calls = [0.0], []

    def lasts(name, seconds):
        def call():
            calls.append(name)
            clock[0] += seconds

        return call

    monkeypatch.setattr(replace_layers.time, "perf_counter", lambda: clock[0])
    seconds = {"far slower": 2.01, "fast": 1.0, "slower": 1.99}
    times = replace_layers.time_in_turns({name: lasts(name, s) for name, s in seconds.items()})
    assert times == pytest.approx({name: 1000 * s for name, s in seconds.items()})
    rounds = {name: calls.count(name) for name in seconds}
    assert rounds == {"far slower": 3, "fast": 6, "slower": 6}  # the first one is not timed


@needs_kernels
def test_all_ways_to_run_a_layer_are_measured():
    layer = sparse_model(nn.Sequential(nn.Linear(16, 16)))[0]
    options = {"sparse": True, "int8": False, "innermost": False}
    times = replace_layers._measure(layer, replace_layers.LayerInput((4, 16)), **options)
    assert set(times) - {"reordered"} == {"dense", "sparse"}  # not every torch has oneDNN
    assert all(0 < time < float("inf") for time in times.values())


def large(*more):
    conv, linear = nn.Conv2d(64, 64, 3), nn.Linear(1024, 512)
    model = nn.Sequential(conv, nn.ReLU(), linear, *more)
    torchcram.compress_(model, "uniform:0.9")
    return model


@needs_kernels
def test_without_an_example_size_and_sparsity_decide():
    dense = nn.Linear(1024, 512)
    model = large(nn.Conv2d(4, 4, 3), nn.Linear(20, 20))
    model.append(dense)
    fast = prepare(model)
    kinds = [type(module) for module in fast]
    assert kinds[:3] == [SparseConv2d, nn.ReLU, SparseLinear]
    assert kinds[3:] == [nn.Conv2d, nn.Linear, nn.Linear]
    assert not fast.training
    reasons = [choice.reason for choice in runtime.report(fast)]
    said = ", and nothing was measured without an example"
    assert reasons == [
        "at least 80% zeros and 32768 weights; not measured",
        "at least 90% zeros and 524288 weights; not measured",
        f"fewer than 32768 weights{said}",
        f"fewer than 524288 weights{said}",
        f"fewer than 90% zeros{said}",
    ]


@needs_kernels
@pytest.mark.parametrize("why", ["grouped", "channels_last"])
def test_without_an_example_convolutions_that_may_be_slower_stay_dense(why):
    model = large(nn.Conv2d(64, 64, 3, groups=64)) if why == "grouped" else large()
    if why == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    fast = prepare(model)
    assert [type(module) for module in fast[:3]] == [nn.Conv2d, nn.ReLU, SparseLinear]
    assert "grouped convolutions or weights in the channels_last format" in (
        runtime.report(fast)[0].reason
    )


@needs_kernels
def test_the_report_says_what_was_measured_and_why_a_layer_stayed_dense(monkeypatch):
    times = iter([{"dense": 4.58, "sparse": 1.0}, {"dense": 10.0, "sparse": 12.5}])
    monkeypatch.setattr(replace_layers, "time_in_turns", lambda _: next(times))
    model = sparse_model(nn.Sequential(nn.Conv2d(3, 4, 3)))
    (choice,) = runtime.report(prepare(model, torch.randn(1, 3, 8, 8), fuse=False))
    assert str(choice) == (
        "0 (Conv2d, 79.6% zeros): dense, the sparse kernel alone is 4.58 times as fast as dense on "
        "1x3x8x8 (1 ms, dense 4.58 ms), but the model as a whole is not faster with its sparse "
        "layers (12.5 ms, dense 10 ms)"
    )


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_a_shared_layer_stays_shared():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    fast, x = prepare(model, torch.randn(3, 8)), torch.randn(3, 8)
    assert sum(isinstance(m, SparseLinear) for m in fast.modules()) == 1
    assert relative_error(fast(x), model(x)) < 1e-6


def forget():
    library.find.cache_clear()
    library.library.cache_clear()


def test_without_the_library_everything_is_dense_and_said_once(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    forget()
    try:
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8)
        with pytest.warns(UserWarning, match="python -m torchcram.runtime.build"):
            fast = prepare(model, x)
        assert torch.equal(fast(x), model(x))
        assert [choice.reason for choice in runtime.report(fast)] == ["no kernels"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare(model, x)
            assert not runtime.available()
        with pytest.raises(RuntimeError, match="have not been built"):
            library.kernels()
    finally:
        forget()


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_activations_that_8_bits_do_not_suit_are_computed_in_32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64))
    torchcram.compress_(model, "uniform:0.7")
    with torch.no_grad():
        model[0].weight[:, 0] = 0
    x = torch.randn(64, 256)
    x[:, 0] = 2000.0  # one large feature that the layer does not look at
    fast = prepare(model, x, int8=True)
    assert relative_error(fast(x), model(x)) < 1e-5
    assert runtime.report(fast)[0].sparse


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_layers_that_give_something_else_stay_dense(monkeypatch):
    monkeypatch.setattr(SparseLinear, "forward", lambda self, x: 2 * x @ self.weight.t())
    model, x = sparse_model(nn.Sequential(nn.Linear(8, 8, bias=False))), torch.randn(3, 8)
    fast = prepare(model, x)
    assert torch.equal(fast(x), model(x))
    (choice,) = runtime.report(fast)
    assert not choice.sparse
    assert choice.reason.endswith("but the outputs differ")


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("wrong", [False, True])
def test_sums_that_cancel_may_differ_as_much_as_they_do_from_float64(wrong, monkeypatch):
    torch.manual_seed(0)
    model, x = sparse_model(nn.Sequential(nn.Linear(256, 64, bias=False))), torch.randn(8, 256)
    with torch.no_grad():
        model[0].weight[:, 0], model[0].weight[:, -1] = 1, -1
        x[:, 0] = x[:, -1] = 1e3
    if wrong:
        monkeypatch.setattr(SparseLinear, "forward", lambda self, x: 1.005 * x @ self.weight.t())
    fast = prepare(model, x)
    assert runtime.report(fast)[0].sparse == (not wrong)
    assert wrong or relative_error(fast(x), model(x)) > 2e-5


class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, scale=2.0, shift=None):
        x = self.fc(x) * scale
        return x if shift is None else x + shift


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("names", [("x",), ("shift", "x"), ("scale", "x")])
def test_keyword_arguments_in_any_order(names, capsys):
    model = sparse_model(Options())
    every = {"x": torch.randn(3, 8), "shift": torch.randn(3, 8), "scale": torch.tensor(3.0)}
    given = {name: every[name] for name in names}
    fast = prepare(model, given)
    assert relative_error(fast(**given), model(**given)) < 1e-6
    assert capsys.readouterr().err == ""


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x):
        x = self.conv(x)
        return x, x.sum()


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_a_model_of_images_may_return_anything():
    model, x = sparse_model(Pair()), torch.randn(40, 4, 8, 8)
    fast = prepare(model, x)
    for ours, theirs in zip(fast(x), model(x), strict=True):
        assert relative_error(ours, theirs) < 1e-5


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 16, 32, stride=32), (16, 3, 64, 64)),  # too large for panels of images
        (nn.Conv2d(4, 4, (1, 80)), (16, 4, 2, 96)),
        (nn.Conv2d(16, 4, 3), (16, 20, 20)),  # one image without a batch
    ],
    ids=["patches", "wide", "unbatched"],
)
@pytest.mark.parametrize("measured", [True, False])
def test_convolutions_of_all_kinds(layer, shape, measured):
    torch.manual_seed(0)
    model = nn.Sequential(layer)
    torchcram.compress_(model, "uniform:0.9")
    x = torch.randn(shape)
    fast = prepare(model, x if measured else None)
    assert any(isinstance(one, SparseConv2d) for one in fast.modules())
    assert relative_error(fast(x), model(x)) < 1e-5


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_a_residual_that_is_read_again_after_it_was_added_to():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            y = torch.relu(x)
            z = self.fc(x)
            y += z
            scores = y + z
            return torch.cat([scores, torch.full_like(scores, -torch.inf)])

    model, x = sparse_model(Net()), torch.randn(3, 8)
    fast = prepare(model, x)
    assert relative_error(fast(x)[:3], model(x)[:3]) < 1e-5


@needs_kernels
def test_the_shortcut_of_torch_stays_where_no_layer_is_sparse(monkeypatch):
    monkeypatch.setitem(
        replace_layers.RULES, "Linear", replace_layers.Rule(sparsity=0.5, weights=0)
    )
    dense = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    sparse = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    torchcram.compress_(sparse, "uniform:0.9")
    fast = prepare(nn.Sequential(dense, sparse))
    assert fast[0].activation_relu_or_gelu == dense.activation_relu_or_gelu != 0
    assert fast[1].activation_relu_or_gelu == 0
    x = torch.randn(2, 5, 16)
    expected = nn.Sequential(dense, sparse).eval()(x)
    assert relative_error(fast(x), expected) < 1e-5


@needs_kernels
def test_a_prepared_model_is_refused_where_its_weights_are_needed(tmp_path):
    layers = nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 36, 64), nn.LayerNorm(64)
    model = nn.Sequential(*layers)
    compress_(model, "uniform:0.95")
    x = torch.randn(4, 8, 8, 8)
    for fast in (prepare(model), prepare(model, x), copy.deepcopy(prepare(model))):
        if fast.state_dict().keys() == model.state_dict().keys():
            continue  # all layers stay dense
        base = torch.optim.SGD(fast.parameters(), lr=0.1)
        for use in (
            lambda fast=fast: compress(fast, "global:0.5"),
            lambda fast=fast: artifact.save(fast, tmp_path / "file.safetensors"),
            lambda fast=fast, base=base: CrAM(fast, base, "global:0.5"),
        ):
            with pytest.raises(ValueError, match="use the model that it was prepared from"):
                use()
    assert not any(tmp_path.iterdir())
