"""Training steps of the recipes: one kernel at a time against CUDA graphs.

    python benchmarks/train.py [--steps N] [--rounds N] [--recipes NAME ...] [--compile]

Images are random and live on the device. A step takes in all there is: the batch with its
augmentation, both passes, selection, the update and the sums of the losses.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from timing import machine

from torchcram.experiments.data.images import ImageDataset, Images
from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.recipe.build import (
    build_batches,
    build_initial_model,
    build_optimizer,
    to_device,
)
from torchcram.experiments.training.cuda_graph_steps import make_step
from torchcram.experiments.training.steps import EagerStep, Step

RECIPES = ["cifar10/resnet20/sgd", "cifar10/resnet20/sam", "cifar10/resnet20/cram-plus-multi"]
SIZES = {"cifar10": 32, "cifar10-jpeg": 32, "tiny-imagenet-200": 64, "imagenet": 224}
CLASSES = {"cifar10": 10, "cifar10-jpeg": 10, "tiny-imagenet-200": 200, "imagenet": 1000}


def random_data(recipe: Recipe) -> ImageDataset:
    """Noise of the size and the classes of a data set."""
    size, classes = SIZES[recipe.task_name], CLASSES[recipe.task_name]
    count = 16 * recipe.train.batch_size
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, size, size, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    split = Images(images, labels)
    return ImageDataset(recipe.task_name, split, split, tuple(map(str, range(classes))))


def build(recipe: Recipe, *, graphs: bool, compiled: bool = False) -> Step:
    """Returns steps of a recipe on its own model."""
    device = torch.device("cuda")
    data = random_data(recipe)
    model = to_device(build_initial_model(recipe, classes=len(data.classes), seed=0), device)
    optimizer = build_optimizer(recipe, model, seed=0)
    batches = build_batches(recipe, data, train=True, device=device, seed=0)
    if graphs:
        return make_step(model, optimizer, batches, recipe.train, device, compiled=compiled)
    return EagerStep(model.train(), optimizer, batches, recipe.train, device)


def milliseconds(step: Step, count: int) -> float:
    """The mean time of a step out of `count` in a row."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    done = 0
    while done < count:
        step.start_epoch(0)
        for _ in range(min(16, count - done)):
            step.run()
            done += 1
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin) / count


def main() -> None:
    """Prints a line per recipe."""
    parser = argparse.ArgumentParser(description="Times training steps of recipes.")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile the model, too")
    arguments = parser.parse_args()
    print(machine(torch.device("cuda")), flush=True)
    title = "graphs, compiled" if arguments.compile else "graphs"
    print(f"{'ms per step':<44}{'eager':>10}{title:>18}{'ratio':>8}")
    for name in arguments.recipes:
        override = ["data.augment=crop-flip", "data.image_size=null"]
        recipe = load_recipe(name, override)
        eager = build(recipe, graphs=False)
        graphs = build(recipe, graphs=True, compiled=arguments.compile)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(arguments.rounds):  # in turns, so that both see the same machine
            for found, step in zip(times, (eager, graphs), strict=True):
                found.append(milliseconds(step, arguments.steps))
        one, other = map(statistics.median, times)
        print(f"{name:<44}{one:>10.2f}{other:>18.2f}{one / other:>7.1f}x", flush=True)


if __name__ == "__main__":
    main()
