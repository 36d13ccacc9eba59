"""GGUF files of language-modelling runs, read back by Transformers; and a chat with such a run."""

import re
import runpy
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from commands import ROOT, fail, succeed
from kills import full_disk, needs_limits
from tiny_language import RECIPE, SETTINGS, causal_folder, write_gguf

from torchcram import compress, runtime
from torchcram.experiments.evaluation.compressed_models import score_on_test
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.export import check_export
from torchcram.experiments.models.causal import CausalModel, build_causal_model
from torchcram.experiments.recipe.build import target_weights
from torchcram.experiments.training.trainer import load_trained
from torchcram.integrations.gguf import save_gguf

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("_here")
CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}  # for blocks of 32
TOKENS = torch.arange(1, 41).view(2, 20)
CHANGED = {"general.file_type", "general.quantization_version", "torchcram.operator"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shape = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    decoder = causal_folder(folder / "wide", **WIDE, **shape)
    write_gguf(folder / "wide.gguf", decoder)
    return folder / "wide.gguf"


@pytest.fixture(scope="module")
def run(source, paragraphs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "seed0"
    words = ["train", RECIPE.format("cram-plus-multi"), "--data", paragraphs]
    for setting in (f"model.name={source}", *SETTINGS, "train.epochs=1"):
        words += ["--set", setting]
    succeed(*words, "--out", folder)
    return folder


@pytest.fixture
def trained(run):
    return load_trained(run, CPU)


def read(path):
    """The model of a file, as Transformers reads it."""
    return build_causal_model(str(Path(path).resolve()), pretrained=True).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS)


def export(run, paragraphs, *words):
    succeed("export", run, "--format", "gguf", "--data", paragraphs, "--out", "files", *words)


@pytest.mark.parametrize("size", [0, 3, 20, 200, 0.5, -1])
def test_a_truncated_file_is_called_so(size, source):
    content = source.read_bytes()
    Path("short.gguf").write_bytes(content[: int(size * len(content)) if size == 0.5 else size])
    message = r"short.gguf' cannot be loaded .*: the file is truncated, damaged or no GGUF file \(."
    with pytest.raises(ValueError, match=message):
        read("short.gguf")


@pytest.mark.parametrize(
    ("target", "kind", "near"),
    [
        ("uniform:0.5", "f32", 1e-6),
        ("uniform:0.5", "f16", 2e-3),
        ("int8", "q8_0", 2e-2),
        ("uniform:0.5+int4:g32", "q4_0", 2e-2),
    ],
)
def test_transformers_reads_the_compressed_model(target, kind, near, run, trained, paragraphs):
    words = ["--gguf-type", kind] if kind == "f32" else []
    export(run, paragraphs, "--to", target, *words, "--json", "found.json")
    (path,) = Path("files").iterdir()
    assert path.name == f"{target.replace(':', '-').replace('+', '-')}.{kind}.gguf"
    small = compress(trained.model, target, weights=target_weights(trained.recipe, trained.model))
    expected, loaded = logits(small), read(path)
    apart = float((logits(loaded) - expected).abs().max() / expected.abs().max())
    assert apart <= near
    for name, weight in target_weights(trained.recipe, small).items():
        assert torch.equal(loaded.get_parameter(name) == 0, weight == 0), name
    (seed,) = read_result("found.json").seeds
    data = trained.recipe.build_task().load(paragraphs)
    score = score_on_test(loaded, trained.recipe, data, device=CPU)
    assert seed.targets[0].after == pytest.approx(score.value, rel=1e-6)  # as it is stored


def test_metadata_is_that_of_the_source_and_types_are_those_that_were_asked_for(
    run, source, paragraphs
):
    export(run, paragraphs, "--to", "int4")
    made, original = (gguf.GGUFReader(path) for path in ("files/int4.q4_0.gguf", source))
    fields = {name: field for name, field in made.fields.items() if not name.startswith("GGUF.")}
    assert fields["torchcram.operator"].contents() == "int4"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    kept = {name for name in original.fields if not name.startswith("GGUF.")}
    assert set(fields) - CHANGED == kept - CHANGED
    for name in kept - CHANGED:
        assert fields[name].contents() == original.fields[name].contents(), name
        assert fields[name].types == original.fields[name].types
    assert [tensor.name for tensor in made.tensors] == [one.name for one in original.tensors]
    kinds = {tensor.name: tensor.tensor_type.name for tensor in made.tensors}
    assert kinds.pop("token_embd.weight") == "Q8_0"
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"Q4_0"}


def test_layers_that_blocks_do_not_fit_are_stored_in_float16(decoder, tmp_path):
    write_gguf(tmp_path / "source.gguf", decoder)  # 16 inputs, 32 in one layer
    model = build_causal_model(str(tmp_path / "source.gguf"), pretrained=True).model
    save_gguf(model, "again.gguf", tmp_path / "source.gguf", kind="q8_0")
    tensors = {one.name: one.tensor_type.name for one in gguf.GGUFReader("again.gguf").tensors}
    assert tensors["blk.0.attn_q.weight"] == "F16"
    assert tensors["blk.0.ffn_down.weight"] == "Q8_0"
    save_gguf(model, "third.gguf", "again.gguf", kind="f32")  # what was written is a source
    assert torch.equal(logits(read("third.gguf")), logits(CausalModel(model)))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"up_proj.weight has values that are not finite as f16"):
        save_gguf(model, "large.gguf", tmp_path / "source.gguf")
    assert not Path("large.gguf").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "int4:g8"], "int4:g8: groups of 8 do not fit into the blocks of 32"),
        (["--gguf-type", "q5_0"], "--gguf-type q5_0: allowed are f32, f16, q8_0, q4_0"),
        (["--values", "fp16"], "--values fp16: allowed only with --format torchcram"),
    ],
)
def test_options_that_cannot_be_are_refused(words, message, run, paragraphs):
    words = ["--format", "gguf", "--data", paragraphs, "--out", "files", *words]
    assert message in fail("export", run, *words, code=2)
    assert not Path("files").exists()


def test_models_without_a_fitting_source_are_refused(trained, source, decoder, tmp_path):
    def check(name, model=None):
        named = replace(trained.recipe.model, name=str(name))
        recipe = replace(trained.recipe, model=named)
        check_export(replace(trained, recipe=recipe, model=model or trained.model), "gguf", None)

    check(source)
    with pytest.raises(ValueError, match=r"which is not a GGUF file; only a model that is read"):
        check(decoder)
    with pytest.raises(ValueError, match=r"not a model that generates; allowed are runs"):
        check(source, torch.nn.Linear(2, 2))
    write_gguf(tmp_path / "small.gguf", decoder)
    with pytest.raises(ValueError, match=r"token_embd.weight has the shape \(257, 16\), and mod"):
        check(tmp_path / "small.gguf")
    write_gguf(tmp_path / "other.gguf", decoder, "qwen2")
    with pytest.raises(ValueError, match=r"has the architecture qwen2; only llama can be"):
        check(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").write_bytes(b"no GGUF file at all")
    with pytest.raises(ValueError, match=r"other.gguf cannot be read as a GGUF file"):
        check(tmp_path / "other.gguf")
    folder = causal_folder(tmp_path / "untied", **WIDE, num_key_value_heads=2)
    untied = build_causal_model(str(folder), pretrained=True)
    with pytest.raises(ValueError, match=r"has no tensors for the weights lm_head.weight"):
        check(source, untied)
    deeper = causal_folder(tmp_path / "flat", **WIDE, num_hidden_layers=1, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no weights for: blk.1.attn_q"):
        check(source, build_causal_model(str(deeper), pretrained=True))


@needs_limits
def test_a_full_disk_is_a_line_with_the_path(run, paragraphs):
    words = ("export", run, "--to", "int8", "--format", "gguf", "--data", paragraphs)
    with full_disk(50_000):
        said = fail(*words, "--out", "files", code=1)
    assert said == "error: files/int8.q8_0.gguf: File too large"
    assert list(Path("files").iterdir()) == []


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs the example with some lines as its input; returns what it printed."""

    def ran(path, said, *words):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["chat.py", str(path), *words])
        monkeypatch.setattr(sys, "stdin", StringIO(said))
        runpy.run_path(str(ROOT / "examples" / "chat.py"), run_name="__main__")
        return capsys.readouterr().out

    return ran


@pytest.mark.skipif(not runtime.available(), reason="the kernels have not been built")
@pytest.mark.parametrize("kind", ["transformers", "torchcram"])
def test_the_example_chats_with_a_compressed_model(kind, run, paragraphs, chat):
    words = ("--to", "uniform:0.5", "--format", kind, "--data", paragraphs, "--out", "files")
    succeed("export", run, *words)
    (path,) = Path("files").iterdir()
    printed = chat(path, "The king.\n\n" + "x" * 80 + "\nThe king.\n", "float32")
    answers = re.findall(r"^\((\d+) tokens, [\d.]+ per second\)$", printed, re.MULTILINE)
    assert len(answers) == 2, printed
    assert answers[0] == answers[1]  # the second chat begins anew
    assert 1 <= int(answers[0]) <= 64
    assert re.search(r"the chat has \d+ tokens, the model takes 64: it begins anew", printed)
    assert "per second" in chat(path, "The king.\n")  # in 8 bits


def test_the_example_refuses_a_tokenizer_without_a_chat_template(decoder, chat):
    with pytest.raises(SystemExit, match=r"the tokenizer has no chat template"):
        chat(decoder, "The king.\n")
