"""Models that do not go with texts are refused before the first step."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from torchcram.experiments.data.text.datasets import Texts, TextSet
from torchcram.experiments.models.text import TextModel
from torchcram.experiments.tasks import QuestionAnswering

CPU = torch.device("cpu")
TASK = QuestionAnswering(SimpleNamespace(name="mine"), None, {}, None)
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
DECODER = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
DECODER |= {"bos_token_id": 2, "eos_token_id": 2}


def require_fit(model, given, device):
    TASK.check_model(model, given, device=device)


def data(task, *lengths):
    """Texts of these lengths, between one token and another as a tokenizer has them."""
    words = torch.randint(5, 50, (max(lengths),), generator=torch.Generator().manual_seed(0))
    tokens = [torch.tensor([2, *words[: count - 2], 3]) for count in lengths]
    labels = torch.zeros(len(lengths), dtype=torch.int64)
    total = sum(lengths)
    texts = Texts(
        tokens=torch.cat(tokens).int(),
        kinds=torch.ones(total, dtype=torch.uint8),
        ends=torch.tensor(lengths).cumsum(0),
        labels=labels if task != "squad" else labels[:, None].expand(-1, 2),
        examples=torch.arange(len(lengths)),
        offsets=torch.zeros(0, 2, dtype=torch.int32),
    )
    return TextSet("texts", task, texts, texts, "abc")


def built(config, task="sst2"):
    torch.manual_seed(0)
    kind = transformers.AutoModelForSequenceClassification
    if task == "squad":
        kind = transformers.AutoModelForQuestionAnswering
    return TextModel(kind.from_config(config), task)


def roberta(positions):
    return transformers.RobertaConfig(
        **SIZES, max_position_embeddings=positions, pad_token_id=1, type_vocab_size=1
    )


@pytest.mark.parametrize("task", ["squad", "sst2"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Roberta", "MPNet", "Electra", "Albert"])
def test_encoders_go_with_texts(family, task):
    positions = {"max_position_embeddings": 36}  # RoBERTa and MPNet count from 2
    if family == "DistilBert":
        given = {"vocab_size": 50, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    else:
        given = {**SIZES, "embedding_size": 16} if family in ("Electra", "Albert") else SIZES
    config = getattr(transformers, f"{family}Config")(**given, **positions)
    require_fit(built(config, task), data(task, 12, 34, 5), device=CPU)


@pytest.mark.parametrize("config", [transformers.MPNetConfig, transformers.RobertaConfig])
def test_too_few_positions_are_named_where_the_first_are_for_padding(config):
    model = built(config(**SIZES, max_position_embeddings=34, pad_token_id=1))
    with pytest.raises(ValueError, match="'mine' does not take the texts of 'texts', of up to 34 "):
        require_fit(model, data("sst2", 12, 34), device=CPU)
    require_fit(model, data("sst2", 12, 32), device=CPU)


def test_a_model_that_takes_no_batches_is_named():
    model = built(transformers.GPT2Config(**DECODER))
    for lengths in ((12, 34), (34, 34)):
        with pytest.raises(ValueError, match=r"up to 34 tokens: .*no padding token is defined"):
            require_fit(model, data("sst2", *lengths), device=CPU)


def test_scores_that_depend_on_padding_are_named():
    model = built(transformers.GPT2Config(**DECODER, pad_token_id=3))
    with pytest.raises(ValueError, match="its scores depend on padding"):
        require_fit(model, data("sst2", 12, 34), device=CPU)
    require_fit(model, data("sst2", 34, 34), device=CPU)  # there is no padding


def test_a_model_may_have_no_limit_of_positions():
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=32)
    assert config.max_position_embeddings == -1
    with pytest.raises(ValueError, match="its scores depend on padding"):
        require_fit(built(config), data("sst2", 12, 34), device=CPU)
    require_fit(built(config), data("sst2", 34), device=CPU)


def test_a_model_with_another_head_is_named():
    config = roberta(40)
    config.num_labels = 3
    with pytest.raises(ValueError, match=r"no head for sst2: .* \(2, 3\), but \(2, 2\) is needed"):
        require_fit(built(config), data("sst2", 12, 34), device=CPU)


class Drawing(nn.Module):
    """Draws random numbers whatever its mode is, and can fail at it."""

    def __init__(self, model, fails):
        super().__init__()
        self.model, self.fails, self.seen = model.model, fails, []

    def forward(self, x):
        self.seen.append((x.device, self.training, float(torch.rand(1))))
        if self.fails:
            raise RuntimeError("it fails")
        return self.model(input_ids=x[:, 0], attention_mask=x[:, 1]).logits


@pytest.mark.parametrize("fails", [True, False])
def test_modes_weights_and_random_numbers_stay(fails):
    given = data("sst2", 12, 34)
    model = Drawing(built(roberta(40)).train(), fails)
    model.model.classifier.eval()
    modes = [module.training for module in model.modules()]
    weights = dict(model.named_parameters())
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(ValueError, match="of up to 34 tokens: it fails"):
            require_fit(model, given, device=CPU)
    else:
        require_fit(model, given, device=CPU)
    assert torch.get_rng_state().equal(state)
    assert [module.training for module in model.modules()] == modes
    assert all(value is weights[name] for name, value in model.named_parameters())
    assert len(model.seen) == (1 if fails else 2)
    assert not any(training for _, training, _ in model.seen)


def test_weights_are_tried_on_the_cpu_wherever_they_are(monkeypatch):
    model = built(roberta(40))
    away = copy.deepcopy(model).to("meta")
    tensors = [(*one.parameters(), *one.buffers()) for one in (away, model)]
    here = {id(there): tensor for there, tensor in zip(*tensors, strict=True)}
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: here[id(self)])
    require_fit(away, data("sst2", 12, 34), device=torch.device("meta"))
    assert all(value.is_meta for value in away.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_model_on_a_gpu_is_tried_on_the_cpu():
    device = torch.device("cuda")
    model = Drawing(built(roberta(34)).to(device), fails=False)
    with pytest.raises(ValueError, match=r"of up to 34 tokens: index .*out of "):
        require_fit(model, data("sst2", 12, 34), device=device)
    require_fit(model, data("sst2", 12, 32), device=device)
    assert {device for device, _, _ in model.seen} == {CPU}
    assert {value.device.type for value in model.parameters()} == {"cuda"}
    torch.cuda.synchronize()
