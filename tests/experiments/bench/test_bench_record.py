import json
import re
from dataclasses import replace

import pytest
from bench_samples import bench, generating_bench, generation, model_record, times
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram.experiments.bench.record import (
    GenerationTiming,
    GgufFile,
    Setting,
    Times,
    Timing,
    read_bench,
    write_bench,
)


def test_a_file_gives_back_what_was_written(tmp_path):
    write_bench(bench(), tmp_path / "bench.json")
    assert read_bench(tmp_path / "bench.json") == bench()
    text = (tmp_path / "bench.json").read_text()
    assert not re.search(r"20\d\d-\d\d|date", text)
    assert sorted(json.loads(text)) == sorted(vars(bench()).keys() - {"generation"})


def test_generation_is_written_where_it_was_measured(tmp_path):
    write_bench(generating_bench(), tmp_path / "bench.json")
    assert read_bench(tmp_path / "bench.json") == generating_bench()
    alone = generating_bench(settings=(), timings=())
    write_bench(alone, tmp_path / "bench.json")
    assert read_bench(tmp_path / "bench.json") == alone
    assert (alone.engines, alone.baseline(0)) == ([], None)


def test_generation_is_compared_with_the_fastest_engine_on_the_dense_model():
    found = generation()
    assert found.engines == ["torch", "torchcram-int8", "llama.cpp"]
    assert found.targets == ["dense", "global:0.9", "int4", "small.gguf"]
    assert found.threads == [1, 2]
    assert found.baseline(2).engine == "torchcram-int8"
    assert found.ratio(found.timing("global:0.9", "torchcram-int8", 2)) == 2.5
    assert found.ratio(found.timing("small.gguf", "llama.cpp", 1)) == 1.25
    assert found.ratio(found.timing("int4", "torchcram-int8", 1)) is None
    assert found.timing("small.gguf", "torch", 1) is None
    others = tuple(timing for timing in found.timings if timing.target != "dense")
    assert generation(timings=others).baseline(1) is None
    assert generation(timings=others).ratio(others[0]) is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: generation(prompt_tokens=0), "prompt_tokens is 0; allowed: at least 1"),
        (lambda: generation(new_tokens=0), "new_tokens is 0; allowed: at least 1"),
        (lambda: generation(timings=generation().timings[:1] * 2), "each engine and model once"),
        (lambda: generation(files=(GgufFile("a", 1),) * 2), "every name once"),
        (lambda: GgufFile("a", 0), "bytes is 0"),
        (lambda: GgufFile(" ", 1), "name is ' '"),
        (lambda: GenerationTiming("dense", "torch", 1, times(1.0), None), "token is None"),
        (lambda: replace(generation().timings[0], perplexity=0.5), "perplexity is 0.5"),
        (lambda: generating_bench(generation=generation(files=())), "small.gguf'; allowed: one of"),
    ],
)
def test_impossible_generation_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_the_baseline_is_the_fastest_engine_on_the_dense_model():
    found = bench()
    assert [found.baseline(place).engine for place in (0, 1)] == ["onnxruntime", "torch"]
    assert found.ratio(found.timing("global:0.9", "torchcram", 0)) == 4
    assert found.ratio(found.timing("global:0.9", "torchcram", 1)) == 4
    assert found.ratio(found.timing("dense", "torch", 0)) == pytest.approx(0.8)
    assert found.ratio(found.timing("int4", "onnxruntime", 0)) is None


def test_samples_per_second():
    found = bench()
    assert found.per_second(found.timing("dense", "torch", 0)) == pytest.approx(100)
    assert found.per_second(found.timing("dense", "torch", 1)) == pytest.approx(160)
    assert found.per_second(found.timing("int4", "onnxruntime", 1)) is None


def test_without_a_dense_engine_there_is_no_ratio():
    unable = [replace(t, times=None) if t.target == "dense" else t for t in bench().timings]
    found = bench(timings=tuple(unable))
    assert found.baseline(0) is None
    assert found.ratio(found.timing("global:0.9", "torch", 0)) is None


def test_names_of_engines_and_settings():
    assert bench().engines == ["torch", "onnxruntime", "torchcram"]
    assert str(Setting(16, 2, (16, 3))) == "batch 16, 2 threads"
    assert str(Setting(1, 1, (1, 3))) == "batch 1, 1 thread"
    assert bench().timing("dense", "nothing", 0) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"subjects": ()}, "the dense model first"),
        ({"subjects": (model_record("int4", 0.5, 9),)}, "the dense model first"),
        ({"subjects": (model_record("dense", 0.5, 9),) * 2}, "every target once"),
        ({"subjects": (model_record("dense", 1.5, 9),)}, r"subjects\[0\].accuracy is 1.5"),
        ({"subjects": (model_record("dense", -0.1, 9),)}, r"subjects\[0\].accuracy"),
        ({"subjects": (model_record("dense", float("nan"), 9),)}, r"subjects\[0\].accuracy"),
        ({"timings": (Timing("int3", "torch", 0, None),)}, "known ones"),
        ({"timings": (Timing("int4", "torch", 2, None),)}, "known ones"),
        ({"timings": (Timing("int4", "torch", 0, None),) * 2}, "each once"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        bench(**changes)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Times(1, 2, 3, 4), "between low and high"),
        (lambda: Times(0, 0, 0, 4), "above 0"),
        (lambda: times(1, rounds=0), "at least 1"),
        (lambda: model_record("dense", 0.5, 0), "compact_bytes"),
        (lambda: model_record(" ", 0.5, 9), "target"),
        (lambda: model_record("dense", 0.5, 9, sparsity=2.0), "sparsity"),
    ],
)
def test_impossible_numbers_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_file_that_is_something_else_is_refused_by_name(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    write_bench(bench(), path)  # generation may be missing or null
    plain = json.loads(path.read_text())
    key = data.draw(st.sampled_from(sorted(plain)))
    if data.draw(st.booleans()):
        del plain[key]
    else:
        plain[key] = data.draw(st.sampled_from([None, 1.5, {"a": []}, [[]]]))
    path.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_bench(path)
