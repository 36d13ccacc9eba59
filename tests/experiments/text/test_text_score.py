import pytest
import torch
from torch import nn

from torchcram.experiments.data.text.batches import TextBatches
from torchcram.experiments.data.text.datasets import References, Texts, TextSet
from torchcram.experiments.tasks import QuestionAnswering, Score, SentenceClassification

CPU = torch.device("cpu")


class Said(nn.Module):
    """Gives the class that the first token of a text is the number of; in eval mode alone."""

    def forward(self, x):
        assert not self.training
        return nn.functional.one_hot(x[:, 0, 0].long(), 2).float()


def sentences(said, right):
    count = len(said)
    return Texts(
        tokens=torch.tensor(said).int(),
        kinds=torch.ones(count, dtype=torch.uint8),
        ends=torch.arange(1, count + 1),
        labels=torch.tensor(right),
        examples=torch.arange(count),
        offsets=torch.zeros(0, 2, dtype=torch.int32),
    )


def come_to(model, kind, texts):
    data = TextSet("mine", kind, texts, texts, "x")
    batches = TextBatches(texts, batch_size=3, device=CPU, seed=0, train=False)
    kind = QuestionAnswering if kind == "squad" else SentenceClassification
    return kind(None, None, {}, None).score(model, data, batches, device=CPU)


def test_classes_are_scored_by_the_metrics_of_the_task():
    model = Said().train()
    texts = sentences([1, 1, 0, 1], [1, 0, 0, 1])
    assert come_to(model, "sst2", texts) == Score(0.75)
    assert come_to(model, "mrpc", texts) == Score(0.75, "accuracy", {"F1": pytest.approx(0.8)})
    assert model.training
    found = come_to(model, "cola", texts)
    assert (found.metric, found.others) == ("Matthews correlation", {"accuracy": 0.75})
    assert found.value == pytest.approx(2 / 12**0.5)


def test_a_correlation_below_zero_counts_as_zero():
    found = come_to(Said(), "cola", sentences([0, 1], [1, 0]))
    assert found.value == 0
    assert found.others == {"accuracy": 0, "Matthews correlation": -1}


class Pointing(nn.Module):
    """Scores the tokens that are 7 best, and what is no context even better."""

    def forward(self, x):
        scores = (x[:, 0] == 7).float() * 5 + (x[:, 1] < 4) * 9.0
        return torch.stack((scores, scores), dim=-1)


def test_answers_are_read_out_of_the_best_window():
    texts = Texts(
        tokens=torch.tensor([1, 2, 3, 1, 7, 4, 7, 8]).int(),
        kinds=torch.tensor([1, 6, 6, 1, 6, 6, 6, 6], dtype=torch.uint8),
        ends=torch.tensor([3, 6, 8]),
        labels=torch.zeros(3, 2, dtype=torch.int64),
        examples=torch.tensor([0, 0, 1]),
        offsets=torch.tensor(
            [[0, 0], [0, 3], [4, 7], [0, 0], [8, 14], [15, 17], [0, 6], [7, 9]]
        ).int(),
        references=References(
            ("the old castle is", "rivers go"), (0, 1), (("castle",), ("the rivers", "no"))
        ),
    )
    assert come_to(Pointing(), "squad", texts) == Score(1, "F1", {"exact match": 1})
