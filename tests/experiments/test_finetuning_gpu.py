"""Fine-tuning on a GPU, where whole steps are captured."""

import pytest
import torch
from runs import digits, recipe

from torchcram.experiments.finetuning import finetune
from torchcram.experiments.recipe.overrides import finetune_recipe, transfer_recipe
from torchcram.experiments.training.cuda_graph_steps import make_step
from torchcram.experiments.training.trainer import train
from torchcram.experiments.transfer import plan_transfers, read_source, run_transfer

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


def test_a_learning_rate_is_chosen_under_captured_steps(tmp_path):
    data, given = digits(), recipe(method="sgd", epochs=3)
    train(given, tmp_path / "run", data=data, seed=0, device=CUDA, make_step=make_step)
    (item,) = plan_transfers(
        [read_source(tmp_path / "run")],
        ["global:0.9"],
        {"digits": given},
        lrs=[1e-6, 0.1],
        out=tmp_path / "moved",
    )
    for _ in range(2):  # the second time nothing is trained
        done = run_transfer(item, data, device=CUDA, make_step=make_step)
        assert done.search.best.overrides == ("optimizer.lr=0.1",)
        assert done.finetuned.sparsity == pytest.approx(0.9, abs=0.03)
        assert done.seed_result.source.at == "global:0.9"
