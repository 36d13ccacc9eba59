import math

import pytest

from torchcram.experiments.tasks.question_answering import (
    exact_match,
    normalised,
    token_f1,
)
from torchcram.experiments.tasks.sentence_classification import binary_scores


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("The  Castle.", "castle"),
        ("an A a", ""),
        ("theatre and another", "theatre and another"),
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation goes first
        ("Straße «é»", "straße «é»"),  # only ASCII is punctuation
        ("\tone\u00a0two\n", "one two"),
        ("$1,000", "1000"),
    ],
)
def test_answers_are_normalised_as_squad_does(answer, plain):
    assert normalised(answer) == plain


@pytest.mark.parametrize(
    ("answer", "right", "f1", "exact"),
    [
        ("the Denver Broncos", ["Denver Broncos"], 1, 1),
        ("Broncos", ["Denver Broncos", "The Broncos!"], 1, 1),  # the best one counts
        ("Denver", ["Denver Broncos"], 2 / 3, 0),
        ("a b b c", ["b b d"], 2 * 2 / 6, 0),  # "a" is an article; words count as often as they are
        ("x y", ["z"], 0, 0),
        ("the", ["a"], 0, 1),  # both empty: SQuAD's F1 is 0
        ("", ["x"], 0, 0),
        ("ÉCOLE", ["école"], 1, 1),
    ],
)
def test_f1_and_exact_match(answer, right, f1, exact):
    assert token_f1(answer, right) == pytest.approx(f1)
    assert exact_match(answer, right) == exact


def test_classes_are_scored_from_counts():
    scores = binary_scores([[50, 10], [5, 35]])
    assert scores["accuracy"] == 0.85
    assert scores["F1"] == pytest.approx(70 / 85)
    expected = (35 * 50 - 10 * 5) / math.sqrt(45 * 40 * 60 * 55)
    assert scores["Matthews correlation"] == pytest.approx(expected)


@pytest.mark.parametrize("counts", [[[7, 0], [3, 0]], [[0, 7], [0, 3]], [[10, 0], [0, 0]]])
def test_one_class_alone_has_no_correlation(counts):
    assert binary_scores(counts)["Matthews correlation"] == 0


def test_the_correlation_has_its_ends():
    assert binary_scores([[5, 0], [0, 5]])["Matthews correlation"] == pytest.approx(1)
    assert binary_scores([[0, 5], [5, 0]])["Matthews correlation"] == pytest.approx(-1)
    assert list(binary_scores([[1, 0, 0], [0, 1, 0], [0, 1, 0]])) == ["accuracy"]
