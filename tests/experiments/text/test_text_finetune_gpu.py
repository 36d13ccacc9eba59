"""Pruning and sparse fine-tuning of texts on a GPU, where whole steps are captured."""

import pytest
import torch

from torchcram.experiments.evaluation.compressed_models import one_shot
from torchcram.experiments.finetuning import finetune
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.overrides import finetune_recipe
from torchcram.experiments.training.cuda_graph_steps import make_step
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.stop_policy import held_out_values
from torchcram.experiments.training.trainer import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CUDA = torch.device("cuda")
SETS = ["text.length=48", "text.stride=16", "train.batch_size=4", "optimizer.lr=0.01"]


def test_pruners_and_rounds_on_a_gpu(tmp_path, tiny, questions):
    given = load_recipe("squad/minilm-l6/adam", [f"model.name={tiny}", "train.epochs=2", *SETS])
    data, step = (
        given.build_task().load(questions),
        {"device": CUDA, "make_step": make_step},
    )
    trained = train(given, tmp_path / "run", data=data, seed=0, **step)
    targets = ["obs:m8@uniform:0.5", "wanda@nm:2:4", "sparsegpt@nm:2:4+int8"]
    found = one_shot(trained.model, given, data, targets, device=CUDA, seed=0)
    assert [one.sparsity for one in found] == pytest.approx([0.5] * 3, abs=0.05)
    assert all(one.seconds > 0 for one in found)
    on = finetune_recipe(given, "obs:m8@uniform:0.5", overrides=["optimizer.lr=0.01"])
    one = finetune(
        tmp_path / "run", "obs:m8@uniform:0.5", tmp_path / "on", recipe=on, data=data, **step
    )
    assert one.sparsity == pytest.approx(0.5, abs=0.01)
    assert len(held_out_values(tmp_path / "on")) >= 4


def test_captured_steps_learn_from_a_teacher_as_eager_ones_do(tmp_path, tiny, questions):
    given = load_recipe("squad/minilm-l6/adam", [f"model.name={tiny}", "train.epochs=2", *SETS])
    data = given.build_task().load(questions)
    train(given, tmp_path / "run", data=data, seed=0, device=CUDA)
    sets = ["optimizer.lr=0.001", "train.distillation.weight=1", "train.precision=fp32"]
    on = finetune_recipe(given, "uniform:0.5", overrides=sets)
    losses = []
    for how, name in ((make_step, "graphs"), (EagerStep, "eager")):
        out = tmp_path / name
        finetune(
            tmp_path / "run", "uniform:0.5", out, recipe=on, data=data, device=CUDA, make_step=how
        )
        losses.append(read_log(out)[0].loss)
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # dropout draws differ
