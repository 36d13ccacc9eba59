"""Fine-tuning on a GPU, where whole steps are captured."""

import pytest
import torch
from runs import digits, recipe

from torchcram.experiments.finetuning import finetune
from torchcram.experiments.recipe.overrides import finetune_recipe, transfer_recipe
from torchcram.experiments.training.cuda_graph_steps import make_step
from torchcram.experiments.training.trainer import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("method", ["sgd", "cram-plus-multi"])
def test_zeros_stay_under_captured_steps(tmp_path, method):
    data, given = digits(), recipe(method=method, epochs=3)
    run, step = tmp_path / "run", {"device": CUDA, "make_step": make_step}
    train(given, run, data=data, seed=0, **step)
    changes = ["cram.operators=[global:0.95]"] if method != "sgd" else []
    on = finetune_recipe(given, "global:0.9", epochs=3, overrides=changes)
    one = finetune(run, "global:0.9", tmp_path / "one", recipe=on, data=data, **step)
    assert one.sparsity == pytest.approx(0.9, abs=1e-3)
    to = transfer_recipe(given, "global:0.9", given, epochs=2)
    step["new_head"] = True
    other = finetune(run, "global:0.9", tmp_path / "other", recipe=to, data=data, **step)
    assert other.sparsity == pytest.approx(other.origin.sparsity, abs=1e-3)
