"""The tokens of answers that are not just words."""

import itertools

import pytest
from tiny_texts import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchcram.experiments.data.text.squad import Answer, Question, Questions
from torchcram.experiments.data.text.tokens import tokenise_questions


def tokenised(coder, context, begin, end):
    """The one window, and the tokens of its answer; all of them are in it."""
    asked = (Question("who", 0, (Answer(context[begin:end], begin),)),)
    texts, uncovered = tokenise_questions(Questions((context,), asked), coder, length=48, stride=8)
    assert uncovered == 0
    first, last = texts.labels[0].tolist()
    return texts, slice(first, last + 1)


def byte_tokenizer():
    """A tokenizer with a token for every byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (" king", "king"),
        ("king ", "king"),
        (" old king ", "old king"),
        ("\t\n the", "the"),
        ("built ", "built"),
        ("\x00was", "was"),
    ],
)
def test_what_is_no_token_is_not_taken_for_a_neighbour(answer, found, tmp_path):
    context = "\t\n the old king \x00was built "
    begin = context.index(answer)
    texts, span = tokenised(tokenizer(tmp_path), context, begin, begin + len(answer))
    places = texts.offsets[span]
    assert context[places[0, 0] : places[-1, 1]] == found


def test_a_character_of_several_tokens_is_found():
    # é is two bytes and the snowman three, all of them with the place of their character
    coder, context = byte_tokenizer(), "a é☃ b"
    for begin, end in itertools.combinations(range(len(context) + 1), 2):
        answer = context[begin:end].strip()
        if answer:
            texts, span = tokenised(coder, context, begin, end)
            assert coder.decode(texts.tokens[span]) == answer


def test_a_long_question_is_cut_between_characters():
    coder = byte_tokenizer()
    asked = (Question("☃" * 90, 0, (Answer("river", 0),)),)
    texts, uncovered = tokenise_questions(Questions(("river",), asked), coder, length=48, stride=8)
    assert uncovered == 0
    assert coder.decode(texts.tokens) == "☃" * 6 + "river"  # 20 tokens at most, three each
