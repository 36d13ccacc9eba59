import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from torchcram.experiments.data.text.datasets import References, Texts
from torchcram.experiments.tasks.question_answering import (
    answers,
    best_spans,
    score_answers,
    span_loss,
)


def scores(first, last):
    return torch.stack((torch.tensor(first), torch.tensor(last)), dim=-1).float()


@pytest.mark.parametrize(
    ("first", "last", "allowed", "span", "total"),
    [
        ([0, 5, 1, 0], [0, 1, 4, 0], [1, 1, 1, 1], [1, 2], 9),
        ([0, 1, 5, 0], [0, 6, 1, 1], [1, 1, 1, 1], [1, 1], 7),  # the best pair goes backwards
        ([9, 1, 2, 0], [9, 1, 0, 3], [0, 1, 1, 1], [2, 3], 5),  # the question is no answer
        ([0, 8, 0, 7], [0, 0, 1, 8], [1, 1, 1, 1], [3, 3], 15),  # too long: from 1 to 3
    ],
)
def test_the_best_possible_pair_is_found(first, last, allowed, span, total):
    given = scores(first, last).unsqueeze(0)
    found, tokens = best_spans(given, torch.tensor([allowed]).bool(), longest=2)
    assert (found.tolist(), tokens.tolist()) == ([total], [span])


def test_only_the_best_few_are_paired():
    first, last = [9, 8, 0, 0, 7], [0, 0, 9, 8, 1]
    given = scores(first[::-1], last[::-1]).unsqueeze(0)  # the best two go backwards
    everything = torch.ones(1, 5, dtype=torch.bool)
    assert best_spans(given, everything, best=2)[0].tolist() == [float("-inf")]
    assert best_spans(given, everything)[0].tolist() == [16]


def test_broken_scores_give_no_answer():
    given = torch.full((2, 4, 2), float("nan"))
    given[1, 2] = 1
    found, tokens = best_spans(given, torch.ones(2, 4, dtype=torch.bool))
    assert found.tolist() == [float("-inf"), 2]
    assert tokens[1].tolist() == [2, 2]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_it_is_the_best_of_all_pairs(count, longest, seed):
    given = torch.randn(3, count, 2, generator=torch.Generator().manual_seed(seed))
    found, tokens = best_spans(
        given, torch.ones(3, count, dtype=torch.bool), best=count, longest=longest
    )
    for row in range(3):
        pairs = {
            (i, j): float(given[row, i, 0] + given[row, j, 1])
            for i in range(count)
            for j in range(i, min(count, i + longest))
        }
        assert float(found[row]) == pytest.approx(max(pairs.values()))
        assert pairs[tuple(tokens[row].tolist())] == pytest.approx(float(found[row]))


def windows(begins, questions):
    """Windows of three tokens on a paragraph of one letter per token."""
    count = len(begins)
    offsets = [[place + begin, place + begin + 1] for begin in begins for place in range(3)]
    return Texts(
        tokens=torch.zeros(3 * count, dtype=torch.int32),
        kinds=torch.full((3 * count,), 6, dtype=torch.uint8),
        ends=torch.arange(3, 3 * count + 1, 3),
        labels=torch.zeros(count, 2, dtype=torch.int64),
        examples=torch.tensor(questions),
        offsets=torch.tensor(offsets).int(),
        references=References(("abcdefgh", "ABCDEFGH"), (0, 1), (("cd", "x"), ("F", "FG"))),
    )


def test_the_best_window_of_a_question_gives_its_answer():
    texts = windows([0, 2, 3, 5], [0, 0, 1, 1])
    sums = torch.tensor([1.0, 2.0, 4.0, 3.0])
    spans = torch.tensor([[0, 0], [0, 1], [1, 2], [0, 0]])
    found = answers(texts, sums, spans)
    assert found == {0: "cd", 1: "EF"}
    assert score_answers(texts, found) == {"F1": 0.5, "exact match": 0.5}
    none = answers(texts, torch.full((4,), -1e30), spans)
    assert none == {0: "", 1: ""}


def test_the_loss_is_cross_entropy_whatever_the_padding():
    given, labels = torch.randn(3, 7, 2), torch.randint(7, (3, 2))
    padded = F.pad(given, (0, 0, 0, 5), value=float("-inf")).requires_grad_()
    for smoothing in (0.0, 0.2):
        expected = F.cross_entropy(given, labels, label_smoothing=smoothing)
        found = span_loss(padded, labels, smoothing)
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found, padded)
        assert gradient.isfinite().all()
        assert not gradient[:, 7:].any()
