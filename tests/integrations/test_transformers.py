"""The Trainer of Transformers takes the steps that a loop written by hand takes."""

from contextlib import nullcontext

import pytest
import torch
from nets import same, snapshot
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import SequentialSampler

from torchcram import C_SAM, CRAM, CRAM_PLUS, CrAM, split_batch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers import AutoModelForSequenceClassification as Classifier  # noqa: E402

from torchcram.integrations import transformers as integration  # noqa: E402
from torchcram.integrations.transformers import CrAMTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
OPERATORS = ("global:0.5", "nm:2:4")
WHOLE, HALF, HALVES = (1.0, 1.0), (1.0, 0.5), (0.5, 0.5)  # shares of a batch


class Recording(CrAMTrainer):
    """Takes the data in order, and remembers what it was asked to train on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.append(({**inputs}, num_items_in_batch))
        return super().training_step(model, inputs, num_items_in_batch)


def classifier(dropout=0.0):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    return Classifier.from_config(config)


def decoder():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
    )
    return AutoModelForCausalLM.from_config(config)


class Normed(nn.Module):
    """A net with batch norm and a mean loss, which records the sizes of its batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.rows = []

    def forward(self, input_ids, labels):
        self.rows.append(len(labels))
        loss = cross_entropy(self.net(input_ids[:, :4].float()), labels)
        return transformers.utils.ModelOutput(loss=loss)


def sentences(count=22):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 3} for row in tokens]


def texts(count=22):
    """Sentences of which some tokens do not count: other numbers of them in every batch."""
    found = []
    for place, sentence in enumerate(sentences(count)):
        labels = sentence["input_ids"].clone()
        labels[: place % 5] = -100
        found.append({"input_ids": sentence["input_ids"], "labels": labels})
    return found


def trainer(
    folder, model, data, rule=CRAM_PLUS, kind=Recording, shares=WHOLE, collator=None, **options
):
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    } | options
    arguments = transformers.TrainingArguments(
        str(folder),
        learning_rate=0.01,
        optim="adamw_torch",
        weight_decay=0.1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **({"save_strategy": "no"} | options),
    )
    return kind(
        model,
        arguments,
        train_dataset=data,
        data_collator=collator,
        cram=cram(rule),
        dense_share=shares[0],
        compressed_share=shares[1],
    )


def cram(rule=CRAM_PLUS, **options):
    return lambda model, base: CrAM(
        model, base, OPERATORS, rule=rule, rho=0.1, mask_interval=2, **options
    )


def by_hand(fit, model, *, rule=CRAM_PLUS, clip=0.0, autocast=nullcontext, shares=WHOLE):
    """Takes the steps that `fit` has taken, with its base optimizer, without its loop."""
    decays = fit.get_decay_parameter_names(model)
    groups = [
        [p for name, p in model.named_parameters() if (name in decays) == decay]
        for decay in (True, False)
    ]
    decayed = ({"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0})
    base = torch.optim.AdamW(decayed, lr=0.01)
    optimizer = cram(rule)(model, base)
    size = fit.args.gradient_accumulation_steps
    epoch = len(fit.seen) // int(fit.args.num_train_epochs)
    steps = [
        fit.seen[start + first : start + min(first + size, epoch)]
        for start in range(0, len(fit.seen), epoch)
        for first in range(0, epoch, size)
    ]

    scaled = fit.model_accepts_loss_kwargs

    def backward(step):
        for inputs, items in step:
            with autocast():
                loss = model(**inputs, **({"num_items_in_batch": items} if scaled else {})).loss
            (loss.float() / (1 if scaled else len(step))).backward()

    def backward_on_parts(parts):
        """Divides the sum of the losses of a pass by the number of its own terms."""
        if not scaled:
            return backward([(part, None) for part in parts])
        shifted = parts[0]["labels"].dim() == 2
        labels = [part["labels"][:, 1:] if shifted else part["labels"] for part in parts]
        count = sum(int((values != -100).sum()) for values in labels)
        for part, values in zip(parts, labels, strict=True):
            scores = model(input_ids=part["input_ids"]).logits
            scores = scores[:, :-1].flatten(0, 1) if shifted else scores
            (cross_entropy(scores, values.flatten(), reduction="sum") / count).backward()
        return None

    model.train()
    for step in steps:
        optimizer.zero_grad()
        if shares != WHOLE:
            halves = [parts_of(inputs, shares) for inputs, _ in step]
            passes = [[pair[number] for pair in halves] for number in range(2)]
        backward(step) if shares == WHOLE else backward_on_parts(passes[0])
        for _ in optimizer.rule.passes:
            with optimizer.compressed():
                backward(step) if shares == WHOLE else backward_on_parts(passes[1])
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return optimizer, len(steps)


def parts_of(inputs, shares):
    """The parts of a batch; a single row is in both."""
    return (inputs, inputs) if len(inputs["labels"]) == 1 else split_batch(dict(inputs), *shares)


@pytest.mark.parametrize(
    ("rule", "accumulate", "clip"),
    [(CRAM_PLUS, 1, 0.0), (CRAM_PLUS, 1, 0.5), (CRAM_PLUS, 4, 0.5), (C_SAM, 4, 0.0)],
)
def test_the_weights_are_those_of_a_loop_by_hand(tmp_path, rule, accumulate, clip):
    ours, theirs = classifier(), classifier()
    options = {"gradient_accumulation_steps": accumulate, "max_grad_norm": clip}
    fit = trainer(tmp_path, theirs, sentences(), rule, **options)
    fit.train()
    optimizer, steps = by_hand(fit, ours, rule=rule, clip=clip)
    assert same(snapshot(ours), snapshot(theirs))
    state = fit.optimizer.state_dict()["cram"]
    assert torch.equal(state["generator"], optimizer.state_dict()["cram"]["generator"])
    assert sum(state["uses"].values()) == steps == fit.state.global_step


def test_both_passes_normalise_by_the_items_of_the_whole_step(tmp_path):
    ours, theirs = decoder(), decoder()
    fit = trainer(tmp_path, theirs, texts(), gradient_accumulation_steps=4, max_grad_norm=0.5)
    fit.train()
    items = [int(items) for _, items in fit.seen]
    assert len(set(items)) > 1
    assert items[0] > max(int((inputs["labels"] != -100).sum()) for inputs, _ in fit.seen[:4])
    by_hand(fit, ours, clip=0.5)
    assert same(snapshot(ours), snapshot(theirs))


@pytest.mark.parametrize(
    ("model", "data", "rule", "accumulate", "shares"),
    [
        (classifier, sentences, CRAM_PLUS, 1, HALVES),
        (Normed, sentences, CRAM_PLUS, 4, HALF),
        (decoder, texts, CRAM_PLUS, 4, HALVES),
        (decoder, texts, C_SAM, 1, (0.75, 0.5)),
    ],
)
def test_each_pass_takes_the_mean_over_its_rows(tmp_path, model, data, rule, accumulate, shares):
    ours, theirs = model(), model()
    options = {"gradient_accumulation_steps": accumulate, "lr_scheduler_type": "constant"}
    count = 23 if model is Normed else 21  # a last row alone, which batch norm does not take
    fit = trainer(tmp_path, theirs, data(count), rule, shares=shares, **options)
    fit.train()
    by_hand(fit, ours, rule=rule, shares=shares)
    sizes = {len(inputs["labels"]) for inputs, _ in fit.seen}
    assert sizes == {4, count % 4}  # subclasses see the whole batches
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=1e-4, atol=1e-5)


def test_rows_without_labels_that_count_have_a_loss_of_zero(tmp_path):
    def masked_mean(outputs, labels, num_items_in_batch):
        losses = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten().clamp(0))
        return (losses * (labels != -100)).sum() / num_items_in_batch  # 0/0 would be NaN

    data = texts(4)
    for text in data[2:]:
        text["labels"] = torch.full_like(text["labels"], -100)
    model = decoder()
    fit = trainer(tmp_path, model, data, shares=HALVES, num_train_epochs=1)
    fit.compute_loss_func = masked_mean
    before = snapshot(model)
    fit.train()  # the pass at w~ has nothing to count
    assert not same(snapshot(model), before)


def test_statistics_and_logged_losses_are_of_the_dense_part(tmp_path):
    model, twin = Normed(), Normed()
    data = sentences(4)
    options = {"logging_steps": 1, "num_train_epochs": 1}
    fit = trainer(tmp_path, model, data, shares=HALVES, **options)
    fit.train()
    assert model.rows == [2, 2]
    first = torch.stack([row["input_ids"] for row in data[:2]])
    expected = twin(first, torch.stack([row["labels"] for row in data[:2]])).loss
    assert fit.state.log_history[0]["loss"] == pytest.approx(expected.item(), abs=1e-3)
    for name, value in twin.named_buffers():
        assert torch.equal(value, model.get_buffer(name)), name


@pytest.mark.parametrize("shares", [(0, 1), (1, 1.5), (float("nan"), 0.5)])
def test_shares_are_checked_at_construction(tmp_path, shares):
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got"):
        trainer(tmp_path, classifier(), sentences(), shares=shares)


def test_batches_that_cannot_be_split_are_refused_before_a_step(tmp_path):
    collate, model = transformers.default_data_collator, classifier()
    fit = trainer(tmp_path, model, sentences(4), shares=HALVES, num_train_epochs=1)
    before = snapshot(model)
    fit.data_collator = lambda rows: {**collate(rows), "position_ids": torch.arange(6)[None]}
    with pytest.raises(ValueError, match=r"cannot be split.*labels: 4; .*position_ids: 1\)"):
        fit.train()
    fit.data_collator = lambda rows: collate(rows[:1])
    with pytest.raises(ValueError, match="leave a pass without a sample in a batch of 1"):
        fit.train()
    assert same(snapshot(model), before)
    fit.data_collator = collate
    fit.train()
    twin = classifier()
    trainer(tmp_path, twin, sentences(4), shares=HALVES, num_train_epochs=1).train()
    assert same(snapshot(model), snapshot(twin))


@pytest.mark.filterwarnings("ignore:.*tf32.*")
def test_bf16_is_that_of_a_loop_by_hand(tmp_path):
    ours, theirs = decoder(), decoder()
    fit = trainer(tmp_path, theirs, texts(), gradient_accumulation_steps=2, bf16=True)
    with torch.backends.mkldnn.flags(enabled=False):  # it crashes some virtual machines
        fit.train()
        by_hand(fit, ours, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert same(snapshot(ours), snapshot(theirs))


@pytest.mark.parametrize("scale", [2.0**10, 2.0**120])  # the latter overflows
def test_a_scaler_does_not_change_the_step_or_skips_it(tmp_path, scale):
    ours, theirs = decoder(), decoder()
    start = snapshot(theirs)
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "num_train_epochs": 1}
    fit = trainer(tmp_path, theirs, texts(), CRAM, **options)
    fit.accelerator.scaler = GradScaler("cpu", init_scale=scale, growth_interval=1000)
    fit.train()
    if scale == 2.0**120:
        assert same(start, snapshot(theirs))
        assert fit.accelerator.scaler.get_scale() < scale
        return
    by_hand(fit, ours, rule=CRAM)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("shares", [WHOLE, HALVES])
def test_to_resume_equals_not_to_stop(tmp_path, shares):
    options = {
        "shares": shares,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "kind": CrAMTrainer,
    }
    whole, again = classifier(dropout=0.1), classifier(dropout=0.1)
    trainer(tmp_path, whole, sentences(), **options).train()
    torch.manual_seed(9)
    resumed = trainer(tmp_path, again, sentences(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 6
    assert same(snapshot(whole), snapshot(again))


def test_logged_losses_and_evaluation_are_of_the_dense_model(tmp_path):
    model = classifier()
    fit = trainer(tmp_path, model, sentences(4), logging_steps=1, num_train_epochs=1)
    with torch.no_grad():
        before = model.train()(**fit.get_train_dataloader().collate_fn(sentences(4))).loss
    fit.train()
    assert fit.state.log_history[0]["loss"] == pytest.approx(float(before), abs=1e-3)
    found = fit.evaluate(sentences(4))
    with torch.no_grad():
        after = model.eval()(**fit.get_train_dataloader().collate_fn(sentences(4))).loss
    assert found["eval_loss"] == pytest.approx(float(after), abs=1e-4)


def test_an_optimizer_of_the_user_is_wrapped_once(tmp_path):
    model = classifier()
    base = SGD(model.parameters(), lr=0.1)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    fit = CrAMTrainer(
        model, arguments, train_dataset=sentences(), cram=cram(), optimizers=(base, None)
    )
    for _ in range(2):
        fit.train()
        assert isinstance(fit.optimizer.optimizer, CrAM)
        assert fit.optimizer.optimizer.base is base


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_replaced_parameters_are_refused(tmp_path, name):
    fit = trainer(tmp_path, classifier(), sentences())
    setattr(fit, f"is_{name}_enabled", True)
    with pytest.raises(ValueError, match="replaces the parameters after"):
        fit.create_optimizer()


def test_processes_are_to_be_given_the_same(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(integration, "require_alike_everywhere", compared.append)
    fit = trainer(tmp_path, classifier(), sentences(8), num_train_epochs=2)
    fit.train()
    assert compared == [fit.optimizer.optimizer]
    fit.train()
    assert len(compared) == 2  # of every training


@pytest.mark.parametrize(
    ("adapters", "count", "search", "refused"),
    [
        (True, 2, None, True),
        (True, 2, True, True),
        (True, 2, False, False),
        (True, 1, None, False),
        (False, 2, True, False),
    ],
)
def test_a_search_for_unused_parameters_is_refused_with_adapters(
    tmp_path, monkeypatch, adapters, count, search, refused
):
    peft = pytest.importorskip("peft")
    from torchcram.integrations.peft import LoraCrAM

    config = peft.LoraConfig(r=2, target_modules=["query"])
    model = peft.get_peft_model(classifier(), config) if adapters else classifier()
    fit = trainer(tmp_path, model, sentences(), ddp_find_unused_parameters=search)
    kind = LoraCrAM if adapters else CrAM
    fit._cram = lambda model, base: kind(model, base, OPERATORS)
    monkeypatch.setattr(type(fit.args), "world_size", count)
    with (
        pytest.raises(ValueError, match="set ddp_find_unused_parameters to False")
        if refused
        else nullcontext()
    ):
        fit.create_optimizer()


def test_the_stock_trainer_is_refused(tmp_path):
    model = classifier()
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), OPERATORS)
    stock = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        ),
        train_dataset=[
            {"input_ids": torch.randint(20, (6,)), "labels": torch.tensor(1)} for _ in range(8)
        ],
        optimizers=(optimizer, None),
    )
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="CrAMTrainer in place of the Trainer"):
        stock.train()
    assert same(snapshot(model), before)


def test_a_function_that_returns_no_cram_is_refused(tmp_path):
    fit = trainer(tmp_path, classifier(), sentences())
    fit._cram = lambda _model, _base: None
    with pytest.raises(TypeError, match="a function that returns a CrAM, got NoneType"):
        fit.train()
