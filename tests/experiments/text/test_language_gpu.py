"""Language modelling on a GPU, where whole steps are captured."""

import pytest
import torch
from tiny_language import RECIPE, SETTINGS

from torchcram.experiments.evaluation.compressed_models import one_shot
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.training.cuda_graph_steps import GraphStep, make_step
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FEW = ["train.precision=fp32", "cram.operators=[uniform:0.5]"]


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("method", ["adamw", "cram-plus-multi", "cram-plus-multi-1x"])
def test_captured_steps_are_those_of_eager_ones(
    method, checkpointing, decoder, paragraphs, tmp_path
):
    sets = [f"model.name={decoder}", *SETTINGS, f"task.args.checkpointing={checkpointing}"]
    recipe = load_recipe(RECIPE.format(method), [*sets, *FEW[: 1 + (method != "adamw")]])
    data, kinds, logs = recipe.build_task().load(paragraphs), [], []

    def captured(*arguments, **options):
        kinds.append(make_step(*arguments, **options))
        return kinds[-1]

    for name, how in (("graphs", captured), ("eager", EagerStep)):
        train(recipe, tmp_path / name, data=data, seed=0, device=CUDA, make_step=how)
        logs.append(read_log(tmp_path / name)[-1])
    assert isinstance(kinds[0], GraphStep)
    assert logs[0].loss == pytest.approx(logs[1].loss, rel=1e-3)
    assert logs[0].accuracy == pytest.approx(logs[1].accuracy, rel=1e-3)


def test_a_gpu_and_a_cpu_agree_on_the_perplexity(decoder, paragraphs, tmp_path):
    sets = [f"model.name={decoder}", *SETTINGS, "compress.watch=null"]
    recipe = load_recipe(RECIPE.format("adamw"), [*sets, "train.precision=fp32"])
    data = recipe.build_task().load(paragraphs)
    trained = train(recipe, tmp_path / "run", data=data, seed=0, device=CUDA)
    targets = ["uniform:0.5", "nm:2:4", "wanda@uniform:0.5", "sparsegpt@nm:2:4"]
    here = one_shot(trained.model, recipe, data, targets, device=CUDA, seed=0)
    there = one_shot(trained.model.cpu(), recipe, data, targets[:2], device=CPU, seed=0)
    for one, other in zip(here[:2], there, strict=True):
        assert one.after == pytest.approx(other.after, rel=1e-3)
    assert all(one.sparsity == pytest.approx(0.5, abs=0.02) for one in here)
