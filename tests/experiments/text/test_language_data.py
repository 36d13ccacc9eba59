"""Running text: files, tokens, blocks and windows."""

import json
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_language import byte_tokenizer, text_folder

from torchcram.experiments.data.text import running
from torchcram.experiments.data.text.blocks import IGNORED, BlockBatches, Blocks, TokenSet, Windows
from torchcram.experiments.data.text.files import Split
from torchcram.experiments.data.text.running import detokenised, load_running, read_texts
from torchcram.experiments.ranks import Shard
from torchcram.experiments.training.cuda_graph_steps import CapturableBatches


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def batches(split, size=4, *, train=True, seed=0, **options):
    return BlockBatches(split, batch_size=size, device="cpu", seed=seed, train=train, **options)


def test_paragraphs_are_joined_by_a_blank_line_and_tokenised_once(tokenizer, tmp_path):
    folder, reported = text_folder(tmp_path), []
    data = load_running(
        "wiki-paragraphs", folder, tokenizer=lambda: tokenizer, report=reported.append
    )
    text = (folder / "wiki-paragraphs" / "test.txt").read_text().strip()
    assert tokenizer.decode(data.test.tolist()) == text
    assert data.notes[1] == f"test: {len(text)} tokens of 3 paragraphs"
    assert len(reported) == 3
    again = load_running(
        "wiki-paragraphs", folder, tokenizer=lambda: tokenizer, report=reported.append
    )
    assert len(reported) == 3
    assert again.train.equal(data.train)
    (folder / "wiki-paragraphs" / "test.txt").write_text("Another text, that is longer.")
    with pytest.warns(UserWarning, match="it is made anew"):
        other = load_running("wiki-paragraphs", folder, tokenizer=lambda: tokenizer)
    assert other.contents != data.contents


def test_long_files_are_tokenised_in_pieces(tokenizer, monkeypatch):
    texts = [f"paragraph {number}" for number in range(20)]
    whole = running.tokenise_running(texts, tokenizer, "a")
    monkeypatch.setattr(running, "CHUNK", 30)
    assert running.tokenise_running(texts, tokenizer, "a").equal(whole)


def test_an_archive_is_read_without_unpacking_it(tokenizer, tmp_path):
    folder = text_folder(tmp_path / "there")
    expected = load_running("wiki-paragraphs", folder, tokenizer=lambda: tokenizer)
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "wiki-paragraphs.tar.xz", "w:xz") as archive:
        archive.add(folder / "wiki-paragraphs", "wiki-paragraphs")
    packed = load_running("wiki-paragraphs", tmp_path / "packed", tokenizer=lambda: tokenizer)
    assert (packed.contents, packed.notes) == (expected.contents, expected.notes)


def test_documents_in_json_lines_end_with_the_end_of_text(tokenizer, tmp_path):
    (tmp_path / "own").mkdir()
    for split in ("train", "valid"):  # valid stands in for test
        lines = [json.dumps({"text": text, "id": 1}) for text in ("ab\n\nc", "d")]
        (tmp_path / "own" / f"{split}.jsonl").write_text("\n".join(lines) + "\n\n")
    data = load_running("own", tmp_path, tokenizer=lambda: tokenizer)
    end = tokenizer.eos_token_id
    assert data.test.tolist() == [*tokenizer.encode("ab\n\nc"), end, *tokenizer.encode("d"), end]
    assert data.notes[0] == "train: 8 tokens of 2 documents"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n\t\n", "a.txt has no text"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8"),
        ("a.jsonl", b"", "a.jsonl has no text"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "a.jsonl, line 2, is not a JSON object with"),
        ("a.jsonl", b'{"text": 3}', "line 1, is not a JSON object with a text under 'text'"),
        ("a.jsonl", b'{"texts": "a"}', "line 1, is not"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1, is not"),
        ("a.jsonl", b"{", "line 1, is not"),
    ],
)
def test_bad_files_are_named(name, content, message):
    with pytest.raises(ValueError, match=message):
        read_texts(Split(content, name))


def test_missing_files_are_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"looked for x/train.txt, x/train.jsonl and x.tar.xz"):
        load_running("x", tmp_path, tokenizer=lambda: tokenizer)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train.txt").write_text("a")
    with pytest.raises(ValueError, match=r"one of test.txt, .* is needed; there is: train.txt"):
        load_running("x", tmp_path, tokenizer=lambda: tokenizer)


def test_a_tokenizer_that_knows_little_of_the_text_is_refused(tmp_path):
    from tiny_texts import tokenizer

    words = tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"a.txt: the tokenizer does not know 100 % of the tokens"):
        running.tokenise_running(["ж щ ц"], words, "a.txt")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (" = = Early life = = ", "== Early life =="),
        (
            ' He had a guest @-@ starring role , " Craig " , in the film \'s 1 @,@ 000 shows . ',
            'He had a guest-starring role, "Craig", in the film\'s 1,000 shows.',
        ),
        (" It ( the <unk> ) wasn 't 3 @.@ 5 % ; was it ? ", "It (the <unk>) wasn't 3.5%; was it?"),
    ],
)
def test_the_tokenisation_of_wikitext_is_undone(line, text):
    assert detokenised(line).strip() == text
    assert read_texts(Split(f"{line}\n \n{line}".encode(), "a.txt"), tokenised=True) == [text] * 2


@settings(deadline=None)
@given(st.integers(6, 80), st.integers(2, 9), st.data())
def test_windows_count_every_token_once_in_the_first_window_that_has_it(count, length, data):
    length = min(length, count - 2)
    stride = data.draw(st.integers(1, length))
    tokens = torch.arange(count, dtype=torch.int32)
    expected, end = [], 0  # as the literature has it
    for begin in range(0, count - 1, stride):
        last = min(begin + length, count - 1)
        expected.append((begin, list(range(end + 1, last + 1))))
        end = last
        if end == count - 1:
            break
    tested = batches(Windows(tokens, length, stride), train=False)
    rows = [pair for inputs, labels in tested.epoch() for pair in zip(inputs, labels, strict=True)]
    assert len(rows) == len(expected) == len(Windows(tokens, length, stride))
    for (inputs, labels), (begin, counted) in zip(rows, expected, strict=True):
        assert labels[labels != IGNORED].tolist() == counted
        known = min(length, count - 1 - begin)
        assert inputs.tolist() == [*range(begin, begin + known), *[0] * (length - known)]


@settings(deadline=None)
@given(st.integers(20, 90), st.integers(2, 6), st.integers(1, 5), st.integers(1, 3))
def test_blocks_come_once_an_epoch_in_the_order_of_the_seed(count, length, size, parts):
    tokens = torch.arange(count, dtype=torch.int32)
    blocks = Blocks(tokens, length, parts=1)
    size = min(size, len(blocks))  # fewer blocks are one batch
    whole = batches(blocks, size)
    assert isinstance(whole, CapturableBatches)
    assert whole.has_one_shape
    for epoch in (0, 2):
        drawn = list(whole.epoch(epoch))
        starts = [row[0].item() for inputs, _ in drawn for row in inputs]
        assert len(starts) == len(set(starts)) == len(blocks) // size * size
        for inputs, labels in drawn:
            assert inputs.shape == (whole.batch_size, length)
            assert labels.equal(inputs + 1)
        if len(blocks) // size >= parts:
            divided = batches(Blocks(tokens, length, parts), size)
            joined = [
                inputs.tolist()
                for part in range(parts)
                for inputs, _ in divided.epoch(epoch * parts + part)
            ]
            assert joined == [inputs.tolist() for inputs, _ in drawn][: len(joined)]
            assert len(divided) == len(drawn) // parts
    assert list(whole.stage_each_shape()) == [0]
    whole.start_epoch(1)
    staged = [whole.staged_batch(whole.stage_next())[0].tolist() for _ in range(len(whole))]
    assert staged == [inputs.tolist() for inputs, _ in batches(blocks, size).epoch(1)]


def test_the_order_differs_between_seeds_and_epochs_and_ranks_share_it():
    blocks = Blocks(torch.arange(101), 5)

    def order(seed, epoch, **options):
        drawn = batches(blocks, seed=seed, **options).epoch(epoch)
        return [inputs[:, 0].tolist() for inputs, _ in drawn]

    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    halves = [order(0, 1, shard=Shard(number, 2)) for number in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == order(0, 1)
    windows = Windows(torch.arange(30_000), 2000, 1000)
    tested = [
        row[0].item()
        for number in range(3)
        for inputs, _ in batches(windows, train=False, shard=Shard(number, 3)).epoch()
        for row in inputs
    ]
    assert sorted(tested) == [1000 * number for number in range(len(windows))]
    with pytest.raises(ValueError, match="2 batches do not make 3 parts"):
        batches(Blocks(torch.arange(41), 5, parts=3))
    with pytest.raises(ValueError, match="batch size 0 of 20"):
        batches(blocks, 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_piece_of_the_text_is_held_out(seed):
    tokens = torch.arange(104)
    also = {"other": Windows(tokens, 5, 2)}
    data = TokenSet("a", Blocks(tokens, 5), Windows(tokens, 5, 2), "", also)
    divided = data.hold_out(0.2, seed)
    held = divided.test.tokens
    assert (len(divided.train), len(held), divided.also) == (16, 21, {})
    assert held.equal(torch.arange(int(held[0]), int(held[0]) + 21))
    assert held[0] % 5 == 0
    trained = {
        value for inputs, _ in batches(divided.train, 1).epoch() for value in inputs[0].tolist()
    }
    assert not trained & set(held[:-1].tolist())
    with pytest.raises(ValueError, match="too small to hold a part"):
        TokenSet("a", Blocks(torch.arange(9), 5), data.test, "").hold_out()
    with pytest.raises(ValueError, match="fraction must be between 0 and 1"):
        data.hold_out(1.0)
