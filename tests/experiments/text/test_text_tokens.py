import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_texts import WORDS, tokenizer

from torchcram.experiments.data.text.datasets import CONTEXT, TextSet
from torchcram.experiments.data.text.glue import Labelled
from torchcram.experiments.data.text.squad import Answer, Question, Questions
from torchcram.experiments.data.text.tokens import tokenise_questions, tokenise_sentences
from torchcram.experiments.tasks.question_answering import answers, exact_match, score_answers

SLOW = {"deadline": None, "max_examples": 40, "suppress_health_check": list(HealthCheck)}
words = st.sampled_from([*WORDS.split(), "Éclair", "中", "x-ray", "U.S.", "(1850)", "☃"])


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def asked(context, begin, end, text="who is king"):
    answer = Answer(context[begin:end], begin)
    return Questions((context,), (Question(text, 0, (answer,)),))


@settings(**SLOW)
@given(
    st.lists(words, min_size=1, max_size=60),
    st.integers(0, 60),
    st.integers(0, 4),
    st.lists(words, max_size=20),
)
def test_the_answer_is_recovered_from_its_tokens(coder, listed, first, more, asking):
    first = min(first, len(listed) - 1)
    context = " ".join(listed)
    begin = len(" ".join(listed[:first])) + bool(first)
    end = begin + len(" ".join(listed[first : first + more + 1]))
    given = asked(context, begin, end, " ".join(asking))
    texts, uncovered = tokenise_questions(given, coder, length=48, stride=16)
    assert int(texts.lengths.max()) <= 48
    inside = texts.labels[:, 0] > 0
    assert uncovered == (not inside.any())
    limits = texts.ends - texts.lengths
    for place in inside.nonzero().flatten().tolist():
        span = texts.labels[place] + limits[place]
        assert all(texts.kinds[span] >= CONTEXT)
        found = context[texts.offsets[span[0], 0] : texts.offsets[span[1], 1]]
        assert found == context[begin:end]
    if not uncovered:
        right = answers(texts, inside.double(), texts.labels)
        assert exact_match(right[0], [context[begin:end]]) == 1
        scores = score_answers(texts, right)
        assert scores["exact match"] == 1


@settings(**SLOW)
@given(st.integers(0, 300), st.integers(8, 80), st.integers(0, 59))
def test_windows_cover_all_and_overlap(coder, count, length, stride):
    given = asked("river " * count, 0, 5, "who")
    if stride >= length - 3 - min(64, (length - stride) // 2):
        with pytest.raises(ValueError, match="cannot overlap"):
            tokenise_questions(given, coder, length=length, stride=stride)
        return
    texts, _ = tokenise_questions(given, coder, length=length, stride=stride)
    parts = []
    for kinds, offsets in zip(
        *(whole.split(texts.lengths.tolist()) for whole in (texts.kinds, texts.offsets)),
        strict=True,
    ):
        parts.append((offsets[kinds > CONTEXT, 0] // 6).tolist())
    assert {token for part in parts for token in part} == set(range(count))
    for before, after in itertools.pairwise(parts):
        assert len(set(before) & set(after)) == stride
        assert len(after) > stride  # none is there for nothing


def test_windows_are_those_of_transformers(coder):
    context = "the king was built in 1850 by castle of river. " * 9
    given = asked(context, 4, 8, "where is the old city")
    texts, uncovered = tokenise_questions(given, coder, length=48, stride=16)
    theirs = coder(
        given.questions[0].text,
        context,
        truncation="only_second",
        max_length=48,
        stride=16,
        return_overflowing_tokens=True,
        return_token_type_ids=True,
    )
    parts = texts.tokens.split(texts.lengths.tolist())
    assert [part.tolist() for part in parts] == theirs["input_ids"]
    types = [(kinds % CONTEXT - 1).tolist() for kinds in texts.kinds.split(texts.lengths.tolist())]
    assert types == theirs["token_type_ids"]
    assert uncovered == 0


def test_an_answer_that_no_window_holds_is_counted(coder):
    context = "river " * 60
    texts, uncovered = tokenise_questions(asked(context, 0, 359), coder, length=48, stride=16)
    assert uncovered == 1
    assert texts.labels.eq(0).all()
    # snowmen are unknown, one token; what is no token is in none
    for begin, end, none in ((0, 2, 1), (0, 3, 0), (2, 3, 0), (30, 34, 1)):
        answer = Answer("x" * (end - begin), begin)
        given = Questions(("\x00\x00☃ river",), (Question("who", 0, (answer,)),))
        assert tokenise_questions(given, coder, length=48, stride=16)[1] == none


def test_a_long_question_is_cut_and_an_empty_paragraph_does_no_harm(coder):
    given = Questions(
        ("", "the river"),
        (
            Question("castle " * 90, 0, (Answer("x", 0),)),
            Question("castle " * 90, 1, (Answer("river", 4),)),
        ),
    )
    texts, uncovered = tokenise_questions(given, coder, length=48, stride=16)
    assert texts.lengths.tolist() == [19, 21]
    assert uncovered == 1


@pytest.mark.parametrize(("first", "second"), [(3, 90), (90, 3), (90, 90), (20, 21)])
def test_of_a_pair_the_longer_one_is_cut(coder, first, second):
    given = Labelled(("river " * first,), ("king " * second,), (1,))
    texts, cut = tokenise_sentences(given, coder, length=32)
    theirs = coder(given.first[0], given.second[0], truncation="longest_first", max_length=32)[
        "input_ids"
    ]
    assert cut == 1
    assert len(texts.tokens) == 32
    assert texts.tokens.tolist() == theirs


def test_sentences_stay_as_they_are(coder):
    given = Labelled(("the old king", "river"), None, (0, 1))
    texts, cut = tokenise_sentences(given, coder, length=32)
    assert cut == 0
    assert texts.labels.tolist() == [0, 1]
    assert [part.tolist() for part in texts.tokens.split(texts.lengths.tolist())] == [
        coder(one)["input_ids"] for one in given.first
    ]


def test_held_out_paragraphs_are_not_trained_on(coder):
    questions = tuple(Question("who", place // 3, (Answer("king", 4),)) for place in range(30))
    contexts = tuple(f"the king of {place}" for place in range(10))
    texts, _ = tokenise_questions(Questions(contexts, questions), coder, length=32, stride=8)
    data = TextSet("mine", "squad", texts, texts, "abc")
    held = data.hold_out(0.2, seed=3)
    assert (len(held.train), len(held.test)) == (24, 6)
    apart = [{int(one) // 3 for one in part.examples} for part in (held.train, held.test)]
    assert not apart[0] & apart[1]
    assert held.contents != data.contents
    kept = held.test.examples[0]
    assert held.test.tokens[: held.test.ends[0]].equal(texts.take(kept.view(1)).tokens)
    for wrong in (0, 1, 2):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            data.hold_out(wrong)
    assert torch.equal(data.hold_out(0.2, seed=3).test.tokens, held.test.tokens)
