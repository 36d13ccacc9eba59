"""Folders of models that are in half precision, incomplete or damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import command, fail, succeed
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from torchcram.experiments.models.text import build_text_model, load_tokenizer, save_folder
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import load_trained

SETS = (
    "text.length=48",
    "text.stride=16",
    "train.batch_size=8",
    "optimizer.lr=0.01",
    "compress.to=[uniform:0.5]",
    "compress.watch=null",
)


@pytest.fixture
def copy(tiny, tmp_path):
    """A folder of the small BERT that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture
def half(copy):
    """A folder with weights in half precision that says so."""
    file = copy / "model.safetensors"
    given = {name: value.half() for name, value in load_file(file).items()}
    save_file(given, file, {"format": "pt"})
    # as Transformers 5 and 4 have it
    configure(copy, dtype="float16", torch_dtype="float16")
    return copy


def line(model, data, out):
    words = ["train", "squad/minilm-l6/adam", "--data", data, "--epochs", 2, "--out", out]
    for one in (f"model.name={model}", *SETS):
        words += ["--set", one]
    return words


@pytest.mark.parametrize("pretrained", [True, False])
def test_half_precision_is_trained_in_full(half, pretrained):
    model = build_text_model(str(half), "squad", pretrained=pretrained)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.usefixtures("_here")
def test_half_precision_is_continued_in_full(half, questions, monkeypatch):
    succeed(*line(half, questions, "whole"))
    taken, real = 0, EagerStep.run

    def interrupted(self):
        nonlocal taken
        taken += 1
        if taken == 4:  # the last one
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(EagerStep, "run", interrupted)
    assert command(*line(half, questions, "stopped")).exit_code == 130
    assert "continued after 1" in succeed(*line(half, questions, "stopped")).stderr
    whole, stopped = (Path(name, "model.safetensors") for name in ("whole", "stopped"))
    assert whole.read_bytes() == stopped.read_bytes()
    state = load_trained(Path("whole"), torch.device("cpu")).model.state_dict()
    written = load_file(whole)
    assert all(state[name].equal(value) for name, value in written.items())
    assert {value.dtype for value in written.values()} == {torch.float32}


def test_a_folder_without_a_tokenizer_is_named(copy):
    for path in copy.glob("*token*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"model '.*copy' .*tokenizer"):
        load_tokenizer(str(copy))


def test_a_tokenizer_that_knows_no_word_is_named(copy):
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    said = json.loads(tokenizer.to_str())
    special = {one["content"] for one in said["added_tokens"]}
    words = said["model"]["vocab"]
    said["model"]["vocab"] = {one: place for one, place in words.items() if one in special}
    (copy / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"model '.*copy' has no tokenizer: .* no words"):
        load_tokenizer(str(copy))


def test_damaged_files_are_named(copy):
    file = copy / "model.safetensors"
    content = file.read_bytes()
    for kept in (content[:1000], content[:-1000], b""):
        file.write_bytes(kept)
        with pytest.raises(ValueError, match=r"'.*copy' cannot be loaded with a head for sst2: ."):
            build_text_model(str(copy), "sst2", pretrained=True)
    file.write_bytes(content)
    configure(copy, hidden_size="x")
    for pretrained in (True, False):
        with pytest.raises(ValueError, match=r"'.*copy' cannot be loaded with a head for sst2: ."):
            build_text_model(str(copy), "sst2", pretrained=pretrained)
    for text in ('{"a":', '{"version": "1.0"}', "[]"):
        (copy / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=r"model '.*copy' cannot be loaded with its tokenizer"):
            load_tokenizer(str(copy))


@pytest.mark.usefixtures("_here")
def test_damaged_weights_are_told_in_one_line(copy, questions):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    assert "cannot be loaded with a head for squad: " in fail(*line(copy, questions, "run"))


def test_a_saved_tokenizer_cuts_texts_where_that_of_the_model_does(copy, tmp_path):
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(copy, model_max_length=9).save_pretrained(copy)
    model = build_text_model(str(copy), "squad", pretrained=True)
    save_folder(model, tmp_path / "saved", str(copy))
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.model_max_length == 9
    assert len(saved("the river " * 20, truncation=True).input_ids) == 9
    assert load_tokenizer(str(copy)).model_max_length > 10**6  # texts are cut into windows
