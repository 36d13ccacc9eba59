from dataclasses import replace
from functools import partial

import pytest
import torch
from replayed import Replayed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import SGD, AdamW

from torchcram import CrAM
from torchcram.experiments.data.text.datasets import Texts
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.build import build_batches, build_initial_model, build_optimizer
from torchcram.experiments.training import cuda_graph_steps as graphs
from torchcram.experiments.training.cuda_graph_steps import (
    GraphStep,
    can_be_captured,
    make_step,
)
from torchcram.experiments.training.steps import EagerStep
from torchcram.optim import graphs as optim_graphs

CPU = torch.device("cpu")
LENGTHS = [8, 24, 16, 48, 40] * 8
SETS = ["text.length=48", "text.stride=16", "train.batch_size=4", "optimizer.lr=0.01"]


def of_many_lengths(data):
    """The dataset with as many tokens in each training sequence as `LENGTHS` says."""
    lengths = torch.tensor(LENGTHS)
    count = int(lengths.sum())
    train = Texts(
        tokens=data.train.tokens.repeat(-(-count // len(data.train.tokens)))[:count],
        kinds=torch.full((count,), 2, dtype=torch.uint8),
        ends=lengths.cumsum(0),
        labels=torch.stack((torch.zeros_like(lengths), lengths - 1), dim=1),
        examples=torch.arange(len(lengths)),
        offsets=torch.zeros(0, 2, dtype=torch.int32),
    )
    return replace(data, train=train)


@pytest.mark.parametrize(("method", "parts"), [("adam", 1), ("adam", 3), ("cram-plus-multi", 1)])
def test_steps_are_those_of_a_training_without_graphs(method, parts, tiny, questions, monkeypatch):
    monkeypatch.setattr(graphs, "StepGraphs", Replayed)
    recipe = load_recipe(f"squad/minilm-l6/{method}", [f"model.name={tiny}", *SETS])
    data = recipe.build_task().load(questions).in_parts(parts)
    ends = []
    for kind in (EagerStep, GraphStep):
        torch.manual_seed(0)
        model = build_initial_model(recipe, classes=2, seed=0).train()
        optimizer = build_optimizer(recipe, model, seed=0)
        batches = build_batches(recipe, data, train=True, device=CPU, seed=0)
        step = kind(model, optimizer, batches, recipe.train, CPU)
        torch.manual_seed(1)
        for epoch in range(2):
            step.start_epoch(epoch)
            for _ in range(len(batches)):
                step.run()
        ends.append((step.losses(), model.state_dict()))
    (losses, weights), (other_losses, other_weights) = ends
    assert losses == other_losses
    assert all(weights[name].equal(other_weights[name]) for name in weights)


def test_kept_masks_and_ranges_are_not_captured():
    model = torch.nn.Linear(4, 4)
    base = SGD(model.parameters(), 0.1)
    assert can_be_captured(base)
    assert can_be_captured(CrAM(model, base, "uniform:0.5"))
    assert not can_be_captured(CrAM(model, base, "uniform:0.5", mask_interval=2))
    assert not can_be_captured(CrAM(model, base, "uniform:0.2-0.5"))


def test_a_cpu_takes_plain_steps(tiny, questions):
    recipe = load_recipe("squad/minilm-l6/adam", [f"model.name={tiny}", *SETS])
    model = build_initial_model(recipe, classes=2, seed=0)
    batches = build_batches(
        recipe,
        recipe.build_task().load(questions),
        train=True,
        device=CPU,
        seed=0,
    )
    step = make_step(model, AdamW(model.parameters()), batches, recipe.train, CPU)
    assert type(step) is EagerStep


@pytest.mark.parametrize(("sets", "captured"), [([], True), (["cram.mask_interval=2"], False)])
def test_a_gpu_takes_captured_steps(sets, captured, tiny, questions, monkeypatch):
    recipe = load_recipe("squad/minilm-l6/cram-plus-multi", [f"model.name={tiny}", *SETS, *sets])
    data = recipe.build_task().load(questions)
    model = build_initial_model(recipe, classes=2, seed=0)
    batches = build_batches(recipe, data, train=True, device=CPU, seed=0)
    assert isinstance(batches, graphs.CapturableBatches)
    for kind in ("GraphStep", "EagerStep"):
        monkeypatch.setattr(
            graphs, kind, lambda *_, kind=kind, compiled=False, **__: (kind, compiled)
        )
    optimizer, device = build_optimizer(recipe, model, seed=0), torch.device("cuda")
    step = make_step(model, optimizer, batches, recipe.train, device, compiled=True)
    assert step == (("GraphStep", True) if captured else ("EagerStep", False))


def test_batches_of_all_lengths_share_one_compilation(tiny, questions, monkeypatch):
    monkeypatch.setattr(graphs, "StepGraphs", Replayed)
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    torch.compiler.reset()
    recipe = load_recipe("squad/minilm-l6/adam", [f"model.name={tiny}", *SETS])
    model = build_initial_model(recipe, classes=2, seed=0).train()
    data = of_many_lengths(recipe.build_task().load(questions))
    batches = build_batches(recipe, data, train=True, device=CPU, seed=0)
    assert len(set(batches.lengths)) > 1
    optimizer = build_optimizer(recipe, model, seed=0)
    step = GraphStep(model, optimizer, batches, recipe.train, CPU, compiled=True)
    step.start_epoch(0)
    for _ in range(len(batches)):
        step.run()
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["adam", "cram-plus-multi"])
def test_graphs_train_as_plain_steps_do(method, compiled, tiny, questions):
    assert graphs.StepGraphs is optim_graphs.StepGraphs
    device = torch.device("cuda")
    sets = [f"model.name={tiny}", *SETS, "train.precision=fp32"]
    recipe = load_recipe(f"squad/minilm-l6/{method}", sets)
    data = of_many_lengths(recipe.build_task().load(questions))
    ends = []
    for kind in (EagerStep, partial(GraphStep, compiled=compiled)):
        model = build_initial_model(recipe, classes=2, seed=0).to(device)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # graphs draw other numbers
        model.model.config.attention_probs_dropout_prob = 0.0
        optimizer = build_optimizer(recipe, model, seed=0)
        batches = build_batches(recipe, data, train=True, device=device, seed=0)
        step = kind(model.train(), optimizer, batches, recipe.train, device)
        step.start_epoch(0)
        for _ in range(len(batches)):
            step.run()
        ends.append(step.losses())
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
