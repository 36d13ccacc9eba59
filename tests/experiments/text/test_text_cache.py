import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tiny_texts import glue_folder, model_folder, question, squad, squad_folder

from torchcram.experiments.data.text import loading as cache
from torchcram.experiments.data.text.loading import TENSORS, contents
from torchcram.experiments.recipe import load_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(model, *overrides, task="squad"):
    lengths = ["text.length=48", "text.stride=16"]
    return load_recipe(f"{task}/minilm-l6/adam", [f"model.name={model}", *lengths, *overrides])


def load(given, folder):
    said = []
    task = given.build_task()
    data = task.load(folder, report=said.append)
    return data, said


def test_tokens_are_made_once_and_read_from_then_on(tmp_path, model):
    folder = squad_folder(tmp_path)
    made, said = load(recipe(model), folder)
    (file,) = folder.glob("squad.48-16.*.tokens.safetensors")
    assert said == [
        f"tokenising squad into {file}",
        "squad: train: 20 sequences of 20 questions",
        "squad: dev: 6 sequences of 6 questions",
    ]
    read, said = load(recipe(model), folder)
    assert said == []
    for split in ("train", "test"):
        one, other = getattr(made, split), getattr(read, split)
        assert all(getattr(one, key).equal(getattr(other, key)) for key in TENSORS)
        assert one.references == other.references
    assert (read.contents, read.notes, read.classes) == (made.contents, made.notes, made.classes)


def test_a_stale_file_is_named_and_made_anew(tmp_path, model):
    folder = squad_folder(tmp_path)
    before, _ = load(recipe(model), folder)
    (folder / "squad" / "dev-v1.1.json").write_text(
        json.dumps(squad([("the king", [question("who", "king", 4)])]))
    )
    with pytest.warns(UserWarning, match="its source is 'folder .*; it is made anew"):
        after, said = load(recipe(model), folder)
    assert "squad: dev: 1 sequences of 1 questions" in said
    assert after.contents != before.contents
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is not the tokenised 'squad'"):
        assert load(recipe(model), folder)[0].contents == after.contents


def test_a_file_of_an_older_format_is_made_anew(tmp_path, model, monkeypatch):
    folder = squad_folder(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(cache, "FORMAT", "torchcram tokens 1")
        load(recipe(model), folder)
    with pytest.warns(UserWarning, match="its format is 'torchcram tokens 1'.*it is made anew"):
        assert load(recipe(model), folder)[1][0].startswith("tokenising squad into")
    assert load(recipe(model), folder)[1] == []


def test_what_another_process_made_meanwhile_is_told_of_too(tmp_path, model, monkeypatch):
    folder = squad_folder(tmp_path)
    asked = [question("who", "king", 4), {"question": "none", "answers": []}]
    (folder / "squad" / "dev-v1.1.json").write_text(json.dumps(squad([("the king", asked)])))

    @contextmanager
    def other(_):
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        load(recipe(model), folder)
        yield

    monkeypatch.setattr("torchcram.experiments.io.cache.one_process_at_a_time", other)
    _, said = load(recipe(model), folder)
    assert said == ["squad: dev: 1 questions skipped, as they have no answer"]


def test_contents_tell_all_that_scores_depend_on_apart(tmp_path, model):
    data, _ = load(recipe(model), squad_folder(tmp_path))
    texts = data.test
    references = texts.references
    more = (("a king",), *references.answers[1:])
    others = [
        texts,
        *(replace(texts, **{key: getattr(texts, key) + 1}) for key in TENSORS),
        replace(texts, references=replace(references, answers=more)),
        replace(
            texts, references=replace(references, contexts=("the king", *references.contexts[1:]))
        ),
        replace(texts, references=replace(references, context_of=(1, *references.context_of[1:]))),
        replace(texts, references=None),
    ]
    assert contents(data.train, texts) == data.contents
    assert len({contents(data.train, one) for one in others}) == len(others)
    assert contents(texts, texts) != contents(texts)


def test_other_lengths_and_tokenizers_have_files_of_their_own(tmp_path, model):
    folder = squad_folder(tmp_path)
    load(recipe(model), folder)
    load(recipe(model, "text.length=60"), folder)
    other = model_folder(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"lowercase": true', '"lowercase": false'))
    load(recipe(other), folder)
    assert len(list(folder.glob("*.tokens.safetensors"))) == 3


def test_a_closed_folder_has_its_tokens_in_the_cache(tmp_path, model):
    folder = squad_folder(tmp_path / "closed")
    folder.chmod(0o555)
    try:
        _, said = load(recipe(model), folder)
        assert said[0].startswith(f"tokenising squad into {tmp_path / 'cache' / 'torchcram'}")
        assert load(recipe(model), folder)[1] == []
    finally:
        folder.chmod(0o755)


def test_what_is_left_out_is_told(tmp_path, model):
    folder = squad_folder(tmp_path)
    asked = [
        question("who", "king", 4),
        question("who is it", "king", 5),
        question("what", "the king of the river " * 9, 0),
        {"question": "none", "answers": []},
    ]
    context = "the king of the river " * 20
    (folder / "squad" / "train-v1.1.json").write_text(json.dumps(squad([(context, asked)])))
    data, said = load(recipe(model), folder)
    assert "squad: train: 1 questions skipped, as the answer is not at its offset" in said
    assert "squad: train: 1 questions skipped, as they have no answer" in said
    assert "squad: train: 1 questions whose answer is in no window" in said
    assert data.notes[1:] == tuple(line.removeprefix("squad: ") for line in said[2:])
    _, again = load(recipe(model), folder)
    assert again == [line for line in said if "skipped" in line or "in no window" in line]
    assert len(again) == 3


def test_sentences_are_told_of_too(tmp_path, model):
    lines = "sentence\tlabel\n" + "old king\t1\n" + "river " * 90 + "\t0\nbad\n"
    folder = glue_folder(tmp_path, "glue/SST-2", lines, lines)
    data, said = load(recipe(model, task="sst2"), folder)
    assert "sst2: train: 1 lines skipped, of other columns or labels" in said
    assert "sst2: train: 1 sentences cut to 48 tokens" in said
    assert load(recipe(model, task="sst2"), folder)[1] == [
        f"sst2: {split}: 1 {what}"
        for split in ("train", "dev")
        for what in ("lines skipped, of other columns or labels", "sentences cut to 48 tokens")
    ]
    assert data.classes == ("negative", "positive")
    assert data.train.references is None
    assert (data.test.count, data.test.labels.tolist()) == (2, [1, 0])
