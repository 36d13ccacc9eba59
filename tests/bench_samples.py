"""Benchmarks that the tests of their files, tables and pages share."""

from torchcram.experiments.bench.record import (
    Bench,
    Generation,
    GenerationTiming,
    GgufFile,
    ModelRecord,
    Setting,
    Times,
    Timing,
)

VERSIONS = {"torch": "9.8.7", "torchcram": "<6.5.4>"}


def times(median, spread=0.1, rounds=9):
    return Times(median, median * (1 - spread), median * (1 + spread), rounds)


def model_record(target, accuracy, compact, **others):
    values = {"sparsity": 0.0 if target == "dense" else 0.9, "plain_bytes": 40_000_000, **others}
    return ModelRecord(target=target, accuracy=accuracy, compact_bytes=compact, **values)


def bench(**changes):
    """Three models, three engines, two settings; one engine cannot run one of the models."""
    medians = {
        ("dense", "torch"): (10.0, 100.0),
        ("dense", "onnxruntime"): (8.0, 120.0),
        ("dense", "torchcram"): (9.0, 110.0),
        ("global:0.9", "torch"): (10.5, 101.0),
        ("global:0.9", "onnxruntime"): (8.5, 121.0),
        ("global:0.9", "torchcram"): (2.0, 25.0),
        ("int4", "torch"): (11.0, 102.0),
        ("int4", "torchcram"): (9.5, 111.0),
    }
    timings = [
        Timing(target, engine, place, times(value), 1e-6)
        for (target, engine), values in medians.items()
        for place, value in enumerate(values)
    ]
    timings += [
        Timing("int4", "onnxruntime", place, None, None, "no int4 here") for place in (0, 1)
    ]
    values = {
        "recipe": "cifar/net/cram-plus",
        "title": "CrAM+-Multi",
        "data": "cifar-jpeg",
        "metric": "accuracy",
        "unit": "images",
        "device": "cpu",
        "machine": "Abacus 3",
        "versions": VERSIONS,
        "settings": (Setting(1, 2, (1, 3, 32, 32)), Setting(16, 2, (16, 3, 32, 32))),
        "subjects": (
            model_record("dense", 0.90, 40_100_000, onnx_bytes=40_000_500),
            model_record("global:0.9", 0.89, 5_000_000, onnx_bytes=40_000_600),
            model_record("int4", 0.88, 5_500_000),
        ),
        "timings": tuple(timings),
    }
    return Bench(**{**values, **changes})


def generation(**changes):
    """Two engines with three models and two numbers of threads, and llama.cpp with a file."""
    medians = {
        ("dense", "torch"): (50.0, 20.0, 25.0),
        ("dense", "torchcram-int8"): (50.0, 5.0, 25.1),
        ("global:0.9", "torch"): (50.0, 20.5, 26.0),
        ("global:0.9", "torchcram-int8"): (40.0, 2.0, 26.2),
        ("int4", "torch"): (50.0, 20.2, 30.0),
        ("small.gguf", "llama.cpp"): (10.0, 4.0, 28.0),
    }
    timings = [
        GenerationTiming(
            target, engine, threads, times(prompt / threads), times(token / threads), perplexity
        )
        for threads in (1, 2)
        for (target, engine), (prompt, token, perplexity) in medians.items()
    ]
    timings += [
        GenerationTiming("int4", "torchcram-int8", threads, None, None, note="no kernels here")
        for threads in (1, 2)
    ]
    values = {
        "prompt_tokens": 100,
        "new_tokens": 64,
        "scored_tokens": 2048,
        "timings": tuple(timings),
        "files": (GgufFile("small.gguf", 98_700_000),),
    }
    return Generation(**{**values, **changes})


def generating_bench(**changes):
    """Language models that generate, with the times of `bench`."""
    subjects = (
        model_record("dense", 24.0, 40_100_000),
        model_record("global:0.9", 25.0, 5_000_000),
        model_record("int4", 29.0, 5_500_000),
    )
    values = {"metric": "perplexity", "subjects": subjects, "generation": generation()}
    return bench(**{**values, **changes})
