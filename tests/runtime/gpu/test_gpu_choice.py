import pytest
import torch
from nets import ConvNet, mlp
from torch import nn

from torchcram import NM, Quantize, compress, compressible_weights
from torchcram.runtime.gpu import layers as gpu_layers
from torchcram.runtime.gpu import prepare as gpu_prepare
from torchcram.runtime.gpu.layers import PointwiseConv2d
from torchcram.runtime.gpu.prepare import (
    Chooser,
    Input,
    agree,
    count_copies,
    layer_inputs,
    prepare_gpu,
    weight_names_by_layer,
    why_dense,
)
from torchcram.runtime.integers import find_integers


def layer_and_integers(*, bits=8):
    weights = compressible_weights(nn.Sequential(nn.Linear(64, 32)))
    NM(2, 4).compress_(weights)
    Quantize(bits).compress_(weights)
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(weights["0.weight"].detach().bfloat16())
    return layer, find_integers(weights, "0.weight", Quantize(bits))


def rows(count, inputs=64):
    return Input((count, inputs))


@pytest.fixture
def measured(monkeypatch):
    """Times by kernel, in place of a GPU; and which were asked for."""
    times, asked = {"Linear": 1.0}, []

    def milliseconds(make, layer, given):
        del layer, given
        kind = getattr(make.func, "__name__", "")
        asked.append(kind)
        return times.get("Linear" if kind == "deepcopy" else kind)

    monkeypatch.setattr(gpu_prepare, "_milliseconds", milliseconds)
    monkeypatch.setattr(gpu_prepare, "same_outputs", lambda *_: True)
    monkeypatch.setattr(gpu_prepare, "sparse_linear", lambda *_: nn.Identity())
    gpu_prepare.sparse_linear.__name__ = "sparse_linear"
    monkeypatch.setattr(gpu_layers, "sparse_linear", lambda *_: nn.Identity())
    return times, asked


def test_the_fastest_kernel_is_taken(measured):
    times, asked = measured
    times.update(sparse_linear=0.8, Int8Linear=0.5)
    chooser = Chooser()
    layer, integers = layer_and_integers()
    choice, faster = chooser.choose("fc", layer, rows(384), integers=integers)
    assert (choice.name, choice.kernel, choice.speedup) == ("fc", "int8", 2.0)
    assert choice.reason == "2:4 1.25 x dense, int8 2.00 x dense, at 384 rows"
    assert isinstance(faster, gpu_prepare.Int8Linear)
    chooser.choose("fc2", layer, rows(384), integers=integers)
    assert asked == ["deepcopy", "sparse_linear", "Int8Linear"]  # the same shape: measured once
    chooser.choose("fc2", layer, rows(16), integers=integers)
    assert len(asked) == 6


def test_what_is_not_faster_stays_dense_and_says_so(measured):
    times, _ = measured
    times.update(sparse_linear=0.99, Int8Linear=4.0)
    layer, integers = layer_and_integers()
    choice, faster = Chooser().choose("fc", layer, rows(16), integers=integers)
    assert faster is None
    assert choice.kernel == "dense"
    assert choice.reason == "2:4 1.01 x dense, int8 0.25 x dense, at 16 rows"


def test_every_layer_is_compared_with_dense_not_only_the_one_that_was_measured(
    measured, monkeypatch
):
    times, _ = measured
    times.update(sparse_linear=0.8, Int8Linear=0.5)
    layer, integers = layer_and_integers()
    chooser, answers = Chooser(), iter([True, False])
    monkeypatch.setattr(gpu_prepare, "same_outputs", lambda *_: next(answers))
    assert chooser.choose("one", layer, rows(16), integers=integers)[0].kernel == "int8"
    choice, made = chooser.choose("two", layer, rows(16), integers=integers)
    assert (choice.kernel, made) == ("dense", None)
    assert choice.reason == "int8 computes other outputs with these weights"


def test_what_same_outputs_is_seen_from_outputs():
    layer = nn.Linear(8, 4)
    other = nn.Linear(8, 4)
    assert gpu_prepare.same_outputs(layer, layer, rows(5, 8))
    assert not gpu_prepare.same_outputs(other, layer, rows(5, 8))


def test_what_cannot_be_run_stays_dense(measured):
    layer, integers = layer_and_integers()
    choice, faster = Chooser().choose("fc", layer, rows(16), integers=integers)
    assert faster is None
    assert choice.speedup is None
    assert choice.reason == "2:4, int8: fails on this GPU, or computes other outputs"
    assert measured


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), KeyError("it does not compile")])
def test_whatever_a_kernel_raises_it_has_no_time(error):
    class Failing(nn.Module):
        def forward(self, _):
            raise error

    layer, _ = layer_and_integers()
    assert gpu_prepare._milliseconds(Failing, layer, rows(4)) is None


def test_what_does_not_fit_is_never_measured(measured):
    _, asked = measured
    layer = nn.Linear(64, 32).bfloat16()
    choice, faster = Chooser().choose("fc", layer, rows(16), integers=None)
    assert faster is None
    assert choice.reason == "not 2:4; not quantized"
    assert asked == []


def test_all_uses_of_a_weight_are_found():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1))
    model[1].weight = model[0].weight
    found = weight_names_by_layer(model, compressible_weights(model))
    assert found == {"0": "0.weight", "1": "0.weight", "2": "2.weight"}


def test_layers_that_are_not_looked_at_are_told_why():
    model = ConvNet().eval()
    seen = layer_inputs(model, (torch.randn(3, 4, 6, 6),))
    assert seen["fc"] == rows(3, model.fc.in_features)
    assert seen["conv1"] == Input((3, 4, 6, 6))
    assert why_dense("fc", model.fc, seen) is None
    assert why_dense("conv1", model.conv1, seen) is None
    assert "Conv1d" in why_dense("other", nn.Conv1d(4, 4, 1), seen)
    assert why_dense("unused", model.unused, seen) == "never called on the example"
    own = nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4)
    assert why_dense("own", own, {"own": rows(1, 4)}) is None
    assert not any(module._forward_pre_hooks for module in model.modules())


class Named(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(input=x)
        return x


@pytest.mark.parametrize("kind", [nn.Sequential, Named])
def test_rows_are_counted_over_all_dimensions(kind):
    found = layer_inputs(kind(*mlp()), (torch.randn(2, 5, 8),))
    assert {name: given.shape[0] for name, given in found.items()} == {"0": 10, "2": 10}


def test_the_largest_of_several_inputs_counts():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.conv(x[:1]).sum() + self.conv(x).sum() + self.conv(x[0]).sum()

    x = torch.randn(2, 4, 3, 5)
    assert layer_inputs(Twice(), (x,)) == {"conv": Input((2, 4, 3, 5))}
    last = x.to(memory_format=torch.channels_last)
    assert layer_inputs(Twice(), (last,)) == {"conv": Input((2, 4, 3, 5), channels_last=True)}
    part = torch.randn(2, 8, 3, 5).chunk(2, 1)[0]  # not contiguous, and not in channels_last
    assert layer_inputs(Twice(), (part,)) == {"conv": Input((2, 4, 3, 5))}


def test_layers_with_a_forward_of_their_own_are_called_as_they_like():
    class Own(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden)

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.empty = Own(8, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.empty(self.own(hidden=x)[:0])

    model = Caller()
    seen = layer_inputs(model, (torch.randn(2, 8),))
    assert seen == {"empty": rows(0, 4)}
    assert why_dense("own", model.own, seen) == "Own has a forward of its own"
    assert why_dense("empty", model.empty, seen) == "its input is empty in the example"


@pytest.mark.parametrize("channels_last", [False, True])
def test_random_inputs_are_like_those_that_were_seen(channels_last):
    x = Input((2, 3, 5, 7), channels_last).like(torch.zeros(1, dtype=torch.bfloat16))
    assert (x.shape, x.dtype) == ((2, 3, 5, 7), torch.bfloat16)
    assert x.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_a_convolution_is_measured_with_its_stride_on_its_pixels(measured):
    times, asked = measured
    times.update(sparse_conv=0.5)
    model = compress(nn.Sequential(nn.Conv2d(64, 32, 1), nn.Conv2d(64, 32, 1, stride=2)), "nm:2:4")
    chooser, given = Chooser(), Input((8, 64, 7, 9))
    layers = model.bfloat16()
    choice, faster = chooser.choose("one", layers[0], given, integers=None)
    assert (choice.kernel, choice.speedup) == ("2:4", 2.0)
    assert choice.reason == "2:4 2.00 x dense, at 8 x 7 x 9 pixels"
    assert isinstance(faster, PointwiseConv2d)
    chooser.choose("two", layers[1], given, integers=None)
    assert len(asked) == 4  # the other stride takes another time


def test_results_in_16_bits_agree_but_for_rounding():
    x = torch.tensor([100.0, 1.0])
    assert agree(x + 1, x)
    assert not agree(x + 3, x)
    assert not agree(x * torch.nan, x)


def test_copies_fill_the_cache():
    assert count_copies(2**20) == 64
    assert count_copies(32 * 2**20) == 4
    assert count_copies(2**30) == 1


def test_bad_arguments_are_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"dtype must be one of torch\.bfloat16, .*, got torch\.float32"
    ):
        prepare_gpu(mlp(), (torch.randn(2, 8),), dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        prepare_gpu(compress(mlp(), "nm:2:4"), (torch.randn(2, 8),))
