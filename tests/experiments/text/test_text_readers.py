import json
import tarfile

import pytest
from tiny_texts import glue_folder, question, squad

from torchcram.experiments.data.text import files
from torchcram.experiments.data.text.formats import TEXT_FORMATS
from torchcram.experiments.data.text.glue import read_tsv
from torchcram.experiments.data.text.squad import read_squad

CONTEXT = "The Seine runs through Paris."


def read(data, placed=True):
    return read_squad(json.dumps(data).encode(), "a.json", placed=placed)


def test_questions_come_with_their_paragraphs():
    given = squad(
        [(CONTEXT, [question("Where?", "Paris", 23)]), ("Ab.", [question("What?", "Ab", 0)])]
    )
    found = read(given)
    assert found.contexts == (CONTEXT, "Ab.")
    assert [(one.text, one.context) for one in found.questions] == [("Where?", 0), ("What?", 1)]
    assert (found.misplaced, found.unanswered) == (0, 0)


def test_what_is_not_at_its_offset_is_counted_and_left_out_of_training_alone():
    asked = [
        question("right", "Paris", 23),
        question("wrong", "Paris", 22),
        question("before", "T", -1),
        question("behind", "Paris", 900),
        {"question": "none", "answers": []},
        question("blank", " ", 3),
    ]
    found = read(squad([(CONTEXT, asked)]))
    assert [one.text for one in found.questions] == ["right"]
    assert (found.misplaced, found.unanswered) == (3, 2)
    test = read(squad([(CONTEXT, asked)]), placed=False)
    assert [one.text for one in test.questions] == ["right", "wrong", "before", "behind"]


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {"data": {}},
        {"data": [{"title": "x"}]},
        {"data": ["x"]},
        squad([(3, [])]),
        squad([("x", [{"question": "y"}])]),
        squad([("x", [question("y", "x", "0")])]),
        squad([("x", [question("y", 1, 0)])]),
        squad([("x", [question(None, "x", 0)])]),
    ],
)
def test_json_that_is_not_squad_is_named(data):
    with pytest.raises(ValueError, match=r"a\.json is not SQuAD v1\.1 \("):
        read(data)


@pytest.mark.parametrize(
    ("paragraph", "said"),
    [
        (("the \ud800", []), "'context' has a lone surrogate, '\\\\ud800' at character 4"),
        ((CONTEXT, [question("\udc00", "Paris", 23)]), "'question' has a lone surrogate"),
        ((CONTEXT, [question("Where?", "\udfff", 23)]), "'text' has a lone surrogate"),
    ],
)
def test_a_lone_surrogate_is_named(paragraph, said):
    with pytest.raises(ValueError, match=rf"a\.json is not SQuAD v1\.1 \({said}"):
        read(squad([paragraph]), placed=False)
    whole = read(squad([("the \U0001f600", [question("what", "\U0001f600", 4)])]))
    assert whole.contexts == ("the \U0001f600",)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b'{"data": ' + b"9" * 5000 + b"}"])
def test_what_is_not_json_is_named(content):
    with pytest.raises(ValueError, match=r"a\.json is not JSON: "):
        read_squad(content, "a.json", placed=True)


def test_an_empty_set_is_named():
    with pytest.raises(ValueError, match=r"a\.json has no questions to use$"):
        read({"data": []})
    with pytest.raises(ValueError, match="no questions to use: 1 have an answer that is not at"):
        read(squad([(CONTEXT, [question("wrong", "Paris", 0)])]))


def tsv(task, text):
    return read_tsv(text.encode(), "a.tsv", sentences=TEXT_FORMATS[task].sentences)


def test_quotes_are_no_quoting_and_bad_lines_are_counted():
    found = tsv(
        "sst2", 'sentence\tlabel\n"open \t1\r\n\nshort\nx\t2\na\tb\t0\nit\x85is\u2028one\t0\n'
    )
    assert found.first == ('"open', "it\x85is\u2028one")
    assert found.labels == (1, 0)
    assert found.second is None
    assert found.skipped == 3


def test_columns_are_found_by_name_or_place():
    pair = tsv("mrpc", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tone\ttwo\n")
    assert (pair.first, pair.second, pair.labels) == (("one",), ("two",), (1,))
    rte = tsv("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n")
    assert (rte.first, rte.second, rte.labels) == (("a",), ("b",), (1,))
    cola = tsv("cola", "gj04\t0\t*\tA good.\ngj04\t1\t\tGood.\n")
    assert (cola.first, cola.labels) == (("A good.", "Good."), (0, 1))


@pytest.mark.parametrize(
    ("task", "text", "said"),
    [
        ("sst2", "", "is empty"),
        ("sst2", "sentence\tlable\nx\t1\n", "has no column 'label'; it has: 'sentence', 'lable'"),
        ("rte", "a\tb\n", "no column 'sentence1' and no 'sentence2' and no 'label'"),
        ("sst2", "sentence\tlabel\n", "no usable line out of 0"),
        ("cola", "a\tb\n", "no usable line out of 1; allowed: 4 columns, the label one of 0, 1"),
    ],
)
def test_bad_tsv_is_named(task, text, said):
    with pytest.raises(ValueError, match=said):
        tsv(task, text)
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_tsv(b"\xff", "a.tsv", sentences=TEXT_FORMATS[task].sentences)


def test_folders_and_archives_are_the_same(tmp_path):
    here = glue_folder(tmp_path / "in", "glue/SST-2", "train", "dev")
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "glue.tar.xz", "w:xz") as tar:
        tar.add(here / "glue", "glue")
    for folder in (here, here / "glue", here / "glue" / "SST-2", tmp_path / "packed"):
        found = files.find("sst2", "sst2", folder)
        train, test = files.read(found, "sst2")
        assert (train.content, test.content) == (b"train", b"dev")
        assert train.where.endswith("SST-2/train.tsv")


def test_other_files_have_another_fingerprint(tmp_path):
    folder = glue_folder(tmp_path, "mine", "train", "dev")
    found = files.find("mine", "sst2", folder)
    before = found.fingerprint()
    (tmp_path / "mine" / "dev.tsv").write_text("other")
    assert found.fingerprint() != before


def test_what_is_missing_twice_or_damaged_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"looked for sst2/train.tsv, glue/SST-2/train.tsv, SST-2"):
        files.find("sst2", "sst2", tmp_path)
    (tmp_path / "squad").mkdir()
    for name in ("train-a.json", "train-b.json"):
        (tmp_path / "squad" / name).write_text("{}")
    found = files.find("squad", "squad", tmp_path)
    with pytest.raises(
        ValueError, match=r"one file train\*.json is needed; there is: train-a.json, train-b"
    ):
        files.read(found, "squad")
    (tmp_path / "squad" / "train-b.json").unlink()
    with pytest.raises(ValueError, match=r"one file dev\*.json is needed; there is: none"):
        files.read(found, "squad")
    (tmp_path / "rte.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is damaged or no archive"):
        files.read(files.find("rte", "rte", tmp_path), "rte")
