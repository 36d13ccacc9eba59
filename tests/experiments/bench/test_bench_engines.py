import builtins
import copy

import pytest
import torch
from torch import nn

from torchcram import compress, compressible_weights, parse_operator, runtime
from torchcram.experiments.bench import engines
from torchcram.experiments.bench.candidates import Candidate
from torchcram.experiments.bench.engines import (
    COMPILED_BFLOAT16,
    CPU_ENGINES,
    GPU_ENGINES,
    PreparedRun,
    UnableError,
    check_engines,
    cpu_engines,
    default_cpu_engines,
    gpu_engines,
)
from torchcram.experiments.bench.run import Files
from torchcram.experiments.bench.timer import difference, timings_of

IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _no_compiler(request, monkeypatch):
    """Compiling takes long: only one test does."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(torch, "compile", lambda model, **_: model)


def candidate(target="dense"):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    ).eval()
    if target == "dense":
        return Candidate(target, model, None, compressible_weights(model), None)
    small = compress(model, target)
    return Candidate(target, small, parse_operator(target), compressible_weights(small), None)


@pytest.mark.parametrize("target", ["dense", "global:0.9", "global:0.5+int4"])
@pytest.mark.parametrize("name", CPU_ENGINES)
def test_every_engine_computes_what_torch_does(name, target, tmp_path):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime")
    one = candidate(target)
    (engine,) = cpu_engines([name], Files(tmp_path).onnx)
    assert engine.name == name
    before = copy.deepcopy(one.model.state_dict())
    prepared = engine.prepare(one, IMAGES, 1)
    with torch.no_grad():
        error = difference(one.model(IMAGES), prepared.run())
    assert error < (1e-2 if name == COMPILED_BFLOAT16 else 1e-5)
    assert error > 0 or name != COMPILED_BFLOAT16
    after = one.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled", "torchcram-compiled"])
def test_compiled_code_computes_what_torch_does(name, tmp_path):
    one = candidate("global:0.9")
    (engine,) = cpu_engines([name], Files(tmp_path).onnx)
    with torch.no_grad():
        assert difference(one.model(IMAGES), engine.prepare(one, IMAGES, 1).run()) < 1e-5


@pytest.mark.parametrize("units", [False, True])
def test_bfloat16_is_measured_by_default_where_the_processor_has_units_for_it(monkeypatch, units):
    monkeypatch.setattr(engines, "has_bfloat16_units", lambda: units)
    assert (COMPILED_BFLOAT16 in default_cpu_engines()) == units
    assert {"torch", "compiled", "onnxruntime", "torchcram"} <= set(default_cpu_engines())


def test_code_is_compiled_for_the_threads_in_use(monkeypatch, tmp_path):
    heard = []
    monkeypatch.setattr(torch, "compile", lambda model, **o: heard.append(o) or model)
    (engine,) = cpu_engines(["compiled"], Files(tmp_path).onnx)
    engine.prepare(candidate(), IMAGES, 3)
    assert heard == [{"dynamic": False, "options": {"cpp.threads": 3}}]


def test_onnx_runtime_has_the_threads_and_the_inputs(monkeypatch, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made, stops = [], []
    session = onnxruntime.InferenceSession

    def look(path, options, **rest):
        made.append((options.intra_op_num_threads, options.inter_op_num_threads))
        stops.append(options.get_session_config_entry("session.force_spinning_stop"))
        return session(path, options, **rest)

    (engine,) = cpu_engines(["onnxruntime"], Files(tmp_path).onnx)
    files = Files(tmp_path)
    path = files.onnx(candidate(), IMAGES)
    monkeypatch.setattr(onnxruntime, "InferenceSession", look)
    type(engine)(lambda *_: path).prepare(candidate(), IMAGES, 3)
    assert made == [(3, 1)]
    assert stops == ["1"]  # or its threads would take the time of the next engine


def test_the_runtime_says_what_it_did(monkeypatch, tmp_path):
    (engine,) = cpu_engines(["torchcram"], Files(tmp_path).onnx)
    assert engine.prepare(candidate("global:0.9"), IMAGES, 1).note.endswith("of 2 layers sparse")
    monkeypatch.setattr(runtime, "available", lambda: False)
    assert "no kernels" in engine.prepare(candidate("global:0.9"), IMAGES, 1).note


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] in ("onnx", "onnxruntime", "onnxscript"):
            raise ImportError("none", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    (engine,) = cpu_engines(["onnxruntime"], Files(tmp_path).onnx)
    with pytest.raises(UnableError, match=r"onnxruntime is missing: pip install .torchcram\[ex"):
        engine.prepare(candidate(), IMAGES, 1)


class Odd(nn.Module):
    """No exporter knows what its forward does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        if float(x.sum()) > 1e9:
            return x
        return self.layer(x)


@pytest.mark.filterwarnings("ignore")
def test_why_there_is_no_onnx_file_is_said_and_found_once(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    odd = Odd().eval()
    one = Candidate("dense", odd, None, compressible_weights(odd), None)
    files = Files(tmp_path)
    with pytest.raises(UnableError, match="Odd cannot be exported") as first:
        files.onnx(one, IMAGES)
    assert "\n" not in str(first.value)
    monkeypatch.setattr(files, "_export", None)
    with pytest.raises(UnableError, match="Odd cannot be exported"):
        files.onnx(one, IMAGES)


def test_an_onnx_file_is_for_any_number_of_inputs_of_a_shape(tmp_path):
    pytest.importorskip("onnxruntime")
    files, one = Files(tmp_path), candidate("global:0.5+int4")
    path = files.onnx(one, IMAGES)
    assert files.onnx(one, IMAGES[:1]) == path
    assert files.onnx(candidate("global:0.5"), IMAGES) != path
    assert len(list(tmp_path.iterdir())) == 2


def test_sizes_are_those_of_files_which_are_gone(tmp_path):
    dense, small = candidate(), candidate("global:0.9")
    files = Files(tmp_path)
    assert files.plain_bytes(dense) == files.plain_bytes(small)
    assert files.compact_bytes(small) < files.compact_bytes(dense)
    assert list(tmp_path.iterdir()) == []


class Fake:
    name = "fake"

    def __init__(self, run):
        self.run = run

    def prepare(self, candidate, example, threads):  # noqa: ARG002
        return PreparedRun(lambda: self.run(candidate.model, example), "as it is")


def timed(*engines):
    return timings_of([candidate()], engines, IMAGES, threads=1, setting=4, rounds=1, seconds=None)


@torch.no_grad()
def test_wrong_outputs_are_noted_and_worse_ones_refused():
    (good,) = timed(Fake(lambda model, x: model(x)))
    assert (good.setting, good.note, good.error) == (4, "as it is", 0)
    assert good.times.rounds == 1
    (off,) = timed(Fake(lambda model, x: model(x) * 1.02))
    assert off.error == pytest.approx(0.02, rel=1e-3)
    assert off.note == "as it is; outputs off by 2 % of the largest"
    assert off.times is not None
    for wrong in (lambda model, x: model(x)[:1], lambda model, x: model(x) * float("nan")):
        (none,) = timed(Fake(wrong))
        assert (none.times, none.note) == (None, "its outputs are not those of torch")


def test_an_engine_that_fails_stops_no_other():
    def fail(*_):
        raise RuntimeError("no compiler\nand more")

    class Good(Fake):
        name = "good"

    bad, good = timed(Fake(fail), Good(lambda model, x: model(x).detach()))
    assert (bad.engine, bad.times, bad.note) == ("fake", None, "RuntimeError: no compiler")
    assert good.times is not None


def test_threads_are_set_meanwhile_and_put_back():
    seen = []
    before = torch.get_num_threads()
    engine = Fake(lambda model, x: seen.append(torch.get_num_threads()) or model(x).detach())
    timings_of([candidate()], [engine], IMAGES, threads=2, setting=0, rounds=1, seconds=None)
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


def test_infinite_outputs_are_to_be_in_the_same_places():
    one = torch.tensor([1.0, float("-inf"), 4.0])
    assert difference(one, one.numpy()) == 0
    assert difference(one, torch.tensor([2.0, float("-inf"), 4.0])) == 0.25
    assert difference(one.fill_(float("-inf")), one) == 0
    with pytest.raises(UnableError):
        difference(torch.ones(2), torch.tensor([1.0, float("-inf")]))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "no engine: allowed are torch, "),
        (["torsh"], r"engine 'torsh' \(did you mean 'torch'\?\): allowed are torch, comp"),
        (["torch", "torch"], "'torch' is named twice"),
    ],
)
def test_bad_engines_are_refused(names, said):
    with pytest.raises(ValueError, match=said):
        check_engines(names, CPU_ENGINES)


def test_all_engines_can_be_asked_for():
    check_engines(default_cpu_engines(), CPU_ENGINES)
    device = torch.device("cuda")
    assert tuple(engine.name for engine in gpu_engines(GPU_ENGINES, device)) == GPU_ENGINES


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["dense", "nm:2:4", "int8"])
def test_gpu_engines_compute_what_torch_does(target):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    small = model if target == "dense" else compress(model, target)
    operator = None if target == "dense" else parse_operator(target)
    one = Candidate(target, small, operator, compressible_weights(small), None)
    x = torch.randn(64, 256)
    for engine in gpu_engines(GPU_ENGINES, torch.device("cuda")):
        with torch.no_grad():
            assert difference(small(x), engine.prepare(one, x, 1).run()) < 0.05
