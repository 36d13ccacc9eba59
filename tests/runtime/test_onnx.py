import re
import warnings

import pytest
import torch
from nets import ConvNet, mlp
from torch import nn

from torchcram import Chain, GlobalTopK, Quantize, compress, compressible_weights
from torchcram.experiments.models.small import ResNet
from torchcram.runtime import onnx as module
from torchcram.runtime.onnx import export_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


class Tied(nn.Module):
    """A Linear layer used twice, and one that is tied to an embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 32)
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.two.weight = self.one.weight
        self.mix = nn.Conv1d(32, 32, 1)
        self.out = nn.Linear(32, 10, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens, scale):
        x = self.two(self.one(self.words(tokens)).relu())
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return {"scores": self.out(x) * scale[:, None, None], "best": self.out(x).argmax(-1)}


def compressed(model, operator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # groups that do not fit
        return compress(model, operator)


def run(path, *inputs, outputs=None):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = [one.name for one in session.get_inputs()]
    found = session.run(outputs, dict(zip(given, [x.numpy() for x in inputs], strict=True)))
    return [torch.from_numpy(one) for one in found]


def kinds(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def dequantized(path, *inputs):
    """What ONNX Runtime makes of the integers, by the name of the weight."""
    model = onnx.load(path)
    names = [node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"]
    for name in names:
        kind = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        model.graph.output.append(kind)
    onnx.save(model, path)
    return dict(zip(names, run(path, *inputs, outputs=names), strict=True))


@pytest.mark.parametrize("operator", ["global:0.5+int8", "int4:g16"])
def test_a_net_of_convolutions_with_the_very_weights(tmp_path, operator):
    model = compressed(ResNet(1, 16), operator)
    x = torch.randn(1, 3, 8, 8)
    path = tmp_path / "net.onnx"
    export_onnx(model, path, (x,), operator=operator)
    assert model.training
    weights = compressible_weights(model)
    found = dequantized(path, x)
    assert found.keys() == {f"{name}.value" for name in weights}
    for name, weight in weights.items():
        assert torch.equal(found[f"{name}.value"], weight)


@pytest.mark.parametrize("operator", ["int8:g16", "int4"])
def test_linear_layers_are_not_joined_to_something_that_rounds_their_inputs(tmp_path, operator):
    model = compressed(Tied(), operator).eval()
    path = tmp_path / "net.onnx"
    tokens, scale = torch.randint(10, (1, 5)), torch.rand(1)
    export_onnx(model, path, (tokens, scale), operator=operator)
    many, scales = torch.randint(10, (7, 5)), torch.rand(7)
    scores, best = run(path, many, scales)
    expected = model(many, scales)
    torch.testing.assert_close(scores, expected["scores"])
    assert torch.equal(best, expected["best"])
    found = dequantized(path, tokens, scale)
    assert sorted(value.shape for value in found.values()) == [(1, 32, 32), (32, 32, 1)]
    (linear,) = (value for value in found.values() if value.shape[0] == 1)
    assert torch.equal(linear[0].t(), model.one.weight)


def test_odd_layers_keep_their_weights(tmp_path):
    layers = nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv2d(6, 6, 1, groups=6)
    model = compressed(nn.Sequential(*layers), "int3")
    x = torch.randn(2, 4, 5, 5)
    export_onnx(model, tmp_path / "net.onnx", (x,), operator="int3")
    found = dequantized(tmp_path / "net.onnx", x)
    for name, weight in compressible_weights(model).items():
        assert torch.equal(found[f"{name}.value"], weight)


def test_what_is_not_quantized_is_stored_as_it_is(tmp_path):
    model = compress(ConvNet(), "global:0.8").eval()
    export_onnx(model, tmp_path / "a.onnx", (torch.randn(2, 4, 6, 6),), operator="global:0.8")
    assert "DequantizeLinear" not in kinds(tmp_path / "a.onnx")
    stored = {
        one.name: onnx.numpy_helper.to_array(one)
        for one in onnx.load(tmp_path / "a.onnx").graph.initializer
    }
    zeros = torch.from_numpy(stored["fc.weight"].copy()) == 0
    assert torch.equal(zeros, model.fc.weight == 0)
    assert zeros.any()


def test_only_what_was_compressed_becomes_integers(tmp_path):
    model = mlp()
    some = compressible_weights(model, only="^0")
    operator = Chain(GlobalTopK(0.5), Quantize(8))
    operator.compress_(some)
    x = (torch.randn(3, 8),)
    path = tmp_path / "a.onnx"
    with pytest.raises(ValueError, match=r"'2\.weight' is not what int8 makes"):
        export_onnx(model, path, x, operator=operator)
    assert list(tmp_path.iterdir()) == []
    export_onnx(
        model, path, x, operator=operator, weights=some, input_names=["x"], output_names=["y"]
    )
    graph = onnx.load(path).graph
    assert [node.op_type for node in graph.node].count("DequantizeLinear") == 1
    assert [graph.input[0].name, graph.output[0].name] == ["x", "y"]
    assert {one.key: one.value for one in onnx.load(path).metadata_props} == {
        "torchcram.operator": "global:0.5+int8"
    }
    assert str(tmp_path.parent).encode() not in path.read_bytes()
    assert b".py" not in path.read_bytes()  # no stack traces


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_batch_is_open_if_asked_for(tmp_path, dynamic):
    model = mlp().eval()
    export_onnx(model, tmp_path / "a.onnx", (torch.randn(2, 8),), dynamic_batch=dynamic)
    x = torch.randn(5, 8)
    if dynamic:
        torch.testing.assert_close(run(tmp_path / "a.onnx", x)[0], model(x))
    else:
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument):
            run(tmp_path / "a.onnx", x)


class Positions(nn.Module):
    """Adds a row per token.

    `wrong` is a dimension: once exported, outputs are right only where its size is 3.
    """

    def __init__(self, *, wrong=None):
        super().__init__()
        self.inner, self.wrong = nn.Linear(4, 4), wrong
        self.rows = nn.Parameter(torch.randn(12, 4))

    def forward(self, x):
        out = self.inner(x) + self.rows[: x.shape[1]]
        if self.wrong is None:
            return out
        return out * (3 if torch.compiler.is_exporting() else x.shape[self.wrong])


def test_other_dimensions_are_open_if_asked_for(tmp_path):
    model, path = Positions().eval(), tmp_path / "a.onnx"
    tokens = torch.export.Dim("tokens", max=12)
    export_onnx(model, path, (torch.randn(2, 6, 4),), dynamic_dims=[{1: tokens}])
    for shape in ((2, 6, 4), (3, 11, 4), (1, 2, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(path, x)[0], model(x))
    fixed = tmp_path / "b.onnx"
    export_onnx(model, fixed, (torch.randn(2, 6, 4),))
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument):
        run(fixed, torch.randn(2, 5, 4))


@pytest.mark.parametrize(("wrong", "shape"), [(0, (4, 3, 4)), (1, (3, 2, 4))])
def test_other_sizes_are_compared_too(tmp_path, wrong, shape):
    dims = [{1: torch.export.Dim("tokens", max=12)}]
    with pytest.raises(ValueError, match=re.escape(f"differs on inputs of {shape}: ")):
        export_onnx(
            Positions(wrong=wrong).eval(),
            tmp_path / "a.onnx",
            (torch.randn(3, 3, 4),),
            dynamic_dims=dims,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_gives_something_else_never_takes_the_place(tmp_path, monkeypatch):
    path = tmp_path / "a.onnx"
    path.write_bytes(b"before")

    def spoil(model, weights):
        del weights
        bias = model.graph.initializers["2.bias"]
        bias.const_value = type(bias.const_value)(bias.const_value.raw + 1, name="2.bias")

    monkeypatch.setattr(module, "put_integers", spoil)
    with pytest.raises(ValueError, match=r"output '.*' differs on inputs of \(3, 8\): by 1 "):
        export_onnx(mlp(), path, (torch.randn(3, 8),))
    assert [one.name for one in tmp_path.iterdir()] == ["a.onnx"]
    assert path.read_bytes() == b"before"


class Branch(nn.Linear):
    def forward(self, x):
        return torch.linalg.eigvalsh(super().forward(x))


def test_what_onnx_cannot_say_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"Branch cannot be exported: .*linalg_eigh") as caught:
        export_onnx(Branch(4, 4), tmp_path / "a.onnx", (torch.randn(4, 4),))
    assert "Next steps" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


DIM = torch.export.Dim("tokens")


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        (torch.randn(2, 8), {}, "not a tuple of tensors"),
        ((), {}, "example is empty"),
        ((torch.randn(2, 8), torch.randn(3)), {}, "no batch dimension in common"),
        ((torch.randn(0, 8),), {}, "no batch dimension in common"),
        ((torch.randn(2, 8),), {"input_names": ["a", "b"]}, "1 inputs, but the input_names"),
        ((torch.randn(2, 8),), {"output_names": ["a", "b"]}, "1 outputs, but the output_names"),
        ((torch.randn(2, 8),), {"operator": "int9"}, "int9"),
        ((torch.randn(2, 8),), {"dynamic_dims": [{}, {}]}, "1 inputs, but dynamic_dims has 2"),
        ((torch.randn(2, 8),), {"dynamic_dims": [{2: DIM}]}, r"dimension 2 of an input of shape"),
        ((torch.randn(2, 1),), {"dynamic_dims": [{1: DIM}]}, r"of size 2 or more"),
        ((torch.randn(2, 8),), {"dynamic_dims": [{0: DIM}]}, r"allowed: from 1 on"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, example, options, message):
    with pytest.raises(ValueError, match=message):
        export_onnx(mlp(), tmp_path / "a.onnx", example, **options)


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'0\.weight' is torch\.float16: only float32"):
        export_onnx(mlp().half(), tmp_path / "a.onnx", (torch.randn(2, 8),))


def test_what_no_file_can_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 100)
    with pytest.raises(ValueError, match="one ONNX file holds 2"):
        export_onnx(mlp(), tmp_path / "a.onnx", (torch.randn(2, 8),))
