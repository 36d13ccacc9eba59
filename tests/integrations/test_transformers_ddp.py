"""Two processes with shares of a batch train as one that takes the union of their parts."""

import os
import socket

import pytest
import torch
from ranks import assert_same_on_all_ranks, run_ranks
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler

from torchcram import CrAM, split_batch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torchcram.integrations.transformers import CrAMTrainer  # noqa: E402

RANKS, SIZE, STEPS, ACCUMULATE = 2, 4, 3, 2
SHARES = (0.5, 0.75)


class InOrder(CrAMTrainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def decoder():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def texts():
    """Texts with other numbers of tokens that count in every row."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (RANKS * SIZE * ACCUMULATE * STEPS, 6), generator=generator)
    labels = tokens.clone()
    for row in range(len(labels)):
        labels[row, : row % 5] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def cram(model, base):
    return CrAM(model, base, ["global:0.5", "nm:2:4"], rho=0.1)


def by_hand():
    """Takes the steps in one process: a pass on the union of all parts of its micro-batches."""
    model = decoder()
    model.train()
    optimizer = cram(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = texts()
    for first in range(0, len(data), RANKS * SIZE * ACCUMULATE):
        rows = data[first : first + RANKS * SIZE * ACCUMULATE]
        batches = [rows[start : start + SIZE] for start in range(0, len(rows), SIZE)]
        collated = map(transformers.default_data_collator, batches)
        passes = zip(*(split_batch(batch, *SHARES) for batch in collated), strict=True)
        dense, compressed = (
            {key: torch.cat([part[key] for part in parts]) for key in parts[0]} for parts in passes
        )

        def backward(part):
            scores = model(input_ids=part["input_ids"]).logits[:, :-1]
            cross_entropy(scores.flatten(0, 1), part["labels"][:, 1:].flatten()).backward()

        optimizer.zero_grad()
        backward(dense)
        with optimizer.compressed():
            backward(compressed)
        optimizer.step()
    return model


def train_on_rank(rank, folder, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    model = decoder()
    fit = InOrder(
        model,
        arguments,
        train_dataset=texts(),
        cram=cram,
        dense_share=SHARES[0],
        compressed_share=SHARES[1],
    )
    fit.train()
    assert fit.accelerator.num_processes == RANKS
    assert fit.state.global_step == STEPS
    state = {name: value.detach() for name, value in model.named_parameters()}
    assert_same_on_all_ranks(state)
    expected = dict(by_hand().named_parameters())
    for name, value in state.items():
        torch.testing.assert_close(
            value,
            expected[name].detach(),
            rtol=1e-4,
            atol=1e-5,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def test_two_processes_train_as_one_on_the_union_of_their_parts(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run_ranks(RANKS, train_on_rank, str(tmp_path), port) == RANKS
