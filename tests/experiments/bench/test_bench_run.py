import pytest
import torch
from runs import CPU

from torchcram import compress
from torchcram.experiments.bench import run as module
from torchcram.experiments.bench.candidates import Candidate
from torchcram.experiments.bench.engines import GPU_ENGINES, default_cpu_engines
from torchcram.experiments.bench.run import Plan, choose_engines, example_batch, run_bench
from torchcram.experiments.recipe.build import build_batches, target_weights
from torchcram.pruners import parse_pruner


def candidates(model, recipe, *targets):
    found = [Candidate("dense", model, None, target_weights(recipe, model), 0.5)]
    for target in targets:
        small = compress(model, target, weights=target_weights(recipe, model))
        weights = target_weights(recipe, small)
        found.append(Candidate(target, small, parse_pruner(target), weights, 0.25))
    return found


def measured(found, recipe, data, folder, *engines, batches=(1, 2), threads=(1,)):
    said = []
    plan = Plan(engines, batches, threads, rounds=1)
    result = run_bench(
        found, recipe, data, plan=plan, device=CPU, folder=folder, report=said.append
    )
    return result, said


def test_every_engine_runs_every_model_in_every_setting(trained, data, tmp_path):
    pytest.importorskip("onnxruntime")
    one = trained[1]
    found = candidates(one.model, one.recipe, "global:0.9", "int4")
    engines = ("torch", "onnxruntime", "torchcram")
    result, said = measured(found, one.recipe, data, tmp_path, *engines, threads=(1, 2))
    settings = [(one.batch, one.threads, one.shape) for one in result.settings]
    assert settings == [(size, threads, (size, 1, 8, 8)) for threads in (1, 2) for size in (1, 2)]
    places = [(one.target, one.engine, one.setting) for one in result.timings]
    assert sorted(places) == sorted(
        (target, engine, place)
        for target in ("dense", "global:0.9", "int4")
        for engine in engines
        for place in range(4)
    )
    assert all(one.times is not None and one.error < 1e-4 for one in result.timings)
    assert (result.recipe, result.data, result.unit) == (one.recipe.name, "digits", "images")
    assert (result.metric, result.device) == ("accuracy", "cpu")
    assert {"torch", "onnxruntime"} <= set(result.versions)
    dense, sparse, small = result.subjects
    assert (dense.accuracy, sparse.accuracy) == (0.5, 0.25)
    assert sparse.sparsity == pytest.approx(0.9, abs=1e-3)
    assert dense.plain_bytes == sparse.plain_bytes
    assert sparse.compact_bytes < dense.plain_bytes / 3
    assert small.onnx_bytes < sparse.onnx_bytes
    assert said[0] == "batch 1, 1 thread: 3 models with 3 engines, side by side"


def test_images_are_the_first_ones_of_the_test_split(trained, data):
    recipe = trained[1].recipe
    batches = build_batches(recipe, data, train=False, device=CPU, seed=0)
    expected, _ = next(iter(batches.epoch(0)))
    assert torch.equal(example_batch(recipe, data, 7), expected[:7])


@pytest.mark.parametrize("size", [0, 101])
def test_a_batch_beyond_the_test_split_is_refused(trained, data, size):
    with pytest.raises(ValueError, match=f"batch {size}: 'digits' has 1 to 100 test images"):
        example_batch(trained[1].recipe, data, size)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batches": ()}, r"batches \[\]"),
        ({"batches": (0,)}, r"batches \[0\]"),
        ({"threads": (1, 1)}, "each once"),
        ({"rounds": 0}, "rounds 0"),
        ({"engines": ()}, "nothing to measure"),
    ],
)
def test_bad_plans_are_refused(changes, said):
    values = {"engines": ("torch",), "batches": (1,), "threads": (1,), **changes}
    with pytest.raises(ValueError, match=said):
        Plan(**values)


@pytest.mark.parametrize(("rounds", "limit"), [(None, module.SECONDS), (3, None)])
def test_rounds_that_are_asked_for_are_not_cut_short(
    trained, data, tmp_path, monkeypatch, rounds, limit
):
    seen, one = [], trained[1]
    monkeypatch.setattr(module, "timings_of", lambda *_, **options: seen.append(options) or [])
    run_bench(
        candidates(one.model, one.recipe),
        one.recipe,
        data,
        plan=Plan(("torch",), (1,), (1,), rounds),
        device=CPU,
        folder=tmp_path,
        report=lambda _: None,
    )
    assert (seen[0]["rounds"], seen[0]["seconds"]) == (rounds or module.ROUNDS, limit)


CUDA = torch.device("cuda")
DEFAULT = default_cpu_engines()
GENERATING = (
    "torch",
    "torch-bf16",
    "torchcram",
    "torchcram-bf16",
    "torchcram-int8",
    "torchcram-int4",
)


@pytest.mark.parametrize(
    ("names", "device", "options", "forward", "generation"),
    [
        (None, CPU, {}, DEFAULT, None),
        (None, CPU, {"generation": True}, DEFAULT, GENERATING),
        (None, CPU, {"generation": True, "forward": False}, (), GENERATING),
        (None, CUDA, {"generation": True}, GPU_ENGINES, None),
        (["compiled"], CPU, {"generation": True}, ("compiled",), None),
        (["compiled"], CPU, {"generation": True, "gguf": True}, ("compiled",), ()),
        (["torchcram-int8"], CPU, {"generation": True}, (), ("torchcram-int8",)),
        (
            ["torchcram", "compiled", "llama.cpp", "torch"],
            CPU,
            {"generation": True, "gguf": True},
            ("torchcram", "compiled", "torch"),
            ("torchcram", "torch"),
        ),
    ],
)
def test_an_engine_may_run_batches_generate_or_both(names, device, options, forward, generation):
    assert choose_engines(names, device, **options) == (forward, generation)


@pytest.mark.parametrize(
    ("names", "device", "options", "said"),
    [
        (["torch-bf16"], CPU, {}, "engine 'torch-bf16'.*allowed are torch, compiled"),
        (["torch-bf16"], CUDA, {"generation": True}, "engine 'torch-bf16'"),
        (["compiled"], CPU, {"forward": False, "generation": True}, "engine 'compiled'"),
        (["torchcram-in8"], CPU, {"generation": True}, "did you mean 'torchcram-int8'"),
        (["torch", "torch"], CPU, {"generation": True}, "named twice"),
        (["llama.cpp"], CPU, {"generation": True}, "'llama.cpp' needs a GGUF file"),
    ],
)
def test_engines_that_cannot_be_used_are_refused(names, device, options, said):
    with pytest.raises(ValueError, match=said):
        choose_engines(names, device, **options)
