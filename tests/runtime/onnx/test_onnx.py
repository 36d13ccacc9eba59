import re
import warnings

import pytest
import torch
from nets import ConvNet, mlp
from torch import nn

from torchcram import (
    Chain,
    GlobalTopK,
    Quantize,
    UniformTopK,
    compress,
    compressible_weights,
    parse_operator,
)
from torchcram.experiments.models.small import ResNet
from torchcram.runtime.onnx import export as module
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

    monkeypatch.setattr(module, "store_integers", spoil)
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
        ([torch.randn(2, 8)], {}, "a tuple of arguments or a mapping of keyword .*, got list"),
        ((), {}, "example must have at least one tensor"),
        ({"x": 3}, {}, "example must have at least one tensor"),
        ({0: torch.randn(2, 8)}, {}, "keys of example must be names of arguments, got 0"),
        ((torch.randn(2, 8), [1]), {}, r"example\[1\] must be a tensor, or None, .* got list"),
        (torch.randn(2, 8), {"output_names": ["input"]}, "output_names has 'input', which is also"),
        (torch.randn(2, 8), {"output_names": ["0.bias"]}, "output_names has '0.bias', which is "),
        ((torch.randn(2, 8), torch.randn(3)), {}, "no batch dimension in common"),
        ((torch.randn(0, 8),), {}, "no batch dimension in common"),
        ((torch.randn(2, 8),), {"input_names": ["a", "b"]}, "input_names must have 1 names"),
        ((torch.randn(2, 8),), {"output_names": ["a", "b"]}, "output_names must have 1 names"),
        ((torch.randn(2, 8),), {"operator": "int9"}, "int9"),
        (
            (torch.randn(2, 8),),
            {"dynamic_dims": [{}, {}]},
            "dynamic_dims must have 1 entries, got 2",
        ),
        ((torch.randn(2, 8),), {"dynamic_dims": [{2: DIM}]}, "got 2 for an input of shape"),
        ((torch.randn(2, 1),), {"dynamic_dims": [{1: DIM}]}, "of size 2 or more"),
        ((torch.randn(2, 8),), {"dynamic_dims": [{0: DIM}]}, "dimensions from 1 on"),
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
    with pytest.raises(ValueError, match="an ONNX file holds 2"):
        export_onnx(mlp(), tmp_path / "a.onnx", (torch.randn(2, 8),))


class Sum(nn.Module):
    """Adds what it gets, under names that the exporter uses inside of the graph, too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, first, second=None, *, third=None, twice=False, returned="dict"):
        linear = self.inner(first)
        for more in (second, third):
            linear = linear if more is None else linear + more
        linear = 2 * linear if twice else linear
        return {
            "dict": {"add": linear, "first": first, "states": (linear, linear - 1)},
            "tuple": (linear, linear),
            "list": [linear],
            "fields": torch.max(linear, 1),
            "one": linear,
        }[returned]


def inputs_and_outputs(path):
    graph = onnx.load(path).graph
    return [one.name for one in graph.input], [one.name for one in graph.output]


@pytest.mark.parametrize(
    ("example", "names"),
    [
        (torch.randn(2, 4), ["first"]),
        ((torch.randn(1, 4), torch.randn(1, 4)), ["first", "second"]),
        ((torch.randn(2, 4), None, 7), ["first"]),
        ({"third": torch.randn(2, 4), "first": torch.randn(2, 4)}, ["third", "first"]),
        ({"first": torch.randn(2, 4), "second": None, "twice": True}, ["first"]),
    ],
    ids=["tensor", "tuple", "tuple with constants", "mapping", "mapping with constants"],
)
def test_examples_are_what_prepare_takes(tmp_path, example, names, monkeypatch):
    if isinstance(example, tuple) and len(example) == 3:

        def forward(self, first, second, times):
            return self.inner(first if second is None else second) * times

        monkeypatch.setattr(Sum, "forward", forward)
    model, path = Sum().eval(), tmp_path / "a.onnx"
    export_onnx(model, path, example)
    assert inputs_and_outputs(path)[0] == names
    given = example if isinstance(example, dict) else {}
    values = (example if isinstance(example, tuple) else (example,)) if not given else ()
    several = [torch.randn(5, 4) for _ in names]
    (found, *_) = run(path, *several)
    rest = iter(several)
    args = [next(rest) if isinstance(value, torch.Tensor) else value for value in values]
    kwargs = {k: next(rest) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    expected = model(*args, **kwargs)
    torch.testing.assert_close(found, expected["add"] if isinstance(expected, dict) else expected)


def test_names_of_inputs_are_in_the_order_of_the_example(tmp_path):
    example = {"third": torch.zeros(2, 4), "first": torch.randn(2, 4)}
    export_onnx(Sum(), tmp_path / "a.onnx", example, input_names=["zeros", "numbers"])
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    given = {"zeros": torch.zeros(2, 4).numpy(), "numbers": torch.ones(2, 4).numpy()}
    (first,) = session.run(["first"], given)
    assert first.all()


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        ("dict", ["add", "first_output", "states_0", "states_1"]),
        ("tuple", ["output_0", "output_1"]),
        ("list", ["output_0"]),
        ("fields", ["values", "indices"]),
        ("one", ["output"]),
    ],
)
def test_outputs_have_the_names_that_the_model_has_for_them(tmp_path, returned, names):
    model, path = Sum().eval(), tmp_path / "a.onnx"
    x = torch.randn(3, 4)
    export_onnx(model, path, {"first": x, "returned": returned})
    assert inputs_and_outputs(path) == (["first"], names)
    found = run(path, x, outputs=names)
    for one, other in zip(
        found, torch.utils._pytree.tree_leaves(model(x, returned=returned)), strict=True
    ):
        torch.testing.assert_close(one, other)
    more = [f"name {index}" for index in range(len(names))]
    export_onnx(model, path, {"first": x, "returned": returned}, output_names=more)
    assert inputs_and_outputs(path)[1] == more


def test_the_order_of_earlier_versions_works_with_a_warning(tmp_path):
    model, x = mlp().eval(), torch.randn(3, 8)
    with pytest.warns(
        DeprecationWarning, match=r"call export_onnx\(model, path, example\)"
    ) as caught:
        export_onnx(model, (x,), tmp_path / "a.onnx")
    assert caught[0].filename == __file__
    torch.testing.assert_close(run(tmp_path / "a.onnx", x)[0], model(x))
    with pytest.raises(ValueError, match="path must be a str or a path, got Tensor"):
        export_onnx(model, x, x)


@pytest.mark.parametrize(
    ("quantize", "told"),
    [("int4", None), ("int8", "uniform:0.5"), ("int3:g32", "obs:m64@uniform:0.5")],
)
def test_quantized_weights_are_integers_without_being_told(tmp_path, quantize, told):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4), nn.Linear(4, 4))
    some = compressible_weights(model, skip="^3")
    Chain(UniformTopK(0.5), parse_operator(quantize)).compress_(some)
    x = torch.randn(2, 64)
    export_onnx(model, tmp_path / "found.onnx", x, operator=told)
    export_onnx(model, tmp_path / "told.onnx", x, operator=quantize, weights=some)
    found, expected = (dequantized(tmp_path / f"{name}.onnx", x) for name in ("found", "told"))
    assert found.keys() == expected.keys() == {"0.weight.value", "2.weight.value"}
    for name, weight in some.items():
        assert torch.equal(found[f"{name}.value"], weight)
    files = [onnx.load(tmp_path / f"{name}.onnx").graph.initializer for name in ("found", "told")]
    types = [{one.name: one.data_type for one in file} for file in files]
    assert types[0] == types[1]


def test_integers_that_take_more_room_are_not_integers(tmp_path):
    model = nn.Sequential(nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 4, 1))
    export_onnx(model, tmp_path / "a.onnx", torch.randn(2, 8, 3, 3))
    assert "DequantizeLinear" not in kinds(tmp_path / "a.onnx")


def test_a_model_without_compressible_weights(tmp_path):
    export_onnx(nn.LayerNorm(4), tmp_path / "a.onnx", torch.randn(2, 4))
    assert inputs_and_outputs(tmp_path / "a.onnx") == (["input"], ["output"])
