"""Which way to run a whole model is chosen, and what a captured model does with its inputs."""

import pytest
import torch
from nets import mlp
from torch import nn

from torchcram import compress, compressible_weights
from torchcram.operators.quantize import Quantize
from torchcram.runtime.gpu import prepare as gpu_prepare
from torchcram.runtime.gpu import run_modes
from torchcram.runtime.gpu.layers import Int8Linear
from torchcram.runtime.gpu.prepare import LayerChoice, prepare_gpu
from torchcram.runtime.gpu.run_modes import choose_mode
from torchcram.runtime.integers import find_integers


class Wrapped(nn.Module):
    def __init__(self, model, kind):
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, x):
        return self.model(x)


@pytest.fixture
def timed(monkeypatch):
    """Milliseconds by mode, in place of a GPU."""
    times = {}
    monkeypatch.setattr(run_modes, "CompiledModel", lambda model, _: Wrapped(model, "compiled"))
    monkeypatch.setattr(
        run_modes, "CapturedModel", lambda model, _, by=None: Wrapped(by or model, "captured")
    )
    monkeypatch.setattr(
        run_modes, "time_in_turns", lambda runs: {name: times.get(name, 9.0) for name in runs}
    )
    return times


X = (torch.ones(2, 8),)


@pytest.mark.parametrize(
    ("fastest", "kinds"),
    [
        ("eager", []),
        ("compiled", ["compiled"]),
        ("captured", ["captured"]),
        ("compiled, captured", ["captured", "compiled"]),
    ],
)
def test_the_fastest_mode_is_taken(timed, fastest, kinds):
    timed[fastest] = 1.0
    original = mlp()
    model, mode = choose_mode({"": original}, X)
    assert (mode.name, mode.failed) == (fastest, {})
    assert mode.milliseconds == dict.fromkeys(mode.milliseconds, 9.0) | {fastest: 1.0}
    assert list(mode.milliseconds) == ["eager", "compiled", "captured", "compiled, captured"]
    for kind in kinds:
        assert model.kind == kind
        model = model.model
    assert model is original


def test_a_dense_model_may_be_the_fastest(timed):
    timed |= {"compiled": 2.0, "dense, captured": 1.0}
    dense, replaced = mlp(), mlp()
    model, mode = choose_mode({"": replaced, "dense, ": dense}, X)
    assert mode.name == "dense, captured"
    assert model.model is dense


def test_a_mode_that_fails_is_left_out_and_named(timed, monkeypatch):
    def fail(*_):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(run_modes, "CapturedModel", fail)
    timed["compiled"] = 1.0
    _, mode = choose_mode({"": mlp()}, X)
    assert list(mode.milliseconds) == ["eager", "compiled"]
    reason = "RuntimeError: operation not permitted"
    assert mode.failed == {"captured": reason, "compiled, captured": reason}


def test_a_mode_that_computes_something_else_is_left_out(timed, monkeypatch):
    monkeypatch.setattr(run_modes, "CompiledModel", lambda *_: Wrapped(mlp(), "another model"))
    timed["compiled"] = 1.0
    torch.manual_seed(0)
    _, mode = choose_mode({"": mlp()}, X)
    assert list(mode.milliseconds) == ["eager", "captured"]
    assert list(mode.failed) == ["compiled", "compiled, captured"]
    for reason in mode.failed.values():
        assert reason.startswith("ValueError: outputs differ by ")


def test_a_mode_that_always_returns_the_same_is_left_out(timed, monkeypatch):
    class Stale(nn.Module):
        def __init__(self, model, example, _=None):
            super().__init__()
            self.outputs = model(*example)

        def forward(self, _):
            return self.outputs

    monkeypatch.setattr(run_modes, "CapturedModel", Stale)
    timed["captured"] = 1.0
    _, mode = choose_mode({"": mlp()}, (torch.randn(2, 8),))
    assert list(mode.failed) == ["captured", "compiled, captured"]


class Doubled(run_modes.SpecializedModel):
    def run(self, inputs):
        assert not any(value.is_inference() for value in inputs)
        assert not torch.is_grad_enabled()
        return 2 * self.model(*inputs)


def test_only_inputs_like_the_example_take_the_fast_way():
    model = mlp()
    fast = Doubled(model, (torch.ones(2, 8),))
    x = torch.randn(2, 8)
    assert torch.equal(fast(x), 2 * model(x))
    with torch.inference_mode():
        assert torch.equal(fast(x.clone()), 2 * model(x))
    for other in (x[:1], x.double()):
        expected = model.double()(other) if other.dtype == torch.float64 else model(other)
        assert torch.equal(fast(other), expected)
        model.float()
    needs = x.clone().requires_grad_()
    assert torch.equal(fast(needs), model(x))
    assert torch.equal(fast(input=x), model(x))


def test_a_prepared_model_cannot_be_moved():
    fast = Doubled(mlp(), X)
    for change in (fast.double, fast.cpu, lambda: fast.to(torch.bfloat16)):
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            change()


def test_many_models_of_a_class_are_all_compiled(monkeypatch):
    counted = []

    def backend(graph, _):
        counted.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: original(model, backend=backend, **options)
    )
    for width in range(1, 12):
        x = (torch.ones(2, width),)
        compiled = run_modes.CompiledModel(nn.Sequential(nn.Linear(width, 3), nn.ReLU()), x)
        assert len(counted) == width
        compiled(*x)
        with torch.inference_mode():
            compiled(torch.ones(2, width))
        assert len(counted) == width  # no call compiles again


def test_medians_are_taken_in_turns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order = []
    clock = iter(range(10**6))
    monkeypatch.setattr(run_modes.time, "perf_counter", lambda: next(clock))
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert run_modes.time_in_turns(runs) == {"a": 1000.0, "b": 1000.0}
    assert order == list("ab") * (1 + run_modes.ROUNDS)


def test_replaced_layers_are_reported_dense_where_the_dense_model_won():
    choice = LayerChoice("fc", "int4", 1.2, "int4 1.20 x dense, at 16 rows")
    dense = gpu_prepare._dense_after_all(choice)
    assert (dense.kernel, dense.speedup) == ("dense", 1.2)
    assert dense.reason == (
        "int4 1.20 x dense, at 16 rows, but the model as a whole is faster dense"
    )
    assert gpu_prepare._dense_after_all(dense) is dense


@pytest.mark.parametrize("path", ["", "0"])
def test_layers_are_replaced_by_path(path):
    new = nn.Identity()
    model = gpu_prepare._with_layers(mlp(), {path: new})
    assert (model if path == "" else model[0]) is new


def test_only_tensors_and_plain_values_can_leave_a_graph():
    run_modes._require_plain({"scores": torch.ones(1), "count": 3, "none": None, "pair": [1.0, ""]})
    with pytest.raises(ValueError, match="the outputs hold a object, which a graph cannot copy"):
        run_modes._require_plain([torch.ones(1), object()])


@torch.no_grad()
def test_a_layer_in_8_bits_is_one_operator_of_a_compiled_model():
    model = compress(nn.Sequential(nn.Linear(64, 32)), "int8")
    integers = find_integers(compressible_weights(model), "0.weight", Quantize(8))
    layer = Int8Linear(integers, model[0].bias)
    x = torch.randn(3, 5, 64)
    graphs = []

    def remember(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=remember)
    assert torch.equal(compiled(x), layer(x))
    assert [node.target for node in graphs[0].graph.nodes if node.op == "call_function"] == [
        torch.ops.torchcram.int8_linear.default
    ]
    arguments = (x, integers.values, integers.scale.flatten(), model[0].bias.detach())
    torch.library.opcheck(torch.ops.torchcram.int8_linear.default, arguments)


# On a GPU


def wide(operator):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    return compress(model, operator)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
class TestOnAGpu:
    @pytest.mark.parametrize("name", ["eager", "compiled", "captured", "compiled, captured"])
    @pytest.mark.parametrize(
        ("operator", "rows"), [("nm:2:4", 8192), ("int4:g128", 1), ("int8", 1)]
    )
    def test_every_mode_computes_what_the_model_does(self, name, operator, rows, monkeypatch):
        monkeypatch.setattr(
            run_modes, "time_in_turns", lambda runs: {each: float(each != name) for each in runs}
        )
        model = wide(operator)
        x = torch.randn(rows, 1024)
        fast, _, mode = prepare_gpu(model, (x,), operator=operator, compile_model=True)
        assert (mode.name, mode.failed) == (name, {})
        x = x.cuda().bfloat16()
        expected = model.cuda().bfloat16()
        with torch.no_grad():
            for inputs in (x, x[: max(1, rows // 2)], x.flip(1), x + 1):
                assert gpu_prepare.agree(fast(inputs), expected(inputs))

    @torch.inference_mode()
    def test_the_fastest_of_all_modes_is_returned(self):
        x = torch.randn(1, 1024)
        fast, layers, mode = prepare_gpu(
            wide("int4:g128"), (x,), operator="int4:g128", compile_model=True
        )
        assert mode.milliseconds[mode.name] == min(mode.milliseconds.values())
        if mode.name.startswith("dense"):
            assert {layer.kernel for layer in layers} == {"dense"}
        inside = fast(x.cuda().bfloat16())
        with torch.inference_mode(False):
            assert torch.equal(fast(x.cuda().bfloat16().clone()), inside.clone())

    def test_a_model_that_waits_for_the_device_is_not_captured(self):
        class Waiting(nn.Module):
            def forward(self, x):
                return x * float(x.sum().item() > 0)

        x = torch.ones(4, 8, device="cuda")
        _, mode = choose_mode({"": Waiting()}, (x,))
        assert "captured" in mode.failed
        assert torch.randn(3, device="cuda").isfinite().all()  # the generator works as before

    def test_outputs_of_a_captured_model_have_memory_of_their_own(self):
        model = mlp().cuda().requires_grad_(False)
        x, y = torch.randn(2, 4, 8, device="cuda")
        captured = run_modes.CapturedModel(model, (x,))
        first, second = captured(x), captured(y)
        torch.testing.assert_close(first, model(x))
        torch.testing.assert_close(second, model(y))
        needs = x.clone().requires_grad_()
        captured(needs).sum().backward()
        assert needs.grad is not None
