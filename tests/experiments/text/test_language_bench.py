"""Generation in benchmarks: prompts, single tokens, and the perplexity of every engine."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import command, succeed
from hypothesis import given
from hypothesis import strategies as st
from runs import CPU
from tiny_language import LENGTH, RECIPE, SETTINGS, causal_folder

from torchcram import compress
from torchcram.experiments.bench.candidates import Candidate
from torchcram.experiments.bench.generation import GenerationPlan, causal_model
from torchcram.experiments.bench.generators import TransformersGenerator, _TokenClock
from torchcram.experiments.bench.record import read_bench
from torchcram.experiments.bench.run import Plan, run_bench
from torchcram.experiments.models.causal import CausalModel
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.build import build_initial_model, target_weights
from torchcram.experiments.tasks.language_modelling import score_windows
from torchcram.pruners import parse_pruner
from torchcram.runtime import available
from torchcram.runtime.cpu.generation import round_for_generation

pytestmark = pytest.mark.usefixtures("_here")
needs_kernels = pytest.mark.skipif(not available(), reason="the kernels are not built")
MULTI = RECIPE.format("cram-plus-multi")
ENGINES = ("torch", "torch-bf16", "torchcram", "torchcram-bf16", "torchcram-int8")


@pytest.fixture(scope="module")
def generating(tmp_path_factory):
    """The folder of a small Llama whose heads fit the kernels; its scores differ by much."""
    folder = tmp_path_factory.mktemp("models") / "generating"
    return causal_folder(folder, tie_word_embeddings=True, head_dim=16, initializer_range=0.3)


@pytest.fixture(scope="module")
def prepared(generating, paragraphs):
    """A recipe, its data, and the dense model."""
    recipe = load_recipe(MULTI, [f"model.name={generating}", *SETTINGS])
    data = recipe.build_task().load(paragraphs)
    return recipe, data, build_initial_model(recipe, classes=0, seed=0).eval()


def candidates(recipe, model, *targets, **options):
    found = [Candidate("dense", model, None, target_weights(recipe, model), None, **options)]
    for target in targets:
        small = compress(model, target, weights=target_weights(recipe, model))
        weights = target_weights(recipe, small)
        found.append(Candidate(target, small, parse_pruner(target), weights, None))
    return found


def measured(prepared, found=None, *, threads=(1,), **plan):
    recipe, data, model = prepared
    said = []
    result = run_bench(
        iter(found or candidates(recipe, model)),
        recipe,
        data,
        plan=Plan((), (1,), threads, 1, generation=GenerationPlan(**plan)),
        device=CPU,
        folder=Path(),
        report=said.append,
    )
    return result.generation, said


def perplexity(prepared, model, tokens=None):
    recipe, data, _ = prepared
    task = recipe.build_task()
    if tokens is not None:
        data, _ = task.shorten_test(data, tokens)
    batches = task.batches(data, train=False, batch_size=1, device=CPU, seed=0)
    return score_windows(model, batches, device=CPU)[0]


@needs_kernels
def test_every_engine_generates_with_every_model(prepared):
    recipe, data, model = prepared
    found = candidates(recipe, model, "uniform:0.5")
    result, _ = measured(prepared, found, engines=ENGINES, tokens=3, prompt=5)
    keys = [(timing.threads, timing.target, timing.engine) for timing in result.timings]
    assert keys == [(1, candidate.target, engine) for candidate in found for engine in ENGINES]
    assert all(timing.prompt.rounds == timing.token.rounds == 1 for timing in result.timings)
    assert (result.prompt_tokens, result.new_tokens) == (5, 3)
    assert result.scored_tokens == len(data.test.tokens)  # there are no more
    for candidate in found:
        one = {name: result.timing(candidate.target, name, 1) for name in ENGINES}
        inner = candidate.model.model
        assert one["torch"].error == 0
        assert one["torchcram"].error < 1e-4
        assert 0 < one["torchcram-bf16"].error < one["torchcram-int8"].error < 0.1
        assert re.match(
            r"[\d.]+ MB per token; prompt: \d+ of 14 layers sparse; outputs off by",
            one["torchcram-int8"].note,
        )
        exact = perplexity(prepared, candidate.model)
        assert one["torch"].perplexity == one["torchcram"].perplexity == pytest.approx(exact)
        for name, dtype in (("torchcram-bf16", torch.bfloat16), ("torchcram-int8", torch.int8)):
            rounded = perplexity(prepared, CausalModel(round_for_generation(inner, dtype)))
            assert one[name].perplexity == pytest.approx(rounded) != exact
        half = CausalModel(build_initial_model(recipe, classes=0, seed=0).model.bfloat16())
        half.load_state_dict(candidate.model.state_dict())
        assert one["torch-bf16"].perplexity == pytest.approx(perplexity(prepared, half)) != exact
    assert next(model.parameters()).dtype == torch.float32  # it stays unchanged


@needs_kernels
def test_weights_of_4_bits_are_kept_where_a_target_has_them(prepared):
    recipe, _, model = prepared
    found = candidates(recipe, model, "int4")
    result, _ = measured(prepared, found, engines=("torchcram", "torchcram-int4"), tokens=3)
    dense, rounded = (result.timing(each.target, "torchcram-int4", 1) for each in found)
    assert dense.token is None
    assert dense.perplexity is None
    assert dense.note.startswith("no layer of the decoder has symmetric weights of 4 bits")
    assert rounded.token.rounds == 1
    inner = CausalModel(round_for_generation(found[1].model.model, torch.int4))
    assert rounded.perplexity == pytest.approx(perplexity(prepared, inner))


def test_every_number_of_threads_is_timed(prepared):
    result, said = measured(prepared, engines=("torch",), threads=(1, 2), prompt=5, tokens=1)
    assert result.threads == [1, 2]
    assert all(timing.token is not None for timing in result.timings)
    first, second, last = said
    lengths = "a prompt of 5 tokens and 1 after it"
    assert first == f"generation, 1 thread: {lengths}, 1 models with 1 engines, side by side"
    assert second.startswith("generation, 2 threads: ")
    assert last.startswith("perplexity of dense with torch on ")  # once


def test_perplexity_is_that_of_the_first_tokens(prepared):
    model = prepared[2]
    result, said = measured(prepared, engines=("torch",), tokens=1, scored=50)
    (timing,) = result.timings
    assert result.scored_tokens == 50
    assert timing.perplexity == pytest.approx(perplexity(prepared, model, 50))
    assert timing.perplexity != pytest.approx(perplexity(prepared, model))
    assert said[-1] == "perplexity of dense with torch on 50 tokens"
    result, _ = measured(prepared, engines=("torch",), tokens=1, scored=None)
    assert (result.scored_tokens, result.timings[0].perplexity) == (None, None)


def test_a_model_that_was_not_trained_is_only_timed(prepared):
    recipe, _, model = prepared
    found = candidates(recipe, model, "int8", trained=False)
    result, _ = measured(prepared, found, engines=("torch",), tokens=1)
    assert [timing.perplexity is None for timing in result.timings] == [True, False]
    assert all(timing.token is not None for timing in result.timings)


def test_without_kernels_torch_generates_alone(prepared, monkeypatch):
    def missing():
        raise RuntimeError("the kernels cannot be used: they have not been built")

    monkeypatch.setattr("torchcram.runtime.cpu.generation.kernels", missing)
    result, _ = measured(prepared, engines=("torchcram-int8", "torch"), tokens=1)
    unable, able = result.timings
    assert (unable.prompt, unable.token, unable.perplexity, unable.error) == (None,) * 4
    assert unable.note == "the kernels cannot be used: they have not been built"
    assert able.token is not None


@needs_kernels
def test_a_decoder_of_another_kind_has_the_reason(paragraphs, tmp_path):
    folder = causal_folder(tmp_path / "gpt", "GPT2")
    recipe = load_recipe(MULTI, [f"model.name={folder}", *SETTINGS])
    model = build_initial_model(recipe, classes=0, seed=0).eval()
    given = (recipe, recipe.build_task().load(paragraphs), model)
    result, _ = measured(given, engines=("torch", "torchcram"), scored=None)
    able, unable = result.timings
    assert able.token is not None
    assert "GPT2LMHeadModel cannot generate in the kernels" in unable.note
    assert (result.prompt_tokens, result.new_tokens) == (43, 21)  # it has 64 positions


def llama_cpp(vocabulary, record):
    """A package whose models prefer the token after the last one."""

    class Llama:
        def __init__(self, path, **options):
            record.append((Path(path).name, options))
            self.n_tokens, self.scores = 0, np.zeros((options["n_ctx"], vocabulary), np.float32)

        def n_vocab(self):
            return vocabulary

        def reset(self):
            self.n_tokens = 0

        def eval(self, tokens):
            self.n_tokens += len(tokens)
            self.scores[:] = 0
            self.scores[range(len(tokens)), [(t + 1) % vocabulary for t in tokens]] = 1

        def generate(self, tokens, temp):
            assert (self.n_tokens, temp) == (0, 0.0)
            self.n_tokens = len(tokens)
            while True:
                time.sleep(1e-4)
                yield 1

    return SimpleNamespace(Llama=Llama)


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF" + bytes(996))
    return path


class Successor(torch.nn.Module):
    """What the package above computes."""

    def forward(self, x):
        return torch.nn.functional.one_hot((x + 1) % 257, 257).float()


def test_llama_cpp_generates_with_files(prepared, gguf, monkeypatch):
    loaded = []
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp(257, loaded))
    result, said = measured(prepared, gguf=(gguf,), prompt=7, tokens=4)
    assert said[0].endswith("side by side; small.gguf")
    (timing,) = result.timings
    assert (timing.target, timing.engine, timing.error) == ("small.gguf", "llama.cpp", None)
    assert timing.token.median >= 0.1
    assert timing.perplexity == pytest.approx(perplexity(prepared, Successor()))
    assert timing.note == "file of 0.001 MB"
    assert [(file.name, file.bytes) for file in result.files] == [("small.gguf", 1000)]
    (name, generating), (_, scoring) = loaded
    assert (name, generating["n_ctx"], generating["n_threads"]) == ("small.gguf", 12, 1)
    assert (scoring["n_ctx"], scoring["logits_all"]) == (LENGTH, True)


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (None, "llama_cpp is missing: pip install llama-cpp-python"),
        (llama_cpp(99, []), "the file has 99 tokens in its vocabulary, and the model 257"),
        (SimpleNamespace(Llama=int), "TypeError: "),
    ],
)
def test_a_file_that_cannot_be_used_has_a_note(package, said, prepared, gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    result, _ = measured(prepared, engines=("torch",), gguf=(gguf,), tokens=1, scored=None)
    able, unable = result.timings
    assert able.token is not None
    assert unable.token is None
    assert unable.note.startswith(said)


numbers = st.none() | st.integers(1, 400)


@given(prompt=numbers, tokens=numbers, positions=st.none() | st.integers(2, 600))
def test_lengths_fit_the_model_and_are_those_asked_for(prompt, tokens, positions):
    plan = GenerationPlan(prompt=prompt, tokens=tokens)
    wanted = (prompt or 1) + (tokens or 1)
    if positions is not None and wanted > positions:
        with pytest.raises(ValueError, match=f"the model takes at most {positions} tokens"):
            plan.lengths(positions)
        return
    lengths = plan.lengths(positions)
    assert min(lengths) >= 1
    assert prompt in (None, lengths.prompt)
    assert tokens in (None, lengths.tokens)
    assert positions is None or sum(lengths) <= positions
    if positions is None or positions >= 600:
        assert lengths == (prompt or 128, tokens or 64)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": 0}, "prompt 0: allowed are numbers from 1 up"),
        ({"tokens": 0}, "tokens 0: allowed are numbers from 1 up"),
        ({"scored": 1}, "scored 1: allowed are numbers from 2 up"),
        ({"gguf": (Path("no.gguf"),)}, "no.gguf: there is no such file"),
        ({"gguf": (Path("a/no.gguf"), Path("no.gguf"))}, "has the same name"),
    ],
)
def test_bad_plans_are_refused(values, said):
    with pytest.raises(ValueError, match=said):
        GenerationPlan(**values)


def test_a_text_that_ends_early_is_not_timed():
    clock = _TokenClock()
    for _ in range(3):
        clock.put(None)
    with pytest.raises(RuntimeError, match="1 tokens were generated instead of 5"):
        clock.seconds(0.0, 5)


def test_settings_of_the_model_do_not_end_or_sample_the_text(prepared):
    model = build_initial_model(prepared[0], classes=0, seed=0).eval().model
    model.generation_config.update(
        do_sample=True, temperature=0.5, top_k=3, eos_token_id=list(range(1, 257)), num_beams=2
    )
    seconds = TransformersGenerator(model).generate(torch.tensor([[3, 1, 4]]), 5)
    assert min(seconds) > 0


def test_models_that_do_not_generate_are_refused():
    other = Candidate("dense", torch.nn.Linear(2, 2), None, {}, None)
    with pytest.raises(ValueError, match="Linear does not generate text"):
        causal_model(other)
    recipe = load_recipe("digits/convnet-digits/sgd", [])
    for method in (recipe.build_task().prompt, recipe.build_task().shorten_test):
        with pytest.raises(ValueError, match="models for images do not generate"):
            method(None, 3)


@pytest.fixture(scope="module")
def finished(generating, paragraphs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    sets = (f"model.name={generating}", *SETTINGS, "train.epochs=1", "compress.watch=null")
    words = [word for setting in sets for word in ("--set", setting)]
    succeed("train", RECIPE.format("adamw"), "--data", paragraphs, *words, "--out", folder)
    return folder


@needs_kernels
def test_the_command_and_the_page_show_generation(finished, paragraphs):
    options = ("--to", "uniform:0.5", "--rounds", 1, "--threads", 1, "--tokens", 2, "--no-forward")
    engines = ("--engines", "torchcram-int8,torch")
    done = succeed("bench", finished, "--data", paragraphs, *options, *engines)
    found = read_bench(finished / "bench.json")
    assert found.generation.engines == ["torchcram-int8", "torch"]
    assert (found.settings, found.timings) == ((), ())
    assert found.generation.timing("dense", "torch", 1).perplexity == pytest.approx(
        found.subjects[0].accuracy
    )
    assert "generation, prompt of 62 tokens, 2 after it, 1 thread on" in done.stdout
    assert "on the first 121 test tokens of wiki-paragraphs" in " ".join(done.stdout.split())
    quick = ("bench", finished, "--data", paragraphs, *options, "--engines", "torch")
    for more, scored in ((["--no-accuracy"], None), (["--no-accuracy", "--scored-tokens", 40], 40)):
        succeed(*quick, *more, "--json", "found.json")
        assert read_bench(Path("found.json")).generation.scored_tokens == scored
    succeed("report", finished, "--out", "page.html")
    page = Path("page.html").read_text()
    assert "Tokens per second <span" in page
    assert "generated tokens per second, the median over the rounds" in page


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--prompt", 64], 1, "a prompt of 64 tokens and 1 after it: the model takes at most 64"),
        (["--prompt", 9, "--tokens", 56], 1, "a prompt of 9 tokens and 56 after it"),
        (["--tokens", 0], 2, "--tokens"),
        (["--prompt", 0], 2, "--prompt"),
        (["--engines", "llama.cpp"], 2, "engine 'llama.cpp' needs a GGUF file"),
        (["--engines", "torchcram-in8"], 2, "did you mean 'torchcram-int8'?"),
        (["--gguf", "no.gguf"], 2, "no.gguf"),
        (["--gguf", __file__], 2, "is not a GGUF file"),
        (["--no-generation", "--tokens", 3], 2, "--tokens is for the generation"),
        (["--no-generation", "--no-forward"], 2, "nothing to measure"),
        (["--no-forward", "--batch", 2], 2, "--batch is for whole batches, which --no-forward"),
    ],
)
def test_bad_options_measure_nothing(finished, paragraphs, arguments, code, said):
    done = command("bench", finished, "--data", paragraphs, *arguments)
    line = done.stderr.splitlines()[-1]
    assert (done.exit_code, line[:7]) == (code, "error: ")
    assert said in line
    assert not any(word in done.stderr for word in ("compressing", "side by side", "testing"))
